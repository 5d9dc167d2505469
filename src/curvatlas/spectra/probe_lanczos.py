"""Several short Lanczos runs side by side: one product with all their vectors a step."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.quadrature import ROUNDING
from curvatlas.spectra.requirements import refuse_asymmetric_images


def recurrences(
    op: LinearOperator,
    starts: Tensor,
    steps: int,
    outside: Tensor | None = None,
    *,
    scale: float = 0.0,
    what: str = "Lanczos quadrature",
) -> tuple[Array, Array, int]:
    """α (K, s) and β (K, s) of P A P from each start (n, K), P projecting off the rows ``outside``.

    Each run is orthogonalised against its own vectors, as one batched GEMM for all of them. A run
    whose space is invariant ends there, with zeros behind; when all have, no more products are
    made. Returned last: the products that were. scale: of A, where more is known than P A P shows.
    """
    n, count = starts.shape
    kept = torch.zeros(count, steps + 1, n, dtype=op.dtype, device=op.device)
    rows = starts.T.contiguous()
    for _ in range(2):
        rows = _off(rows, outside)
    kept[:, 0] = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    alphas = torch.zeros(steps, count, dtype=op.dtype, device=op.device)
    betas = torch.zeros_like(alphas)
    largest = torch.tensor(scale, dtype=op.dtype, device=op.device)
    products = 0
    for step in range(steps):
        here = kept[:, step]  # (K, n)
        image = (op @ here.T.contiguous()).T
        products += count
        image = _off(image, outside)
        if step == 0 and bool(torch.isfinite(image).all()):
            refuse_asymmetric_images(op, here.T, image.T, what, scale=scale)
        whole = torch.linalg.vector_norm(image, dim=1)
        largest = torch.maximum(largest, whole.max())
        alphas[step] = (here * image).sum(1)
        image = image - alphas[step, :, None] * here
        if step:
            image = image - betas[step - 1, :, None] * kept[:, step - 1]
        earlier = kept[:, : step + 1]  # (K, step + 1, n)
        image = _off_own(image, earlier)
        beta = torch.linalg.vector_norm(image, dim=1)
        if not bool(torch.isfinite(beta).all()):
            raise FloatingPointError(
                "a product with the operator gave NaN or infinity: check the loss and the "
                "parameters for NaN, or compute in float64."
            )
        # Little is left of the image: rounding has a part in it that is not orthogonal.
        if bool((beta < 0.1 * whole).any()):
            image = _off_own(_off(image, outside), earlier)
            beta = torch.linalg.vector_norm(image, dim=1)
        beta = torch.where(beta > ROUNDING * torch.finfo(op.dtype).eps * largest, beta, 0.0)
        betas[step] = beta
        if not bool(beta.any()):
            break
        own = beta[:, None]
        kept[:, step + 1] = torch.where(own > 0, image / torch.where(own > 0, own, 1.0), 0.0)
    result = torch.stack([alphas, betas]).cpu().double().numpy()
    return result[0].T, result[1].T, products


def _off_own(images: Tensor, rows: Tensor) -> Tensor:
    """images (K, n) minus their part in the span of their own orthonormal rows (K, s, n)."""
    inside = torch.bmm(rows, images.unsqueeze(2))
    return images - torch.bmm(rows.transpose(1, 2), inside).squeeze(2)


def _off(rows: Tensor, outside: Tensor | None) -> Tensor:
    """rows (K, n) minus their part in the span of the orthonormal rows ``outside`` (j, n)."""
    if outside is None or outside.shape[0] == 0:
        return rows
    return torch.addmm(rows, rows @ outside.T, outside, alpha=-1)
