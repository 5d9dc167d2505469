"""What the monitor writes down: snapshots, the events they raise, and where both go."""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvatlas.figures.training import history_figure
from curvatlas.results import Interval, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.training.monitor import Monitor


@dataclass(frozen=True, kw_only=True)
class Snapshot(Result):
    """Curvature of the loss on the monitor's data at one training step."""

    step: int
    loss: float  # on the monitor's data
    learning_rate: float | None
    sharpness: float  # λmax of H
    sharpness_interval: Interval  # certain, from the residual
    most_negative: float  # λmin of H
    trace: float
    trace_interval: Interval  # 95 %, probes only
    negative_mass: float  # share of eigenvalues below zero, by quadrature
    negative_mass_interval: Interval  # 95 %, probes only
    gradient_norm: float
    gradient_alignment: float  # share of ‖∇L‖² in the top eigenspace, 0 … 1
    drift: float | None  # 1 − overlap of this top eigenspace with the last one; None at first
    role_sharpness: dict[str, float]  # λmax of H[role, role], the newest of each role
    role_trace: dict[str, float]
    role_gradient: dict[str, float]  # ‖∇L‖ restricted to the role
    products: int
    seconds: float
    edge: float | None = None  # λmax(P⁻¹H) with the metric P of the optimizer's state
    edge_interval: Interval | None = None  # certain, from the residual
    edge_threshold: float | None = None  # above it the optimizer's own update grows
    metric: str = "plain"  # whose P; "plain (…)": P = I, and why

    @property
    def stability(self) -> float | None:
        """Sharpness × learning rate; plain gradient descent is unstable above 2."""
        return None if self.learning_rate is None else self.sharpness * self.learning_rate

    @property
    def edge_ratio(self) -> float | None:
        """λmax(P⁻¹H) over the optimizer's threshold: its update grows above 1."""
        if self.edge is None or not self.edge_threshold:
            return None
        return self.edge / self.edge_threshold

    def __str__(self) -> str:
        low, high = self.sharpness_interval
        parts = [
            f"step {self.step}: loss {self.loss:.4g}",
            f"λmax {self.sharpness:.4g} ± {(high - low) / 2:.1g}",
            f"λmin {self.most_negative:.3g}",
            f"tr H {self.trace:.4g}",
        ]
        if self.edge_ratio is not None:
            parts.append(f"λmax(P⁻¹H) {self.edge:.4g}, {self.edge_ratio:.2f} of the edge")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Event(Result):
    """Something the thresholds say a person should look at."""

    step: int
    name: str  # edge_of_stability, spike_ahead, loss_spike, dead_block, exploding_block, not_finite
    message: str
    value: float
    threshold: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class CurvatureHistory(Result):
    """All snapshots and events of a run, in order."""

    snapshots: tuple[Snapshot, ...]
    events: tuple[Event, ...]
    skipped: int  # measurements left out to stay within the time budget
    overhead: float  # share of wall time spent in the monitor

    def __len__(self) -> int:
        return len(self.snapshots)

    def series(self, name: str) -> list[Any]:
        """One quantity over the snapshots, for example ``series("sharpness")``."""
        return [getattr(snapshot, name) for snapshot in self.snapshots]

    def __str__(self) -> str:
        lines = [str(snapshot) for snapshot in self.snapshots[-5:]]
        lines += [str(event) for event in self.events[-5:]]
        lines.append(f"{len(self.snapshots)} snapshots, overhead {self.overhead:.1%}")
        return "\n".join(lines)

    def _picture(self) -> Figure:
        """Loss, the optimizer's own edge, eigenvalues of H, trace and negative mass over steps."""
        return history_figure(self)


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where the events start; a value of infinity (or 0 for dead blocks) switches one off."""

    edge: float = 1.0  # λmax(P⁻¹H) over the optimizer's threshold
    spike_ahead: float = 1.5  # times the edge: the quadratic model predicts divergence
    loss_spike: float = 1.5  # times the median of the last five losses
    exploding: float = 10.0  # times a role's median gradient norm so far
    dead: float = 1e-4  # of a role's median gradient norm so far


def events_of(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    """What is new in this snapshot compared with those before it."""
    yield from _stability(snapshot, earlier, thresholds)
    recent = [s.loss for s in earlier[-5:]]
    if len(recent) >= 2:
        usual = statistics.median(recent)
        if not snapshot.loss <= thresholds.loss_spike * usual:
            yield Event(
                step=snapshot.step,
                name="loss_spike",
                message=f"the loss rose to {snapshot.loss:.4g} from a median of {usual:.4g}",
                value=snapshot.loss,
                threshold=thresholds.loss_spike * usual,
            )
    yield from _blocks(snapshot, earlier, thresholds)


def _stability(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    now = snapshot.edge_ratio
    if now is None:
        return
    before = earlier[-1].edge_ratio if earlier else None
    edge = thresholds.edge
    what = "λmax" if snapshot.metric.startswith("plain") else f"λmax(P⁻¹H) of {snapshot.metric}"
    told = (
        f"{what} = {snapshot.edge:.3g} is {now:.2f} of its threshold {snapshot.edge_threshold:.3g}"
    )
    for name, limit, meaning in (
        ("edge_of_stability", edge, "steps oscillate along the top eigenvector"),
        ("spike_ahead", edge * thresholds.spike_ahead, "expect a loss spike, or lower the rate"),
    ):
        if now >= limit and (before is None or before < limit):
            message = f"{told}: {meaning}"
            yield Event(step=snapshot.step, name=name, message=message, value=now, threshold=limit)


def _blocks(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    if len(earlier) < 2:
        return
    for role, norm in snapshot.role_gradient.items():
        usual = statistics.median(s.role_gradient.get(role, math.nan) for s in earlier)
        if not usual > 0:
            continue
        most, least = thresholds.exploding * usual, thresholds.dead * usual
        message = f"the gradient of {role} is {norm:.3g}, usually {usual:.3g}"
        for name, wrong, limit in (
            ("exploding_block", norm > most, most),
            ("dead_block", norm < least, least),
        ):
            if wrong:
                yield Event(
                    step=snapshot.step, name=name, message=message, value=norm, threshold=limit
                )


# --- where snapshots go: each library is imported on use ------------------------------------------


class Tracker:
    """Takes every snapshot with the events it raised."""

    def write(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        """Store one snapshot."""
        raise TypeError(f"{type(self).__name__} stores nothing.")

    def close(self) -> None:
        """Release what was opened."""


class LinesTracker(Tracker):
    """One JSON object a line, flushed as it goes: a killed run keeps every finished line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        line = {**snapshot.to_dict(), "events": [event.to_dict() for event in events]}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


class TensorBoardTracker(Tracker):
    """Scalars under ``curvature/…`` for TensorBoard."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardTracker needs tensorboard: pip install it.") from error
        self._writer: Any = writer(str(folder))

    def write(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        for name, value in scalars(snapshot).items():
            self._writer.add_scalar(f"curvature/{name}", value, snapshot.step)
        for event in events:
            self._writer.add_text("curvature/events", str(event), event.step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Scalars under ``curvature/…`` in a Weights & Biases run the caller has started."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        values = {f"curvature/{name}": value for name, value in scalars(snapshot).items()}
        values.update({f"curvature/events/{event.name}": event.value for event in events})
        self._run.log(values, step=snapshot.step)


_SCALARS = (
    "loss",
    "sharpness",
    "most_negative",
    "trace",
    "negative_mass",
    "gradient_norm",
    "gradient_alignment",
    "stability",
    "edge",
    "edge_threshold",
    "edge_ratio",
    "drift",
)


def scalars(snapshot: Snapshot) -> dict[str, float]:
    """Every number of a snapshot by a flat name."""
    numbers = {name: getattr(snapshot, name) for name in _SCALARS}
    plain = {name: float(value) for name, value in numbers.items() if value is not None}
    for group in ("role_sharpness", "role_trace", "role_gradient"):
        for role, value in getattr(snapshot, group).items():
            plain[f"{group}/{role}"] = float(value)
    return plain


def trainer_callback(monitor: Monitor) -> Any:
    """A ``transformers.TrainerCallback``: one ``monitor.step`` after each optimizer step."""
    try:
        base = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise ImportError(
            "the Trainer callback needs transformers: pip install 'curvatlas[huggingface]'."
        ) from error

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        optimizer = others.get("optimizer")
        rates = [float(group["lr"]) for group in optimizer.param_groups] if optimizer else []
        monitor.step(step=int(state.global_step), learning_rate=max(rates) if rates else None)

    return _callback(base, monitor, on_step_end=on_step_end)


def lightning_callback(monitor: Monitor) -> Any:
    """A Lightning ``Callback``: one ``monitor.step`` after each optimizer step."""
    base = None
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base = importlib.import_module(name).Callback
            break
        except ImportError:
            continue
    if base is None:
        raise ImportError("the Lightning callback needs lightning: pip install lightning.")

    seen = [0]  # the last global step: a batch that only accumulates gradients does not move it

    def on_train_batch_end(self: Any, trainer: Any, *_: Any, **__: Any) -> None:
        if int(trainer.global_step) == seen[0]:
            return
        seen[0] = int(trainer.global_step)
        rates = [float(g["lr"]) for o in trainer.optimizers for g in o.param_groups]
        monitor.step(step=int(trainer.global_step), learning_rate=max(rates) if rates else None)

    return _callback(base, monitor, on_train_batch_end=on_train_batch_end)


def _callback(base: Any, monitor: Monitor, **hooks: Any) -> Any:
    def on_train_end(self: Any, *_: Any, **__: Any) -> None:
        monitor.close()

    return type("CurvatureCallback", (base,), {**hooks, "on_train_end": on_train_end})()
