"""A plain training loop: deterministic, one optimizer, nothing hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.zoo.datasets import Dataset, Samples

Loss = Literal["cross_entropy", "mse"] | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingHistory(Result):
    """What a run of ``train`` did."""

    steps: int
    losses: tuple[float, ...]  # of each step's batch, before its update
    validation_loss: float | None
    validation_accuracy: float | None  # None without class targets

    def __str__(self) -> str:
        text = f"{self.steps} steps, training loss {self.losses[0]:.3f} → {self.losses[-1]:.3f}"
        if self.validation_loss is not None:
            text += f", validation loss {self.validation_loss:.3f}"
        if self.validation_accuracy is not None:
            text += f", accuracy {self.validation_accuracy:.1%}"
        return text


def loss_of(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss; cross-entropy takes (..., C) logits and (...) labels, −100 meaning no target."""
    if loss == "cross_entropy":
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    if loss == "mse":
        return (outputs - targets).pow(2).mean()
    if isinstance(loss, str):
        raise ValueError(f"loss must be 'cross_entropy', 'mse' or a callable, got {loss!r}.")
    return loss(outputs, targets)


def set_rates(
    optimizer: torch.optim.Optimizer,
    rates: Sequence[float],
    step: int,
    steps: int,
    schedule: Literal["cosine", "constant"] = "cosine",
) -> None:
    """Each group's share of its rate at one step: warm-up, then cosine decay or none."""
    # Warm-up over the first twentieth: post-norm blocks diverge at full rate from step 0.
    factor = min(1.0, (step + 1) / max(1, steps // 20))
    if schedule == "cosine":
        factor *= 0.5 * (1 + math.cos(math.pi * step / steps))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


def train(
    model: nn.Module,
    data: Dataset | tuple[Any, Tensor],
    *,
    steps: int = 800,
    lr: float = 5e-3,
    batch_size: int = 64,
    seed: int = 0,
    loss: Loss | Problem = "cross_entropy",
    weight_decay: float = 0.01,
    schedule: Literal["cosine", "constant"] = "cosine",
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> TrainingHistory:
    """Train ``model`` in place with AdamW (or what ``optimizer`` makes of the parameters).

    Batches are drawn without replacement, epoch after epoch, from a generator of ``seed``: the
    same call gives the same weights. ``on_step(step, loss)`` is called before each update. The
    model's training mode is left as it was found.

    loss: also a ``Problem`` of the same model, which then reads batches and loss as it always does
    (mappings with labels, a Hugging Face model's outputs).
    """
    samples, validation = (
        (data.train, data.validation) if isinstance(data, Dataset) else (Samples(*data), None)
    )
    if steps < 1 or batch_size < 1 or samples.size == 0:
        raise ValueError(
            f"training needs steps, batch_size and samples of at least 1, got steps={steps}, "
            f"batch_size={batch_size}, {samples.size} samples."
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        update: torch.optim.Optimizer = torch.optim.AdamW(
            parameters, lr=lr, weight_decay=weight_decay
        )
    else:
        update = optimizer(parameters)
    rates = [float(group["lr"]) for group in update.param_groups]
    draw = _batches(samples.size, batch_size, torch.Generator().manual_seed(seed))

    losses = []
    was_training = model.training
    model.train()
    for step in track(range(steps), "training", total=steps):
        set_rates(update, rates, step, steps, schedule)
        batch = samples.at(next(draw))
        if isinstance(loss, Problem):
            value = loss.training_loss(batch.batch)
        else:
            value = loss_of(loss, model(batch.inputs), batch.targets)
        losses.append(value.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]} at step {step}: lower lr={lr}.")
        if on_step is not None:
            on_step(step, losses[-1])
        update.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        update.step()
    model.zero_grad()
    model.train(was_training)

    scores = evaluate(model, validation, loss=loss) if validation is not None else (None, None)
    return TrainingHistory(
        steps=steps,
        losses=tuple(losses),
        validation_loss=scores[0],
        validation_accuracy=scores[1],
    )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: tuple[Any, Tensor],
    *,
    loss: Loss | Problem = "cross_entropy",
    batch_size: int = 256,
) -> tuple[float, float | None]:
    """Mean loss over ``data`` and, for class targets, the share of right predictions."""
    if isinstance(loss, Problem):
        return _evaluate(loss.with_data([b.batch for b in Samples(*data).batches(batch_size)]))
    was_training = model.training
    model.eval()
    total, right, count = 0.0, 0, 0
    classes = not data[1].is_floating_point()
    for inputs, targets in Samples(*data).batches(batch_size):
        outputs = model(inputs)
        valid = targets != -100 if classes else torch.ones_like(targets, dtype=torch.bool)
        weight = int(valid.sum())
        if weight == 0:
            continue
        total += loss_of(loss, outputs, targets).item() * weight
        count += weight
        if classes:
            right += int(((outputs.argmax(-1) == targets) & valid).sum())
    model.train(was_training)
    if count == 0:
        raise ValueError("there is no valid target to evaluate on.")
    return total / count, right / count if classes else None


def _evaluate(problem: Problem) -> tuple[float, float | None]:
    """The same of a Problem's data, in evaluation mode."""
    total, right, count, classes = 0.0, 0, 0.0, True
    with problem.evaluating(), torch.no_grad():
        for batch in problem.batches():
            outputs, targets = problem.outputs(batch, {}), batch.targets
            total += float(problem.loss.value(outputs, targets)) * batch.count
            count += batch.count
            classes = classes and problem.loss.name == "cross_entropy"
            classes = classes and not targets.is_floating_point()
            if classes:
                right += int((outputs.argmax(-1) == targets).sum())  # no class is −100
    return total / count, right / count if classes else None


def _batches(total: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    size = min(size, total)
    while True:
        order = torch.randperm(total, generator=generator)
        for start in range(0, total - total % size, size):
            yield order[start : start + size]
