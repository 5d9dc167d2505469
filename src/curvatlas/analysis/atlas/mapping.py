"""``atlas``: the map of curvature over every pair of roles in every layer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from curvatlas import parallel
from curvatlas.analysis.atlas.exact import (
    closed_form,
    closed_maps,
    dense_parts,
    maps_of_matrices,
    negative_masses,
    refined_spectral,
    spectral_pairs,
)
from curvatlas.analysis.atlas.result import (
    VIEWS,
    Atlas,
    AtlasBlock,
    AtlasMap,
    atlas_map,
    blocks_of,
    groups_of,
)
from curvatlas.analysis.atlas.sketch import Energy, Sketch
from curvatlas.budget import default_budget, parse_bytes
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.fits import Array
from curvatlas.linear_operator import PARTS
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.problem import Problem
from curvatlas.spectra.checkpoint import Checkpoint, Resumable, State, fingerprint
from curvatlas.spectra.requirements import require_precision

# Up to this size the three dense matrices are cheaper than their estimates are good.
DENSE_UP_TO = 4096
_FIRST, _MORE, _MOST = 5, 4, 16  # probes a column: at the start, in each later round, at most
_AT_FIRST = 0.85  # of the products allowed; the rest goes to the columns that are known least
_MATTERS = 0.01  # of the largest entry: what ``worst`` looks at
_NORMAL = 1.96
_TAIL = 2.2  # for traces: a quadratic form in few probes has heavier tails than a normal number


def atlas(
    problem: Problem,
    *,
    by: str = "role",
    heads: bool = False,
    experts: bool = False,
    biases: bool = True,
    rtol: float = 0.05,
    worst: float | None = 0.2,
    products: int | None = None,
    method: str = "auto",
    spectral: str | Sequence[tuple[str, str]] = "bracket",
    negative_mass: bool | None = None,
    seed: int = 0,
    budget: int | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Atlas:
    """Frobenius and spectral norms, traces and couplings of H, H_o, H_f over layers and roles.

    by: "role" (every role of every layer), or "sublayer" or "layer" for coarser, cheaper maps.
    heads: one block a head for query, key, value and output.
    experts: one block an expert for the feed-forward parts of a mixture.
    biases: False counts a bias with its weight.
    rtol: stop when the root mean square of the entries' relative standard errors reaches it.
    worst: go on until every entry above 1 % of the largest has this relative standard error too;
        None asks for ``rtol`` alone.
    products: at most this many products (each gives H, H_o and H_f; four a block at least).
    method: "dense" (exact), "closed form" (exact, one layer that ``closed_form`` knows, of
        any size), "sketch" (estimates with intervals); "auto": dense up to P = 4096, beyond it the
        closed form where there is one. ``Atlas.method`` says which.
    spectral: "bracket" (from the same products), "refine" (a short Lanczos for every pair of
        blocks, intervals within 1 %), or "diagonal" or a list of (row, column) names that are
        refined alone; dense maps are always exact.
    negative_mass: the share of negative eigenvalues of every diagonal block (60 products a block
        and part); None: where it is free (dense).
    checkpoint: a file from which a sketch that was stopped goes on with the same numbers.
    """
    if not isinstance(problem, Problem):
        raise TypeError(
            f"atlas takes a Problem, got a {type(problem).__name__}: ca.Problem(model, loss, data)."
        )
    if method not in ("auto", "dense", "closed form", "sketch"):
        raise ValueError(f"method is 'auto', 'dense', 'closed form' or 'sketch', got {method!r}.")
    if not rtol > 0 or not (worst is None or worst > 0):
        raise ValueError(f"rtol and worst must be positive, got {rtol!r} and {worst!r}.")
    blocks = blocks_of(problem.anatomy, by=by, heads=heads, experts=experts, biases=biases)
    spectral_pairs(blocks, spectral)  # a wrong name is told at once
    room = default_budget(problem.device) if budget is None else parse_bytes(budget)
    if problem.spread:
        room = parallel.smallest_over_processes(room)  # all take the same way
    fits = problem.size <= DENSE_UP_TO and 4 * problem.size**2 * problem.dtype.itemsize <= room
    operator = CurvatureParts(problem, budget=budget)
    require_precision(operator, "atlas")
    if method == "dense" or (method == "auto" and fits):
        places = [block.indices for block in blocks]
        maps, shares = maps_of_matrices(dense_parts(operator), places, blocks)
        return _finish(maps, shares, blocks, "dense", operator.products, rtol)
    if method in ("auto", "closed form"):
        try:
            maps, shares = closed_maps(closed_form(problem), operator, blocks, room)
        except UnmappedModuleError as reason:
            if method == "closed form":
                raise UnmappedModuleError(f"no closed form of this problem: {reason}") from reason
        else:
            return _finish(maps, shares, blocks, "closed form", operator.products, rtol)

    sketch = Sketch(operator, blocks, seed=seed)
    sampler = _Sampler(sketch, rtol, worst, products)
    effort = {"rtol": rtol, "worst": worst, "products": products, "seed": seed}
    names = [block.name for block in blocks]
    mark = fingerprint(operator, estimate="atlas", blocks=names, **effort)
    sampler.run(Checkpoint(checkpoint, mark))
    maps, shares = _sketch_maps(sketch, blocks)
    spent = sketch.products
    if spectral != "bracket":
        spent += refined_spectral(maps, problem, blocks, spectral, seed=seed, budget=budget)
        _tighten(maps, blocks)
    if negative_mass:
        maps.update(negative_masses(problem, blocks, seed=seed, budget=budget))
    reached = (sampler.error, sampler.worst_error, sampler.reached)
    return _finish(maps, shares, blocks, "sketch", spent, rtol, reached)


def _tighten(maps: dict[str, AtlasMap], blocks: Sequence[AtlasBlock]) -> None:
    """The coarser views' brackets of spectral norms from those of the blocks."""
    for part in PARTS:
        block = maps[f"block/spectral/{part}"]
        below, above = (end.numpy()[None] for end in block.interval)
        for view in VIEWS[1:]:
            key = f"{view}/spectral/{part}"
            places = list(groups_of(blocks, view).values())
            ends = _grouped_spectral(below, above, places)
            low, high = (torch.from_numpy(end[0]) for end in ends)
            maps[key] = atlas_map(key, maps[key].names, (low * high).sqrt(), low, high)


def _finish(
    maps: dict[str, AtlasMap],
    shares: dict[str, tuple[float, float, float]],
    blocks: Sequence[AtlasBlock],
    method: str,
    products: int,
    rtol: float,
    reached: tuple[float, float, bool] = (0.0, 0.0, True),
) -> Atlas:
    for key, frobenius in list(maps.items()):
        if "/frobenius/" in key:
            maps[key.replace("frobenius", "coupling")] = _coupling(frobenius)
    return Atlas(
        maps=maps,
        sizes={block.name: block.size for block in blocks},
        diagonal_share=shares,
        method=method,
        products=products,
        converged=reached[2],
        rtol=rtol,
        error=reached[0],
        worst_error=reached[1],
    )


class _Sampler(Resumable):
    """Probe every column, then the columns whose entries are least known."""

    title = "map of roles"

    def __init__(
        self, sketch: Sketch, rtol: float, worst: float | None, products: int | None
    ) -> None:
        self.sketch, self.rtol, self.asked_worst = sketch, rtol, worst
        count = len(sketch.blocks)
        self.first = _FIRST
        if products is not None:
            self.first = max(2, min(_FIRST, int(_AT_FIRST * products) // count))
            if products < 2 * count:
                raise ValueError(
                    f"a map of {count} blocks needs at least {2 * count} products, got {products}: "
                    "allow more, or use biases=False for fewer blocks."
                )
        self.budget = _MOST * count if products is None else products
        self.queue: list[tuple[int, int]] = []  # (column, probes) still to be measured
        self.error = self.worst_error = float("inf")
        self.reached = False

    @property
    def products(self) -> int:
        return self.sketch.products

    def begin(self) -> None:
        # From the end of the model backwards: the last columns cost least and teach the first.
        self.queue = [(j, self.first) for j in range(len(self.sketch.blocks) - 1, -1, -1)]

    def step(self) -> None:
        if self.queue:
            (column, probes), self.queue = self.queue[0], self.queue[1:]
            self.sketch.probe_column(column, probes)
        if not self.queue:
            self._look()

    def _look(self) -> None:
        """How well the entries are known; more probes where they are not well enough."""
        sketch, count = self.sketch, len(self.sketch.blocks)
        energy = sketch.energies([[j] for j in range(count)])
        errors = np.where(energy.value > noise_floor(energy, sketch), energy.relative_error(), 0.0)
        large = np.where(energy.value >= _MATTERS**2 * _largest(energy.value), errors, 0.0)
        self.error, self.worst_error = float(np.sqrt((errors**2).mean())), float(large.max())
        left = self.budget - sketch.products
        self.reached = self.error <= self.rtol and (
            self.asked_worst is None or self.worst_error <= self.asked_worst
        )
        self.done = self.reached or left < _MORE
        if self.done:
            return
        if self.error > self.rtol:
            # A third of the columns at a time, those with the largest mean square error.
            square = (errors**2).mean(0)  # over the parts: (rows, columns)
            score, some = square.mean(0) + np.diagonal(square), max(1, count // 3)
        else:
            # A few blocks (embeddings, first biases) share most of the badly known entries.
            score, some = (large**4).sum((0, 1)), max(1, count // 12)
        chosen = np.argsort(-score)[: min(some, max(1, left // _MORE))]
        self.queue = [(int(j), _MORE) for j in chosen if not sketch.is_exact(int(j))]
        self.done = not self.queue

    def state(self) -> State:
        tensors, numbers = self.sketch.state()
        return tensors, {**numbers, "queue": [list(pair) for pair in self.queue]}

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        self.sketch.restore(tensors, numbers)
        self.queue = [(int(j), int(probes)) for j, probes in numbers["queue"]]
        if not self.queue:
            self._look()


def _largest(square: Array) -> Array:
    """The largest entry of every part, (parts, 1, 1)."""
    return np.asarray(square.max(axis=(-2, -1), keepdims=True))


def noise_floor(energy: Energy, sketch: Sketch) -> Array:
    """Squared norms below this are rounding: ten units in the last place of the largest entry."""
    eps = torch.finfo(sketch.operator.dtype).eps
    largest = energy.value.max(axis=(-2, -1), keepdims=True).max(axis=0, keepdims=True)
    return np.broadcast_to((10 * eps) ** 2 * largest, energy.value.shape)


def _sketch_maps(
    sketch: Sketch, blocks: Sequence[AtlasBlock]
) -> tuple[dict[str, AtlasMap], dict[str, tuple[float, float, float]]]:
    maps: dict[str, AtlasMap] = {}
    shares: dict[str, tuple[float, float, float]] = {}
    floor = np.sqrt(noise_floor(sketch.energies([[j] for j in range(len(blocks))]), sketch).max())
    traces = sketch.traces()
    spectral: tuple[Array, Array] | None = None
    for view in VIEWS:
        groups = groups_of(blocks, view)
        places = list(groups.values())
        member = np.array([[j in group for group in places] for j in range(len(blocks))], float)
        energy = sketch.energies(places)
        low, high = (np.sqrt(np.maximum(end, 0)) for end in energy.interval())
        value = np.sqrt(np.maximum(energy.value, 0))
        low, high = np.where(value <= floor, 0.0, low), np.maximum(high, floor)
        if spectral is None:
            pair = energy.spectral_interval()
            below, above = (np.sqrt(np.maximum(end, 0)) for end in pair)
            spectral = np.where(value <= floor, 0.0, below), np.maximum(above, floor)
        bracket = _grouped_spectral(*spectral, places)
        for p, part in enumerate(PARTS):
            below, above = bracket[0][p], bracket[1][p]
            trace = traces[0][p] @ member
            reach = _TAIL * np.sqrt(traces[1][p] ** 2 @ member)  # blocks are probed independently
            for quantity, ends in (
                ("frobenius", (value[p], low[p], high[p])),
                ("spectral", (np.sqrt(below * above), below, above)),
                ("trace", (trace, trace - reach, trace + reach)),
            ):
                key = f"{view}/{quantity}/{part}"
                maps[key] = atlas_map(key, tuple(groups), *ends)
            shares[f"{view}/{part}"] = _share(energy, p)
    return maps, shares


def _grouped_spectral(low: Array, high: Array, places: Sequence[Sequence[int]]) -> Any:
    """max ‖H_ij‖ ≤ ‖H_AB‖ ≤ the norm of the matrix of the blocks' norms."""
    count = len(places)
    if all(len(group) == 1 for group in places):
        return low, high
    least, most = np.zeros((low.shape[0], count, count)), np.zeros((low.shape[0], count, count))
    for a, rows in enumerate(places):
        for b, columns in enumerate(places):
            corner = np.ix_(range(low.shape[0]), list(rows), list(columns))
            least[:, a, b] = low[corner].max(axis=(-2, -1))
            most[:, a, b] = np.linalg.norm(high[corner], ord=2, axis=(-2, -1))
    return least, most


def _share(energy: Energy, part: int) -> tuple[float, float, float]:
    """Share of the diagonal in the whole squared norm, with a 95 % interval."""
    value, variance = energy.value[part], energy.variance[part]
    inside, total = float(np.trace(value)), float(value.sum())
    if total <= 0:
        return float("nan"), float("nan"), float("nan")
    outside = total - inside
    share = inside / total
    # d share = (outside · d inside − inside · d outside) / whole²; off-diagonal entries and their
    # transposes are one estimate, so their errors add before squaring.
    deviations = np.sqrt(variance)
    off = float(((2 * np.triu(deviations, 1)) ** 2).sum())
    spread = np.sqrt(outside**2 * float(np.trace(variance)) + inside**2 * off) / total**2
    return share, max(0.0, share - _NORMAL * spread), min(1.0, share + _NORMAL * spread)


def _coupling(frobenius: AtlasMap) -> AtlasMap:
    """‖H_ij‖_F / √(‖H_ii‖_F ‖H_jj‖_F): at most 1 for a positive semidefinite matrix."""
    floor = 1e-12 * float(frobenius.values.max())  # a block of zeros couples to nothing

    def ratio(top: torch.Tensor, bottom: torch.Tensor) -> torch.Tensor:
        diagonal = bottom.diagonal()
        scale = (diagonal[:, None] * diagonal[None, :]).sqrt()
        result: torch.Tensor = top / scale
        alive = frobenius.values.diagonal() > floor
        both = alive[:, None] & alive[None, :]
        return torch.where(both, result, torch.full_like(top, torch.nan))

    value = ratio(frobenius.values, frobenius.values)
    low, high = ratio(frobenius.low, frobenius.high), ratio(frobenius.high, frobenius.low)
    for end in (value, low, high):
        alive = ~torch.isnan(end.diagonal())
        end.diagonal()[alive] = 1.0
    key = f"{frobenius.view}/coupling/{frobenius.part}"
    return atlas_map(key, frobenius.names, value, low, high)


def with_known_traces(
    found: Atlas,
    blocks: Sequence[AtlasBlock],
    *,
    outer: torch.Tensor | None = None,
    traces: Mapping[str, tuple[float, float]] | None = None,
) -> Atlas:
    r"""The same atlas with the traces of its groups made to agree with what is known better.

    outer: the exact diagonal of H_o, (P,); the traces of H_o are then exact.
    traces: part → tr and its standard error, for "outer" and "functional". Estimates t_b ± σ_b of
    the blocks and T ± σ_T of their sum are joined by least squares,

        t_b ← t_b + σ_b² (T − Σ t) / (σ_T² + Σ σ²),     σ_b² ← σ_b² − σ_b⁴ / (σ_T² + Σ σ²);

    the traces of H are the sums of both parts. What is never negative gets no negative bound.
    """
    values: dict[str, Array] = {}
    errors: dict[str, Array] = {}
    for part in PARTS[1:]:
        entry = found.maps[f"block/trace/{part}"]
        values[part] = entry.values.double().numpy()
        errors[part] = (entry.high - entry.low).double().numpy() / (2 * _TAIL)
        if part == "outer" and outer is not None:
            values[part] = np.array([float(outer[b.indices].double().sum()) for b in blocks])
            errors[part] = np.zeros(len(blocks))
        elif traces is not None and part in traces:
            total, deviation = traces[part]
            spread = deviation**2 + float((errors[part] ** 2).sum())
            share = errors[part] ** 2 / spread if spread > 0 else np.zeros(len(blocks))
            values[part] = values[part] + share * (total - values[part].sum())
            errors[part] = errors[part] * np.sqrt(np.maximum(1 - share, 0.0))
    values["total"] = values["outer"] + values["functional"]
    errors["total"] = np.hypot(errors["outer"], errors["functional"])
    maps = dict(found.maps)
    for view in VIEWS:
        places = list(groups_of(blocks, view).values())
        member = np.array([[j in group for group in places] for j in range(len(blocks))], float)
        for part in PARTS:
            key = f"{view}/trace/{part}"
            value = values[part] @ member
            reach = _TAIL * np.sqrt(errors[part] ** 2 @ member)
            low = value - reach
            if part == "outer":
                value, low = np.maximum(value, 0.0), np.maximum(low, 0.0)
            maps[key] = atlas_map(key, maps[key].names, value, low, value + reach)
    return replace(found, maps=maps)
