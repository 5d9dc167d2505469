r"""Does the minimum settle like 1/k when the model is trained again for every k?

At fixed weights L_{k+1}(w) − L_k(w) = (ℓ_{k+1}(w) − L_k(w))/(k+1) is an identity, whatever the
model (``analysis/landscape/convergence.py``). Here the weights follow the data: w*_k is the minimum
that training on k samples comes to, and for each optimizer and schedule

    fixed      |L_{k+1}(w*_k)   − L_k(w*_k)|    the identity, at the minimum
    followed   |L_{k+1}(w̃_{k+1}) − L_k(w*_k)|   w̃: the same minimum, moved by the new sample
    retrained  |L_{k+1}(w*_{k+1}) − L_k(w*_k)|  trained again from the start on k + 1 samples
    control    |L_k(w*'_k)      − L_k(w*_k)|    trained again on the same k: nothing was added
    noise      |(z − L_k(w*_k))/(k+1)|          z: noise with the moments of unused samples' losses

over random orders of the samples. L_k holds the penalty μ‖w − w₀‖²/2 on the way from the weights
that training starts from: without a penalty cross-entropy has no minimum, and with one on ‖w‖ a
model with norms has none either, since norms let weights shrink for nothing. Training is polished
by L-BFGS on all k samples until the gradient is small; its norm is kept, and what did not come
there is flagged and left out of the fits.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from scipy import optimize, stats
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.analysis.landscape.convergence import (
    FEWEST_SIZES,
    FIRST,
    Curve,
    differ,
    matched_noise,
    random_orders,
)
from curvatlas.errors import ProblemError
from curvatlas.fits import Array, power_law
from curvatlas.operators.per_sample import count_samples, pieces, subset, weighted_losses
from curvatlas.problem import Batch, Problem
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.runs import Run
from curvatlas.surveying import Step, recorded
from curvatlas.zoo.training import set_rates

Schedule = Literal["cosine", "constant"]
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]

# name → class, learning rate, other options
_OPTIMIZERS: dict[str, tuple[Any, float, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, 0.1, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, 5e-3, {}),
    "rmsprop": (torch.optim.RMSprop, 2e-3, {}),
    "nadam": (torch.optim.NAdam, 5e-3, {}),
    "adagrad": (torch.optim.Adagrad, 3e-2, {}),
}
OPTIMIZERS = ("sgd", "adam", "rmsprop")
SCHEDULES: tuple[Schedule, ...] = ("cosine", "constant")
CURVES = ("fixed", "followed", "retrained", "control", "noise")
_FEWEST_ORDERS = 3
_SIZES = 5
_AT_ONCE = 256  # samples whose graphs exist at the same time
_LEVEL = 0.01  # of the tests behind a verdict


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RetrainedPoint(Result):
    """One optimizer and schedule at one k, over the orders (n,)."""

    optimizer: str
    schedule: str
    k: int
    loss: Tensor  # L_k(w*_k), penalty included
    changes: dict[str, Tensor]  # of CURVES: |difference of losses|
    gap: Tensor  # mean loss of the samples that were not used − that of the k
    trained_gradient: Tensor  # ‖∇L_k‖ where the optimizer ended, over that at the start
    gradient: Tensor  # the same at w*_k, the largest of the four minima
    converged: Tensor  # bool: every minimum of this order is one to the tolerance

    def __str__(self) -> str:
        return (
            f"{self.optimizer}, {self.schedule}, k = {self.k}: L = {float(self.loss.mean()):.4g}, "
            f"{int(self.converged.sum())} of {len(self.converged)} at a minimum"
        )


@dataclass(frozen=True, kw_only=True)
class RetrainedCell(Result):
    """One optimizer with one schedule: how its minima move with k."""

    optimizer: str
    schedule: str
    curves: dict[str, Curve]  # of CURVES
    loss: Curve  # L_k(w*_k)
    gap: Curve  # what the samples that were not used say
    against_noise: dict[str, float]  # exponent of retrained − that of noise, p-value
    control_p_value: float  # of "one sample more moves no more than training again"; NaN: unknown
    converged: float  # share of the minima that are one
    left_out: tuple[str, ...]  # k of which too few orders came to a minimum

    @property
    def verdict(self) -> str:
        """What adding a sample does to the retrained minimum, in words."""
        law = self.curves["retrained"].fit
        if law is None:
            return "too few numbers of samples at a minimum to fit an exponent"
        if self.control_p_value > _LEVEL:
            return (
                "one more sample moves the retrained minimum no more than training again does "
                f"(p = {self.control_p_value:.2g})"
            )
        gap, p = self.against_noise["difference"], self.against_noise["p_value"]
        if p > _LEVEL:
            return f"falls as averaging alone does (difference {gap:+.2f}, p = {p:.2g})"
        return f"falls otherwise than averaging alone does (difference {gap:+.2f}, p = {p:.1g})"

    def lines(self) -> list[str]:
        """What it prints: the verdict, an exponent a curve, what was left out."""
        rows = [f"{self.optimizer}, {self.schedule}: {self.verdict}"]
        rows += [f"  {name:10s} {curve.fit or 'no fit'}" for name, curve in self.curves.items()]
        rows.append(f"  {'gap':10s} {self.gap.fit or 'no fit'}")
        if self.converged < 1:
            rows.append(f"  NOT at a minimum: {1 - self.converged:.0%} of the runs, left out")
        return [*rows, *(f"  left out: {one}" for one in self.left_out)]

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, kw_only=True)
class RetrainedConvergence(Result):
    """Minima of every optimizer and schedule against the number of samples."""

    cells: tuple[RetrainedCell, ...]
    sizes: tuple[int, ...]
    orders: int
    samples: int
    penalty: float  # μ
    tolerance: float  # of the gradient's norm over that at the start, for a minimum

    def __getitem__(self, name: tuple[str, str]) -> RetrainedCell:
        for cell in self.cells:
            if (cell.optimizer, cell.schedule) == name:
                return cell
        known = ", ".join(f"{c.optimizer}/{c.schedule}" for c in self.cells)
        raise KeyError(f"there is no cell {name!r}: there are {known}.")

    def _rows(self) -> list[dict[str, Any]]:
        """A row a cell, curve and number of samples."""
        return [
            {"optimizer": cell.optimizer, "schedule": cell.schedule, "curve": name, **row}
            for cell in self.cells
            for name, curve in cell.curves.items()
            for row in curve._rows()
        ]

    def __str__(self) -> str:
        head = (
            f"minima of {self.sizes[0]} to {self.sizes[-1]} samples, {self.orders} random orders, "
            f"penalty {self.penalty:g}‖w − w₀‖²/2: exponents in k"
        )
        return "\n".join([head, *(line for cell in self.cells for line in cell.lines())])


# --- the experiment -------------------------------------------------------------------------------


def retrained_convergence(
    problem: Problem,
    *,
    optimizers: Sequence[str] | Mapping[str, MakeOptimizer] = OPTIMIZERS,
    schedules: Sequence[Schedule] = SCHEDULES,
    sizes: Sequence[int] | None = None,
    orders: int = 4,
    steps: int = 300,
    batch_size: int = 32,
    rates: Mapping[str, float] | None = None,
    penalty: float = 1e-2,
    polish: int = 500,
    tolerance: float = 1e-3,
    seed: int = 0,
    output: str | os.PathLike[str] | Run | None = None,
) -> RetrainedConvergence:
    """Train again for every number of samples k and fit how the minimum's loss settles.

    optimizers: of sgd, adam, rmsprop, nadam, adagrad; or name → function of the parameters that
        makes one (without weight decay of its own, which would move its minimum).
    schedules: "cosine", "constant". rates: learning rates other than the defaults, by optimizer.
    sizes: numbers of samples k, four or more from 10 on (default: 5 from 16 to half of the data).
    orders: random orders of the samples, each trained anew: the intervals are over them.
    steps, batch_size: of each training, which begins at the weights the model has now. Batches of
        all k samples leave nothing to chance: the control is zero there and is not compared.
    penalty: μ of μ‖w − w₀‖²/2 in L_k.
    polish: most iterations of L-BFGS on all k samples afterwards; 0 leaves the optimizer's end.
    tolerance: of ‖∇L_k‖ over its value at the start; above it a run is flagged and left out.
    output: a run folder, or an open ``Run``: every finished optimizer, schedule and k is stored,
        and the same call resumes it. The model itself is not changed.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"retrained_convergence takes a Problem, got a {type(problem).__name__}.")
    problem.require_one_process("retraining")
    problem.require_mean("retraining")
    if not problem.separable:
        raise ProblemError(
            "retraining on some of the samples needs samples that can be told apart: this loss or "
            "model mixes them."
        )
    makers = optimizers_of(optimizers, rates or {})
    check_schedules(schedules)
    samples = count_samples(problem)
    chosen = plan_sizes(sizes, samples)
    if orders < _FEWEST_ORDERS:
        raise ValueError(f"an interval over orders needs {_FEWEST_ORDERS} or more, got {orders}.")
    if steps < 1 or batch_size < 1 or polish < 0 or not tolerance > 0 or not penalty >= 0:
        raise ValueError(
            "retraining needs steps and batch_size of at least 1, polish and penalty of at least 0 "
            "and a positive tolerance."
        )
    trainer = _Trainer(problem, penalty, polish, tolerance)
    options = {
        "command": "retrained",
        "optimizers": list(makers),
        "rates": dict(rates or {}),
        "schedules": list(schedules),
        "sizes": chosen,
        "orders": orders,
        "steps": steps,
        "batch_size": batch_size,
        "penalty": penalty,
        "polish": polish,
        "tolerance": tolerance,
        "seed": seed,
    }
    permutations = list(random_orders(samples, orders, seed))

    def point(name: str, schedule: Schedule, k: int) -> RetrainedPoint:
        def train(places: Tensor, draw: int) -> Tensor:
            return trainer.trained(
                places, makers[name], schedule, steps=steps, batch_size=batch_size, seed=draw
            )

        rows = [
            _measured(trainer, order, k, train, seed + 2 * number)
            for number, order in enumerate(permutations)
        ]
        return _joined_point(name, schedule, k, rows)

    grid = [(name, schedule) for name in makers for schedule in schedules]

    def work(step: Step) -> RetrainedConvergence:
        every = track([(cell, k) for cell in grid for k in chosen], "retraining")
        points: dict[tuple[str, str], list[RetrainedPoint]] = {cell: [] for cell in grid}
        for (name, schedule), k in every:
            words = f"retrained.{_word(name)}.{schedule}.k{k}"
            points[name, schedule].append(step(words, functools.partial(point, name, schedule, k)))
        result: RetrainedConvergence = step(
            "retrained",
            lambda: RetrainedConvergence(
                cells=tuple(_cell(points[cell]) for cell in grid),
                sizes=tuple(chosen),
                orders=orders,
                samples=samples,
                penalty=penalty,
                tolerance=tolerance,
            ),
        )
        return result

    return recorded(problem, output, options, work)


def _word(name: str) -> str:
    """A name of the user's as one that can name a step."""
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name.lower())


def optimizers_of(
    optimizers: Sequence[str] | Mapping[str, MakeOptimizer], rates: Mapping[str, float]
) -> dict[str, MakeOptimizer]:
    """Name → function of the parameters."""
    if isinstance(optimizers, Mapping):
        if not optimizers:
            raise ValueError("no optimizer was given.")
        return dict(optimizers)
    names = list(dict.fromkeys(optimizers))
    unknown = [name for name in (*names, *rates) if name not in _OPTIMIZERS]
    if not names or unknown:
        raise ValueError(
            f"optimizers are {', '.join(_OPTIMIZERS)}, got {', '.join(unknown) or 'none'}: pass a "
            "mapping of names to functions of the parameters for others."
        )
    makers: dict[str, MakeOptimizer] = {}
    for name in names:
        kind, rate, more = _OPTIMIZERS[name]
        rate = rates.get(name, rate)
        if not 0 < rate < math.inf:
            raise ValueError(f"the learning rate of {name} is a positive number, got {rate}.")
        makers[name] = functools.partial(kind, lr=rate, **more)
    return makers


def check_schedules(schedules: Sequence[str]) -> None:
    """ValueError unless all are known."""
    known = get_args(Schedule)
    if not schedules or not set(schedules) <= set(known):
        raise ValueError(f"schedules are {', '.join(known)}, got {', '.join(schedules) or 'none'}.")


def plan_sizes(sizes: Sequence[int] | None, samples: int) -> list[int]:
    """The numbers of samples in order; one sample more must be there, and some to judge by."""
    most = samples - 2
    if sizes is None:
        drawn = np.geomspace(min(16, max(samples // 2, 1)), max(samples // 2, 1), _SIZES)
        chosen = sorted({round(size) for size in drawn})
    else:
        chosen = sorted({int(size) for size in sizes})
    usable = [k for k in chosen if FIRST <= k <= most]
    if len(usable) < max(FEWEST_SIZES, len(chosen)):
        raise ValueError(
            f"an exponent in k needs {FEWEST_SIZES} or more numbers of samples from {FIRST} to "
            f"{most} (two fewer than the {samples} there are), got {chosen}: give other sizes or "
            "more samples."
        )
    return usable


class _Trainer:
    """Copies of the model, trained on some of the samples and brought to a minimum."""

    def __init__(self, problem: Problem, penalty: float, polish: int, tolerance: float) -> None:
        problem.check()
        # In evaluation mode, but outside ``problem.evaluating``: first derivatives need none of
        # what it changes, and on small models it takes most of the time.
        whole = problem.with_batches(_joined(list(problem.batches())))
        self._problem = whole.with_model(copy.deepcopy(problem.model).eval())
        self._penalty, self._polish, self.tolerance = penalty, polish, tolerance
        self._start = problem.parameters

    def objective(self, places: Tensor) -> _Objective:
        """L_k on the samples at these places."""
        return _Objective(subset(self._problem, places), self._penalty, self._start)

    def trained(
        self,
        places: Tensor,
        make: MakeOptimizer,
        schedule: Schedule,
        *,
        steps: int,
        batch_size: int,
        seed: int,
    ) -> Tensor:
        """The weights after training on these samples; NaN where it diverged."""
        model = copy.deepcopy(self._problem.model)
        problem = subset(self._problem, places).with_model(model)
        weights = problem.named_weights()
        leaves = {name: weights[name] for name in problem.layout.names}
        begin = [leaf.detach().clone() for leaf in leaves.values()]
        update = make([leaf.requires_grad_() for leaf in leaves.values()])
        rates = [float(group["lr"]) for group in update.param_groups]
        random = torch.Generator().manual_seed(seed)
        count, size = len(places), min(batch_size, len(places))
        order = torch.randperm(count, generator=random)
        for step in range(steps):
            first = step % (count // size) * size
            if step and first == 0:
                order = torch.randperm(count, generator=random)
            some = subset(problem, order[first : first + size])
            set_rates(update, rates, step, steps, schedule)
            update.zero_grad()
            for batch in some.batches():
                loss = problem.loss.value(problem.outputs(batch, leaves), batch.targets)
                share = batch.count / some.total_count
                torch.autograd.backward(loss * share)
            for leaf, first_value in zip(leaves.values(), begin, strict=True):
                if leaf.grad is not None:
                    leaf.grad.add_(leaf.detach() - first_value, alpha=self._penalty)
            update.step()
        end = torch.cat([leaf.detach().reshape(-1) for leaf in leaves.values()])
        return end if bool(torch.isfinite(end).all()) else torch.full_like(end, math.nan)

    def minimum(self, objective: _Objective, start: Tensor) -> tuple[Tensor, float]:
        """Where L-BFGS comes to from ``start``, and ‖∇L_k‖ there over that at the first weights."""
        if not bool(torch.isfinite(start).all()):
            return start, math.nan
        first = objective.steepness(self._start)
        end = objective.minimised(start, self._polish, self.tolerance * first)
        return end, objective.steepness(end) / max(first, 1e-300)

    def remaining(self, objective: _Objective, weights: Tensor) -> float:
        """‖∇L_k‖ over that at the first weights."""
        return objective.steepness(weights) / max(objective.steepness(self._start), 1e-300)


class _Enough(Exception):
    """The gradient is small enough."""


class _Objective:
    """L_k(w) = mean loss + μ‖w − w₀‖²/2 and its gradient at any flat weights."""

    def __init__(self, problem: Problem, penalty: float, start: Tensor) -> None:
        self._problem, self._penalty, self._start = problem, penalty, start
        self._pieces = list(pieces(problem, _AT_ONCE))

    def __call__(self, weights: Tensor) -> float:
        return self.data_loss(weights) + self._penalty_at(weights)

    def _penalty_at(self, weights: Tensor) -> float:
        return self._penalty * float((weights - self._start).double().square().sum()) / 2

    def data_loss(self, weights: Tensor) -> float:
        """The mean loss without the penalty."""
        problem, leaves = self._problem, self._leaves(weights)
        total = 0.0
        with torch.no_grad():
            for batch in self._pieces:
                outputs = problem.outputs(batch, leaves)
                total += batch.count * float(problem.loss.value(outputs, batch.targets))
        return total / problem.total_count

    def both(self, weights: Tensor) -> tuple[float, Tensor]:
        """L_k and ∇L_k (P,)."""
        problem, total = self._problem, 0.0
        sums = torch.zeros_like(weights)
        for batch in self._pieces:
            leaves = {n: t.requires_grad_() for n, t in self._leaves(weights).items()}
            loss = problem.loss.value(problem.outputs(batch, leaves), batch.targets)
            rows = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            sums.add_(problem.layout.join(rows, like=sums), alpha=batch.count)
            total += batch.count * float(loss.detach())
        value = total / problem.total_count + self._penalty_at(weights)
        return value, sums / problem.total_count + self._penalty * (weights - self._start)

    def steepness(self, weights: Tensor) -> float:
        """‖∇L_k‖."""
        return float(self.both(weights)[1].norm())

    def minimised(self, start: Tensor, most: int, small: float) -> Tensor:
        """L-BFGS until ‖∇L_k‖ ≤ small / 10, at most ``most`` iterations."""
        if most == 0:
            return start
        ended: list[Tensor] = []

        def function(x: Array) -> tuple[float, Array]:
            weights = torch.from_numpy(x).to(start)
            value, gradient = self.both(weights)
            if float(gradient.norm()) <= small / 10:
                ended.append(weights.clone())
                raise _Enough  # scipy's own tests are of single entries and of rounding
            return value, gradient.double().cpu().numpy()

        how: Any = {"maxiter": most, "maxcor": 20, "gtol": 0.0, "ftol": 0.0}
        first = start.double().cpu().numpy()
        try:
            found = optimize.minimize(function, first, jac=True, method="L-BFGS-B", options=how)
        except _Enough:
            return ended[0]
        return torch.from_numpy(found.x).to(start)

    def _leaves(self, weights: Tensor) -> dict[str, Tensor]:
        layout = self._problem.layout
        rows = layout.split(weights.detach().unsqueeze(1))
        return {n: row.squeeze(0).clone() for n, row in zip(layout.names, rows, strict=True)}

    def sample_losses(self, weights: Tensor) -> Tensor:
        """ℓ_i of every sample, (n,)."""
        model = copy.deepcopy(self._problem.model)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in self._leaves(weights).items():
                named[name].copy_(values)
        return weighted_losses(self._problem.with_model(model))[1]


def _joined(batches: list[Batch]) -> list[Batch]:
    """Batches of one shape as one, from which samples are taken in one go; others as they are."""
    flat = [tree_flatten((batch.inputs, batch.targets)) for batch in batches]
    first = batches[0]
    assert first.layout is not None
    axes = first.layout.leaves
    for batch, (leaves, spec) in zip(batches, flat, strict=True):
        same = spec == flat[0][1] and batch.layout is not None and batch.layout.leaves == axes
        if not same or any(
            axis is not None and _without(leaf, axis) != _without(other, axis)
            for leaf, other, axis in zip(leaves, flat[0][0], axes, strict=True)
        ):
            return batches
    merged = [
        column[0] if axis is None else torch.cat(column, dim=axis)
        for column, axis in zip(
            zip(*(leaves for leaves, _ in flat), strict=True), axes, strict=True
        )
    ]
    inputs, targets = tree_unflatten(merged, flat[0][1])
    whole = replace(first, inputs=inputs, targets=targets, count=sum(b.count for b in batches))
    whole.__dict__["layout"] = first.layout
    return [whole]


def _without(leaf: Tensor, axis: int) -> tuple[int, ...]:
    return (*leaf.shape[:axis], *leaf.shape[axis + 1 :])


def _measured(
    trainer: _Trainer, order: Tensor, k: int, train: Callable[[Tensor, int], Tensor], seed: int
) -> dict[str, float]:
    """Everything at one k along one order of the samples; batches are drawn by seed, seed + 1."""
    few, more = trainer.objective(order[:k]), trainer.objective(order[: k + 1])
    ended = train(order[:k], seed)
    here, first = trainer.minimum(few, ended)
    again, second = trainer.minimum(more, train(order[: k + 1], seed))
    other, third = trainer.minimum(few, train(order[:k], seed + 1))
    followed, fourth = trainer.minimum(more, here)
    gradients = [first, second, third, fourth]
    row = {
        "trained_gradient": trainer.remaining(few, ended),
        "gradient": max(gradients) if all(map(math.isfinite, gradients)) else math.nan,
        "converged": float(all(g <= trainer.tolerance for g in gradients)),  # False for NaN
    }
    names = ("loss", "gap", *CURVES)
    if not math.isfinite(row["gradient"]):
        return {**row, **dict.fromkeys(names, math.nan)}
    loss, known = few(here), few.data_loss(here)
    unused = trainer.objective(order[k:]).sample_losses(here)
    noise = matched_noise(unused, seed + k)()
    row |= {
        "loss": loss,
        "gap": float(unused.mean()) - known,
        "fixed": abs(more(here) - loss),
        "followed": abs(more(followed) - loss),
        "retrained": abs(more(again) - loss),
        "control": abs(few(other) - loss),
        "noise": float((noise - known).abs().mean()) / (k + 1),
    }
    return row


def _joined_point(
    name: str, schedule: str, k: int, rows: Sequence[Mapping[str, float]]
) -> RetrainedPoint:
    def column(key: str) -> Tensor:
        return torch.tensor([row[key] for row in rows], dtype=torch.float64)

    return RetrainedPoint(
        optimizer=name,
        schedule=schedule,
        k=k,
        loss=column("loss"),
        changes={key: column(key) for key in CURVES},
        gap=column("gap"),
        trained_gradient=column("trained_gradient"),
        gradient=column("gradient"),
        converged=column("converged") > 0,
    )


# --- the laws -------------------------------------------------------------------------------------


def _cell(points: Sequence[RetrainedPoint]) -> RetrainedCell:
    """The laws of one optimizer and schedule, of the orders that came to a minimum."""
    every = torch.stack([point.converged for point in points])
    used = [point for point in points if int(point.converged.sum()) >= _FEWEST_ORDERS]
    curves = {
        name: scattered_curve(name, [(p.k, p.changes[name][p.converged]) for p in used])
        for name in CURVES
    }
    gap, loss = (
        scattered_curve(name, [(p.k, getattr(p, name)[p.converged]) for p in used])
        for name in ("gap", "loss")
    )
    return RetrainedCell(
        optimizer=points[0].optimizer,
        schedule=points[0].schedule,
        curves=curves,
        loss=loss,
        gap=gap,
        against_noise=differ(curves["retrained"], curves["noise"]),
        control_p_value=_larger(
            [p.changes["retrained"][p.converged] for p in used],
            [p.changes["control"][p.converged] for p in used],
        ),
        converged=float(every.double().mean()),
        left_out=tuple(
            f"k = {p.k}, of which {int(p.converged.sum())} of {len(p.converged)} orders came to a "
            "minimum"
            for p in points
            if p not in used
        ),
    )


def _larger(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """p-value of "the first are no larger than the second": pairs of one k and order (Wilcoxon).

    Where a batch holds all k samples training again gives the same bits: a zero of the second is no
    comparison. NaN without any.
    """
    if not first:
        return math.nan
    more, again = torch.cat(list(first)), torch.cat(list(second))
    gaps = (more - again)[again > 0].numpy()
    if not len(gaps):
        return math.nan
    return float(stats.wilcoxon(gaps, alternative="greater").pvalue) if gaps.any() else 1.0


def scattered_curve(name: str, points: Sequence[tuple[int, Tensor]]) -> Curve:
    """The mean at every k, with the power law, from few values each.

    Four orders say little of the scatter at one k, and where they lie close by chance they would
    decide the fit: the scatter relative to the mean is taken to be the same at every k.
    """
    k = np.array([float(size) for size, _ in points])
    means = np.array([float(values.mean()) for _, values in points])
    errors = np.array([float(values.std()) / math.sqrt(len(values)) for _, values in points])
    left = sum(len(values) - 1 for _, values in points)
    fit, half = None, np.zeros_like(means)
    if len(points):
        counts = np.array([len(values) for _, values in points])
        reach = stats.t.ppf(0.975, counts - 1) * errors
        half = np.where(np.isfinite(reach), reach, 0.0)
    if len(points) >= FEWEST_SIZES and (means > 0).all() and (errors > 0).any():
        relative = math.sqrt(
            sum(
                (float(v.std()) / m) ** 2 * (len(v) - 1)
                for (_, v), m in zip(points, means, strict=True)
            )
            / left
        )
        log_errors = [relative / math.sqrt(len(values)) for _, values in points]
        fit = power_law(k, means, log_errors=log_errors, repeats=left + 1)
    return Curve(
        name=name,
        k=torch.from_numpy(k),
        mean=torch.from_numpy(means),
        low=torch.from_numpy(np.maximum(means - half, 0)),
        high=torch.from_numpy(means + half),
        fit=fit,
        orders=max((len(values) for _, values in points), default=0),
    )
