"""The exact spectral norm of a block's or stack's Hessian, from closed-form products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import eigsh
from torch import Tensor

from curvatlas.blocks.losses import Loss
from curvatlas.blocks.stack import BlockStack
from curvatlas.blocks.structure import BlockSpec, Weights

_DENSE_LIMIT = 1200  # parameters up to which the norm comes from all eigenvalues


def exact_norm(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: Loss,
    mask: Tensor | None = None,
) -> float:
    """‖H‖₂ from closed-form products: all eigenvalues when small, Lanczos to 1e-10 otherwise."""
    here = BlockStack(list(layers), loss=loss).linearise(x, target, mask=mask)
    size = here.shape[0]
    if size <= _DENSE_LIMIT:
        dense = here @ torch.eye(size, dtype=x.dtype, device=x.device)
        values = torch.linalg.eigvalsh(0.5 * (dense + dense.T))
        return float(values.abs().max())

    def apply(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        vector = torch.as_tensor(v.reshape(-1), dtype=x.dtype, device=x.device)
        return here.product(vector).cpu().numpy()

    operator = ScipyOperator((size, size), matvec=apply, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    return float(np.abs(eigsh(operator, k=1, which="LM", v0=start, tol=1e-10)[0]).max())
