r"""diag H_o read from the outputs instead of the weights: fewer passes where outputs are fewer.

Λ is block-diagonal over targets, Λ_t = Σ_c s_tc s_tcᵀ, so

    [H_o]_ii = Σ_t Σ_c (J_tᵀ s_tc)_i² ,

one backward pass of one sample for every output of it. Column by column it would be one product of
all samples for every weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.errors import NonFiniteError
from curvatlas.operators import GaussNewton
from curvatlas.problem import Batch, Problem
from curvatlas.progress import bar
from curvatlas.spectra.diagonal import read_diagonal

_NUMBERS = 2**23  # of gradient rows held at once: 32 MB in float32


def exact_diagonal(problem: Problem) -> tuple[Tensor, int]:
    """(P,) float64 diag H_o, and what it took: products, or gradients of single samples."""
    if not problem.loss.additive or _outputs_of_a_sample(problem) > problem.size:
        operator = GaussNewton(problem)
        return read_diagonal(operator), operator.products
    problem.check()
    total = torch.zeros(problem.size, dtype=torch.float64, device=problem.device)
    passes = 0
    with problem.evaluating(), bar("exact diagonal") as progress:
        for batch in problem.batches():
            for piece in batch.singles(problem.loss.count):
                found, rows = _of_sample(problem, piece)
                total += piece.count * found
                passes += rows
                progress.update(1)
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError("the Gauss-Newton diagonal is not finite at these weights.")
    return total / problem.total_count, passes


def _outputs_of_a_sample(problem: Problem) -> float:
    batch = next(iter(problem.batches()))
    piece = batch.part(0, 1, problem.loss.count)
    with problem.evaluating(), torch.no_grad():
        outputs = problem.outputs(piece, problem.leaves())
    if not isinstance(outputs, Tensor) or problem.loss.curvature(outputs, piece.targets) is None:
        return float("inf")
    return float(outputs.numel())


def _of_sample(problem: Problem, piece: Batch) -> tuple[Tensor, int]:
    """Σ (J_tᵀ s_tc)² of one sample, (P,) float64, and how many pairs (t, c) there were."""
    leaves = problem.leaves()
    outputs = problem.outputs(piece, leaves)
    factors = _factors(problem, outputs.detach(), piece)  # (targets, classes, columns)
    pairs = factors.square().sum(1).nonzero()  # columns that are not zero
    targets, classes = factors.shape[:2]
    total = torch.zeros(problem.size, dtype=torch.float64, device=problem.device)
    for chunk in torch.split(pairs, max(1, _NUMBERS // problem.size)):
        t, c = chunk.unbind(1)
        seeds = outputs.new_zeros(len(chunk), targets, classes)
        seeds[torch.arange(len(chunk), device=t.device), t] = factors[t, :, c]
        rows = torch.autograd.grad(
            outputs,
            list(leaves.values()),
            seeds.view(len(chunk), *outputs.shape),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        squares = [None if r is None else r.double().square().sum(0) for r in rows]
        total += problem.layout.join(squares, like=total)
    return total, len(pairs)


def _factors(problem: Problem, outputs: Tensor, piece: Batch) -> Tensor:
    """S (targets, classes, classes) with S_t S_tᵀ = Λ_t; columns of rounding alone are zero."""
    classes = outputs.shape[-1]
    product = problem.loss.curvature(outputs, piece.targets)
    if product is None:
        raise TypeError(f"the loss {problem.loss.name!r} has no closed form of its curvature.")
    units = torch.eye(classes, dtype=outputs.dtype, device=outputs.device)
    units = units.view(classes, *([1] * (outputs.ndim - 1)), classes).expand(
        classes, *outputs.shape
    )
    blocks = product(units).reshape(classes, -1, classes).movedim(0, 2).double()
    values, vectors = torch.linalg.eigh(blocks)
    rounding = classes * torch.finfo(outputs.dtype).eps * values.amax()
    factors: Tensor = vectors * values.where(values > rounding, 0.0).sqrt().unsqueeze(1)
    return factors.to(outputs.dtype)
