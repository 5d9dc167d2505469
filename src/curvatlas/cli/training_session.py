"""A training run that can be stopped anywhere: the same weights as if it had never stopped.

The state is written between two steps only, so that it is always that of one moment; the state
before the last one stays beside it, and is taken when the last one is damaged.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvatlas.files import previous, write_keeping_previous
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.runs.subject import of_data, of_model
from curvatlas.training.alarms import Event
from curvatlas.training.monitor import Monitor
from curvatlas.training.optimizer import CurvatureAwareOptimizer
from curvatlas.training.snapshot import Snapshot
from curvatlas.zoo.datasets import Dataset
from curvatlas.zoo.training import TrainingHistory, evaluate, loss_of, set_rates

# What worked best on the zoo's models; "curvature" finds its own rate below the one it is given.
RATES: dict[str, float] = {"curvature": 0.1, "adamw": 1.6e-2, "sgd": 0.1}


@dataclass(frozen=True, kw_only=True)
class TrainingCheckpoint(Result):
    """Everything a session needs to go on."""

    step: int
    losses: tuple[float, ...]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # "parameter/entry" → tensor
    groups: list[dict[str, Any]]
    warm_start: dict[str, Tensor]  # of the monitor
    role_sharpness: dict[str, float]
    turn: int
    snapshots: tuple[Snapshot, ...]
    events: tuple[Event, ...]
    skipped: int = 0  # measurements the monitor left out
    fingerprint: dict[str, str] = field(default_factory=dict)  # of the training it belongs to


def make_optimizer(
    name: str, model: nn.Module, *, lr: float, weight_decay: float = 0.01
) -> Optimizer:
    """``curvature``, ``adamw`` or ``sgd`` (with momentum 0.9)."""
    if name == "curvature":
        return CurvatureAwareOptimizer(model, lr, weight_decay=weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=weight_decay)
    raise ValueError(f"optimizer is 'curvature', 'adamw' or 'sgd', got {name!r}.")


class Session:
    """Trains with warm-up and cosine decay, the monitor beside it, a checkpoint now and then.

    The batch of step k depends on ``seed`` and k alone, so that a resumed session draws the same.
    A checkpoint of another training (model, data, optimizer, seed, steps) is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        optimizer: Optimizer,
        monitor: Monitor,
        *,
        steps: int,
        batch_size: int,
        seed: int = 0,
        checkpoint: Path | None = None,
        checkpoint_every: int = 50,
    ) -> None:
        self.model, self.data, self.optimizer, self.monitor = model, data, optimizer, monitor
        self.steps, self.seed = steps, seed
        self.batch_size = min(batch_size, data.train.size)
        if checkpoint is not None and checkpoint.suffix != ".safetensors":
            checkpoint = checkpoint.with_name(checkpoint.name + ".safetensors")
        self.checkpoint, self.checkpoint_every = checkpoint, checkpoint_every
        self.step, self.losses = 0, []  # type: int, list[float]
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._epoch: tuple[int, Tensor] | None = None
        self._fingerprint = {} if checkpoint is None else self._describe()

    def _describe(self) -> dict[str, str]:
        """What must agree between the session that wrote a checkpoint and the one that reads it."""
        groups = [
            {k: v for k, v in group.items() if k not in ("params", "lr") and _storable(v)}
            for group in self.optimizer.param_groups
        ]
        return {
            "model": of_model(self.model),
            "data": of_data([tuple(self.data.train), tuple(self.data.validation)]),
            "optimizer": f"{type(self.optimizer).__name__} {self._rates} {groups}",
            "steps": str(self.steps),
            "batch size": str(self.batch_size),
            "seed": str(self.seed),
            "steps between measurements": str(self.monitor.every),
        }

    def run(self, watch: Callable[[int, float], None] | None = None) -> TrainingHistory:
        """Train to the end; ``watch(step, loss)`` is called before each update."""
        kept = self._stored()
        if kept is not None:
            self.restore(kept)
        self.model.train()
        with bar("training", total=self.steps) as progress:
            progress.update(self.step)
            while self.step < self.steps:
                loss = self._advance()
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
                progress.update(1)
                if watch is not None:
                    watch(self.step, loss)
                if self.checkpoint is not None and self.step % self.checkpoint_every == 0:
                    self._store(self.checkpoint)
        self.model.zero_grad()
        self.model.eval()
        loss, accuracy = evaluate(self.model, self.data.validation)
        return TrainingHistory(
            steps=self.steps,
            losses=tuple(self.losses),
            validation_loss=loss,
            validation_accuracy=accuracy,
        )

    def _advance(self) -> float:
        set_rates(self.optimizer, self._rates, self.step, self.steps)
        x, y = self._batch()
        self.optimizer.zero_grad()
        value = loss_of("cross_entropy", self.model(x), y)
        loss = value.item()
        if not math.isfinite(loss):
            rate = max(self._rates)
            raise FloatingPointError(
                f"the loss is {loss} at step {self.step}: lower --lr (now {rate:g})."
            )
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss)
        self.monitor.step(step=self.step, loss=loss)
        self.step += 1
        return loss

    def _batch(self) -> tuple[Tensor, Tensor]:
        inputs, targets = self.data.train
        each = len(inputs) // self.batch_size
        epoch, place = divmod(self.step, each)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch = epoch, torch.randperm(len(inputs), generator=generator, device="cpu")
        chosen = self._epoch[1][place * self.batch_size : (place + 1) * self.batch_size]
        return inputs[chosen], targets[chosen]

    # --- stopping and going on --------------------------------------------------------------------

    def _store(self, path: Path) -> None:
        """Write the state; one that cannot be written costs the training nothing: it goes on."""
        save = functools.partial(self.state().save, path, keep_previous=True)
        try:
            write_keeping_previous(path, save)
        except OSError as error:
            kept = "the last one written stays valid" if path.exists() else "none was written yet"
            warnings.warn(
                f"cannot write the checkpoint {path} ({error.strerror or error}): free some space "
                f"or make the folder writable; the training goes on, and {kept}.",
                stacklevel=2,
            )

    def _stored(self) -> TrainingCheckpoint | None:
        """The last state on disk, or the one before it when the last one is damaged."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return None
        try:
            return TrainingCheckpoint.load(self.checkpoint)
        except (ValueError, TypeError) as error:
            damage = str(error).rstrip(".")
        again = "delete it to train from the beginning"
        older = previous(self.checkpoint)
        if not older.exists():
            raise ValueError(f"{damage}; there is no state before it: {again}.")
        try:
            kept = TrainingCheckpoint.load(older)
        except (ValueError, TypeError):
            raise ValueError(f"{damage}; neither is the state before it whole: {again}.") from None
        warnings.warn(
            f"{damage}: the training goes on from the state before it, after step {kept.step}.",
            stacklevel=3,
        )
        return kept

    def state(self) -> TrainingCheckpoint:
        """A copy of everything that moves."""
        optimizer_state = self.optimizer.state_dict()
        warm, sharpness, turn = self.monitor.warm_start()
        return TrainingCheckpoint(
            step=self.step,
            losses=tuple(self.losses),
            weights={k: v.detach().clone() for k, v in self.model.state_dict().items()},
            optimizer={
                f"{index}/{name}": torch.as_tensor(value).clone()
                for index, entries in optimizer_state["state"].items()
                for name, value in entries.items()
                if value is not None
            },
            groups=[
                {k: v for k, v in g.items() if _storable(v)}
                for g in optimizer_state["param_groups"]
            ],
            warm_start=warm,
            role_sharpness=sharpness,
            turn=turn,
            snapshots=tuple(self.monitor.snapshots),
            events=tuple(self.monitor.events),
            skipped=self.monitor.skipped,
            fingerprint=dict(self._fingerprint),
        )

    def restore(self, kept: TrainingCheckpoint) -> None:
        """Go on from ``state()``; ValueError, and nothing changed, on that of another training."""
        ours, theirs = self._fingerprint, kept.fingerprint
        differing = [k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)]
        if differing:
            raise ValueError(
                f"{self.checkpoint} belongs to another training (other {', '.join(differing)}): "
                "delete it, or name another file, to train from the beginning."
            )
        self.step, self.losses = kept.step, list(kept.losses)
        self.model.load_state_dict(kept.weights)
        states: dict[int, dict[str, Tensor]] = {}
        for key, tensor in kept.optimizer.items():
            index, name = key.split("/", 1)
            states.setdefault(int(index), {})[name] = tensor
        groups = [
            {**now, **then}
            for now, then in zip(
                self.optimizer.state_dict()["param_groups"], kept.groups, strict=True
            )
        ]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        self.monitor.resume(
            kept.warm_start, kept.role_sharpness, kept.turn, kept.snapshots, kept.events
        )
        self.monitor.skipped = kept.skipped


def _storable(value: Any) -> bool:
    """Plain numbers and what is made of them; ``None`` and flags keep their defaults."""
    if isinstance(value, Mapping):
        return all(_storable(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_storable(v) for v in value)
    return isinstance(value, (bool, int, float, str)) or value is None
