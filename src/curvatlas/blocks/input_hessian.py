r"""The Hessian of the loss with respect to a block's input, dense, and what each part adds to it.

Curvature travels backwards through a map z = f(x) as (THEORY 11)

    S_x = Jᵀ S_z J + Σ_o δ_z,o ∂²f_o          S_z = ∂²ℓ/∂z², δ_z = ∂ℓ/∂z:

the first term is *passed on*, the second *created here*. A sublayer y = norm(x + f(x)) or
y = x + f(norm(x)) is one such step; what it creates is split by where it comes from (the inner map
or the norm), what it passes on by the way it took (residual path, branch, or both).

Before the first attention layer (seen from the loss) S is token-diagonal and kept as (n, L, d, d);
attention couples the tokens of a sample, from there on S is (n, L·d, L·d).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.input_attention import attention_jacobian, attention_second
from curvatlas.blocks.losses import Loss, Seeds, resolve_loss
from curvatlas.blocks.normalization import norm_jacobian, norm_second
from curvatlas.blocks.products import LinearisedBlock
from curvatlas.blocks.products_attention import Attention
from curvatlas.blocks.products_feed_forward import FeedForward
from curvatlas.blocks.products_norm import Normalization
from curvatlas.blocks.products_sublayer import Sublayer
from curvatlas.blocks.structure import BlockSpec, Weights
from curvatlas.budget import available_bytes, readable
from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True, eq=False)
class SublayerCurvature(Result):
    """One step backwards: S before the sublayer, and where it comes from.

    Tensors are (n, L, d, d) while no attention couples the tokens, then (n, L·d, L·d).
    ``created_by`` and ``passed_by`` sum to ``created_here`` and ``passed_on``.
    """

    name: str  # "attention" or "ffn"
    total: Tensor
    passed_on: Tensor
    created_here: Tensor
    created_by: dict[str, Tensor]  # "attention" or "ffn", and the norm's name
    passed_by: dict[str, Tensor]  # "residual", "branch", "both"

    def __str__(self) -> str:
        size, part = float(self.total.norm()), float(self.created_here.norm())
        return f"{self.name}: |S| = {size:.3g}, created here {part:.3g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class InputHessian(Result):
    """∂²ℓ/∂x² of a block's input, (n, L·d, L·d), one matrix a sample.

    ``passed_on`` = J_blockᵀ S_out J_block; ``created_here`` is everything the block's own second
    derivatives add. ``sublayers`` in the order of the forward pass.
    """

    total: Tensor
    passed_on: Tensor
    created_here: Tensor
    sublayers: tuple[SublayerCurvature, ...]
    delta: Tensor  # ∂ℓ/∂x (n, L, d)

    def __str__(self) -> str:
        steps = "; ".join(str(step) for step in self.sublayers)
        return f"input Hessian |S| = {float(self.total.norm()):.3g} ({steps})"


def input_hessian(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    *,
    delta: Tensor,
    curvature: Tensor,
    mask: Tensor | None = None,
) -> InputHessian:
    """The input Hessian from the seeds at the block's output.

    x and ``delta`` (n, L, d); ``curvature`` S_out dense (n, L·d, L·d) or token-diagonal
    (n, L, d, d).
    """
    block = LinearisedBlock(spec, weights, x, mask)
    return pull_curvature(block, delta, curvature)


def loss_input_hessian(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    targets: Tensor,
    *,
    loss: str | Loss = "mse",
    mask: Tensor | None = None,
) -> InputHessian:
    """The input Hessian of loss(block(x), targets)."""
    block = LinearisedBlock(spec, weights, x, mask)
    seeds = resolve_loss(loss).seeds(block.output, targets)
    return pull_curvature(block, seeds.delta, output_curvature(block.output, seeds))


def output_curvature(output: Tensor, seeds: Seeds) -> Tensor:
    """Λ of a loss as (n, L, d, d), or (n, L·d, L·d) when it couples tokens."""
    n, length, d = output.shape
    if seeds.blocks is not None:
        return seeds.blocks(slice(None)).reshape(n, length, d, d)
    size = length * d
    basis = torch.eye(size, dtype=output.dtype, device=output.device)
    columns = seeds.product(basis.view(size, 1, length, d).expand(size, n, length, d))
    return columns.reshape(size, n, size).permute(1, 2, 0).contiguous()


def pull_curvature(block: LinearisedBlock, delta: Tensor, curvature: Tensor) -> InputHessian:
    """S at the input of a block that has not recorded an adjoint yet; see ``input_hessian``."""
    n, length, _ = block.output.shape
    _check(block.output, delta, curvature)
    _, delta_x = block.gradient(delta)
    total, passed = curvature, curvature
    steps: list[SublayerCurvature] = []
    for sublayer, name in zip(reversed(block.sublayers), _names(block), strict=True):
        step = _Step(sublayer, name, n, length)
        passed = step.through(passed)
        steps.append(step.curvature(total))
        total = steps[-1].total
    total, passed = _dense(total), _dense(passed)
    return InputHessian(
        total=total,
        passed_on=passed,
        created_here=total - passed,
        sublayers=tuple(reversed(steps)),
        delta=delta_x,
    )


class _Step:
    """One sublayer's Jacobians and second derivatives, token-wise or dense."""

    def __init__(self, sublayer: Sublayer, name: str, samples: int, length: int) -> None:
        self.name, self.norm, self.norm_first = name, sublayer.norm, sublayer.norm_first
        self.residual = sublayer.residual
        self.shape = (samples, length)
        inner = sublayer.inner
        if isinstance(inner, Attention):
            self.branch, self.bend = attention_jacobian(inner), attention_second(inner)
        else:
            self.branch, self.bend = self._feed_forward(inner)
        self.norm_slope: Tensor | None = None
        self.norm_bend: Tensor | None = None
        if self.norm is not None:
            self.norm_slope, self.norm_bend = self._norm(self.norm)
        if self.norm_first and self.norm_slope is not None:
            self.branch = _times(self.branch, self.norm_slope)

    def through(self, curvature: Tensor) -> Tensor:
        """Jᵀ S J of the whole sublayer."""
        return _sum(list(self._passed(self._before_residual(curvature)).values()))

    def curvature(self, curvature: Tensor) -> SublayerCurvature:
        """The step from S after the sublayer to S before it."""
        passed = self._passed(self._before_residual(curvature))
        created: dict[str, Tensor] = {}
        if self.norm_slope is None or not self.norm_first:
            created[self.name] = self.bend
        else:
            created[self.name] = _congruence(self.norm_slope, self.bend)
        if self.norm is not None and self.norm_bend is not None:
            bend = self.norm_bend
            if not self.norm_first:  # made after the branch: seen through it
                through = self._passed(bend)
                bend = _sum(list(through.values()))
            created[self.norm.name] = bend
        passed_on, created_here = _sum(list(passed.values())), _sum(list(created.values()))
        return SublayerCurvature(
            name=self.name,
            total=_sum([passed_on, created_here]),
            passed_on=passed_on,
            created_here=created_here,
            created_by=created,
            passed_by=passed,
        )

    def _before_residual(self, curvature: Tensor) -> Tensor:
        """S seen through the norm of a post-norm sublayer."""
        if self.norm_first or self.norm_slope is None:
            return curvature
        return _congruence(self.norm_slope, curvature)

    def _passed(self, curvature: Tensor) -> dict[str, Tensor]:
        """Jᵀ S J for J = I + B: by the residual path, by the branch, and by both."""
        branch = _congruence(self.branch, curvature)
        if not self.residual:
            return {"branch": branch}
        half = _times(curvature, self.branch)
        return {"residual": curvature, "branch": branch, "both": half + half.mT}

    def _norm(self, norm: Normalization) -> tuple[Tensor, Tensor]:
        """diag(γ) J and Ψ(γ δ) of every token (n, L, d, d)."""
        slope = norm_jacobian(norm.n, norm.inv_std, norm=norm.norm)
        assert norm.delta is not None
        delta = norm.delta
        if norm.weight is not None:
            slope = norm.weight.unsqueeze(-1) * slope
            delta = delta * norm.weight
        bend = norm_second(norm.n, norm.inv_std, delta, norm=norm.norm)
        d = slope.shape[-1]
        return slope.reshape(*self.shape, d, d), bend.view(*self.shape, d, d)

    def _feed_forward(self, inner: FeedForward) -> tuple[Tensor, Tensor]:
        """W_down D1 W_up and W_upᵀ (D2 t) W_up of every token (n, L, d, d)."""
        up, down, gate = inner.up.weight, inner.down.weight, inner.gate
        slope = (down * inner.slope_up.unsqueeze(1)) @ up  # (N, d, d)
        bend = torch.zeros_like(slope)
        if inner.bend_up is not None:
            bend = (up.T * inner.bend_up.unsqueeze(1)) @ up
        if gate is not None:
            assert inner.slope_gate is not None
            slope = slope + (down * inner.slope_gate.unsqueeze(1)) @ gate.weight
            if inner.bend_gate is not None:
                bend = bend + (gate.weight.T * inner.bend_gate.unsqueeze(1)) @ gate.weight
            if inner.bend_cross is not None:
                cross = (gate.weight.T * inner.bend_cross.unsqueeze(1)) @ up
                bend = bend + cross + cross.mT
        d = slope.shape[-1]
        return slope.view(*self.shape, d, d), bend.view(*self.shape, d, d)


def _names(block: LinearisedBlock) -> list[str]:
    return ["ffn", "attention"][-len(block.sublayers) :]


def _dense(matrix: Tensor) -> Tensor:
    """(n, L, d, d) → (n, L·d, L·d); dense ones as they are."""
    if matrix.ndim == 3:
        return matrix
    n, length, d, _ = matrix.shape
    full = matrix.new_zeros(n, length, d, length, d)
    rows = torch.arange(length, device=matrix.device)
    full[:, rows, :, rows] = matrix.transpose(0, 1)
    return full.view(n, length * d, length * d)


def _sum(matrices: list[Tensor]) -> Tensor:
    if len({m.ndim for m in matrices}) > 1:
        matrices = [_dense(m) for m in matrices]
    total = matrices[0]
    for matrix in matrices[1:]:
        total = total + matrix
    return total


def _times(left: Tensor, right: Tensor) -> Tensor:
    """A product of two maps, either token-wise (n, L, d, d) or dense (n, L·d, L·d)."""
    if left.ndim == right.ndim:
        return left @ right
    if right.ndim == 4:  # dense left: columns token by token
        n, length, d, _ = right.shape
        columns = left.view(n, length * d, length, d).transpose(1, 2)  # (n, l, Ld, d)
        return (columns @ right).transpose(1, 2).reshape(left.shape)
    n, length, d, _ = left.shape
    return (left @ right.view(n, length, d, length * d)).view(right.shape)


def _congruence(slope: Tensor, curvature: Tensor) -> Tensor:
    """Jᵀ S J."""
    return _times(slope.mT, _times(curvature, slope))


def _check(output: Tensor, delta: Tensor, curvature: Tensor) -> None:
    n, length, d = output.shape
    if delta.shape != output.shape:
        raise ValueError(
            f"delta must have the output's shape {tuple(output.shape)}, got {tuple(delta.shape)}."
        )
    shapes = ((n, length, d, d), (n, length * d, length * d))
    if tuple(curvature.shape) not in shapes:
        raise ValueError(
            f"the curvature at the output must be token-diagonal {shapes[0]} or dense {shapes[1]}, "
            f"got {tuple(curvature.shape)}."
        )
    if curvature.dtype != output.dtype or delta.dtype != output.dtype:
        raise TypeError(f"the block computes in {output.dtype}: convert delta and curvature to it.")
    needed = 12 * n * (length * d) ** 2 * output.element_size()
    if needed > available_bytes():
        raise MemoryError(
            f"the input Hessian of {n} samples with {length} × {d} entries needs about "
            f"{readable(needed)}, {readable(available_bytes())} are available: take fewer samples, "
            "or use products (BlockStack.linearise(..., include_input=True))."
        )
