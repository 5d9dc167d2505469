"""Where snapshots go: a file of lines, TensorBoard, Weights & Biases; each imported on use."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvatlas.training.snapshot import Event, Snapshot


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


def scalars(snapshot: Snapshot) -> dict[str, float]:
    """Every number of a snapshot by a flat name."""
    plain = {
        name: float(getattr(snapshot, name))
        for name in (
            "loss",
            "sharpness",
            "most_negative",
            "trace",
            "negative_mass",
            "gradient_norm",
            "gradient_alignment",
        )
    }
    if snapshot.stability is not None:
        plain["stability"] = snapshot.stability
    if snapshot.drift is not None:
        plain["drift"] = snapshot.drift
    for group in ("role_sharpness", "role_trace", "role_gradient"):
        for role, value in getattr(snapshot, group).items():
            plain[f"{group}/{role}"] = float(value)
    return plain
