"""What ``eigenpairs`` returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from curvatlas.results import Number, Result
from curvatlas.spectra.krylov import Array

Which = Literal["largest", "smallest", "both", "magnitude"]
WHICH: tuple[Which, ...] = ("largest", "smallest", "both", "magnitude")
Positions = NDArray[np.int64]


def by_interest(values: Array, which: Which) -> Positions:
    """All positions, those nearest to the wanted end first."""
    m = len(values)
    if which == "largest":
        return np.arange(m - 1, -1, -1)
    if which == "smallest":
        return np.arange(m)
    if which == "magnitude":
        return np.argsort(-np.abs(values), kind="stable")
    both = np.empty(m, dtype=np.int64)
    both[0::2] = np.arange(m - 1, m - 1 - len(both[0::2]), -1)
    both[1::2] = np.arange(len(both[1::2]))
    return both


def select(values: Array, k: int, which: Which) -> Positions:
    """Positions of the wanted ones among ascending ``values``, in the order they are reported."""
    m = len(values)
    if which != "both":
        return by_interest(values, which)[:k]
    if 2 * k >= m:
        return np.arange(m - 1, -1, -1)
    return np.concatenate([np.arange(m - 1, m - 1 - k, -1), np.arange(k - 1, -1, -1)])


@dataclass(frozen=True, kw_only=True)
class Eigenpairs(Result):
    """Eigenvalues with certified intervals.

    ``both``: the k largest in descending order, then the k smallest, the most negative last. Reads
    like the tensor ``values`` too: ``pairs[0]``, ``len(pairs)``, ``pairs.mean()``, ``torch.sort``.
    """

    values: Tensor  # (k,) or (2k,), float64 on the CPU
    vectors: Tensor  # (n, k) unit columns on the operator's device
    residuals: Tensor  # (k,) ‖A v − λ v‖, rounding included
    interval: tuple[Tensor, Tensor]  # each contains an eigenvalue with certainty
    data_interval: tuple[Tensor, Tensor] | None = None  # 95 %, batches only, to first order
    which: str
    k: int
    tol: float
    norm: float  # the ‖A‖ that tol refers to
    # Bound on overlooking a separate one: further out than the reported ones by 10 tol·‖A‖, and
    # as far from each of them. A copy of a reported one is what ``complete_outside`` speaks of.
    missed_probability: float
    # Below the first and above the second value nothing is missing from the list, copies included,
    # at 97.5 %: no further in than the list reaches, infinite at an end that was not searched.
    complete_outside: tuple[float, float] = (-math.inf, math.inf)
    # The whole spectrum lies between these at 95 %: further out, the random start would have shown
    # it. Infinite after a warm start or a restart, which leave no such start.
    spectrum_within: tuple[float, float] = (-math.inf, math.inf)
    products: int
    converged: bool
    exact: bool  # from the dense matrix, or from a basis of the whole space

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.values[key]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values.numpy(), dtype=dtype)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """``torch.sort(pairs)`` and the like take the values."""

        def values(leaf: Any) -> Any:
            return leaf.values if isinstance(leaf, Eigenpairs) else leaf

        return function(*tree_map(values, args), **tree_map(values, kwargs or {}))

    if not TYPE_CHECKING:  # for a type checker they have the attributes that are written here

        def __getattr__(self, name: str) -> Any:
            values = self.__dict__.get("values")
            if name.startswith("_") or not hasattr(values, name):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
            return getattr(values, name)

    @property
    def value(self) -> float:
        """The first eigenvalue: the largest, the most negative, or the largest in magnitude."""
        return float(self.values[0])

    @property
    def largest(self) -> Tensor:
        """The values of the upper end."""
        return self.values[: self.k] if self.which == "both" else self.values

    @property
    def smallest(self) -> Tensor:
        """The values of the lower end, the most negative first."""
        return self.values.flip(0)[: self.k] if self.which == "both" else self.values

    def number(self, index: int) -> Number:
        """One eigenvalue with its certified interval."""
        low, high = (float(end[index]) for end in self.interval)
        return Number(float(self.values[index]), low, high)

    @property
    def gap(self) -> Number:
        """Between the first two values: their errors add up."""
        first, second = (self.number(index) for index in (0, 1))
        low, high = max(0.0, first.low - second.high), first.high - second.low
        return Number(first.value - second.value, low, high)

    @property
    def completeness(self) -> str:
        """How far the list is known to be whole, in words: terminal and page say the same."""
        if self.exact:
            return "exact"
        if not self.converged:
            worst = float(self.residuals.max()) / self.norm if self.norm else 0.0
            return f"NOT converged: worst residual {worst:.1e}·‖A‖, asked {self.tol:.1e}·‖A‖"
        low, high = self.complete_outside
        complete: list[str] = []  # only where the list has values further out
        left: list[str] = []
        if self.which != "smallest":
            reached = high <= float(self.values.max()) * (1 + 1e-9)
            (complete if reached else left).append(f"above {high:.6g}" if reached else "upper")
        if self.which != "largest":
            reached = low >= float(self.values.min()) * (1 + 1e-9)
            (complete if reached else left).append(f"below {low:.6g}" if reached else "lower")
        if not complete:
            chance = self.missed_probability
            return (
                f"not searched for missing ones; one further out overlooked: at most {chance:.1%}"
            )
        rest = ""
        if left and self.which == "both":
            rest = f"; {left[0]} end converged, not searched for others"
        return f"complete {' and '.join(complete)} at 97.5 %{rest}"

    def _derived(self) -> dict[str, Any]:
        return {"completeness": self.completeness}

    def __str__(self) -> str:
        pairs = zip(self.values.tolist(), self.residuals.tolist(), strict=True)
        shown = ", ".join(f"{value:.6g} ± {radius:.1g}" for value, radius in pairs)
        return f"{self.which} eigenvalues: {shown} ({self.completeness}; {self.products} products)"


def within_list(complete: tuple[float, float], values: Array, which: str) -> tuple[float, float]:
    """Bounds of completeness (low, high) drawn in to what a list of ``values`` can speak of.

    Further in than its innermost value there are eigenvalues that were not asked for.
    """
    low, high = complete
    half = len(values) // 2
    if which == "largest":
        return -math.inf, max(high, float(values.min()))
    if which == "smallest":
        return min(low, float(values.max())), math.inf
    if which == "both":
        return min(low, float(values[half:].max())), max(high, float(values[: max(half, 1)].min()))
    edge = float(np.abs(values).min())
    return min(low, -edge), max(high, edge)


def cluster_radii(values: Array, residuals: Array) -> Array:
    """Radii such that as many intervals hold as many eigenvalues, copies counted.

    Disjoint intervals hold one eigenvalue each. For overlapping ones residuals add in quadrature:
    orthonormal vectors with residual matrix R have eigenvalues within ‖R‖ ≤ (Σ r²)^½ (Kahan 1967).
    """
    order = np.argsort(values)
    radii = residuals[order].copy()
    sorted_values = values[order]
    while True:
        reach = np.maximum.accumulate(sorted_values + radii)
        starts = np.r_[True, (sorted_values - radii)[1:] > reach[:-1]]
        label = np.cumsum(starts) - 1
        joint = np.sqrt(np.bincount(label, residuals[order] ** 2))[label]
        # A member reaching further than its cluster's bound keeps that bound.
        if (joint <= radii).all():
            break
        radii = np.maximum(joint, radii)
    result = np.empty_like(radii)
    result[order] = radii
    return result
