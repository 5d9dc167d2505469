"""The first token's share of attention, on Hugging Face models."""

from __future__ import annotations

import pytest
import torch

from curvatlas.analysis.atlas.attention import attention_sinks
from curvatlas.errors import ProblemError

transformers = pytest.importorskip("transformers")


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_implementation="sdpa"
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_weights_without_preference_are_uniform() -> None:
    model = gpt2()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.zero_()
    found = attention_sinks(model, {"input_ids": torch.randint(0, 11, (3, 6))})
    assert found.mass.shape == (2, 2)
    torch.testing.assert_close(found.mass, torch.full((2, 2), found.uniform).double())
    assert found.uniform == pytest.approx(sum(1 / n for n in range(2, 7)) / 5)
    assert model.config._attn_implementation == "sdpa"


def test_the_share_is_that_of_the_eager_weights() -> None:
    model = gpt2()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(60)  # heads with a will of their own
    inputs = {"input_ids": torch.randint(0, 11, (2, 5))}
    found = attention_sinks(model, inputs)
    model.set_attn_implementation("eager")
    second = model(**inputs, output_attentions=True).attentions[1].detach()
    want = sum(second[b, 0, i, 0] for b in range(2) for i in range(1, 5)) / 8
    assert float(found.mass[1, 0]) == pytest.approx(float(want), rel=1e-5)
    assert abs(float(want) - found.uniform) > 0.01
    assert "heads" in str(found)


def test_models_without_weights_to_read_are_refused() -> None:
    with pytest.raises(ProblemError, match="Hugging Face"):
        attention_sinks(torch.nn.Linear(2, 2), {})
    with pytest.raises(ProblemError, match="one token"):
        attention_sinks(gpt2(), {"input_ids": torch.tensor([[1]])})
