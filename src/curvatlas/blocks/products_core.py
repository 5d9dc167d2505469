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


@dataclass
class CoreTangent:
    """Tangents of one push: q̇, k̇, v̇, Ṫ (S, K, M, L) and c (S, K, M, 1)."""

    q_dot: Tensor | None
    k_dot: Tensor | None
    v_dot: Tensor | None
    logits_dot: Tensor | None
    centre: Tensor | None


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
        self, q_dot: Tensor | None, k_dot: Tensor | None, v_dot: Tensor | None
    ) -> tuple[Tensor | None, CoreTangent]:
        """Ȯ (S, K, M, dv) and what ``pull`` needs."""
        logits_dot = self._logits_dot(q_dot, k_dot)
        result, centre = None, None
        if logits_dot is not None:
            # B is needed once here and once on the way back; keeping Ṫ serves both.
            moved = logits_dot * self.A.unsqueeze(1) if self.softmax else logits_dot
            result = _rows(moved, self.v)
            if self.softmax:
                centre = moved.sum(-1, keepdim=True)
                result.addcmul_(centre, self.output.unsqueeze(1), value=-1)
        if v_dot is not None:
            result = _add_columns(result, self.A, v_dot)
        return result, CoreTangent(q_dot, k_dot, v_dot, logits_dot, centre)

    def pull(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None = None,
        *,
        needs: tuple[bool, bool, bool] = (True, True, True),
        record: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rδ_q, Rδ_k, Rδ_v from Rδ_O ``rate`` (S, K, M, dv), those that ``needs`` asks for.

        ``record`` (K = 1, no tangent): what comes out are the adjoints themselves; keep w and wK.
        """
        curved = tangent is not None and self.delta is not None
        state = tangent if curved and tangent is not None else _NO_TANGENT
        rate_v = self._value_rate(rate, state) if needs[2] else None
        if not (needs[0] or needs[1]):
            return None, None, rate_v
        e = self._logits_rate(rate, state)
        rate_q = self._query_rate(e, state) if needs[0] else None
        rate_k = self._key_rate(e, state) if needs[1] else None
        if record:
            assert e is not None
            assert rate is not None
            self.w, self.delta = e.squeeze(1), rate.squeeze(1)
            self.w_keys = torch.bmm(self.w, self.k)
        return rate_q, rate_k, rate_v

    def _logits_dot(self, q_dot: Tensor | None, k_dot: Tensor | None) -> Tensor | None:
        """Ṫ (S, K, M, L)."""
        result = _bilinear(q_dot, self.k, self.q, k_dot)
        if result is None:
            return None
        result *= self.scale
        return result if self.allowed is None else result.mul_(self.allowed.unsqueeze(1))

    def _logits_rate(self, rate: Tensor | None, state: CoreTangent) -> Tensor | None:
        """E with its row sums removed (S, K, M, L)."""
        e = _bilinear(rate, self.v, self.delta, state.v_dot)
        if not self.softmax:
            return e if e is None or self.allowed is None else e.mul_(self.allowed.unsqueeze(1))
        weights = self.A.unsqueeze(1)
        if e is not None:
            e *= weights
        if state.logits_dot is not None:
            assert self.w is not None
            w = self.w.unsqueeze(1)
            e = w * state.logits_dot if e is None else e.addcmul_(w, state.logits_dot)
        return None if e is None else e.addcmul_(weights, e.sum(-1, keepdim=True), value=-1)

    def _query_rate(self, e: Tensor | None, state: CoreTangent) -> Tensor | None:
        result = None if e is None else _rows(e, self.k)
        if state.centre is not None:
            assert self.w_keys is not None
            correction = state.centre * self.w_keys.unsqueeze(1)
            result = correction.neg_() if result is None else result.sub_(correction)
        if state.k_dot is not None:
            assert self.w is not None
            result = _add_columns(result, self.w, state.k_dot)
        return None if result is None else result.mul_(self.scale)

    def _key_rate(self, e: Tensor | None, state: CoreTangent) -> Tensor | None:
        result = None if e is None else _transposed_rows(e, self.q)
        inner = state.q_dot
        if state.centre is not None:
            moved = state.centre * self.q.unsqueeze(1)
            inner = moved.neg_() if inner is None else inner - moved
        if inner is not None:
            assert self.w is not None
            result = _add_columns(result, self.w.mT, inner)
        return None if result is None else result.mul_(self.scale)

    def _value_rate(self, rate: Tensor | None, state: CoreTangent) -> Tensor | None:
        inner = rate
        result = None
        if state.logits_dot is not None:
            assert self.delta is not None
            moved = state.logits_dot * self.A.unsqueeze(1) if self.softmax else state.logits_dot
            result = _transposed_rows(moved, self.delta)
            if state.centre is not None:
                shift = state.centre * self.delta.unsqueeze(1)
                inner = shift.neg_() if inner is None else inner - shift
        return result if inner is None else _add_columns(result, self.A.mT, inner)


_NO_TANGENT = CoreTangent(None, None, None, None, None)


def _bilinear(
    left_dot: Tensor | None, right: Tensor, left: Tensor | None, right_dot: Tensor | None
) -> Tensor | None:
    """left_dot rightᵀ + left right_dotᵀ:  (S, K, M, a), (S, L, a), … → (S, K, M, L)."""
    result = None if left_dot is None else _rows(left_dot, right.mT)
    if right_dot is None or left is None:
        return result
    s, k, length, a = right_dot.shape
    shared = left.unsqueeze(1).expand(s, k, -1, a).reshape(s * k, -1, a)
    columns = right_dot.reshape(s * k, length, a).mT
    if result is None:
        return torch.bmm(shared, columns).view(s, k, -1, length)
    result.view(s * k, -1, length).baddbmm_(shared, columns)
    return result


def _rows(left: Tensor, right: Tensor) -> Tensor:
    """(S, K, M, L) @ (S, L, a) with the directions as more rows → (S, K, M, a)."""
    s, k, m, length = left.shape
    return torch.bmm(left.reshape(s, k * m, length), right).view(s, k, m, -1)


def _transposed_rows(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right:  (S, K, M, L), (S, M, a) → (S, K, L, a)."""
    s, k, m, length = left.shape
    shared = right.unsqueeze(1).expand(s, k, m, -1).reshape(s * k, m, -1)
    return torch.bmm(left.reshape(s * k, m, length).mT, shared).view(s, k, length, -1)


def _add_columns(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + (S, M, L) @ (S, K, L, a), the left factor common to all K → (S, K, M, a)."""
    s, k, length, a = right.shape
    if k == 1:
        if total is None:
            return torch.bmm(left, right.squeeze(1)).unsqueeze(1)
        total.squeeze(1).baddbmm_(left, right.squeeze(1))
        return total
    columns = right.permute(0, 2, 1, 3).reshape(s, length, k * a)
    product = torch.bmm(left, columns).view(s, -1, k, a).transpose(1, 2)
    return product.contiguous() if total is None else total.add_(product)
