"""A number with its uncertainty: what the scalar estimators return."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from curvatlas.results import Result

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Estimate(Result):
    """An estimated quantity of an operator.

    Two sources of error are kept apart: ``interval`` is for the probes (the number the data at hand
    define), ``data_interval`` for the sampling of the data (what other batches of the same kind
    would give), None when the operator does not know its batches.
    """

    quantity: str  # "trace", "Frobenius norm", …
    value: float
    interval: Interval  # 95 %, probes only
    data_interval: Interval | None = None  # 95 %, batches only
    products: int
    converged: bool
    exact: bool  # a closed form or the matrix itself: the interval is rounding
    method: str

    @property
    def error(self) -> float:
        """Half the width of the 95 % interval."""
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def advice(self) -> str:
        """Which source of error to reduce first."""
        if self.data_interval is None:
            return "more probes" if not self.converged else "nothing: only probes were in play"
        data = (self.data_interval[1] - self.data_interval[0]) / 2
        if data > 2 * self.error:
            return f"more data: batches contribute ±{data:.2g}, probes ±{self.error:.2g}"
        if self.error > 2 * data:
            return f"more probes: they contribute ±{self.error:.2g}, batches ±{data:.2g}"
        return f"both alike: probes ±{self.error:.2g}, batches ±{data:.2g}"

    def __str__(self) -> str:
        if self.exact:
            return f"{self.quantity} = {self.value:.6g} (exact, {self.products} products)"
        text = f"{self.quantity} = {self.value:.6g} ± {self.error:.2g} (95 %"
        if self.data_interval is not None:
            data = (self.data_interval[1] - self.data_interval[0]) / 2
            text += f"; data ± {data:.2g}"
        text += f"), {self.products} products"
        return text if self.converged else text + ", NOT converged"

    def plot(self) -> Any:
        """The value with its intervals on one axis."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 1.8), layout="constrained")
        axes = figure.add_subplot()
        rows = [("probes", self.interval)]
        if self.data_interval is not None:
            rows.append(("data", self.data_interval))
        for y, (_, (low, high)) in enumerate(rows):
            axes.plot([low, high], [y, y], linewidth=4, solid_capstyle="butt")
        axes.axvline(self.value, color="black", linewidth=1)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set(xlabel=self.quantity, ylim=(-0.6, len(rows) - 0.4))
        return figure


def exact_estimate(
    quantity: str, value: float, *, scale: float, eps: float, products: int, method: str
) -> Estimate:
    """A number known up to rounding: ``scale`` is the sum of the magnitudes that were added."""
    radius = 64 * eps * scale + math.ulp(value)
    return Estimate(
        quantity=quantity,
        value=value,
        interval=(value - radius, value + radius),
        products=products,
        converged=True,
        exact=True,
        method=method,
    )


def close_enough(value: float, error: float, rtol: float, norm: float = 0.0) -> bool:
    """Whether ± error is within rtol of the value."""
    return error <= tolerance(value, rtol, norm)


def tolerance(value: float, rtol: float, norm: float = 0.0) -> float:
    """rtol of the value, and where a sum cancels to less than a tenth of its ``norm``, of that.

    norm: the sum of the magnitudes. No effort reaches a share of a sum that happens to be zero.
    """
    return rtol * max(abs(value), 0.1 * norm)
