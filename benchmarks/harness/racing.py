"""Training races: settings, contestants, what one step costs, and runs of equal processor time."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.anatomy import anatomy_of

Losses = dict[str, float]

_PERIOD = 10  # steps between two Hessian diagonals of the peers


@dataclass(frozen=True)
class Setting:
    """A model, its data, and how long AdamW trains.

    Rates are chosen on ``tuning``, a tenth of the training samples that nobody trains on; the
    verdict is given on the validation samples, which nothing else looks at.
    """

    name: str
    model: Callable[[int], nn.Module]
    data: zoo.Dataset
    batch_size: int
    steps: int

    @property
    def tuning(self) -> zoo.Samples:
        return self._part(slice(0, self.data.train.size // 10))

    @property
    def train(self) -> zoo.Samples:
        return self._part(slice(self.data.train.size // 10, None))

    def _part(self, which: slice) -> zoo.Samples:
        return zoo.Samples(*(tensor[which] for tensor in self.data.train))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1000 + seed)
        inputs, targets = self.train
        while True:
            order = torch.randperm(len(inputs), generator=generator)
            for start in range(0, len(inputs) - self.batch_size + 1, self.batch_size):
                chosen = order[start : start + self.batch_size]
                yield inputs[chosen], targets[chosen]

    def losses(self, model: nn.Module) -> Losses:
        """On the tuning and on the validation samples; ∞ when it diverged."""
        found = [
            zoo.evaluate(model, samples.take(2000))[0]
            for samples in (self.tuning, self.data.validation)
        ]
        tuning, validation = (x if math.isfinite(x) else math.inf for x in found)
        return {"tuning": tuning, "validation": validation}


@dataclass(frozen=True)
class Racer:
    """An optimizer, the rates that are tried, and how often it needs a graph of its gradient."""

    name: str
    make: Callable[[nn.Module, float], Any]
    rates: tuple[float, ...]
    graph_every: int = 0

    def step(self, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, step: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward(create_graph=bool(self.graph_every) and step % self.graph_every == 0)
        optimizer.step()


def settings() -> dict[str, Callable[[], Setting]]:
    """Name → how to make it; Fashion-MNIST only where it is installed (FileNotFoundError)."""

    def gpt() -> Setting:
        data = zoo.text(level="character", context=64)
        return Setting("GPT, characters", lambda seed: zoo.reference_gpt(
            seed=seed, vocabulary=data.classes), data, 16, 400)  # fmt: skip

    def digits() -> Setting:
        data = zoo.digits(seed=7)  # not the split on which the method was developed
        return Setting("ViT, digits", lambda seed: zoo.reference_vit(seed=seed), data, 64, 800)

    def fashion() -> Setting:
        sizes = {"image_size": 28, "patch_size": 7, "d_model": 32, "n_heads": 4, "n_layers": 2}
        return Setting("ViT, Fashion-MNIST", lambda seed: zoo.reference_vit(
            seed=seed, norm_first=True, **sizes), zoo.fashion_mnist(), 64, 400)  # fmt: skip

    return {"digits": digits, "gpt": gpt, "fashion": fashion}


def racers() -> list[Racer]:
    """AdamW first (the fastest form there is); the peers where they are installed."""
    found = [
        Racer("AdamW", lambda m, lr: torch.optim.AdamW(m.parameters(), lr, fused=True),
              _grid(2e-3)),
        Racer("CurvatureAwareOptimizer", lambda m, lr: ca.CurvatureAwareOptimizer(m, lr),
              _grid(4e-3)),
    ]  # fmt: skip
    if hasattr(torch.optim, "Muon"):
        found.append(Racer("Muon + AdamW", MuonAdamW, _grid(2e-2)))
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        import pytorch_optimizer as peers

        period = {"update_period": _PERIOD}
        found += [
            Racer("SophiaH", lambda m, lr: peers.SophiaH(m.parameters(), lr, **period),
                  _grid(0.05), _PERIOD),
            Racer("AdaHessian", lambda m, lr: peers.AdaHessian(m.parameters(), lr, **period),
                  _grid(0.005), _PERIOD),
            Racer("SOAP", lambda m, lr: peers.SOAP(m.parameters(), lr), _grid(4e-3)),
            Racer("Kron", lambda m, lr: peers.Kron(m.parameters(), lr), _grid(2e-3)),
            Racer("Shampoo", lambda m, lr: peers.ScalableShampoo(m.parameters(), lr), _grid(2e-2)),
        ]  # fmt: skip
    if importlib.util.find_spec("schedulefree") is not None:
        import schedulefree

        found.append(
            Racer("schedule-free AdamW", lambda m, lr: _training(
                schedulefree.AdamWScheduleFree(m.parameters(), lr, warmup_steps=20)),
                _grid(2e-3)))  # fmt: skip
    return found


class MuonAdamW:
    """``torch.optim.Muon`` for the matrices between embedding and head, AdamW for the rest.

    AdamW's rate is a quarter of Muon's, for everyone's tuning is of one rate.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        places = {piece.parameter: piece.sublayer for piece in anatomy_of(model).slices}
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            inside = parameter.ndim == 2 and places.get(name) not in ("embedding", "head")
            (matrices if inside else others).append(parameter)
        self.parts = [torch.optim.Muon(matrices, lr), torch.optim.AdamW(others, lr, fused=True)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def set_rate(self, rate: float) -> None:
        for part, share in zip(self.parts, (1.0, 0.25), strict=True):
            for group in part.param_groups:
                group["lr"] = share * rate

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()


def _training(optimizer: Any) -> Any:
    """A schedule-free optimizer trains on other weights than it is judged by."""
    optimizer.train()
    return optimizer


def set_rate(optimizer: Any, rate: float) -> None:
    """One rate for all groups; schedule-free optimizers keep their own from the first step on."""
    if hasattr(optimizer, "set_rate"):
        optimizer.set_rate(rate)
        return
    for group in optimizer.param_groups:
        group["lr"] = rate


def _grid(smallest: float) -> tuple[float, ...]:
    """Six rates, each twice the one before."""
    return tuple(smallest * 2**power for power in range(6))


def step_costs(setting: Setting, contestants: list[Racer], *, rounds: int) -> dict[str, float]:
    """Processor time of a step over that of AdamW's: ten steps each in turn, medians."""
    running = []
    for racer in contestants:
        model = setting.model(0)
        running.append((racer, model, racer.make(model, racer.rates[0]), setting.batches(0)))
    taken: dict[str, list[float]] = {racer.name: [] for racer in contestants}
    for turn in range(rounds + 1):
        for racer, model, optimizer, draw in running:
            began = time.process_time()
            for step in range(_PERIOD):
                racer.step(model, optimizer, *next(draw), step)
            if turn:  # the first round warms up
                taken[racer.name].append((time.process_time() - began) / _PERIOD)
    base = taken[contestants[0].name]
    return {
        name: statistics.median(t / b for t, b in zip(times, base, strict=True))
        for name, times in taken.items()
    }


class Notebook:
    """Finished runs by name, written down after each: a stopped benchmark goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Any] = {}
        if path is not None and path.exists():
            self.known = json.loads(path.read_text(encoding="utf-8"))

    def once(self, key: str, function: Callable[[], Any]) -> Any:
        """What ``function`` gave, now or in an earlier process."""
        if key not in self.known:
            self.known[key] = function()
            if self.path is not None:
                self.path.write_text(json.dumps(self.known, indent=1), encoding="utf-8")
        return self.known[key]


def race(
    setting: Setting, racer: Racer, rate: float, *, steps: int, seed: int, schedule: bool
) -> Losses:
    """Losses after ``steps``.

    schedule: warm-up and cosine decay; without, a constant rate from the first step on.
    """
    model = setting.model(seed).train()
    optimizer = racer.make(model, rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers need backward(create_graph=True), which warns
        for step, (x, y) in zip(range(steps), setting.batches(seed), strict=False):
            factor = 1.0
            if schedule:
                factor = min(1.0, (step + 1) / max(1, steps // 20))
                factor *= 0.5 * (1 + math.cos(math.pi * step / steps))
            # schedule-free: warm-up and averaging are its own
            free = hasattr(optimizer, "eval")
            set_rate(optimizer, rate if free else rate * factor)
            racer.step(model, optimizer, x, y, step)
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return setting.losses(model)
