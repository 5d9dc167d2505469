r"""PAC-Bayes bounds of loss and error on new samples, with the noise chosen by curvature.

For n independent samples, a loss in [0, 1], a prior P = N(w₀, s² I) that was fixed before the data
were seen and, with probability 1 − δ, every posterior Q = N(w, diag σ²) at once (Maurer 2004):

    kl( E_Q L̂ ‖ E_Q L ) ≤ (KL(Q ‖ P) + log(2 √n / δ)) / n ,
    KL = ½ Σ_i (σ_i²/s² + (w_i − w₀_i)²/s² − 1 − log σ_i²/s²).

The bound is on the mean loss of the network with noise σ on its weights. E_Q L̂ is measured by m
draws, whose own uncertainty is bounded by kl(L̂_m ‖ E_Q L̂) ≤ log(2/δ')/m. s² comes from the grid
e^{j/10}, j ∈ ℤ, paid for by the union bound. To second order E_Q L̂ = L̂ + ½ Σ_i h_i σ_i², h the
diagonal of H_o, and the best noise is

    σ_i² = 1/(1/s² + β h_i)      (diagonal)        σ² = 1/(1/s² + β h̄)      (isotropic),

with β searched by the bound itself, on draws of its own. Cross-entropy is cut off at
``loss_bound`` to lie in an interval; the error (share of wrong classes) lies in one by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

from curvatlas.errors import ProblemError
from curvatlas.fits import Array
from curvatlas.operators.per_sample import count_samples, sample_axis_of_outputs
from curvatlas.problem import Batch, CrossEntropy, Problem
from curvatlas.problem.kernels import unwatched
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.spectra.checkpoint import generator

_GRID = 10  # points of the prior's variance a factor e
_GRID_MASS = math.pi**2 / 3 - 1  # Σ over j ∈ ℤ of 1/(|j| + 1)²
_SEARCH_DRAWS = 6  # of the noise, for each β that is tried
_ABREAST = 2**17  # weights, and outputs, of the draws that are computed side by side
_CLIP = 4  # the loss is cut off at so many times log C, the loss of guessing
_DRAWN_SHARE = 0.2  # of δ, for the uncertainty of the draws


@dataclass(frozen=True, kw_only=True)
class PacBayes(Result):
    """An upper bound, with probability ``confidence``, of the loss with noise on the weights."""

    posterior: str  # "isotropic" or "diagonal"
    value: float  # bound of the cut-off loss on new samples
    loss: float  # of the noisy network on the training samples, mean over the draws
    loss_bound: float  # the loss is cut off here: the trivial bound
    error_bound: float | None  # bound of the share of wrong classes; None without classes
    error: float | None  # on the training samples
    divergence: float  # KL(Q ‖ P)
    prior_scale: float  # s
    posterior_scale: float  # root mean square of σ
    samples: int  # n
    draws: int  # m
    confidence: float  # 1 − δ, for all numbers of both posteriors together
    test_loss: float | None = None  # of the noisy network on test data, cut off alike
    test_error: float | None = None
    products: int = 0

    @property
    def vacuous(self) -> bool:
        """Whether guessing is as good as what the bound promises."""
        guessing = self.loss_bound / _CLIP
        return self.value >= guessing and (self.error_bound is None or self.error_bound >= 0.9)

    def __str__(self) -> str:
        text = (
            f"PAC-Bayes, {self.posterior} posterior: loss on new samples below {self.value:.4g} "
            f"({self.confidence:.0%}; {self.loss:.4g} on the {self.samples} seen, noise "
            f"{self.posterior_scale:.2g} on the weights, KL {self.divergence:.4g})"
        )
        if self.error_bound is not None and self.error is not None:
            text += f", error below {self.error_bound:.1%} ({self.error:.1%} seen)"
        if self.test_loss is not None:
            text += f"; measured on test data: {self.test_loss:.4g}"
        return text + (", vacuous" if self.vacuous else "")


def pac_bayes(
    problem: Problem,
    curvature: Tensor,
    *,
    prior: Tensor | None = None,
    test: Problem | None = None,
    loss_bound: float | None = None,
    draws: int = 100,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[PacBayes, PacBayes]:
    """The bounds with the isotropic and with the diagonal posterior, both optimised.

    curvature: diag H_o, (P,), by which the noise is chosen (any numbers keep the bound true).
    prior: (P,) its mean, fixed without the data, such as the weights at initialisation (default:
    zero, and one for the gains of norms). test: the same model on test data.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, got {confidence!r}.")
    if draws < 2:
        raise ValueError(f"the noise has to be drawn at least twice, got draws={draws}.")
    problem.require_mean("a PAC-Bayes bound")
    problem.check()
    mean = _default_prior(problem) if prior is None else prior.to(problem.parameters)
    if mean.shape != (problem.size,):
        raise ValueError(
            f"the prior's mean is a flat vector of {problem.size}, got {tuple(mean.shape)}."
        )
    scores = _Scores(problem, loss_bound)
    failure = 1 - confidence
    bound = _Bound(
        distance=(problem.parameters - mean).double().square(),
        samples=count_samples(problem),
        kinds=scores.kinds,
        draws=draws,
        failure=failure,
    )
    entries = curvature.double().clamp_min(0.0)
    even = torch.full_like(entries, float(entries.mean()))
    tested = None if test is None else _Scores(test, scores.loss_bound)
    found = [
        _optimised(name, problem, scores, tested, bound, h, draws, confidence, seed)
        for name, h in (("isotropic", even), ("diagonal", entries))
    ]
    return found[0], found[1]


def _default_prior(problem: Problem) -> Tensor:
    """Zero, and one for the gains of norms, whose zero is no network."""
    mean = torch.zeros_like(problem.parameters)
    for piece in problem.anatomy:
        if piece.sublayer == "norm" and piece.role == "gamma":
            mean[piece.indices.to(mean.device)] = 1.0
    return mean


@dataclass(frozen=True)
class _Posterior:
    deviations: Tensor  # (P,) σ
    prior_scale: float
    divergence: float
    grid_cost: float  # log(1/mass of the grid point)


@dataclass(frozen=True)
class _Bound:
    """The arithmetic of the bound."""

    distance: Tensor  # (P,) (w − w₀)²
    samples: int
    kinds: int  # bounded quantities: the loss, and the error where there are classes
    draws: int
    failure: float  # δ

    def posterior(self, curvature: Tensor, inverse_temperature: float) -> _Posterior:
        """σ_i² = 1/(1/s² + β h_i) with the s² of the grid that makes KL least."""
        size, apart = len(self.distance), float(self.distance.sum())
        square = max(apart / size, 1e-12)
        for _ in range(100):  # ∂KL/∂s² = 0: s² = mean(σ² + (w − w₀)²), which depends on σ
            variance = 1 / (1 / square + inverse_temperature * curvature)
            new = (float(variance.sum()) + apart) / size
            if abs(new - square) <= 1e-3 * square:
                break
            square = new
        place = round(_GRID * math.log(square))
        square = math.exp(place / _GRID)
        variance = 1 / (1 / square + inverse_temperature * curvature)
        ratio = variance / square
        divergence = 0.5 * float((ratio - 1 - ratio.log()).sum() + apart / square)
        return _Posterior(
            deviations=variance.sqrt(),
            prior_scale=math.sqrt(square),
            divergence=divergence,
            grid_cost=math.log(_GRID_MASS * (abs(place) + 1) ** 2),
        )

    def above(self, share: float, posterior: _Posterior, *, measured: bool = True) -> float:
        """Of a quantity in [0, 1] whose mean over draws on the training samples is ``share``."""
        if measured:  # 2 posteriors × kinds numbers are claimed at once
            claim = _DRAWN_SHARE * self.failure / (2 * self.kinds)
            share = inverse_kl(share, math.log(2 / claim) / self.draws)
        n = self.samples
        failure = (1 - _DRAWN_SHARE) * self.failure / self.kinds
        cost = posterior.divergence + math.log(2 * math.sqrt(n) / failure) + posterior.grid_cost
        return inverse_kl(share, cost / n)


def inverse_kl(share: float, cost: float) -> float:
    """The largest p with share·log(share/p) + (1 − share)·log((1 − share)/(1 − p)) ≤ cost."""
    share = min(max(share, 0.0), 1.0)

    def excess(p: float) -> float:
        first = share * math.log(share / p) if share > 0 else 0.0
        second = (1 - share) * math.log((1 - share) / (1 - p)) if share < 1 else 0.0
        return first + second - cost

    highest = 1 - 1e-15
    if share >= highest or excess(highest) <= 0:
        return 1.0
    return float(brentq(excess, max(share, 1e-300), highest, xtol=1e-12))


class _Scores:
    """Mean cut-off loss (in [0, 1]) and share of wrong classes over samples, at any weights."""

    def __init__(self, problem: Problem, loss_bound: float | None) -> None:
        self.problem = problem
        self.classes = isinstance(problem.loss, CrossEntropy) and all(
            isinstance(batch.targets, Tensor) and not batch.targets.is_floating_point()
            for batch in problem.batches()
        )
        if loss_bound is None:
            if not self.classes:
                raise ProblemError(
                    f"a PAC-Bayes bound needs a bounded loss, and {problem.loss.name!r} has no "
                    "bound of its own: pass loss_bound=, the value it is cut off at."
                )
            loss_bound = _CLIP * math.log(max(self._outputs(), 2))
        if not loss_bound > 0 or not math.isfinite(loss_bound):
            raise ValueError(f"loss_bound is a positive number, got {loss_bound!r}.")
        self.loss_bound = loss_bound
        self.kinds = 2 if self.classes else 1
        self._at_once = self._abreast() if self.classes else 1
        self._compared = False  # draws side by side with one alone

    def _abreast(self) -> int:
        """How many draws may be computed side by side: of small models only, where it pays."""
        problem = self.problem
        targets = sum(int(batch.targets.numel()) for batch in problem.batches())
        outputs = targets * self._outputs()
        return max(1, min(_SEARCH_DRAWS, _ABREAST // max(problem.size, outputs, 1)))

    def _outputs(self) -> int:
        problem = self.problem
        with problem.evaluating(), torch.no_grad():
            batch = next(problem.batches())
            return int(problem.outputs(batch, {}).shape[-1])

    def at(self, places: Iterable[Tensor]) -> list[tuple[float, float]]:
        """(cut-off loss / loss_bound, error) at each weights; the error is nan without classes."""
        found: list[tuple[float, float]] = []
        with self.problem.evaluating(), torch.no_grad():
            waiting = iter(places)
            while some := list(itertools.islice(waiting, self._at_once)):
                found += self._side_by_side(some) or list(map(self._alone, some))
        return found

    def _mean(self, rows: Tensor) -> tuple[float, float]:
        loss, error = rows.nan_to_num(nan=1.0).mean(0).tolist()
        return loss, error if self.classes else math.nan

    def _alone(self, weights: Tensor) -> tuple[float, float]:
        layout = self.problem.layout
        pieces = layout.split(weights)
        leaves = {n: p.squeeze(0) for n, p in zip(layout.names, pieces, strict=True)}
        return self._mean(torch.cat(list(self._samples(leaves))))

    def _side_by_side(self, places: list[Tensor]) -> list[tuple[float, float]] | None:
        """``at`` of a few places in one pass; None, from then on, where the model has none."""
        problem = self.problem
        if len(places) < 2:
            return None
        leaves = problem.layout.split(torch.stack(places, -1))  # (draws, *shape) each
        named = dict(zip(problem.layout.names, leaves, strict=True))

        def rows(own: dict[str, Tensor]) -> Tensor:
            return torch.cat(list(self._samples(own)))

        try:
            every = torch.func.vmap(rows)(named)  # (draws, n, 2)
        except (RuntimeError, ProblemError):  # an operation that vmap does not know
            self._at_once = 1
            return None
        means = [self._mean(one) for one in every]
        if not self._compared:
            plain = self._alone(places[0])
            rounding = torch.finfo(problem.dtype).eps ** 0.5
            if not math.isclose(plain[0], means[0][0], rel_tol=rounding, abs_tol=rounding):
                self._at_once = 1
                return None
            self._compared = True
        return means

    def _samples(self, leaves: dict[str, Tensor]) -> Iterator[Tensor]:
        problem = self.problem
        for batch in problem.batches():
            if self.classes:
                yield self._of_classes(batch, problem.outputs(batch, leaves))
                continue
            for single in batch.singles(problem.loss.count):
                value = problem.loss.value(problem.outputs(single, leaves), single.targets)
                cut = float(value.clamp(max=self.loss_bound)) / self.loss_bound
                yield torch.tensor([[cut, cut]], dtype=torch.float64)

    @unwatched
    def _of_classes(self, batch: Batch, outputs: Tensor) -> Tensor:
        """(samples, 2): means over the valid targets of each sample."""
        loss = self.problem.loss
        assert isinstance(loss, CrossEntropy)
        valid = batch.targets != loss.ignore_index
        known = batch.targets.masked_fill(~valid, 0)
        logits = outputs.double()
        picked = logits.gather(-1, known.unsqueeze(-1)).squeeze(-1)
        cut = (logits.logsumexp(-1) - picked).clamp(max=self.loss_bound) / self.loss_bound
        wrong = (logits.argmax(-1) != known).double()
        axis = sample_axis_of_outputs(batch) if known.ndim > 1 else 0
        counted = valid.movedim(axis, 0).reshape(valid.shape[axis], -1)  # (samples, targets)
        both = torch.stack([cut, wrong], -1).movedim(axis, 0).reshape(*counted.shape, 2)
        totals = counted.sum(1, keepdim=True)
        means: Tensor = (both * counted.unsqueeze(-1)).sum(1) / totals.clamp_min(1)
        return means[totals.squeeze(1) > 0]


def _optimised(
    name: str,
    problem: Problem,
    scores: _Scores,
    tested: _Scores | None,
    bound: _Bound,
    curvature: Tensor,
    draws: int,
    confidence: float,
    seed: int,
) -> PacBayes:
    center = problem.parameters

    def noisy(of: _Scores, posterior: _Posterior, count: int, first: int) -> Array:
        """(count, 2): loss and error for draws of the noise."""

        def places() -> Iterator[Tensor]:
            for draw in track(range(count), f"{name} noise", total=count):
                noise = torch.randn(
                    len(center), generator=generator(first + draw), dtype=torch.float64
                )
                yield center + (posterior.deviations * noise.to(posterior.deviations)).to(center)

        return np.array(of.at(places()))

    def bounded(logarithm: float) -> float:
        posterior = bound.posterior(curvature, math.exp(logarithm))
        mean = noisy(scores, posterior, _SEARCH_DRAWS, seed + 10**6)[:, 0].mean()
        value = bound.above(float(mean), posterior, measured=False)
        return value + 1e-9 * posterior.divergence / bound.samples  # a slope where all are vacuous

    # the quadratic bound's own optimum has β ≈ n/(loss bound): search around it
    middle = math.log(bound.samples / scores.loss_bound)
    grid = [middle + step for step in (-4, -2, 0, 2, 4, 6, 8)]
    values = [bounded(place) for place in grid]
    best = int(np.argmin(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    search = minimize_scalar(bounded, bounds=(low, high), method="bounded", options={"maxiter": 6})
    place = float(search.x) if search.fun < values[best] else grid[best]
    posterior = bound.posterior(curvature, math.exp(place))
    loss, error = noisy(scores, posterior, draws, seed + 2 * 10**6).mean(0)
    test = None
    if tested is not None:
        test = noisy(tested, posterior, draws, seed + 2 * 10**6).mean(0)
    classes = scores.classes
    return PacBayes(
        posterior=name,
        value=scores.loss_bound * bound.above(float(loss), posterior),
        loss=scores.loss_bound * float(loss),
        loss_bound=scores.loss_bound,
        error_bound=bound.above(float(error), posterior) if classes else None,
        error=float(error) if classes else None,
        divergence=posterior.divergence,
        prior_scale=posterior.prior_scale,
        posterior_scale=float(posterior.deviations.square().mean().sqrt()),
        samples=bound.samples,
        draws=draws,
        confidence=confidence,
        test_loss=None if test is None else scores.loss_bound * float(test[0]),
        test_error=None if test is None or not classes else float(test[1]),
    )
