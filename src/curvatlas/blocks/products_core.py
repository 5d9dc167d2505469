r"""The attention core O = A V, A = softmax(s Q Kᵀ), with its tangent and its adjoint's (THEORY 9).

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
L keys; q (S, M, dk), k (S, L, dk), v (S, L, dv), A and w (S, M, L). Directions come second:
q̇ (S, K, M, dk), so that products with the shared A need no copy of it. ``None`` is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.products_workspace import Way, Workspace, stage_number


@dataclass
class CoreTangent:
    """Tangents of one push: q̇, k̇, v̇, Ṫ (S, K, M, L) and c (S, K, M, 1)."""

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
        logits = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)  # (S, M, L)
        self.allowed = None if softmax or allowed is None else allowed.to(q.dtype)
        if softmax:
            if bias is not None:
                logits += bias
            self.A = torch.softmax(logits, -1)
        else:
            self.A = logits if self.allowed is None else logits.mul_(self.allowed)
        self.delta: Tensor | None = None  # δ_O (S, M, dv)
        self.row_sums: Tensor | None = None  # rowsum(A ⊙ D) (S, M, 1)

    def value(self) -> Tensor:
        """O (S, M, dv)."""
        return torch.bmm(self.A, self.v)

    def push(
        self,
        q_dot: Tensor | None,
        k_dot: Tensor | None,
        v_dot: Tensor | None,
        space: Workspace,
    ) -> tuple[Tensor | None, CoreTangent]:
        """Ȯ + c O (S, K, M, dv) and what ``pull`` needs."""
        given = next((t for t in (q_dot, k_dot, v_dot) if t is not None), None)
        if given is None:
            return None, _STILL
        (s, m, length), directions = self.A.shape, given.shape[1]
        out = space.take("core.query", s, directions, m, self.v.shape[-1], like=self.q)
        state = CoreTangent(q_dot, k_dot, v_dot, None, None)
        if q_dot is not None or k_dot is not None:
            shape = (s, directions, m, length)
            state.logits_dot = space.take(self._key + "logits", *shape, like=self.q)
            if self.softmax:
                state.centre = space.take(self._key + "centre", s, directions, m, 1, like=self.q)
        for part in self._slots(directions):
            self._push_slots(part, state, out, space)
        return out, state

    def pull(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None,
        way: Way,
        *,
        needs: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rδ_q + c δ_q, Rδ_k, Rδ_v from Rδ_O ``rate`` (S, K, M, dv), those ``needs`` asks for."""
        state = tangent if tangent is not None and self.delta is not None else _STILL
        given = (rate, state.q_dot, state.k_dot, state.v_dot)
        first = next((t for t in given if t is not None), None)
        if first is None:
            return None, None, None
        space, directions = way.space, first.shape[1]
        (s, m, dk), (_, length, dv) = self.q.shape, self.v.shape
        shapes = {"query": (m, dk), "key": (length, dk), "value": (length, dv)}
        outs = [
            space.take("core." + name, s, directions, *shape, like=self.q) if needed else None
            for (name, shape), needed in zip(shapes.items(), needs, strict=True)
        ]
        for part in self._slots(directions):
            self._pull_slots(part, rate, state, outs, space)
        if way.record:
            assert rate is not None
            self.delta = rate.squeeze(1)
            if self.softmax:
                # rowsum(A ⊙ δ_O Vᵀ) = δ_O · O
                self.row_sums = (self.delta * self.value()).sum(-1, keepdim=True)
        return outs[0], outs[1], outs[2]

    def _slots(self, directions: int) -> list[slice]:
        """Consecutive slots whose L × L matrices fit in the cache together."""
        s, m, length = self.A.shape
        bytes_a_slot = directions * m * length * self.A.element_size()
        step = max(1, _TILE_BYTES // bytes_a_slot)
        return [slice(start, min(start + step, s)) for start in range(0, s, step)]

    def _push_slots(self, part: slice, state: CoreTangent, out: Tensor, space: Workspace) -> None:
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
            _rows(moved, self.v[part], target)
            if state.centre is not None:
                torch.sum(moved, -1, keepdim=True, out=state.centre[part])
        if state.v_dot is not None:
            accumulate = state.logits_dot is not None
            _columns(self.A[part], state.v_dot[part], target, accumulate=accumulate)

    def _pull_slots(
        self,
        part: slice,
        rate: Tensor | None,
        state: CoreTangent,
        outs: list[Tensor | None],
        space: Workspace,
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
                _rows(e, self.k[part], target)
            if state.k_dot is not None:
                assert w is not None
                _columns(w, state.k_dot[part], target, accumulate=done)
                done = True
            target.mul_(self.scale) if done else target.zero_()
        if out_k is not None:
            target, done = out_k[part], e is not None
            if e is not None:
                _transposed_rows(e, self.q[part], target)
            inner = _minus_scaled(_cut(state.q_dot, part), centre, self.q[part], space)
            if inner is not None:
                assert w is not None
                _columns(w.mT, inner, target, accumulate=done)
                done = True
            target.mul_(self.scale) if done else target.zero_()

    def _value_rate(
        self,
        part: slice,
        rate: Tensor | None,
        state: CoreTangent,
        out: Tensor,
        space: Workspace,
    ) -> None:
        inner, done = rate, False
        if state.logits_dot is not None:
            assert self.delta is not None
            delta = self.delta[part]
            moved = self._moved(state.logits_dot[part], part, space)
            _transposed_rows(moved, delta, out)
            inner, done = _minus_scaled(rate, _cut(state.centre, part), delta, space), True
        if inner is not None:
            _columns(self.A[part].mT, inner, out, accumulate=done)
        elif not done:
            out.zero_()

    def _logits_rate(
        self,
        part: slice,
        rate: Tensor | None,
        state: CoreTangent,
        w: Tensor | None,
        space: Workspace,
    ) -> Tensor | None:
        """E with its row sums removed, of some slots (S', K, M, L)."""
        terms = (rate, state.v_dot, state.logits_dot if self.softmax else None)
        given = next((t for t in terms if t is not None), None)
        if given is None:
            return None
        weights = self.A[part].unsqueeze(1)
        s, _, m, length = weights.shape
        e = space.take("core.rate", s, given.shape[1], m, length, like=self.q)
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

    def _moved(self, logits_dot: Tensor, part: slice, space: Workspace) -> Tensor:
        """B of some slots."""
        if not self.softmax:
            return logits_dot
        out = space.take("core.moved", *logits_dot.shape, like=self.q)
        return torch.mul(logits_dot, self.A[part].unsqueeze(1), out=out)

    def _adjoint(self, part: slice, space: Workspace) -> Tensor:
        """w of some slots (S', M, L)."""
        assert self.delta is not None
        out = space.take("core.adjoint", *self.A[part].shape, like=self.q)
        torch.bmm(self.delta[part], self.v[part].mT, out=out)
        if self.row_sums is not None:
            return out.sub_(self.row_sums[part]).mul_(self.A[part])
        return out if self.allowed is None else out.mul_(self._allowed(part).squeeze(1))

    def adjoint(self) -> Tensor:
        """w (S, M, L) of all slots, fresh."""
        return self._adjoint(slice(None), Workspace(keep=False))

    def _allowed(self, part: slice) -> Tensor:
        """The 0/1 pattern of some slots (S' or 1, 1, M or 1, L)."""
        assert self.allowed is not None
        return (self.allowed if self.allowed.shape[0] == 1 else self.allowed[part]).unsqueeze(1)


# Larger tiles fall out of the cache, smaller ones spend their time in the interpreter.
_TILE_BYTES = 2**20


def _cut(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


def _minus_scaled(
    moved: Tensor | None, centre: Tensor | None, base: Tensor, space: Workspace
) -> Tensor | None:
    """moved − c base (S, K, M, a)."""
    if centre is None:
        return moved
    out = space.take("core.turned", *centre.shape[:3], base.shape[-1], like=base)
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
    """out = s(left_dot rightᵀ + left right_dotᵀ):  (S, K, M, a), (S, L, a), … → (S, K, M, L)."""
    s, k, m, length = out.shape
    done = left_dot is not None
    if left_dot is not None:
        rows = out.view(s, k * m, length)
        torch.baddbmm(rows, left_dot.view(s, k * m, -1), right.mT, beta=0, alpha=scale, out=rows)
    if right_dot is None or left is None:
        return done
    shared = left if k == 1 else left.unsqueeze(1).expand(s, k, m, -1).reshape(s * k, m, -1)
    result = out.view(s * k, m, length)
    columns = right_dot.view(s * k, length, -1).mT
    torch.baddbmm(result, shared, columns, beta=1 if done else 0, alpha=scale, out=result)
    return True


def _rows(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left right:  (S, K, M, L), (S, L, a) → (S, K, M, a), the directions as more rows."""
    s, k, m, length = left.shape
    torch.bmm(left.view(s, k * m, length), right, out=out.view(s, k * m, -1))


def _transposed_rows(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = leftᵀ right:  (S, K, M, L), (S, M, a) → (S, K, L, a)."""
    s, k, m, length = left.shape
    shared = right if k == 1 else right.unsqueeze(1).expand(s, k, m, -1).reshape(s * k, m, -1)
    torch.bmm(left.view(s * k, m, length).mT, shared, out=out.view(s * k, length, -1))


def _columns(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out (+)= left right:  (S, M, L), (S, K, L, a) → (S, K, M, a), the left factor shared."""
    s, k, length, a = right.shape
    if k == 1:
        result = out.squeeze(1)
        if accumulate:
            result.baddbmm_(left, right.squeeze(1))
        else:
            torch.bmm(left, right.squeeze(1), out=result)
        return
    columns = right.permute(0, 2, 1, 3).reshape(s, length, k * a)
    product = torch.bmm(left, columns).view(s, -1, k, a).transpose(1, 2)
    out.add_(product) if accumulate else out.copy_(product)
