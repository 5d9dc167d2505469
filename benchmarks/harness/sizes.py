"""Models of chosen sizes with random weights."""

from __future__ import annotations

from typing import Any


def smollm2_shaped() -> Any:
    """A Llama with the shape of SmolLM2-135M (134.5 M parameters): its logits, nothing else."""
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LlamaForCausalLM(config)

        def forward(self, tokens: Any) -> Any:
            return self.inner(input_ids=tokens, use_cache=False).logits

    return Logits().eval()
