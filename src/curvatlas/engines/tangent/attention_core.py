r"""The attention core O = A V, A = softmax(s Q Kᵀ), with both tangents (derivations §11).

With Ṫ = s(Q̇Kᵀ + QK̇ᵀ), B = A ⊙ Ṫ, c = rowsum B, D = δ_O Vᵀ, w = δ_T = A ⊙ (D − rowsum(A ⊙ D)):

    Ȯ     = B V + A V̇                                                            − c O
    E     = w ⊙ Ṫ + A ⊙ (Rδ_O Vᵀ + δ_O V̇ᵀ),   E ← E − rowsum(E) A        [Rδ_T = E − c w]
    Rδ_V  = Aᵀ(Rδ_O − c δ_O) + Bᵀ δ_O
    Rδ_Q  = s(E K + w K̇)                                                         − c δ_Q
    Rδ_K  = s(Eᵀ Q + wᵀ(Q̇ − c Q))

The row sums of the textbook form Ȧ ⊙ (D − r) + A ⊙ (RD − Rr) collapse because the rows of w sum
to zero: six elementwise passes over an L × L matrix instead of ten. The terms on the right are left
to the caller, who has O and δ_Q as tokens already. Without softmax A = T on the allowed positions,
B = Ṫ, w = D, E = Rδ_O Vᵀ + δ_O V̇ᵀ there, and c = 0.

A and Ṫ are the only L × L matrices kept; w is formed again in every product (one matrix product of
twelve), and all others exist for a few slots at a time, small enough to stay in the cache.

Shapes: S slots (samples × key/value heads), M query rows a slot (query heads sharing the slot × L),
L keys. Vectors lie along the last axis but one, tokens along the last: q (S, dk, M), k (S, dk, L),
v (S, dv, L); A and w are (S, M, L). So every product with an L × L matrix has its long side
contiguous: 28 to 32 GFlop/s in float64 instead of 12 to 19 (L = 512, head size 32). K directions
come second: q̇ (S, K, dk, M). ``None`` is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvatlas.engines.tangent.linear import BackwardPass, Buffers, stage_number
from curvatlas.engines.tangent.structure import BlockSpec

Keyless = Literal["refuse", "zero"]  # what a query without keys gets


def attention_mask(
    spec: BlockSpec,
    mask: Tensor | None,
    *,
    samples: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    keyless: Keyless = "refuse",
) -> tuple[Tensor | None, Tensor | None]:
    """Additive bias and boolean permission of the logits, each broadcastable to (n, H, L, L).

    ``mask`` is boolean, True where attention is allowed: (n, L) for keys (padding), (L, L),
    (n, L, L) or (n, H, L, L) for pairs; or of floating dtype, added to the logits, with the same
    shapes except (n, L). Where n = L a boolean mask of two axes is read as (n, L).
    ``spec.causal`` forbids keys after the query on top of it, ``spec.window`` those too far before
    it. A row that may attend to nothing has no softmax and is refused, or is all zero with
    ``keyless="zero"``, as in ``F.scaled_dot_product_attention``.
    """
    allowed: Tensor | None = None
    bias: Tensor | None = None
    if spec.window is not None and not spec.causal:
        raise ValueError(f"a window of {spec.window} keys needs causal attention: causal=True.")
    if spec.window is not None and spec.window < 1:
        raise ValueError(f"the window must hold at least the query's own key, got {spec.window}.")
    if spec.causal:
        allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril_()[None, None]
        if spec.window is not None:
            allowed = allowed.triu(1 - spec.window)
    if mask is not None:
        if mask.device != device:
            raise ValueError(f"the mask is on {mask.device}, the input on {device}.")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"the mask must be boolean (True = attend) or floating (added), got {mask.dtype}."
            )
        shaped = _to_four_axes(mask, samples, spec.n_heads, length)
        if mask.dtype == torch.bool:
            allowed = shaped if allowed is None else allowed & shaped
        elif spec.softmax:
            bias = shaped.to(dtype)
        else:
            raise ValueError("an additive mask needs softmax attention: pass a boolean mask.")
    if not spec.softmax:
        return None, allowed
    if allowed is not None:
        forbidden = torch.zeros((), dtype=dtype, device=device).masked_fill(~allowed, -torch.inf)
        bias = forbidden if bias is None else bias + forbidden
    if mask is not None and bias is not None:
        empty = bias.isneginf().all(-1)
        if keyless == "refuse" and bool(empty.any()):
            where = empty.nonzero()[0].tolist()
            raise ValueError(
                f"query {where[-1]} of sample {where[0]} may attend to no key: its softmax is not "
                "defined; unmask at least one key of every row."
            )
    return bias, allowed


def _to_four_axes(mask: Tensor, samples: int, heads: int, length: int) -> Tensor:
    full = (samples, heads, length, length)
    if mask.ndim == 4 and all(a in (1, b) for a, b in zip(mask.shape, full, strict=True)):
        return mask.expand(*mask.shape[:3], length)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {
        (length, length): (1, 1, length, length),
        (samples, length, length): (samples, 1, length, length),
    }
    if mask.dtype == torch.bool:
        shapes[(samples, length)] = (samples, 1, 1, length)
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"the mask's shape {tuple(mask.shape)} is none of (n, L) = ({samples}, {length}), "
            "(L, L), (n, L, L), (n, H, L, L)."
        )
    return mask.view(shapes[tuple(mask.shape)])


@dataclass
class CoreTangent:
    """Tangents of one push: q̇, k̇, v̇, Ṫ (S, K, M, L) and c (S, K, 1, M)."""

    q_dot: Tensor | None
    k_dot: Tensor | None
    v_dot: Tensor | None
    logits_dot: Tensor | None
    centre: Tensor | None


_STILL = CoreTangent(None, None, None, None, None)


class AttentionCore:
    """Attention at fixed q, k, v; ``bias`` is added to the logits, ``allowed`` masks them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softmax: bool,
        bias: Tensor | None,
        allowed: Tensor | None,
    ) -> None:
        self.q, self.k, self.v, self.scale, self.softmax = q, k, v, scale, softmax
        self._key = stage_number()
        logits = torch.baddbmm(q.new_empty(()), q.mT, k, beta=0, alpha=scale)  # (S, M, L)
        self.allowed = None if softmax or allowed is None else allowed.to(q.dtype)
        if softmax:
            if bias is not None:
                logits += bias
            self.A = torch.softmax(logits, -1)
            if bias is not None:
                self.A.masked_fill_(bias.isneginf().all(-1, keepdim=True), 0.0)
        else:
            self.A = logits if self.allowed is None else logits.mul_(self.allowed)
        self.delta: Tensor | None = None  # δ_O (S, dv, M)
        self.row_sums: Tensor | None = None  # rowsum(A ⊙ D) (S, M, 1)

    def value(self) -> Tensor:
        """O (S, dv, M)."""
        return torch.bmm(self.v, self.A.mT)

    def push(
        self,
        q_dot: Tensor | None,
        k_dot: Tensor | None,
        v_dot: Tensor | None,
        space: Buffers,
    ) -> tuple[Tensor | None, CoreTangent]:
        """Ȯ + c O (S, K, dv, M) and what ``pull`` needs."""
        direction = next((t for t in (q_dot, k_dot, v_dot) if t is not None), None)
        if direction is None:
            return None, _STILL
        (s, m, length), directions = self.A.shape, direction.shape[1]
        out = space.take("core.query", s, directions, self.v.shape[1], m, like=self.q)
        state = CoreTangent(q_dot, k_dot, v_dot, None, None)
        if q_dot is not None or k_dot is not None:
            shape = (s, directions, m, length)
            state.logits_dot = space.take(self._key + "logits", *shape, like=self.q)
            if self.softmax:
                state.centre = space.take(self._key + "centre", s, directions, 1, m, like=self.q)
        for part in self._slots(directions):
            self._push_slots(part, state, out, space)
        return out, state

    def pull(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None,
        backward: BackwardPass,
        *,
        needs: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rδ_q + c δ_q, Rδ_k, Rδ_v from Rδ_O ``rate`` (S, K, dv, M), those ``needs`` asks for."""
        state = tangent if tangent is not None and self.delta is not None else _STILL
        terms = (rate, state.q_dot, state.k_dot, state.v_dot)
        first = next((t for t in terms if t is not None), None)
        if first is None:
            return None, None, None
        space, directions = backward.space, first.shape[1]
        (s, dk, m), (_, dv, length) = self.q.shape, self.v.shape
        shapes = {"query": (dk, m), "key": (dk, length), "value": (dv, length)}
        outs = [
            space.take("core." + name, s, directions, *shape, like=self.q) if needed else None
            for (name, shape), needed in zip(shapes.items(), needs, strict=True)
        ]
        for part in self._slots(directions):
            self._pull_slots(part, rate, state, outs, space)
        if backward.record:
            assert rate is not None
            self.delta = rate.squeeze(1)
            if self.softmax:
                # rowsum(A ⊙ δ_O Vᵀ) = δ_O · O
                self.row_sums = (self.delta * self.value()).sum(1).unsqueeze(-1)
        return outs[0], outs[1], outs[2]

    def _slots(self, directions: int) -> list[slice]:
        """Consecutive slots whose L × L matrices fit in the cache together."""
        s, m, length = self.A.shape
        bytes_a_slot = directions * m * length * self.A.element_size()
        step = max(1, _TILE_BYTES // bytes_a_slot)
        return [slice(start, min(start + step, s)) for start in range(0, s, step)]

    def _push_slots(self, part: slice, state: CoreTangent, out: Tensor, space: Buffers) -> None:
        target = out[part]
        if state.logits_dot is not None:
            logits_dot = state.logits_dot[part]
            _bilinear(
                _cut(state.q_dot, part),
                self.k[part],
                self.q[part],
                _cut(state.k_dot, part),
                logits_dot,
                self.scale,
            )
            if self.allowed is not None:
                logits_dot *= self._allowed(part)
            moved = self._moved(logits_dot, part, space)
            _mix(self.v[part], moved, target)
            if state.centre is not None:
                torch.sum(moved, -1, out=state.centre[part].squeeze(2))
        if state.v_dot is not None:
            accumulate = state.logits_dot is not None
            _times(state.v_dot[part], self.A[part].mT, target, accumulate=accumulate)

    def _pull_slots(
        self,
        part: slice,
        rate: Tensor | None,
        state: CoreTangent,
        outs: list[Tensor | None],
        space: Buffers,
    ) -> None:
        rate_part, centre = _cut(rate, part), _cut(state.centre, part)
        out_q, out_k, out_v = outs
        if out_v is not None:
            self._value_rate(part, rate_part, state, out_v[part], space)
        if out_q is None and out_k is None:
            return
        w = self._adjoint(part, space) if state is not _STILL else None
        e = self._logits_rate(part, rate_part, state, w, space)
        if out_q is not None:
            target, done = out_q[part], e is not None
            if e is not None:
                _mix(self.k[part], e, target)
            if state.k_dot is not None:
                assert w is not None
                _times(state.k_dot[part], w.mT, target, accumulate=done)
                done = True
            target.mul_(self.scale) if done else target.zero_()
        if out_k is not None:
            target, done = out_k[part], e is not None
            if e is not None:
                _mix_back(self.q[part], e, target)
            inner = _minus_scaled(_cut(state.q_dot, part), centre, self.q[part], space)
            if inner is not None:
                assert w is not None
                _times(inner, w, target, accumulate=done)
                done = True
            target.mul_(self.scale) if done else target.zero_()

    def _value_rate(
        self,
        part: slice,
        rate: Tensor | None,
        state: CoreTangent,
        out: Tensor,
        space: Buffers,
    ) -> None:
        inner, done = rate, False
        if state.logits_dot is not None:
            assert self.delta is not None
            delta = self.delta[part]
            moved = self._moved(state.logits_dot[part], part, space)
            _mix_back(delta, moved, out)
            inner, done = _minus_scaled(rate, _cut(state.centre, part), delta, space), True
        if inner is not None:
            _times(inner, self.A[part], out, accumulate=done)
        elif not done:
            out.zero_()

    def _logits_rate(
        self,
        part: slice,
        rate: Tensor | None,
        state: CoreTangent,
        w: Tensor | None,
        space: Buffers,
    ) -> Tensor | None:
        """E with its row sums removed, of some slots (S', K, M, L)."""
        terms = (rate, state.v_dot, state.logits_dot if self.softmax else None)
        term = next((t for t in terms if t is not None), None)
        if term is None:
            return None
        weights = self.A[part].unsqueeze(1)
        s, _, m, length = weights.shape
        e = space.take("core.rate", s, term.shape[1], m, length, like=self.q)
        delta = _cut(self.delta, part)
        done = _bilinear(rate, self.v[part], delta, _cut(state.v_dot, part), e, 1.0)
        if not self.softmax:
            return e if self.allowed is None else e.mul_(self._allowed(part))
        if done:
            e *= weights
        if state.logits_dot is not None:
            assert w is not None
            moved = state.logits_dot[part]
            shared = w.unsqueeze(1)
            e.addcmul_(shared, moved) if done else torch.mul(shared, moved, out=e)
        return e.addcmul_(weights, e.sum(-1, keepdim=True), value=-1)

    def _moved(self, logits_dot: Tensor, part: slice, space: Buffers) -> Tensor:
        """B of some slots."""
        if not self.softmax:
            return logits_dot
        out = space.take("core.moved", *logits_dot.shape, like=self.q)
        return torch.mul(logits_dot, self.A[part].unsqueeze(1), out=out)

    def _adjoint(self, part: slice, space: Buffers) -> Tensor:
        """w of some slots (S', M, L)."""
        assert self.delta is not None
        out = space.take("core.adjoint", *self.A[part].shape, like=self.q)
        torch.bmm(self.delta[part].mT, self.v[part], out=out)
        if self.row_sums is not None:
            return out.sub_(self.row_sums[part]).mul_(self.A[part])
        return out if self.allowed is None else out.mul_(self._allowed(part).squeeze(1))

    def _allowed(self, part: slice) -> Tensor:
        """The 0/1 pattern of some slots (S' or 1, 1, M or 1, L)."""
        assert self.allowed is not None
        return (self.allowed if self.allowed.shape[0] == 1 else self.allowed[part]).unsqueeze(1)


# Larger tiles fall out of the cache, smaller ones spend their time in the interpreter.
_TILE_BYTES = 2**20


def _cut(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


def _minus_scaled(
    moved: Tensor | None, centre: Tensor | None, base: Tensor, space: Buffers
) -> Tensor | None:
    """moved − c base (S, K, a, M)."""
    if centre is None:
        return moved
    s, directions, _, m = centre.shape
    out = space.take("core.turned", s, directions, base.shape[1], m, like=base)
    if moved is None:
        return torch.mul(centre, base.unsqueeze(1), out=out).neg_()
    return torch.addcmul(moved, centre, base.unsqueeze(1), value=-1, out=out)


def _bilinear(
    left_dot: Tensor | None,
    right: Tensor,
    left: Tensor | None,
    right_dot: Tensor | None,
    out: Tensor,
    scale: float,
) -> bool:
    """out = s(left_dotᵀ right + leftᵀ right_dot):  (S, K, a, M), (S, a, L), … → (S, K, M, L)."""
    s, k, m, length = out.shape
    result = out.view(s * k, m, length)
    done = left_dot is not None
    if left_dot is not None:
        rows = left_dot.view(s * k, -1, m).mT
        torch.baddbmm(result, rows, _each(right, k), beta=0, alpha=scale, out=result)
    if right_dot is None or left is None:
        return done
    columns, rows = right_dot.view(s * k, -1, length), _each(left, k).mT
    torch.baddbmm(result, rows, columns, beta=1 if done else 0, alpha=scale, out=result)
    return True


def _mix(vectors: Tensor, matrix: Tensor, out: Tensor) -> None:
    """out = vectors matrixᵀ:  (S, a, L), (S, K, M, L) → (S, K, a, M)."""
    s, k, m, length = matrix.shape
    columns = matrix.view(s * k, m, length).mT
    torch.bmm(_each(vectors, k), columns, out=out.view(s * k, -1, m))


def _mix_back(vectors: Tensor, matrix: Tensor, out: Tensor) -> None:
    """out = vectors matrix:  (S, a, M), (S, K, M, L) → (S, K, a, L)."""
    s, k, m, length = matrix.shape
    columns = matrix.view(s * k, m, length)
    torch.bmm(_each(vectors, k), columns, out=out.view(s * k, -1, length))


def _times(vectors: Tensor, matrix: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out (+)= vectors matrix:  (S, K, a, i), (S, i, j) → (S, K, a, j), directions as more rows."""
    s, k, a, i = vectors.shape
    rows, result = vectors.view(s, k * a, i), out.view(s, k * a, -1)
    if accumulate:
        result.baddbmm_(rows, matrix)
    else:
        torch.bmm(rows, matrix, out=result)


def _each(shared: Tensor, directions: int) -> Tensor:
    """(S, a, b) repeated for every direction: (S·K, a, b); as it is for one."""
    if directions == 1:
        return shared
    s, a, b = shared.shape
    return shared.unsqueeze(1).expand(s, directions, a, b).reshape(s * directions, a, b)
