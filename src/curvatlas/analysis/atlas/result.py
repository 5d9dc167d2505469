"""The atlas as a value: its rows and columns, maps with intervals, views, couplings, ranking."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.anatomy import Anatomy, Slice
from curvatlas.linear_operator import PARTS
from curvatlas.results import Number, Result

VIEWS = ("block", "role", "layer", "sublayer", "model")


@dataclass(frozen=True, kw_only=True)
class AtlasBlock:
    """Entries of the flat vector that make one row and one column of the map."""

    name: str  # "blocks.0.query", "embedding.token", "blocks.1.value.head2", …
    role: str  # the name without its layer: "query", "norm1.gamma", "embedding.token"
    layer: str  # "layer 0", or "embedding", "final_norm", "head" for what has no layer
    sublayer: str
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.slices)

    @property
    def indices(self) -> Tensor:
        """Positions in the flat vector, (size,) int64."""
        return torch.cat([piece.indices for piece in self.slices])

    def label(self, view: str) -> str:
        """The group this block belongs to in one of ``VIEWS``."""
        return {
            "block": self.name,
            "role": self.role,
            "layer": self.layer,
            "sublayer": self.sublayer,
            "model": "model",
        }[view]


def blocks_of(
    anatomy: Anatomy,
    *,
    by: str = "role",
    heads: bool = False,
    experts: bool = False,
    biases: bool = True,
) -> tuple[AtlasBlock, ...]:
    """One block a slice of the anatomy, in its order.

    by: "role", or "sublayer" and "layer" for coarser blocks of deep models.
    heads: cut query, key, value and output into one block a head.
    experts: cut the feed-forward parts of a mixture into one block an expert.
    biases: False counts a bias with the weight of the same linear map.
    """
    if by not in ("role", "sublayer", "layer"):
        raise ValueError(f"by is 'role', 'sublayer' or 'layer', got {by!r}.")
    if by != "role":
        return _coarse(anatomy, by)
    groups: dict[str, list[Slice]] = {}
    names = set(anatomy.names)
    for piece in anatomy.slices:
        parts: Sequence[Slice] = [piece]
        if heads and piece.sublayer == "attention":
            parts = _parts_of(anatomy.heads, piece)
        elif experts and piece.sublayer == "ffn":
            parts = _parts_of(anatomy.experts, piece)
        for part in parts:
            name = part.name
            if not biases:
                name = _weight_of(part.name, names, cut=heads or experts)
            groups.setdefault(name, []).append(part)
    return tuple(_block(name, slices) for name, slices in groups.items())


def _coarse(anatomy: Anatomy, by: str) -> tuple[AtlasBlock, ...]:
    """One block a layer, or a sublayer of a layer; what has no layer goes by its place.

    A place outside the layers may hold several sublayers (the token table and the norm of BERT's
    embeddings): the one it is named after keeps its name, the others are added to it
    ("embedding", "embedding.norm").
    """
    groups: dict[tuple[str, str], list[Slice]] = {}
    for piece in anatomy.slices:
        single = _block(piece.name, [piece])
        groups.setdefault((single.layer, single.sublayer if by == "sublayer" else ""), []).append(
            piece
        )
    sublayers = Counter(layer for layer, _ in groups)
    blocks = []
    for (layer, sublayer), slices in groups.items():
        outside = slices[0].layer is None
        place = layer if outside else f"blocks.{slices[0].layer}"
        alone = outside and (sublayers[layer] == 1 or sublayer == layer)
        name = place if alone or not sublayer else f"{place}.{sublayer}"
        blocks.append(
            AtlasBlock(
                name=name,
                role=layer if not sublayer else name if outside else sublayer,
                layer=layer,
                sublayer=sublayer or "all",
                slices=tuple(slices),
            )
        )
    return tuple(blocks)


def _parts_of(cut: Callable[[Slice], Sequence[Slice]], piece: Slice) -> Sequence[Slice]:
    try:
        return cut(piece)
    except ValueError:
        return [piece]  # it has no heads, or no experts


def _weight_of(name: str, names: set[str], *, cut: bool) -> str:
    """The weight that a bias belongs to: "query_bias" → "query", "head.bias" → "head.weight"."""
    stem, dot, last = name.rpartition(".")
    head = ""
    if cut and re.fullmatch(r"(head|expert)\d+", last):
        head, (stem, dot, last) = f".{last}", stem.rpartition(".")
    for weight in (
        last.removesuffix("_bias"),
        "weight" if last == "bias" else last,
        last.removesuffix("_bias") + "_weight",
    ):
        candidate = f"{stem}{dot}{weight}"
        if weight != last and candidate in names:
            return candidate + head
    return name


def _block(name: str, slices: Sequence[Slice]) -> AtlasBlock:
    first = slices[0]
    prefix = f"blocks.{first.layer}."
    if first.layer is None:
        role, layer = name, name.partition(".")[0]
    else:
        role = name.removeprefix(prefix) if name.startswith(prefix) else first.role
        layer = f"layer {first.layer}"
    return AtlasBlock(
        name=name, role=role, layer=layer, sublayer=first.sublayer, slices=tuple(slices)
    )


def groups_of(blocks: Sequence[AtlasBlock], view: str) -> dict[str, list[int]]:
    """Label → places of its blocks, in order of first appearance."""
    if view not in VIEWS:
        raise ValueError(f"a view is one of {', '.join(map(repr, VIEWS))}, got {view!r}.")
    groups: dict[str, list[int]] = {}
    for place, block in enumerate(blocks):
        groups.setdefault(block.label(view), []).append(place)
    return groups


@dataclass(frozen=True, kw_only=True)
class AtlasMap(Result):
    """One quantity over pairs of groups (or over groups, for traces), with 95 % intervals."""

    quantity: str  # "frobenius", "spectral", "trace", "coupling", "negative mass"
    part: str
    view: str
    names: tuple[str, ...]
    values: Tensor  # (m, m), or (m,) for traces and negative mass
    low: Tensor
    high: Tensor

    @property
    def value(self) -> Tensor:
        return self.values

    @property
    def interval(self) -> tuple[Tensor, Tensor]:
        """(low, high) at 95 %, entry by entry."""
        return self.low, self.high

    @property
    def exact(self) -> bool:
        """Whether every entry that can be told from rounding is known exactly."""
        return bool(((self.low == self.high) | (self.values == 0)).all())

    def place(self, name: str) -> int:
        if name not in self.names:
            raise KeyError(f"there is no {name!r} in this view; it has {', '.join(self.names)}.")
        return self.names.index(name)

    def __getitem__(self, key: str | tuple[str, str]) -> float:
        """``map["blocks.0.query", "blocks.0.key"]``, or ``map["blocks.0.query"]`` for a trace."""
        if isinstance(key, tuple):
            return float(self.values[self.place(key[0]), self.place(key[1])])
        place = self.place(key)
        return float(self.values[place] if self.values.ndim == 1 else self.values[place, place])

    def interval_of(self, row: str, column: str | None = None) -> tuple[float, float]:
        """The interval of one entry (``column`` None: the diagonal)."""
        i = self.place(row)
        j = i if column is None else self.place(column)
        place: Any = i if self.values.ndim == 1 else (i, j)
        return float(self.low[place]), float(self.high[place])

    def _rows(self) -> list[dict[str, Any]]:
        """A row a pair of groups (or a group, for traces), with its interval."""
        ends = ("value", self.values), ("low", self.low), ("high", self.high)
        if self.values.ndim == 1:
            return [
                {"name": name, **{key: float(t[i]) for key, t in ends}}
                for i, name in enumerate(self.names)
            ]
        return [
            {"row": row, "column": column, **{key: float(t[i, j]) for key, t in ends}}
            for i, row in enumerate(self.names)
            for j, column in enumerate(self.names)
        ]

    def text(self, row: str, column: str | None = None) -> str:
        """One entry as it is printed: "< 3e-06" where rounding hides it."""
        value = self[row] if column is None else self[row, column]
        return told(value, self.interval_of(row, column))


def told(value: float, interval: tuple[float, float]) -> str:
    """A norm as text: "0.0123", or "< 3e-06" where its interval does not tell it from zero."""
    low, high = interval
    return f"< {high:.2g}" if low == 0 < high else f"{value:.4g}"


def atlas_map(
    key: str, names: tuple[str, ...], values: Any, low: Any = None, high: Any = None
) -> AtlasMap:
    """A map from arrays or tensors, exact without ends; key: "view/quantity/part"."""
    view, quantity, part = key.split("/")
    ends = (values, values if low is None else low, values if high is None else high)
    tensors = [torch.as_tensor(end).to(torch.float64, copy=True) for end in ends]
    return AtlasMap(
        quantity=quantity,
        part=part,
        view=view,
        names=names,
        values=tensors[0],
        low=tensors[1],
        high=tensors[2],
    )


@dataclass(frozen=True, kw_only=True)
class RankedBlock(Result):
    """One entry of the map, with its share of ‖H‖_F²."""

    row: str
    column: str
    frobenius: float
    interval: tuple[float, float]
    share: float  # of the squared Frobenius norm of the whole matrix; both triangles count

    def __str__(self) -> str:
        low, high = self.interval
        pair = self.row if self.row == self.column else f"{self.row} × {self.column}"
        norm = Number(self.frobenius, low, high)
        shown = told(self.frobenius, self.interval) if low == 0 < high else str(norm)
        return f"{self.share:6.1%}  {pair}: {shown}"


@dataclass(frozen=True, kw_only=True)
class Atlas(Result):
    """Where curvature lives: norms and traces of H, H_o and H_f by layer and role.

    ``frobenius``, ``spectral`` and ``trace`` map "total", "outer" and "functional" to an
    ``AtlasMap`` over all blocks; ``view("role")``, ``view("layer")``, ``view("sublayer")`` give the
    coarser ones. ``couplings`` are ‖H_ij‖_F / √(‖H_ii‖_F ‖H_jj‖_F).
    """

    maps: dict[str, AtlasMap]  # "view/quantity/part"
    sizes: dict[str, int]  # entries of each block
    diagonal_share: dict[str, tuple[float, float, float]]  # "view/part" → value, low, high
    method: str  # "dense", "closed form" or "sketch"
    products: int
    converged: bool
    rtol: float
    error: float  # root mean square relative standard error of the Frobenius norms, all parts
    worst_error: float = float("nan")  # the largest of an entry above 1 % of the largest entry

    def view(self, view: str, quantity: str = "frobenius", part: str = "total") -> AtlasMap:
        """One map: view "block", "role", "layer", "sublayer" or "model"."""
        key = f"{view}/{quantity}/{part}"
        if key not in self.maps:
            raise KeyError(f"this atlas has no {key!r}; it has {', '.join(sorted(self.maps))}.")
        return self.maps[key]

    def block(
        self, row: str, column: str, *, quantity: str = "frobenius", part: str = "total"
    ) -> float:
        """One entry of the finest view that has both names: ``block("attention", "ffn")`` is that
        of whole sublayers (the article's 3 × 3 view), ``block("query", "value")`` of roles."""
        for view in VIEWS:
            chosen = self.maps.get(f"{view}/{quantity}/{part}")
            if chosen is not None and {row, column} <= set(chosen.names):
                return chosen[row, column]
        known = {
            view: self.maps[key].names
            for view in ("block", "role", "sublayer")
            if (key := f"{view}/{quantity}/{part}") in self.maps
        }
        if not known:
            self.view("block", quantity, part)  # says what there is
        listed = "; ".join(f"{view}: {', '.join(names[:12])}" for view, names in known.items())
        raise KeyError(f"no view has both {row!r} and {column!r}; {listed}.")

    def _quantity(self, quantity: str) -> dict[str, AtlasMap]:
        return {
            part: self.maps[key]
            for part in PARTS
            if (key := f"block/{quantity}/{part}") in self.maps
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def frobenius(self) -> dict[str, AtlasMap]:
        return self._quantity("frobenius")

    @property
    def spectral(self) -> dict[str, AtlasMap]:
        return self._quantity("spectral")

    @property
    def trace(self) -> dict[str, AtlasMap]:
        return self._quantity("trace")

    @property
    def coupling(self) -> dict[str, AtlasMap]:
        return self._quantity("coupling")

    @property
    def negative_mass(self) -> dict[str, AtlasMap]:
        """Share of negative eigenvalues of every diagonal block, if asked for (or dense)."""
        return self._quantity("negative mass")

    def outer_share(self, view: str = "block") -> Tensor:
        """‖H_o‖_F² / (‖H_o‖_F² + ‖H_f‖_F²) of every pair: 1 where Gauss-Newton says it all."""
        outer = self.view(view, part="outer").values.double() ** 2
        functional = self.view(view, part="functional").values.double() ** 2
        both = outer + functional
        return torch.where(both > 0, outer / both, torch.full_like(both, torch.nan))

    def ranking(
        self, count: int | None = 10, *, part: str = "total", view: str = "block"
    ) -> tuple[RankedBlock, ...]:
        """The dominating entries of the map, largest share of ‖H‖_F² first."""
        chosen = self.view(view, part=part)
        values = chosen.values.double()
        total = float((values**2).sum())
        entries = []
        for i, row in enumerate(chosen.names):
            for j in range(i, len(chosen.names)):
                twice = 1 if i == j else 2
                entries.append(
                    RankedBlock(
                        row=row,
                        column=chosen.names[j],
                        frobenius=float(values[i, j]),
                        interval=(float(chosen.low[i, j]), float(chosen.high[i, j])),
                        share=twice * float(values[i, j]) ** 2 / total if total > 0 else 0.0,
                    )
                )
        entries.sort(key=lambda entry: -entry.share)
        return tuple(entries[:count])

    def _rows(self) -> list[dict[str, Any]]:
        """A row an entry of every map: view, quantity, part, row, column and value."""
        return [
            {"view": m.view, "quantity": m.quantity, "part": m.part, **row}
            for m in self.maps.values()
            for row in m._rows()
        ]

    def __str__(self) -> str:
        model = self.view("model")
        norm = Number(model["model"], *model.interval_of("model"))
        cost = f", {self.products} products" if self.products else ""
        entries = "entries exact"
        if self.worst_error > 0 or self.error > 0:
            entries = f"entries ± {self.error:.1%}, the worst ± {self.worst_error:.0%}"
        asked = "" if self.converged else f" (asked for {self.rtol:.0%})"
        lines = [f"{len(self.sizes)} blocks, ‖H‖_F = {norm}, {self.method}{cost}, {entries}{asked}"]
        for view in ("block", "layer", "role"):
            share = Number(*self.diagonal_share[f"{view}/total"])
            lines.append(f"  {share:%} of ‖H‖_F² lies on the {view} diagonal")
        lines += [f"  {entry}" for entry in self.ranking(5)]
        return "\n".join(lines)
