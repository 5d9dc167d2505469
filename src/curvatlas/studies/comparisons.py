"""Comparisons as one call: the same measurements of several models, over seeds, side by side."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvatlas import display
from curvatlas.analysis.atlas.mapping import atlas
from curvatlas.analysis.atlas.result import Atlas
from curvatlas.fits import mean_reach
from curvatlas.linear_operator import PARTS
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.zoo import MLP, MLPConfig, ViT, ViTConfig, digits, reference_vit, train

Data = tuple[Tensor, Tensor]

QUANTITIES = {
    "loss": "loss",
    "norm": "‖H‖_F",
    "outer_norm": "‖H_o‖_F",
    "functional_norm": "‖H_f‖_F",
    "trace": "tr H",
    "outer_share": "‖H_o‖² / (‖H_o‖² + ‖H_f‖²)",
    "block_diagonal_share": "block-diagonal share of ‖H‖²",
    "layer_diagonal_share": "layer-diagonal share of ‖H‖²",
    "heterogeneity": "max / min diagonal block (per √entry)",
}


@dataclass(frozen=True, kw_only=True)
class Spread(Result):
    """A mean over seeds with its 95 % interval (Student; one seed has none)."""

    mean: float
    interval: tuple[float, float]
    values: tuple[float, ...]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.mean:.3g}" if low == high else f"{self.mean:.3g} [{low:.3g}, {high:.3g}]"


def spread_of(values: Iterable[float], *, ratio: bool = False) -> Spread:
    """Mean and Student interval; for positive ``ratio`` quantities geometric, in logarithms."""
    numbers = tuple(float(v) for v in values)
    if ratio and min(numbers) > 0:
        logs = spread_of(math.log(v) for v in numbers)
        low, high = logs.interval
        return Spread(
            mean=math.exp(logs.mean), interval=(math.exp(low), math.exp(high)), values=numbers
        )
    mean = float(np.mean(numbers))
    reach = mean_reach(numbers) if len(numbers) > 1 else 0.0
    return Spread(mean=mean, interval=(mean - reach, mean + reach), values=numbers)


@dataclass(frozen=True, kw_only=True)
class ModelComparison(Result):
    """One row a model; every number over the seeds, and the atlas of the first seed."""

    title: str
    rows: dict[str, dict[str, Spread]]  # model → quantity → spread
    roles: dict[str, dict[str, Spread]]  # model → role → ‖H_role,role‖_F
    atlases: dict[str, Atlas]
    seeds: int

    def __getitem__(self, name: str) -> dict[str, Spread]:
        return self.rows[name]

    def ratio(self, quantity: str, over: str, under: str) -> Spread:
        """The geometric mean over seeds of one model's number over another's."""
        top, bottom = self.rows[over][quantity].values, self.rows[under][quantity].values
        return spread_of((a / b for a, b in zip(top, bottom, strict=True)), ratio=True)

    def _rows(self) -> list[dict[str, Any]]:
        """Models in columns; quantities over the seeds and the map's diagonal in rows."""
        rows: list[dict[str, Any]] = [
            {"": label, **{name: str(row[key]) for name, row in self.rows.items() if key in row}}
            for key, label in QUANTITIES.items()
        ]
        views = {name: atlas.view("role") for name, atlas in self.atlases.items()}
        roles = dict.fromkeys(role for view in views.values() for role in view.names)
        return rows + [
            {"": f"‖H‖ of {role}"}
            | {name: view[role, role] for name, view in views.items() if role in view.names}
            for role in roles
        ]

    def __str__(self) -> str:
        quantities = display.Table.of(self._rows()[: len(QUANTITIES)])
        return f"{self.title} ({self.seeds} seeds, 95 %)\n{quantities}"


def compare(
    title: str,
    makers: Mapping[str, Callable[[int], Problem]],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    products: int | None = None,
    rtol: float = 0.08,
) -> ModelComparison:
    """Measure ``maker(seed)`` for every name and seed."""
    rows: dict[str, dict[str, Spread]] = {}
    roles: dict[str, dict[str, Spread]] = {}
    first: dict[str, Atlas] = {}
    for name, maker in track(makers.items(), title, total=len(makers)):
        numbers: list[dict[str, float]] = []
        by_role: list[dict[str, float]] = []
        for seed in seeds:
            problem = maker(seed)
            one = atlas(problem, method="sketch", rtol=rtol, products=products, seed=seed)
            first.setdefault(name, one)
            numbers.append(numbers_of(problem, one))
            by_view = one.view("role")
            by_role.append(
                dict(zip(by_view.names, by_view.values.diagonal().tolist(), strict=True))
            )
        rows[name] = {
            key: spread_of((f[key] for f in numbers), ratio=key != "trace") for key in QUANTITIES
        }
        roles[name] = {
            role: spread_of((r[role] for r in by_role), ratio=True) for role in by_role[0]
        }
    return ModelComparison(title=title, rows=rows, roles=roles, atlases=first, seeds=len(seeds))


def numbers_of(problem: Problem, one: Atlas) -> dict[str, float]:
    """The summary numbers of one atlas."""
    norms = {part: one.view("model", part=part)["model"] for part in PARTS}
    squares = norms["outer"] ** 2, norms["functional"] ** 2
    diagonal = one.frobenius["total"].values.diagonal()
    scaled = torch.tensor(
        [float(v) / math.sqrt(n) for v, n in zip(diagonal, one.sizes.values(), strict=True)]
    )
    alive = scaled[scaled > 1e-6 * scaled.max()]
    return {
        "loss": problem.value(),
        "norm": norms["total"],
        "outer_norm": norms["outer"],
        "functional_norm": norms["functional"],
        "trace": one.view("model", "trace")["model"],
        "outer_share": squares[0] / (squares[0] + squares[1]),
        "block_diagonal_share": one.diagonal_share["block/total"][0],
        "layer_diagonal_share": one.diagonal_share["layer/total"][0],
        "heterogeneity": float(alive.max() / alive.min()),
    }


# --- one call each --------------------------------------------------------------------------------


def _digits(samples: int) -> Data:
    chosen = digits().train.take(samples)
    return chosen.inputs, chosen.targets


def _vit(data: Data, **options: Any) -> Callable[[int], Problem]:
    return lambda seed: Problem(reference_vit(seed=seed, **options), "cross_entropy", data)


def compare_norm_placement(
    *, depth: int = 2, samples: int = 64, seeds: Sequence[int] = (0, 1, 2), **options: Any
) -> ModelComparison:
    """Pre- against post-norm: the same ViT on digits at initialisation."""
    data = _digits(samples)
    return compare(
        "pre-norm against post-norm",
        {
            "pre-norm": _vit(data, n_layers=depth, norm_first=True),
            "post-norm": _vit(data, n_layers=depth, norm_first=False),
        },
        seeds=seeds,
        **options,
    )


def compare_input_scale(
    *,
    scales: Sequence[float] = (0.3, 1.0, 3.0),
    norm_first: bool = False,
    samples: int = 64,
    seeds: Sequence[int] = (0, 1, 2),
    **options: Any,
) -> ModelComparison:
    """The same ViT on digits with pixels multiplied by each scale."""
    images, labels = _digits(samples)
    makers = {f"× {s:g}": _vit((images * s, labels), norm_first=norm_first) for s in scales}
    return compare("input scale", makers, seeds=seeds, **options)


def compare_softmax(
    *, depth: int = 1, samples: int = 64, seeds: Sequence[int] = (0, 1, 2), **options: Any
) -> ModelComparison:
    """Softmax against linear attention, the source of heterogeneity taken away."""
    data = _digits(samples)
    makers = {
        "softmax": _vit(data, n_layers=depth, softmax=True),
        "linear": _vit(data, n_layers=depth, softmax=False),
    }
    return compare("softmax against linear attention", makers, seeds=seeds, **options)


def compare_with_mlp(
    *, depth: int = 1, samples: int = 64, seeds: Sequence[int] = (0, 1, 2), **options: Any
) -> ModelComparison:
    """A Transformer against an MLP of equal size and the same number of hidden layers plus one."""
    images, labels = _digits(samples)
    size = sum(p.numel() for p in ViT(ViTConfig(n_layers=depth)).parameters())
    config = replace(MLPConfig(), n_layers=depth + 1).of_size(size)

    def mlp(seed: int) -> Problem:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Problem(MLP(config), "cross_entropy", (images, labels))

    makers = {"Transformer": _vit((images, labels), n_layers=depth), "MLP": mlp}
    return compare(f"Transformer against MLP, {size} parameters", makers, seeds=seeds, **options)


def compare_training(
    *,
    steps: int = 300,
    samples: int = 64,
    seeds: Sequence[int] = (0, 1, 2),
    architecture: Mapping[str, Any] | None = None,
    **options: Any,
) -> ModelComparison:
    """The reference ViT on digits before and after training."""
    dataset = digits()
    batch = dataset.train.take(samples)

    def trained(seed: int, count: int) -> Problem:
        model = reference_vit(seed=seed, **dict(architecture or {}))
        if count:
            train(model, dataset, steps=count, seed=seed)
        return Problem(model, "cross_entropy", (batch.inputs, batch.targets))

    makers = {
        "initialisation": lambda seed: trained(seed, 0),
        f"after {steps} steps": lambda seed: trained(seed, steps),
    }
    return compare("before and after training", makers, seeds=seeds, **options)


def compare_checkpoints(
    model: nn.Module,
    checkpoints: Mapping[str, Mapping[str, Tensor]],
    loss: str | Callable[[Any, Any], Tensor],
    data: Any,
    **options: Any,
) -> ModelComparison:
    """One model with several state dictionaries on the same data; the model is left as it was."""

    def at(state: Mapping[str, Tensor]) -> Callable[[int], Problem]:
        loaded = copy.deepcopy(model)
        loaded.load_state_dict(dict(state))
        return lambda seed: Problem(loaded, loss, data)

    makers = {name: at(state) for name, state in checkpoints.items()}
    return compare("checkpoints", makers, seeds=(0,), **options)
