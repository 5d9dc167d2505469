r"""Spectral norms of symmetric matrices that are diagonal over samples, by one short Lanczos each.

One product multiplies the matrices of all samples, so that every sample has a Krylov space of its
own for the price of one. The largest |Ritz value| θ is a lower bound of ‖S‖₂ for certain. Above it
a random start bounds what could have been overlooked (``spectra/missed.py``): an eigenvector z with
eigenvalue x beyond the nodes has

    (zᵀu)² ≤ 1 / Σ_{j≤k} p_j(x)²

with the orthonormal polynomials p_j of the recurrence, while (zᵀu)² follows Beta(1/2, (n − 1)/2).
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from curvatlas.analysis.propagation.capture import Node
from curvatlas.analysis.propagation.dense import is_sum
from curvatlas.analysis.propagation.matrix_free import FreeProducts, Product
from curvatlas.fits import Array
from curvatlas.results import Interval

CLOSE = 0.009  # width of the interval relative to ‖S‖₂ at which Lanczos ends
_OVERLOOKED = 0.02  # accepted probability that the largest eigenvalue lies above the interval
_STEPS = 96  # at most
_FIRST_LOOK = 6  # steps before the first test
_HALVINGS = 30  # of the distance between the outermost node and the bound


class SpectralNorms:
    """Refined spectral norms of activations and sublayers' inputs, each matrix once.

    A sum's inputs have the sum's matrix, and so has what a single sublayer reads the matrix of that
    sublayer's entry.
    """

    def __init__(self, products: FreeProducts, samples: int, generator: torch.Generator) -> None:
        self._products, self._samples, self._generator = products, samples, generator
        self._known: dict[tuple[Node | None, Node], Interval] = {}

    def interval(
        self, node: Node, *, reader: Node | None = None, probe: tuple[Tensor, Tensor] | None = None
    ) -> Interval:
        """At an activation, or as far as one ``reader`` of it sees it (the head: kind "head").

        probe: a random vector in the activation's shape and its product, where they are known.
        """
        if reader is not None and is_sum(reader):
            node, reader = reader, None
        elif reader is not None and self._only_reader(node) in (reader, reader.kind):
            reader = None
        while reader is None and isinstance(only := self._only_reader(node), Node) and is_sum(only):
            node = only
        if (reader, node) not in self._known:
            product = self._product(node, reader)
            start, image = self._probe(product, node) if probe is None else probe
            self._known[reader, node] = refined_interval(product, self._samples, start, image)
        return self._known[reader, node]

    def _only_reader(self, node: Node) -> Node | str | None:
        """The one sublayer that reads the activation, "head" for the head; None: several."""
        readers: list[Node | str] = list(self._products.readers[node])
        if node in self._products.capture.last:
            readers.append("head")
        return readers[0] if len(readers) == 1 else None

    def _product(self, node: Node, reader: Node | None) -> Product:
        products = self._products
        if reader is None:
            return products.total(node)
        if reader.kind == "head":
            passed, made = products.head(node)
        else:
            passed, made = products.passed_by(reader, node), products.created_by(reader, node)
        return lambda vectors: passed(vectors).detach() + made(vectors).detach()

    def _probe(self, product: Product, node: Node) -> tuple[Tensor, Tensor]:
        shape, like = node.tensor.shape, node.tensor
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64, device="cpu")
        start = drawn.to(device=like.device, dtype=like.dtype)
        return start, product(start.unsqueeze(0))[0]


def refined_interval(
    product: Product, samples: int, start: Tensor, image: Tensor, *, most: int = _STEPS
) -> Interval:
    """(low, high) of ‖S‖₂ = max_s ‖S_s‖₂, closer than 1 % unless ``most`` products end it.

    start, image: u and S u in the activation's shape, u random with a density that depends on its
    length alone: a probe that was multiplied already.
    """
    shape = start.shape
    size = start.numel() // samples
    vector, next_image = (t.detach().reshape(samples, size) for t in (start, image))
    length = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    vector, next_image = vector / length, next_image / length
    basis = vector.unsqueeze(1)  # (samples, k, size)
    alphas: list[Array] = []
    betas: list[Array] = []
    eps = torch.finfo(vector.dtype).eps
    asymmetry = 0.0  # what rounding puts where the recurrence has zeros
    interval = 0.0, np.inf
    for step in range(1, most + 1):
        coefficients = torch.einsum("skn,sn->sk", basis, next_image)
        alphas.append(_numbers(coefficients[:, -1]))
        if step > 2:
            asymmetry = max(asymmetry, float(coefficients[:, :-2].abs().max()))
        rest = next_image - torch.einsum("skn,sk->sn", basis, coefficients)
        rest = rest - torch.einsum("skn,sk->sn", basis, torch.einsum("skn,sn->sk", basis, rest))
        lengths = torch.linalg.vector_norm(rest, dim=1)
        betas.append(_numbers(lengths))
        scale = float(np.abs(alphas).max() + np.abs(betas).max())
        # A Krylov space that is complete goes on as zeros, which nothing counts.
        ended = _numbers(lengths) <= max(10 * eps * size**0.5 * scale, asymmetry)
        betas[-1][ended] = 0.0
        done = bool(ended.all()) or step == min(most, size)
        if done or (step >= _FIRST_LOOK and step % 2 == 0):
            rounding = asymmetry * step**0.5 + 10 * eps * scale
            interval = _bracket(np.stack(alphas, 1), np.stack(betas, 1), size, rounding)
            if done or interval[1] - interval[0] <= CLOSE * interval[0]:
                break
        alive = torch.from_numpy(~ended).to(rest.device)
        vector = torch.where(alive[:, None], rest / lengths.clamp_min(1e-300)[:, None], 0.0)
        basis = torch.cat([basis, vector.unsqueeze(1)], 1)
        next_image = product(vector.reshape(1, *shape))[0].detach().reshape(samples, size)
    return interval


def _numbers(values: Tensor) -> Array:
    numbers: Array = values.detach().cpu().double().numpy().copy()
    return numbers


def _bracket(alphas: Array, betas: Array, size: int, rounding: float) -> Interval:
    """From the recurrences (samples, k) of random starts in ``size`` dimensions each."""
    least, most = 0.0, 0.0
    accepted = float(beta.ppf(_OVERLOOKED, 0.5, max(size - 1, 1) / 2))
    for alpha, off in zip(alphas, betas, strict=True):
        ends = np.flatnonzero(off == 0.0)
        count = int(ends[0]) + 1 if len(ends) else len(alpha)
        nodes, vectors = np.linalg.eigh(np.diag(alpha[:count]) + _beside(off[: count - 1]))
        least = max(least, float(np.abs(nodes).max()))
        if len(ends):  # the start's Krylov space is complete: it has a part in every eigenspace
            most = max(most, float(np.abs(nodes).max()))
            continue
        for sign, end, next_one in ((-1.0, 0, 1), (1.0, -1, -2)):
            outermost = float(sign * nodes[end])
            residual = float(off[-1] * abs(vectors[-1, end]))
            gap = abs(float(nodes[end] - nodes[next_one])) if count > 1 else 0.0
            short = residual**2 / gap if residual < gap / 2 else residual  # of its eigenvalue
            reach = _reach(sign * alpha, off, outermost, accepted)
            most = max(most, outermost + max(reach, short))
    return max(least - rounding, 0.0), float(max(most, least)) + rounding


def _beside(off: Array) -> Array:
    return np.diag(off, 1) + np.diag(off, -1) if len(off) else np.zeros((1, 1))


def _reach(alphas: Array, betas: Array, outermost: float, accepted: float) -> float:
    """How far beyond the outermost node an eigenvalue may still hide."""
    outer = float(np.abs(alphas).max() + 2 * betas.max())
    while _hidden(alphas, betas, np.array([outermost + outer]))[0] > accepted and outer < 1e150:
        outer *= 2
    inner = 0.0
    for _ in range(_HALVINGS // 5):  # 32 points at a time: five halvings in one evaluation
        points = inner + (outer - inner) * np.arange(1, 33) / 32
        hides = _hidden(alphas, betas, outermost + points) > accepted
        place = int(np.flatnonzero(~hides)[0])
        inner, outer = (points[place - 1] if place else inner), points[place]
    return outer


def _hidden(alphas: Array, betas: Array, points: Array) -> Array:
    """1 / Σ_{j≤k} p_j(x)² at points beyond all nodes, where it falls."""
    before, here, total = np.zeros_like(points), np.ones_like(points), np.ones_like(points)
    with np.errstate(over="ignore", invalid="ignore"):
        for j, alpha in enumerate(alphas):
            ahead = ((points - alpha) * here - (betas[j - 1] * before if j else 0.0)) / betas[j]
            before, here = here, ahead
            total = total + here * here
    hidden: Array = np.where(np.isfinite(total), 1.0 / total, 0.0)
    return hidden
