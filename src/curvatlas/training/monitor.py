"""Monitor: curvature that rides along with training, within a share of its wall time.

It changes nothing: its own data, its own leaves, random number generators put back. With the same
seeds the weights are the same bit for bit with and without it.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvatlas.anatomy import Slice
from curvatlas.errors import NonFiniteError
from curvatlas.fits import mean_reach
from curvatlas.operators import Hessian, LinearOperator
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import unwrap
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.training.metric import Metric, Preconditioned, metric_of, unwrapped
from curvatlas.training.snapshot import (
    CurvatureHistory,
    Event,
    Snapshot,
    Thresholds,
    Tracker,
    events_of,
    lightning_callback,
    trainer_callback,
)


@contextlib.contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; training flags and every random number generator as before after."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


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

    def __post_init__(self) -> None:
        self._edge: Tensor | None = None  # eigenvector of P^(−1/2) H P^(−1/2)
        self._ends: Tensor | None = None  # eigenvectors of both ends, for the warm start
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
        ends = eigenpairs(
            operator,
            k=self.eigenvalues,
            which="both",
            tol=self.tol,
            start=self._ends,
            max_products=min(self.max_products, problem.size),
            data_error=False,
            seed=self.seed,
        )
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
        snapshot = Snapshot(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            sharpness=sharpness,
            sharpness_interval=sharpness_interval,
            edge=edge,
            edge_interval=edge_interval,
            edge_threshold=metric.threshold,
            metric=metric.name + (f" ({metric.note})" if metric.note else ""),
            most_negative=float(ends.values.min()),
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
            seconds=time.perf_counter() - began,
        )
        self._ends, self._top = ends.vectors, top
        return snapshot

    def _own_edge(self, operator: Hessian, metric: Metric) -> tuple[float, tuple[float, float]]:
        """λmax(P⁻¹H), to a hundredth of the monitor's tolerance where the budget allows."""
        top = eigenpairs(
            Preconditioned(operator, self.problem, metric, scale=self._scale),
            k=1,
            which="largest",
            tol=self.tol / 100,
            start=self._edge,
            max_products=min(self.max_products, self.problem.size),
            data_error=False,
            seed=self.seed,
        )
        self._edge = top.vectors[:, :1]
        return float(top.values[0]), (float(top.interval[0][0]), float(top.interval[1][0]))

    def warm_start(self) -> tuple[dict[str, Tensor], dict[str, float], int]:
        """Eigenvectors and the state of the rounds over roles."""
        vectors = {f"role/{role}": v for role, v in self._role_vectors.items()}
        if self._edge is not None:
            vectors["edge"] = self._edge
        if self._ends is not None and self._top is not None:
            vectors.update(ends=self._ends, top=self._top)
        return vectors, dict(self._role_sharpness), self._turn

    def resume(
        self, vectors: Mapping[str, Tensor], sharpness: Mapping[str, float], turn: int
    ) -> None:
        """Start the next measurement from ``warm_start()``."""
        self._ends, self._top = vectors.get("ends"), vectors.get("top")
        self._edge = vectors.get("edge")
        self._role_vectors = {
            name.removeprefix("role/"): v for name, v in vectors.items() if name.startswith("role/")
        }
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


class Monitor:
    """Measure curvature every ``every`` steps, spending at most ``budget`` of the wall time.

    model, loss, data: as for ``Problem``; the data are the monitor's own fixed batches.
    every: steps between measurements;  budget: share of wall time, 1 switches the limit off.
    optimizer: whose learning rate and metric P give the edge λmax(P⁻¹H) and its threshold; several
        (Muon with AdamW for the rest) as a list. Without one, ``step(learning_rate=...)`` gives the
        edge 2/η of plain gradient descent.
    eigenvalues, tol: how many at each end and how precisely;  probes: for traces.
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
        budget: float = 0.05,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        eigenvalues: int = 2,
        tol: float = 1e-2,
        probes: int = 4,
        density_products: int = 24,
        max_products: int = 60,
        thresholds: Thresholds | None = None,
        trackers: Iterable[Tracker] = (),
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}.")
        if not 0 < budget <= 1:
            raise ValueError(f"budget is a share of the wall time in (0, 1], got {budget}.")
        if probes < 2:
            raise ValueError(f"probes must be at least 2 for an interval, got {probes}.")
        self._began = time.perf_counter()
        self.every, self.budget = every, budget
        self.optimizer = optimizer
        self.thresholds = thresholds or Thresholds()
        self.trackers = list(trackers)
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
        self.steps = 0
        self.skipped = 0
        self._costs: deque[float] = deque(maxlen=3)  # seconds of the last measurements
        self.spent = time.perf_counter() - self._began  # the problem's checks are paid for as well

    # --- in a plain loop ------------------------------------------------------------------------

    def step(
        self, *, step: int | None = None, learning_rate: float | None = None
    ) -> Snapshot | None:
        """Call once after each optimizer step; returns a snapshot when one was taken."""
        now = self.steps if step is None else step
        self.steps = now + 1
        if now % self.every:
            return None
        elapsed = time.perf_counter() - self._began
        # The first measurement is taken at once; later ones wait until all are paid for, their own
        # expected cost included: the dearest of the last three and more, as machines scatter.
        expected = 1.3 * max(self._costs, default=0.0)
        if self._costs and self.budget < 1 and self.spent + expected > self.budget * elapsed:
            self.skipped += 1
            return None
        try:
            return self.measure(step=now, learning_rate=learning_rate)
        except NonFiniteError as error:
            # A diverged run is news, not a reason to stop somebody's training loop.
            self.events.append(
                Event(step=now, name="not_finite", message=str(error), value=nan, threshold=nan)
            )
            return None

    def measure(self, *, step: int | None = None, learning_rate: float | None = None) -> Snapshot:
        """Measure now, whatever the budget says."""
        began = time.perf_counter()
        rate = self._rate() if learning_rate is None else learning_rate
        self._measuring.optimizers = self._optimizers()
        try:
            snapshot = self._measuring.measure(self.steps if step is None else step, rate)
            events = list(events_of(snapshot, self.snapshots, self.thresholds))
            self.snapshots.append(snapshot)
            self.events.extend(events)
            for tracker in self.trackers:
                tracker.write(snapshot, events)
        finally:  # a measurement that fails is paid for as well
            cost = time.perf_counter() - began
            self._costs.append(cost)
            self.spent += cost
        return snapshot

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
            tracker.close()

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

    # --- in other people's loops ----------------------------------------------------------------

    def trainer_callback(self) -> Any:
        """A ``transformers.TrainerCallback`` that steps this monitor."""
        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """A Lightning ``Callback`` that steps this monitor."""
        return lightning_callback(self)
