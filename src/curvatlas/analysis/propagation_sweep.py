r"""The matrix-free account of every sublayer in one sweep from the loss to the embedding.

At a *cut* e, an activation that everything before it acts through, and any activation s before it:

    S_s = J_{e←s}ᵀ S_e J_{e←s} + T_{s,e},     T_{s,e} = Σ δ_e ∂²e/∂s²,

so pairs of vectors known at e (propagation_pairs) are pulled back to s, and only T_{s,e}, created
between the two, takes products: as long as the stretch from s to e, whatever lies behind. From cut
to cut this is a fixed number of passes through the model for each probe. What was created on the
way adds noise to the pairs, so some cuts have products of their own:

    anchors: through all that lies behind; ``_ANCHORS`` at even distances, the first cut, and up to
             ``_MORE`` where the pairs have become worse than they were,
    joints:  to the anchor behind; ``_JOINTS`` between two anchors.

Their number does not depend on the depth: the account is linear in layers, parameters and tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from curvatlas.analysis.propagation_capture import Capture, Node
from curvatlas.analysis.propagation_free import NOTHING, FreeProducts, Probed, Product
from curvatlas.analysis.propagation_local import cut, is_sum, pull
from curvatlas.analysis.propagation_pairs import Group, Pairs, Sketch, pairs_of

_ANCHORS = 5
_JOINTS = 4
_MORE = 4
_WORSE = 1.5  # times the error at the last anchor, and the floor of K pairs, 2/K
_TOO_NOISY = 0.3  # relative error of a norm beside the cuts
_ENTRIES = 2**25  # numbers in the widest tensor of one batched pass


def cuts_of(capture: Capture) -> list[Node]:
    """Activations that all earlier ones act through, in order of computation."""
    place = {node: i for i, node in enumerate(capture.nodes)}
    last_reader = [i for i, _ in enumerate(capture.nodes)]
    for i, node in enumerate(capture.nodes):
        for parent in node.parents:
            last_reader[place[parent]] = max(last_reader[place[parent]], i)
    for node in capture.last:
        last_reader[place[node]] = len(capture.nodes)
    found, farthest = [], 0
    for i, node in enumerate(capture.nodes):
        if farthest <= i:
            found.append(node)
        farthest = max(farthest, last_reader[i])
    return found


class Site:
    """One activation or sublayer's input: the total there and its two parts, as pairs.

    created: None where nothing is created, so that the total is passed on as it is.
    anchor: of the product that the far pairs came from.
    """

    def __init__(
        self,
        total: Sketch,
        passed: Sketch,
        created: Group | None,
        anchor: Pairs | None,
        samples: int,
    ) -> None:
        self.total = total
        self._passed = passed
        self._created = created
        self._anchor = anchor
        self._samples = samples

    @functools.cached_property
    def pairs(self) -> Pairs:
        return pairs_of(self.total, self._samples, spectral=True)

    @functools.cached_property
    def probed(self) -> Probed:
        return self.pairs.probed(self._anchor)

    @functools.cached_property
    def found(self) -> dict[str, Probed]:
        """Values and intervals of the three parts."""
        if self._created is None:
            return {"total": self.probed, "passed_on": self.probed, "created_here": NOTHING}
        created = pairs_of(Sketch(fresh=self._created), self._samples).probed()
        passed = pairs_of(self._passed, self._samples).probed(self._anchor)
        return {"total": self.probed, "passed_on": passed, "created_here": created}

    def unchanged(self) -> Site:
        """The same matrix at an input of a sum: passed on, nothing created."""
        site = Site(self.total, self.total, None, self._anchor, self._samples)
        site.__dict__["probed"] = self.probed
        return site

    @property
    def error(self) -> float:
        """Standard error of the norm, relative to it."""
        low, high = self.probed.norm_interval
        return (high - low) / 4 / self.probed.norm if self.probed.norm > 0 else math.inf


class Sweep:
    """Walks the activations backwards; ``sites`` must be read in the order they come."""

    def __init__(
        self, products: FreeProducts, samples: int, *, probes: int, generator: torch.Generator
    ) -> None:
        self.products = products
        self.capture = products.capture
        self.samples = samples
        self.probes = probes
        self.generator = generator
        self.cuts = cuts_of(self.capture)
        self.anchors: list[Node] = []  # where a product ran to the end
        self._pairs: Pairs | None = None  # at the last cut among them
        self._anchor = self._joint = 0  # numbers of the last cuts with products of their own
        self._again: dict[tuple[Node, Node], Site] = {}
        self._error = 0.0  # relative, of the norm at the last anchor
        widest = max(node.tensor.numel() for node in self.capture.nodes)
        widest = max([4 * widest, *(z.numel() for z in products.outputs)])
        self._together = max(1, min(2 * probes, _ENTRIES // widest))

    def activations(self) -> Iterator[tuple[Node, Site]]:
        """Every activation up to the last cut, backwards, with what is known there."""
        nodes = list(self.capture.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        known: Site | None = None  # at the cut just reached
        for j in reversed(range(len(self.cuts))):
            end = self.cuts[j]
            known = self._arrive(end, j, known)
            yield end, known
            start = place[self.cuts[j - 1]] if j else -1
            stretch = nodes[max(start, 0) : place[end]]
            before: dict[Node, Site] = {end: known}
            pulled = self._pulled(end, known, [n for n in stretch if not self._single(n)])
            for node in reversed(stretch):
                site = pulled.get(node)
                if site is None:
                    reader = self.products.readers[node][0]
                    site = self.through(reader, node, before[reader])
                before[node] = site
                if j and node is self.cuts[j - 1]:
                    known = site
                else:
                    yield node, site

    def through(self, reader: Node, node: Node, behind: Site) -> Site:
        """At ``node``, as far as ``reader`` alone sees it: Jᵀ S J and δ ∂²f of its sublayer.

        Of an activation that nothing else reads this is all, and asked for twice.
        """
        site = self._again.pop((reader, node), None)
        if site is None:
            site = self._through(reader, node, behind)
            if self._single(node):
                self._again[reader, node] = site
        return site

    def _through(self, reader: Node, node: Node, behind: Site) -> Site:
        if is_sum(reader):  # passes the very same matrix on and creates nothing
            return behind.unchanged()
        product = self.products.created_by(reader, node)
        with cut(reader.parents):
            (passed,) = self._pull(reader, behind.total.departing(), [node])
        signs = self._signs(node)
        created = signs, self._apply(product, signs)
        found = Site(passed.with_fresh(created), passed, created, self._pairs, self.samples)
        single = self._single(node)
        # One is kept for a sublayer alone: the first norm, of small inputs, creates most of all.
        if found.error <= _TOO_NOISY or not self._spare(node, kept=0 if single else 1):
            return found
        if single:
            return self._afresh(node)
        self.anchors.append(node)
        image = self._apply(self.products.passed_by(reader, node), signs)
        total, passed = Sketch(fresh=(signs, image + created[1])), Sketch(fresh=(signs, image))
        return Site(total, passed, created, None, self.samples)

    # --- how the pairs travel ---------------------------------------------------------------------

    def _arrive(self, end: Node, number: int, known: Site | None) -> Site:
        """At a cut: keep the pairs that came along, or start afresh with products to the end."""
        if known is None or self._due(number, known):
            site = self._afresh(end)
            self._pairs, self._error = site.pairs, site.error
            self._anchor = self._joint = number
            return site
        if self._joint - number < math.ceil(len(self.cuts) / _ANCHORS / _JOINTS):
            return known
        self._joint = number
        behind = self.cuts[self._anchor]
        product = self._created_before(behind, end)
        return self._site(end, Sketch(far=known.total.far), product)

    def _due(self, number: int, known: Site) -> bool:
        if number == 0 or self._anchor - number >= math.ceil(len(self.cuts) / _ANCHORS):
            return True
        worse = known.error > _WORSE * max(self._error, 2 / self.probes)
        return worse and self._spare(self.cuts[number])

    def _spare(self, node: Node, *, kept: int = 0) -> bool:
        """Whether one more product to the end is left; they are spread over the depth."""
        depth = 1 - self.capture.nodes.index(node) / len(self.capture.nodes)
        return len(self.anchors) < 1 + kept + (_ANCHORS + _MORE) * depth

    def _afresh(self, node: Node) -> Site:
        self.anchors.append(node)
        return self._site(node, Sketch(), self.products.total(node))

    def _site(self, node: Node, travelled: Sketch, product: Product) -> Site:
        """What has come along and a product probed here, split by the sublayers that read it."""
        signs = self._signs(node)
        image = self._apply(product, signs)
        created = self._apply(self.products.created(node), signs)
        return Site(
            travelled.with_fresh((signs, image)),
            travelled.with_fresh((signs, image - created)),
            (signs, created),
            None if travelled.far is None else self._pairs,
            self.samples,
        )

    def _created_before(self, end: Node, node: Node) -> Product:
        """v ↦ T v of what is created between an activation and a cut behind it."""
        slope = self.products.slopes[end].detach()
        (start,) = torch.autograd.grad(end.tensor, [node.tensor], slope, create_graph=True)
        return _second(start, node.tensor)

    def _single(self, node: Node) -> bool:
        """Whether one sublayer alone reads the activation."""
        return len(self.products.readers[node]) == 1 and node not in self.capture.last

    def _pulled(self, end: Node, known: Site, nodes: Sequence[Node]) -> dict[Node, Site]:
        """Activations that several sublayers read: from the cut, along all paths at once."""
        if not nodes:
            return {}
        sketches = self._pull(end, known.total.departing(), nodes)
        return {
            node: self._site(node, travelled, self._created_before(end, node))
            for node, travelled in zip(nodes, sketches, strict=True)
        }

    def _pull(self, end: Node, sketch: Sketch, nodes: Sequence[Node]) -> list[Sketch]:
        """Jᵀ of both vectors of every pair, to each of ``nodes``."""
        columns = torch.cat([vectors for group in sketch.groups for vectors in group])
        tensors = [node.tensor for node in nodes]
        parts = [pull(end.tensor, tensors, part) for part in self._few(columns)]
        found = []
        for k, node in enumerate(nodes):
            moved = torch.cat([part[k].detach() for part in parts])
            moved = moved.reshape(-1, 2, self.probes, *node.tensor.shape)
            groups: list[Group | None] = [(pair[0], pair[1]) for pair in moved]
            far, near = (*groups, None)[:2]
            found.append(Sketch(far=far, near=near))
        return found

    def _apply(self, product: Product, vectors: Tensor) -> Tensor:
        return torch.cat([product(part).detach() for part in self._few(vectors)])

    def _few(self, vectors: Tensor) -> list[Tensor]:
        """As many at a time as fit one batched pass."""
        return [vectors[k : k + self._together] for k in range(0, len(vectors), self._together)]

    def _signs(self, node: Node) -> Tensor:
        shape = (self.probes, *node.tensor.shape)
        drawn = torch.randint(0, 2, shape, generator=self.generator, dtype=torch.int8, device="cpu")
        return (2 * drawn - 1).to(device=node.tensor.device, dtype=node.tensor.dtype)


def _second(slope: Tensor, where: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: pull(slope, [where], v)[0]
