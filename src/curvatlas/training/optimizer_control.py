r"""The critical learning rate, measured while training: how far a step may go.

A step −η d meets the curvature dᵀHd along it. With the slope a = gᵀd the quadratic model
changes by −η a + ½ η² dᵀHd: least at η = a / dᵀHd, and no gain from twice that on. What is watched
is the fraction κ = η dᵀHd / a: 1 at the lowest point, 2 at the critical rate.

Two measurements feed the same limit. After every step, free: the next gradient g⁺ has the slope
g⁺ᵀd = a (1 − κ) along the step just made (in expectation over batches; the batch's own noise in a
only lowers it). Now and then, when the loss can be evaluated again: the difference of two gradients
of one batch, dᵀ(g(θ) − g(θ − ηd)) = η dᵀHd with H averaged along the step, without noise.

Both are local. A step that changes a matrix by more than a part of itself leaves the region where a
quadratic model holds (behind a normalisation, curvature even falls as weights grow, and nothing
stops a wrong rate), so a tenth of the matrices' own size is the most a step may change.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

# A rate up to this is taken on trust; a higher one is reached by growing from here, so that it is
# measured before it does harm.
_TRUSTED = 2e-3
_GROWTH, _SHRINK = 1.25, 0.8
_MEMORY = 0.8  # of the running means: five steps
# Where the next gradient points back by this share of the slope, κ is near 1.4 without noise. At
# tuned rates the zoo's models stay above −0.25, at five times the rate they go to −0.45.
_BACKWARDS = -0.35
TENTH = 0.1  # of its root mean square that a matrix may change in one step
_MOST = 1.0  # κ that a measured product allows: the bottom of the parabola


@dataclass
class Control:
    """The limit of the learning rate of one parameter group, and the means it comes from."""

    limit: float = _TRUSTED
    ceiling: float = math.inf  # the rate at which the smallest matrix changes by a tenth
    slope: float = 0.0  # running mean of gᵀd
    overlap: float = 0.0  # running mean of g⁺ᵀd, one step later
    last_slope: float | None = None  # of the step just made
    last_rate: float = 0.0

    @classmethod
    def of(cls, group: dict[str, Any]) -> Control:
        """The control that a parameter group carries (plain numbers: they survive any saving)."""
        return cls(**group["control"])

    def keep(self, group: dict[str, Any]) -> None:
        """Write it back."""
        group["control"] = asdict(self)

    def follow(self, overlap: float) -> None:
        """Take in the slope of the newest gradient along the last step."""
        if self.last_slope is None:
            return
        self.slope = _MEMORY * self.slope + (1 - _MEMORY) * self.last_slope
        self.overlap = _MEMORY * self.overlap + (1 - _MEMORY) * overlap
        if self.overlap < _BACKWARDS * self.slope:
            self.limit = min(self.limit, self.last_rate) * _SHRINK
        else:
            # It need not run far ahead of what is used.
            self.limit = max(self.limit, _GROWTH * min(self.limit, max(self.last_rate, _TRUSTED)))

    def measured(self, slope: float, curvature: float) -> None:
        """Take in η a and η² dᵀHd of the step just made, both of one batch."""
        if slope > 0 and curvature > _MOST * slope and math.isfinite(curvature):
            self.limit = min(self.limit, self.last_rate * _MOST * slope / curvature)

    def rate(self, wanted: float) -> float:
        """The learning rate that may be used."""
        return min(wanted, self.limit, self.ceiling)

    def stepped(self, rate: float, slope: float) -> None:
        """Remember the step just made."""
        self.last_rate, self.last_slope = rate, slope
