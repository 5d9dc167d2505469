"""How much attention goes to the first token, by layer and head: the sinks the papers name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.errors import ProblemError
from curvatlas.precision import in_float64
from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class AttentionSinks(Result):
    """Mean attention on the first token over all queries but its own, and what uniform would be."""

    mass: Tensor  # (layers, heads), between 0 and 1
    uniform: float  # the same number if every query looked at all it may see alike

    @property
    def by_layer(self) -> Tensor:
        """(layers,), mean over the heads."""
        return self.mass.mean(1)

    def __str__(self) -> str:
        layers, heads = self.mass.shape
        strong = int((self.mass > 0.5).sum())
        return (
            f"first token's share of attention: {float(self.mass.mean()):.2f} on average "
            f"({self.uniform:.3f} if uniform), above a half in {strong} of {layers * heads} heads"
        )


def attention_sinks(model: nn.Module, inputs: Mapping[str, Any]) -> AttentionSinks:
    """Of a Hugging Face model on one batch of sequences without padding on the left.

    The weights are read from one forward pass with ``output_attentions`` (the eager kernel).
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise ProblemError(
            f"{type(model).__name__} does not give its attention weights: attention_sinks needs a "
            "Hugging Face model (output_attentions=True)."
        )
    before = config._attn_implementation
    try:
        config._attn_implementation = "eager"
        with torch.no_grad():
            found = model(**inputs, output_attentions=True).attentions
    finally:
        config._attn_implementation = before
    if not found or found[0] is None:
        raise ProblemError(f"{type(model).__name__} returned no attention weights.")
    length = found[0].shape[-1]
    if length < 2:
        raise ProblemError("a sequence of one token has no other to look at: give longer ones.")
    mass = torch.stack(
        [in_float64(w[:, :, 1:, 0]).mean((0, 2)) for w in found]
    )  # (B, H, L, L) each
    causal = not bool(found[0][:, :, 0, 1:].any())
    steps = torch.arange(2, length + 1, dtype=torch.float64)
    uniform = float((1 / steps).mean()) if causal else 1 / length
    return AttentionSinks(mass=mass.cpu(), uniform=uniform)
