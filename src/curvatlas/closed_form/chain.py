r"""A chain of token-wise maps, differentiated twice by one elimination.

A chain is a graph of nodes, each a row of numbers at every token, joined by maps. With e_a an
independent push at node a, and nodes in the order of the computation,

    T(a, b) = ∂b/∂e_a          tangents:     T(a, b) = Σ_c T(c, b) J_ac        over a's consumers c
    Λ(b, a) = ∂²ℓ/∂e_b∂e_a     elimination:  Λ(b, a) = Σ_c Λ(b, c) J_ac + Σ_x T(b, x)ᵀ Ψ_xa
    Ψ_xy    = Σ_k δ_k ∂²c_k/∂x∂y             the bend of a map c(x, y) under the adjoint δ = ∂ℓ/∂c

Where every later node is reached through one narrow node w, the *waist* of a, nothing wide is ever
multiplied out before it is asked for:

    Λ(b, a) = Λ(b, w) T(a, w)                                               b at or behind the waist
    Λ(b, a) = T(b, w)ᵀ Λ(w, w) T(a, w) + Σ_xy T(b, x)ᵀ Ψ_xy T(a, y)         both in front of it

so the curvature at an activation stays (J, Λ_S, ρ) and its diagonal is read without forming it.
A parameter acts at one node as e = W α, with α the value of earlier nodes (``Leaf``). Every block
of the Hessian is then Σ_i α_i (M_i α'_i + K_i δ'_i) with M = Λ and K = T(f, α of g) (``Pair``).
``None`` is zero throughout; δ = None leaves H_o, Λ = None leaves H_f.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

# ---- matrices at every token: (n or 1, rows, columns), diagonal ones, and zero -------------------


@dataclass(frozen=True)
class Diagonal:
    """diag(values) at every token, (n or 1, width)."""

    values: Tensor

    @property
    def mT(self) -> Diagonal:
        """Its transpose."""
        return self


Matrix = Tensor | Diagonal


def times(a: Matrix, b: Matrix) -> Matrix:
    """A B, always fresh; where one of them is the same at every token, as one large product."""
    if isinstance(a, Diagonal):
        if isinstance(b, Diagonal):
            return Diagonal(a.values * b.values)
        return a.values.unsqueeze(-1) * b
    if isinstance(b, Diagonal):
        return a * b.values.unsqueeze(-2)
    if len(b) == 1:
        return a @ b[0]
    return (b.mT @ a[0].mT).mT if len(a) == 1 else a @ b


def total(terms: Iterable[Matrix | None]) -> Matrix | None:
    """The sum of fresh matrices; a diagonal is added in place."""
    result: Matrix | None = None
    for term in terms:
        if term is None or result is None:
            result = result if term is None else term
        elif isinstance(term, Diagonal) and isinstance(result, Diagonal):
            result = Diagonal(result.values + term.values)
        elif isinstance(term, Tensor) and isinstance(result, Tensor):
            result = result + term
        else:
            whole, diagonal = (result, term) if isinstance(result, Tensor) else (term, result)
            assert isinstance(whole, Tensor)
            assert isinstance(diagonal, Diagonal)
            if len(whole) < len(diagonal.values):
                whole = whole.repeat(len(diagonal.values), 1, 1)
            whole.diagonal(dim1=1, dim2=2).add_(diagonal.values)
            result = whole
    return result


def entries(a: Matrix) -> Tensor:
    """What differs from zero in it."""
    return a.values if isinstance(a, Diagonal) else a


def diagonal_of(a: Matrix) -> Tensor:
    """The diagonal (n or 1, w)."""
    return a.values if isinstance(a, Diagonal) else a.diagonal(dim1=1, dim2=2)


def diagonal_product(a: Matrix, b: Matrix) -> Tensor:
    """diag(A B) (n or 1, w), A B unformed."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.mT * b).sum(1)
    return diagonal_of(times(a, b))


# ---- maps and their bends ------------------------------------------------------------------------


class Map:
    """One input's way to a node: its Jacobian J (n or 1, width out, width in)."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    @property
    def pointwise(self) -> bool:
        """Whether J costs O(width) a row."""
        return isinstance(self.matrix, Diagonal)

    def pull(self, rows: Matrix) -> Matrix:
        """R J for rows R (n or 1, r, width out), fresh."""
        return times(rows, self.matrix)

    def adjoint(self, t: Tensor) -> Tensor:
        """The same for a few rows (n, k, width out), forming no matrix."""
        return _rows(self.pull(t))

    def push(self, t: Tensor) -> Tensor:
        """Tangents t (n, k, width in) → (n, k, width out)."""
        return _rows(times(t, self.matrix.mT))


class Bend:
    """Ψ_xy (n or 1, w_x, w_y), the second derivative of a map between two of its inputs."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def times(self, t: Tensor) -> Tensor:
        """Ψ t for a few rows t (n, k, w_y)."""
        return _rows(times(t, self.matrix.mT))

    def diagonal_along(self, left: Matrix, right: Matrix) -> Tensor:
        """diag(leftᵀ Ψ right) (n or 1, columns)."""
        return diagonal_product(times(left.mT, self.matrix), right)


def _rows(a: Matrix) -> Tensor:
    assert isinstance(a, Tensor)
    return a


# ---- nodes and leaves ----------------------------------------------------------------------------

Bends = list[tuple["Node", "Node", Bend]]


@dataclass(eq=False)
class Node:
    """One row of numbers at every token; ``bends`` gives Ψ between its inputs from its adjoint."""

    order: int
    value: Tensor  # (n, w)
    sources: tuple[tuple[Node, Map], ...] = ()
    bends: Callable[[Tensor], Bends] | None = None
    waist: bool = False
    fixed: bool = False  # no parameter moves it
    consumers: list[tuple[Node, Map]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """How many numbers a token has."""
        return self.value.shape[-1]

    @cached_property
    def depth(self) -> int:
        """How many maps lie before it: all heads' queries stand before all their keys."""
        return 1 + max((source.depth for source, _ in self.sources), default=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """One stretch of a parameter, the matrix W (core, activation) of e = W α at ``node``.

    Flat position of (core r, activation a): start + r·|a| + a, or ``turned`` start + a·|r| + r.
    """

    name: str
    start: int
    node: Node
    columns: slice  # of the node, where e is added
    alpha: Tensor  # (n, a)
    inputs: tuple[tuple[Node, slice], ...] = ()  # whose columns stand side by side in α and move
    turned: bool = False
    head: int = 0

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(core, activation)."""
        return len(range(*self.columns.indices(self.node.width))), self.alpha.shape[-1]

    @property
    def size(self) -> int:
        """How many entries it has."""
        return self.shape[0] * self.shape[1]

    @property
    def rows(self) -> slice:
        """Its flat places."""
        return slice(self.start, self.start + self.size)

    @property
    def depth(self) -> int:
        """After every leaf that moves its α: what K of a pair relies on."""
        return max(self.node.depth, 1 + max((x.depth for x, _ in self.inputs), default=0))

    def read(self, v: Tensor) -> Tensor:
        """Its part (core, activation, k) of flat columns v (P, k)."""
        r, a = self.shape
        piece = v[self.rows]
        return piece.view(a, r, -1).transpose(0, 1) if self.turned else piece.view(r, a, -1)

    def add(self, out: Tensor, piece: Tensor) -> None:
        """Add (core, activation, k) to its place in flat columns (P, k)."""
        out[self.rows] += (piece.transpose(0, 1) if self.turned else piece).reshape(self.size, -1)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Block (f, g) = Σ_i α_i ⊗ (M_i ⊗ α'_i + K_i ⊗ δ'_i), f not after g."""

    f: Leaf
    g: Leaf
    core: Tensor  # M (n or 1, r, c)
    slope: Matrix | None  # K (n or 1, r, w) on columns [start, start + w) of α'
    start: int
    delta: Tensor | None  # δ' (n, c)

    @property
    def present(self) -> bool:
        """Whether anything of it differs from zero."""
        if self.slope is not None and self.delta is not None and bool(self.delta.any()):
            return bool(entries(self.slope).any()) or bool(self.core.any())
        return bool(self.core.any())

    def times(self, v: Tensor) -> Tensor:
        """H_fg V = Σ_i y_i ⊗ α_i, y_i = M_i (V α'_i) + K_i (Vᵀ δ'_i), V (c, b, k) → (r, a, k)."""
        y = torch.einsum("nb,cbk->nkc", self.g.alpha, v) @ self.core.mT
        if self.slope is not None and self.delta is not None:
            moved = torch.einsum("nc,cbk->nkb", self.delta, v)[..., self.columns]
            y = y + _rows(times(moved, self.slope.mT))
        return torch.einsum("nkr,na->rak", y, self.f.alpha)

    def transposed_times(self, v: Tensor) -> Tensor:
        """H_fgᵀ V for V (r, a, k) → (c, b, k)."""
        y = torch.einsum("na,rak->nkr", self.f.alpha, v)
        result = torch.einsum("nkc,nb->cbk", y @ self.core, self.g.alpha)
        if self.slope is not None and self.delta is not None:
            moved = _rows(times(y, self.slope))
            result[:, self.columns] += torch.einsum("nc,nkb->cbk", self.delta, moved)
        return result

    @property
    def columns(self) -> slice:
        """The columns of α' that K moves."""
        width = 0 if self.slope is None else entries(self.slope).shape[-1]
        return slice(self.start, self.start + width)


class Chain:
    """Nodes in the order of the computation, their leaves, and the two elimination rules."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[Leaf] = []

    def node(
        self,
        value: Tensor,
        *sources: tuple[Node, Map],
        bends: Callable[[Tensor], Bends] | None = None,
        waist: bool = False,
        fixed: bool = False,
    ) -> Node:
        """A new node."""
        moving = tuple((source, way) for source, way in sources if not source.fixed)
        made = Node(len(self.nodes), value, moving, bends, waist, fixed)
        for source, way in moving:
            source.consumers.append((made, way))
        self.nodes.append(made)
        return made

    def seeded(self, lam: Tensor | None, delta: Tensor | None) -> Chain:
        """The chain with Λ (n, d, d) and δ (n, d) at its last node."""
        self.lam, self.seed = lam, delta
        self._tangents: dict[tuple[int, int], Matrix | None] = {}
        self._seconds: dict[tuple[int, int], Matrix | None] = {}
        self._deltas: dict[int, Tensor] = {}
        self.leaves.sort(key=lambda leaf: (leaf.depth, leaf.node.order))
        self.bends: Bends = []
        if delta is not None:
            for node in self.nodes:
                self.bends += node.bends(self.delta(node)) if node.bends is not None else []
        return self

    @property
    def output(self) -> Node:
        """The last node."""
        return self.nodes[-1]

    # ---- first order -----------------------------------------------------------------------

    def adjoint(self, node: Node, seeds: Tensor, kept: dict[int, Tensor]) -> Tensor:
        """Adjoints (n, k, w) at ``node`` of rows ``seeds`` (n, k, d) at the output."""
        if node is self.output:
            return seeds
        if node.order not in kept:
            pulled = [way.adjoint(self.adjoint(c, seeds, kept)) for c, way in node.consumers]
            kept[node.order] = sum(pulled[1:], start=pulled[0])
        return kept[node.order]

    def delta(self, node: Node) -> Tensor:
        """∂ℓ/∂node (n, w)."""
        assert self.seed is not None
        return self.adjoint(node, self.seed.unsqueeze(1), self._deltas).squeeze(1)

    def tangent(self, a: Node, b: Node) -> Matrix | None:
        """T(a, b) = ∂b/∂e_a (n or 1, width of b, width of a)."""
        if a is b:
            return Diagonal(torch.ones_like(a.value[:1]))
        if a.order > b.order:
            return None
        key = a.order, b.order
        if key not in self._tangents:
            waist = self._waist(a)
            if waist is not None and waist.order < b.order:
                self._tangents[key] = _chained(self.tangent(waist, b), self.tangent(a, waist))
            else:
                behind = ((self.tangent(c, b), way) for c, way in a.consumers)
                self._tangents[key] = total(way.pull(t) for t, way in behind if t is not None)
        return self._tangents[key]

    def _waist(self, a: Node) -> Node | None:
        return next((node for node in self.nodes[a.order + 1 :] if node.waist), None)

    # ---- second order ----------------------------------------------------------------------

    def second(self, b: Node, a: Node) -> Matrix | None:
        """Λ(b, a) = ∂²ℓ/∂e_b∂e_a (n, width of b, width of a)."""
        if a.order > b.order:
            turned = self.second(a, b)
            return None if turned is None else turned.mT
        if a is self.output:
            return self.lam
        key = b.order, a.order
        if key not in self._seconds:
            self._seconds[key] = total(self._terms(b, a))
        return self._seconds[key]

    def _terms(self, b: Node, a: Node) -> Iterator[Matrix | None]:
        waist = self._waist(a)
        if self._stepwise(a):
            behind = ((self.second(b, c), way) for c, way in a.consumers)
            yield from (way.pull(rows) for rows, way in behind if rows is not None)
        else:
            assert waist is not None
            if b.order >= waist.order:
                yield _chained(self.second(b, waist), self.tangent(a, waist))
                return
            ahead = self.tangent(b, waist)
            yield None if ahead is None else _chained(ahead.mT, self.second(waist, a))
        for left, bend, right in self._bent(b, a):
            yield times(times(left.mT, bend.matrix), right)

    def _stepwise(self, a: Node) -> bool:
        """Whether a step to the consumers is cheaper than the way to the waist."""
        ways = all(way.pointwise for _, way in a.consumers)
        return ways and a.width <= self.output.width

    def _bent(self, b: Node, a: Node) -> Iterator[tuple[Matrix, Bend, Matrix]]:
        """T(b, x), Ψ_xy, T(a, y) of every map between a and where ``_terms`` goes on."""
        stepwise, waist = self._stepwise(a), self._waist(a)
        for x, y, bend in self.bends:
            if y is a if stepwise else waist is None or y.order < waist.order:
                left, right = self.tangent(b, x), self.tangent(a, y)
                if left is not None and right is not None:
                    yield left, bend, right

    def second_diagonal(self, a: Node) -> Tensor:
        """The diagonal of Λ(a, a) (n or 1, w), Λ itself unformed where a stands before a waist."""
        if a is self.output or self._stepwise(a):
            whole = self.second(a, a)
            return torch.zeros_like(a.value) if whole is None else diagonal_of(whole)
        (consumer, way), *others = a.consumers
        if isinstance(way.matrix, Diagonal) and not others:
            # D Λ D + Ψ of a pointwise map: Λ behind it often has the same T at every token
            diagonal = self.second_diagonal(consumer) * way.matrix.values.square()
            own = (diagonal_of(bend.matrix) for x, y, bend in self.bends if x is y is a)
            return sum(own, start=diagonal)
        waist = self._waist(a)
        assert waist is not None
        ahead, curved = self.tangent(a, waist), self.second(waist, a)
        diagonal = torch.zeros_like(a.value)
        if ahead is not None and curved is not None:
            diagonal = diagonal + diagonal_product(ahead.mT, curved)
        along = (bend.diagonal_along(left, right) for left, bend, right in self._bent(a, a))
        return sum(along, start=diagonal)

    # ---- blocks ----------------------------------------------------------------------------

    def pairs(self, names: set[str] | None = None) -> Iterator[Pair]:
        """All pairs of leaves, or those that hold just these two parameters."""
        for i, f in enumerate(self.leaves):
            for g in self.leaves[i:]:
                if names is None or {f.name, g.name} == names:
                    yield self.pair(f, g)
            # What lies before every leaf that is left is read no more: its memory is used again.
            ahead = min((leaf.node.order for leaf in self.leaves[i + 1 :]), default=0)
            self._seconds = {key: m for key, m in self._seconds.items() if key[1] >= ahead}
            self._tangents = {key: m for key, m in self._tangents.items() if key[0] >= ahead}

    def pair(self, f: Leaf, g: Leaf) -> Pair:
        """M, K and δ' of block (f, g), f not after g."""
        whole = _formed(self.second(g.node, f.node), g.node, f.node)
        slope, start, delta = None, 0, None
        if self.seed is not None:
            slope, start = self._slope(f, g)
            delta = None if slope is None else self.delta(g.node)[:, g.columns]
        core = whole.mT[:, f.columns, g.columns]
        return Pair(f=f, g=g, core=core, slope=slope, start=start, delta=delta)

    def _slope(self, f: Leaf, g: Leaf) -> tuple[Matrix | None, int]:
        """K = T(f, α of g)ᵀ (n or 1, r, w) and the column of α' it begins at."""
        parts, first, start = list[Matrix](), 0, 0
        for node, cut in g.inputs:
            T, width = self.tangent(f.node, node), len(range(*cut.indices(node.width)))
            if T is not None:
                first = first if parts else start
                if isinstance(T, Tensor) or (width, f.shape[0]) != (node.width, f.node.width):
                    T = _formed(T, node, f.node)[:, cut, f.columns]
                parts.append(T.mT)
            start += width
        if len(parts) < 2:
            return (parts[0] if parts else None), first
        return torch.cat([_rows(part) for part in parts], -1), first

    # ---- products --------------------------------------------------------------------------

    def product(
        self, v: Tensor, curvature: Callable[[Tensor], Tensor] | None, *, bent: bool = True
    ) -> Tensor:
        """H v for columns v (P, k).

        Tangents forward, ẋ' = J ẋ + V α; then rates backward, Rδ_x = Jᵀ Rδ_x' + Ψ ẋ + Vᵀ δ_e.
        ``curvature`` maps the output's tangent (n, k, d) to Λ times it; None leaves H_f, not
        ``bent`` H_o.
        """
        moved, rates = dict[Node, Tensor](), dict[Node, Tensor]()

        def add(to: dict[Node, Tensor], node: Node, t: Tensor) -> None:
            to[node] = to[node] + t if node in to else t

        def placed(t: Tensor, cut: slice, node: Node) -> Tensor:
            start, stop, _ = cut.indices(node.width)
            return pad(t, (start, node.width - stop))

        for leaf in self.leaves:
            push = torch.einsum("na,rak->nkr", leaf.alpha, leaf.read(v))
            add(moved, leaf.node, placed(push, leaf.columns, leaf.node))
        for node in self.nodes:
            for source, way in node.sources:
                if source in moved:
                    add(moved, node, way.push(moved[source]))
        if curvature is not None:
            add(rates, self.output, curvature(moved[self.output]))
        for x, y, bend in self.bends if bent else ():
            add(rates, x, bend.times(moved[y]))
        for leaf in self.leaves if bent else ():
            back = torch.einsum("nr,rak->nka", self.delta(leaf.node)[:, leaf.columns], leaf.read(v))
            start = 0
            for node, cut in leaf.inputs:
                width = len(range(*cut.indices(node.width)))
                add(rates, node, placed(back[..., start : start + width], cut, node))
                start += width
        for node in reversed(self.nodes):
            for source, way in node.sources if node in rates else ():
                add(rates, source, way.adjoint(rates[node]))
        out = torch.zeros_like(v)
        for leaf in self.leaves:
            if leaf.node in rates:
                rate = rates[leaf.node][..., leaf.columns]
                leaf.add(out, torch.einsum("nkr,na->rak", rate, leaf.alpha))
            if bent and leaf.inputs:
                dot = torch.cat([moved[node][..., cut] for node, cut in leaf.inputs], -1)
                delta = self.delta(leaf.node)[:, leaf.columns]
                leaf.add(out, torch.einsum("nka,nr->rak", dot, delta))
        return out


def _chained(a: Matrix | None, b: Matrix | None) -> Matrix | None:
    return None if a is None or b is None else times(a, b)


def _formed(a: Matrix | None, b: Node, c: Node) -> Tensor:
    """A (n or 1, width of b, width of c), written out."""
    if isinstance(a, Diagonal):
        return torch.diag_embed(a.values)
    return b.value.new_zeros(1, b.width, c.width) if a is None else a
