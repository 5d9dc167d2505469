r"""Spectral density by stochastic Lanczos quadrature with the outliers taken out first.

A Lanczos basis V of j steps splits A into VᵀAV and B = P A P, P = I − VVᵀ, up to the coupling β_j:

    μ_A = (1/n) Σ_i δ(θ_i) + ((n − j)/n) μ_B + error,   W1(error) ≤ 2 β_j / n.

The outliers sit among the Ritz values θ_i with their exact weight 1/n. The bulk μ_B is the mean of
Gauss rules from random probes in the complement. Plain quadrature gives every outlier a random
weight instead: at 100, 300 and 1000 products it is 2 to 5 times further from a trained ViT's
spectrum (benchmarks/spectra.py).

Stochastic Lanczos quadrature: Golub and Meurant; Ubaru, Chen and Saad 2017.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from curvatlas.budget import parse_bytes, readable
from curvatlas.linear_operator import LinearOperator, MatrixOperator
from curvatlas.spectra.checkpoint import Resumable, State, fingerprint, generator
from curvatlas.spectra.density_result import SpectralDensity, exact_density, summarise
from curvatlas.spectra.exact import DENSE_UP_TO, MOST_PRODUCTS, symmetric_matrix
from curvatlas.spectra.krylov import Array, KrylovBasis, stride
from curvatlas.spectra.quadrature import DROP, FEWEST_STEPS, invariant_after, recurrences
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    largest_asymmetry,
    not_finite,
    not_symmetric,
    refuse_asymmetric,
    require_symmetric,
    vectors_within,
)
from curvatlas.spectra.vectors import VectorSpace

_STEPS = 20  # of each probe: enough for a bulk without outliers
_FEWEST_PROBES = 3  # so that their scatter can be seen
_BESIDE = 10  # vectors of one run's working beside those it keeps
_FEWEST_VECTORS = 32  # in memory; with less, three vectors at a time have to do
_LEAN_VECTORS = 6


@alike_on_every_rank
def spectral_density(
    op: LinearOperator,
    *,
    max_products: int | None = None,
    deflate: int | None = None,
    probes: int | None = None,
    steps: int | None = None,
    reorthogonalise: bool = True,
    memory: int | float | str | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
) -> SpectralDensity:
    """Quadrature nodes and weights of the whole spectrum, with intervals.

    max_products: the effort, 300 by default; it is divided into ``deflate`` Lanczos steps for the
    outliers and ``probes`` runs of ``steps`` for the bulk unless these are given. Given without it
    they are the effort themselves.
    reorthogonalise: False keeps three vectors instead of a basis and deflates nothing; for models
    that leave no room for more (``LeanDensity`` says what changes).
    memory: bytes (or "2GB") for the vectors beside the operator's own, a quarter of the machine's
    by default; with less, fewer outliers are taken out and runs are shorter. Where weights are
    spread (FSDP2) so are the vectors, and memory is that of each process.
    """
    n = require_symmetric(op, "spectral_density")
    if max_products is None:
        max_products = max(MOST_PRODUCTS, asked(deflate, probes, steps))
    check_budget(max_products)
    if n <= max_products or (isinstance(op, MatrixOperator) and n <= DENSE_UP_TO["density"]):
        matrix, products = symmetric_matrix(op, "spectral_density")
        values = torch.linalg.eigvalsh(matrix).cpu()
        return exact_density(values, products, psd=op.tags.psd)
    room = vectors_within(op, memory, "spectral_density", fewest=_LEAN_VECTORS)
    if not reorthogonalise or (room < _FEWEST_VECTORS and not deflate):
        if deflate:
            raise ValueError("deflation needs a basis: leave deflate out, or reorthogonalise.")
        _, m, s = split(max_products, 0, probes, steps)
        mark = fingerprint(op, estimate="lean density", probes=m, steps=s, seed=seed)
        lean = LeanDensity(op, m, s, seed)
        lean.run_from(checkpoint, mark, op.shards)
        return lean.result()
    j, m, s = split(max_products, deflate, probes, steps)
    if deflate is None and j > room // 3:
        j, m, s = split(max_products, room // 3, probes, steps)
    if steps is None and s > room - j - _BESIDE:
        j, m, s = split(max_products, j, probes, max(room - j - _BESIDE, 1))
    if j + s + _BESIDE > room and memory is not None:
        raise ValueError(
            f"memory={readable(parse_bytes(memory))} holds {room} vectors, a basis of {j} and a "
            f"run of {s} steps need {j + s + _BESIDE}: give more, or fewer steps."
        )
    group = max(1, min((room - j) // (s + _BESIDE), 16))
    mark = fingerprint(op, estimate="density", deflate=j, probes=m, steps=s, group=group, seed=seed)
    estimate = DeflatedDensity(op, j, m, s, seed, group=group)
    estimate.run_from(checkpoint, mark, op.shards)
    return estimate.result()


def asked(deflate: int | None, probes: int | None, steps: int | None) -> int:
    """Products that the options ask for by themselves, with the least of what they leave open."""
    if probes is None and steps is None:
        bulk = _FEWEST_PROBES * _STEPS if deflate else 0
    else:
        bulk = (probes or _FEWEST_PROBES) * (steps or FEWEST_STEPS)
    return (deflate or 0) + bulk


def split(
    products: int, deflate: int | None, probes: int | None, steps: int | None
) -> tuple[int, int, int]:
    """(deflation steps, probes, steps of each) within the budget.

    Measured on trained ViT and heavy-tailed spectra: about 30 + 0.3 N for the outliers, runs of 20
    for the bulk, at least three of them so that their scatter can be seen.
    """
    if deflate is None:
        room = products - asked(0, probes, steps)
        j = max(min(30 + 3 * products // 10, 6 * products // 10, room), 0)
    else:
        j = deflate
    left = max(products - j, 1)
    if steps is None:
        steps = left // probes if probes else min(_STEPS, max(left // 3, 1))
    if probes is None:
        probes = max(left // max(steps, 1), 1)
    if min(j, probes - 1, steps - 1) < 0 or j + probes * steps > products:
        raise ValueError(
            f"{j} deflation steps and {probes} probes of {steps} steps do not fit into "
            f"{products} products: raise max_products."
        )
    return j, probes, steps


class DeflatedDensity(Resumable):
    """Deflation, then groups of probes."""

    title = "spectral density"

    def __init__(
        self, op: LinearOperator, deflate: int, probes: int, steps: int, seed: int, *, group: int
    ) -> None:
        self.group = group  # probes that go through the operator together
        self.op, self.deflate, self.probes, self.steps = op, deflate, probes, steps
        self.budget = deflate + probes * steps
        self.random = generator(seed)
        self.basis = KrylovBasis(op, deflate + 2, shards=op.shards)
        self.alphas: Array = np.zeros((0, steps))
        self.betas: Array = np.zeros((0, steps))
        self.spent = 0  # products of the probes

    def result(self) -> SpectralDensity:
        ritz = self.basis.ritz()
        refuse_asymmetric(self.basis, "spectral_density")
        coupling = float(np.linalg.norm(self.basis.coefficients[self.basis.multiplied :]))
        return summarise(
            size=self.op.shape[0],
            outliers=ritz.values,
            coupling=coupling,
            alphas=self.alphas,
            betas=self.betas,
            eps=self.basis.eps,
            products=self.products,
            psd=self.op.tags.psd,
        )

    @property
    def products(self) -> int:
        return self.basis.products + self.spent

    @property
    def rewrites(self) -> int:
        return self.basis.rewrites

    def step(self) -> None:
        basis = self.basis
        if basis.products < self.deflate:
            if basis.count == 0:
                basis.add_random(self.random)
            if basis.pending:
                basis.advance(min(basis.stride, self.deflate - basis.products))
                self._stop_at_invariance()
                return
            # Few distinct eigenvalues: what deflation does not need goes to further probes.
            self.probes += (self.deflate - basis.products) // self.steps
            self.deflate = basis.products
        group = min(self.probes - len(self.alphas), self.group)
        outside = basis.rows[: basis.multiplied].to(self.op.device)
        starts = VectorSpace.of(self.op).normal(group, self.random)
        alphas, betas, products = recurrences(
            self.op, starts, self.steps, outside, scale=basis.scale, what="spectral_density"
        )
        self.spent += products
        self.alphas = np.concatenate([self.alphas, alphas])
        self.betas = np.concatenate([self.betas, betas])
        self.done = len(self.alphas) >= self.probes

    def _stop_at_invariance(self) -> None:
        """Cut the basis where its space became invariant, once rounding has shown that it was."""
        alphas, betas = self.basis.recurrence()
        if betas[:-1].min(initial=np.inf) > DROP * betas[-1]:
            return
        basis = self.basis
        steps = invariant_after(alphas, betas, basis.scale, basis.eps, basis.size)
        if steps < len(alphas):
            basis.cut(steps)

    def state(self) -> State:
        tensors, numbers = self.basis.state()
        tensors.update(
            random=self.random.get_state(),
            alphas=torch.from_numpy(self.alphas.copy()),
            betas=torch.from_numpy(self.betas.copy()),
        )
        return tensors, {
            **numbers,
            "deflate": self.deflate,
            "probes": self.probes,
            "spent": self.spent,
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.basis.restore(tensors, numbers)
        self.random.set_state(tensors["random"])
        self.deflate, self.probes = int(numbers["deflate"]), int(numbers["probes"])
        self.alphas, self.betas = tensors["alphas"].numpy(), tensors["betas"].numpy()
        self.spent = int(numbers["spent"])
        self.done = self.basis.products >= self.deflate and len(self.alphas) >= self.probes


class LeanDensity(Resumable):
    """``probes`` runs of ``steps`` steps, one after the other, with three vectors in memory.

    Without a stored basis there is no reorthogonalisation: copies of converged eigenvalues appear
    and share their weight, so the nodes are no list of eigenvalues, but the quadrature stays that
    of a nearby spectrum (Greenbaum 1989; Chen, Trogdon and Ubaru 2021). Two vectors and the
    coefficients are the whole state.
    """

    title = "spectral density"
    vector_axes: ClassVar = {"here": 0, "before": 0}

    def __init__(self, op: LinearOperator, probes: int, steps: int, seed: int) -> None:
        self.op, self.probes, self.steps, self.seed = op, probes, steps, seed
        self.space = VectorSpace.of(op)
        self.budget = probes * steps
        self.finished: list[list[list[float]]] = []  # α and β of the finished probes
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.here = self.before = torch.zeros(0, device="cpu")

    def result(self) -> SpectralDensity:
        coefficients: Array = np.array(self.finished)  # (probes, 2, steps)
        return summarise(
            size=self.op.shape[0],
            outliers=np.zeros(0),
            coupling=0.0,
            alphas=coefficients[:, 0],
            betas=coefficients[:, 1],
            eps=torch.finfo(self.op.dtype).eps,
            products=self.products,
            psd=self.op.tags.psd,
        )

    @property
    def products(self) -> int:
        return len(self.finished) * self.steps + len(self.alphas)

    def begin(self) -> None:
        """A random direction that depends on the seed and the probe's number alone."""
        random = generator(1009 * self.seed + len(self.finished))
        start = self.space.normal(1, random, precision=torch.float32).squeeze(1)
        self.here = start.div_(self.space.norm(start))
        self.before = torch.zeros(0, dtype=self.op.dtype, device=self.op.device)
        self.alphas, self.betas = [], []

    def step(self) -> None:
        if self.op.device.type != "cpu":
            return self._steps_on_device()
        image = self.space.times(self.op, self.here)
        alpha = float(self.space.dot(self.here, image))
        if len(self.alphas) == 1:
            self._refuse_asymmetric(float(self.space.dot(self.before, image)), self.betas[-1])
        image.sub_(self.here, alpha=alpha)
        if self.alphas and self.betas[-1] > 0:
            image.sub_(self.before, alpha=self.betas[-1])
        beta = float(self.space.norm(image))
        if not np.isfinite(alpha + beta):
            raise not_finite(image, space=self.space)
        self.alphas.append(alpha)
        self.betas.append(beta)
        self.before, self.here = self.here, image.div_(max(beta, 1e-300))
        self._finish_probe(beta)

    def _steps_on_device(self) -> None:
        """Several steps, whose α and β the host reads together."""
        first, backs, measured = len(self.alphas), [], []
        last = self.betas[-1] if first else 0.0
        beta = torch.full((), last, dtype=self.op.dtype, device=self.op.device)
        for step in range(first, min(first + stride(self.op.device), self.steps)):
            image = self.space.times(self.op, self.here)
            alpha = self.space.dot(self.here, image)
            if step == 1:
                backs.append(self.space.dot(self.before, image))
            image = image - alpha * self.here
            if step:
                image = image - beta * self.before
            beta = self.space.norm(image)
            measured += [alpha, beta]
            ended = torch.where(beta > 0, beta, 1.0)
            self.before, self.here = self.here, image / ended
        numbers: list[float] = torch.stack([*measured, *backs]).tolist()
        back = numbers.pop() if backs else 0.0
        if not np.isfinite(numbers).all():
            raise not_finite(image, op=self.op, space=self.space)
        for alpha_, beta_ in zip(numbers[::2], numbers[1::2], strict=True):
            self.alphas.append(alpha_)
            self.betas.append(beta_)
            if beta_ == 0.0:
                break  # what came after was zero
        if backs and len(self.alphas) > 1:
            self._refuse_asymmetric(back, self.betas[0])
        self._finish_probe(self.betas[-1])

    def _finish_probe(self, beta: float) -> None:
        if len(self.alphas) == self.steps or beta == 0.0:
            missing = self.steps - len(self.alphas)
            self.finished.append([self.alphas + [0.0] * missing, self.betas + [0.0] * missing])
            self.begin()
            self.done = len(self.finished) >= self.probes

    def _refuse_asymmetric(self, back: float, forth: float) -> None:
        """b_1ᵀ A b_2 against b_2ᵀ A b_1 = β_1: no product, and no third vector."""
        n, eps = self.op.shape[0], torch.finfo(self.op.dtype).eps
        size = float(np.hypot(self.alphas[0], forth))  # ‖A b_1‖, the norm ‖A‖_F over n^½
        apart = n**0.5 * abs(back - forth) / size if size else 0.0
        if np.isfinite(apart) and apart > max(largest_asymmetry(self.op.dtype, n), 2 * n * eps):
            raise not_symmetric(apart, "spectral_density")

    def state(self) -> State:
        vectors = {} if self.done else {"here": self.here}
        if self.alphas:
            vectors["before"] = self.before
        return vectors, {
            "finished": list(self.finished),
            "alphas": list(self.alphas),
            "betas": list(self.betas),
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.finished, self.alphas, self.betas = (
            numbers[name] for name in ("finished", "alphas", "betas")
        )
        self.done = len(self.finished) >= self.probes
        if "here" in tensors:
            self.here = tensors["here"].to(self.op.device)
        if "before" in tensors:
            self.before = tensors["before"].to(self.op.device)
