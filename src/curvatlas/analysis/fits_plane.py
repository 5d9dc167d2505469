r"""A power law in two sizes, y = C N^a D^b: the plane in log space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from curvatlas.analysis.fits_least_squares import Array, as_arrays
from curvatlas.results import Result

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class PlanePowerLaw(Result):
    """y = factor · N^by_parameters · D^by_samples."""

    factor: float
    by_parameters: float
    by_samples: float
    parameters_interval: Interval  # 95 %, Student
    samples_interval: Interval  # 95 %, Student
    p_value: float | None  # F-test of bending and interaction terms; small: no power law
    scatter: float  # of log y
    covariance: tuple[tuple[float, ...], ...]  # of (log factor, a, b)
    points: int

    @property
    def value(self) -> float:
        return self.by_samples

    @property
    def interval(self) -> Interval:
        return self.samples_interval

    def __call__(self, parameters: Any, samples: Any) -> Any:
        n, d = (np.asarray(v, dtype=np.float64) for v in (parameters, samples))
        return self.factor * n**self.by_parameters * d**self.by_samples

    def draws(self, count: int, seed: int) -> Array:
        """(count, 3) plausible (log factor, a, b): Student with the fit's degrees of freedom."""
        random = np.random.default_rng(seed)
        centre = np.array([np.log(self.factor), self.by_parameters, self.by_samples])
        root = np.linalg.cholesky(np.array(self.covariance) + 1e-18 * np.eye(3))
        left = max(self.points - 3, 1)
        wide = np.sqrt(left / random.chisquare(left, count))[:, None]
        found: Array = centre + wide * (random.standard_normal((count, 3)) @ root.T)
        return found

    def __str__(self) -> str:
        (a, b), (c, d) = self.parameters_interval, self.samples_interval
        test = "" if self.p_value is None else f"; lack of fit p = {self.p_value:.2g}"
        return (
            f"∝ N^{self.by_parameters:.3f} [{a:.3f}, {b:.3f}] · D^{self.by_samples:.3f} "
            f"[{c:.3f}, {d:.3f}] (scatter {self.scatter:.1%}{test})"
        )


def plane_power_law(parameters: Any, samples: Any, y: Any) -> PlanePowerLaw:
    """Least squares in logarithms over a grid of sizes."""
    n, d, values = as_arrays(parameters, samples, y)
    count = len(values)
    if count < 4 or len(np.unique(n)) < 2 or len(np.unique(d)) < 2:
        raise ValueError(
            f"a power law in two sizes needs 4 runs at 2 sizes of each, got {count} runs."
        )
    centre = np.array([np.log(n).mean(), np.log(d).mean()])
    u, v, target = np.log(n) - centre[0], np.log(d) - centre[1], np.log(values)
    design = np.stack([np.ones(count), u, v], axis=1)
    estimate, square = _solve(design, target)
    left = count - 3
    covariance = np.linalg.inv(design.T @ design) * square / left
    # back to log factor at N = D = 1
    shift = np.eye(3)
    shift[0, 1:] = -centre
    covariance = shift @ covariance @ shift.T
    half = float(stats.t.ppf(0.975, left)) * np.sqrt(np.diag(covariance))
    wider = np.concatenate([design, np.stack([u * u, v * v, u * v], axis=1)], axis=1)
    p_value = None
    if count > 7 and min(len(np.unique(n)), len(np.unique(d))) > 2:
        rest = _solve(wider, target)[1]
        ratio = (square - rest) / 3 / max(rest / (count - 6), 1e-300)
        p_value = float(stats.f.sf(ratio, 3, count - 6))
    _, a, b = estimate
    return PlanePowerLaw(
        factor=float(np.exp(shift[0] @ estimate)),
        by_parameters=float(a),
        by_samples=float(b),
        parameters_interval=(float(a - half[1]), float(a + half[1])),
        samples_interval=(float(b - half[2]), float(b + half[2])),
        p_value=p_value,
        scatter=float(np.sqrt(square / left)),
        covariance=tuple(tuple(float(x) for x in row) for row in covariance),
        points=count,
    )


def _solve(design: Array, target: Array) -> tuple[Array, float]:
    estimate: Array = np.linalg.lstsq(design, target, rcond=None)[0].astype(np.float64)
    return estimate, float(((target - design @ estimate) ** 2).sum())
