r"""Norms and traces of a matrix of which only pairs of vectors are known.

A probe ω somewhere behind an activation, its product with the Hessian there, and both pulled back
to the activation by the same Jacobian: u = Jᵀω and y = JᵀSω, so that E[u yᵀ] = JᵀSJ. With K
independent pairs and D_kl = u_k · y_l:

    tr = mean_k D_kk,   ‖·‖_F² = mean_{k≠l} D_kl D_lk,

both unbiased. Several matrices add up: each brings a group of pairs, and probes of different groups
are independent. A *fresh* group was probed at the activation itself: y_k = T ω_k, and E‖y_k‖² is
‖T‖_F² with far less noise than the pairs have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvatlas.analysis.atlas_statistics import Energy
from curvatlas.analysis.propagation_free import TAIL, Probed

Array = NDArray[np.float64]
Group = tuple[Tensor, Tensor]  # u and y, (K, *shape of the activation) each


@dataclass(frozen=True)
class Sketch:
    """The Hessian at one activation as a sum of up to three matrices, each known from pairs.

    far: of everything behind the last fresh product. near: of what was created between it and
    here, joined into one group (every contribution has probes of its own, so that cross terms
    vanish on average). fresh: probed here.
    """

    far: Group | None = None
    near: Group | None = None
    fresh: Group | None = None

    @property
    def groups(self) -> list[Group]:
        return [group for group in (self.far, self.near, self.fresh) if group is not None]

    def departing(self) -> Sketch:
        """The two groups that are pulled further back."""
        if self.far is None:
            return Sketch(far=self.fresh)
        return Sketch(far=self.far, near=_joined(self.near, self.fresh))

    def with_fresh(self, fresh: Group) -> Sketch:
        return Sketch(far=self.far, near=self.near, fresh=fresh)


def _joined(one: Group | None, two: Group | None) -> Group | None:
    if one is None or two is None:
        return one or two
    return one[0] + two[0], one[1] + two[1]


@dataclass(frozen=True)
class Deleted:
    """A statistic of K probes, and its values with each of the probes left out."""

    value: float
    without: Array  # (K,)

    def minus(self, other: Deleted, factor: float) -> Deleted:
        return Deleted(self.value - factor * other.value, self.without - factor * other.without)

    @property
    def variance(self) -> float:
        """The jackknife's."""
        count = len(self.without)
        return (count - 1) / count * float(((self.without - self.without.mean()) ** 2).sum())


@dataclass(frozen=True)
class Pairs:
    """What the pairs at one activation say."""

    square: Deleted  # ‖S‖_F²
    dots: Array  # (samples, K, K) of the first group, u_k · y_l
    lengths: Array  # (K,) of its y, squared
    least_variance: float  # of the square, from the pairs of a fresh group
    trace: float
    trace_variance: float
    least_spectral: float  # lower bound of ‖S‖₂; 0 where it was not asked for
    rows: int  # of the matrix over all samples
    token_trace: Tensor
    token_error: Tensor

    def _without_noise(self, anchor: Pairs) -> Deleted:
        r"""‖S‖_F² less what two statistics of mean zero say about its noise.

        With D⁰ of the probes where they started and D of the same probes here,

            mean D⁰_kl² − mean ‖y⁰_k‖²   and   mean D_kl D⁰_kl − mean ‖y_k‖²,   k ≠ l,

        are estimates of ‖S⁰‖² and ‖JᵀS⁰‖² less better ones. Minus the first plus twice the second
        leaves (D_kl − D⁰_kl)(D_lk − D⁰_kl): second order in the distance of J from a rotation.
        """
        start = (anchor.dots + np.swapaxes(anchor.dots, 1, 2)) / 2
        here = (self.dots + np.swapaxes(self.dots, 1, 2)) / 2
        controls = [
            _over_pairs((start * start).sum(0) - _means(anchor.lengths)),
            _over_pairs((start * here).sum(0) - _means(self.lengths)),
        ]
        noise = np.stack([c.without - c.without.mean() for c in controls], axis=1)
        scale = np.linalg.norm(noise, axis=0)
        if not (scale > 0).all():
            return self.square
        wanted = self.square.without - self.square.without.mean()
        factors = np.linalg.lstsq(noise / scale, wanted, rcond=1e-8)[0] / scale
        square = self.square
        for control, factor in zip(controls, factors, strict=True):
            square = square.minus(control, float(factor))
        # The factors were fitted: as many degrees of freedom are lost.
        left = 1 / np.sqrt(1 - len(controls) / (len(wanted) - 1))
        return Deleted(square.value, square.value + (square.without - square.value) * left)

    def probed(self, anchor: Pairs | None = None) -> Probed:
        """Values and 95 % intervals; anchor: where the far pairs came from."""
        square = self.square if anchor is None else self._without_noise(anchor)
        value = max(square.value, 0.0)
        # Few lengths spread too little when one direction holds the norm; their pairs know it.
        variance = max(square.variance, self.least_variance)
        energy = Energy(
            np.array(value), np.array(variance), np.array(0.0),
            np.array(len(square.without) - 1.0), np.array(0.0),
        )  # fmt: skip
        low, high = (float(end) for end in energy.interval())
        if value == 0:  # nothing but noise
            high = 3 * float(np.sqrt(variance))
        least = max(self.least_spectral, float(np.sqrt(low / self.rows)))
        reach = TAIL * float(np.sqrt(self.trace_variance))
        return Probed(
            norm=float(np.sqrt(value)),
            norm_interval=(float(np.sqrt(low)), float(np.sqrt(high))),
            trace=self.trace,
            trace_interval=(self.trace - reach, self.trace + reach),
            spectral=(min(least, float(np.sqrt(high))), float(np.sqrt(high))),
            token_trace=self.token_trace,
            token_error=self.token_error,
        )


def pairs_of(sketch: Sketch, samples: int, *, spectral: bool = False) -> Pairs:
    """Samples are independent: their matrices are diagonal blocks and never mixed."""
    groups = sketch.groups
    count = len(groups[0][0])
    u = torch.stack([g[0] for g in groups], dim=1)  # (K, groups, *shape)
    y = torch.stack([g[1] for g in groups], dim=1)
    tokens = (u * y).sum(1)
    tokens = tokens.reshape(count, samples, -1, tokens.shape[-1]).sum(-1).cpu().double()
    u, y = (t.reshape(count * len(groups), samples, -1).transpose(0, 1) for t in (u, y))
    dots = (u @ y.mT).cpu().double().numpy()
    dots = dots.reshape(samples, count, len(groups), count, len(groups))
    own = np.einsum("skglg->sgkl", dots)  # (samples, groups, K, K)
    apart = ~np.eye(count, dtype=bool)
    spread = (own**2 + own * np.swapaxes(own, 2, 3)).sum((0, 1))[apart].mean()

    weights = np.einsum("skglh,slhkg->kl", dots, dots)
    least_variance = 0.0
    if sketch.fresh is not None:
        images = y.reshape(samples, count, len(groups), -1)[:, :, -1]
        grams = (images @ images.mT).cpu().double().numpy()
        least_variance = 2 / count * float((grams**2).sum(0)[apart].mean())
        local = (own[:, -1] * np.swapaxes(own[:, -1], 1, 2)).sum(0)
        weights = weights - local + _means(_squares(sketch.fresh[1]))
    return Pairs(
        square=_over_pairs(weights),
        dots=own[:, 0],
        lengths=_squares(groups[0][1]),
        least_variance=least_variance,
        trace=float(tokens.sum((1, 2)).mean()),
        trace_variance=float(spread) / count,
        least_spectral=_least_spectral(
            u, y, count, fresh=len(groups) == 1 and sketch.fresh is not None
        )
        if spectral
        else 0.0,
        rows=samples * u.shape[-1],
        token_trace=tokens.mean(0),
        token_error=tokens.std(0) / count**0.5,
    )


def _squares(vectors: Tensor) -> Array:
    found: Array = vectors.reshape(len(vectors), -1).pow(2).sum(1).cpu().double().numpy()
    return found


def _means(values: Array) -> Array:
    return (values[:, None] + values[None]) / 2


def _over_pairs(weights: Array) -> Deleted:
    """The mean over pairs k ≠ l of a symmetric table."""
    count = len(weights)
    rows = weights.sum(1) - np.diagonal(weights)
    whole = rows.sum()
    without = (whole - 2 * rows) / ((count - 1) * (count - 2))
    return Deleted(float(whole / (count * (count - 1))), without)


def _least_spectral(u: Tensor, y: Tensor, count: int, *, fresh: bool) -> float:
    """A lower bound of ‖S‖₂: |vᵀSv| for v from one half of the probes, estimated by the other.

    u, y: (samples, K · groups, n), the groups of a probe side by side. v is where S takes the first
    half, so that it is independent of the pairs that measure it; three standard errors come off,
    as the larger of two bounds is taken.
    """
    groups = u.shape[1] // count
    best = 0.0
    if fresh:  # ‖S Ω‖₂ ≤ ‖S‖₂ ‖Ω‖₂
        images, probes = (torch.linalg.eigvalsh(t @ t.mT)[:, -1] for t in (y, u))
        best = float((images / probes).max().clamp_min(0).sqrt())
    half = count // 2 * groups
    for learn, test in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
        images = y[:, learn]
        values, vectors = torch.linalg.eigh(images @ images.mT)
        sample = int(values[:, -1].argmax())
        v = vectors[sample, :, -1] @ images[sample]
        v = v / torch.linalg.norm(v).clamp_min(torch.finfo(v.dtype).tiny)
        forms = (u[sample, test] @ v) * (y[sample, test] @ v)
        forms = forms.reshape(-1, groups).sum(1)
        error = float(forms.std()) / len(forms) ** 0.5
        best = max(best, abs(float(forms.mean())) - 3 * error)
    return best
