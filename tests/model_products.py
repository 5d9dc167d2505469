"""Products of whole models by hand and by double backward, and the tokens they are made at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.engines.autograd.linearisation import (
    FunctionalLinearisation,
    HessianLinearisation,
    OuterLinearisation,
)
from curvatlas.engines.tangent import model as whole
from curvatlas.engines.tangent.linear import Buffers
from huggingface_models import tiny_model

EXACT = {
    "total": HessianLinearisation,
    "outer": OuterLinearisation,
    "functional": FunctionalLinearisation,
}
TOKENS = torch.randint(3, 19, (3, 8), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(TOKENS)
PADDED[1, 5:] = 0
PADDED[2, :2] = 0
LABELS = TOKENS.masked_fill(PADDED == 0, -100)


def language(**more: Any) -> dict[str, Tensor]:
    return {"input_ids": TOKENS, "attention_mask": PADDED, "labels": LABELS, **more}


def family(kind: str, **options: Any) -> tuple[nn.Module, Any, None]:
    torch.manual_seed(0)
    return tiny_model(kind, **options), [language()], None


def linearised(
    problem: ca.Problem, part: Any, names: Any = None, **options: Any
) -> whole.TangentLinearisation:
    return whole.TangentLinearisation(
        problem,
        next(problem.batches()),
        problem.parameter_names if names is None else names,
        reading=whole.read_model(problem.model),
        part=part,
        space=Buffers(keep=True),
        **options,
    )


def _flat(problem: ca.Problem, rows: list[Tensor | None], count: int) -> Tensor:
    sizes = problem.layout.sizes
    pieces = [
        torch.zeros(count, size, dtype=problem.dtype) if row is None else row.reshape(count, -1)
        for row, size in zip(rows, sizes, strict=True)
    ]
    return torch.cat(pieces, 1)


def off(problem: ca.Problem, ours: whole.TangentLinearisation, part: str) -> float:
    """The largest relative difference to double backward, for 1 and 3 columns, asked twice."""
    names = problem.parameter_names
    exact = EXACT[part](problem, next(problem.batches()), names)
    worst = 0.0
    for count in (3, 1):
        columns = torch.randn(problem.size, count, dtype=problem.dtype)
        pieces = dict(
            zip(names, [c.contiguous() for c in problem.layout.split(columns)], strict=True)
        )
        want = _flat(problem, exact.product(pieces, names), count)
        for _ in range(2):
            with ours._calling():
                got = ours.flat_product(columns)
            worst = max(worst, float((got - want).norm() / want.norm()))
    return worst
