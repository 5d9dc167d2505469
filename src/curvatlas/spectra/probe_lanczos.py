"""Several short Lanczos runs side by side: one product with all their vectors a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.krylov import Array


def recurrences(
    op: LinearOperator, starts: Tensor, steps: int, outside: Tensor | None = None
) -> tuple[Array, Array]:
    """α (K, s) and β (K, s) of P A P from each start (n, K), P projecting off the rows ``outside``.

    Each run is orthogonalised against its own vectors, as one batched GEMM for all of them.
    """
    n, count = starts.shape
    kept = torch.zeros(count, steps + 1, n, dtype=op.dtype, device=op.device)
    rows = starts.T.contiguous()
    for _ in range(2):
        rows = _off(rows, outside)
    kept[:, 0] = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    alphas = torch.zeros(steps, count, dtype=op.dtype, device=op.device)
    betas = torch.zeros_like(alphas)
    for step in range(steps):
        here = kept[:, step]  # (K, n)
        image = (op @ here.T.contiguous()).T
        image = _off(image, outside)
        alphas[step] = (here * image).sum(1)
        image = image - alphas[step, :, None] * here
        if step:
            image = image - betas[step - 1, :, None] * kept[:, step - 1]
        earlier = kept[:, : step + 1]  # (K, step + 1, n)
        found = torch.bmm(earlier, image.unsqueeze(2))
        image = image - torch.bmm(earlier.transpose(1, 2), found).squeeze(2)
        betas[step] = torch.linalg.vector_norm(image, dim=1)
        beta = betas[step, :, None]
        # An invariant space, or a norm that underflows, has no next direction.
        kept[:, step + 1] = torch.where(beta > 0, image / torch.where(beta > 0, beta, 1.0), 0.0)
    result = torch.stack([alphas, betas]).double().cpu().numpy()
    if not np.isfinite(result).all():
        raise FloatingPointError(
            "a product with the operator gave NaN or infinity: check the loss and the parameters "
            "for NaN, or compute in float64."
        )
    return result[0].T, result[1].T


def _off(rows: Tensor, outside: Tensor | None) -> Tensor:
    """rows (K, n) minus their part in the span of the orthonormal rows ``outside`` (j, n)."""
    if outside is None or outside.shape[0] == 0:
        return rows
    return torch.addmm(rows, rows @ outside.T, outside, alpha=-1)
