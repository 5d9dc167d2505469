r"""A direction is walked before it is recommended: the change of the loss predicted and measured.

The quadratic model L(θ + s d) − L(θ) ≈ s g·d + s²/2 dᵀHd of a unit direction d need not hold even
for short steps, and d was computed from the very data on which it promises most. A step is
therefore taken at several lengths, on the data at hand and on data that were held out, beside what
one would do otherwise (steepest descent of the same length, or the present learning rate).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.analysis.landscape.line import Line
from curvatlas.operators.per_sample import own_pieces
from curvatlas.problem import Batch, Problem
from curvatlas.results import Interval, Result
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.estimate import half_width

LENGTHS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # of a step, in ‖θ‖
_AGREES = 0.5  # of the predicted fall: what a measured one reaches at least
_SEVERAL = 2  # lengths at which a fall is to be seen
_GROUPS = 32  # of held-out samples: their scatter gives the interval
_ROUNDING = 16  # eps · loss, of a difference of two losses


@dataclass(frozen=True, kw_only=True)
class Trial(Result):
    """Steps along a direction: predicted, measured on the data at hand and on held-out data."""

    direction: str  # "the most negative eigenvector"
    lengths: tuple[float, ...]  # ‖step‖
    predicted: tuple[float, ...]  # change of the loss by the quadratic model
    measured: tuple[float, ...]  # on the data at hand
    rounding: float  # of a measured change
    instead: str  # what else one would do: "steepest descent of the same length"
    instead_measured: tuple[float, ...]
    held_out: tuple[float, ...] = ()  # change on data the direction was not computed from
    held_out_intervals: tuple[Interval, ...] = ()  # 95 %, over samples
    instead_held_out: tuple[float, ...] = ()

    @property
    def fell_at(self) -> tuple[float, ...]:
        """Lengths at which the loss of the data at hand fell as predicted, beyond rounding."""
        return tuple(
            length
            for length, predicted, measured in zip(
                self.lengths, self.predicted, self.measured, strict=True
            )
            if predicted < 0 and measured <= _AGREES * predicted and measured < -self.rounding
        )

    @property
    def better_at(self) -> tuple[float, ...]:
        """Those of them that lowered it further than anything that was tried instead."""
        best = min(self.instead_measured)
        pairs = zip(self.lengths, self.measured, strict=True)
        return tuple(s for s, change in pairs if s in self.fell_at and change < best)

    @property
    def confirmed_at(self) -> tuple[float, ...]:
        """Those of them that did so on held-out data, too."""
        if not self.held_out:
            return ()
        best = min(self.instead_held_out)
        rows = zip(self.lengths, self.held_out, self.held_out_intervals, strict=True)
        return tuple(
            s for s, change, (_, high) in rows if s in self.better_at and high < 0 and change < best
        )

    @property
    def confirmed(self) -> bool:
        """Whether several lengths are confirmed."""
        return len(self.confirmed_at) >= _SEVERAL

    @property
    def value(self) -> float:
        """The deepest confirmed fall of the loss on held-out data; 0 where there is none."""
        pairs = zip(self.lengths, self.held_out, strict=False)
        return min((change for s, change in pairs if s in self.confirmed_at), default=0.0)

    @property
    def place(self) -> str:
        """What the point is, of steps along negative curvature.

        A saddle is where the gradient is small, and what small means is measured: steps along the
        negative curvature lower the loss as their curvature says and further than any step along
        the gradient does.
        """
        if len(self.better_at) >= _SEVERAL:
            return "a saddle: negative curvature lowers the loss further than the gradient does"
        return "no saddle: steps along it lower the loss no further than the gradient does"

    @property
    def verdict(self) -> str:
        """What the measurements say of the direction, in words."""
        if self.confirmed:
            return "the loss fell as predicted, on held-out data too"
        if len(self.fell_at) < _SEVERAL:
            return "the loss did not fall as predicted"
        if len(self.better_at) < _SEVERAL:
            return f"{self.instead} lowered the loss as much or more"
        if not self.held_out:
            return "not tried on held-out data, as none were given"
        return "on held-out data no such fall was seen"

    @property
    def steps(self) -> str:
        """Every step with what was predicted and what was measured."""
        rows = [
            f"‖step‖ {_list(self.lengths, '.2g')}: predicted {_list(self.predicted)}, measured "
            f"{_list(self.measured)} (± {self.rounding:.0e}, rounding)"
        ]
        if self.held_out:
            halves = [(high - low) / 2 for low, high in self.held_out_intervals]
            pairs = zip(self.held_out, halves, strict=True)
            told = ", ".join(f"{value:+.2g} ± {half:.1g}" for value, half in pairs)
            rows.append(f"on held-out data {told} (95 %)")
        rows.append(f"{self.instead} {_list(self.instead_measured)}")
        return "; ".join(rows)

    def _derived(self) -> dict[str, Any]:
        told = {"sentence": str(self), "verdict": self.verdict, "confirmed": self.confirmed}
        return {**told, "place": self.place} if "negative" in self.direction else told

    def __str__(self) -> str:
        return f"{self.direction}: {self.verdict} ({self.steps})"


def _list(values: Sequence[float], form: str = "+.2g") -> str:
    return ", ".join(format(value, form) for value in values)


def along_negative_curvature(
    problem: Problem, ends: Eigenpairs, gradient: Tensor, held_out: Problem | None
) -> Trial | None:
    """Downhill along the eigenvector of the smallest eigenvalue, beside steepest descent.

    None where the weights or the data are spread over processes: nothing is tried there.
    """
    if problem.spread or parallel.world_size() > 1:
        return None
    direction = ends.vectors[:, -1].to(gradient)
    direction = direction / direction.norm()
    slope = float(gradient @ direction)
    if slope > 0:
        direction, slope = -direction, -slope
    bend = float(ends.values[-1])
    size = float(torch.linalg.vector_norm(problem.parameters)) or 1.0
    lengths = [share * size for share in LENGTHS]
    norm = float(gradient.norm())
    down = -gradient / norm if norm > 0 else torch.zeros_like(gradient)
    return _tried(
        problem,
        held_out,
        words="the most negative eigenvector, downhill",
        lengths=lengths,
        path=(direction, lengths),
        predicted=[s * slope + s * s / 2 * bend for s in lengths],
        instead="steepest descent of the same length",
        other_path=(down, lengths),
    )


def along_the_gradient(
    problem: Problem,
    gradient: Tensor,
    *,
    curvature: float,
    rate: float,
    rates: Sequence[float],
    held_out: Problem | None,
) -> Trial | None:
    """One step of gradient descent at other rates, beside one at the present rate.

    curvature: gᵀHg / ‖g‖².
    """
    if problem.spread or parallel.world_size() > 1:
        return None
    square = float(gradient @ gradient)
    return _tried(
        problem,
        held_out,
        words=f"one step of gradient descent at rates {_list(rates, '.2g')}",
        lengths=[other * square**0.5 for other in rates],
        path=(-gradient, rates),
        predicted=[(-other + other * other / 2 * curvature) * square for other in rates],
        instead=f"one step at the present rate {rate:.3g}",
        other_path=(-gradient, [rate] * len(rates)),
    )


# A direction (P,) and how far to go along it.
_Path = tuple[Tensor, Sequence[float]]


def _tried(
    problem: Problem,
    held_out: Problem | None,
    *,
    words: str,
    lengths: Sequence[float],
    path: _Path,
    predicted: Sequence[float],
    instead: str,
    other_path: _Path,
) -> Trial:
    loss, measured, _ = _changes(problem, path)
    apart: list[float] = []
    halves: list[float] = []
    apart_instead: list[float] = []
    if held_out is not None:
        _, apart, halves = _changes(held_out, path)
        apart_instead = _changes(held_out, other_path)[1]
    return Trial(
        direction=words,
        lengths=tuple(lengths),
        predicted=tuple(predicted),
        measured=tuple(measured),
        rounding=_ROUNDING * torch.finfo(problem.dtype).eps * abs(loss),
        instead=instead,
        instead_measured=tuple(_changes(problem, other_path)[1]),
        held_out=tuple(apart),
        held_out_intervals=tuple(
            (value - half, value + half) for value, half in zip(apart, halves, strict=True)
        ),
        instead_held_out=tuple(apart_instead),
    )


def _changes(problem: Problem, path: _Path) -> tuple[float, list[float], list[float]]:
    """The loss, its change at every place of the path, and the 95 % half-widths over samples.

    By forward passes only. A data set of one group has no scatter: its half-width is infinite.
    """
    groups = _groups(problem)
    weights = np.array([batch.count for batch in groups], dtype=np.float64)
    shares, scale = weights / weights.sum(), weights.sum() / problem.normaliser
    line, places = Line(problem, path[0]), path[1]
    before, *after = (np.array(line.values_by_batch(groups, at=t)) for t in (0.0, *places))
    changes, halves = [], []
    for losses in after:
        if not np.isfinite(losses).all():  # a step that leaves the numbers lowers nothing
            changes.append(math.inf)
            halves.append(math.inf)
            continue
        difference = losses - before
        changes.append(float(shares @ difference) * scale)
        scatter = half_width(shares, difference[:, None], exact=True) if len(groups) > 1 else None
        halves.append(math.inf if scatter is None else scatter * scale)
    return float(shares @ before) * scale, changes, halves


def _groups(problem: Problem) -> list[Batch]:
    """The data in about 32 groups, or its batches where they cannot be cut."""
    if not problem.separable:
        return list(problem.batches())
    samples = sum(batch.samples for batch in problem.batches())
    return list(own_pieces(problem, max(1, math.ceil(samples / _GROUPS))))
