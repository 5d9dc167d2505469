"""``CurvaturePropagationAnalyzer``: how curvature moves from the loss back to the embedding."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvatlas.analysis.atlas.exact import largest_singular
from curvatlas.analysis.propagation.capture import (
    Capture,
    EnteringAt,
    Node,
    attention_weights,
    capture,
    takes,
)
from curvatlas.analysis.propagation.dense import (
    is_sum,
    propagate,
    samples_interact,
)
from curvatlas.analysis.propagation.matrix_free import (
    FreeProducts,
    Probed,
    Product,
    Sweep,
    orthonormal,
    probe,
)
from curvatlas.analysis.propagation.result import CurvatureFlow, FlowEntry, Measure
from curvatlas.analysis.propagation.spectral import SpectralNorms
from curvatlas.budget import default_budget, parse_bytes
from curvatlas.figures.flow import visualize_curvature_flow
from curvatlas.precision import in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import evaluated
from curvatlas.problem.losses import LossLike
from curvatlas.problem.problem import own_targets
from curvatlas.progress import track
from curvatlas.results import Interval, also_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_SPECTRUM_UP_TO = 512  # entries of one sample's activation whose spectrum is computed in full
Wanted = Callable[[Node], bool]  # which activations, and the sublayers that make them
# A sweep of this many probes takes less time than one product an entry at 4 layers, a third of it
# at 12, and knows traces twice as well (benchmarks/atlas_deep.py).
SWEPT = 3
_PARTS = ("total", "passed_on", "created_here")


@dataclass(frozen=True)
class Place:
    """What an entry is called and where it stands."""

    node: Node  # whose sublayer, or which activation
    kind: str  # "sublayer" or "activation"
    at: Node  # the activation whose coordinates the matrices have
    name: str


# --- dense ----------------------------------------------------------------------------------------


def dense_entries(
    problem: Problem,
    batch: Batch,
    capture: Capture,
    samples: int,
    *,
    keep: bool,
    wanted: Wanted,
) -> Iterator[FlowEntry]:
    """Entries from the loss backwards: each sublayer after the activation it puts out."""
    total = len(capture.nodes) + 1
    for step in track(propagate(problem, batch, capture, samples), "propagation", total=total):
        if not wanted(step.node):
            continue
        if step.total is not None and step.created is not None:
            place = Place(step.node, "activation", step.node, step.node.name)
            passed = step.total - step.created
            yield _dense(place, passed, step.created, step.slope, samples, None, keep)
        behind = None if step.total is None else float(torch.linalg.norm(step.total))
        through = step.through
        if step.node.kind == "residual":
            through = through[:1]  # a sum passes the same matrix on to each of its inputs
        for node, passed, made in through:
            name = step.node.name if len(through) == 1 else f"{step.node.name} ← {node.name}"
            place = Place(step.node, "sublayer", node, name)
            yield _dense(place, passed, made, step.slope, samples, behind, keep)


def _dense(
    place: Place,
    passed: Tensor,
    made: Tensor,
    slope: Tensor,
    samples: int,
    behind: float | None,
    keep: bool,
) -> FlowEntry:
    total = passed + made
    matrices = dict(zip(_PARTS, (total, passed, made), strict=True))
    # tokens of one sample: all axes between the samples' and the width
    tokens = max(1, math.prod(place.at.tensor.shape[:-1]) // samples)
    width = total.shape[1] // tokens
    blocks = total.reshape(samples, tokens, width, tokens, width)
    token_blocks = blocks.diagonal(dim1=1, dim2=3)  # (samples, width, width, tokens)
    values = torch.linalg.eigvalsh(total) if total.shape[1] <= _SPECTRUM_UP_TO else None
    if values is not None:
        largest = float(values.abs().max())
    else:
        largest = max(largest_singular(in_float64(one)) for one in total)
    stored: dict[str, Any] = {
        part: matrix.detach().cpu() if keep else None for part, matrix in matrices.items()
    }
    norm = float(torch.linalg.norm(total))
    amplification = norm / behind if behind else None
    return FlowEntry(
        **_named(place),
        **stored,
        measures={part: _exact_measure(matrix) for part, matrix in matrices.items()},
        spectral_norm=largest,
        spectral_interval=(largest, largest),
        eigenvalues=None if values is None else values.cpu(),
        token_trace=token_blocks.diagonal(dim1=1, dim2=2).sum(-1).cpu(),
        token_norm=token_blocks.pow(2).sum((1, 2)).sqrt().cpu(),
        gradient_scale=float(torch.linalg.norm(slope)),
        amplification=amplification,
        amplification_interval=None if amplification is None else (amplification, amplification),
        exact=True,
    )


def _exact_measure(matrix: Tensor) -> Measure:
    norm = float(torch.linalg.norm(matrix))
    trace = float(matrix.diagonal(dim1=1, dim2=2).sum())
    return Measure(
        norm=norm, norm_interval=(norm, norm), trace=trace, trace_interval=(trace, trace)
    )


def _named(place: Place) -> dict[str, Any]:
    node = place.node
    return {
        "name": place.name,
        "sublayer": node.kind,
        "layer": node.layer,
        "place": place.kind,
        "aliases": tuple(node.aliases) if place.kind == "activation" else (),
        "module": node.module,
        "shape": tuple(place.at.tensor.shape),
    }


# --- matrix-free ----------------------------------------------------------------------------------


Probes = tuple[Tensor, tuple[Tensor, Tensor, Tensor]]  # a basis, and the images of the parts


def free_entries(
    products: FreeProducts,
    samples: int,
    *,
    probes: int,
    seed: int,
    wanted: Wanted,
    norms: SpectralNorms | None = None,
) -> Iterator[FlowEntry]:
    """The same entries, estimated from ``probes`` products each with what lies behind them.

    norms: refines the spectral norms.
    """
    capture = products.capture
    generator = torch.Generator(device="cpu").manual_seed(seed)
    behind: dict[Node, Probed] = {}
    measured: dict[Node, Probes] = {}  # activations that a sublayer's entry has measured already

    def at(node: Node) -> Probes:
        """The Hessian at an activation: what its readers create there, and the rest."""
        basis = orthonormal(node.tensor.shape, probes, generator, node.tensor)
        total, created = products.total(node)(basis), products.created(node)(basis)
        return basis, (total.detach(), (total - created).detach(), created.detach())

    def through(passed: Product, made: Product, node: Node) -> Probes:
        basis = orthonormal(node.tensor.shape, probes, generator, node.tensor)
        moved, created = passed(basis).detach(), made(basis).detach()
        return basis, (moved + created, moved, created)

    def entry(place: Place, probes_there: Probes) -> FlowEntry:
        basis, images = probes_there
        probed = [probe(image, basis, samples) for image in images]
        behind.setdefault(place.node, probed[0])  # the activation comes before its sublayers
        parts = dict(zip(_PARTS, probed, strict=True))
        slope = products.slopes.get(place.node)
        before = behind[place.node] if place.node in products.slopes else None
        refined = _refined(norms, place, (basis[0], images[0][0]))
        return _estimated(place, parts, slope, before, refined)

    for node in track(capture.last, "propagation: head"):
        head = Node("head", "head", None, node.tensor)
        if not wanted(head):
            continue
        name = "head" if len(capture.last) == 1 else f"head ← {node.name}"
        yield entry(Place(head, "sublayer", node, name), through(*products.head(node), node))
    nodes = [node for node in reversed(capture.nodes) if wanted(node)]
    for node in track(nodes, "propagation"):
        here = measured.pop(node) if node in measured else at(node)
        yield entry(Place(node, "activation", node, node.name), here)
        for parent, name in _inputs_of(node):
            if is_sum(node):  # passes the very same matrix on and creates nothing
                basis, (total, _, created) = here
                seen = basis, (total, total, torch.zeros_like(created))
                # What only the sum reads has the sum's Hessian: the branch needs no products.
                for branch in node.parents:
                    if products.readers[branch] == [node] and branch not in capture.last:
                        measured[branch] = seen
            elif products.readers[parent] == [node] and parent not in capture.last:
                # The only reader of its input: all that the loss sees of the one, it sees of both.
                seen = measured[parent] = at(parent)
            else:
                passed, made = products.passed_by(node, parent), products.created_by(node, parent)
                seen = through(passed, made, parent)
            yield entry(Place(node, "sublayer", parent, name), seen)


def _refined(
    norms: SpectralNorms | None, place: Place, probe: tuple[Tensor, Tensor] | None = None
) -> Interval | None:
    if norms is None:
        return None
    reader = place.node if place.kind == "sublayer" else None
    return norms.interval(place.at, reader=reader, probe=probe)


def sweep_entries(
    products: FreeProducts,
    samples: int,
    *,
    probes: int,
    seed: int,
    norms: SpectralNorms | None = None,
) -> Iterator[FlowEntry]:
    """All entries from one sweep of ``SWEPT`` times as many probes, linear in the layers.

    Where the model has no cut behind an activation (an encoder that every layer of a decoder
    reads), and for the head, each entry takes products of its own as in ``free_entries``.
    """
    nodes = products.capture.nodes
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sweep = Sweep(products, samples, probes=SWEPT * probes, generator=generator)
    reached = nodes.index(sweep.cuts[-1]) if sweep.cuts else -1
    beyond = set(nodes[reached + 1 :])

    def alone(node: Node) -> bool:
        return node.kind == "head" or node in beyond

    yield from free_entries(
        products, samples, probes=probes, seed=seed + 1, wanted=alone, norms=norms
    )
    for node, site in track(sweep.activations(), "propagation", total=reached + 1):
        slope = products.slopes[node]
        here = site.parts
        place = Place(node, "activation", node, node.name)
        yield _estimated(place, here, slope, None, _refined(norms, place))
        for parent, name in _inputs_of(node):
            parts = sweep.through(node, parent, site).parts
            place = Place(node, "sublayer", parent, name)
            yield _estimated(place, parts, slope, here["total"], _refined(norms, place))


def _inputs_of(node: Node) -> list[tuple[Node, str]]:
    """The inputs that have an entry of the node's sublayer, and its name."""
    # A sum passes the same matrix on to each of its inputs.
    parents = node.parents[:1] if node.kind == "residual" else node.parents
    if len(parents) == 1:
        return [(parents[0], node.name)]
    return [(parent, f"{node.name} ← {parent.name}") for parent in parents]


def _estimated(
    place: Place,
    parts: dict[str, Probed],
    slope: Tensor | None,
    behind: Probed | None,
    refined: Interval | None,
) -> FlowEntry:
    total = parts["total"]
    low, high = total.spectral if refined is None else refined
    amplification, interval = None, None
    if place.kind == "sublayer" and behind is not None and behind.norm_interval[0] > 0:
        amplification = total.norm / behind.norm
        interval = (
            total.norm_interval[0] / behind.norm_interval[1],
            total.norm_interval[1] / behind.norm_interval[0],
        )
    return FlowEntry(
        **_named(place),
        total=None,
        passed_on=None,
        created_here=None,
        measures={part: probed.measure for part, probed in parts.items()},
        spectral_norm=math.sqrt(low * high),
        spectral_interval=(low, high),
        eigenvalues=None,
        token_trace=total.token_trace,
        token_trace_error=total.token_error,
        token_norm=None,
        gradient_scale=float("nan") if slope is None else float(torch.linalg.norm(slope.detach())),
        amplification=amplification,
        amplification_interval=interval,
        exact=False,
    )


# Matrices alive at once while one sublayer is eliminated: the joint Hessian of a block's branch and
# skip (4), Jacobian and second derivative, their products, the copies handed out, and those that
# norms and spectra make (benchmarks/costs.py: 25 in use, the rest held by the allocator).
ALIVE = 36
# Blocks from which one sweep is cheaper than products at every entry: half of the time at 16, a
# quarter at 32 (benchmarks/atlas_deep.py --depths).
_SWEEP_FROM = 16
_DENSE_UP_TO = 2048  # tokens · width beyond which products are cheaper than 2·n² entries


class CurvaturePropagationAnalyzer:
    """Exact account of second derivatives along the depth of any Transformer.

    model: any ``nn.Module`` whose anatomy has attention, norm or feed-forward modules.
    loss: ``"cross_entropy"``, ``"mse"`` or a callable (outputs, targets) → mean. None: cross-
        entropy for integer targets, mean squared error for real ones; without targets,
        cross-entropy if the model has a head and mean squared error otherwise.
    budget: memory for dense matrices; beyond it (or 2048 entries a sample) products are used.
    probes: products an entry when matrix-free. A sweep takes three times as many, for all entries.
    sweep: whether a matrix-free account of all blocks comes from one sweep, linear in the depth
        (norms less certain, traces more), or from products at every entry, quadratic in it.
        None: the sweep from 16 blocks on.
    spectral: "bracket" (spectral norms between bounds from the same products) or "refine": a short
        Lanczos at every entry, about 20 products, whose interval is closer than 1 %. Matrices that
        are formed give them exactly.
    compute_dtype: as for ``Problem``, for weights in half precision.

    Without targets the loss is that of the model's own predictions: for cross-entropy the most
    likely class of every output, for mean squared error the target zero. ``flow.target`` says so.

    x is the model's input, or, as in the article, hidden states (samples, tokens, width) as they
    enter a block, for a model that does not take such an x itself: the loss is then that of the
    blocks from there on. ``history`` keeps the accounts, ``curvature_history`` for each of them the
    rows of the blocks' outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossLike | None = None,
        *,
        budget: int | str | None = None,
        probes: int = 8,
        method: str = "auto",
        sweep: bool | None = None,
        spectral: str = "bracket",
        seed: int = 0,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if method not in ("auto", "dense", "matrix-free"):
            raise ValueError(f"method is 'auto', 'dense' or 'matrix-free', got {method!r}.")
        if probes < 3:
            raise ValueError(f"an interval needs at least 3 probes, got {probes}.")
        self.model = model
        self.loss = loss
        self.compute_dtype = compute_dtype
        self.budget = budget
        self.probes = probes
        self.method = method
        self.sweep = sweep
        self.spectral = _checked_spectral(spectral)
        self.seed = seed
        self.history: list[CurvatureFlow] = []
        self.curvature_history: list[list[Any]] = []

    # --- the article's methods ------------------------------------------------------------------

    @evaluated
    @also_named(layer_idx="layer")
    def compute_layer_curvature(self, x: Any, layer: int | str, target: Any = None) -> FlowEntry:
        """The Hessian of the loss with respect to one activation.

        layer: a block's number (its output), or a name such as "embedding", "blocks.0.attention".
        A block's entry has ``attn_curvature``, the Frobenius norm of the loss's second derivative
        at the input of its attention, and ``attention_scores``, the weights A of every head.
        """
        name = f"blocks.{layer}" if isinstance(layer, int) else layer
        first = self._entered(x, layer)
        problem, _ = self._problem(x, target, first)
        problem.check()
        batch = next(problem.batches())
        with problem.evaluating():
            captured = capture(problem, batch, first=first)
            named = {a: node for node in captured.nodes for a in (node.name, *node.aliases)}
            if name not in named:
                raise KeyError(f"there is no activation {name!r}; there are {', '.join(named)}.")
            node = named[name]
            attention = [
                other
                for other in captured.nodes
                if isinstance(layer, int) and (other.layer, other.kind) == (layer, "attention")
            ][:1]
            entries = list(
                self._entries(
                    problem,
                    batch,
                    captured,
                    lambda other: other is node or other in attention,
                    spectral=self.spectral,
                )[1]
            )
            scores = None
            if attention and isinstance(layer, int):
                scores = attention_weights(problem, batch, layer)
        here = [e for e in entries if (e.place, e.name) == ("activation", node.name)]
        inside = [e for e in entries if attention and e.place == "sublayer"]
        inside = [e for e in inside if e.name.split(" ← ")[0] == attention[0].name]
        if not here:
            raise KeyError(f"the activation {name!r} was not reached.")  # pragma: no cover
        curvature = inside[0].norm if inside else None
        return replace(here[0], attn_curvature=curvature, attention_scores=scores)

    @evaluated
    def analyze_curvature_flow(
        self,
        x: Any,
        target: Any = None,
        *,
        step: int | None = None,
        layers: int | Sequence[int] | None = None,
        spectral: str | None = None,
    ) -> CurvatureFlow:
        """Every sublayer and activation of one batch; kept in ``history`` for the figure.

        x: the model's input, or a mapping of keyword arguments (``labels`` are its targets).
        layers: the blocks to account for, by their numbers, or how many of them, evenly spaced
            with the first and the last. None: all. What stands outside the blocks always counts.
            Without matrices, a deep model's come from one sweep (see ``sweep``), linear in the
            depth. Blocks asked for by number get products of their own, each through all that
            lies behind it: their norms are known better and spectral norms bracketed closer.
            Entries inside a block have its ``attn_curvature``.
        spectral: "bracket" or "refine", instead of the analyzer's own.
        """
        chosen_spectral = self.spectral if spectral is None else _checked_spectral(spectral)
        first = self._entered(x, 0)
        problem, origin = self._problem(x, target, first)
        problem.check()
        batch = next(problem.batches())
        with problem.evaluating():
            captured = capture(problem, batch, first=first)
            chosen = None if layers is None else _chosen_layers(layers, captured)
            method, entries, products = self._entries(
                problem,
                batch,
                captured,
                None if chosen is None else lambda n: n.layer is None or n.layer in chosen,
                spectral=chosen_spectral,
            )
            backwards = list(entries)
            loss = float(problem.loss.value(captured.outputs, batch.targets).detach())
        backwards.reverse()  # from the embedding to the head
        bent: dict[int | None, float] = {}  # layer → ‖∂²ℓ/∂input²‖_F of its first attention
        for entry in backwards:
            if (entry.place, entry.sublayer) == ("sublayer", "attention"):
                bent.setdefault(entry.layer, entry.norm)
        backwards = [replace(e, attn_curvature=bent.get(e.layer)) for e in backwards]
        flow = CurvatureFlow(
            sublayers=tuple(e for e in backwards if e.place == "sublayer"),
            activations=tuple(e for e in backwards if e.place == "activation"),
            method=method,
            loss=loss,
            target=origin,
            samples=batch.length,
            step=step,
            products=0 if products is None else products.count,
        )
        self.history.append(flow)
        self.curvature_history.append([e for e in flow.stream if e.layer is not None])
        return flow

    def visualize_curvature_flow(
        self, path: str | os.PathLike[str] | None = None, *, flows: Any = None
    ) -> Figure:
        """Four panels over layers (and steps, after several analyses); saved where told."""
        chosen = list(flows) if flows is not None else self.history
        if not chosen and not self.curvature_history:
            raise ValueError("nothing to draw yet: call analyze_curvature_flow(x) first.")
        if not chosen:
            return visualize_curvature_flow(self.curvature_history, path=path)
        names = [entry.name for entry in chosen[-1].stream]
        alike = [flow for flow in chosen if [entry.name for entry in flow.stream] == names]
        return visualize_curvature_flow(alike, path=path)

    # --- what stands behind them ----------------------------------------------------------------

    def _entries(
        self,
        problem: Problem,
        batch: Batch,
        captured: Capture,
        wanted: Wanted | None,
        *,
        spectral: str,
    ) -> tuple[str, Iterator[FlowEntry], FreeProducts | None]:
        """By matrices, by one sweep for all entries (wanted: None), or by products for each."""
        every = wanted or (lambda _: True)
        samples = 1 if samples_interact(problem, batch, captured) else batch.length
        largest = max(node.tensor.numel() // samples for node in captured.nodes)
        room = default_budget(problem.device) if self.budget is None else parse_bytes(self.budget)
        one = samples * largest**2 * problem.dtype.itemsize
        fits = ALIVE * one <= room and largest <= _DENSE_UP_TO
        if self.method == "dense" or (self.method == "auto" and fits):
            keep = 6 * len(captured.nodes) * one <= room
            entries = dense_entries(problem, batch, captured, samples, keep=keep, wanted=every)
            return "dense", entries, None
        blocks = len({node.layer for node in captured.nodes if node.layer is not None})
        deep = blocks >= _SWEEP_FROM if self.sweep is None else self.sweep
        products = FreeProducts(problem, batch, captured)
        norms = None
        if spectral == "refine":
            generator = torch.Generator(device="cpu").manual_seed(self.seed + 2)
            norms = SpectralNorms(products, samples, generator)
        effort: dict[str, Any] = {"probes": self.probes, "seed": self.seed, "norms": norms}
        if wanted is None and deep:
            entries = sweep_entries(products, samples, **effort)
        else:
            entries = free_entries(products, samples, wanted=every, **effort)
        return "matrix-free", entries, products

    def _entered(self, x: Any, layer: int | str) -> int | None:
        """The block that hidden states x enter; None where x is an input of the model."""
        hidden = isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3
        if not hidden or takes(self.model, x):
            return None
        return layer if isinstance(layer, int) else 0

    def _problem(self, x: Any, target: Any, first: int | None) -> tuple[Problem, str]:
        model = self.model if first is None else EnteringAt(self.model, first, x)
        # One batch is looked into, which lies in this process.
        options: Any = {"distributed": False, "compute_dtype": self.compute_dtype}
        if isinstance(x, Mapping) and target is None and x.get("labels") is not None:
            return Problem(model, self._loss_for(x["labels"]), [x], **options), "labels"
        if target is not None:
            if isinstance(x, Mapping):
                x = {key: value for key, value in x.items() if key != "labels"}
            return Problem(model, self._loss_for(target), [(x, target)], **options), "given"
        return own_targets(model, self.loss, x, **options)

    def _loss_for(self, target: Any) -> Any:
        if self.loss is not None:
            return self.loss
        real = isinstance(target, Tensor) and target.is_floating_point()
        return "mse" if real else "cross_entropy"


def _checked_spectral(spectral: str) -> str:
    if spectral not in ("bracket", "refine"):
        raise ValueError(f"spectral is 'bracket' or 'refine', got {spectral!r}.")
    return spectral


def _chosen_layers(layers: int | Sequence[int], captured: Capture) -> set[int]:
    """The numbers of the blocks asked for; an int spreads that many from the first to the last."""
    present = sorted({node.layer for node in captured.nodes if node.layer is not None})
    if isinstance(layers, int):
        if layers < 1:
            raise ValueError(f"layers is a number of blocks, at least 1, or a list; got {layers}.")
        places = (
            torch.linspace(len(present) - 1, 0, min(layers, len(present))).round().long().tolist()
        )
        return {present[place] for place in places} if present else set()
    unknown = sorted(set(layers) - set(present))
    if unknown:
        raise ValueError(f"there are no blocks {unknown}; there are {present}.")
    return set(layers)
