r"""A normalisation y = γ ⊙ n(x) + β, its tangent and its adjoint's tangent (derivations §11).

    ṅ = J ẋ,   ẏ = γ ⊙ ṅ + γ̇ ⊙ n + β̇
    δ_x = J(γ ⊙ δ_y)
    R δ_x = J u + Ψ(γ ⊙ δ_y) ẋ,   u = γ ⊙ Rδ_y + γ̇ ⊙ δ_y
    R ∂ℓ/∂γ = Σ_i (n ⊙ Rδ_y + ṅ ⊙ δ_y),   R ∂ℓ/∂β = Σ_i Rδ_y

With J and Ψ of derivations §5, Jδ·ẋ = δ·ṅ, everything over one common factor 1/σ, b = n·γδ_y and
c = −(n·ẋ)/(dσ):

    R δ_x = { C (u + c γ ⊙ δ_y) − [ n (n·u + γδ_y·ṅ + c b) + ṅ b ]/d } / σ,

where n·u = n·γRδ_y + (n ⊙ δ_y)·γ̇.

``None`` is zero. The functions of n and 1/σ below leave γ and β to the caller: for y = γ ⊙ n + β
the Jacobian is diag(γ) J and the second derivative contracted with δ is Ψ(γ ⊙ δ). RMSNorm has C = I
and no mean; ``norm="none"`` is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.engines.tangent.linear import BackwardPass, Buffers, stage_number
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import Norm


@dataclass
class NormTangent:
    """What the backward pass needs of the forward pass, for K directions."""

    n_dot: Tensor | None  # ṅ (K, N, d)
    turn: Tensor | None  # c (K, N, 1)
    weight_dot: Tensor | None  # γ̇ (K, d)
    bias_dot: Tensor | None  # β̇ (K, d)


_STILL = NormTangent(None, None, None, None)


class Normalization:
    """One norm at its input x (N, d); ``name`` is the prefix of its weights."""

    def __init__(
        self, name: str, weights: Mapping[str, Tensor], x: Tensor, *, norm: Norm, eps: float
    ) -> None:
        self.name, self.norm, self._key = name, norm, stage_number()
        self.weight_name, self.bias_name = f"{name}_weight", f"{name}_bias"
        self.weight, self.bias = weights.get(self.weight_name), weights.get(self.bias_name)
        self.n, self.inv_std = normalize(x, eps=eps, norm=norm)
        self._share = self.inv_std * (-1.0 / self.n.shape[-1])  # −1/(dσ) (N, 1)
        self.delta: Tensor | None = None  # δ_y (N, d)
        self._along: Tensor | None = None  # b = n·(γ δ_y) (N, 1)
        self._shared_along: Tensor | None = None  # −b/(dσ) (N, 1)

    def value(self, space: Buffers) -> Tensor:
        """y (N, d); formed from n whenever it is needed, cheaper than keeping both."""
        if self.weight is None and self.bias is None:
            return self.n
        y = space.take("norm.value", *self.n.shape, like=self.n)
        if self.weight is None:
            return torch.add(self.n, self.bias, out=y)  # type: ignore[arg-type]
        if self.bias is None:
            return torch.mul(self.n, self.weight, out=y)
        return torch.addcmul(self.bias, self.n, self.weight, out=y)

    def push(
        self, x_dot: Tensor | None, dots: Mapping[str, Tensor], space: Buffers
    ) -> tuple[Tensor | None, NormTangent]:
        """ẏ (K, N, d) and what ``pull`` needs."""
        n_dot, turn = self._push_normalized(x_dot, space)
        weight_dot, bias_dot = dots.get(self.weight_name), dots.get(self.bias_name)
        state = NormTangent(n_dot, turn, weight_dot, bias_dot)
        return self.tangent(state, space), state

    def tangent(self, state: NormTangent, space: Buffers) -> Tensor | None:
        """ẏ = γ ⊙ ṅ + γ̇ ⊙ n + β̇, formed again on the backward pass like ``value``."""
        n_dot, weight_dot, bias_dot = state.n_dot, state.weight_dot, state.bias_dot
        if n_dot is not None and self.weight is None and weight_dot is None and bias_dot is None:
            return n_dot
        direction = next((t for t in (n_dot, weight_dot, bias_dot) if t is not None), None)
        if direction is None:
            return None
        y = space.take(self.name + ".y", direction.shape[0], *self.n.shape, like=self.n)
        gain = None if weight_dot is None else weight_dot.unsqueeze(1)
        shift = None if bias_dot is None else bias_dot.unsqueeze(1)
        if gain is None and shift is None:
            assert n_dot is not None
            assert self.weight is not None
            return torch.mul(n_dot, self.weight, out=y)
        if gain is None:
            y.copy_(shift.expand_as(y))  # type: ignore[union-attr]
        elif shift is None:
            torch.mul(self.n, gain, out=y)
        else:
            torch.addcmul(shift, self.n, gain, out=y)
        if n_dot is not None:
            y.add_(n_dot) if self.weight is None else y.addcmul_(n_dot, self.weight)
        return y

    def pull(
        self, rate: Tensor | None, tangent: NormTangent | None, backward: BackwardPass
    ) -> Tensor | None:
        """Rδ_x (K, N, d) from Rδ_y; the tangent adds the second-order terms. Finds γ and β too."""
        state = tangent if tangent is not None and self.delta is not None else _STILL
        first = next((t for t in (rate, state.n_dot, state.weight_dot) if t is not None), None)
        if first is None:
            return None
        shape = (first.shape[0], *self.n.shape)
        if self.bias_name in backward.wanted and rate is not None:
            backward.sums((self.bias_name,), (shape[-1],), rate)
        scratch = backward.space.take("norm.scratch", *shape, like=self.n)
        crossed = self._crossed(rate, state, scratch)
        if self.weight_name in backward.wanted and crossed is not None:
            backward.sums((self.weight_name,), (shape[-1],), crossed)
        along = None if crossed is None else self._row_sums(crossed)
        pulled = backward.space.take(f"{self.name}.pulled{backward.turn}", *shape, like=self.n)
        if backward.record:
            assert rate is not None
            assert along is not None
            self.delta, self._along = rate[0], along[0].clone()
            self._shared_along = self._along * self._share
        return self._through_jacobian(rate, state, along, pulled, scratch)

    def _push_normalized(
        self, x_dot: Tensor | None, space: Buffers
    ) -> tuple[Tensor | None, Tensor | None]:
        """ṅ = (Cẋ − n (n·ẋ)/d)/σ and c = −(n·ẋ)/(dσ)."""
        if x_dot is None:
            return None, None
        n_dot = space.take(self._key + "n", *x_dot.shape, like=self.n)
        if self.norm == "none":  # a copy: the caller's buffer does not live until the backward pass
            return n_dot.copy_(x_dot), None
        scratch = space.take("norm.scratch", *x_dot.shape, like=self.n)
        turn = torch.mul(x_dot, self.n, out=scratch).sum(-1, keepdim=True).mul_(self._share)
        if self.norm == "layer":
            shift = x_dot.sum(-1, keepdim=True).mul_(self._share)
            _scaled_and_shifted(x_dot, self.inv_std, shift, n_dot)
        else:
            torch.mul(x_dot, self.inv_std, out=n_dot)
        return n_dot.addcmul_(self.n, turn), turn

    def _crossed(self, rate: Tensor | None, state: NormTangent, out: Tensor) -> Tensor | None:
        """n ⊙ Rδ_y + ṅ ⊙ δ_y: its token sum is γ's rate, its product with γ the row sums."""
        if rate is not None:
            torch.mul(rate, self.n, out=out)
        if state.n_dot is not None:
            assert self.delta is not None
            if rate is None:
                torch.mul(state.n_dot, self.delta, out=out)
            else:
                out.addcmul_(state.n_dot, self.delta)
        return None if rate is None and state.n_dot is None else out

    def _row_sums(self, crossed: Tensor) -> Tensor:
        """γ · crossed (K, N, 1)."""
        if self.weight is None:
            return crossed.sum(-1, keepdim=True)
        return (crossed @ self.weight).unsqueeze(-1)

    def _through_jacobian(
        self,
        rate: Tensor | None,
        state: NormTangent,
        along: Tensor | None,
        out: Tensor,
        scratch: Tensor,
    ) -> Tensor:
        """R δ_x of the module's last equation, written to ``out``."""
        turn = state.turn
        if turn is not None:
            assert self.delta is not None
            assert self._along is not None
            along = turn * self._along if along is None else along.addcmul_(turn, self._along)
            if rate is None:
                torch.mul(self.delta, turn, out=out)
            else:
                torch.addcmul(rate, self.delta, turn, out=out)
        elif rate is not None and self.weight is None:
            out.copy_(rate)
        elif rate is None:
            out.zero_()
        if self.weight is not None and (rate is not None or turn is not None):
            torch.mul(out if turn is not None else rate, self.weight, out=out)  # type: ignore[arg-type]
        if state.weight_dot is not None:
            assert self.delta is not None
            out.addcmul_(self.delta, state.weight_dot.unsqueeze(1))
            crossed = torch.mul(self.n, self.delta, out=scratch[0])
            turned = torch.mm(state.weight_dot, crossed.T).unsqueeze(-1)
            along = turned if along is None else along.add_(turned)
        if self.norm == "none":
            return out
        if self.norm == "layer":
            shift = out.sum(-1, keepdim=True).mul_(self._share)
            _scaled_and_shifted(out, self.inv_std, shift, out)
        else:
            out *= self.inv_std
        if along is not None:
            out.addcmul_(self.n, along.mul_(self._share))
        if state.n_dot is not None:
            assert self._shared_along is not None
            out.addcmul_(state.n_dot, self._shared_along)
        return out


def _scaled_and_shifted(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
    """out = scale x + shift with one number a token each.

    Two calls: addcmul with two factors that do not vary along the last axis is not vectorised (32
    against 12 µs for 512 × 128 in float32).
    """
    torch.mul(x, scale, out=out).add_(shift)
