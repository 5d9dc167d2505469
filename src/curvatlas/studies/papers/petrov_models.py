"""The models and data of Petrov et al.: Table 1, and the training all their figures start from."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from curvatlas.problem import Problem
from curvatlas.studies.papers.exhibits import Ask, exhibit
from curvatlas.studies.papers.reproduction import (
    CONFIRMED,
    REFUTED,
    Finding,
    Reproduction,
    finding,
)
from curvatlas.zoo import Dataset, ViT, digits, images_on_disk, petrov_vit, train

SOURCE = "Petrov et al., ICLR 2026"
BATCH = 128  # samples, as in the paper's Fig. 5

Table = Literal["mnist", "cifar"]
# table → name of its data, folder inside of --data, shape of an image, what lies in the folder
_DATA: dict[Table, tuple[str, str, tuple[int, ...], str]] = {
    "mnist": ("MNIST", "mnist", (28, 28), "train-images-idx3-ubyte and the other IDX files"),
    "cifar": ("CIFAR-10", "cifar10", (3, 32, 32), "data_batch_1.bin … or data_batch_1.png …"),
}
# AdamW's rate, constant after a warm-up; the paper names no optimizer, rate or number of epochs.
_RATES: dict[Table, float] = {"mnist": 2e-3, "cifar": 5e-4}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The data a figure is made on, and the model that fits its images."""

    data: Dataset
    table: Table
    real: bool

    @property
    def told(self) -> str:
        """As a figure says it."""
        name = _DATA[self.table][0]
        if not self.real:
            return f"8 × 8 digits stand in for {name} (--data FOLDER: the paper's)"
        count = f"{self.data.train.size:,} images of {self.data.name}"
        if self.table == "cifar" and self.data.classes != 100:
            return f"{count} (the paper: CIFAR-100)"
        return count

    @property
    def steps(self) -> int:
        """Training steps of the MNIST model: more than half of the held-out images are right."""
        return 2000 if self.real else 600

    @property
    def smaller(self) -> tuple[str, ...]:
        """What of the data is less than the paper's."""
        return () if self.real else ("8 × 8 digits in patches of 2 × 2",)

    def model(self, seed: int, **options: Any) -> ViT:
        """Table 1's model for these images; the digits are 4 × 4 patches too."""
        sizes: dict[str, Any] = {"classes": self.data.classes}
        if not self.real:
            sizes |= {"image_size": 8, "patch_size": 2, "channels": 1}
        return petrov_vit(self.table, seed=seed, **{**sizes, **options})

    def problem(self, model: ViT, samples: int = BATCH) -> Problem:
        """The model's loss on one training batch."""
        return Problem(model, "cross_entropy", tuple(self.data.train.take(samples)))


def setting_of(ask: Ask, table: Table) -> Setting:
    """The data in the folder that was asked for, or the embedded digits."""
    return _setting(None if ask.data is None else ask.data.resolve(), table)


@functools.lru_cache(maxsize=2)
def _setting(folder: Path | None, table: Table) -> Setting:
    if folder is None:
        return Setting(data=digits(), table=table, real=False)
    name, inside, shape, files = _DATA[table]
    needed = f"expected {name}'s {files} there, or in {inside} inside of it"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: {needed}.")
    try:
        data = images_on_disk(folder / inside if (folder / inside).is_dir() else folder)
    except ValueError as error:
        raise ValueError(f"{folder} has no {name}: {needed} ({error})") from error
    if tuple(data.train.inputs.shape[1:]) != shape:
        got = " × ".join(map(str, data.train.inputs.shape[1:]))
        want = " × ".join(map(str, shape))
        raise ValueError(f"{folder} has images of {got}, this needs {want}: {needed}.")
    return Setting(data=data, table=table, real=True)


@dataclass(frozen=True)
class Trained:
    """The model before and after training, and the accuracy it reached on held-out images."""

    before: ViT
    after: ViT
    accuracy: float
    steps: int


@functools.lru_cache(maxsize=16)
def _trained(folder: Path | None, table: Table, seed: int, steps: int, sizes: Any) -> Trained:
    chosen = _setting(folder, table)
    before = chosen.model(seed, **dict(sizes))
    after = copy.deepcopy(before)
    how: dict[str, Any] = {"lr": _RATES[table], "schedule": "constant", "batch_size": BATCH}
    history = train(after, chosen.data, steps=steps, seed=seed, **how)
    return Trained(before, after, history.validation_accuracy or 0.0, steps)


def trained(ask: Ask, table: Table, seed: int, steps: int, **sizes: int) -> Trained:
    """The same training for every figure: made once in a process."""
    folder = None if ask.data is None else ask.data.resolve()
    return _trained(folder, table, seed, steps, tuple(sorted(sizes.items())))


# --- Table 1 --------------------------------------------------------------------------------------

_TABLE_1 = {  # patch, hidden size, feed-forward size, blocks; parameters as the figures show them
    "mnist": {"patch": 4, "hidden": 16, "feed-forward": 64, "blocks": 1, "parameters": 3552},
    "cifar": {"patch": 4, "hidden": 128, "feed-forward": 512, "blocks": 8},
}


@exhibit(
    "petrov-table1",
    shows="sizes of the two models",
    claim="MNIST: patch 4, hidden 16, feed-forward 64, 1 block; CIFAR-100: 4, 128, 512, 8",
    source=f"{SOURCE}, Table 1",
    seconds=1,
)
def table_1(ask: Ask) -> Reproduction:
    """Sizes read off the modules, and whether a block computes what the paper's sketch shows."""
    findings = []
    for table, printed in _TABLE_1.items():
        model = petrov_vit(table, seed=ask.seed)  # type: ignore[arg-type]
        for what, wanted in printed.items():
            findings.append(_same(f"{what}, {table}", sizes_of(model)[what], wanted))
    return Reproduction(
        findings=tuple(findings),
        setting="zoo.petrov_vit: no biases, no positions, one head, post-norm, ReLU",
        notes=(
            "3,552 parameters in the order patch, Q, K, V, O, norm, W₁, W₂, norm, head are read "
            "off the separators of Figs. 3 and 4; heads and initialisation are not in the paper",
        ),
        numbers={name: sizes_of(petrov_vit(name, seed=ask.seed)) for name in ("mnist", "cifar")},
    )


def sizes_of(model: ViT) -> dict[str, int]:
    """What Table 1 lists, read off the weights."""
    patch = model.patch_embedding.weight
    block: Any = model.blocks[0]
    return {
        "patch": round((patch.shape[1] / model.config.channels) ** 0.5),
        "hidden": patch.shape[0],
        "feed-forward": block.ffn.up.weight.shape[0],
        "blocks": len(model.blocks),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _same(what: str, value: int, printed: int) -> Finding:
    return Finding(
        what=what,
        value=value,
        low=value,
        high=value,
        paper=str(printed),
        accepted=(printed, printed),
        verdict=CONFIRMED if value == printed else REFUTED,
    )


# --- Fig. 2 ---------------------------------------------------------------------------------------


@exhibit(
    "petrov-fig2",
    shows="a sketch of the block: attention, norm, feed-forward, norm, each with its residual",
    claim="Y = LN(X + Att(X)), Z = LN(Y + ReLU(Y W₁) W₂)",
    source=f"{SOURCE}, Fig. 2",
    seconds=1,
)
def figure_2(ask: Ask) -> Reproduction:
    """The model's block against the sketch written out by hand."""
    model = petrov_vit("mnist", seed=ask.seed).double()
    generator = torch.Generator().manual_seed(ask.seed)
    x = torch.randn(3, 49, 16, generator=generator, dtype=torch.float64)
    block = model.blocks[0]
    error = (block(x) - by_hand(block, x)).norm() / by_hand(block, x).norm()
    return Reproduction(
        findings=(
            finding("relative error", error.item(), paper="the same", accepted=(0.0, 1e-12)),
        ),
        setting="zoo.petrov_vit, random tokens, float64",
        notes=("one head with an output projection: 256 parameters of O stand in Figs. 3 and 4",),
    )


def by_hand(block: Any, x: Tensor) -> Tensor:
    """Z of tokens (B, L, d), from the weights alone."""

    def norm(tokens: Tensor) -> Tensor:
        centred = tokens - tokens.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    w = {name: weight.detach() for name, weight in block.named_parameters()}
    q, k, v, o = (w[f"attention.{r}.weight"].T for r in ("query", "key", "value", "output"))
    scores = (x @ q) @ (x @ k).mT / x.shape[-1] ** 0.5
    y = norm(x + scores.softmax(-1) @ (x @ v) @ o)
    hidden = (y @ w["ffn.up.weight"].T).relu()
    return norm(y + hidden @ w["ffn.down.weight"].T)
