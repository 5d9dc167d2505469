r"""How many eigenvalues are negative, as far as quadrature can tell.

A rule of s nodes does not see the sign of what lies nearer to zero than its nodes to each other. So
two shares are reported:

clear      below −τ, τ two spacings of the nodes around zero: well defined at that resolution, with
           an interval that chance decides;
negative   below zero: from what is clear plus a part, none to all, of what stays at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvatlas.spectra.estimate import Interval
from curvatlas.spectra.probe_brackets import FEWEST_STEPS, Probes

_SPACINGS = 2.0  # of the nodes around zero: from there on the rules tell what is below


@dataclass(frozen=True)
class NegativeShares:
    """Shares of all eigenvalues."""

    negative: float
    negative_interval: Interval
    resolution: float  # τ
    clear: float  # below −τ
    clear_interval: Interval


def negative_shares(probes: Probes, *, psd: bool) -> NegativeShares:
    """Both shares with their 95 % intervals."""
    if psd:
        return NegativeShares(0.0, (0.0, 0.0), probes.zero, 0.0, (0.0, 0.0))
    spacing = 0.0 if probes.ended else probes.spacing()
    if probes.steps < FEWEST_STEPS:  # so few nodes resolve no more than the spread they leave open
        spacing = max(spacing, float(np.abs(probes.betas[:, -1]).max()))
    resolution = max(_SPACINGS * spacing, probes.zero)
    negative, interval = _below_zero(probes, spacing)
    clear, clear_interval = _below(probes, -resolution)
    return NegativeShares(negative, interval, resolution, clear, clear_interval)


def _below(probes: Probes, point: float) -> tuple[float, Interval]:
    """Share below a point where the density is smooth at the rules' resolution."""
    fine, coarse = (probes.around(point, steps) for steps in (probes.steps, probes.fewer))
    middle = [float((rule[:, 0] + rule[:, 1] / 2).mean()) for rule in (fine, coarse)]
    error = probes.error(middle[0], middle[0] - middle[1])
    if probes.steps < FEWEST_STEPS:
        error += probes.share * float(fine[:, 1].mean()) / 2
    found = float((probes.outliers < point).sum()) / probes.size + probes.share * middle[0]
    return float(np.clip(found, 0, 1)), (max(found - error, 0.0), min(found + error, 1.0))


def _below_zero(probes: Probes, spacing: float) -> tuple[float, Interval]:
    """Share below zero: of w, the part that shrinks with the steps, as 1/s, is a smooth spectrum.

    Of that part a half lies below, or as much as the densities left and right of zero say: between
    the two. The part that stays, a null space or a peak too narrow to be split, lies below with
    none to all of it. So the interval holds in 95 % at the worst, and in more when the truth is
    inside the span of what cannot be told.
    """
    steps, fewer = probes.steps, probes.fewer
    fine, coarse = (probes.around(0.0, count) for count in (steps, fewer))
    wide, narrow = float(coarse[:, 1].mean()), float(fine[:, 1].mean())
    # w(s) = a + c/s at both: what is left as 1/s goes to nothing
    peak = (steps * narrow - fewer * wide) / (steps - fewer) if steps > fewer else narrow
    peak = float(np.clip(peak, 0.0, narrow)) if steps >= FEWEST_STEPS else narrow
    ends = []
    for split in sorted((0.5, _left_of_zero(probes, spacing))):
        masses = [
            float((rule[:, 0] + np.maximum(rule[:, 1] - peak, 0.0) * split).mean())
            for rule in (fine, coarse)
        ]
        ends.append((masses[0], probes.error(masses[0], masses[0] - masses[1])))
    sure = float((probes.outliers < -probes.zero).sum()) / probes.size
    low = sure + probes.share * ends[0][0]
    high = sure + probes.share * (ends[1][0] + peak)
    middle = float(np.clip((low + high) / 2, 0, 1))
    return middle, (max(low - ends[0][1], 0.0), min(high + ends[1][1], 1.0))


def _left_of_zero(probes: Probes, spacing: float) -> float:
    """The density left of zero, of the sum of both sides, one to two spacings away."""
    if spacing == 0.0:
        return 0.5
    below = []
    for point in (-2 * spacing, -spacing, spacing, 2 * spacing):
        rule = probes.around(point, probes.steps)
        below.append(float((rule[:, 0] + rule[:, 1] / 2).mean()))
    left, right = max(below[1] - below[0], 0.0), max(below[3] - below[2], 0.0)
    return left / (left + right) if left + right > 0.0 else 0.5
