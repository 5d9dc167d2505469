"""What the monitor writes down at one moment of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from curvatlas.results import Result

Interval = tuple[float, float]


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

    @property
    def stability(self) -> float | None:
        """Sharpness × learning rate; gradient descent is unstable above 2."""
        return None if self.learning_rate is None else self.sharpness * self.learning_rate

    def __str__(self) -> str:
        low, high = self.sharpness_interval
        parts = [
            f"step {self.step}: loss {self.loss:.4g}",
            f"λmax {self.sharpness:.4g} ± {(high - low) / 2:.1g}",
            f"λmin {self.most_negative:.3g}",
            f"tr H {self.trace:.4g}",
        ]
        if self.stability is not None:
            parts.append(f"λmax·η {self.stability:.3g} (edge 2)")
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

    def plot(self) -> Any:
        """Loss, sharpness against 2/η, trace and negative mass over the steps, as a figure."""
        from curvatlas.training.figures import history_figure

        return history_figure(self)
