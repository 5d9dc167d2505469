r"""How the curvature of a model grows while its activations or some of its weights are scaled.

    ‖H_bb(t)‖_F ∝ t^a        for every role b of every layer, of H, H_o and H_f

Without norms and with small logits theory gives a for t · (what enters the first block): of H_o
2 for everything linear in the tokens (value, output, feed-forward), 6 for query and key, 4 for
value with query or key; of H_f 5 for query and key and 3 for any two of the three, in every layer
(``theory/checks/growth.py``). With norms, or where the softmax saturates, the exponents are what
they are: this measures them on any model.

A block's norm is E‖H_bb z‖² over random signs z, the same signs at every scale: what the probes do
not know cancels in the exponent. Blocks of few entries are exact.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from curvatlas.analysis.atlas.result import AtlasBlock, blocks_of
from curvatlas.analysis.atlas.sketch import scatter
from curvatlas.analysis.propagation.capture import block_paths, called_module
from curvatlas.anatomy import Slice
from curvatlas.errors import ProblemError
from curvatlas.fits import PowerLaw, power_law
from curvatlas.linear_operator import PARTS
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Result
from curvatlas.runs import Run
from curvatlas.surveying import Step, chosen_slices, recorded

MODEL = "model"  # the name of the whole matrix among the blocks
# the first decade is fitted: where theory speaks, of small logits; the rest shows where it ends
SCALES = (0.01, 0.0178, 0.0316, 0.0562, 0.1, 0.316, 1.0, 3.16)
SMALL = (0.01, 0.1)
FEWEST_SCALES = 3
EXACT_UP_TO = 64  # entries of a block
_NUMBERS_AT_ONCE = 2**24  # of probes that exist at the same time
_ROUNDING = 1e3  # units in the last place
# Exponents in the scale of what enters the first block, without norms and with small logits.
PREDICTED = {
    "outer": {
        **dict.fromkeys(("query", "key", "query × key"), 6.0),
        **dict.fromkeys(("query × value", "key × value"), 4.0),
        **dict.fromkeys(("value", "output", "up", "down"), 2.0),
    },
    "functional": {
        **dict.fromkeys(("query", "key"), 5.0),
        **dict.fromkeys(("query × key", "query × value", "key × value"), 3.0),
    },
}


@dataclass(frozen=True, kw_only=True)
class BlockNorms(Result):
    """‖H_bb z‖² of every probe z and block b, and the loss, at one setting of the model."""

    setting: float  # the scale, or the strength of a sink
    loss: float
    squares: dict[str, Tensor]  # part → (blocks, probes); exact blocks repeat one number
    products: int
    precision: float  # of one operation, of the model's numbers

    def norms(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Part → ‖H_bb‖_F (blocks,) with the ends of its 95 % interval."""
        result = {}
        for part, squares in self.squares.items():
            mean, count = squares.mean(1), squares.shape[1]
            reach = float(stats.t.ppf(0.975, count - 1)) * squares.std(1) / math.sqrt(count)
            ends = (mean, (mean - reach).clamp_min(0), mean + reach)
            value, low, high = (end.sqrt() for end in ends)
            result[part] = (value, low, high)
        return result


def block_norms(
    problem: Problem,
    blocks: Sequence[AtlasBlock],
    setting: float,
    *,
    probes: int,
    seed: int,
    mixed: bool = False,
    budget: int | str | None = None,
) -> BlockNorms:
    """The norms of the whole matrix and of every block, by the same probes for a seed.

    mixed: after the diagonal blocks also those of two roles of one layer (``mixed_pairs``).
    """
    operator = CurvatureParts(problem, budget=budget)
    # First the whole matrix: its graphs then serve all blocks.
    draws = random_signs(operator, problem.size, probes, seed)
    whole: dict[str, list[Tensor]] = {part: [] for part in PARTS}
    for _, images in probed_block(operator, None, draws):
        for part, image in images.items():
            whole[part].append(_squared(image))
    pairs = [(j, j) for j in range(len(blocks))] + (mixed_pairs(blocks) if mixed else [])
    squares = pair_squares(operator, blocks, pairs, probes=probes, seed=seed)
    return BlockNorms(
        setting=setting,
        loss=problem.value(),
        squares={
            part: torch.cat([torch.cat(found).unsqueeze(0), squares[part]])
            for part, found in whole.items()
        },
        products=operator.products,
        precision=torch.finfo(operator.dtype).eps,
    )


def mixed_pairs(blocks: Sequence[AtlasBlock]) -> list[tuple[int, int]]:
    """Places (row, column) of two blocks of one layer, the row first in the model."""
    return [
        (i, j)
        for j, column in enumerate(blocks)
        for i, row in enumerate(blocks[:j])
        if row.slices[0].layer is not None and row.layer == column.layer
    ]


def pair_squares(
    operator: CurvatureParts,
    blocks: Sequence[AtlasBlock],
    pairs: Sequence[tuple[int, int]],
    *,
    probes: int,
    seed: int,
) -> dict[str, Tensor]:
    """Part → ‖H_ij z‖² (pairs, probes) of blocks i (rows) and j (columns); z (probes, size of j).

    A product with columns in j gives all rows at once. Blocks of few columns are exact: every
    probe then has the same number.
    """
    result: dict[str, Tensor] = {
        part: torch.zeros(len(pairs), probes, dtype=torch.float64) for part in PARTS
    }
    # Always the same parameters: what an operator keeps for them then serves every block.
    used = [blocks[place] for place in {place for pair in pairs for place in pair}]
    for j in dict.fromkeys(column for _, column in pairs):
        column = blocks[j]
        at = [place for place, pair in enumerate(pairs) if pair[1] == j]
        rows = [blocks[pairs[place][0]] for place in at]
        exact = column.size <= max(EXACT_UP_TO, probes)
        groups: Iterable[Tensor]
        if exact:
            groups = [torch.eye(column.size, dtype=operator.dtype, device=operator.device)]
        else:
            groups = random_signs(operator, column.size, probes, seed + 7919 * (j + 1))
        found: dict[tuple[str, int], list[Tensor]] = {}
        for group in groups:
            every = _images(operator, column, rows, group, used)
            for place, images in zip(at, every, strict=True):
                for part, image in images.items():
                    found.setdefault((part, place), []).append(_squared(image))
        for (part, place), squares in found.items():
            joined = torch.cat(squares)
            result[part][place] = joined.sum() if exact else joined
    return result


def random_signs(operator: CurvatureParts, size: int, count: int, seed: int) -> Iterator[Tensor]:
    """``count`` rows of ±1, (k, size) at a time: as many as stay small beside a large model."""
    random = torch.Generator(device="cpu").manual_seed(seed)
    step = max(1, min(count, _NUMBERS_AT_ONCE // size))
    for start in range(0, count, step):
        shape = min(step, count - start), size
        signs = torch.randint(0, 2, shape, generator=random, dtype=torch.int8, device="cpu")
        yield (2 * signs - 1).to(device=operator.device, dtype=operator.dtype)


def probed_block(
    operator: CurvatureParts, block: AtlasBlock | None, groups: Iterable[Tensor]
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Probes z (k, size) and part → H_bb z (k, size), group after group; None: all of H."""
    layout = operator.problem.layout
    for draws in groups:
        if block is None:
            columns = dict(zip(layout.names, layout.split(draws.T), strict=True))
            yield draws, operator.parts(columns, layout.names)
            continue
        yield draws, _images(operator, block, [block], draws, [block])[0]


def _images(
    operator: CurvatureParts,
    column: AtlasBlock,
    rows: Sequence[AtlasBlock],
    draws: Tensor,
    used: Iterable[AtlasBlock],
) -> list[dict[str, Tensor]]:
    """Part → H_ij z (k, size of i) for every block i of ``rows``, of probes z (k, size of j).

    used: blocks whose parameters are asked for, the rows among them.
    """
    layout = operator.problem.layout
    asked = {piece.parameter for block in used for piece in block.slices}
    names = [name for name in layout.names if name in asked]
    images = operator.parts(scatter(column, draws, operator), names)
    every = [_places(row, names, operator.problem) for row in rows]
    return [
        images
        if places is None
        else {part: image.index_select(1, places) for part, image in images.items()}
        for places in every
    ]


def _squared(rows: Tensor) -> Tensor:
    """Squared lengths of the rows in float64; float32 would lose squares of what is small."""
    largest = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    lengths = torch.linalg.vector_norm(rows / largest, dim=1)
    squares: Tensor = (lengths.cpu().double() * largest.squeeze(1).cpu().double()).square()
    return squares


def _places(block: AtlasBlock, names: Sequence[str], problem: Problem) -> Tensor | None:
    """Where the block lies among the parameters ``names`` put together; None: it is all of them."""
    layout, start = problem.layout, 0
    offsets: dict[str, int] = {}
    for name, first, size in zip(layout.names, layout.starts, layout.sizes, strict=True):
        if name in names:
            offsets[name] = start - first
            start += size
    if block.size == start:
        return None
    pieces = [piece.indices + offsets[piece.parameter] for piece in block.slices]
    return torch.cat(pieces).to(problem.device)


@dataclass(frozen=True, kw_only=True)
class Growth(Result):
    """Norms of H, H_o and H_f by layer and role along a scale, and their exponents.

    ``law("blocks.0.query", "outer")`` is the fitted power law of one block (None where the part
    vanishes), ``exponents("query", "outer")`` maps each layer to its exponent.
    """

    scaled: str
    scales: tuple[float, ...]
    losses: tuple[float, ...]
    names: tuple[str, ...]  # "model", then every block: layer and role
    roles: tuple[str, ...]  # of every name
    layers: tuple[int | None, ...]
    norms: dict[str, Tensor]  # part → (scales, names), Frobenius
    low: dict[str, Tensor]  # the ends of their 95 % intervals
    high: dict[str, Tensor]
    laws: dict[str, dict[str, PowerLaw | None]]  # part → name → law within ``window``
    window: Interval  # of the scales that are fitted
    products: int

    def law(self, name: str, part: str = "outer") -> PowerLaw | None:
        """The power law of one block within ``window``; None where the part is zero."""
        if part not in self.laws or name not in self.laws[part]:
            raise KeyError(
                f"there is no {part!r} of {name!r}: parts are {', '.join(PARTS)}, names "
                f"{', '.join(self.names)}."
            )
        return self.laws[part][name]

    def exponents(self, role: str, part: str = "outer") -> dict[str, float]:
        """Layer ("layer 0", or the name of what has no layer) → exponent; NaN where zero."""
        chosen = {}
        for name, own, layer in zip(self.names, self.roles, self.layers, strict=True):
            if own == role:
                law = self.law(name, part)
                place = name if layer is None else f"layer {layer}"
                chosen[place] = math.nan if law is None else law.exponent
        if not chosen:
            known = ", ".join(dict.fromkeys(self.roles))
            raise KeyError(f"no block has the role {role!r}: roles are {known}.")
        return chosen

    def local_exponents(self, part: str = "outer") -> Tensor:
        """Slopes between neighbouring scales, (scales − 1, names): where a law ends."""
        steps = torch.tensor(self.scales, dtype=torch.float64).log().diff()
        return self.norms[part].log().diff(dim=0) / steps[:, None]

    def predicted(self, name: str, part: str) -> float | None:
        """What theory says for small logits without norms; None where it says nothing."""
        role = self.roles[self.names.index(name)]
        return PREDICTED.get(part, {}).get(role) if self.scaled == "embeddings" else None

    def _rows(self) -> list[dict[str, Any]]:
        """A row a parameter and scale: the norms of the parts of its block."""
        return [
            {"name": name, "scale": scale}
            | {part: float(norms[k, i]) for part, norms in self.norms.items()}
            for i, name in enumerate(self.names)
            for k, scale in enumerate(self.scales)
        ]

    def __str__(self) -> str:
        head = (
            f"{self.scaled} × {self.scales[0]:g} … {self.scales[-1]:g}: exponents of Frobenius "
            f"norms for scales in [{self.window[0]:g}, {self.window[1]:g}] (95 %)"
        )
        width = max(len(name) for name in self.names)
        rows = [f"{'':{width}s}  {'H':>22s} {'H_o':>22s} {'H_f':>22s}"]
        shown = [name for name in self.names if not name.endswith("bias")]
        for name in shown:
            cells = " ".join(f"{_told(self.laws[part][name]):>22s}" for part in PARTS)
            rows.append(f"{name:{width}s}  {cells}")
        biases = len(self.names) - len(shown)
        return "\n".join([head, *rows, f"{biases} biases not shown, {self.products} products"])


def _told(law: PowerLaw | None) -> str:
    if law is None:
        return "0"
    low, high = law.interval
    return f"{law.exponent:.2f} [{low:.2f}, {high:.2f}]"


def growth(
    problem: Problem,
    *,
    scale: str | Sequence[str] = "embeddings",
    scales: Sequence[float] | None = None,
    fit: tuple[float, float] | None = None,
    roles: Sequence[str] | None = None,
    mixed: bool = False,
    probes: int = 16,
    seed: int = 0,
    budget: int | str | None = None,
    output: str | os.PathLike[str] | Run | None = None,
) -> Growth:
    """Norms of H, H_o and H_f by role and layer while a part of the model is scaled; exponents.

    scale: "embeddings", the activations that enter the first block; "query_key", both weights and
        biases in every layer; or roles, names or globs of the anatomy ("value", "blocks.0.*").
    scales: the factors (default: 0.01 … 3.16). fit: the range of them whose exponents are fitted
        (default: 0.01 … 0.1, where theory speaks; of your own scales all); at least 3.
    roles: measure only these blocks: roles, names or globs (default: all).
    mixed: also the blocks of two roles of one layer, "blocks.0.query × blocks.0.value".
    probes: products a block and scale; blocks of up to 64 entries are exact.
    output: a run folder, or an open ``Run``: every finished scale is stored, and the same call
        resumes it. The model itself is never changed: a copy is scaled.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"growth takes a Problem, got a {type(problem).__name__}.")
    problem.require_one_process("growth")
    if probes < 3:
        raise ValueError(f"an interval over probes needs 3 or more, got {probes}.")
    factors, window = plan(scales, fit)
    scaler = Scaler(problem, scale)
    blocks = blocks_of(problem.anatomy)
    if roles is not None:
        wanted = {piece.name for piece in chosen_slices(problem.anatomy, roles)}
        blocks = tuple(block for block in blocks if block.name in wanted)
    options = {
        "command": "growth",
        "scale": scaler.name,
        "scales": factors,
        "fit": list(window),
        "roles": None if roles is None else list(roles),
        "probes": probes,
        "seed": seed,
        **({"mixed": True} if mixed else {}),
    }

    def measured(factor: float) -> BlockNorms:
        with scaler.scaled(factor) as other:
            how: dict[str, Any] = {"probes": probes, "seed": seed, "budget": budget}
            return block_norms(other, blocks, factor, mixed=mixed, **how)

    def work(step: Step) -> Growth:
        points = [
            step(f"growth.scale{number}", functools.partial(measured, factor))
            for number, factor in enumerate(track(factors, "growth"))
        ]
        result: Growth = step("growth", lambda: _fitted(scaler.name, blocks, points, window, mixed))
        return result

    return recorded(problem, output, options, work)


def plan(
    scales: Sequence[float] | None, fit: tuple[float, float] | None
) -> tuple[list[float], Interval]:
    """The scales, in order, and the range of them that is fitted."""
    factors = sorted({float(t) for t in (SCALES if scales is None else scales)})
    if not factors or not all(0 < t < math.inf for t in factors):
        raise ValueError(f"scales are positive numbers, got {factors}.")
    window = fit or (SMALL if scales is None else (factors[0], factors[-1]))
    fitted = sum(_within(window, t) for t in factors)
    if fitted < FEWEST_SCALES:
        raise ValueError(
            f"an exponent needs {FEWEST_SCALES} or more scales, got {fitted} in "
            f"[{window[0]:g}, {window[1]:g}]: give more scales, or a wider fit."
        )
    return factors, window


def _within(window: Interval, scale: float) -> bool:
    return window[0] * (1 - 1e-9) <= scale <= window[1] * (1 + 1e-9)


class Scaler:
    """A copy of the model of which one part can be scaled."""

    def __init__(self, problem: Problem, scale: str | Sequence[str]) -> None:
        self.name = scale if isinstance(scale, str) else ",".join(scale)
        self._problem = problem
        self._slices: list[Slice] = []
        self._path = ""
        if scale == "embeddings":
            self._path = first_block(problem)
        elif scale == "query_key":
            self._slices = [
                piece
                for piece in problem.anatomy
                if piece.role.removeprefix("cross_").removesuffix("_bias") in ("query", "key")
            ]
            if not self._slices:
                raise ProblemError(_without(problem, "query and key weights"))
        else:
            named = [scale] if isinstance(scale, str) else list(scale)
            self._slices = chosen_slices(problem.anatomy, named)

    @contextlib.contextmanager
    def scaled(self, factor: float) -> Iterator[Problem]:
        """The problem on a copy of the model with the part times ``factor``."""
        other = on_a_copy(self._problem)
        if self._slices:
            weights = other.named_weights()
            flat = self._problem.parameters.clone()
            for piece in self._slices:
                piece.view(flat).mul_(factor)
            with torch.no_grad():
                for name, values in zip(
                    other.layout.names, other.layout.split(flat.unsqueeze(1)), strict=True
                ):
                    weights[name].copy_(values.squeeze(0))
            yield other
            return
        seen: list[bool] = []

        def enter(_: nn.Module, arguments: Any, keywords: Any) -> tuple[Any, Any]:
            scaled_arguments, scaled_keywords, found = _times(arguments, keywords, factor)
            seen.append(found)
            return scaled_arguments, scaled_keywords

        block = called_module(other.model, self._path)
        handle = block.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            yield other
        finally:
            handle.remove()
        if not any(seen):
            raise ProblemError(
                f"{self._path or 'the model'} takes no tensor of real numbers that could be scaled."
            )


def on_a_copy(problem: Problem) -> Problem:
    """The same problem for a copy of its model, which may then be changed."""
    other = problem.with_model(problem.copied_model())
    vars(other)["anatomy"] = problem.anatomy  # the parameters have the same names and roles
    return other


def first_block(problem: Problem) -> str:
    """The path of the first block, whose input are the embeddings."""
    paths = block_paths(problem.anatomy)
    if not paths or (len(paths) > 1 and not paths[min(paths)]):
        raise ProblemError(_without(problem, "blocks whose input could be scaled"))
    return paths[min(paths)]


def _without(problem: Problem, what: str) -> str:
    roles = ", ".join(problem.anatomy.roles[:8])
    return (
        f"{type(problem.model).__name__} has no {what} that are known: scale one of its roles "
        f"({roles}) instead."
    )


def _times(arguments: Any, keywords: Any, factor: float) -> tuple[Any, Any, bool]:
    """The first tensor of real numbers among a module's arguments times ``factor``."""
    arguments = list(arguments)
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.is_floating_point():
            arguments[place] = value * factor
            return tuple(arguments), keywords, True
    for key, value in keywords.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return tuple(arguments), {**keywords, key: value * factor}, True
    return tuple(arguments), keywords, False


def _fitted(
    scaled: str,
    blocks: Sequence[AtlasBlock],
    points: Sequence[BlockNorms],
    window: Interval,
    mixed: bool,
) -> Growth:
    scales = [point.setting for point in points]
    pairs = [(blocks[i], blocks[j]) for i, j in (mixed_pairs(blocks) if mixed else ())]
    names = (
        MODEL,
        *(block.name for block in blocks),
        *(f"{row.name} × {column.name}" for row, column in pairs),
    )
    inside = [_within(window, t) for t in scales]
    x = np.array([t for t, kept in zip(scales, inside, strict=True) if kept])
    norms = [point.norms() for point in points]
    laws: dict[str, dict[str, PowerLaw | None]] = {}
    for part in PARTS:
        laws[part] = {}
        squares = torch.stack(
            [p.squares[part] for p, kept in zip(points, inside, strict=True) if kept]
        ).numpy()  # (scales, names, probes)
        sizes = np.sqrt(squares.mean(2))
        for place, name in enumerate(names):
            # The softmax forgets a key's bias: all of its block may be rounding, of terms as large
            # as those of the query's. What else vanishes is zero to the last bit.
            twin = name.replace("key_bias", "query_bias")
            beside = names.index(twin) if twin in names else place
            floor = _ROUNDING * points[0].precision * sizes[:, beside]
            alive = bool((sizes[:, place] > floor).all())
            laws[part][name] = exponent_of(x, squares[:, place]) if alive else None
    return Growth(
        scaled=scaled,
        scales=tuple(scales),
        losses=tuple(point.loss for point in points),
        names=names,
        roles=(
            MODEL,
            *(block.role for block in blocks),
            *(f"{row.role} × {column.role}" for row, column in pairs),
        ),
        layers=(None, *(b.slices[0].layer for b in (*blocks, *(row for row, _ in pairs)))),
        norms={part: torch.stack([n[part][0] for n in norms]) for part in PARTS},
        low={part: torch.stack([n[part][1] for n in norms]) for part in PARTS},
        high={part: torch.stack([n[part][2] for n in norms]) for part in PARTS},
        laws=laws,
        window=window,
        products=sum(point.products for point in points),
    )


def exponent_of(x: Any, squares: Any) -> PowerLaw:
    """The power law of √(mean over probes of squares) (scales, probes) in x.

    The interval holds what the line leaves over (Student) and, by the jackknife over probes, what
    they do not know of the norms.
    """
    probes = squares.shape[1]
    law = power_law(x, np.sqrt(squares.mean(1)))
    logs = np.log(x) - np.log(x).mean()
    weights = logs / (logs @ logs)
    others = (squares.sum(1, keepdims=True) - squares) / (probes - 1)  # without each probe
    with np.errstate(divide="ignore"):
        slopes = weights @ (0.5 * np.log(others))
    jackknife = math.sqrt((probes - 1) / probes * float(((slopes - slopes.mean()) ** 2).sum()))
    if not math.isfinite(jackknife):
        jackknife = math.inf  # all but one probe saw nothing
    reach = float(stats.t.ppf(0.975, probes - 1)) * jackknife
    low, high = law.interval
    half = math.hypot((high - low) / 2, reach)
    return replace(law, interval=(law.exponent - half, law.exponent + half))
