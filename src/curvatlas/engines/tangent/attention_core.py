r"""The attention core O = A V, A = softmax(s Q Kᵀ), with both tangents (derivations §11).

With Ṫ = s(Q̇Kᵀ + QK̇ᵀ), D = δ_O Vᵀ less its mean rowsum(A ⊙ D), and w = δ_T = A ⊙ D:

    Ȧ     = A ⊙ (Ṫ − rowsum(A ⊙ Ṫ)),   Ȯ = Ȧ V + A V̇
    E     = D ⊙ Ȧ + A ⊙ (Rδ_O Vᵀ + δ_O V̇ᵀ),   Rδ_T = E − rowsum(E) A
    Rδ_V  = Aᵀ Rδ_O + Ȧᵀ δ_O
    Rδ_Q  = s(Rδ_T K + w K̇),   Rδ_K = s(Rδ_Tᵀ Q + wᵀ Q̇)

The row sums of the textbook form Ȧ ⊙ D + A ⊙ (RD − Rr) collapse because the rows of w sum to zero.
Without softmax A = T on the allowed positions, Ȧ = Ṫ, w = δ_O Vᵀ and Rδ_T = Rδ_O Vᵀ + δ_O V̇ᵀ there.
Ȧ, and for the outer part Rδ_T, are what torch calls the softmax's backward pass: one fused call.

Learned terms b of the logits, T = s Q Kᵀ + b, move as Ṫ += ḃ, and R ∂ℓ/∂b is the sum of Rδ_T over
the samples: they enter linearly, behind a cap.

Capped logits T' = κ tanh(T/κ) have the slope g = 1 − (T'/κ)² and the bend ġ = −2 T'/κ² Ṫ'. All of
the above holds for T'; towards q and k stand w g instead of w and g Rδ_T + ġ w instead of Rδ_T.

A, Ȧ and, for short inputs, D are the L × L matrices kept; all others exist for a few
directions and slots at a time, small enough to stay in the cache. Where the former do not fit,
``BlockedCore`` keeps none: a block of queries is attention with fewer rows, made anew when a pass
comes to it.

Shapes: S slots (samples × key/value heads), M query rows a slot (query heads sharing the slot × L),
L keys. q (S, M, dk), k (S, L, dk), v (S, L, dv); A and w are (S, M, L). K directions come first:
q̇ (K, S, M, dk). ``None`` is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from curvatlas.engines.tangent.linear import BackwardPass, Buffers, stage_number
from curvatlas.layers.masks import Keyless, attention_mask
from curvatlas.layers.structure import BlockSpec


@dataclass
class CoreTangent:
    """Tangents of one push: q̇, k̇, v̇, Ȧ (K, S, M, L), of capped logits Ṫ' (K, S, M, L)."""

    q_dot: Tensor | None
    k_dot: Tensor | None
    v_dot: Tensor | None
    weights_dot: Tensor | None = None
    logits_dot: Tensor | None = None


_STILL = CoreTangent(None, None, None)


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
        softcap: float | None = None,
        key: str | None = None,
    ) -> None:
        self.scale, self.softmax = scale, softmax
        self._key = stage_number() if key is None else key
        # s q, s k: the scale of the logits is multiplied in once, here
        self.q, self.k, self.v = q * scale, k * scale, v
        logits = torch.bmm(q, self.k.mT)  # (S, M, L)
        self.allowed = None if softmax or allowed is None else allowed.to(q.dtype)
        self.slope: Tensor | None = None  # g (S, M, L), with capped logits only
        self.bend: Tensor | None = None  # −2 T'/κ² (S, M, L)
        if softcap is not None:
            height = torch.tanh(logits / softcap)
            self.slope, self.bend = 1.0 - height * height, height * (-2.0 / softcap)
            logits = height * softcap
        if softmax:
            if bias is not None:
                logits += bias
            self.A = torch.softmax(logits, -1)
            if bias is not None:
                self.A.masked_fill_(bias.isneginf().all(-1, keepdim=True), 0.0)
        else:
            self.A = logits if self.allowed is None else logits.mul_(self.allowed)
        self.delta: Tensor | None = None  # δ_O (S, M, dv)
        self.row_sums: Tensor | None = None  # rowsum(A ⊙ D) (S, M, 1)
        self._kept: Tensor | None = None  # s D where it is small
        self._forgotten = _forgotten_rows(bias) if softmax and bias is not None else None
        self.reads_forgotten: Tensor | None = None  # a truth value, of the recorded adjoint

    def value(self) -> Tensor:
        """O (S, M, dv)."""
        return torch.bmm(self.A, self.v)

    def push(
        self,
        q_dot: Tensor | None,
        k_dot: Tensor | None,
        v_dot: Tensor | None,
        space: Buffers,
        *,
        keep: bool = True,
        bias_dot: Tensor | None = None,
    ) -> tuple[Tensor | None, CoreTangent]:
        """Ȯ (K, S, M, dv) and what ``pull`` needs; ``keep=False``: no pull with it will follow.

        ``bias_dot``: ḃ (K, S, M, L) of learned terms of the logits, needed here only.
        """
        direction = next((t for t in (q_dot, k_dot, v_dot, bias_dot) if t is not None), None)
        if direction is None:
            return None, _STILL
        shape = (direction.shape[0], *self.A.shape)
        out = space.take("core.query", *shape[:3], self.v.shape[2], like=self.q)
        state = CoreTangent(q_dot, k_dot, v_dot)
        if keep and (q_dot is not None or k_dot is not None or bias_dot is not None):
            state.weights_dot = space.take(self._key + "weights", *shape, like=self.q)
            if self.slope is not None:
                state.logits_dot = space.take(self._key + "logits", *shape, like=self.q)
        for tile in self._tiles(shape[0]):
            self._push_tile(tile, state, out, bias_dot, space)
        return out, state

    def pull(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None,
        backward: BackwardPass,
        outs: Sequence[Tensor | None],
        *,
        bias_out: Tensor | None = None,
    ) -> bool:
        """Rδ_q, Rδ_k, Rδ_v from Rδ_O ``rate`` (K, S, M, dv), those that ``outs`` has room for.

        Whether they were written; else they are zero. ``bias_out`` (K, S, M, L) takes Rδ_T, before
        a cap.
        """
        state = tangent if tangent is not None and self.delta is not None else _STILL
        terms = (rate, state.q_dot, state.k_dot, state.v_dot, state.weights_dot)
        first = next((t for t in terms if t is not None), None)
        if first is None:
            return False
        for tile in self._tiles(first.shape[0]):
            self._pull_tile(tile, rate, state, outs, bias_out, backward.space)
        if backward.record:
            assert rate is not None
            self.record(rate[0], self.value())
        return True

    def record(self, delta: Tensor, value: Tensor) -> None:
        """Keep δ_O, and s D where it is small; ``value`` is O."""
        self.delta = delta
        if self.softmax:
            # rowsum(A ⊙ δ_O Vᵀ) = δ_O · O
            self.row_sums = (delta * value).sum(-1, keepdim=True)
        if self.A.shape[-1] <= 2 * (self.q.shape[-1] + self.v.shape[-1]):
            self._kept = self._centred(_ALL, Buffers(keep=False))
        if self._forgotten is not None:
            read = (delta != 0).any(-1, keepdim=True)  # (S, M, 1)
            self.reads_forgotten = (read & self._forgotten).any()

    def _tiles(self, directions: int) -> list[_Tile]:
        """Directions and slots whose L × L matrices fit in the cache together.

        Small matrices go with several directions at once; large ones in several parts.
        """
        s, m, length = self.A.shape
        size = m * length * self.A.element_size()
        together = _TILE_BYTES // (size * s)
        if together >= directions:
            return [_ALL]
        if together:
            return [_Tile(slice(i, i + together), _EVERY) for i in range(0, directions, together)]
        step = max(1, _TILE_BYTES // size)
        return [
            _Tile(slice(i, i + 1), slice(start, start + step))
            for i in range(directions)
            for start in range(0, s, step)
        ]

    def _push_tile(
        self,
        tile: _Tile,
        state: CoreTangent,
        out: Tensor,
        bias_dot: Tensor | None,
        space: Buffers,
    ) -> None:
        target, slots, moving = tile.moving(out), tile.slots, tile.moving
        target.zero_()
        if state.q_dot is not None or state.k_dot is not None or bias_dot is not None:
            kept = moving(state.weights_dot)
            shape = (*target.shape[:3], self.A.shape[2])
            logits = kept if kept is not None else space.take("core.rate", *shape, like=self.q)
            logits.zero_()
            if state.q_dot is not None:
                _add_product(logits, moving(state.q_dot), slots(self.k).mT)
            if state.k_dot is not None:
                _add_product(logits, slots(self.q), moving(state.k_dot).mT)
            if self.allowed is not None:
                logits *= self.allowed if self.allowed.shape[0] == 1 else slots(self.allowed)
            if self.slope is not None:
                logits *= slots(self.slope)
                if state.logits_dot is not None:
                    moving(state.logits_dot).copy_(logits)
            if bias_dot is not None:
                logits += moving(bias_dot)
            if self.softmax:
                _softmax_backward(logits, slots(self.A))
            _add_product(target, logits, slots(self.v))
        if state.v_dot is not None:
            _add_product(target, slots(self.A), moving(state.v_dot))

    def _pull_tile(
        self,
        tile: _Tile,
        rate: Tensor | None,
        state: CoreTangent,
        outs: Sequence[Tensor | None],
        bias_out: Tensor | None,
        space: Buffers,
    ) -> None:
        rate = tile.moving(rate)
        moved, out_v = tile.moving(state.weights_dot), tile.moving(outs[2])
        if out_v is not None:
            out_v.zero_()
            if rate is not None:
                _add_product(out_v, tile.slots(self.A).mT, rate)
            if moved is not None:
                assert self.delta is not None
                _add_product(out_v, moved.mT, tile.slots(self.delta))
        if outs[0] is None and outs[1] is None and bias_out is None:
            return
        centred, w = None, None
        if state.q_dot is not None or state.k_dot is not None or moved is not None:
            kept = self._kept
            centred = self._centred(tile, space) if kept is None else tile.slots(kept)
            w = self._adjoint(tile, centred, space)
        e = self._logits_rate(tile, rate, state, centred, space)
        if bias_out is not None:
            taken = tile.moving(bias_out)
            taken.zero_() if e is None else taken.copy_(e)
        if self.slope is not None:
            w = self._through_cap(tile, state, w, e)
        ends = ((outs[0], self.k, state.k_dot), (outs[1], self.q, state.q_dot))
        for turned, (out, end, other) in enumerate(ends):
            if out is None:
                continue
            target = tile.moving(out).zero_()
            if e is not None:
                _add_product(target, e.mT if turned else e, tile.slots(end))
            if other is not None:
                assert w is not None
                _add_product(target, w.mT if turned else w, tile.moving(other))

    def _through_cap(
        self, tile: _Tile, state: CoreTangent, w: Tensor | None, e: Tensor | None
    ) -> Tensor | None:
        """s w g; Rδ_T' ``e`` becomes Rδ_T = g e + ġ w in place."""
        assert self.slope is not None
        assert self.bend is not None
        slope, logits_dot = tile.slots(self.slope), tile.moving(state.logits_dot)
        if e is not None:
            e *= slope
            if logits_dot is not None:
                assert w is not None
                e.addcmul_(logits_dot, w * tile.slots(self.bend), value=1.0 / self.scale)
        return None if w is None else w * slope

    def _logits_rate(
        self,
        tile: _Tile,
        rate: Tensor | None,
        state: CoreTangent,
        centred: Tensor | None,
        space: Buffers,
    ) -> Tensor | None:
        """Rδ_T of some directions and slots."""
        v_dot, moved = tile.moving(state.v_dot), tile.moving(state.weights_dot)
        if not self.softmax:
            moved = None
        term = next((t for t in (rate, v_dot, moved) if t is not None), None)
        if term is None:
            return None
        weights = tile.slots(self.A)
        e = space.take("core.rate", *term.shape[:2], *weights.shape[1:], like=self.q)
        e.zero_()
        if rate is not None:
            _add_product(e, rate, tile.slots(self.v).mT)
        if v_dot is not None:
            assert self.delta is not None
            _add_product(e, tile.slots(self.delta), v_dot.mT)
        if not self.softmax:
            if self.allowed is not None:
                e *= self.allowed if self.allowed.shape[0] == 1 else tile.slots(self.allowed)
            return e
        if moved is None:
            return _softmax_backward(e, weights)
        assert centred is not None
        e *= weights
        e.addcmul_(centred, moved, value=1.0 / self.scale)
        return e.addcmul_(weights, e.sum(-1, keepdim=True), value=-1)

    def _centred(self, tile: _Tile, space: Buffers) -> Tensor:
        """s D of some slots (S', M, L)."""
        assert self.delta is not None
        weights = tile.slots(self.A)
        centred = space.take("core.centred", *weights.shape, like=self.q)
        torch.bmm(tile.slots(self.delta), tile.slots(self.v).mT, out=centred)
        if self.row_sums is not None:
            if weights.shape[-1] == 1:
                centred.zero_()  # one key has all the weight: no rounding of D − r is left over
            else:
                centred.sub_(tile.slots(self.row_sums))
        return centred.mul_(self.scale)

    def _adjoint(self, tile: _Tile, centred: Tensor, space: Buffers) -> Tensor:
        """s w of some slots (S', M, L): one pass, cheaper than the memory."""
        if self.row_sums is None and self.allowed is None:
            return centred
        w = space.take("core.adjoint", *centred.shape, like=self.q)
        if self.row_sums is not None:
            return torch.mul(centred, tile.slots(self.A), out=w)
        allowed = self.allowed
        assert allowed is not None
        return torch.mul(centred, allowed if len(allowed) == 1 else tile.slots(allowed), out=w)


def _forgotten_rows(bias: Tensor) -> Tensor:
    """Rows whose every key is masked by a number so low that the logits are lost beside it.

    bias: (S or 1, M or 1, L)  →  (S or 1, M or 1, 1). With −∞ the row is zero instead.
    """
    highest = bias.amax(-1, keepdim=True)
    return (highest < -1 / torch.finfo(bias.dtype).eps) & ~highest.isneginf()


def _softmax_backward(logits: Tensor, weights: Tensor) -> Tensor:
    """A ⊙ (X − rowsum(A ⊙ X)), written over X (K', S', M, L)."""
    if logits.is_cpu and weights.shape[-1] >= _FUSED_KEYS:
        for rows in logits:
            torch._softmax_backward_data(rows, weights, -1, rows.dtype, grad_input=rows)
        return logits
    logits *= weights
    return logits.addcmul_(weights, logits.sum(-1, keepdim=True), value=-1)


_EVERY = slice(None)
# Larger tiles fall out of the cache, smaller ones spend their time in the interpreter.
_TILE_BYTES = 2**20
_FUSED_KEYS = 32  # fewer: torch's fused kernel is slower than the passes it saves


@dataclass(frozen=True)
class _Tile:
    """Some directions and some slots."""

    directions: slice
    chosen: slice

    def slots(self, shared: Tensor) -> Tensor:
        """The chosen slots (S', …) of a tensor that all directions share."""
        return shared if self.chosen is _EVERY else shared[self.chosen]

    @overload
    def moving(self, moving: Tensor) -> Tensor: ...
    @overload
    def moving(self, moving: None) -> None: ...
    @overload
    def moving(self, moving: Tensor | None) -> Tensor | None: ...
    def moving(self, moving: Tensor | None) -> Tensor | None:
        """The tile's part (K', S', a, b) of (K, S, a, b), a view."""
        if moving is None or self is _ALL:
            return moving
        return moving[self.directions, self.chosen]


_ALL = _Tile(_EVERY, _EVERY)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out (K', S', a, b) += left right, one factor common to all directions.

    One call a direction: in one batch of K'·S' the common factor would have to be copied. ``out``
    is cleared before, see ``linear.add_product``.
    """
    for index, rows in enumerate(out):
        rows.baddbmm_(
            left if left.ndim == 3 else left[index], right if right.ndim == 3 else right[index]
        )


# --- long inputs: by blocks of queries ------------------------------------------------------------

_BLOCK_BYTES = 2**22  # of one L × L matrix's rows in a block: its products are then large enough


@dataclass(frozen=True, kw_only=True)
class LogitMask:
    """``attention_mask`` of some queries at a time: nothing of size L × L is made here."""

    spec: BlockSpec
    mask: Tensor | None
    samples: int
    length: int
    dtype: torch.dtype
    device: torch.device
    keyless: Keyless
    key_length: int | None = None  # of cross attention; None: keys are the queries' own tokens

    def rows(self, queries: slice, *, check: bool) -> tuple[Tensor | None, Tensor | None]:
        """Bias and permission of some queries; ``check``: refuse one without keys if asked to."""
        return attention_mask(
            self.spec,
            self.mask,
            samples=self.samples,
            length=self.length,
            dtype=self.dtype,
            device=self.device,
            keyless=self.keyless if check else "zero",
            queries=queries,
            keys=self.key_length,
        )

    def keys(self, queries: slice) -> slice:
        """The keys that some of the queries may see by the causal rule and the window."""
        if not self.spec.causal:
            return slice(0, self.length if self.key_length is None else self.key_length)
        window = self.spec.window
        first = 0 if window is None else max(0, queries.start + 1 - window)
        return slice(first, queries.stop)


@dataclass(frozen=True)
class _QueryBlock:
    """Some slots with some positions of their queries, and the keys these may see."""

    slots: slice
    queries: slice
    keys: slice
    repeats: int  # query heads that share a slot

    def rows(self, moving: Tensor) -> Tensor:
        """(…, S, repeats·L, d) → a view (…, S', repeats, m, d)."""
        *lead, _, rows, d = moving.shape
        heads = moving.view(*lead, -1, self.repeats, rows // self.repeats, d)
        return heads[..., self.slots, :, self.queries, :]

    def of_queries(self, moving: Tensor | None) -> Tensor | None:
        """(…, S, repeats·L, d) → (…, S', repeats·m, d)."""
        return None if moving is None else self.rows(moving).flatten(-3, -2)

    def of_keys(self, moving: Tensor | None) -> Tensor | None:
        """(…, S, L, d) → a view (…, S', L', d)."""
        return None if moving is None else moving[..., self.slots, self.keys, :]

    def of_pairs(self, pairs: Tensor | None, groups: int) -> Tensor | None:
        """(n or 1, H or 1, m or 1, L) → (S' or 1, repeats·m, L'), with G = ``groups`` a sample."""
        if pairs is None:
            return None
        n, heads = pairs.shape[:2]
        size = (self.repeats, self.queries.stop - self.queries.start, -1)
        if n == heads == 1:
            return pairs[0, :, :, self.keys].expand(size).flatten(0, 1).unsqueeze(0)
        parts = []
        for slot in range(self.slots.start, self.slots.stop):
            sample, group = divmod(slot, groups)
            own = pairs[sample if n > 1 else 0, :, :, self.keys]
            if heads > 1:
                own = own[group * self.repeats : (group + 1) * self.repeats]
            parts.append(own.expand(size).flatten(0, 1))
        return torch.stack(parts)


class _Inside(Buffers):
    """The buffers of a block's core, beside those of the stage around it."""

    def __init__(self, space: Buffers) -> None:
        super().__init__(keep=space.keep)
        self._space = space

    def take(self, key: str, *shape: int, like: Tensor) -> Tensor:
        return self._space.take("query block." + key, *shape, like=like)


class BlockedCore:
    """The products of ``AttentionCore`` in memory that is linear in L.

    O, δ_O and the row sums are kept; A and Ȧ of a block of queries are formed when a pass comes to
    it, on the way back once more: 15 instead of 10 matrix products in all, half of each by the
    causal rule, which leaves out the keys that a block cannot see.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softmax: bool,
        softcap: float | None,
        mask: LogitMask,
    ) -> None:
        self.q, self.k, self.v, self._mask = q, k, v, mask
        self._options: Any = {"scale": scale, "softmax": softmax, "softcap": softcap}
        self._groups = len(q) // mask.samples
        self._repeats = q.shape[1] // mask.length
        self.delta: Tensor | None = None  # δ_O (S, M, dv)
        self._value = q.new_empty(*q.shape[:2], v.shape[2])
        for block, core in self._cores(check=True):
            into = block.rows(self._value)
            into.copy_(core.value().view(into.shape))

    def value(self) -> Tensor:
        """O (S, M, dv)."""
        return self._value

    def push(
        self, q_dot: Tensor | None, k_dot: Tensor | None, v_dot: Tensor | None, space: Buffers
    ) -> tuple[Tensor | None, CoreTangent]:
        """As ``AttentionCore.push``."""
        direction = next((t for t in (q_dot, k_dot, v_dot) if t is not None), None)
        if direction is None:
            return None, _STILL
        out = space.take("core.query", len(direction), *self._value.shape, like=self.q)
        state, inside = CoreTangent(q_dot, k_dot, v_dot), _Inside(space)
        for block, core in self._cores():
            moved, _ = core.push(*self._tangents(block, state), inside, keep=False)
            into = block.rows(out)
            assert moved is not None
            into.copy_(moved.view(into.shape))
        return out, state

    def pull(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None,
        backward: BackwardPass,
        outs: Sequence[Tensor | None],
    ) -> bool:
        """As ``AttentionCore.pull``."""
        state = tangent if tangent is not None and self.delta is not None else _STILL
        terms = (rate, state.q_dot, state.k_dot, state.v_dot)
        first = next((t for t in terms if t is not None), None)
        if first is None:
            return False
        for out in outs[1:]:
            if out is not None:
                out.zero_()
        inside = _Inside(backward.space)
        inner = BackwardPass(inside, frozenset())
        for block, core in self._cores():
            _, moved = core.push(*self._tangents(block, state), inside)
            q_out, k_out, v_out = (
                None if out is None else block.rows(out) if i == 0 else block.of_keys(out)
                for i, out in enumerate(outs)
            )
            rooms = [
                None if out is None else inside.take(key, *out.flatten(2, -2).shape, like=self.q)
                for key, out in (("q", q_out), ("k", k_out), ("v", v_out))
            ]
            core.pull(block.of_queries(rate), moved, inner, rooms)
            if q_out is not None and rooms[0] is not None:
                q_out.copy_(rooms[0].view(q_out.shape))
            for out, room in ((k_out, rooms[1]), (v_out, rooms[2])):
                if out is not None and room is not None:
                    out.add_(room)
        if backward.record:
            assert rate is not None
            self.delta = rate[0]
        return True

    def _tangents(
        self, block: _QueryBlock, state: CoreTangent
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        queries = block.of_queries(state.q_dot)
        return queries, block.of_keys(state.k_dot), block.of_keys(state.v_dot)

    def _cores(self, *, check: bool = False) -> Iterator[tuple[_QueryBlock, AttentionCore]]:
        """Attention of every block of queries; it sees all keys that they may see."""
        length, slots = self._mask.length, len(self.q)
        row = self._repeats * self.k.shape[1] * self.q.element_size()
        # Several blocks however short the input: the way they are put together is then in use.
        step = max(1, min(_BLOCK_BYTES // row, -(-length // 4)))
        together = max(1, _BLOCK_BYTES // (row * step))
        for start in range(0, length, step):
            queries = slice(start, min(start + step, length))
            bias, allowed = self._mask.rows(queries, check=check)
            keys = self._mask.keys(queries)
            for first in range(0, slots, together):
                some = slice(first, min(first + together, slots))
                block = _QueryBlock(some, queries, keys, self._repeats)
                yield block, self._core(block, bias, allowed)

    def _core(
        self, block: _QueryBlock, bias: Tensor | None, allowed: Tensor | None
    ) -> AttentionCore:
        q, k, v = block.of_queries(self.q), block.of_keys(self.k), block.of_keys(self.v)
        assert q is not None
        assert k is not None
        assert v is not None
        core = AttentionCore(
            q,
            k,
            v,
            bias=block.of_pairs(bias, self._groups),
            allowed=block.of_pairs(allowed, self._groups),
            key="own.",
            **self._options,
        )
        if self.delta is not None:
            delta, value = block.of_queries(self.delta), block.of_queries(self._value)
            assert delta is not None
            assert value is not None
            core.record(delta, value)
        return core
