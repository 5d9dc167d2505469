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

from curvatlas.budget import available_bytes, readable
from curvatlas.engines.tangent.attention import Attention
from curvatlas.engines.tangent.block import LinearisedBlock, Sublayer
from curvatlas.engines.tangent.feed_forward import FeedForward
from curvatlas.engines.tangent.head import LinearisedReadout
from curvatlas.engines.tangent.linear import Way, Workspace
from curvatlas.engines.tangent.losses import Loss, Seeds, resolve_loss
from curvatlas.engines.tangent.norm import Normalization, norm_jacobian, norm_second
from curvatlas.engines.tangent.stack import BlockStack, with_sample_axis
from curvatlas.engines.tangent.structure import BlockSpec, Weights
from curvatlas.results import Result

# -------------------------------------------------------------------------------------------------
# Attention as a function of its input: dense Jacobian and second derivative (THEORY 11).
#
# For one head with rotated projections W_Q^i = R_i W_Q and W_K^j = R_j W_K (R = I without rotary
# positions), p_ij = W_K^jᵀ q_i, t_i = W_Vᵀ τ_i, the adjoint weights w and c_ij = w_ij(k_j − κ_i) −
# A_ij ν_i, the blocks (j, l) of a sample's L d × L d matrices are sums over heads of
#
#     J[i,j]  = W_O { δ_ij s Ĝ_i W_Q^i + s A_ij (v_j − o_i) p_ijᵀ + A_ij W_V }
#
#     C       = Σ δ·∂²F:
#       qq      δ_ij s² W_Q^iᵀ T_KK,i W_Q^i
#       kq, vq  (j, i) and its transpose (i, j):
#               s w_ij W_K^jᵀ W_Q^i + s² p_ij (W_Q^iᵀ c_ij)ᵀ + s A_ij t_i (W_Q^iᵀ (k_j − κ_i))ᵀ
#       kk      (j, l): s² Σ_i p_ij p_ilᵀ (δ_jl w_ij − w_ij A_il − A_ij w_il)
#       vk      (j, l) and its transpose (l, j): s Σ_i t_i p_ilᵀ A_ij (δ_jl − A_il)
#
# Without softmax w_ij and A_ij are their values on the allowed positions, κ = o = 0 inside the
# brackets, and only the terms linear in each of q, k, v remain.
# -------------------------------------------------------------------------------------------------


@dataclass
class _Head:
    """One head of all samples: n samples, L tokens."""

    A: Tensor  # (n, L, L)
    w: Tensor  # (n, L, L), zeros when no adjoint is recorded
    pattern: Tensor  # A with softmax, the allowed 0/1 pattern without
    q: Tensor  # (n, L, dk), rotated
    k: Tensor  # (n, L, dk), rotated
    v: Tensor  # (n, L, dv)
    tau: Tensor  # (n, L, dv)
    W_Q: Tensor  # (L, dk, d), rotated
    W_K: Tensor  # (L, dk, d), rotated
    W_V: Tensor  # (dv, d)
    W_O: Tensor | None  # (d, dv)
    s: float
    softmax: bool

    @property
    def kappa(self) -> Tensor:
        """Mean key of each row (n, L, 1, dk); zero without softmax."""
        mean = self.A @ self.k if self.softmax else torch.zeros_like(self.k)
        return mean.unsqueeze(2)

    @property
    def centred_keys(self) -> Tensor:
        """k_j − κ_i (n, i, j, dk)."""
        return self.k.unsqueeze(1) - self.kappa

    @property
    def p(self) -> Tensor:
        """W_K^jᵀ q_i (n, i, j, d)."""
        return torch.einsum("nip,jpd->nijd", self.q, self.W_K)

    def jacobian(self) -> Tensor:
        """∂o_i/∂x_j without W_O (n, i, dv, j, d)."""
        length = self.q.shape[1]
        mean = self.A @ self.v if self.softmax else torch.zeros_like(self.v)
        centred = self.v.unsqueeze(1) - mean.unsqueeze(2)  # v_j − o_i (n, i, j, dv)
        weighted = self.pattern.unsqueeze(-1) * centred
        result = torch.einsum("nijo,nijd->niojd", self.s * weighted, self.p)
        result += torch.einsum("nij,od->niojd", self.A, self.W_V)
        by_query = torch.einsum("nijo,nijp->niop", weighted, self.centred_keys)  # Ĝ
        own = self.s * torch.einsum("niop,ipd->niod", by_query, self.W_Q)
        rows = torch.arange(length, device=result.device)
        result[:, rows, :, rows] += own.transpose(0, 1)
        return result

    def second(self) -> Tensor:
        """Σ_i τ_i·∂²o_i as a matrix of the inputs (n, L, d, L, d)."""
        p, s = self.p, self.s
        t = self.tau @ self.W_V  # (n, i, d)
        n, length, d = t.shape
        rows = torch.arange(length, device=t.device)
        keys = self.centred_keys
        turned_keys = torch.einsum("nijp,ipd->nijd", keys, self.W_Q)
        half = torch.einsum("nij,jpa,ipb->njaib", s * self.w, self.W_K, self.W_Q)
        y = s * self.pattern.unsqueeze(-1) * turned_keys
        half += torch.einsum("nia,nijb->njaib", t, y)
        spread = (s * self.pattern).unsqueeze(-1) * t.unsqueeze(2)  # s A_ij t_i (n, i, j, d)
        diagonal = torch.einsum("nija,nijb->njab", spread, p)
        if self.softmax:
            means = torch.einsum("nij,njp->nip", self.w, self.k)  # ν
            c = self.w.unsqueeze(-1) * keys - self.A.unsqueeze(-1) * means.unsqueeze(2)
            turned = torch.einsum("nijp,ipd->nijd", c, self.W_Q)
            half += torch.einsum("nija,nijb->njaib", s * s * p, turned)
            shared = (self.A.unsqueeze(-1) * p).view(n, length, length * d)
            pairs = spread + (s * s) * self.w.unsqueeze(-1) * p
            pairs = pairs.view(n, length, length * d).mT @ shared
            half -= pairs.view(n, length, d, length, d)
            own = torch.einsum("nij,nijp,nijq->nipq", self.w, keys, keys)  # T_KK
            block = torch.einsum("ipa,nipq,iqb->niab", s * s * self.W_Q, own, self.W_Q)
            weighted = (s * s) * self.w.unsqueeze(-1) * p
            block += torch.einsum("nija,nijb->njab", weighted, p)
            diagonal = diagonal + 0.5 * block  # symmetric: half of it before the transpose
        half[:, rows, :, rows] += diagonal.transpose(0, 1)
        return half + half.permute(0, 3, 4, 1, 2)


def _heads(attention: Attention) -> list[_Head]:
    spec, core = attention.spec, attention.core
    n, length, groups = attention.samples, attention.length, spec.kv_heads
    d = spec.d_model
    repeats = spec.n_heads // groups

    def by_head(rows: Tensor) -> Tensor:
        return rows.reshape(n, groups, repeats, length, -1)

    A, q = by_head(core.A), by_head(core.q.mT)
    w, tau = torch.zeros_like(A), torch.zeros_like(by_head(core.value().mT))
    if core.delta is not None:
        w, tau = by_head(core.adjoint()), by_head(core.delta.mT)
    k = core.k.mT.reshape(n, groups, length, -1)
    v = core.v.mT.reshape(n, groups, length, -1)
    pattern = A
    if not spec.softmax:
        allowed = core.A.new_ones(()) if core.allowed is None else core.allowed
        pattern = by_head(allowed.expand(core.A.shape).contiguous())
    output = None if attention.output is None else attention.output.weight
    heads = []
    for h in range(spec.n_heads):
        g, r = divmod(h, repeats)
        heads.append(
            _Head(
                A=A[:, g, r],
                w=w[:, g, r],
                pattern=pattern[:, g, r],
                q=q[:, g, r],
                k=k[:, g],
                v=v[:, g],
                tau=tau[:, g, r],
                W_Q=_rotated(attention, "query", h),
                W_K=_rotated(attention, "key", g),
                W_V=attention.inputs["value"].weight.reshape(groups, -1, d)[g],
                W_O=None if output is None else output.reshape(d, spec.n_heads, -1)[:, h],
                s=spec.logit_scale,
                softmax=spec.softmax,
            )
        )
    return heads


def _rotated(attention: Attention, name: str, head: int) -> Tensor:
    """R_i W of one head (L, dk, d)."""
    heads = attention.spec.n_heads if name == "query" else attention.spec.kv_heads
    weight = attention.inputs[name].weight
    weight = weight.reshape(heads, -1, weight.shape[1])[head]  # (dk, d)
    everywhere = weight.expand(attention.length, *weight.shape)
    if attention.rotation is None:
        return everywhere
    # the rotation acts on the last axis at each position: (d, L, dk)
    return attention.rotation.apply(everywhere.permute(2, 0, 1)).permute(1, 2, 0)


def attention_jacobian(attention: Attention) -> Tensor:
    """∂F/∂x of every sample (n, L·d, L·d), rows the output."""
    total: Tensor | None = None
    for head in _heads(attention):
        part = head.jacobian()
        if head.W_O is not None:
            part = torch.einsum("co,niojd->nicjd", head.W_O, part)
        total = part if total is None else total.add_(part)
    assert total is not None
    n, length, d = total.shape[0], total.shape[1], total.shape[2]
    return total.reshape(n, length * d, length * d)


def attention_second(attention: Attention) -> Tensor:
    """Σ δ_F·∂²F/∂x² of every sample (n, L·d, L·d), at the recorded adjoint."""
    total: Tensor | None = None
    for head in _heads(attention):
        part = head.second()
        total = part if total is None else total.add_(part)
    assert total is not None
    n, length, d = total.shape[0], total.shape[1], total.shape[2]
    return total.reshape(n, length * d, length * d)


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


# -------------------------------------------------------------------------------------------------
# The input Hessian of every block of a stack, from the loss back to the embeddings.
#
# S enters at the outputs as Λ, passes the readout, then block after block (``input_hessian``);
# each
# block reports what it passed on and what it created.
# -------------------------------------------------------------------------------------------------


def propagate_input_hessian(
    stack: BlockStack, x: Tensor, targets: Tensor, *, mask: Tensor | None = None
) -> tuple[InputHessian, ...]:
    """∂²ℓ/∂(block input)² of every block, in the order of the forward pass.

    ``result[0].total`` is the Hessian at the stack's input (n, L·d, L·d).
    """
    x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
    blocks: list[LinearisedBlock] = []
    z = x
    for spec, weights in zip(stack.specs, stack.weights, strict=True):
        blocks.append(LinearisedBlock(spec, weights, z, mask))
        z = blocks[-1].output
    readout = LinearisedReadout(stack.readout, z.flatten(0, 1), samples=len(x))
    seeds = stack.loss.seeds(readout.output, with_sample_axis(targets, stack.readout))
    delta, curvature = _before_readout(readout, seeds, z.shape)
    results = []
    for block in reversed(blocks):
        results.append(pull_curvature(block, delta, curvature))
        delta, curvature = results[-1].delta, results[-1].total
    return tuple(reversed(results))


def _before_readout(
    readout: LinearisedReadout, seeds: Seeds, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """δ and S at the last block's output, S by products with unit vectors.

    Samples never couple, and tokens only through a pooling: one product serves the same coordinate
    of every sample, and of every token where they stay apart.
    """
    n, length, d = shape
    fresh = Workspace(keep=False)
    delta = seeds.delta.reshape(1, -1, readout.output.shape[-1])
    pulled = readout.pull(delta, None, Way(fresh, frozenset(), record=True))
    assert pulled is not None
    apart = readout.pooling is None and not seeds.couples_tokens
    size = d if apart else length * d
    basis = torch.eye(size, dtype=delta.dtype, device=delta.device)
    if apart:
        directions = basis.view(d, 1, 1, d).expand(d, n, length, d)
    else:
        directions = basis.view(size, 1, length, d).expand(size, n, length, d)
    moved = readout.push(directions.reshape(size, n * length, d).contiguous(), {}, fresh)
    assert moved.output is not None
    rate = seeds.product(moved.output.view(size, *readout.output.shape))
    columns = readout.pull(rate.reshape(moved.output.shape), moved, Way(fresh, frozenset()))
    assert columns is not None
    if apart:
        curvature = columns.view(d, n, length, d).permute(1, 2, 3, 0)
    else:
        curvature = columns.view(size, n, size).permute(1, 2, 0)
    return pulled[0].view(shape), curvature.contiguous()
