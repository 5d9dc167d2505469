"""A small ViT on some digits, in float64."""

from __future__ import annotations

import torch

from curvatlas import zoo
from curvatlas.problem import Problem

SAMPLES = zoo.digits().train.to(torch.float64)


def vit_problem(count: int, **options: object) -> Problem:
    model = zoo.reference_vit(**{"d_model": 4, "patch_size": 4, "d_ff": 6, **options})  # type: ignore[arg-type]
    return Problem(model.double().eval(), "cross_entropy", tuple(SAMPLES.take(count)))
