"""Truths about the random blocks of ``curvatlas.theory.reference``, by double backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from curvatlas.layers.structure import BlockSpec, Weights
from curvatlas.theory import reference


def true_hessian(case: reference.Case) -> Tensor:
    """H (P, P) of a case."""
    weights = reference.tracked(case.weights)
    z = reference.block_output(case.spec, weights, case.x)
    return reference.hessian(reference.loss_of(case.loss, case.target)(z), list(weights.values()))


def stack_output(layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor) -> Tensor:
    """Blocks one after the other."""
    for spec, weights in layers:
        x = reference.block_output(spec, weights, x)
    return x
