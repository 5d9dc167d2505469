r"""The attention core O = A V, A = softmax(s Q Kᵀ), with its tangent and its adjoint's (THEORY 9).

With Ṫ = s(Q̇Kᵀ + QK̇ᵀ), B = A ⊙ Ṫ, c = rowsum B, D = δ_O Vᵀ, w = δ_T = A ⊙ (D − rowsum(A ⊙ D)):

    Ȯ     = B V − c O + A V̇
    E     = w ⊙ Ṫ + A ⊙ (Rδ_O Vᵀ + δ_O V̇ᵀ),   E ← E − rowsum(E) A        [Rδ_T = E − c w]
    Rδ_V  = Aᵀ(Rδ_O − c δ_O) + Bᵀ δ_O
    Rδ_Q  = s(E K − c (wK) + w K̇)
    Rδ_K  = s(Eᵀ Q + wᵀ(Q̇ − c Q))

The row sums of the textbook form Ȧ ⊙ (D − r) + A ⊙ (RD − Rr) collapse because the rows of w sum
to zero: four elementwise passes over an L × L matrix instead of ten. Without softmax A = T on the
allowed positions, B = Ṫ, w = D, E = Rδ_O Vᵀ + δ_O V̇ᵀ there, and c = 0.

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
        logits = torch.bmm(q, k.mT).mul_(scale)  # (S, M, L)
        self.allowed = None if softmax or allowed is None else allowed.to(q.dtype)
        if softmax:
            if bias is not None:
                logits += bias
            self.A = torch.softmax(logits, -1)
        else:
            self.A = logits if self.allowed is None else logits.mul_(self.allowed)
        self.output = torch.bmm(self.A, v)  # (S, M, dv)
        self.delta: Tensor | None = None  # δ_O (S, M, dv)
        self.w: Tensor | None = None  # δ_T (S, M, L)
        self.w_keys: Tensor | None = None  # w K (S, M, dk)

    def push(
        self,
        q_dot: Tensor | None,
        k_dot: Tensor | None,
        v_dot: Tensor | None,
        space: Workspace,
    ) -> tuple[Tensor | None, CoreTangent]:
        """Ȯ (S, K, M, dv) and what ``pull`` needs."""
        logits_dot = self._logits_dot(q_dot, k_dot, space)
        given = next((t for t in (logits_dot, v_dot) if t is not None), None)
        centre: Tensor | None = None
        if given is None:
            return None, _STILL
        s, m, dv = self.output.shape
        out = space.take("core.mixed", s, given.shape[1], m, dv, like=self.q)
        if logits_dot is not None:
            moved = self._moved(logits_dot, space)
            _rows(moved, self.v, out)
            if self.softmax:
                centre = moved.sum(-1, keepdim=True)
                out.addcmul_(centre, self.output.unsqueeze(1), value=-1)
        if v_dot is not None:
            _columns(self.A, v_dot, out, accumulate=logits_dot is not None)
        return out, CoreTangent(q_dot, k_dot, v_dot, logits_dot, centre)

    def pull(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None,
        way: Way,
        *,
        needs: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rδ_q, Rδ_k, Rδ_v from Rδ_O ``rate`` (S, K, M, dv), those that ``needs`` asks for."""
        state = tangent if tangent is not None and self.delta is not None else _STILL
        rate_v = self._value_rate(rate, state, way.space) if needs[2] else None
        if not (needs[0] or needs[1]):
            return None, None, rate_v
        e = self._logits_rate(rate, state, way.space)
        rate_q = self._query_rate(e, state, way.space) if needs[0] else None
        rate_k = self._key_rate(e, state, way.space) if needs[1] else None
        if way.record:
            assert e is not None
            assert rate is not None
            self.w, self.delta = e.squeeze(1), rate.squeeze(1)
            self.w_keys = torch.bmm(self.w, self.k)
        return rate_q, rate_k, rate_v

    def _moved(self, logits_dot: Tensor, space: Workspace) -> Tensor:
        """B (S, K, M, L): needed on both ways, cheaper to form twice than to keep."""
        if not self.softmax:
            return logits_dot
        out = space.take("core.moved", *logits_dot.shape, like=self.q)
        return torch.mul(logits_dot, self.A.unsqueeze(1), out=out)

    def _logits_dot(
        self, q_dot: Tensor | None, k_dot: Tensor | None, space: Workspace
    ) -> Tensor | None:
        """Ṫ (S, K, M, L)."""
        given = q_dot if q_dot is not None else k_dot
        if given is None:
            return None
        s, m, length = self.A.shape
        out = space.take(self._key + "logits", s, given.shape[1], m, length, like=self.q)
        _bilinear(q_dot, self.k, self.q, k_dot, out, self.scale)
        return out if self.allowed is None else out.mul_(self.allowed.unsqueeze(1))

    def _logits_rate(
        self, rate: Tensor | None, state: CoreTangent, space: Workspace
    ) -> Tensor | None:
        """E with its row sums removed (S, K, M, L)."""
        terms = (rate, state.v_dot, state.logits_dot if self.softmax else None)
        given = next((t for t in terms if t is not None), None)
        if given is None:
            return None
        s, m, length = self.A.shape
        e = space.take("core.rate", s, given.shape[1], m, length, like=self.q)
        done = _bilinear(rate, self.v, self.delta, state.v_dot, e, 1.0)
        if not self.softmax:
            return e if self.allowed is None else e.mul_(self.allowed.unsqueeze(1))
        weights = self.A.unsqueeze(1)
        if done:
            e *= weights
        if state.logits_dot is not None:
            assert self.w is not None
            w = self.w.unsqueeze(1)
            e.addcmul_(w, state.logits_dot) if done else torch.mul(w, state.logits_dot, out=e)
        return e.addcmul_(weights, e.sum(-1, keepdim=True), value=-1)

    def _query_rate(self, e: Tensor | None, state: CoreTangent, space: Workspace) -> Tensor | None:
        given = e if e is not None else state.k_dot
        if given is None:
            return None
        s, m, dk = self.q.shape
        out = space.take("core.query", s, given.shape[1], m, dk, like=self.q)
        if e is not None:
            _rows(e, self.k, out)
        if state.k_dot is not None:
            assert self.w is not None
            _columns(self.w, state.k_dot, out, accumulate=e is not None)
        if state.centre is not None:
            assert self.w_keys is not None
            out.addcmul_(state.centre, self.w_keys.unsqueeze(1), value=-1)
        return out.mul_(self.scale)

    def _key_rate(self, e: Tensor | None, state: CoreTangent, space: Workspace) -> Tensor | None:
        given = next((t for t in (e, state.q_dot, state.centre) if t is not None), None)
        if given is None:
            return None
        s, length, dk = self.k.shape
        out = space.take("core.key", s, given.shape[1], length, dk, like=self.q)
        if e is not None:
            _transposed_rows(e, self.q, out)
        inner = _minus_scaled(state.q_dot, state.centre, self.q, "core.turned", space)
        if inner is not None:
            assert self.w is not None
            _columns(self.w.mT, inner, out, accumulate=e is not None)
        return out.mul_(self.scale)

    def _value_rate(
        self, rate: Tensor | None, state: CoreTangent, space: Workspace
    ) -> Tensor | None:
        given = rate if rate is not None else state.logits_dot
        if given is None:
            return None
        s, length, dv = self.v.shape
        out = space.take("core.value", s, given.shape[1], length, dv, like=self.q)
        inner, curved = rate, state.logits_dot is not None
        if state.logits_dot is not None:
            assert self.delta is not None
            _transposed_rows(self._moved(state.logits_dot, space), self.delta, out)
            inner = _minus_scaled(rate, state.centre, self.delta, "core.turned", space)
        if inner is not None:
            _columns(self.A.mT, inner, out, accumulate=curved)
        return out


def _minus_scaled(
    moved: Tensor | None, centre: Tensor | None, base: Tensor, key: str, space: Workspace
) -> Tensor | None:
    """moved − c base (S, K, M, a)."""
    if centre is None:
        return moved
    out = space.take(key, *centre.shape[:3], base.shape[-1], like=base)
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
