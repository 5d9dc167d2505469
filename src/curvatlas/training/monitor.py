"""Monitor: curvature that rides along with training, for a small part of its time.

It changes nothing: its own data, its own leaves, random number generators put back. With the same
seeds the weights are the same bit for bit with and without it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvatlas import parallel
from curvatlas.analysis.atlas.mapping import atlas
from curvatlas.analysis.atlas.result import Atlas, blocks_of
from curvatlas.anatomy import Slice
from curvatlas.errors import NonFiniteError
from curvatlas.fits import mean_reach
from curvatlas.operators import Hessian, LinearOperator
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import unwrap
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.eigenpairs import Following, eigenpairs
from curvatlas.training.alarms import (
    TRAINING_LOOKS,
    Event,
    Look,
    RateWatch,
    Thresholds,
    alarm,
    batch_events,
    events_of,
    loss_events,
)
from curvatlas.training.metric import Metric, Preconditioned, metric_of, unwrapped
from curvatlas.training.snapshot import (
    CurvatureHistory,
    Snapshot,
    Tracker,
    lightning_callback,
    trainer_callback,
)


@contextlib.contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and the weights' own precision inside, whatever autocast says outside.

    Training flags and every random number generator are as before after.
    """
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    kinds = sorted({p.device.type for p in model.parameters()})
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=devices))
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


_PROBES_A_BLOCK = 6  # of a map; its intervals say what that is worth


@dataclass(kw_only=True)
class Measuring:
    """Measures one problem again and again; keeps the eigenvectors between measurements."""

    problem: Problem
    eigenvalues: int
    tol: float
    probes: int
    density_products: int
    max_products: int
    seed: int
    optimizers: Sequence[Optimizer] = field(default_factory=list)
    mapping: bool = False  # whether the next measurement takes maps as well

    def __post_init__(self) -> None:
        self._blocks = blocks_of(self.problem.anatomy, biases=False)
        self._mapped: Tensor | None = None  # weights at the first map
        limit = min(self.max_products, self.problem.size)
        self._ends = Following(
            k=self.eigenvalues, which="both", tol=self.tol, max_products=limit, seed=self.seed
        )
        # P^(−1/2) H P^(−1/2), to a hundredth of the tolerance where the budget allows
        self._edge = Following(
            k=1, which="largest", tol=self.tol / 100, max_products=limit, seed=self.seed
        )
        self._top: Tensor | None = None
        self._roles = _by_role(self.problem.anatomy.slices)
        self._role_vectors: dict[str, Tensor] = {}
        self._role_sharpness: dict[str, float] = {}
        self._turn = 0
        self._scale = 0.0  # |λ|max of the last measurement

    def measure(self, step: int, learning_rate: float | None) -> Snapshot:
        """All quantities at the present weights."""
        began = time.perf_counter()
        with leaving_no_trace(self.problem.model):
            return self._measure(step, learning_rate, began)

    def _measure(self, step: int, learning_rate: float | None, began: float) -> Snapshot:
        problem = self.problem
        operator = Hessian(problem)
        loss, gradient = problem.value(), problem.gradient()
        ends = self._ends.measure(operator, problem.parameters)
        order = torch.argsort(ends.values, descending=True)
        top = ends.vectors[:, order[: self.eigenvalues]]
        first = int(order[0])
        trace, interval, role_trace = self._traces(operator, step)
        density = spectral_density(
            operator, max_products=self.density_products, seed=self.seed + step
        )
        self._scale = float(ends.values.abs().max())
        self._next_role(operator)
        metric = metric_of(problem, self.optimizers, learning_rate)
        sharpness = float(ends.values[first])
        sharpness_interval = (float(ends.interval[0][first]), float(ends.interval[1][first]))
        edge, edge_interval = sharpness, sharpness_interval
        if not metric.plain:
            edge, edge_interval = self._own_edge(operator, metric)
        mapping_began = time.perf_counter()
        maps = self._maps(step) if self.mapping else None
        map_seconds = time.perf_counter() - mapping_began if self.mapping else 0.0
        snapshot = Snapshot(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            sharpness=sharpness,
            sharpness_interval=sharpness_interval,
            edge=edge,
            edge_interval=edge_interval,
            edge_threshold=metric.threshold,
            edge_is_law=metric.law or not self.optimizers,
            rate_limited=any(getattr(o, "limits_own_rate", False) for o in self.optimizers),
            rounding=min(1.0, 100 * torch.finfo(operator.dtype).eps),
            metric=metric.name + (f" ({metric.note})" if metric.note else ""),
            most_negative=float(ends.values[order[-1]]),
            most_negative_interval=(
                float(ends.interval[0][order[-1]]),
                float(ends.interval[1][order[-1]]),
            ),
            trace=trace,
            trace_interval=interval,
            negative_mass=density.negative_mass,
            negative_mass_interval=density.negative_mass_interval,
            gradient_norm=float(gradient.norm()),
            gradient_alignment=_share(gradient, top),
            drift=None if self._top is None else 1.0 - _overlap(self._top, top),
            role_sharpness=dict(self._role_sharpness),
            role_trace=role_trace,
            role_gradient={
                role: float(sum(piece.view(gradient).norm() ** 2 for piece in pieces) ** 0.5)
                for role, pieces in self._roles.items()
            },
            products=operator.products,
            maps=maps,
            map_seconds=map_seconds,
            moved=self._moved(),
            seconds=time.perf_counter() - began,
        )
        self._top = top
        return snapshot

    def _own_edge(self, operator: Hessian, metric: Metric) -> tuple[float, tuple[float, float]]:
        """λmax(P⁻¹H)."""
        metric_operator = Preconditioned(operator, self.problem, metric, scale=self._scale)
        top = self._edge.measure(metric_operator, self.problem.parameters)
        return float(top.values[0]), (float(top.interval[0][0]), float(top.interval[1][0]))

    @property
    def map_products(self) -> int:
        """Products of one map, each of which gives H, H_o and H_f."""
        return _PROBES_A_BLOCK * len(self._blocks)

    def _maps(self, step: int) -> Atlas:
        """Role × role, layer × layer and block × block; exact where the model is tiny."""
        method = "dense" if self.problem.size <= self.map_products else "sketch"
        whole = atlas(
            self.problem,
            biases=False,
            method=method,
            products=self.map_products,
            seed=self.seed + step,
        )
        if self._mapped is None:
            self._mapped = self.problem.parameters.detach().clone()
        kept = {
            key: one
            for key, one in whole.maps.items()
            if one.quantity in ("frobenius", "trace")
            and (one.view in ("role", "layer") or one.part == "total")
        }
        return replace(whole, maps=kept)

    def _moved(self) -> dict[str, float] | None:
        """‖θ − θ at the first map‖ of every block."""
        if self._mapped is None:
            return None
        change = self.problem.parameters.detach() - self._mapped
        return {
            block.name: float(sum(piece.view(change).norm() ** 2 for piece in block.slices) ** 0.5)
            for block in self._blocks
        }

    def warm_start(self) -> tuple[dict[str, Tensor], dict[str, float], int]:
        """Eigenvectors and the state of the rounds over roles."""
        vectors = {f"role/{role}": v for role, v in self._role_vectors.items()}
        for name, tensor in (("top", self._top), ("mapped", self._mapped)):
            if tensor is not None:
                vectors[name] = tensor
        for name, following in (("ends", self._ends), ("edge", self._edge)):
            vectors.update({f"{name}/{key}": v for key, v in following.state().items()})
        return vectors, dict(self._role_sharpness), self._turn

    def resume(
        self, vectors: Mapping[str, Tensor], sharpness: Mapping[str, float], turn: int
    ) -> None:
        """Start the next measurement from ``warm_start()``."""
        self._top, self._mapped = vectors.get("top"), vectors.get("mapped")
        self._ends.restore(_under("ends/", vectors))
        self._edge.restore(_under("edge/", vectors))
        self._role_vectors = _under("role/", vectors)
        self._role_sharpness, self._turn = dict(sharpness), turn

    def _traces(
        self, operator: Hessian, step: int
    ) -> tuple[float, tuple[float, float], dict[str, float]]:
        """tr H and tr H[role, role] from the same ±1 probes: zᵀHz, whole and role by role."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + step)
        signs = torch.randint(
            0, 2, (self.problem.size, self.probes), generator=generator, device="cpu"
        )
        probes = (2.0 * signs - 1.0).to(dtype=operator.dtype, device=operator.device)
        products = operator @ probes
        samples = in_float64((probes * products).sum(0))
        mean, reach = float(samples.mean()), mean_reach(samples.cpu())
        each = (probes * products).mean(1)
        roles = {
            role: float(sum(piece.view(each).sum() for piece in pieces))
            for role, pieces in self._roles.items()
        }
        return mean, (mean - reach, mean + reach), roles

    def _next_role(self, operator: Hessian) -> None:
        """The sharpness of one role a measurement, in turn: a share of the cost each time."""
        role = list(self._roles)[self._turn % len(self._roles)]
        self._turn += 1
        view = operator[list(self._roles[role])]
        if self._vanishes(view):
            self._role_sharpness[role] = 0.0
            return
        top = eigenpairs(
            view,
            k=1,
            which="largest",
            tol=10 * self.tol,
            start=self._role_vectors.get(role),
            max_products=min(self.max_products, view.shape[0]),
            data_error=False,
            seed=self.seed,
        )
        self._role_sharpness[role] = float(top.values.max())
        self._role_vectors[role] = top.vectors[:, :1]

    def _vanishes(self, view: LinearOperator) -> bool:
        """Whether H[role, role] is rounding alone: a key's bias moves no attention weight."""
        generator = torch.Generator().manual_seed(self.seed)
        probe = torch.randn(view.shape[0], generator=generator, dtype=torch.float64, device="cpu")
        probe = (probe / probe.norm()).to(dtype=view.dtype, device=view.device)
        size = float((view @ probe).norm())
        return size <= 100 * torch.finfo(view.dtype).eps * self._scale


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose name begins so, by the rest of it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _by_role(slices: Sequence[Slice]) -> dict[str, list[Slice]]:
    groups: dict[str, list[Slice]] = defaultdict(list)
    for piece in slices:
        groups[piece.role].append(piece)
    return dict(groups)


def _share(vector: Tensor, basis: Tensor) -> float:
    """‖Bᵀv‖² / ‖v‖² for orthonormal columns B."""
    total = float(vector @ vector)
    return float((basis.T @ vector).square().sum()) / total if total > 0 else 0.0


def _overlap(a: Tensor, b: Tensor) -> float:
    """‖AᵀB‖²_F / k for two orthonormal bases of k columns: 1 for equal spaces, 0 for orthogonal."""
    return min(1.0, float((a.T @ b).square().sum()) / b.shape[1])


def _told(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _note(step: int, name: str, message: str) -> Event:
    return Event(step=step, name=name, message=message, value=nan, threshold=nan)


def _failure(step: int, error: Exception) -> Event:
    """A measurement that failed: an alarm where the loss is no number, else a note."""
    if isinstance(error, NonFiniteError):
        return alarm("not_finite", step, _told(error), {"loss": nan, "limit": nan})
    # what helps the user of a problem helps the one of a monitor by the other name
    return _note(step, "not_measured", _told(error).replace("a new Problem", "a new Monitor"))


_SHARE = 0.05  # of the wall time, where the user names none
_GRACE = 30.0  # seconds that may always be spent: short runs are measured whole
_AGAIN = 2.0  # times as many steps as at the last snapshot: another one is due
_PAID = 0.5  # of its cost that has passed since: of the shortest runs it takes two thirds


class Monitor:
    """Measure curvature every ``every`` steps, for a small part of the training's time.

    model, loss, data: as for ``Problem``; the data are the monitor's own fixed batches.
    every: steps between measurements. budget: share of the wall time they may take at most, 1: no
        limit. By default a twentieth; of short runs the first 30 seconds; and one more snapshot
        whenever the steps have doubled and training has gone on for half of what it costs: dear
        ones come at steps 50, 100, 200, 400, 800, and not once. The first one that is skipped is
        said, all are counted in ``history.skipped``.
    optimizer: whose learning rate and metric P give the edge λmax(P⁻¹H) and its threshold; several
        (Muon with AdamW for the rest) as a list. Without one, ``step(learning_rate=...)`` gives the
        edge 2/η of plain gradient descent.
    eigenvalues, tol: how many at each end and how precisely;  probes: for traces.
    maps: True adds maps of H, H_o and H_f with intervals, role by role and layer by layer, to the
        snapshots whose half of the budget allows it; steps: to the first snapshot from each on.
    trackers: where snapshots go besides ``history`` (run folder, TensorBoard, Weights & Biases).

        with ca.Monitor(model, "cross_entropy", batch, every=20, optimizer=optimizer) as monitor:
            for inputs, targets in loader:
                ...
                optimizer.step()
                monitor.step()
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        data: Any,
        *,
        every: int = 50,
        budget: float | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        eigenvalues: int = 2,
        tol: float = 1e-2,
        probes: int = 4,
        density_products: int = 24,
        max_products: int = 60,
        maps: bool | Iterable[int] = False,
        thresholds: Thresholds | None = None,
        trackers: Iterable[Tracker] = (),
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}.")
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget is a share of the wall time in (0, 1], got {budget}.")
        if probes < 2:
            raise ValueError(f"probes must be at least 2 for an interval, got {probes}.")
        self._began = time.perf_counter()
        self.every, self.budget = every, budget
        self.optimizer = optimizer
        self.thresholds = thresholds or Thresholds()
        self.trackers = list(trackers)
        self._map_steps = None if isinstance(maps, bool) else sorted(int(step) for step in maps)
        self._wants_maps = bool(maps) if self._map_steps is None else bool(self._map_steps)
        self._map_cost, self._map_spent = 0.0, 0.0
        bare = unwrap(model)
        with leaving_no_trace(bare):
            problem = Problem(bare, loss, data)
        self._measuring = Measuring(
            problem=problem,
            eigenvalues=eigenvalues,
            tol=tol,
            probes=probes,
            density_products=density_products,
            max_products=max_products,
            seed=seed,
        )
        self.snapshots: list[Snapshot] = []
        self.events: list[Event] = []
        self.looks: list[Look] = []  # loss on the monitor's data, of snapshots and between them
        self._training: deque[Look] = deque(maxlen=TRAINING_LOOKS)  # of ``step(loss=...)``
        self._look_cost, self._look_spent = 0.0, 0.0
        self._measured_at = self._began  # when the last measurement ended
        self._rates = RateWatch(self.thresholds)
        self._failing: str | None = None  # what the last measurement or look failed of
        self.steps = 0
        self.skipped = 0
        self._costs: deque[float] = deque(maxlen=3)  # seconds of the last measurements
        self.spent = time.perf_counter() - self._began  # the problem's checks are paid for as well

    # --- in a plain loop ------------------------------------------------------------------------

    def step(
        self,
        *,
        step: int | None = None,
        learning_rate: float | None = None,
        loss: float | Tensor | None = None,
    ) -> Snapshot | None:
        """Call once after each optimizer step; returns a snapshot when one was taken.

        loss: of the training batch, if the loop has it: a bad batch is then told at its own step.
        """
        now = self.steps if step is None else step
        self.steps = now + 1
        self._watch_rate(now, learning_rate)
        if loss is not None:
            value = loss.item() if isinstance(loss, Tensor) else float(loss)
            self._training.append((now, value))
            # with a rate that returns the loss jumps once, whatever the batch
            if now not in self._rates.returned(now) or not math.isfinite(value):
                self._report(list(batch_events(self._training, self.thresholds)), None)
        if now % self.every:
            return None
        try:
            # The first measurement is taken at once; later ones wait until all are paid for, their
            # own expected cost included: the dearest of the last three and more, as machines
            # scatter. Meanwhile the loss alone, a forward pass, is looked at for a tenth of that.
            if not self._costs or self._affords(max(self._costs)) or self._due(now):
                return self.measure(step=now, learning_rate=learning_rate)
            self._skip(now)
            looked = self._look_spent + self._look_cost <= 0.1 * self._allowance
            if self.snapshots and self._agreed(looked) and self._affords(self._look_cost):
                self._look(now)
        except Exception as error:
            # A diverged run, a model changed under the monitor or rounding that swamps the second
            # derivative is news, not a reason to stop somebody's training loop. It is said once: a
            # run that stays so would fill its history with it.
            event = _failure(now, error)
            if event.message != self._failing:
                self._report([event], None)
            self._failing = event.message
        return None

    def _due(self, now: int) -> bool:
        """Whether so many steps and so much time have passed that any cost is a small part."""
        if self.budget is not None or not self.snapshots:
            return False
        passed = time.perf_counter() - self._measured_at
        doubled = now >= _AGAIN * self.snapshots[-1].step
        return self._agreed(doubled and passed >= _PAID * max(self._costs))

    def _skip(self, now: int) -> None:
        """Count a measurement that is left out, and say the first time what that means."""
        self.skipped += 1
        if self.skipped > 1:
            return
        share = _SHARE if self.budget is None else self.budget
        short = f" (of short runs {_GRACE:.0f} s)" if self.budget is None else ""
        warnings.warn(
            f"the monitor skips its measurement at step {now}, and may skip others: one takes "
            f"{max(self._costs):.2g} s, and they are kept within {share:.0%} of the wall time"
            f"{short}. budget=1 takes every one; a larger every=, fewer eigenvalues= or fewer "
            "samples of data make them cheaper.",
            stacklevel=3,
        )

    def _affords(self, cost: float) -> bool:
        """Whether a measurement fits; with maps, which cost more, each kind has its half."""
        spent, allowed = self.spent, self._allowance
        if self._wants_maps:
            spent, allowed = self.spent - self._map_spent, self._allowance / 2
        return self._agreed(spent + 1.3 * cost <= allowed)

    def _agreed(self, fits: bool) -> bool:
        """What the slowest process says: all of them measure together, or none."""
        if self.budget == 1 or not self._measuring.problem.spread:
            return fits
        return bool(parallel.smallest_over_processes(int(fits)))

    def _map_due(self, step: int) -> bool:
        if not self._wants_maps:
            return False
        if self._map_steps is not None:
            taken = [s.step for s in self.snapshots if s.maps is not None]
            due = [k for k in self._map_steps if k <= step and not any(t >= k for t in taken)]
            if not due:
                return False
        if self.budget == 1:
            return True
        if not self._map_cost:  # a product of a map gives three matrices: about two of H
            rates = [s.seconds / max(s.products, 1) for s in self.snapshots]
            if not rates:
                return False
            self._map_cost = 2 * rates[-1] * self._measuring.map_products
        return self._agreed(self._map_spent + 1.3 * self._map_cost <= self._allowance / 2)

    @property
    def _allowance(self) -> float:
        """Seconds that may have been spent by now."""
        if self.budget == 1:
            return math.inf
        passed = time.perf_counter() - self._began
        return max(_SHARE * passed, _GRACE) if self.budget is None else self.budget * passed

    def _watch_rate(self, now: int, learning_rate: float | None) -> None:
        """Every step, free: a rate raised beyond what the curvature measured so far allows."""
        rate = self._rate() if learning_rate is None else learning_rate
        if rate is None:
            return
        self._rates.see(rate)
        event = self._rates.alarm(now, rate, self.snapshots)
        if event is not None:
            self._report([event], None)

    def _look(self, now: int) -> None:
        """The loss on the monitor's data, between two snapshots."""
        began = time.perf_counter()
        try:
            with leaving_no_trace(self._measuring.problem.model):
                self.looks.append((now, self._measuring.problem.value()))
            returned = self._rates.returned(now)
            self._report(list(loss_events(self.looks, self.thresholds, returned=returned)), None)
        finally:
            self._look_cost = time.perf_counter() - began
            self.spent += self._look_cost
            self._look_spent += self._look_cost

    def measure(self, *, step: int | None = None, learning_rate: float | None = None) -> Snapshot:
        """Measure now, whatever the budget says."""
        began = time.perf_counter()
        rate = self._rate() if learning_rate is None else learning_rate
        self._measuring.optimizers = self._optimizers()
        now, mapping = self.steps if step is None else step, 0.0
        self._measuring.mapping = self._map_due(now)
        try:
            snapshot = self._measuring.measure(now, rate)
            mapping = snapshot.map_seconds
            if snapshot.maps is not None:
                self._map_cost, self._map_spent = mapping, self._map_spent + mapping
            self.looks.append((snapshot.step, snapshot.loss))
            returned = self._rates.returned(now)
            events = [
                *events_of(snapshot, self.snapshots, self.thresholds, returned=returned),
                *loss_events(self.looks, self.thresholds, returned=returned),
            ]
            self.snapshots.append(snapshot)
            self._failing = None
            self._report(events, snapshot)
        finally:  # a measurement that fails is paid for as well
            self._measured_at = time.perf_counter()
            cost = self._measured_at - began
            self._costs.append(cost - mapping)
            self.spent += cost
        return snapshot

    def _report(self, events: list[Event], snapshot: Snapshot | None) -> None:
        """Keep the events and hand everything to the trackers; one that fails is an event too."""
        self.events.extend(events)
        for tracker in self.trackers:
            try:
                if snapshot is not None:
                    tracker.write(snapshot, events)
                elif events:
                    tracker.notify(events)
            except Exception as error:
                step = self.steps - 1 if snapshot is None else snapshot.step
                self._tracker_failed(step, tracker, error, "its records have a gap here")

    def _tracker_failed(self, step: int, tracker: Tracker, error: Exception, means: str) -> None:
        told = f"{type(tracker).__name__} failed ({_told(error)}): {means}"
        self.events.append(_note(step, "tracker_failed", told))

    def _optimizers(self) -> list[Optimizer]:
        return [] if self.optimizer is None else unwrapped(self.optimizer)

    def _rate(self) -> float | None:
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        return max((float(group["lr"]) for group in groups), default=None)

    @property
    def overhead(self) -> float:
        """Share of the wall time since the start that went into measuring."""
        return self.spent / max(time.perf_counter() - self._began, 1e-9)

    @property
    def history(self) -> CurvatureHistory:
        """Everything so far, as a result that saves, prints and plots itself."""
        return CurvatureHistory(
            snapshots=tuple(self.snapshots),
            events=tuple(self.events),
            skipped=self.skipped,
            overhead=self.overhead,
        )

    def __enter__(self) -> Monitor:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the trackers; the history stays."""
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:
                self._tracker_failed(self.steps - 1, tracker, error, "may lack its last records")

    # --- stopping and going on --------------------------------------------------------------------

    def warm_start(self) -> tuple[dict[str, Tensor], dict[str, float], int]:
        """What the next measurement starts from: vectors, role sharpness, whose turn it is."""
        return self._measuring.warm_start()

    def resume(
        self,
        warm: Mapping[str, Tensor],
        role_sharpness: Mapping[str, float],
        turn: int,
        snapshots: Iterable[Snapshot],
        events: Iterable[Event],
    ) -> None:
        """Go on from ``warm_start()`` with what was seen before."""
        self._measuring.resume(warm, role_sharpness, turn)
        self.snapshots, self.events = list(snapshots), list(events)
        self.looks = [(snapshot.step, snapshot.loss) for snapshot in self.snapshots]
        for snapshot, after in itertools.pairwise(self.snapshots):
            self._rates.see(snapshot.learning_rate or 0.0, after.step - snapshot.step)

    # --- in other people's loops ----------------------------------------------------------------

    def trainer_callback(self) -> Any:
        """A ``transformers.TrainerCallback`` that steps this monitor."""
        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """A Lightning ``Callback`` that steps this monitor."""
        return lightning_callback(self)
