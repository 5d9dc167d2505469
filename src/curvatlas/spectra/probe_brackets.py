r"""What the recurrences of random probes bracket: the share of eigenvalues below any point.

The rule with a node at x has the mass L left of it and w at it, and the measure's mass below x lies
between L and L + w (Chebyshev, Markov, Stieltjes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from curvatlas.spectra.krylov import Array
from curvatlas.spectra.quadrature import ROUNDING, gauss, length, mass_below, rule

_NORMAL = 1.96
FEWEST_STEPS = 4  # of a probe, for the change with the last quarter to mean anything


@dataclass(frozen=True)
class Probes:
    """Recurrences (m, s) of random directions outside ``outliers``, and the scale of rounding."""

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
    def share(self) -> float:
        """Of the eigenvalues that are not outliers."""
        return (self.size - len(self.outliers)) / self.size

    def _rules(self, steps: int | None = None) -> Iterator[tuple[Array, Array, int]]:
        """Of every probe, with the number of steps that count."""
        for alphas, betas in zip(self.alphas[:, :steps], self.betas[:, :steps], strict=True):
            yield alphas, betas, length(betas, self.scale, self.eps)

    @property
    def ended(self) -> bool:
        """Whether every probe has seen all of its few different eigenvalues."""
        return all(b[s - 1] <= ROUNDING * self.eps * self.scale for _, b, s in self._rules())

    def around(self, point: float, steps: int) -> Array:
        """L and w of every probe at ``point``, (m, 2).

        A node that is zero to rounding is a null space: its weight is not negative, and not open.
        """
        rows = []
        for alphas, betas, s in self._rules(steps):
            ended = bool(betas[s - 1] <= ROUNDING * self.eps * self.scale)
            if ended or point == 0.0:
                nodes, weights = gauss(alphas[:s], betas[:s])
                if ended or bool((np.abs(nodes) <= self.zero).any()):
                    below = nodes < (-self.zero if point == 0.0 else point)
                    rows.append((float(weights[below].sum()), 0.0))
                    continue
            low, high = mass_below(alphas[:s], betas[:s], point)
            rows.append((low, high - low))
        return np.array(rows)

    def error(self, mass: float, change: float) -> float:
        """95 % of a share of mass: chance, the last quarter of the steps, and one eigenvalue.

        The mass a probe sees follows Beta(d p / 2, d (1 − p) / 2): no need to see it scatter. The
        coupling between outliers and bulk, a perturbation of rank two, moves one eigenvalue at most
        across any point.
        """
        d = self.size - len(self.outliers)
        chance = 2 * mass * max(1 - mass, 0.0) / ((d + 2) * len(self.alphas))
        within = self.share**2 * (_NORMAL**2 * chance + change**2)
        return float(np.sqrt(within + 1 / self.size**2))

    def spacing(self) -> float:
        """Distance of neighbouring nodes around zero, that of Chebyshev's nodes on their range."""
        rules = [rule(a, b, self.scale, self.eps, self.size)[0] for a, b, _ in self._rules()]
        ends = [nodes[[0, -1]] for nodes in rules]
        low, high = np.mean(ends, 0)
        edge = (high - low) / self.steps**2
        return float(np.pi / self.steps * np.sqrt(max(-low, edge) * max(high, edge)))


def zero_of(values: Array, eps: float) -> float:
    """Below this an eigenvalue counts as zero: rounding of the largest."""
    return float(np.abs(values).max(initial=0.0)) * max(100 * eps, 1e-10)
