r"""What random probes say about the norms of a matrix: estimates, variances, intervals.

Q is a random orthonormal n × q matrix and G = (A Q)ᵀ(A Q), B = AᵀA. With T = (n/q) tr G:

    E T = ‖A‖_F²,   Var T = (2/q) · n(n−q) · E[G_kl²],  k ≠ l,

because E[G_kl²] = (‖B‖_F² − tr²B/n) / ((n−1)(n+2)) for two orthonormal random vectors. The
q(q−1)/2 pairs estimate the variance far better than the spread of q numbers does, and give ‖B‖_F²,
from which ‖B‖_F²/tr B ≤ ‖A‖₂² ≤ tr B brackets the largest singular value. With q = n all is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

Array = NDArray[np.float64]

# The variance is itself estimated from M pairs, with a relative error near √(2/M). Adding twice
# that keeps 95 % coverage for spectra from flat to rank one (tests/analysis/test_atlas_statistics).
_CAUTION = 2.0


@dataclass(frozen=True)
class Energy:
    """Estimates of squared Frobenius norms, one an entry: all arrays have the same shape."""

    value: Array  # ‖A‖_F²
    variance: Array
    fourth: Array  # ‖AᵀA‖_F², the fourth power of the Schatten-4 norm
    pairs: Array  # probe pairs behind ``variance``; infinite where the value is exact
    seen: Array  # largest singular value among the probed directions, squared

    def interval(self) -> tuple[Array, Array]:
        """95 % interval of ‖A‖_F²: a scaled χ² with the estimated mean and variance."""
        variance = self.variance * (1 + _CAUTION * np.sqrt(2 / np.maximum(self.pairs, 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            freedom = np.clip(2 * self.value**2 / variance, 0.5, 1e9)
        freedom = np.where(variance > 0, freedom, 1e9)
        low = self.value * freedom / chi2.ppf(0.975, freedom)
        high = self.value * freedom / chi2.ppf(0.025, freedom)
        exact = variance == 0
        return np.where(exact, self.value, low), np.where(exact, self.value, high)

    def spectral_interval(self) -> tuple[Array, Array]:
        """95 % bracket of ‖A‖₂²: at most ‖A‖_F², at least ‖B‖_F²/tr B and what was seen.

        ‖B‖_F² ≤ ‖A‖₂² tr B gives the lower end. The tempting upper end ‖B‖_F is not used: few
        pairs underestimate it badly when one direction dominates.
        """
        _, high = self.interval()
        fourth = self.fourth / (1 + _CAUTION * np.sqrt(2 / np.maximum(self.pairs, 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.where(high > 0, fourth / high, 0.0)
        return np.minimum(np.maximum(low, self.seen), high), high

    def relative_error(self) -> Array:
        """Standard error of ‖A‖_F (not squared), relative to it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            result = np.sqrt(self.variance) / (2 * self.value)
        return np.where(self.value > 0, result, 0.0)


def energy_of(grams: Array, size: int, *, longest: float | None = None) -> Energy:
    """From Gram matrices (..., q, q) of q orthonormal probes in a space of dimension ``size``.

    longest: given for probes of atlas_directions, whose squared lengths are 1 on average and this
        at most. Their pairs still estimate the variance, too high rather than too low: the pairs
        that matter most stand in different probes.
    """
    q = grams.shape[-1]
    diagonal = np.diagonal(grams, axis1=-2, axis2=-1)
    trace = diagonal.sum(-1)
    value = size / q * trace
    squares = grams**2
    pairs = q * (q - 1) / 2
    seen = np.linalg.eigvalsh(grams)[..., -1] if q else np.zeros_like(value)
    seen = np.maximum(seen, 0.0) / (longest or 1.0)
    if q >= size:  # every direction was probed
        fourth = squares.sum((-2, -1))
        return Energy(value, np.zeros_like(value), fourth, np.full_like(value, np.inf), seen)
    off = (squares.sum((-2, -1)) - (diagonal**2).sum(-1)) / (2 * pairs)  # mean of G_kl², k < l
    # Half the spread of the diagonal has the same mean; it notices a direction that few probes hit.
    spread = diagonal.var(-1, ddof=1) / 2 if longest is None else off
    variance = 2 / q * size * (size - q) * np.maximum(off, (off + spread) / 2)
    fourth = (size - 1) * (size + 2) * off + value**2 / size
    return Energy(value, variance, fourth, np.full_like(value, pairs), seen)


def pooled(parts: list[Energy], weights: list[float]) -> Energy:
    """Σ w_k E_k of independent estimates: probe groups of one matrix (weights that sum to 1), or
    matrices side by side (weights 1)."""

    def combined(arrays: list[Array], power: int = 1) -> Array:
        return np.asarray(sum(w**power * a for w, a in zip(weights, arrays, strict=True)))

    variance = combined([p.variance for p in parts], 2)
    # The pairs count with the share of the variance they stand for.
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = combined([p.variance**2 / p.pairs for p in parts], 4)
        pairs = np.where(noise > 0, variance**2 / noise, np.inf)
    return Energy(
        combined([p.value for p in parts]),
        variance,
        combined([p.fourth for p in parts]),
        pairs,
        np.max(np.stack([p.seen for p in parts]), axis=0),
    )
