"""Monitor: curvature that rides along with training, within a share of its wall time.

It changes nothing: its own data, its own leaves, random number generators put back. With the same
seeds the weights are the same bit for bit with and without it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from math import nan
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from curvatlas.errors import NonFiniteError
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import unwrap
from curvatlas.training.events import Thresholds, events_of
from curvatlas.training.measuring import Measuring, leaving_no_trace
from curvatlas.training.snapshot import CurvatureHistory, Event, Snapshot
from curvatlas.training.trackers import Tracker


class Monitor:
    """Measure curvature every ``every`` steps, spending at most ``budget`` of the wall time.

    model, loss, data: as for ``Problem``; the data are the monitor's own fixed batches.
    every: steps between measurements;  budget: share of wall time, 1 switches the limit off.
    optimizer: where the learning rate is read (or pass ``learning_rate`` to ``step``).
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
        optimizer: Optimizer | None = None,
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
            problem,
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
        try:
            snapshot = self._measuring.measure(self.steps if step is None else step, rate)
            found = list(events_of(snapshot, self.snapshots, self.thresholds))
            self.snapshots.append(snapshot)
            self.events.extend(found)
            for tracker in self.trackers:
                tracker.write(snapshot, found)
        finally:  # a measurement that fails is paid for as well
            cost = time.perf_counter() - began
            self._costs.append(cost)
            self.spent += cost
        return snapshot

    def _rate(self) -> float | None:
        if self.optimizer is None:
            return None
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

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
        from curvatlas.training.callbacks import trainer_callback

        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """A Lightning ``Callback`` that steps this monitor."""
        from curvatlas.training.callbacks import lightning_callback

        return lightning_callback(self)
