"""What the monitor writes down: snapshots, the events they raise, and where both go."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvatlas.analysis.atlas.result import Atlas
from curvatlas.figures.training import film_figure, history_figure
from curvatlas.fits import rank_correlation, share_interval
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
    edge_is_law: bool = True  # False: a guide (Muon turns with the gradient; P unknown): no alarms
    metric: str = "plain"  # whose P; "plain (…)": P = I, and why
    rounding: float = 1e-5  # share of the gradient below which a role's is rounding
    maps: Atlas | None = None  # H, H_o and H_f role by role and layer by layer, with intervals
    map_seconds: float = 0.0  # of ``seconds``
    moved: dict[str, float] | None = None  # block of the first map → ‖θ − θ then‖

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
    """Something worth a look (a note), or reason to act (an alarm), with what speaks for it."""

    step: int
    name: str  # a key of ``FALSE_ALARMS``, or edge_of_stability, not_measured, tracker_failed
    message: str
    value: float
    threshold: float
    alarm: bool = False
    evidence: dict[str, float] = field(default_factory=dict)  # the numbers behind it, by name
    # share of healthy runs in which this alarm rose, 95 % interval of benchmarks/alarms.py
    false_alarm_rate: Interval | None = None

    def __str__(self) -> str:
        return f"step {self.step}, {'ALARM ' if self.alarm else ''}{self.name}: {self.message}"


# Runs with a false alarm of healthy runs watched, by kind: benchmarks/results/alarms.json.
# The rules were set on these runs, so that the true rates may be higher.
HEALTHY_RUNS = 24
FALSE_ALARMS = {
    "spike_ahead": 0,
    "loss_rising": 0,
    "loss_spike": 0,
    "exploding_block": 0,
    "dead_block": 0,
    "not_finite": 0,
}


def alarm(name: str, step: int, message: str, evidence: Mapping[str, float]) -> Event:
    """An alarm with its rate of false ones; the first two numbers are its value and threshold."""
    numbers = list(evidence.values())
    false = share_interval(FALSE_ALARMS[name], HEALTHY_RUNS)
    return Event(
        step=step,
        name=name,
        message=message,
        value=numbers[0],
        threshold=numbers[1],
        alarm=True,
        evidence=dict(evidence),
        false_alarm_rate=false,
    )


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

    @property
    def mapped(self) -> tuple[Snapshot, ...]:
        """The snapshots that carry maps (``Monitor(maps=True)``)."""
        return tuple(snapshot for snapshot in self.snapshots if snapshot.maps is not None)

    def film(self, view: str = "role", part: str = "total") -> Figure:
        """The maps over training as small multiples on one colour scale."""
        return film_figure(self, view=view, part=part)

    def early_blocks(self, *, seed: int = 0) -> EarlyBlocks:
        """Do the blocks that dominate the first map predict which weights move?"""
        return early_blocks(self, seed=seed)


@dataclass(frozen=True, kw_only=True)
class RankCorrelation(Result):
    """Spearman's ρ over blocks, and what shuffled blocks give."""

    value: float
    interval: Interval  # 95 %, blocks resampled
    null: Interval  # 95 % of ρ when blocks are shuffled: the control
    p_value: float  # share of shuffles with |ρ| at least this large

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"ρ = {self.value:.2f} [{low:.2f}, {high:.2f}], shuffled blocks give "
            f"[{self.null[0]:.2f}, {self.null[1]:.2f}], p = {self.p_value:.2g}"
        )


@dataclass(frozen=True, kw_only=True)
class EarlyBlocks(Result):
    """Do the blocks that dominate the first map predict which weights move?

    Large blocks have large norms and move far whatever the curvature, so three correlations over
    the same blocks: of the norms themselves, of size alone (the control that needs no curvature),
    and per weight, tr H_bb / n against the root mean square change of an entry.
    """

    step: int  # of the first map
    until: int  # of the last snapshot
    names: tuple[str, ...]
    curvature: tuple[float, ...]  # ‖H_bb‖_F at ``step``
    mean_curvature: tuple[float, ...]  # tr H_bb / n at ``step``
    moved: tuple[float, ...]  # ‖θ_b − θ_b then‖ at ``until``
    sizes: tuple[int, ...]
    dominance: RankCorrelation  # ‖H_bb‖_F and distance
    size_alone: RankCorrelation  # n and distance
    per_weight: RankCorrelation

    @property
    def value(self) -> float:
        return self.per_weight.value

    @property
    def answer(self) -> str:
        """In words, by the correlation per weight."""
        if self.per_weight.p_value > 0.05:
            return "no: per weight, shuffled blocks do as well"
        more = "more" if self.per_weight.value > 0 else "less"
        return f"yes: weights of blocks with more curvature early on move {more}"

    def __str__(self) -> str:
        return "\n".join(
            (
                f"early dominant blocks (step {self.step}) and movement until step {self.until}, "
                f"{len(self.names)} blocks: {self.answer}",
                f"  per weight          {self.per_weight}",
                f"  norms               {self.dominance}",
                f"  size alone, control {self.size_alone}",
            )
        )


def early_blocks(history: CurvatureHistory, *, seed: int = 0) -> EarlyBlocks:
    """See ``EarlyBlocks``; needs a map and a later snapshot."""
    first = next(iter(history.mapped), None)
    last = history.snapshots[-1] if history.snapshots else None
    if first is None or first.maps is None or last is None or last.step == first.step:
        raise ValueError(
            "this history has no map with a later snapshot: use Monitor(maps=True) and go on "
            "training after the first map."
        )
    atlas, moved = first.maps, last.moved or {}
    names = [name for name in atlas.names if moved.get(name, 0.0) > 0]
    if len(names) < 4:
        raise ValueError(f"{len(names)} blocks moved: a rank correlation needs at least four.")
    norms = [atlas.view("block")[name, name] for name in names]
    traces = [atlas.view("block", "trace")[name] / atlas.sizes[name] for name in names]
    far = [moved[name] for name in names]
    sizes = [atlas.sizes[name] for name in names]
    entry = [d / n**0.5 for d, n in zip(far, sizes, strict=True)]

    def ranked(x: Sequence[float], y: Sequence[float]) -> RankCorrelation:
        value, interval, null, p_value = rank_correlation(x, y, seed=seed)
        return RankCorrelation(value=value, interval=interval, null=null, p_value=p_value)

    return EarlyBlocks(
        step=first.step,
        until=last.step,
        names=tuple(names),
        curvature=tuple(norms),
        mean_curvature=tuple(traces),
        moved=tuple(far),
        sizes=tuple(sizes),
        dominance=ranked(norms, far),
        size_alone=ranked(sizes, far),
        per_weight=ranked(traces, entry),
    )


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where the events start; a value of infinity (or 0 for dead blocks) switches one off."""

    edge: float = 1.0  # λmax(P⁻¹H) over the optimizer's threshold
    spike_ahead: float = 2.5  # times the edge, twice in a row
    rising_rate: float = 1.5  # times the highest rate before the edge was reached
    loss_rising: float = 1.25  # times the lowest loss so far, and beyond what it used to scatter
    loss_spike: float = 1.5  # times the median of the last five losses, and beyond its scatter
    exploding: float = 10.0  # times a role's median gradient norm so far
    dead: float = 1e-4  # of a role's usual share of the gradient


_SCATTER = 4.0  # standard deviations of earlier changes that a rise must exceed
_LOOKS = 6  # losses from which their scatter is known
_NEAR = 0.9  # of the threshold: at the edge
_YOUNG = 10  # steps in which running means of gradients are too short to be a metric
_LEADING = 0.3  # share of the gradient's norm that an exploding block has at least

Look = tuple[int, float]  # step and loss on the monitor's data


def events_of(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    """What is new in this snapshot compared with those before it."""
    yield from _stability(snapshot, earlier, thresholds)
    yield from _blocks(snapshot, earlier, thresholds)


def _stability(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    now = snapshot.edge_ratio
    if now is None or snapshot.edge_threshold is None or snapshot.step < _YOUNG:
        return
    before = [s.edge_ratio or 0.0 for s in earlier if s.step >= _YOUNG][-2:]
    what = "λmax" if snapshot.metric.startswith("plain") else f"λmax(P⁻¹H) of {snapshot.metric}"
    told = (
        f"{what} = {snapshot.edge:.3g} is {now:.2f} of its threshold {snapshot.edge_threshold:.3g}"
    )
    if now >= thresholds.edge and not (before and before[-1] >= thresholds.edge):
        yield Event(
            step=snapshot.step,
            name="edge_of_stability",
            message=f"{told}: steps oscillate along the top eigenvector",
            value=now,
            threshold=thresholds.edge,
        )
    limit = thresholds.edge * thresholds.spike_ahead
    if (
        snapshot.edge_is_law
        and before
        and now >= limit
        and before[-1] >= limit
        and not (len(before) > 1 and before[0] >= limit)
    ):
        evidence = {
            "of the threshold": now,
            "limit": limit,
            "of the threshold before": before[-1],
            "share of the gradient in the top eigenspace": snapshot.gradient_alignment,
        }
        message = f"{told}, after {before[-1]:.2f}: expect a loss spike, or lower the rate"
        yield alarm("spike_ahead", snapshot.step, message, evidence)


def rate_alarm(
    snapshots: Sequence[Snapshot], step: int, rate: float, thresholds: Thresholds
) -> Event | None:
    """A rate raised beyond what the curvature measured last allows, or raised on at the edge."""
    last, limit = snapshots[-1], thresholds.edge * thresholds.spike_ahead
    ratio = last.edge_ratio
    young = last.step < _YOUNG or not last.edge_is_law
    if ratio is None or not last.learning_rate or young:
        return None
    now = ratio * rate / last.learning_rate
    if ratio < limit <= now:
        message = (
            f"the rate rose to {rate:.3g}: λmax(P⁻¹H) of step {last.step} is {now:.2f} of its "
            "threshold at this rate; expect a loss spike, or lower the rate"
        )
        evidence = {"of the threshold": now, "limit": limit, "of the threshold before": ratio}
        return alarm("spike_ahead", step, message, evidence)
    rates: list[float] = []
    for snapshot in snapshots:
        rates.append(snapshot.learning_rate or 0.0)
        there = (snapshot.edge_ratio or 0.0) >= _NEAR * thresholds.edge
        if there and snapshot.step >= _YOUNG:
            most = thresholds.rising_rate * max(rates)  # a restart goes back, not beyond
            if not last.learning_rate < most <= rate:
                return None
            message = (
                f"the rate rose to {rate:.3g}, {thresholds.rising_rate:g} times what it was when "
                f"the edge of stability was reached at step {snapshot.step}: only falling "
                "curvature keeps the loss down; expect a spike, or hold the rate"
            )
            evidence = {"rate": rate, "limit": most, "of the threshold": ratio}
            return alarm("spike_ahead", step, message, evidence)
    return None


def loss_events(looks: Sequence[Look], thresholds: Thresholds) -> Iterator[Event]:
    """Rising or jumping losses, measured against how much the losses changed before."""
    step, loss = looks[-1]
    earlier = [value for _, value in looks[:-1]]
    if len(earlier) < _LOOKS:
        return
    noise = _scatter(earlier)
    scatter = min(_SCATTER * noise, 50.0)
    lowest, usual = min(earlier), statistics.median(earlier[-5:])
    rise = lowest * max(thresholds.loss_rising, math.exp(scatter))
    told = f"the loss is {loss:.4g}, {{}} {{:.4g}}; it used to scatter by {noise:.1%}"
    if loss > rise and earlier[-1] > rise and not earlier[-2] > rise:
        message = told.format("twice above its lowest", lowest)
        evidence = {"loss": loss, "limit": rise, "before": earlier[-1], "lowest": lowest}
        yield alarm("loss_rising", step, message, evidence)
    jump = usual * max(thresholds.loss_spike, math.exp(scatter))
    if not loss <= jump and not earlier[-1] > jump:
        message = told.format("usually", usual)
        yield alarm("loss_spike", step, message, {"loss": loss, "limit": jump, "usual": usual})


def _scatter(losses: Sequence[float]) -> float:
    """Robust standard deviation of the logarithm's changes around their trend."""
    if min(losses) <= 0:
        return math.inf
    logs = [math.log(value) for value in losses]
    changes = [b - a for a, b in itertools.pairwise(logs)]
    middle = statistics.median(changes)
    return 1.4826 * statistics.median(abs(change - middle) for change in changes)


def _blocks(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    """Roles whose gradient explodes and leads the others, or dies while the others live.

    A gradient that is zero by theory (a key's bias under softmax) is rounding in every snapshot:
    a role counts only where its usual share is above ``snapshot.rounding``. Gradients also grow
    tenfold when training begins to learn: they explode only where the loss rises with them.
    """
    if len(earlier) < 3:
        return
    rising = not snapshot.loss <= thresholds.loss_rising * min(s.loss for s in earlier)
    past = [*earlier, snapshot]
    for role, norm in snapshot.role_gradient.items():
        norms = [s.role_gradient.get(role, math.nan) for s in past]
        shares = [
            n / s.gradient_norm if s.gradient_norm > 0 else 0.0
            for n, s in zip(norms, past, strict=True)
        ]
        usual, usual_share = statistics.median(norms[:-1]), statistics.median(shares[:-1])
        if not usual_share > snapshot.rounding:
            continue
        most, least = thresholds.exploding * usual, thresholds.dead * usual_share
        if rising and norm > most and shares[-1] > _LEADING and norm > 3 * max(norms[:-1]):
            message = f"the gradient of {role} is {norm:.3g}, usually {usual:.3g}"
            evidence = {"gradient": norm, "limit": most, "usual": usual, "share": shares[-1]}
            yield alarm("exploding_block", snapshot.step, message, evidence)
        if shares[-1] < least and shares[-2] < least and not shares[-3] < least:
            part = f"{shares[-1]:.2g} of the whole, usually {usual_share:.2g}"
            message = f"the gradient of {role} is {part}"
            evidence = {"share": shares[-1], "limit": least, "usual": usual_share}
            yield alarm("dead_block", snapshot.step, message, evidence)


# --- where snapshots go: each library is imported on use ------------------------------------------


class Tracker:
    """Takes every snapshot with the events it raised."""

    def write(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        """Store one snapshot."""
        raise TypeError(f"{type(self).__name__} stores nothing.")

    def notify(self, events: Sequence[Event]) -> None:
        """Store events that rose between two snapshots."""

    def close(self) -> None:
        """Release what was opened."""


class LinesTracker(Tracker):
    """One JSON object a line, flushed as it goes: a killed run keeps every finished line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        self._line({**snapshot.to_dict(), "events": [event.to_dict() for event in events]})

    def notify(self, events: Sequence[Event]) -> None:
        self._line({"step": events[0].step, "events": [event.to_dict() for event in events]})

    def _line(self, line: dict[str, Any]) -> None:
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
        self.notify(events)

    def notify(self, events: Sequence[Event]) -> None:
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

    def notify(self, events: Sequence[Event]) -> None:
        values = {f"curvature/events/{event.name}": event.value for event in events}
        self._run.log(values, step=events[0].step)


class MlflowTracker(Tracker):
    """Metrics under ``curvature/…`` in an MLflow run (the active one, or ``run_id``)."""

    def __init__(self, run_id: str | None = None) -> None:
        try:
            self._mlflow: Any = importlib.import_module("mlflow")
        except ImportError as error:
            raise ImportError(
                "MlflowTracker needs mlflow: pip install 'curvatlas[trackers]'."
            ) from error
        if run_id is None:
            active = self._mlflow.active_run()
            if active is None:
                raise ValueError("no MLflow run is active: start one, or give its run_id.")
            run_id = active.info.run_id
        self._run_id = run_id

    def write(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        values = {f"curvature/{name}": value for name, value in scalars(snapshot).items()}
        self._mlflow.log_metrics(values, step=snapshot.step, run_id=self._run_id)
        self.notify(events)

    def notify(self, events: Sequence[Event]) -> None:
        client = self._mlflow.MlflowClient()
        for event in events:
            client.set_tag(self._run_id, f"curvature/events/{event.step}/{event.name}", str(event))


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
        if monitor.optimizer is None:
            monitor.optimizer = others.get("optimizer")  # its rate and its metric
        monitor.step(step=int(state.global_step))

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
        if monitor.optimizer is None:
            monitor.optimizer = list(trainer.optimizers)  # their rates and their metrics
        monitor.step(step=int(trainer.global_step))

    return _callback(base, monitor, on_train_batch_end=on_train_batch_end)


def _callback(base: Any, monitor: Monitor, **hooks: Any) -> Any:
    def on_train_end(self: Any, *_: Any, **__: Any) -> None:
        monitor.close()

    return type("CurvatureCallback", (base,), {**hooks, "on_train_end": on_train_end})()
