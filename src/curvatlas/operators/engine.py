"""Which engine computes the products of an operator, decided on one sample before the first one.

The hand-written passes (``engines/tangent``) are faster and need less memory; autograd knows every
model. A model whose layers are recognised is not yet one whose derivatives are known: a product by
hand is held to double backward on the given weights, and every batch's outputs to the model's own.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from curvatlas.engines.autograd.linearisation import Linearisation
from curvatlas.engines.kept import PLANNED, TRANSIENT, Linearise
from curvatlas.engines.tangent.linear import Buffers
from curvatlas.engines.tangent.model import ModelReading, TangentLinearisation, read_model
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.errors import DifferentiationError
from curvatlas.linear_operator import Part
from curvatlas.operators.probes import random_columns
from curvatlas.problem import Batch, EngineChoice, Problem

Engine = Literal["auto", "tangent", "autograd"]
# Relative difference of two products of one sample that rounding explains, for one block.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 3e-5}


def check_engine(engine: str) -> None:
    """Raise on an unknown name."""
    if engine not in get_args(Engine):
        raise ValueError(f"engine is 'auto', 'tangent' or 'autograd', got {engine!r}.")


def by_autograd(problem: Problem, reason: str) -> None:
    """Note that autograd computes, and why."""
    problem.engine = EngineChoice("autograd", reason)


def tangent_engine(
    problem: Problem,
    sample: Batch,
    names: Sequence[str],
    exact: Linearisation,
    *,
    engine: Engine,
    part: Part,
    logit_room: int,
    budget: int,
) -> tuple[Linearise, int] | None:
    """The hand-written engine and the bytes a sample holds, where it understands the model and its
    product is right; else None.

    exact: the sample's linearisation by autograd. With ``engine="tangent"`` what is not understood
    raises. Where the activations of one sample do not fit the budget, blocks are made anew when a
    product needs them. Call it inside ``problem.evaluating``.
    """

    def differences() -> Iterator[tuple[float, Linearise, int, ModelReading]]:
        """Of our product from the exact one; a second time with the model's ends by autograd."""
        reading = read_model(problem.model)
        for plain in dict.fromkeys((reading.plain_ends, False)):
            linearise = functools.partial(
                TangentLinearisation,
                reading=replace(reading, plain_ends=plain),
                part=part,
                space=Buffers(keep=True),
                logit_room=logit_room,
            )
            ours = linearise(problem, sample, names)
            if ours.held_bytes > PLANNED * budget / (1 + TRANSIENT):
                linearise = functools.partial(linearise, recompute=True)
                ours = linearise(problem, sample, names)
            yield _difference(ours, exact, names), linearise, ours.held_bytes, reading

    off, allowed = math.inf, 0.0
    try:
        for off, linearise, held, reading in differences():
            allowed = _ROUNDING[problem.dtype] * math.sqrt(len(reading.layers))
            if off <= allowed:
                problem.engine = EngineChoice("tangent", _described(reading, off))
                return linearise, held
    except UnmappedModuleError as error:
        if engine == "tangent":
            raise
        by_autograd(problem, str(error).rstrip("."))
        return None
    reason = (
        f"products written out by hand differ from double backward by {off:.1e} on one sample, "
        f"where rounding explains {allowed:.0e}"
    )
    if engine == "tangent":
        raise DifferentiationError(f"{reason}: use engine='autograd'.")
    warnings.warn(f"{reason}: autograd computes instead.", stacklevel=8)
    by_autograd(problem, reason)
    return None


def _described(reading: ModelReading, off: float) -> str:
    blocks = f"{len(reading.layers)} blocks" if len(reading.layers) > 1 else "1 block"
    kinds = ", ".join(sorted({type(layer.module).__name__ for layer in reading.layers}))
    return (
        f"{blocks} ({kinds}) written out by hand; a product of one sample agrees with double "
        f"backward to {off:.0e}"
    )


def _difference(ours: TangentLinearisation, exact: Linearisation, names: Sequence[str]) -> float:
    """‖ours v − exact v‖ over ‖H_o v‖ + ‖H_f v‖, which rounding is relative to."""
    columns = random_columns(exact.leaves, names, 3)
    want = exact.product(columns, names)
    got = ours.product(columns, names)
    off = sum(_squared(a, b) for a, b in zip(got, want, strict=True))
    terms = [got] if ours.part == "outer" else ours.parts(columns, names)
    scale = sum(math.sqrt(sum(_squared(a, None) for a in term)) for term in terms)
    return math.sqrt(off) / scale if scale > 0 else math.sqrt(off)


def _squared(left: Tensor | None, right: Tensor | None) -> float:
    """‖left − right‖², None being zero."""
    if left is None and right is None:
        return 0.0
    gap = left if right is None else right if left is None else left - right
    return float(gap.detach().square().sum())  # type: ignore[union-attr]
