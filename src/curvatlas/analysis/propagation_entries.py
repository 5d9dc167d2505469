"""From matrices or products to the entries of a flow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.analysis.atlas_dense import largest_singular
from curvatlas.analysis.propagation_capture import Capture, Node
from curvatlas.analysis.propagation_dense import Step, propagate
from curvatlas.analysis.propagation_free import (
    FreeProducts,
    Probed,
    Product,
    orthonormal,
    probe,
)
from curvatlas.analysis.propagation_local import Samples, is_sum
from curvatlas.analysis.propagation_result import FlowEntry, Measure
from curvatlas.analysis.propagation_sweep import Sweep
from curvatlas.precision import in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.progress import track

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


def tokens_of(tensor: Tensor, samples: int) -> int:
    """Tokens of one sample: all axes between the samples' and the width."""
    return max(1, math.prod(tensor.shape[:-1]) // samples)


# --- dense ----------------------------------------------------------------------------------------


def dense_entries(
    problem: Problem, batch: Batch, capture: Capture, view: Samples, *, keep: bool, wanted: Wanted
) -> Iterator[FlowEntry]:
    """Entries from the loss backwards: each sublayer after the activation it puts out."""
    total = len(capture.nodes) + 1
    for step in track(propagate(problem, batch, capture, view), "propagation", total=total):
        if not wanted(step.node):
            continue
        if step.total is not None and step.created is not None:
            place = Place(step.node, "activation", step.node, step.node.name)
            passed = step.total - step.created
            yield _dense(place, passed, step.created, step.slope, view, None, keep)
        yield from _sublayer_entries(step, view, keep)


def _sublayer_entries(step: Step, view: Samples, keep: bool) -> Iterator[FlowEntry]:
    behind = None if step.total is None else float(torch.linalg.norm(step.total))
    through = step.through
    if step.node.kind == "residual":
        through = through[:1]  # a sum passes the same matrix on to each of its inputs
    for node, passed, made in through:
        name = step.node.name if len(through) == 1 else f"{step.node.name} ← {node.name}"
        place = Place(step.node, "sublayer", node, name)
        yield _dense(place, passed, made, step.slope, view, behind, keep)


def _dense(
    place: Place,
    passed: Tensor,
    made: Tensor,
    slope: Tensor,
    view: Samples,
    behind: float | None,
    keep: bool,
) -> FlowEntry:
    total = passed + made
    matrices = dict(zip(_PARTS, (total, passed, made), strict=True))
    tokens = tokens_of(place.at.tensor, view.count)
    width = total.shape[1] // tokens
    blocks = total.reshape(view.count, tokens, width, tokens, width)
    own = blocks.diagonal(dim1=1, dim2=3)  # (samples, width, width, tokens)
    values = torch.linalg.eigvalsh(total) if total.shape[1] <= _SPECTRUM_UP_TO else None
    if values is not None:
        largest = float(values.abs().max())
    else:
        largest = max(largest_singular(in_float64(one)) for one in total)
    norm = float(torch.linalg.norm(total))
    amplification = norm / behind if behind else None
    return FlowEntry(
        **_named(place),
        **_kept(matrices if keep else {}),
        measures={part: _exact_measure(matrix) for part, matrix in matrices.items()},
        spectral_norm=largest,
        spectral_interval=(largest, largest),
        eigenvalues=None if values is None else values.cpu(),
        token_trace=own.diagonal(dim1=1, dim2=2).sum(-1).cpu(),
        token_norm=own.pow(2).sum((1, 2)).sqrt().cpu(),
        gradient_scale=float(torch.linalg.norm(slope)),
        amplification=amplification,
        amplification_interval=None if amplification is None else (amplification, amplification),
        exact=True,
    )


def _kept(matrices: dict[str, Tensor]) -> dict[str, Any]:
    return {part: matrices[part].detach().cpu() if part in matrices else None for part in _PARTS}


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
    problem: Problem,
    batch: Batch,
    capture: Capture,
    view: Samples,
    *,
    probes: int,
    seed: int,
    wanted: Wanted,
    products: FreeProducts | None = None,
) -> Iterator[FlowEntry]:
    """The same entries, estimated from ``probes`` products each with what lies behind them."""
    products = products or FreeProducts(problem, batch, capture)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    behind: dict[Node, Probed] = {}
    known: dict[Node, Probes] = {}  # activations that a sublayer's entry has measured already

    def at(node: Node) -> Probes:
        """The Hessian at an activation: what its readers create there, and the rest."""
        basis = orthonormal(node.tensor.shape, probes, generator, node.tensor)
        whole, created = products.total(node)(basis), products.created(node)(basis)
        return basis, (whole.detach(), (whole - created).detach(), created.detach())

    def through(passed: Product, made: Product, node: Node) -> Probes:
        basis = orthonormal(node.tensor.shape, probes, generator, node.tensor)
        moved, created = passed(basis).detach(), made(basis).detach()
        return basis, (moved + created, moved, created)

    def entry(place: Place, found: Probes) -> FlowEntry:
        basis, images = found
        probed = [probe(image, basis, view.count) for image in images]
        behind.setdefault(place.node, probed[0])  # the activation comes before its sublayers
        parts = dict(zip(_PARTS, probed, strict=True))
        slope = products.slopes.get(place.node)
        before = behind[place.node] if place.node in products.slopes else None
        return _estimated(place, parts, slope, before)

    for node in track(capture.last, "propagation: head"):
        head = Node("head", "head", None, node.tensor)
        if not wanted(head):
            continue
        name = "head" if len(capture.last) == 1 else f"head ← {node.name}"
        yield entry(Place(head, "sublayer", node, name), through(*products.head(node), node))
    nodes = [node for node in reversed(capture.nodes) if wanted(node)]
    for node in track(nodes, "propagation"):
        own = known.pop(node) if node in known else at(node)
        yield entry(Place(node, "activation", node, node.name), own)
        for parent, name in _inputs_of(node):
            if is_sum(node):  # passes the very same matrix on and creates nothing
                basis, (whole, _, created) = own
                seen = basis, (whole, whole, torch.zeros_like(created))
                # What only the sum reads has the sum's Hessian: the branch needs no products.
                for branch in node.parents:
                    if products.readers[branch] == [node] and branch not in capture.last:
                        known[branch] = seen
            elif products.readers[parent] == [node] and parent not in capture.last:
                # The only reader of its input: all that the loss sees of the one, it sees of both.
                seen = known[parent] = at(parent)
            else:
                passed, made = products.passed_by(node, parent), products.created_by(node, parent)
                seen = through(passed, made, parent)
            yield entry(Place(node, "sublayer", parent, name), seen)


def sweep_entries(
    problem: Problem, batch: Batch, capture: Capture, view: Samples, *, probes: int, seed: int
) -> Iterator[FlowEntry]:
    """All entries from one sweep of ``SWEPT`` times as many probes, linear in the layers.

    Where the model has no cut behind an activation (an encoder that every layer of a decoder
    reads), and for the head, each entry takes products of its own as in ``free_entries``.
    """
    products = FreeProducts(problem, batch, capture)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sweep = Sweep(products, view.count, probes=SWEPT * probes, generator=generator)
    reached = capture.nodes.index(sweep.cuts[-1]) if sweep.cuts else -1
    beyond = set(capture.nodes[reached + 1 :])
    yield from free_entries(
        problem, batch, capture, view, probes=probes, seed=seed + 1, products=products,
        wanted=lambda node: node.kind == "head" or node in beyond,
    )  # fmt: skip
    for node, site in track(sweep.activations(), "propagation", total=reached + 1):
        slope = products.slopes[node]
        own = site.found
        place = Place(node, "activation", node, node.name)
        yield _estimated(place, own, slope, None)
        for parent, name in _inputs_of(node):
            found = sweep.through(node, parent, site).found
            place = Place(node, "sublayer", parent, name)
            yield _estimated(place, found, slope, own["total"])


def _inputs_of(node: Node) -> list[tuple[Node, str]]:
    """The inputs that have an entry of the node's sublayer, and its name."""
    # A sum passes the same matrix on to each of its inputs.
    parents = node.parents[:1] if node.kind == "residual" else node.parents
    if len(parents) == 1:
        return [(parents[0], node.name)]
    return [(parent, f"{node.name} ← {parent.name}") for parent in parents]


def _estimated(
    place: Place, found: dict[str, Probed], slope: Tensor | None, behind: Probed | None
) -> FlowEntry:
    whole = found["total"]
    amplification, interval = None, None
    if place.kind == "sublayer" and behind is not None and behind.norm_interval[0] > 0:
        amplification = whole.norm / behind.norm
        interval = (
            whole.norm_interval[0] / behind.norm_interval[1],
            whole.norm_interval[1] / behind.norm_interval[0],
        )
    return FlowEntry(
        **_named(place),
        total=None,
        passed_on=None,
        created_here=None,
        measures={
            part: Measure(
                norm=p.norm, norm_interval=p.norm_interval,
                trace=p.trace, trace_interval=p.trace_interval,
            )
            for part, p in found.items()
        },
        spectral_norm=math.sqrt(whole.spectral[0] * whole.spectral[1]),
        spectral_interval=whole.spectral,
        eigenvalues=None,
        token_trace=whole.token_trace,
        token_trace_error=whole.token_error,
        token_norm=None,
        gradient_scale=float("nan") if slope is None else float(torch.linalg.norm(slope.detach())),
        amplification=amplification,
        amplification_interval=interval,
        exact=False,
    )  # fmt: skip
