r"""diag H_o read from the outputs instead of the weights, one sample after the other.

    [H_o]_ii = Σ_t Σ_c (J_tᵀ f_tc)_i²,

one backward pass of one sample for every output of it. Column by column it would be one product of
all samples for every weight. Where samples can be mapped over and have few outputs,
``sample_factors.py`` takes the same sum for many samples at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.errors import NonFiniteError
from curvatlas.operators.target_factors import sample_axis_of_outputs, target_factors
from curvatlas.precision import float64_device, in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.progress import bar

_NUMBERS = 2**23  # of gradient rows held at once: 32 MB in float32


def exact_outer_diagonal(problem: Problem) -> tuple[Tensor, int] | None:
    """(P,) float64 diag H_o and the number of single samples' gradients it took.

    None where a sample has more outputs than there are weights, the loss no closed form of Λ, or
    the data are spread over processes.
    """
    if problem.spread or not problem.separable or not _fewer_outputs_than_weights(problem):
        return None
    problem.check()
    total = torch.zeros(problem.size, dtype=torch.float64, device=float64_device(problem.device))
    passes = 0
    with problem.evaluating(), bar("exact diagonal") as progress:
        for batch in problem.batches():
            for piece in batch.singles(problem.loss.count):
                found = None if piece.layout is None else _of_sample(problem, piece)
                if found is None:
                    return None
                total += piece.count * found[0]
                passes += found[1]
                progress.update(1)
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError("the Gauss-Newton diagonal is not finite at these weights.")
    return total / problem.normaliser, passes


def _fewer_outputs_than_weights(problem: Problem) -> bool:
    piece = next(iter(problem.batches())).part(0, 1, problem.loss.count)
    with problem.evaluating(), torch.no_grad():
        outputs = problem.outputs(piece, problem.leaves())
    return isinstance(outputs, Tensor) and outputs.numel() <= problem.size


def _of_sample(problem: Problem, piece: Batch) -> tuple[Tensor, int] | None:
    """Σ (J_tᵀ f_tc)² of one sample, (P,) float64, and how many pairs (t, c) there were."""
    leaves = problem.leaves()
    outputs = problem.outputs(piece, leaves)
    axis = sample_axis_of_outputs(piece)
    factors = target_factors(problem.loss, outputs, piece.targets, axis=axis)
    if factors is None:
        return None
    total = torch.zeros(problem.size, dtype=torch.float64, device=float64_device(problem.device))
    for some in torch.split(factors.places, max(1, _NUMBERS // problem.size)):
        rows = torch.autograd.grad(
            outputs.movedim(axis, 0), list(leaves.values()), factors.seeds(some),
            is_grads_batched=True, retain_graph=True, allow_unused=True,
        )  # fmt: skip
        squares = [None if r is None else in_float64(r).square().sum(0) for r in rows]
        total += problem.layout.join(squares, like=total)
    return total, len(factors.places)
