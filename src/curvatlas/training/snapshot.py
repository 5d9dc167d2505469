"""What the monitor writes down: snapshots, their history, and where both go with the events."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvatlas.analysis.atlas.result import Atlas
from curvatlas.figures.maps import draw_film
from curvatlas.fits import rank_correlation
from curvatlas.results import Interval, Number, Result
from curvatlas.training.alarms import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.training.monitor import Monitor


_UNKNOWN = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Snapshot(Result):
    """Curvature of the loss on the monitor's data at one training step."""

    step: int
    loss: float  # on the monitor's data
    learning_rate: float | None
    sharpness: float  # λmax of H
    sharpness_interval: Interval  # certain, from the residual
    most_negative: float  # λmin of H
    most_negative_interval: Interval | None = None  # certain; None in files of before
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
    rate_limited: bool = False  # the optimizer holds its own rate to the curvature: no alarms
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
        parts = [
            f"step {self.step}: loss {self.loss:.4g}",
            f"λmax {Number(self.sharpness, *self.sharpness_interval)}",
            f"λmin {Number(self.most_negative, *(self.most_negative_interval or _UNKNOWN))}",
            f"tr H {Number(self.trace, *self.trace_interval)}",
        ]
        if self.edge is not None and self.edge_threshold:
            low, high = self.edge_interval or _UNKNOWN
            parts.append(f"λmax(P⁻¹H) {Number(self.edge, low, high)}")
            limit = self.edge_threshold
            parts.append(f"{Number(self.edge / limit, low / limit, high / limit)} of the edge")
        return ", ".join(parts)


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
        count = len(self.snapshots)
        taken = "1 snapshot" if count == 1 else f"{count} snapshots"
        left_out = f", {self.skipped} skipped to stay within the budget" if self.skipped else ""
        lines.append(f"{taken}{left_out}, overhead {self.overhead:.1%}")
        return "\n".join(lines)

    @property
    def mapped(self) -> tuple[Snapshot, ...]:
        """The snapshots that carry maps (``Monitor(maps=True)``)."""
        return tuple(snapshot for snapshot in self.snapshots if snapshot.maps is not None)

    def film(self, view: str = "role", part: str = "total") -> Figure:
        """The maps over training as small multiples on one colour scale."""
        return draw_film(self, view=view, part=part)

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

    def _derived(self) -> dict[str, Any]:
        return {"answer": self.answer}

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

    batches = _BatchLosses()

    def on_step_begin(self: Any, *_: Any, model: Any = None, **others: Any) -> None:
        batches.listen(model)

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        loss = batches.taken()
        if monitor.optimizer is None:
            monitor.optimizer = others.get("optimizer")  # its rate and its metric
        monitor.step(step=int(state.global_step), loss=loss)

    return _callback(base, monitor, on_step_begin=on_step_begin, on_step_end=on_step_end)


class _BatchLosses:
    """The loss of each batch that a model is trained on: the Trainer shows its callbacks none.

    Listens only while a step is under way: what is measured after it is the model without a hook.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._shares = False  # whether they are parts of one mean
        self._handle: Any = None

    def listen(self, model: Any) -> None:
        """From now on; None where the Trainer does not say which model it is."""
        self.taken()
        if isinstance(model, nn.Module):
            self._handle = model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, _: Any, kwargs: Any, outputs: Any) -> None:
        loss = getattr(outputs, "loss", None)
        if model.training and isinstance(loss, Tensor) and loss.requires_grad:
            self._losses.append(loss.detach().mean())
            # With this each batch of an accumulated step is divided by the targets of all of them.
            self._shares = kwargs.get("num_items_in_batch") is not None

    def taken(self) -> Tensor | None:
        """The step's mean loss, and no more listening; None where the model told none."""
        if self._handle is not None:
            self._handle.remove()
        losses, self._losses, self._handle = self._losses, [], None
        if not losses:
            return None
        return torch.stack(losses).sum() if self._shares else torch.stack(losses).mean()


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
    losses: list[Tensor] = []  # of the batches since, each divided by their number

    def on_train_batch_end(
        self: Any, trainer: Any, module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            losses.append(loss.detach())
        if int(trainer.global_step) == seen[0]:
            return
        seen[0] = int(trainer.global_step)
        if monitor.optimizer is None:
            monitor.optimizer = list(trainer.optimizers)  # their rates and their metrics
        loss = torch.stack(losses).sum() if losses else None
        losses.clear()
        monitor.step(step=int(trainer.global_step), loss=loss)

    return _callback(base, monitor, on_train_batch_end=on_train_batch_end)


def _callback(base: Any, monitor: Monitor, **hooks: Any) -> Any:
    def on_train_end(self: Any, *_: Any, **__: Any) -> None:
        monitor.close()

    return type("CurvatureCallback", (base,), {**hooks, "on_train_end": on_train_end})()
