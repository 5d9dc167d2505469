"""Axes: from numbers to places between 0 and 1, and the ticks a person reads.

``report.js`` holds the same three functions, so that a zoomed figure gets new ticks; a browser test
compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from curvatlas.report.markup import superscript

Kind = Literal["linear", "log", "symlog"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A numeric axis. symlog is asinh(v / threshold): linear near zero, logarithmic far away."""

    kind: Kind
    low: float
    high: float
    threshold: float = 1.0

    def warp(self, value: float) -> float:
        """The value in the space in which the axis is even."""
        if self.kind == "log":
            return math.log10(max(value, 1e-300))
        return math.asinh(value / self.threshold) if self.kind == "symlog" else value

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high = self.warp(self.low), self.warp(self.high)
        return (self.warp(value) - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """About five round numbers within the axis, with their labels."""
        if self.kind == "linear":
            values = _round_numbers(self.low, self.high)
        else:
            values = self._within((1,))
            if len(values) < 3:
                values = self._within((1, 2, 5))
            if len(values) < 3:
                values = _round_numbers(self.low, self.high)
        return [(value, tick_label(value)) for value in _thinned(values)]

    def _within(self, factors: tuple[int, ...]) -> list[float]:
        """Multiples of powers of ten on the axis; on both sides of zero for symlog."""
        reach = max(abs(self.low), abs(self.high))
        smallest = self.low if self.kind == "log" else self.threshold
        exponents = range(math.floor(math.log10(smallest)), math.floor(math.log10(reach)) + 1)
        powers = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        if self.kind == "symlog":
            powers = [power for power in powers if power >= self.threshold]
            powers = [-power for power in reversed(powers)] + [0.0] + powers
        return [power for power in powers if self.low <= power <= self.high]


def tick_label(value: float) -> str:
    """As short as an axis needs: ``0.01``, ``2000``, ``10⁻⁴``, ``2×10⁷``."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}".replace("-", "−")
    mantissa, exponent = f"{abs(value):.5e}".split("e")
    factor = mantissa.rstrip("0").rstrip(".")
    power = f"10{superscript(int(exponent))}"
    sign = "−" if value < 0 else ""
    return f"{sign}{power}" if factor == "1" else f"{sign}{factor}×{power}"


def linear_scale(values: Iterable[float], *, zero: bool = False) -> Scale:
    """Fits the values, with a little room; ``zero`` puts the origin on the axis."""
    low, high = _range(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(kind="linear", low=low if zero and low == 0 else low - room, high=high + room)


def log_scale(values: Iterable[float]) -> Scale:
    """Fits the positive values, with a little room."""
    low, high = _range([v for v in values if v > 0] or [1.0])
    room = 10 ** (0.05 * math.log10(high / low)) if high > low else 2.0
    return Scale(kind="log", low=low / room, high=high * room)


def symlog_scale(values: Iterable[float], *, decades: float = 3.0) -> Scale:
    """Shows ``decades`` powers of ten on each side of zero, below them linearly."""
    low, high = _range(values)
    reach = max(abs(low), abs(high)) or 1.0
    threshold = reach / 10**decades
    low, high = min(low, -threshold), max(high, threshold)
    scale = Scale(kind="symlog", low=low, high=high, threshold=threshold)
    room = 0.04 * (scale.warp(high) - scale.warp(low))
    return Scale(
        kind="symlog",
        low=math.sinh(scale.warp(low) - room) * threshold,
        high=math.sinh(scale.warp(high) + room) * threshold,
        threshold=threshold,
    )


def _range(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def _round_numbers(low: float, high: float) -> list[float]:
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / 4))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= 6:
            step *= factor
            break
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_clean(index * step) for index in range(first, last + 1)]


def _clean(value: float) -> float:
    return float(f"{value:.12g}")


def _thinned(values: list[float], most: int = 7) -> list[float]:
    """Every second, third … value, zero kept, when there are more than ``most``."""
    if len(values) <= most:
        return values
    every = math.ceil(len(values) / most)
    anchor = values.index(0.0) if 0.0 in values else 0
    return [value for index, value in enumerate(values) if (index - anchor) % every == 0]
