"""Load the Hessians that scripts/jax_fixtures.py computed with JAX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

FOLDER = Path(__file__).parent / "fixtures"


@dataclass(frozen=True, kw_only=True)
class Fixture:
    """One tiny Transformer with everything JAX said about it, float64."""

    name: str
    kind: str  # "block" (spec: fields of BlockSpec) or "gpt" (spec: options of zoo.GPTConfig)
    spec: dict[str, Any]
    loss: str  # "mse", "cross_entropy" (−100: no target), "pooled" (head · mean over tokens)
    weights: dict[str, Tensor]  # in the order of the flat vector, (out, in)
    inputs: Tensor
    targets: Tensor
    outputs: Tensor
    value: float
    gradient: Tensor  # (P,)
    hessian: Tensor  # (P, P)
    outer: Tensor  # (P, P), Jᵀ (∂²ℓ/∂Z²) J at the outputs

    @property
    def functional(self) -> Tensor:
        return self.hessian - self.outer

    @property
    def size(self) -> int:
        return len(self.gradient)


def names(kind: str | None = None) -> list[str]:
    """Names of the stored fixtures, of one kind or of all."""
    found = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
    return [name for name in found if kind is None or name.startswith("gpt") == (kind == "gpt")]


def load(name: str) -> Fixture:
    with safe_open(str(FOLDER / f"{name}.safetensors"), framework="pt") as file:
        header = json.loads(file.metadata()["fixture"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    size = len(tensors["gradient"])
    return Fixture(
        name=name,
        kind=header["kind"],
        spec=header["spec"],
        loss=header["loss"],
        weights={key: tensors[f"weights/{key}"] for key in header["parameters"]},
        inputs=tensors["inputs"],
        targets=tensors["targets"],
        outputs=tensors["outputs"],
        value=float(tensors["value"]),
        gradient=tensors["gradient"],
        hessian=_symmetric(tensors["hessian"], size),
        outer=_symmetric(tensors["outer"], size),
    )


def _symmetric(upper: Tensor, size: int) -> Tensor:
    matrix = torch.zeros(size, size, dtype=upper.dtype)
    rows, columns = torch.triu_indices(size, size)
    matrix[rows, columns] = upper
    matrix[columns, rows] = upper
    return matrix
