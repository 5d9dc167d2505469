r"""The matrix-free account of every sublayer in one sweep from the loss to the embedding.

At a *cut* e, an activation that everything before it acts through, and any activation s before it:

    S_s = J_{e←s}ᵀ S_e J_{e←s} + T_{s,e},     T_{s,e} = Σ δ_e ∂²e/∂s²,

so pairs of vectors known at e are pulled back to s, and only T_{s,e}, created
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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvatlas.analysis.atlas.sketch import Energy, energy_of
from curvatlas.analysis.propagation.capture import Capture, Node
from curvatlas.analysis.propagation.dense import cut, is_sum, pulled
from curvatlas.analysis.propagation.result import Measure
from curvatlas.fits import Array
from curvatlas.precision import in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.problem.cross_entropy import differentiable_leaves, output_curvature

Group = tuple[Tensor, Tensor]  # u and y, (K, *shape of the activation) each
Product = Callable[[Tensor], Tensor]  # of K vectors in the activation's shape: (K, *shape)
TAIL = 2.2  # a quadratic form in few probes has heavier tails than a normal number


@dataclass(frozen=True)
class ProbeGroups:
    r"""The Hessian at one activation as a sum of up to three matrices, each known from pairs.

    A probe ω somewhere behind an activation and its product with the Hessian there, both pulled
    back by the same Jacobian: u = Jᵀω and y = JᵀSω, so that E[u yᵀ] = JᵀSJ. With K independent
    pairs and D_kl = u_k · y_l

        tr = mean_k D_kk,   ‖·‖_F² = mean_{k≠l} D_kl D_lk,

    both unbiased. Probes of different groups are independent. Of a *fresh* group, probed at the
    activation itself, y_k = T ω_k, and E‖y_k‖² is ‖T‖_F² with far less noise than the pairs have.

    far: of everything behind the last fresh product. near: of what was created between it and
    here, joined into one group (every contribution has probes of its own, so that cross terms
    vanish on average). fresh: probed here.
    """

    far: Group | None = None
    near: Group | None = None
    fresh: Group | None = None

    @property
    def groups(self) -> list[Group]:
        return [group for group in (self.far, self.near, self.fresh) if group is not None]

    def departing(self) -> ProbeGroups:
        """The two groups that are pulled further back."""
        if self.far is None:
            return ProbeGroups(far=self.fresh)
        return ProbeGroups(far=self.far, near=_joined(self.near, self.fresh))

    def with_fresh(self, fresh: Group) -> ProbeGroups:
        return ProbeGroups(far=self.far, near=self.near, fresh=fresh)


def _joined(one: Group | None, two: Group | None) -> Group | None:
    if one is None or two is None:
        return one or two
    return one[0] + two[0], one[1] + two[1]


@dataclass(frozen=True)
class Deleted:
    """A statistic of K probes, and its values with each of the probes left out."""

    value: float
    without: Array  # (K,)

    def minus(self, other: Deleted, factor: float) -> Deleted:
        return Deleted(self.value - factor * other.value, self.without - factor * other.without)

    @property
    def variance(self) -> float:
        """The jackknife's."""
        count = len(self.without)
        return (count - 1) / count * float(((self.without - self.without.mean()) ** 2).sum())


@dataclass(frozen=True)
class Pairs:
    """What the pairs at one activation say."""

    square: Deleted  # ‖S‖_F²
    dots: Array  # (samples, K, K) of the first group, u_k · y_l
    lengths: Array  # (K,) of its y, squared
    least_variance: float  # of the square, from the pairs of a fresh group
    trace: float
    trace_variance: float
    least_spectral: float  # lower bound of ‖S‖₂; 0 where it was not asked for
    rows: int  # of the matrix over all samples
    token_trace: Tensor
    token_error: Tensor

    def _without_noise(self, anchor: Pairs) -> Deleted:
        r"""‖S‖_F² less what two statistics of mean zero say about its noise.

        With D⁰ of the probes where they started and D of the same probes here,

            mean D⁰_kl² − mean ‖y⁰_k‖²   and   mean D_kl D⁰_kl − mean ‖y_k‖²,   k ≠ l,

        are estimates of ‖S⁰‖² and ‖JᵀS⁰‖² less better ones. Minus the first plus twice the second
        leaves (D_kl − D⁰_kl)(D_lk − D⁰_kl): second order in the distance of J from a rotation.
        """
        start = (anchor.dots + np.swapaxes(anchor.dots, 1, 2)) / 2
        here = (self.dots + np.swapaxes(self.dots, 1, 2)) / 2
        controls = [
            _over_pairs((start * start).sum(0) - _means(anchor.lengths)),
            _over_pairs((start * here).sum(0) - _means(self.lengths)),
        ]
        noise = np.stack([c.without - c.without.mean() for c in controls], axis=1)
        scale = np.linalg.norm(noise, axis=0)
        if not (scale > 0).all():
            return self.square
        wanted = self.square.without - self.square.without.mean()
        factors = np.linalg.lstsq(noise / scale, wanted, rcond=1e-8)[0] / scale
        square = self.square
        for control, factor in zip(controls, factors, strict=True):
            square = square.minus(control, float(factor))
        # The factors were fitted: as many degrees of freedom are lost.
        left = 1 / np.sqrt(1 - len(controls) / (len(wanted) - 1))
        return Deleted(square.value, square.value + (square.without - square.value) * left)

    def probed(self, anchor: Pairs | None = None) -> Probed:
        """Values and 95 % intervals; anchor: where the far pairs came from."""
        square = self.square if anchor is None else self._without_noise(anchor)
        value = max(square.value, 0.0)
        # Few lengths spread too little when one direction holds the norm; their pairs know it.
        variance = max(square.variance, self.least_variance)
        numbers = (value, variance, 0.0, len(square.without) - 1.0, 0.0)
        energy = Energy(*(np.array(number) for number in numbers))
        low, high = (float(end) for end in energy.interval())
        if value == 0:  # nothing but noise
            high = 3 * float(np.sqrt(variance))
        least = max(self.least_spectral, float(np.sqrt(low / self.rows)))
        reach = TAIL * float(np.sqrt(self.trace_variance))
        return Probed(
            norm=float(np.sqrt(value)),
            norm_interval=(float(np.sqrt(low)), float(np.sqrt(high))),
            trace=self.trace,
            trace_interval=(self.trace - reach, self.trace + reach),
            spectral=(min(least, float(np.sqrt(high))), float(np.sqrt(high))),
            token_trace=self.token_trace,
            token_error=self.token_error,
        )


def pairs_of(sketch: ProbeGroups, samples: int, *, spectral: bool = False) -> Pairs:
    """Samples are independent: their matrices are diagonal blocks and never mixed."""
    groups = sketch.groups
    count = len(groups[0][0])
    u = torch.stack([g[0] for g in groups], dim=1)  # (K, groups, *shape)
    y = torch.stack([g[1] for g in groups], dim=1)
    tokens = (u * y).sum(1)
    tokens = tokens.reshape(count, samples, -1, tokens.shape[-1]).sum(-1).cpu().double()
    u, y = (t.reshape(count * len(groups), samples, -1).transpose(0, 1) for t in (u, y))
    dots = (u @ y.mT).cpu().double().numpy()
    dots = dots.reshape(samples, count, len(groups), count, len(groups))
    same_group = np.einsum("skglg->sgkl", dots)  # (samples, groups, K, K)
    apart = ~np.eye(count, dtype=bool)
    spread = (same_group**2 + same_group * np.swapaxes(same_group, 2, 3)).sum((0, 1))[apart].mean()

    weights = np.einsum("skglh,slhkg->kl", dots, dots)
    least_variance = 0.0
    if sketch.fresh is not None:
        images = y.reshape(samples, count, len(groups), -1)[:, :, -1]
        grams = (images @ images.mT).cpu().double().numpy()
        least_variance = 2 / count * float((grams**2).sum(0)[apart].mean())
        local = (same_group[:, -1] * np.swapaxes(same_group[:, -1], 1, 2)).sum(0)
        weights = weights - local + _means(_squares(sketch.fresh[1]))
    return Pairs(
        square=_over_pairs(weights),
        dots=same_group[:, 0],
        lengths=_squares(groups[0][1]),
        least_variance=least_variance,
        trace=float(tokens.sum((1, 2)).mean()),
        trace_variance=float(spread) / count,
        least_spectral=_least_spectral(
            u, y, count, fresh=len(groups) == 1 and sketch.fresh is not None
        )
        if spectral
        else 0.0,
        rows=samples * u.shape[-1],
        token_trace=tokens.mean(0),
        token_error=tokens.std(0) / count**0.5,
    )


def _squares(vectors: Tensor) -> Array:
    squares: Array = vectors.reshape(len(vectors), -1).pow(2).sum(1).cpu().double().numpy()
    return squares


def _means(values: Array) -> Array:
    return (values[:, None] + values[None]) / 2


def _over_pairs(weights: Array) -> Deleted:
    """The mean over pairs k ≠ l of a symmetric table."""
    count = len(weights)
    rows = weights.sum(1) - np.diagonal(weights)
    total = rows.sum()
    without = (total - 2 * rows) / ((count - 1) * (count - 2))
    return Deleted(float(total / (count * (count - 1))), without)


def _least_spectral(u: Tensor, y: Tensor, count: int, *, fresh: bool) -> float:
    """A lower bound of ‖S‖₂: |vᵀSv| for v from one half of the probes, estimated by the other.

    u, y: (samples, K · groups, n), the groups of a probe side by side. v is where S takes the first
    half, so that it is independent of the pairs that measure it; three standard errors come off,
    as the larger of two bounds is taken.
    """
    groups = u.shape[1] // count
    best = 0.0
    if fresh:  # ‖S Ω‖₂ ≤ ‖S‖₂ ‖Ω‖₂
        images, probes = (torch.linalg.eigvalsh(t @ t.mT)[:, -1] for t in (y, u))
        best = float((images / probes).max().clamp_min(0).sqrt())
    half = count // 2 * groups
    for learn, test in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
        images = y[:, learn]
        values, vectors = torch.linalg.eigh(images @ images.mT)
        sample = int(values[:, -1].argmax())
        v = vectors[sample, :, -1] @ images[sample]
        v = v / torch.linalg.norm(v).clamp_min(torch.finfo(v.dtype).tiny)
        forms = (u[sample, test] @ v) * (y[sample, test] @ v)
        forms = forms.reshape(-1, groups).sum(1)
        error = float(forms.std()) / len(forms) ** 0.5
        best = max(best, abs(float(forms.mean())) - 3 * error)
    return best


class FreeProducts:
    """Products with the Hessian at any activation and with the two parts of any sublayer.

    A product at an activation costs one double backward through what lies behind it: linear in
    the tokens, and in the parameters and layers behind it; no memory beyond the kept graph. All
    probes of an entry go through one batched pass.
    """

    def __init__(self, problem: Problem, batch: Batch, capture: Capture) -> None:
        self.capture = capture
        self.count = 0  # vectors multiplied by second derivatives so far
        tensors = [node.tensor for node in capture.nodes]
        value = problem.loss.value(capture.outputs, batch.targets)
        slopes = torch.autograd.grad(value, tensors, create_graph=True)
        self.slopes = dict(zip(capture.nodes, slopes, strict=True))
        self.outputs, rebuild = differentiable_leaves(capture.outputs)
        fixed = [z.detach().requires_grad_(True) for z in self.outputs]
        loss = problem.loss.value(rebuild(fixed), batch.targets)
        self._deltas = torch.autograd.grad(loss, fixed, materialize_grads=True)
        self._lambda = output_curvature(problem.loss, self.outputs, rebuild, batch.targets)
        self.readers: dict[Node, list[Node]] = {node: [] for node in capture.nodes}
        for node in capture.nodes:
            for parent in node.parents:
                self.readers[parent].append(node)

    def total(self, node: Node) -> Product:
        """v ↦ S v at the activation."""
        return self.differentiated(self.slopes[node], node)

    def differentiated(self, slope: Tensor, node: Node) -> Product:
        """v ↦ ∂(slope · v)/∂node, counted."""

        def product(v: Tensor) -> Tensor:
            self.count += len(v)
            return pulled([slope], [node.tensor], [v])[0]

        return product

    def created(self, node: Node) -> Product:
        """v ↦ Σ δ ∂²f v over every sublayer f that reads the activation."""
        parts = [self.created_by(reader, node) for reader in self.readers[node]]
        if node in self.capture.last:
            parts.append(self.head(node)[1])
        if not parts:
            return torch.zeros_like

        def product(v: Tensor) -> Tensor:
            total = parts[0](v)
            for part in parts[1:]:
                total = total + part(v)
            return total

        return product

    def created_by(self, reader: Node, node: Node) -> Product:
        """v ↦ Σ δ ∂²f/∂node² v for the one sublayer that makes ``reader``."""
        if is_sum(reader):
            return torch.zeros_like
        with cut(reader.parents):
            (slope,) = torch.autograd.grad(
                reader.tensor, [node.tensor], self.slopes[reader].detach(), create_graph=True
            )

        differentiated = self.differentiated(slope, node)

        def product(v: Tensor) -> Tensor:
            with cut(reader.parents):
                return differentiated(v)

        return product

    def passed_by(self, reader: Node, node: Node) -> Product:
        """v ↦ Jᵀ S J v for the one sublayer that makes ``reader``; S is at ``reader``."""
        behind = self.total(reader)
        if is_sum(reader):
            return behind
        u = torch.zeros_like(reader.tensor).requires_grad_(True)
        with cut(reader.parents):
            (transposed,) = torch.autograd.grad(reader.tensor, [node.tensor], u, create_graph=True)

        def product(v: Tensor) -> Tensor:
            with cut(reader.parents):
                moved = pulled([transposed], [u], [v])[0]
            arrived = behind(moved)
            with cut(reader.parents):
                return pulled([reader.tensor], [node.tensor], [arrived])[0]

        return product

    def head(self, node: Node) -> tuple[Product, Product]:
        """(v ↦ Jᵀ Λ J v, v ↦ δ ∂²Z v) of everything behind the last activation."""
        parents = self.capture.last
        u = [d.detach().clone().requires_grad_(True) for d in self._deltas]
        with cut(parents):
            (slope,) = torch.autograd.grad(self.outputs, [node.tensor], u, create_graph=True)

        def passed(v: Tensor) -> Tensor:
            self.count += len(v)
            with cut(parents):
                moved = pulled([slope], u, [v])
                return pulled(self.outputs, [node.tensor], self._lambda(moved))[0]

        differentiated = self.differentiated(slope, node)

        def created(v: Tensor) -> Tensor:
            with cut(parents):
                return differentiated(v)

        return passed, created


@dataclass(frozen=True)
class Probed:
    """What probes say about one symmetric matrix of size n."""

    norm: float
    norm_interval: tuple[float, float]
    trace: float
    trace_interval: tuple[float, float]
    spectral: tuple[float, float]
    token_trace: Tensor  # (samples, tokens)
    token_error: Tensor  # its standard error

    @property
    def measure(self) -> Measure:
        return Measure(
            norm=self.norm,
            norm_interval=self.norm_interval,
            trace=self.trace,
            trace_interval=self.trace_interval,
        )


NOTHING = Probed(
    norm=0.0,
    norm_interval=(0.0, 0.0),
    trace=0.0,
    trace_interval=(0.0, 0.0),
    spectral=(0.0, 0.0),
    token_trace=torch.zeros(0),
    token_error=torch.zeros(0),
)


def probe(images: Tensor, basis: Tensor, samples: int) -> Probed:
    """From S Q for an orthonormal Q: both (K, samples, tokens, width)."""
    count = len(basis)
    flat, q = (in_float64(t.reshape(count, -1)) for t in (images, basis))
    size = flat.shape[1]
    energy = energy_of((flat @ flat.T).cpu().numpy(), size)
    low, high = (float(np.sqrt(max(float(end), 0.0))) for end in energy.interval())
    norm = float(np.sqrt(max(float(energy.value), 0.0)))
    trace = size / count * float((flat * q).sum())
    reach = TAIL * float(np.sqrt(2 / count * max(0.0, 1 - count / size))) * norm
    ends = tuple(float(np.sqrt(max(float(end), 0.0))) for end in energy.spectral_interval())
    tokens = size * in_float64(images * basis)  # (K, samples, tokens, width)
    tokens = tokens.reshape(count, samples, -1, tokens.shape[-1]).sum(-1).cpu()
    left = max(0.0, 1 - count / size) / count
    return Probed(
        norm=norm,
        norm_interval=(low, high),
        trace=trace,
        trace_interval=(trace - reach, trace + reach),
        spectral=(ends[0], ends[1]),
        token_trace=tokens.mean(0),
        token_error=tokens.std(0) * left**0.5,
    )


def orthonormal(shape: torch.Size, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """(count, *shape) random and orthonormal."""
    size = int(np.prod(shape))
    draw = torch.randn(
        size, min(count, size), generator=generator, dtype=torch.float64, device="cpu"
    )
    basis: Tensor = torch.linalg.qr(draw).Q.T
    return basis.reshape(-1, *shape).to(device=like.device, dtype=like.dtype)


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
    cuts, farthest = [], 0
    for i, node in enumerate(capture.nodes):
        if farthest <= i:
            cuts.append(node)
        farthest = max(farthest, last_reader[i])
    return cuts


class Site:
    """One activation or sublayer's input: the total there and its two parts, as pairs.

    created: None where nothing is created, so that the total is passed on as it is.
    anchor: of the product that the far pairs came from.
    """

    def __init__(
        self,
        total: ProbeGroups,
        passed: ProbeGroups,
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
    def parts(self) -> dict[str, Probed]:
        """Values and intervals of the three parts."""
        if self._created is None:
            return {"total": self.probed, "passed_on": self.probed, "created_here": NOTHING}
        created = pairs_of(ProbeGroups(fresh=self._created), self._samples).probed()
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
        arrived: Site | None = None  # at the cut just reached
        for j in reversed(range(len(self.cuts))):
            end = self.cuts[j]
            arrived = self._arrive(end, j, arrived)
            yield end, arrived
            start = place[self.cuts[j - 1]] if j else -1
            stretch = nodes[max(start, 0) : place[end]]
            before: dict[Node, Site] = {end: arrived}
            pulled = self._pulled(end, arrived, [n for n in stretch if not self._single(n)])
            for node in reversed(stretch):
                site = pulled.get(node)
                if site is None:
                    reader = self.products.readers[node][0]
                    site = self.through(reader, node, before[reader])
                before[node] = site
                if j and node is self.cuts[j - 1]:
                    arrived = site
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
        site = Site(passed.with_fresh(created), passed, created, self._pairs, self.samples)
        single = self._single(node)
        # One is kept for a sublayer alone: the first norm, of small inputs, creates most of all.
        if site.error <= _TOO_NOISY or not self._spare(node, kept=0 if single else 1):
            return site
        if single:
            return self._afresh(node)
        self.anchors.append(node)
        image = self._apply(self.products.passed_by(reader, node), signs)
        total = ProbeGroups(fresh=(signs, image + created[1]))
        return Site(total, ProbeGroups(fresh=(signs, image)), created, None, self.samples)

    # --- how the pairs travel ---------------------------------------------------------------------

    def _arrive(self, end: Node, number: int, arrived: Site | None) -> Site:
        """At a cut: keep the pairs that came along, or start afresh with products to the end."""
        if arrived is None or self._due(number, arrived):
            site = self._afresh(end)
            self._pairs, self._error = site.pairs, site.error
            self._anchor = self._joint = number
            return site
        if self._joint - number < math.ceil(len(self.cuts) / _ANCHORS / _JOINTS):
            return arrived
        self._joint = number
        behind = self.cuts[self._anchor]
        product = self._created_before(behind, end)
        return self._site(end, ProbeGroups(far=arrived.total.far), product)

    def _due(self, number: int, arrived: Site) -> bool:
        if number == 0 or self._anchor - number >= math.ceil(len(self.cuts) / _ANCHORS):
            return True
        worse = arrived.error > _WORSE * max(self._error, 2 / self.probes)
        return worse and self._spare(self.cuts[number])

    def _spare(self, node: Node, *, kept: int = 0) -> bool:
        """Whether one more product to the end is left; they are spread over the depth."""
        depth = 1 - self.capture.nodes.index(node) / len(self.capture.nodes)
        return len(self.anchors) < 1 + kept + (_ANCHORS + _MORE) * depth

    def _afresh(self, node: Node) -> Site:
        self.anchors.append(node)
        return self._site(node, ProbeGroups(), self.products.total(node))

    def _site(self, node: Node, travelled: ProbeGroups, product: Product) -> Site:
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
        return self.products.differentiated(start, node)

    def _single(self, node: Node) -> bool:
        """Whether one sublayer alone reads the activation."""
        return len(self.products.readers[node]) == 1 and node not in self.capture.last

    def _pulled(self, end: Node, behind: Site, nodes: Sequence[Node]) -> dict[Node, Site]:
        """Activations that several sublayers read: from the cut, along all paths at once."""
        if not nodes:
            return {}
        sketches = self._pull(end, behind.total.departing(), nodes)
        return {
            node: self._site(node, travelled, self._created_before(end, node))
            for node, travelled in zip(nodes, sketches, strict=True)
        }

    def _pull(self, end: Node, sketch: ProbeGroups, nodes: Sequence[Node]) -> list[ProbeGroups]:
        """Jᵀ of both vectors of every pair, to each of ``nodes``."""
        columns = torch.cat([vectors for group in sketch.groups for vectors in group])
        tensors = [node.tensor for node in nodes]
        parts = [pulled([end.tensor], tensors, [part]) for part in self._few(columns)]
        pulled_back = []
        for k, node in enumerate(nodes):
            moved = torch.cat([part[k].detach() for part in parts])
            moved = moved.reshape(-1, 2, self.probes, *node.tensor.shape)
            groups: list[Group | None] = [(pair[0], pair[1]) for pair in moved]
            far, near = (*groups, None)[:2]
            pulled_back.append(ProbeGroups(far=far, near=near))
        return pulled_back

    def _apply(self, product: Product, vectors: Tensor) -> Tensor:
        return torch.cat([product(part).detach() for part in self._few(vectors)])

    def _few(self, vectors: Tensor) -> list[Tensor]:
        """As many at a time as fit one batched pass."""
        return [vectors[k : k + self._together] for k in range(0, len(vectors), self._together)]

    def _signs(self, node: Node) -> Tensor:
        shape = (self.probes, *node.tensor.shape)
        drawn = torch.randint(0, 2, shape, generator=self.generator, dtype=torch.int8, device="cpu")
        return (2 * drawn - 1).to(device=node.tensor.device, dtype=node.tensor.dtype)
