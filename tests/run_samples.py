"""Results and run folders for the tests of everything that stores or shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvatlas import runs
from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class SampleEstimate(Result):
    value: float
    interval: tuple[float, float]
    values: Tensor
    notes: dict[str, Any]
    inner: SampleEstimate | None = None


def estimate(seed: int = 0, *, nested: bool = False) -> SampleEstimate:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return SampleEstimate(
        value=float(values.sum()),
        interval=(float(values.min()), float(values.max())),
        values=values,
        notes={"seed": seed, "words": ["a", None, True, 1.5]},
        inner=estimate(seed + 1) if nested else None,
    )


def write_run(path: Path, *, seed: int = 0) -> Path:
    options = {"seed": seed, "roles": ["query", "key"]}
    with runs.Run.create(path, options=options, model_fingerprint="m", data_fingerprint="d") as run:
        run.step("hessian.trace", lambda: estimate(seed))
        run.step("hessian.eigenpairs", lambda: estimate(seed + 10, nested=True))
        run.warn("the key bias is exactly flat")
    return path
