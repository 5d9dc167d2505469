"""The Hessian and its two parts, each by its own definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oracles import hessian, jacobian


def parts(
    outputs: Tensor, loss: Callable[[Tensor], Tensor], params: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Total, outer and functional Hessian, each by its own definition (no subtraction)."""
    z = outputs.detach().requires_grad_(True)
    delta = torch.autograd.grad(loss(z), z)[0]
    lam = hessian(loss(z), [z])
    jac = jacobian(outputs, params)
    return {
        "total": hessian(loss(outputs), params),
        "outer": jac.T @ lam @ jac,
        "functional": hessian((outputs * delta).sum(), params),
    }
