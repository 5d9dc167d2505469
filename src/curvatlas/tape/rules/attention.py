"""softmax(Q Kᵀ s + mask) V as one operation, with the weights kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.tape.rules.base import Call, Rule, Unruled, Values, added, dots, rule, summed_to
from curvatlas.tape.rules.products import matmul


class Attention(Rule):
    """y = P V with P = softmax(S), S = s Q Kᵀ + M; rows that see no key are zero.

    With a = Ṡ − ⟨P, Ṡ⟩, Ṗ = P a, P̄ = ȳ Vᵀ, c = P̄ − ⟨P, P̄⟩ and S̄ = P c:
    ẏ = Ṗ V + P V̇;  Q̄ = s S̄ K,  K̄ = s S̄ᵀ Q,  V̄ = Pᵀ ȳ,  M̄ = S̄, and of the second order
    S̄' = P (u − ⟨P, u⟩) with u = ȳ' Vᵀ + ȳ V̇ᵀ + a c;
    Q̄' = s (S̄' K + S̄ K̇),  K̄' = s (S̄'ᵀ Q + S̄ᵀ Q̇),  V̄' = Pᵀ ȳ' + Ṗᵀ ȳ.

    Where several heads of Q share one of K and V, they are further rows of it.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        q, k, v, mask, _, causal, scale, grouped = call.args
        self._places = [call.which(i) for i in range(4)]
        if len({p for p in self._places if p is not None}) < sum(
            p is not None for p in self._places
        ):
            raise Unruled  # self-attention without projections
        self._groups = q.shape[-3] // k.shape[-3] if grouped and k.shape[-3] else 1
        if grouped and k.shape[-3] != v.shape[-3]:
            raise Unruled
        self._length, keys = q.shape[-2], k.shape[-2]
        self._score_shape = (*self.shape[:-1], keys)
        self._scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self._q, self._k, self._v = (t.unsqueeze(0) for t in (self._rows(q), k, v))
        scores = self._scale * matmul(self._q, self._k.transpose(-1, -2)).squeeze(0)
        if causal:
            seen = torch.ones(self._length, keys, dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~self._rows(seen.expand(self._score_shape)), -math.inf)
        if mask is not None:
            wide = self._rows(mask.expand(self._score_shape))
            scores = (
                scores.masked_fill(~wide, -math.inf) if wide.dtype == torch.bool else scores + wide
            )
        self._p = torch.ops.aten._safe_softmax(scores, -1)
        self._bar: Any = None  # ȳ
        self._c: Any = None
        self._score_bar: Any = None  # S̄

    def _rows(self, t: Tensor) -> Tensor:
        """(…, H, L, d) as (…, H/groups, groups L, d): heads that share keys are rows."""
        if self._groups == 1:
            return t
        heads, length, width = t.shape[-3:]
        return t.reshape(*t.shape[:-3], heads // self._groups, self._groups * length, width)

    def _of(self, tangents: Values) -> list[Any]:
        """Tangents of Q, K, V and M, in rows."""
        q, k, v, mask = (None if p is None else tangents[p] for p in self._places)
        if mask is not None:
            missing = len(self._score_shape) + 1 - mask.ndim
            mask = mask.reshape(len(mask), *(1,) * missing, *mask.shape[1:])
            mask = self._rows(mask.expand(len(mask), *self._score_shape))
        return [None if q is None else self._rows(q), k, v, mask]

    def _centred(self, scores: Tensor) -> Tensor:
        mean: Tensor = (self._p * scores).sum(-1, keepdim=True)
        return scores - mean

    def _moved(self, q: Any, k: Any, mask: Any) -> tuple[Any, Any]:
        """a = Ṡ − ⟨P, Ṡ⟩ and Ṗ = P a."""
        total = None if q is None else matmul(q, self._k.transpose(-1, -2))
        if k is not None:
            total = added(total, matmul(self._q, k.transpose(-1, -2)))
        if total is not None:
            total = total.mul_(self._scale)
        total = added(total, mask)
        if total is None:
            return None, None
        a = self._centred(total)
        return a, self._p * a

    def push(self, tangents: Values) -> Tensor:
        q, k, v, mask = self._of(tangents)
        a, p_moved = self.shared(tangents, lambda: self._moved(q, k, mask))
        total = None if a is None else matmul(p_moved, self._v)
        if v is not None:
            total = added(total, matmul(self._p.unsqueeze(0), v))
        assert total is not None
        return total.reshape(len(total), *self.shape)

    def keep(self, adjoint: Any) -> None:
        self._bar = self._rows(adjoint).unsqueeze(0)
        self._c = self._centred(matmul(self._bar, self._v.transpose(-1, -2)))
        self._score_bar = self._p * self._c

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return self.pull2(adjoint, [None] * len(self.shapes), needs)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        return self.pull2(None, tangents, needs)

    def pull2(self, adjoint: Any, tangents: Values, needs: Sequence[bool]) -> Values:
        q, k, v, mask = self._of(tangents)
        a, p_moved = self.shared(tangents, lambda: self._moved(q, k, mask))
        adjoint = None if adjoint is None else self._rows(adjoint)
        to_q, to_k, to_v, to_mask = (p is not None and needs[p] for p in self._places)
        scores = None
        if to_q or to_k or to_mask:
            scores = None if adjoint is None else matmul(adjoint, self._v.transpose(-1, -2))
            if v is not None:
                scores = added(scores, matmul(self._bar, v.transpose(-1, -2)))
            if a is not None:
                scores = a * self._c if scores is None else torch.addcmul(scores, a, self._c)
            if scores is not None:
                scores = self._p * self._centred(scores)
        for_q = for_k = for_v = None
        if to_q:
            for_q = None if scores is None else matmul(scores, self._k)
            for_q = for_q if k is None else added(for_q, matmul(self._score_bar, k))
            for_q = None if for_q is None else for_q * self._scale
        if to_k:
            for_k = None if scores is None else matmul(scores.transpose(-1, -2), self._q)
            if q is not None:
                for_k = added(for_k, matmul(self._score_bar.transpose(-1, -2), q))
            for_k = None if for_k is None else for_k * self._scale
        if to_v:
            if adjoint is not None:
                for_v = matmul(self._p.transpose(-1, -2).unsqueeze(0), adjoint)
            if a is not None:
                for_v = added(for_v, matmul(p_moved.transpose(-1, -2), self._bar))
        result: list[Tensor | None] = [None] * len(self.shapes)
        if for_q is not None:
            for_q = for_q.reshape(len(for_q), *for_q.shape[1:-3], -1, self._length, for_q.shape[-1])
        if scores is not None:
            scores = scores.reshape(len(scores), *self._score_shape)
        for place, part in zip(self._places, (for_q, for_k, for_v, scores), strict=True):
            if place is not None and needs[place] and part is not None:
                result[place] = summed_to(part, self.shapes[place])
        return result

    def quadratic(self, tangents: Values) -> Tensor | None:
        """Σ P a² c + 2 s ⟨S̄, Q̇ K̇ᵀ⟩ + 2 ⟨ȳ, Ṗ V̇⟩."""
        q, k, v, mask = self._of(tangents)
        a, p_moved = self.shared(tangents, lambda: self._moved(q, k, mask))
        if a is None:
            return None
        total = dots(a * a, self._score_bar)
        if q is not None and k is not None:
            total = total + 2 * self._scale * dots(matmul(q, k.transpose(-1, -2)), self._score_bar)
        if v is not None:
            total = total + 2 * dots(matmul(p_moved, v), self._bar)
        return total


def _signature(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """torch.nn.functional.scaled_dot_product_attention's."""


rule(F.scaled_dot_product_attention, signature=_signature)(Attention)
