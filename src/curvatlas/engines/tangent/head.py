r"""Between the last block and the loss: a norm, a pooling, a linear head; each optional.

    Z → γ ⊙ n(Z) + β → Σ_i a_i Z_i → Z Wᵀ + b

The head's weights are parameters like any other (``"norm_weight"``, ``"norm_bias"``,
``"head_weight"``, ``"head_bias"``), so the Hessian of a language model includes its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from curvatlas.engines.tangent.linear import BackwardPass, Buffers, Linear, stage_number, stand_in
from curvatlas.engines.tangent.norm import Normalization, NormTangent
from curvatlas.layers.structure import Norm

Pooling = Literal["mean", "first", "last"]
_POOLINGS = ("mean", "first", "last")


@dataclass(frozen=True, kw_only=True, eq=False)
class Readout:
    """Final norm, pooling and linear head of a stack, in this order; what is None is not there.

    ``weight`` (C, d), ``bias`` (C,); ``norm_weight`` and ``norm_bias`` (d,). With a pooling the
    stack's outputs are (n, 1, C): one prediction a sample. ``scale``: a number that the head's
    input is multiplied by (T5).
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    pooling: Pooling | None = None
    norm: Norm = "none"
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    eps: float = 1e-5
    scale: float = 1.0
    frozen_head: bool = False  # the head is part of the function, not of the parameters

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in _POOLINGS:
            raise ValueError(
                f"pooling must be one of {', '.join(_POOLINGS)} or None, got {self.pooling!r}."
            )
        if self.bias is not None and self.weight is None:
            raise ValueError("the head has a bias but no weight: give both or neither.")
        if self.weight is not None and self.weight.ndim != 2:
            raise ValueError(f"the head's weight must be (C, d), got {tuple(self.weight.shape)}.")

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters that are there, in flat order."""
        return {
            name: value
            for name, value in self.tensors.items()
            if not (self.frozen_head and name.startswith("head"))
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that are there, parameters or not."""
        named = {
            "norm_weight": self.norm_weight,
            "norm_bias": self.norm_bias,
            "head_weight": self.weight,
            "head_bias": self.bias,
        }
        return {name: value.detach() for name, value in named.items() if value is not None}


@dataclass
class ReadoutTangent:
    """What the backward pass needs of the forward pass."""

    output: Tensor | None  # (K, N', C)
    norm: NormTangent | None
    pooled_dot: Tensor | None  # (K, N', d)
    weights: Mapping[str, Tensor]


class LinearisedReadout:
    """A readout at the last block's tokens z (n·L, d)."""

    def __init__(self, readout: Readout, z: Tensor, *, samples: int) -> None:
        self.samples, self.pooling, self.scale = samples, readout.pooling, readout.scale
        self.length, self.weights = z.shape[0] // samples, readout.tensors
        _check(self.weights, z)
        self._key = stage_number()
        self.norm: Normalization | None = None
        if readout.norm != "none" or readout.norm_weight is not None:
            self.norm = Normalization("norm", self.weights, z, norm=readout.norm, eps=readout.eps)
            z = self.norm.value(Buffers(keep=False))
        pooled = self._pool(z.unsqueeze(0))[0]
        self.linear: Linear | None = None
        if readout.weight is not None:
            self.linear = Linear(["head"], self.weights)
        self._pooled = pooled
        flat = pooled if self.linear is None else self.linear.value(pooled)
        self.output = flat.view(samples, -1, flat.shape[-1])  # (n, L or 1, C or d)

    def attach(self, weights: Mapping[str, Tensor]) -> None:
        """Multiply with the head's matrix among these from now on."""
        if self.linear is not None:
            self.linear.attach(weights)

    def detach(self) -> None:
        """Let go of the head's matrix until ``attach`` brings it again."""
        if self.linear is not None:
            self.linear.detach()
        self.weights = {n: stand_in(w) if w.ndim > 1 else w for n, w in self.weights.items()}

    def give_output(self) -> Tensor:
        """The outputs, and forget them: products do not need them."""
        output = self.output
        del self.output
        return output

    def push(
        self, z_dot: Tensor | None, dots: Mapping[str, Tensor], space: Buffers
    ) -> ReadoutTangent:
        """The outputs' tangent (K, n·L or n, C)."""
        state: NormTangent | None = None
        moved = z_dot
        if self.norm is not None:
            moved, state = self.norm.push(moved, dots, space)
        pooled = None if moved is None else self._pool(moved)
        output = pooled
        if self.linear is not None:
            direction = next((t for t in (pooled, *dots.values()) if t is not None), None)
            if direction is not None:
                rows, classes = self._pooled.shape[0], self.linear.weight.shape[0]
                shape = (direction.shape[0], rows, classes)
                out = space.take(self._key + "out", *shape, like=self._pooled)
                output = self.linear.push(self._pooled, pooled, dots, out)
        return ReadoutTangent(output, state, pooled, dots)

    def pull(
        self, rate: Tensor | None, tangent: ReadoutTangent | None, backward: BackwardPass
    ) -> Tensor | None:
        """Rδ_z (K, n·L, d) from the outputs' Rδ; finds the weights' rates on the way."""
        if self.linear is not None:
            dots: Mapping[str, Tensor] = {} if tangent is None else tangent.weights
            pooled_dot = None if tangent is None else tangent.pooled_dot
            self.linear.rates(rate, self._pooled, pooled_dot, backward)
            direction = next((t for t in (rate, *dots.values()) if t is not None), None)
            if direction is not None:
                shape = (direction.shape[0], *self._pooled.shape)
                out = backward.space.take("readout.x", *shape, like=self._pooled)
                rate = out if self.linear.pull(rate, dots, out) else None
        if rate is not None:
            rate = self._spread(rate)
        if self.norm is None:
            return rate
        return self.norm.pull(rate, None if tangent is None else tangent.norm, backward)

    def _pool(self, tokens: Tensor) -> Tensor:
        """(K, n·L, d) → (K, n, d), or unchanged without pooling; times the scale."""
        if self.scale != 1.0:
            tokens = tokens * self.scale
        if self.pooling is None:
            return tokens
        parts = tokens.view(tokens.shape[0], self.samples, self.length, -1)
        if self.pooling == "mean":
            return parts.mean(2)
        return parts[:, :, 0 if self.pooling == "first" else -1].contiguous()

    def _spread(self, pooled: Tensor) -> Tensor:
        """The adjoint of ``_pool``."""
        if self.scale != 1.0:
            pooled = pooled * self.scale
        if self.pooling is None:
            return pooled
        k, n, d = pooled.shape
        if self.pooling == "mean":
            shared = (pooled / self.length).unsqueeze(2)
            return shared.expand(k, n, self.length, d).reshape(k, -1, d)
        tokens = pooled.new_zeros(k, n, self.length, d)
        tokens[:, :, 0 if self.pooling == "first" else -1] = pooled
        return tokens.view(k, -1, d)


def _check(weights: Mapping[str, Tensor], z: Tensor) -> None:
    for name, weight in weights.items():
        if weight.dtype != z.dtype or weight.device != z.device:
            raise TypeError(
                f"the readout's {name} is {weight.dtype} on {weight.device}, the blocks compute in "
                f"{z.dtype} on {z.device}: convert one of them."
            )
        if name != "head_bias" and weight.shape[-1] != z.shape[-1]:
            raise ValueError(
                f"the readout's {name} has width {weight.shape[-1]}, the blocks {z.shape[-1]}."
            )
    if "head_bias" in weights and weights["head_bias"].shape != weights["head_weight"].shape[:1]:
        raise ValueError("the head's bias must have one entry for each row of its weight.")
