"""Random blocks for sweeps: every option mixed, scales over two decades."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from curvatlas.blocks.structure import BlockSpec
from curvatlas.theory import reference

T = TypeVar("T")
KINDS = ("attention", "post-norm", "pre-norm")


@dataclass(frozen=True)
class Case:
    """A block at one batch: x, target (n, L, d) (or class indices) under ``loss``."""

    spec: BlockSpec
    weights: dict[str, Tensor]
    x: Tensor
    target: Tensor
    loss: str

    def true_hessian(self) -> Tensor:
        weights = reference.tracked(self.weights)
        z = reference.block_output(self.spec, weights, self.x)
        value = reference.loss_of(self.loss, self.target)(z)
        return reference.hessian(value, list(weights.values()))


def draw_case(generator: torch.Generator, kind: str, *, small: bool = False) -> Case:
    """One random case; ``small`` keeps to a handful of numbers, for an adversary."""

    def pick(options: Sequence[T]) -> T:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    def between(low: float, high: float) -> float:
        return low * math.exp(math.log(high / low) * float(torch.rand(1, generator=generator)))

    heads = pick((1, 2)) if small else pick((1, 1, 2, 3))
    d = pick((2, 3)) if small else pick((4, 5, 6))
    bare = kind == "attention"
    spec = BlockSpec(
        d_model=d,
        n_heads=heads,
        d_k=pick((1, 2)) if small else pick((1, 2, 4)),
        d_v=d if heads == 1 else pick((1, 2)),
        d_ff=None if bare else (3 if small else pick((5, 8))),
        norm=pick(("layer", "layer", "rms")),
        norm_first=kind == "pre-norm",
        activation=pick(("gelu", "silu", "gelu_tanh") if small else ("relu", "gelu", "silu")),
        gated=pick((False, False, True)),
        eps=0.1 if small else 1e-5,  # d = 2 without ε normalises every token to (±1, ∓1)
        causal=pick((False, False, True)),
        residual=not bare,
    )
    weights = reference.draw_weights(
        spec, generator, scale=between(0.3, 3.0), bias=pick((False, True))
    )
    n, length = (1, pick((2, 3))) if small else (pick((1, 1, 2)), pick((2, 4, 6, 8)))
    x = between(0.1, 3.0) * torch.randn(n, length, d, generator=generator, dtype=torch.float64)
    loss = pick(("mse", "mse", "cross_entropy"))
    target = torch.randn(n, length, d, generator=generator, dtype=torch.float64)
    if loss == "cross_entropy":
        target = torch.randint(d, (n, length), generator=generator)
    return Case(spec, weights, x, target, loss)
