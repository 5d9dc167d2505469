r"""A chain of token-wise maps, differentiated twice by one elimination.

A chain is a graph of nodes, each a row of numbers at every token, joined by maps. Three kinds are
enough for a Transformer block: linear maps, pointwise maps, and gradient maps y = ∇ψ(x), whose
Jacobian is symmetric (softmax moments seen from one query row, normalisations). For nodes a before
b, with e_a an independent push at a,

    T(a, b) = ∂b/∂e_a                     tangents:  T(a, b) = Σ_c T(c, b) J_ac  over consumers c
    Λ(b, a) = ∂²ℓ/∂e_b∂e_a                elimination, rows b: Λ(b, a) = Σ_c Λ(b, c) J_ac
    Ψ_c     = Σ_k δ_k ∂²c_k               the bend of a map under the adjoint δ = ∂ℓ/∂c

Where every later node is reached through one narrow node w, the *waist* of a, nothing wide is ever
multiplied out before it is asked for:

    Λ(b, a) = Λ(b, w) T(a, w)                                           b at or behind the waist
    Λ(b, a) = T(b, w)ᵀ Λ(w, w) T(a, w) + Σ_c T(b, x_c)ᵀ Ψ_c T(a, x_c)   both in front of it

so the curvature at an activation stays (J, Λ_S, ρ) and its diagonal is read without forming it.
A parameter acts at a node through a ``Leaf``: e = W α with α the value of an earlier node, or
e = w ⊙ α. Every block of the Hessian is then Σ_i α (M α' + K δ') with M = Λ and K = T(f, input of
g). ``None`` is zero throughout; δ = None leaves H_o, Λ = None leaves H_f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# ---- matrices at every token: (n or 1, rows, columns), diagonal ones, and zero -------------------


@dataclass(frozen=True)
class Diagonal:
    """diag(values) at every token, (n or 1, width); the identity without values."""

    values: Tensor | None = None


class Symmetric:
    """A symmetric matrix at every token that is formed only where it is read whole."""

    def dense(self) -> Tensor:
        """(n, w, w)."""
        raise NotImplementedError

    def times(self, t: Tensor) -> Tensor:
        """Its product with rows t (n, k, w)."""
        return t @ self.dense()

    def diagonal_along(self, T: Matrix) -> Tensor:
        """diag(Tᵀ Ψ T) (n, columns of T)."""
        product = times(transpose(T), self.dense())
        assert isinstance(product, Tensor)
        if isinstance(T, Diagonal):
            diagonal = product.diagonal(dim1=1, dim2=2)
            return diagonal if T.values is None else diagonal * T.values
        return (product.mT * T).sum(1)


Matrix = Tensor | Diagonal


def transpose(a: Matrix) -> Matrix:
    """Aᵀ."""
    return a if isinstance(a, Diagonal) else a.mT


def times(a: Matrix | None, b: Matrix | None) -> Matrix | None:
    """A B; where one of them is the same at every token, as one large product."""
    if a is None or b is None:
        return None
    if isinstance(a, Diagonal):
        if a.values is None:
            return b
        if isinstance(b, Diagonal):
            return a if b.values is None else Diagonal(a.values * b.values)
        return a.values.unsqueeze(-1) * b
    if isinstance(b, Diagonal):
        return a if b.values is None else a * b.values.unsqueeze(-2)
    if len(b) == 1:
        return a @ b[0]
    if len(a) == 1:
        return (b.mT @ a[0].mT).mT
    return a @ b


def plus(a: Matrix | None, b: Matrix | None, *, fresh: bool = False) -> Matrix | None:
    """A + B, written over A where that is ``fresh`` and B diagonal."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a + b
    if isinstance(a, Diagonal) and isinstance(b, Diagonal):
        assert a.values is not None
        assert b.values is not None
        return Diagonal(a.values + b.values)
    dense, diagonal = (a, b) if isinstance(a, Tensor) else (b, a)
    assert isinstance(dense, Tensor)
    assert isinstance(diagonal, Diagonal)
    total = dense if fresh and dense is a else dense.clone()
    total.diagonal(dim1=1, dim2=2).add_(1.0 if diagonal.values is None else diagonal.values)
    return total


# ---- maps ----------------------------------------------------------------------------------------


class Map:
    """One input's way to a node: its Jacobian J, applied from either side.

    ``cheap``: J costs O(width) a row, so the elimination simply walks through it.
    """

    cheap = False

    def pull(self, rows: Matrix) -> Matrix:
        """R J for rows R (n or 1, r, width of the output)."""
        raise NotImplementedError

    def adjoint(self, t: Tensor) -> Tensor:
        """The same for few rows (n, k, w), forming no matrix."""
        pulled = self.pull(t)
        assert isinstance(pulled, Tensor)
        return pulled

    def push(self, t: Tensor) -> Tensor:
        """Tangents t (n, k, width of the input) → (n, k, width of the output); J symmetric."""
        return self.adjoint(t)


class Linear(Map):
    """y = x Wᵀ, or with ``columns`` the part of y's input that x is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def pull(self, rows: Matrix) -> Matrix:
        product = times(rows, self.weight.unsqueeze(0))
        assert product is not None
        return product

    def push(self, t: Tensor) -> Tensor:
        return t @ self.weight.mT


class Scale(Map):
    """y = x ⊙ slope, the slope (n or 1, w); the identity without one."""

    cheap = True

    def __init__(self, slope: Tensor | None = None, *, cheap: bool = True) -> None:
        self.slope, self.cheap = Diagonal(slope), cheap

    def pull(self, rows: Matrix) -> Matrix:
        product = times(rows, self.slope)
        assert product is not None
        return product


# ---- the chain -----------------------------------------------------------------------------------

Bend = tuple["Node", "Node", Matrix | Symmetric]


@dataclass(eq=False)
class Node:
    """One row of numbers at every token; ``bends`` gives Ψ between its inputs from its adjoint."""

    order: int
    width: int
    value: Tensor
    sources: tuple[tuple[Node, Map], ...] = ()
    bends: Callable[[Tensor], list[Bend]] | None = None
    consumers: list[tuple[Node, Map]] = field(default_factory=list)
    waist: bool = False

    @cached_property
    def depth(self) -> int:
        """How many maps lie before it: all heads' queries stand before all their keys."""
        return 1 + max((source.depth for source, _ in self.sources), default=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """Where a parameter acts: e = W α at ``node``, or e = w ⊙ α with ``gain``.

    ``inputs``: the nodes whose values stand side by side in α, from these columns on; what no node
    covers (the 1 of a bias, fixed tokens) does not move. The flat place is in ``segments``.
    """

    kind: str
    head: int
    node: Node
    alpha: Tensor  # (n, a)
    inputs: tuple[tuple[Node, int], ...]
    gain: bool
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """How many core indices it has."""
        return max(segment.core[1] for segment in self.segments)

    @property
    def depth(self) -> int:
        """After every leaf that moves its α: what K of a pair relies on."""
        return max(self.node.depth, 1 + max((x.depth for x, _ in self.inputs), default=0))

    @property
    def activation(self) -> Tensor:
        """α (n, a) as a factor of every entry; a gain's stands in M and K already."""
        return torch.ones_like(self.alpha[:, :1]) if self.gain else self.alpha

    def segment(self, name: str) -> Segment | None:
        """The stretch of the parameter ``name``, if the leaf has one."""
        return next((s for s in self.segments if s.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of a leaf that is one stretch of one named parameter.

    Flat position of (core r, activation a): start + r·|a| + a, or start + a·|r| + r where
    ``activation_major``. ``core`` and ``activation`` are the leaf's index ranges it covers.
    """

    name: str
    start: int
    core: tuple[int, int]
    activation: tuple[int, int]
    activation_major: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(core size, activation size)."""
        return self.core[1] - self.core[0], self.activation[1] - self.activation[0]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """M (n, r, c) of one block, and K with δ' where the later leaf's α depends on the earlier.

    ``slope`` is K (n, r, w) on the activation columns [slope_start, slope_start + w);
    ``slope_diagonal`` (n, r) stands for K with one entry a row, at column slope_start + r.
    """

    core: Tensor
    slope: Tensor | None = None
    slope_diagonal: Tensor | None = None
    slope_start: int = 0
    delta: Tensor | None = None


class Chain:
    """Nodes in the order of the computation, their leaves, and the two elimination rules."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[Leaf] = []
        self.lam: Tensor | None = None
        self.seed: Tensor | None = None
        self._known: dict[tuple[str, int, int], Matrix | None] = {}
        self._deltas: dict[int, Tensor] = {}
        self._bends: list[Bend] | None = None

    # ---- building --------------------------------------------------------------------------

    def node(
        self,
        width: int,
        value: Tensor,
        *sources: tuple[Node | None, Map],
        bends: Callable[[Tensor], list[Bend]] | None = None,
        waist: bool = False,
    ) -> Node:
        """A new node; a source that is None is fixed and has no way back."""
        live = tuple((source, way) for source, way in sources if source is not None)
        made = Node(len(self.nodes), width, value, live, bends, waist=waist)
        for source, way in live:
            source.consumers.append((made, way))
        self.nodes.append(made)
        return made

    def leaf(
        self,
        kind: str,
        node: Node,
        alpha: Tensor,
        segments: Sequence[Segment],
        *inputs: tuple[Node, int],
        head: int = 0,
        gain: bool = False,
    ) -> None:
        """A parameter that acts at ``node``."""
        self.leaves.append(
            Leaf(
                kind=kind,
                head=head,
                node=node,
                alpha=alpha,
                inputs=inputs,
                gain=gain,
                segments=tuple(segments),
            )
        )

    def seeded(self, lam: Tensor | None, delta: Tensor | None) -> Chain:
        """The chain with Λ (n, d, d) and δ (n, d) at its last node."""
        self.lam, self.seed = lam, delta
        self._known, self._deltas, self._bends = {}, {}, None
        self.leaves.sort(key=lambda leaf: (leaf.depth, leaf.node.order))
        return self

    # ---- first order -----------------------------------------------------------------------

    @property
    def output(self) -> Node:
        return self.nodes[-1]

    def adjoint(self, node: Node, seeds: Tensor, known: dict[int, Tensor]) -> Tensor:
        """Adjoints (n, k, w) at ``node`` of rows ``seeds`` (n, k, d) at the output."""
        if node is self.output:
            return seeds
        if node.order not in known:
            total: Tensor | None = None
            for consumer, way in node.consumers:
                pulled = way.adjoint(self.adjoint(consumer, seeds, known))
                total = pulled if total is None else total + pulled
            assert total is not None
            known[node.order] = total
        return known[node.order]

    def delta(self, node: Node) -> Tensor:
        """∂ℓ/∂node (n, w)."""
        assert self.seed is not None
        return self.adjoint(node, self.seed.unsqueeze(1), self._deltas).squeeze(1)

    def tangent(self, a: Node, b: Node) -> Matrix | None:
        """T(a, b) = ∂b/∂e_a (n or 1, width of b, width of a)."""
        if a is b:
            return Diagonal()
        if a.order > b.order:
            return None
        key = ("T", b.order, a.order)
        if key not in self._known:
            waist = self._waist(a)
            if waist is not None and waist.order < b.order:
                result = times(self.tangent(waist, b), self.tangent(a, waist))
            else:
                result = None
                for consumer, way in a.consumers:
                    behind = self.tangent(consumer, b)
                    if behind is not None:
                        result = plus(result, way.pull(behind))
            self._known[key] = result
        return self._known[key]

    def _waist(self, a: Node) -> Node | None:
        return next((node for node in self.nodes[a.order + 1 :] if node.waist), None)

    # ---- second order ----------------------------------------------------------------------

    def second(self, b: Node, a: Node) -> Matrix | None:
        """Λ(b, a) = ∂²ℓ/∂e_b∂e_a (n, width of b, width of a)."""
        if a.order > b.order:
            turned = self.second(a, b)
            return None if turned is None else transpose(turned)
        if a is self.output:
            return self.lam
        key = ("second", b.order, a.order)
        if key not in self._known:
            self._known[key] = self._eliminate(b, a)
        return self._known[key]

    def _eliminate(self, b: Node, a: Node) -> Matrix | None:
        if all(way.cheap for _, way in a.consumers):
            total = None
            for consumer, way in a.consumers:
                behind = self.second(b, consumer)
                if behind is not None:
                    total = plus(total, way.pull(behind))
            return plus(total, self._bent(b, a)) if a is b else total
        waist = self._waist(a)
        assert waist is not None
        if b.order >= waist.order:
            return times(self.second(b, waist), self.tangent(a, waist))
        ahead = self.tangent(b, waist)
        outer = None if ahead is None else times(transpose(ahead), self.second(waist, a))
        return plus(outer, self._bent(b, a), fresh=isinstance(ahead, Tensor))

    def bends(self) -> list[Bend]:
        """(x, y, Ψ) of every bent map between its inputs."""
        if self._bends is None:
            self._bends = []
            for node in self.nodes:
                if node.bends is not None and self.seed is not None:
                    self._bends += node.bends(self.delta(node))
        return self._bends

    def _bent(self, b: Node, a: Node) -> Matrix | None:
        """Σ T(b, x)ᵀ Ψ T(a, y) over the maps in front of the waist."""
        total = None
        for x, y, bend in self._near(b, a):
            behind, along = self.tangent(b, x), self.tangent(a, y)
            if behind is None or along is None:
                continue
            psi = bend.dense() if isinstance(bend, Symmetric) else bend
            total = plus(total, times(times(transpose(behind), psi), along))
        return total

    def _near(self, b: Node, a: Node) -> list[Bend]:
        waist = self._waist(b)
        end = len(self.nodes) if waist is None else waist.order
        if all(way.cheap for _, way in a.consumers):  # b is a: only what bends its own value
            return [bend for bend in self.bends() if bend[0] is a]
        return [(x, y, bend) for x, y, bend in self.bends() if b.order <= x.order < end > y.order]

    def second_diagonal(self, a: Node) -> Tensor:
        """The diagonal of Λ(a, a) (n, w), Λ itself unformed where a stands before a waist."""
        if a is self.output or all(way.cheap for _, way in a.consumers):
            whole = self.second(a, a)
            if whole is None:
                return self._zeros(a.width)
            assert isinstance(whole, Tensor)
            return whole.diagonal(dim1=1, dim2=2)
        key = ("diagonal", a.order, a.order)
        if key not in self._known:
            self._known[key] = self._diagonal(a)
        found = self._known[key]
        assert isinstance(found, Tensor)
        return found

    def _diagonal(self, a: Node) -> Tensor:
        (consumer, way), *others = a.consumers
        if isinstance(way, Scale) and way.slope.values is not None and not others:
            # D Λ D + Ψ of a pointwise map: Λ behind it often has the same T at every token
            total = self.second_diagonal(consumer) * way.slope.values.square()
            return self._add_bent_diagonal(total, [b for b in self.bends() if b[0] is b[1] is a])
        waist = self._waist(a)
        assert waist is not None
        ahead, curved = self.tangent(a, waist), self.second(waist, a)
        total = self._zeros(a.width)
        if isinstance(curved, Tensor):
            if isinstance(ahead, Tensor):
                total = (curved * ahead).sum(1)
            elif isinstance(ahead, Diagonal):
                moved = times(transpose(ahead), curved)
                assert isinstance(moved, Tensor)
                total = moved.diagonal(dim1=1, dim2=2)
        return self._add_bent_diagonal(total, self._near(a, a), a)

    def _add_bent_diagonal(self, total: Tensor, bends: list[Bend], a: Node | None = None) -> Tensor:
        """Plus diag(T(a, x)ᵀ Ψ T(a, y)); without ``a`` x = y is the node itself."""
        for x, y, bend in bends:
            left, right = self.tangent(a or x, x), self.tangent(a or y, y)
            if left is None or right is None:
                continue
            if isinstance(bend, Symmetric):
                total = total + bend.diagonal_along(right)
                continue
            product = times(times(transpose(left), bend), right)
            if isinstance(product, Diagonal):
                assert product.values is not None
                total = total + product.values
            elif product is not None:
                total = total + product.diagonal(dim1=1, dim2=2)
        return total

    def _zeros(self, width: int) -> Tensor:
        return self.leaves[0].alpha.new_zeros(len(self.leaves[0].alpha), width)

    # ---- blocks ----------------------------------------------------------------------------

    def pair(self, f: Leaf, g: Leaf) -> Pair:
        """M, K and δ' of block (f, g), f not after g."""
        core = self._dense(self.second(g.node, f.node), g.node.width, f.node.width).mT
        core = core[:, : f.size, : g.size]
        slope, start, delta = None, 0, None
        if self.seed is not None:
            slope, start = self._slope(f, g)
            delta = None if slope is None else self.delta(g.node)[:, : g.size]
        if g.gain:  # its activation multiplies entry by entry: K falls on the same entries as M
            core = core * g.alpha.unsqueeze(1)
            if slope is not None and delta is not None:
                moved = (
                    self._dense(slope, *([f.size, g.size]))
                    if isinstance(slope, Diagonal)
                    else slope
                )
                core = core + moved * delta.unsqueeze(1)
            slope = delta = None
        if f.gain:
            core = core * f.alpha.unsqueeze(-1)
            if isinstance(slope, Diagonal):
                ones = f.alpha.new_ones(1, f.size) if slope.values is None else slope.values
                slope = Diagonal(ones * f.alpha)
            elif slope is not None:
                slope = slope * f.alpha.unsqueeze(-1)
        if isinstance(slope, Diagonal):
            assert delta is not None
            values = slope.values
            if values is None:
                values = delta.new_ones(1, f.size)
            return Pair(
                core=core,
                slope_diagonal=values.expand(len(delta), -1)[:, : f.size],
                slope_start=start,
                delta=delta,
            )
        return Pair(core=core, slope=slope, slope_start=start, delta=delta)

    def _slope(self, f: Leaf, g: Leaf) -> tuple[Matrix | None, int]:
        """K = T(f, α of g)ᵀ (n, r, w) and the column of α' it begins at."""
        parts: list[tuple[Matrix, int, int]] = []
        for node, start in g.inputs:
            T = self.tangent(f.node, node)
            if T is not None:
                parts.append((T, start, node.width))
        if not parts:
            return None, 0
        if len(parts) == 1:
            T, start, _ = parts[0]
            if isinstance(T, Diagonal):
                values = None if T.values is None else T.values[:, : f.size]
                return Diagonal(values), start
            if start < 0:  # only the input's columns from −start on are in α
                return T.mT[:, : f.size, -start:], 0
            width = g.alpha.shape[1] - start
            return T.mT[:, : f.size, :width], start
        first = parts[0][1]
        size = parts[-1][1] + parts[-1][2] - first
        whole = self._zeros(f.size).unsqueeze(-1).repeat(1, 1, size)
        for T, start, width in parts:
            dense = self._dense(T, width, f.node.width)
            whole[..., start - first : start - first + width] = dense.mT[:, : f.size]
        return whole, first

    def _dense(self, a: Matrix | None, rows: int, columns: int) -> Tensor:
        if isinstance(a, Tensor):
            return a
        n = len(self.leaves[0].alpha)
        whole = self.leaves[0].alpha.new_zeros(n, rows, columns)
        if isinstance(a, Diagonal):
            whole.diagonal(dim1=1, dim2=2).copy_(
                torch.ones_like(whole[:, 0]) if a.values is None else a.values
            )
        return whole

    # ---- products --------------------------------------------------------------------------

    def product(
        self,
        leaf_tangents: dict[Leaf, Tensor],
        curvature: Callable[[Tensor], Tensor] | None,
        *,
        bent: bool = True,
    ) -> dict[Leaf, Tensor]:
        """H v leaf by leaf: tangents (r, a, k) of the leaves → rates (r, a, k).

        Tangents forward, e = V α; then rates backward, Rδ_x = Jᵀ Rδ_y + Ψ ẋ + Vᵀ δ_e. ``curvature``
        maps the output's tangent (n, k, d) to Λ times it; None leaves H_f.
        """
        moved: dict[int, Tensor] = {}
        for leaf, v in leaf_tangents.items():
            if leaf.gain:
                push = leaf.alpha.unsqueeze(1) * v.squeeze(1).mT
            else:
                push = torch.einsum("na,rak->nkr", leaf.alpha, v)
            push = torch.nn.functional.pad(push, (0, leaf.node.width - leaf.size))
            order = leaf.node.order
            moved[order] = push if order not in moved else moved[order] + push
        for node in self.nodes:
            for source, way in node.sources:
                if source.order in moved:
                    step = way.push(moved[source.order])
                    moved[node.order] = (
                        step if node.order not in moved else moved[node.order] + step
                    )
        rates: dict[int, Tensor] = {}

        def add(node: Node, rate: Tensor) -> None:
            rates[node.order] = rate if node.order not in rates else rates[node.order] + rate

        out: dict[Leaf, Tensor] = {}
        if curvature is not None and self.output.order in moved:
            add(self.output, curvature(moved[self.output.order]))
        if bent:
            for x, y, bend in self.bends():
                if y.order in moved:
                    t = moved[y.order]
                    if isinstance(bend, Symmetric):
                        add(x, bend.times(t))
                    else:
                        turned = times(t, bend)
                        assert isinstance(turned, Tensor)
                        add(x, turned)
        if bent:
            for leaf, v in leaf_tangents.items():
                delta = self.delta(leaf.node)[:, : leaf.size]
                if leaf.gain:
                    back = delta.unsqueeze(1) * v.squeeze(1).mT
                    if leaf.alpha.shape[1] == 1:
                        back = back.sum(-1, keepdim=True)
                else:
                    back = torch.einsum("nr,rak->nka", delta, v)
                for node, start in leaf.inputs:
                    if start < 0:
                        piece = torch.nn.functional.pad(back, (-start, 0))
                    else:
                        piece = back[..., start : start + node.width]
                        piece = torch.nn.functional.pad(piece, (0, node.width - piece.shape[-1]))
                    add(node, piece)
        for node in reversed(self.nodes):
            if node.order in rates:
                for source, way in node.sources:
                    add(source, way.adjoint(rates[node.order]))
        for leaf, v in leaf_tangents.items():
            rate = rates.get(leaf.node.order)
            total = torch.zeros_like(v)
            if rate is not None:
                rate = rate[..., : leaf.size]
                if leaf.gain:
                    total += (rate * leaf.alpha.unsqueeze(1)).sum(0).mT.unsqueeze(1)
                else:
                    total += torch.einsum("nkr,na->rak", rate, leaf.alpha)
            if bent:
                delta = self.delta(leaf.node)[:, : leaf.size]
                for node, start in leaf.inputs:
                    if node.order not in moved:
                        continue
                    dot = moved[node.order]
                    dot = (
                        dot[..., -start:] if start < 0 else dot[..., : leaf.alpha.shape[1] - start]
                    )
                    if leaf.gain:
                        total += (dot * delta.unsqueeze(1)).sum(0).mT.unsqueeze(1)
                    else:
                        first = max(start, 0)
                        width = dot.shape[-1]
                        total[:, first : first + width] += torch.einsum("nkb,nr->rbk", dot, delta)
            out[leaf] = total
        return out
