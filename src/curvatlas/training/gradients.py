"""Per-sample gradients with targets drawn from the model: rows whose Gram matrix is the Fisher."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvatlas.errors import ProblemError
from curvatlas.problem import Batch, Problem


def sampled_gradients(problem: Problem, *, samples: int, seed: int = 0) -> Tensor:
    r"""G (n, P) with E[GᵀG]/n = H_o for additive losses; at most ``samples`` rows.

    Row i is Jᵢᵀ r_i with r_i the residual of targets drawn from the predictive distribution,
    scaled so that a sample with many targets weighs as it does in the loss.
    """
    if not problem.loss.additive:
        raise ProblemError(
            f"sampled gradients need a likelihood; {problem.loss.name!r} is not known as one: use "
            "loss='cross_entropy' or 'mse', or method='obd'."
        )
    problem.require_mean("a sketch of sampled gradients")
    problem.require_one_process("a sketch of sampled gradients")
    if not problem.separable:
        raise ProblemError(
            "sampled gradients are those of single samples, and the samples of a batch influence "
            "each other or their axis is not found (batch_axis=): use method='obd'."
        )
    problem.check()
    rows: list[Tensor] = []
    targets = 0.0
    with problem.evaluating():
        for batch in problem.batches():
            for place in range(min(batch.samples, samples - len(rows))):
                piece = batch.part(place, place + 1, problem.loss.count)
                if piece.count > 0:
                    row, count = _row(problem, piece, seed + len(rows))
                    rows.append(row)
                    targets += count
    # H_o is a mean over targets and a row sums those of one sample: n rows stand for ``targets``.
    return torch.stack(rows) / math.sqrt(targets / len(rows))


def _row(problem: Problem, piece: Batch, seed: int) -> tuple[Tensor, float]:
    leaves = problem.leaves()
    outputs = problem.outputs(piece, leaves)
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: torch.Size) -> Tensor:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.clamp(1e-12, 1 - 1e-12)

    residual = problem.loss.sample_residual(outputs, piece.targets, uniform)
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), residual.to(outputs), allow_unused=True
    )
    count = problem.loss.target_count(outputs, piece.targets)
    return problem.layout.join(grads, like=residual), count
