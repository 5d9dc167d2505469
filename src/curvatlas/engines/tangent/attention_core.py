r"""The attention core O = A V, A = softmax(s Q Kᵀ), with both tangents (derivations §11).

With Ṫ = s(Q̇Kᵀ + QK̇ᵀ) less its mean c = rowsum(A ⊙ Ṫ), Ȧ = A ⊙ Ṫ, D = δ_O Vᵀ and
w = δ_T = A ⊙ (D − rowsum(A ⊙ D)):

    Ȯ     = Ȧ V + A V̇
    E     = w ⊙ Ṫ + A ⊙ (Rδ_O Vᵀ + δ_O V̇ᵀ),   Rδ_T = E − rowsum(E) A
    Rδ_V  = Aᵀ Rδ_O + Ȧᵀ δ_O
    Rδ_Q  = s(Rδ_T K + w K̇),   Rδ_K = s(Rδ_Tᵀ Q + wᵀ Q̇)

The row sums of the textbook form Ȧ ⊙ (D − r) + A ⊙ (RD − Rr) collapse because the rows of w sum
to zero. Without softmax A = T on the allowed positions, Ȧ = Ṫ, w = D and Rδ_T = Rδ_O Vᵀ + δ_O V̇ᵀ
there. For the outer part w = 0, and both Ȧ and Rδ_T are what torch calls the softmax's backward
pass: one fused call each.

Capped logits T' = κ tanh(T/κ) have the slope g = 1 − (T'/κ)² and the bend ġ = −2 T'/κ² Ṫ'. All of
the above holds for T'; towards q and k stand w g instead of w and g Rδ_T + ġ w instead of Rδ_T.

A, the centred Ṫ and, for short inputs, w are the L × L matrices kept; all others exist for a few
directions and slots at a time, small enough to stay in the cache.

Shapes: S slots (samples × key/value heads), M query rows a slot (query heads sharing the slot × L),
L keys. q (S, M, dk), k (S, L, dk), v (S, L, dv); A and w are (S, M, L). K directions come first:
q̇ (K, S, M, dk). A right factor of a matrix product is always read along its rows, so k and v are
kept both ways and k̇ and v̇ are transposed once: 110 instead of 58 GFlop/s for Q̇Kᵀ in float32
(L = 64, head size 32). ``None`` is zero.
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
    """Tangents of one push: q̇, k̇, v̇, the centred Ṫ (K, S, M, L), of capped ones c (K, S, M, 1)."""

    q_dot: Tensor | None
    k_dot: Tensor | None
    v_dot: Tensor | None
    logits_dot: Tensor | None
    centre: Tensor | None = None


_STILL = CoreTangent(None, None, None, None)


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
    ) -> None:
        self.scale, self.softmax = scale, softmax
        self._key = stage_number()
        # s q, s k: the scale of the logits is multiplied in once, here
        self.q, self.k, self.v = q * scale, k * scale, v
        self.k_columns, self.v_columns = self.k.mT.contiguous(), v.mT.contiguous()
        logits = torch.bmm(q, self.k_columns)  # (S, M, L)
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
        self._w: Tensor | None = None  # w (S, M, L) where it is small enough to keep

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
    ) -> tuple[Tensor | None, CoreTangent]:
        """Ȯ (K, S, M, dv) and what ``pull`` needs; ``keep=False``: no pull with it will follow."""
        direction = next((t for t in (q_dot, k_dot, v_dot) if t is not None), None)
        if direction is None:
            return None, _STILL
        (s, m, length), directions = self.A.shape, direction.shape[0]
        out = space.take("core.query", directions, s, m, self.v.shape[2], like=self.q)
        state = CoreTangent(q_dot, k_dot, v_dot, None)
        if keep and (q_dot is not None or k_dot is not None):
            shape = (directions, s, m, length)
            state.logits_dot = space.take(self._key + "logits", *shape, like=self.q)
            if self.slope is not None:
                state.centre = space.take(self._key + "centre", *shape[:3], 1, like=self.q)
        for tile in self._tiles(directions):
            self._push_tile(tile, state, out, space)
        return out, state

    def pull(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None,
        backward: BackwardPass,
        *,
        needs: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rδ_q, Rδ_k, Rδ_v from Rδ_O ``rate`` (K, S, M, dv), those ``needs`` asks for."""
        state = tangent if tangent is not None and self.delta is not None else _STILL
        terms = (rate, state.q_dot, state.k_dot, state.v_dot)
        first = next((t for t in terms if t is not None), None)
        if first is None:
            return None, None, None
        space, directions = backward.space, first.shape[0]
        shapes = {"query": self.q.shape, "key": self.k.shape, "value": self.v.shape}
        outs = [
            space.take("core." + name, directions, *shape, like=self.q) if needed else None
            for (name, shape), needed in zip(shapes.items(), needs, strict=True)
        ]
        for tile in self._tiles(directions):
            self._pull_tile(tile, rate, state, outs, space)
        if backward.record:
            assert rate is not None
            self._record(rate[0])
        return outs[0], outs[1], outs[2]

    def _record(self, delta: Tensor) -> None:
        """Keep δ_O, and w where it is small."""
        self.delta = delta
        if self.softmax:
            # rowsum(A ⊙ δ_O Vᵀ) = δ_O · O
            self.row_sums = (delta * self.value()).sum(-1, keepdim=True)
        if self.A.shape[-1] <= 2 * (self.q.shape[-1] + self.v.shape[-1]):
            self._w = self._adjoint(_ALL, Buffers(keep=False))

    def _tiles(self, directions: int) -> list[_Tile]:
        """Directions and slots whose L × L matrices fit in the cache together.

        Small matrices go with all directions at once; a large one by itself, and in several parts.
        """
        s, m, length = self.A.shape
        size = m * length * self.A.element_size()
        if directions == 1 and size * s <= _TILE_BYTES:
            return [_ALL]
        together = _TILE_BYTES // (size * s)
        if together >= min(directions, _FEW):
            return [_Tile(slice(i, i + together), _EVERY) for i in range(0, directions, together)]
        step = max(1, _TILE_BYTES // size)
        return [
            _Tile(slice(i, i + 1), slice(start, start + step) if step < s else _EVERY)
            for i in range(directions)
            for start in range(0, s, step)
        ]

    def _push_tile(self, tile: _Tile, state: CoreTangent, out: Tensor, space: Buffers) -> None:
        target, at = tile.batch(out), tile.shared
        q_dot, k_dot = tile.moving(state.q_dot), tile.moving(state.k_dot)
        mixed = q_dot is not None or k_dot is not None
        count = len(target)
        if mixed:
            shape = (count, *self.A.shape[1:])
            kept = tile.moving(state.logits_dot)
            logits = kept if kept is not None else space.take("core.rate", *shape, like=self.q)
            if q_dot is not None:
                torch.bmm(q_dot, at(self.k_columns, count), out=logits)
            if k_dot is not None:
                columns = _transposed(k_dot, "core.columns", space)
                _accumulate(logits, at(self.q, count), columns, done=q_dot is not None)
            if self.allowed is not None:
                self._forbid(logits, tile)
            if self.slope is not None:
                slope = tile.slots(self.slope)
                _grouped(logits, slope).mul_(slope)
            moved = self._centre(logits, kept is not None, tile, space, tile.moving(state.centre))
            torch.bmm(moved, at(self.v, count), out=target)
        v_dot = tile.moving(state.v_dot)
        if v_dot is not None:
            _accumulate(target, at(self.A, count), v_dot, done=mixed)

    def _centre(
        self, logits: Tensor, kept: bool, tile: _Tile, space: Buffers, keep: Tensor | None = None
    ) -> Tensor:
        """Ȧ; ``logits`` are centred if they are kept, else they may be overwritten.

        ``keep`` takes what is subtracted.
        """
        if not self.softmax:
            return logits
        if not kept:
            return self._softmax_backward(logits, tile)
        weights = tile.slots(self.A)
        moved = space.take("core.moved", *logits.shape, like=self.q)
        grouped, wide = _grouped(logits, weights), _grouped(moved, weights)
        torch.mul(grouped, weights, out=wide)
        centre = wide.sum(-1, keepdim=True)
        wide.addcmul_(weights, centre, value=-1)
        grouped.sub_(centre)
        if keep is not None:
            keep.copy_(centre.view(keep.shape))
        return moved

    def _softmax_backward(self, logits: Tensor, tile: _Tile) -> Tensor:
        """A ⊙ (X − rowsum(A ⊙ X)), written over X."""
        weights = tile.slots(self.A)
        if logits.shape == weights.shape and logits.is_cpu and weights.shape[-1] >= _FUSED_KEYS:
            return torch._softmax_backward_data(
                logits, weights, -1, logits.dtype, grad_input=logits
            )
        grouped = _grouped(logits, weights)
        grouped *= weights
        grouped.addcmul_(weights, grouped.sum(-1, keepdim=True), value=-1)
        return logits

    def _pull_tile(
        self,
        tile: _Tile,
        rate: Tensor | None,
        state: CoreTangent,
        outs: list[Tensor | None],
        space: Buffers,
    ) -> None:
        at, rate_part = tile.shared, tile.moving(rate)
        out_q, out_k, out_v = (tile.moving(out) for out in outs)
        if out_v is not None:
            self._value_rate(tile, rate_part, state, out_v, space)
        if out_q is None and out_k is None:
            return
        w = None
        if state.q_dot is not None or state.k_dot is not None or state.logits_dot is not None:
            w = tile.slots(self._w) if self._w is not None else self._adjoint(tile, space)
        e = self._logits_rate(tile, rate_part, state, w, space)
        if self.slope is not None:
            w = self._through_cap(tile, state, w, e)
        for out, end, moved in ((out_q, self.k, state.k_dot), (out_k, self.q, state.q_dot)):
            if out is None:
                continue
            count, turned = len(out), out is out_k
            if e is not None:
                torch.bmm(e.mT if turned else e, at(end, count), out=out)
            other = tile.moving(moved)
            if other is not None:
                assert w is not None
                left = at(w, count, chosen=True)
                _accumulate(
                    out, left.mT if turned else left, other, done=e is not None, alpha=self.scale
                )
            if e is None and other is None:
                out.zero_()

    def _through_cap(
        self, tile: _Tile, state: CoreTangent, w: Tensor | None, e: Tensor | None
    ) -> Tensor | None:
        """w g; Rδ_T' ``e`` becomes Rδ_T = g e + ġ w in place."""
        assert self.slope is not None
        assert self.bend is not None
        slope = tile.slots(self.slope)
        if e is not None:
            grouped = _grouped(e, slope).mul_(slope)
            logits_dot, centre = tile.moving(state.logits_dot), tile.moving(state.centre)
            if logits_dot is not None:
                assert w is not None
                assert centre is not None
                moved = _grouped(logits_dot + centre, slope)
                grouped.addcmul_(moved, w * tile.slots(self.bend))
        return None if w is None else w * slope

    def _value_rate(
        self,
        tile: _Tile,
        rate: Tensor | None,
        state: CoreTangent,
        out: Tensor,
        space: Buffers,
    ) -> None:
        logits_dot = tile.moving(state.logits_dot)
        if logits_dot is not None:
            assert self.delta is not None
            moved = logits_dot
            if self.softmax:
                weights = tile.slots(self.A)
                moved = space.take("core.moved", *logits_dot.shape, like=self.q)
                torch.mul(_grouped(logits_dot, weights), weights, out=_grouped(moved, weights))
            torch.bmm(moved.mT, tile.shared(self.delta, len(out)), out=out)
        if rate is not None:
            weights = tile.shared(self.A, len(out))
            _accumulate(out, weights.mT, rate, done=logits_dot is not None)
        elif logits_dot is None:
            out.zero_()

    def _logits_rate(
        self,
        tile: _Tile,
        rate: Tensor | None,
        state: CoreTangent,
        w: Tensor | None,
        space: Buffers,
    ) -> Tensor | None:
        """E of some directions and slots, with its row sums removed."""
        v_dot, logits_dot = tile.moving(state.v_dot), tile.moving(state.logits_dot)
        if not self.softmax:
            logits_dot = None
        term = next((t for t in (rate, v_dot, logits_dot) if t is not None), None)
        if term is None:
            return None
        count = len(term)
        e = space.take("core.rate", count, *self.A.shape[1:], like=self.q)
        if rate is not None:
            torch.bmm(rate, tile.shared(self.v_columns, count), out=e)
        if v_dot is not None:
            assert self.delta is not None
            columns = _transposed(v_dot, "core.columns", space)
            _accumulate(e, tile.shared(self.delta, count), columns, done=rate is not None)
        done = rate is not None or v_dot is not None
        if not self.softmax:
            if self.allowed is not None:
                self._forbid(e, tile)
            return e
        if logits_dot is None:
            return self._softmax_backward(e, tile)
        assert w is not None
        weights = tile.slots(self.A)
        grouped, moved = _grouped(e, weights), _grouped(logits_dot, weights)
        if done:
            grouped *= weights
            grouped.addcmul_(w, moved)
        else:
            torch.mul(w, moved, out=grouped)
        grouped.addcmul_(weights, grouped.sum(-1, keepdim=True), value=-1)
        return e

    def _adjoint(self, tile: _Tile, space: Buffers) -> Tensor:
        """w of some slots (S', M, L)."""
        assert self.delta is not None
        weights = tile.slots(self.A)
        out = space.take("core.adjoint", *weights.shape, like=self.q)
        torch.bmm(tile.slots(self.delta), tile.slots(self.v_columns), out=out)
        if self.row_sums is not None:
            return out.sub_(tile.slots(self.row_sums)).mul_(weights)
        if self.allowed is not None:
            self._forbid(out, tile)
        return out

    def _forbid(self, pairs: Tensor, tile: _Tile) -> None:
        """Multiply pairs (K'·S', M, L) by the 0/1 pattern, (S' or 1, M or 1, L)."""
        assert self.allowed is not None
        allowed = self.allowed if self.allowed.shape[0] == 1 else tile.slots(self.allowed)
        grouped = pairs if allowed.shape[0] == 1 else _grouped(pairs, allowed)
        grouped *= allowed


_EVERY = slice(None)
# Larger tiles fall out of the cache, smaller ones spend their time in the interpreter.
_TILE_BYTES = 2**20
_FEW = 4  # directions that go together, or else one by one: together the shared factors are copied
_FUSED_KEYS = 32  # fewer: torch's fused kernel is slower than the passes it saves


@dataclass(frozen=True)
class _Tile:
    """Some directions and some slots; several directions only with all slots."""

    directions: slice
    chosen: slice

    def slots(self, shared: Tensor) -> Tensor:
        """The chosen slots (S', …) of a tensor that all directions share."""
        return shared if self.chosen is _EVERY else shared[self.chosen]

    def shared(self, tensor: Tensor, count: int, *, chosen: bool = False) -> Tensor:
        """The same repeated to a batch of ``count`` = K'·S'; ``chosen``: its slots are already."""
        part = tensor if chosen else self.slots(tensor)
        s, a, b = part.shape
        return part if s == count else part.expand(count // s, s, a, b).reshape(count, a, b)

    def batch(self, moving: Tensor) -> Tensor:
        """(K, S, a, b) → the tile's batch (K'·S', a, b), a view."""
        if self.directions is _EVERY:
            return moving.view(-1, *moving.shape[2:])
        if self.chosen is _EVERY:
            return moving[self.directions].view(-1, *moving.shape[2:])
        return moving[self.directions.start, self.chosen]

    def moving(self, moving: Tensor | None) -> Tensor | None:
        return None if moving is None else self.batch(moving)


_ALL = _Tile(_EVERY, _EVERY)


def _grouped(batch: Tensor, slots: Tensor) -> Tensor:
    """A batch (K'·S', M, L) as it meets what its directions share (S', M, L)."""
    count, m, length = batch.shape
    s = slots.shape[0]
    return batch if s == count else batch.view(count // s, s, m, length)


def _accumulate(
    out: Tensor, left: Tensor, right: Tensor, *, done: bool, alpha: float = 1.0
) -> None:
    """out = α left right, added to what ``out`` holds where that is ``done``."""
    torch.baddbmm(out, left, right, beta=1 if done else 0, alpha=alpha, out=out)


def _transposed(rows: Tensor, key: str, space: Buffers) -> Tensor:
    """(B, L, a) → (B, a, L) in memory: as a right factor it is read along its rows."""
    count, length, a = rows.shape
    return space.take(key, count, a, length, like=rows).copy_(rows.mT)
