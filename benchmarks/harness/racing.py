"""Training races: settings, contestants, what one step costs, tuning, and single runs."""

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

OURS = "CurvatureAwareOptimizer"
_JUDGED = 500  # samples that give a loss
_PERIOD = 10  # steps between two Hessian diagonals, eigenbases or roots of the peers
_BLOCK = 20  # steps timed together: two periods of a peer


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
    tuning_seeds: tuple[int, ...] = (10,)

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
            zoo.evaluate(model, samples.take(_JUDGED))[0]
            for samples in (self.tuning, self.data.validation)
        ]
        tuning, validation = (x if math.isfinite(x) else math.inf for x in found)
        return {"tuning": tuning, "validation": validation}


@dataclass(frozen=True)
class Racer:
    """An optimizer, where its tuning starts, and how often it needs a graph of its gradient."""

    name: str
    make: Callable[[nn.Module, float, float], Any]  # model, rate, momentum
    rate: float
    momentum: float = 0.9
    graph_every: int = 0

    def step(self, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, step: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward(create_graph=bool(self.graph_every) and step % self.graph_every == 0)
        optimizer.step()


def settings() -> dict[str, Callable[[], Setting]]:
    """Name → how to make it; Fashion-MNIST only where it is installed (FileNotFoundError)."""

    def digits() -> Setting:
        data = zoo.digits(seed=7)  # not the split on which the method was developed
        return Setting(
            "ViT, digits", lambda seed: zoo.reference_vit(seed=seed), data, 64, 200, (10, 11)
        )

    def fashion() -> Setting:
        sizes = {"image_size": 28, "patch_size": 7, "d_model": 32, "n_heads": 4, "n_layers": 2}
        return Setting(
            "ViT, Fashion-MNIST",
            lambda seed: zoo.reference_vit(seed=seed, norm_first=True, **sizes),
            zoo.fashion_mnist(),
            32,
            120,
        )

    def gpt() -> Setting:
        data = zoo.text(level="character", context=64)
        return Setting(
            "GPT, characters",
            lambda seed: zoo.reference_gpt(seed=seed, vocabulary=data.classes),
            data,
            16,
            120,
        )

    def gpt_1m() -> Setting:
        data = zoo.text(level="character", context=64)
        sizes = {"vocabulary": data.classes, "n_layers": 5}  # 1.02 M parameters
        return Setting("GPT, 1 M", lambda seed: zoo.benchmark_gpt(seed=seed, **sizes), data, 8, 50)

    return {"digits": digits, "fashion": fashion, "gpt": gpt, "gpt-1m": gpt_1m}


def racers() -> list[Racer]:
    """AdamW first (the fastest form there is); the peers where they are installed."""
    found = [
        Racer(
            "AdamW",
            lambda m, lr, b: torch.optim.AdamW(m.parameters(), lr, betas=(b, 0.999), fused=True),
            1.6e-2,
        ),
        Racer(
            OURS,
            lambda m, lr, b: ca.CurvatureAwareOptimizer(m, lr, momentum=b),
            6.4e-2,
            0.95,
        ),
    ]
    if hasattr(torch.optim, "Muon"):
        found.append(Racer("Muon + AdamW", MuonAdamW, 6.4e-2, 0.95))
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        import pytorch_optimizer as peers

        period = {"update_period": _PERIOD}
        roots: dict[str, Any] = {
            "preconditioning_compute_steps": _PERIOD,
            "start_preconditioning_step": _PERIOD,
            "graft_type": 2,  # AdaGrad's step size, the strongest of its graftings on digits
        }
        found += [
            Racer(
                "SOAP",
                lambda m, lr, b: peers.SOAP(m.parameters(), lr, betas=(b, 0.95)),
                1.6e-2,
                0.95,
            ),
            Racer("Kron", lambda m, lr, b: peers.Kron(m.parameters(), lr, momentum=b), 4e-3),
            Racer(
                "Shampoo",
                lambda m, lr, b: peers.ScalableShampoo(
                    m.parameters(), lr, betas=(b, 0.999), **roots
                ),
                1.6e-2,
            ),
            Racer(
                "SophiaH",
                lambda m, lr, b: peers.SophiaH(m.parameters(), lr, betas=(b, 0.99), **period),
                0.2,
                0.95,
                _PERIOD,
            ),
            Racer(
                "AdaHessian",
                lambda m, lr, b: peers.AdaHessian(m.parameters(), lr, betas=(b, 0.999), **period),
                0.04,
                0.9,
                _PERIOD,
            ),
            Racer(
                "schedule-free AdamW",
                lambda m, lr, b: _training(
                    peers.ScheduleFreeAdamW(
                        m.parameters(), lr, betas=(b, 0.999), weight_decay=0.01, warmup_steps=20
                    )
                ),
                1.6e-2,
            ),
        ]
    return found


class MuonAdamW:
    """``torch.optim.Muon`` for the matrices between embedding and head, AdamW for the rest.

    AdamW's rate is a quarter of Muon's, for everyone's tuning is of one rate.
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        places = {piece.parameter: piece.sublayer for piece in anatomy_of(model).slices}
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            inside = parameter.ndim == 2 and places.get(name) not in ("embedding", "head")
            (matrices if inside else others).append(parameter)
        self.parts = [
            torch.optim.Muon(matrices, lr, momentum=momentum),
            torch.optim.AdamW(others, lr, fused=True),
        ]

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
    """One rate for all groups."""
    if hasattr(optimizer, "set_rate"):
        optimizer.set_rate(rate)
        return
    for group in optimizer.param_groups:
        group["lr"] = rate


def step_cost(setting: Setting, adamw: Racer, racer: Racer, *, rounds: int) -> float:
    """Processor time of a step over that of AdamW's: blocks of both in turn, median of ratios."""
    running = []
    for contestant in (adamw, racer):
        model = setting.model(0)
        optimizer = contestant.make(model, contestant.rate, contestant.momentum)
        running.append((contestant, model, optimizer, setting.batches(0)))
    taken: list[list[float]] = [[], []]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(rounds + 1):
            for times, (contestant, model, optimizer, draw) in zip(taken, running, strict=True):
                began = time.process_time()
                for step in range(_BLOCK):
                    contestant.step(model, optimizer, *next(draw), step)
                if turn:  # the first round warms up
                    times.append(time.process_time() - began)
    return statistics.median(own / base for base, own in zip(*taken, strict=True))


class Notebook:
    """Finished runs by name, a line each: a stopped benchmark goes on where it was.

    Several processes may write to one file: lines are appended whole.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self.known.update(json.loads(line))

    def once(self, key: str, function: Callable[[], Any]) -> Any:
        """What ``function`` gave, now or in an earlier process."""
        if key not in self.known:
            self.known[key] = function()
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({key: self.known[key]}) + "\n")
        return self.known[key]


@dataclass(frozen=True)
class Tuned:
    """The best pair that was tried, and whether its four neighbours are worse."""

    rate: float
    momentum: float
    inside: bool
    tried: dict[tuple[float, float], float]  # (rate, momentum) → loss on the tuning samples


def tune(racer: Racer, loss: Callable[[float, float], float], *, most: int = 16) -> Tuned:
    """Rate and 1 − momentum by factors of two, until both neighbours of the best are worse.

    The rate first, then the momentum, then again what the other's change may have moved; ``most``
    pairs at the most. The last momentum is none at all, and needs no neighbour beyond.
    """
    tried: dict[tuple[int, int], float] = {}

    def pair(place: tuple[int, int]) -> tuple[float, float]:
        momentum = max(0.0, 1 - (1 - racer.momentum) * 2.0 ** place[1])
        return racer.rate * 2.0 ** place[0], round(momentum, 6)

    def possible(place: tuple[int, int]) -> bool:
        return place[1] <= 0 or pair((place[0], place[1] - 1))[1] > 0

    def look(place: tuple[int, int]) -> None:
        if place not in tried and len(tried) < most and possible(place):
            tried[place] = loss(*pair(place))

    look((0, 0))
    best, axis, settled = (0, 0), 0, 0
    while settled < 2 and len(tried) < most:
        for shift in (-1, 1):
            look((best[0] + shift, best[1]) if axis == 0 else (best[0], best[1] + shift))
        lowest = min(tried, key=lambda place: tried[place])
        if lowest == best:
            axis, settled = 1 - axis, settled + 1
        else:
            best, settled = lowest, 0
    around = [(best[0] + i, best[1] + j) for i, j in ((-1, 0), (1, 0), (0, -1), (0, 1))]
    rate, momentum = pair(best)
    inside = all(place in tried or not possible(place) for place in around)
    return Tuned(rate, momentum, inside, {pair(place): x for place, x in tried.items()})


def race(
    setting: Setting,
    racer: Racer,
    rate: float,
    momentum: float,
    *,
    steps: int,
    seed: int,
    schedule: bool = True,
) -> Losses:
    """Losses after ``steps``.

    schedule: warm-up and cosine decay; without, a constant rate from the first step on.
    """
    model = setting.model(seed).train()
    optimizer = racer.make(model, rate, momentum)
    free = hasattr(optimizer, "eval")  # schedule-free: warm-up and averaging are its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers need backward(create_graph=True), which warns
        for step, (x, y) in zip(range(steps), setting.batches(seed), strict=False):
            factor = 1.0
            if schedule and not free:
                factor = min(1.0, (step + 1) / max(1, steps // 20))
                factor *= 0.5 * (1 + math.cos(math.pi * step / steps))
            set_rate(optimizer, rate * factor)
            racer.step(model, optimizer, x, y, step)
    if free:
        optimizer.eval()
    return setting.losses(model)
