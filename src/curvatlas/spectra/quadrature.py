r"""Gauss rules of a Lanczos recurrence, and what they know for certain.

s steps from a unit vector u give the Jacobi matrix T of u's spectral measure μ_u: its eigenvalues
are the nodes, the squared first components of its eigenvectors the weights, and polynomials up to
degree 2s − 1 are integrated exactly (Golub and Meurant 2010).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from curvatlas.linear_operator import LinearOperator
from curvatlas.spectra.krylov import Array, stride
from curvatlas.spectra.requirements import not_finite, refuse_asymmetric_images
from curvatlas.spectra.vectors import VectorSpace

ROUNDING = 16  # times eps·scale: the norm of what rounding leaves of an invariant space
DROP = 1e-2  # β this far below a later one: the later direction was hardly in the start, or not


def jacobi(alphas: Array, betas: Array) -> Array:
    """The symmetric tridiagonal matrix of alphas (s,) and betas (s − 1,)."""
    return np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1)


def length(betas: Array, scale: float, eps: float) -> int:
    """How many steps count: up to the first β that is rounding (the Krylov space is invariant)."""
    small = np.flatnonzero(betas <= ROUNDING * eps * scale)
    return int(small[0]) + 1 if len(small) else len(betas)


def rounding_weight(eps: float, size: int) -> float:
    """A node of less weight is not in the spectrum: rounding put it there.

    A direction that rounding drew, c·eps of the start, weighs (c·eps)²; c grows with the steps. One
    of ``size`` eigenvalues weighs 1/size: a node of a thousandth of that is nothing either.
    """
    return min((1e3 * eps) ** 2, 1e-3 / size)


def rule(alphas: Array, betas: Array, scale: float, eps: float, size: int) -> tuple[Array, Array]:
    """The Gauss rule of the steps that count, without nodes that are rounding.

    scale: of the operator, so that eps·scale is the rounding of a product.
    """
    s = length(betas, scale, eps)
    nodes, weights = gauss(alphas[:s], betas[:s])
    held = weights > rounding_weight(eps, size)
    return nodes[held], weights[held] / weights[held].sum()


def invariant_after(alphas: Array, betas: Array, scale: float, eps: float, size: int) -> int:
    """After how many steps rounding went on alone; all of them if it did not.

    The space was invariant, but roundings had grown by then: β is small, far above eps, and the
    next direction is one that rounding drew. It shows by β rising again, and by all that later
    steps add elsewhere weighing less than rounding.
    """
    after = np.append(np.maximum.accumulate(betas[::-1])[::-1][1:], 0.0)
    drops = np.flatnonzero((betas <= DROP * after) & (betas <= np.sqrt(eps) * scale))
    if len(drops) == 0:
        return len(alphas)
    nodes, weights = gauss(alphas, betas)
    for i in drops[np.argsort(betas[drops])]:
        before = np.linalg.eigvalsh(jacobi(alphas[: i + 1], betas[:i]))
        elsewhere = np.abs(nodes[:, None] - before).min(1) > 4 * betas[i] + ROUNDING * eps * scale
        if weights[elsewhere].sum() <= rounding_weight(eps, size):
            return int(i) + 1
    return len(alphas)


def gauss(alphas: Array, betas: Array) -> tuple[Array, Array]:
    """Nodes (s,) ascending and weights (s,) summing to one; betas may have s or s − 1 entries."""
    nodes, vectors = eigh_tridiagonal(alphas, betas[: len(alphas) - 1])
    return nodes, vectors[0] ** 2


def radau(alphas: Array, betas: Array, point: float) -> tuple[Array, Array]:
    """The rule with one node more, placed at ``point``; needs β_s as well.

    The weights left of the point and at it bracket the measure's true mass there: with w_0 the
    weight at the point, Σ_{θ<point} w ≤ μ(−∞, point) ≤ Σ_{θ<point} w + w_0 (Chebyshev, Markov,
    Stieltjes).
    """
    s = len(alphas)
    # e_sᵀ (T − point)⁻¹ e_s by elimination from the first row on.
    pivot = scale = 0.0
    for j, alpha in enumerate(alphas):
        scale = max(scale, abs(alpha - point), betas[j])
        pivot = alpha - point - (betas[j - 1] ** 2 / pivot if j else 0.0)
        if pivot == 0.0:
            pivot = np.finfo(np.float64).tiny ** 0.5 + np.finfo(np.float64).eps ** 2 * scale
    if abs(pivot) > 1e-8 * scale:
        correction = betas[s - 1] ** 2 / pivot
    else:  # the point is a node already: the least correction that keeps it
        shifted = jacobi(alphas, betas[: s - 1]) - point * np.eye(s)
        unit = np.zeros(s)
        unit[-1] = betas[s - 1] ** 2
        correction = np.linalg.lstsq(shifted, unit, rcond=None)[0][-1]
    return gauss(np.append(alphas, point + correction), betas[:s])


def mass_below(alphas: Array, betas: Array, point: float) -> tuple[float, float]:
    """Certain bounds of μ(−∞, point) from the recurrence."""
    if betas[len(alphas) - 1] == 0.0:
        nodes, weights = gauss(alphas, betas)
        mass = float(weights[nodes < point].sum())
        return mass, mass
    nodes, weights = radau(alphas, betas, point)
    at = int(np.argmin(np.abs(nodes - point)))
    below = float(weights[:at].sum())
    return below, min(below + float(weights[at]), 1.0)


def wasserstein(a: Array, wa: Array, b: Array, wb: Array) -> float:
    """W1 = ∫ |F_a − F_b| of two discrete measures (nodes, weights summing to one)."""
    points = np.concatenate([a, b])
    signed = np.concatenate([wa, -wb])
    order = np.argsort(points, kind="stable")
    difference = np.cumsum(signed[order])[:-1]
    return float(np.abs(difference) @ np.diff(points[order]))


def recurrences(
    op: LinearOperator,
    starts: Tensor,
    steps: int,
    outside: Tensor | None = None,
    *,
    scale: float = 0.0,
    what: str = "Lanczos quadrature",
) -> tuple[Array, Array, int]:
    """α (K, s) and β (K, s) of P A P from each start (n, K), P projecting off the rows ``outside``.

    Each run is orthogonalised against its own vectors, as one batched GEMM for all of them. A run
    whose space is invariant ends there, with zeros behind; when all have, no more products are
    made (on a device the host looks every few steps, ``krylov.stride``). Returned last: the
    products that were. scale: of A, where more is known than P A P shows. Of vectors that are
    spread with the operator's weights n are this process's entries.
    """
    n, count = starts.shape
    space = VectorSpace.of(op)
    kept = torch.zeros(count, steps + 1, n, dtype=op.dtype, device=op.device)
    rows = _off(space, _off(space, starts.T.contiguous(), outside), outside)
    kept[:, 0] = rows / space.norms(rows, dim=1).unsqueeze(1)
    alphas = torch.zeros(steps, count, dtype=op.dtype, device=op.device)
    betas = torch.zeros_like(alphas)
    largest = torch.full((), scale, dtype=op.dtype, device=op.device)
    products, looks = 0, stride(op.device)
    for step in range(steps):
        here = kept[:, step]  # (K, n)
        image = space.times(op, here.T.contiguous()).T
        products += count
        image = _off(space, image, outside)
        if step == 0 and space.finite(image):
            refuse_asymmetric_images(op, here.T, image.T, what, scale=scale, space=space)
        before = space.norms(image, dim=1)
        largest = torch.maximum(largest, before.max())
        alphas[step] = space.summed((here * image).sum(1))
        image = image - alphas[step, :, None] * here
        if step:
            image = image - betas[step - 1, :, None] * kept[:, step - 1]
        earlier = kept[:, : step + 1]  # (K, step + 1, n)
        image = _off_own(space, image, earlier)
        beta = space.norms(image, dim=1)
        looking = (step + 1) % looks == 0 or step == steps - 1
        if looking and not bool(torch.isfinite(beta).all()):
            raise not_finite(image, op=op, space=space)
        # Little is left of the image: rounding has a part in it that is not orthogonal.
        if looks > 1 or bool((beta < 0.1 * before).any()):
            image = _off_own(space, _off(space, image, outside), earlier)
            beta = space.norms(image, dim=1)
        rounding = beta <= ROUNDING * torch.finfo(op.dtype).eps * largest
        beta = torch.where(rounding, 0.0, beta)  # NaN stays until the next look
        betas[step] = beta
        if looking and not bool(beta.any()):
            break
        norm = beta[:, None]
        kept[:, step + 1] = torch.where(norm > 0, image / torch.where(norm > 0, norm, 1.0), 0.0)
    result = torch.stack([alphas, betas]).cpu().double().numpy()
    return result[0].T, result[1].T, products


def _off_own(space: VectorSpace, images: Tensor, rows: Tensor) -> Tensor:
    """images (K, n) minus their part in the span of their own orthonormal rows (K, s, n)."""
    inside = space.summed(torch.bmm(rows, images.unsqueeze(2)))
    return images - torch.bmm(rows.transpose(1, 2), inside).squeeze(2)


def _off(space: VectorSpace, rows: Tensor, outside: Tensor | None) -> Tensor:
    """rows (K, n) minus their part in the span of the orthonormal rows ``outside`` (j, n)."""
    if outside is None or outside.shape[0] == 0:
        return rows
    return torch.addmm(rows, space.summed(rows @ outside.T), outside, alpha=-1)


_NORMAL = 1.96
FEWEST_STEPS = 4  # of a probe, for the change with the last quarter to mean anything
Rule = tuple[Array, Array]  # nodes and weights


@dataclass(frozen=True)
class Probes:
    """Recurrences (m, s) of random directions outside ``outliers``, and the scale of rounding.

    They bracket the share of eigenvalues below any point x: the rule with a node at x has the mass
    L left of it and w at it, and the measure's mass below x lies between L and L + w.
    """

    size: int
    outliers: Array
    alphas: Array
    betas: Array
    scale: float
    eps: float

    @property
    def zero(self) -> float:
        """Below this an eigenvalue counts as zero."""
        return zero_of(np.array([self.scale]), self.eps)

    @property
    def steps(self) -> int:
        return int(self.alphas.shape[1])

    @property
    def fewer(self) -> int:
        """A quarter of the steps left out: how far the rules still move."""
        return max(self.steps - max(self.steps // 4, 1), 1)

    @property
    def few(self) -> bool:
        """Whether the rules have too few nodes to say anything of their own error."""
        return self.steps < FEWEST_STEPS

    @property
    def rest(self) -> int:
        """Eigenvalues that are not outliers."""
        return self.size - len(self.outliers)

    @property
    def share(self) -> float:
        """Of the eigenvalues that are not outliers."""
        return self.rest / self.size

    def _recurrences(self, steps: int) -> Iterator[tuple[Array, Array, bool]]:
        """The steps of every probe that count, and whether its space has ended there."""
        for alphas, betas in zip(self.alphas[:, :steps], self.betas[:, :steps], strict=True):
            s = length(betas, self.scale, self.eps)
            yield alphas[:s], betas[:s], bool(betas[s - 1] <= ROUNDING * self.eps * self.scale)

    def rules(self, steps: int) -> list[Rule]:
        """The Gauss rule of every probe."""
        pairs = zip(self.alphas[:, :steps], self.betas[:, :steps], strict=True)
        return [rule(a, b, self.scale, self.eps, self.size) for a, b in pairs]

    @property
    def ended(self) -> bool:
        """Whether every probe has seen all of its few different eigenvalues."""
        return all(ended for _, _, ended in self._recurrences(self.steps))

    def around(self, point: float, steps: int) -> Array:
        """L and w of every probe at ``point``, (m, 2).

        A node that is zero to rounding is a null space: its weight is not negative, and not open.
        """
        rows = []
        for alphas, betas, ended in self._recurrences(steps):
            if ended or point == 0.0:
                nodes, weights = gauss(alphas, betas)
                if ended or bool((np.abs(nodes) <= self.zero).any()):
                    below = nodes < (-self.zero if point == 0.0 else point)
                    rows.append((float(weights[below].sum()), 0.0))
                    continue
            low, high = mass_below(alphas, betas, point)
            rows.append((low, high - low))
        return np.array(rows)

    def error(self, mass: float, change: float) -> float:
        """95 % of a share of mass: chance, the last quarter of the steps, and one eigenvalue.

        The mass a probe sees follows Beta(d p / 2, d (1 − p) / 2): no need to see it scatter. The
        coupling between outliers and bulk, a perturbation of rank two, moves one eigenvalue at most
        across any point.
        """
        chance = 2 * mass * max(1 - mass, 0.0) / ((self.rest + 2) * len(self.alphas))
        within = self.share**2 * (_NORMAL**2 * chance + change**2)
        return float(np.sqrt(within + 1 / self.size**2))

    def spacing(self) -> float:
        """Distance of neighbouring nodes around zero, that of Chebyshev's nodes on their range."""
        low, high = np.mean([nodes[[0, -1]] for nodes, _ in self.rules(self.steps)], 0)
        edge = (high - low) / self.steps**2
        return float(np.pi / self.steps * np.sqrt(max(-low, edge) * max(high, edge)))


def zero_of(values: Array, eps: float) -> float:
    """Below this an eigenvalue counts as zero: rounding of the largest."""
    return float(np.abs(values).max(initial=0.0)) * max(100 * eps, 1e-10)
