"""Independent references the tests compare with: double backward.

``torch.func.hessian`` is no oracle here: it is silently wrong through affine LayerNorm. What stands
below is reverse over reverse with hand-written normalisation, which is right in every composition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def layer_norm(x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


def rms_norm(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if gamma is None else y * gamma


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    parts = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, like, strict=True)]
    return torch.cat([t.reshape(-1) for t in parts])


def gradient(loss: Tensor, params: Sequence[Tensor], *, create_graph: bool = False) -> Tensor:
    grads = torch.autograd.grad(loss, params, create_graph=create_graph, allow_unused=True)
    return flat(grads, params)


_AT_ONCE = 512  # rows


def rows(values: Tensor, params: Sequence[Tensor]) -> Tensor:
    """∂values/∂params (N, P) by backward passes of many rows at a time.

    One row in between is held to a backward pass of its own. Where an operation of the graph cannot
    take several rows, all are.
    """
    count = len(values)
    try:
        runs = [range(i, min(i + _AT_ONCE, count)) for i in range(0, count, _AT_ONCE)]
        together = torch.cat([_some_rows(values, run, params) for run in runs])
    except RuntimeError:
        return torch.cat([_some_rows(values, range(i, i + 1), params) for i in range(count)])
    middle = count // 2
    alone = _some_rows(values, range(middle, middle + 1), params)[0]
    scale = float(together.abs().max()) + torch.finfo(values.dtype).tiny
    assert (
        float((together[middle] - alone).abs().max()) <= 1e4 * torch.finfo(values.dtype).eps * scale
    )
    return together


def _some_rows(values: Tensor, run: range, params: Sequence[Tensor]) -> Tensor:
    """These rows (len(run), P); a single one by an ordinary backward pass."""
    count, batched = len(run), len(run) > 1
    seeds = torch.eye(count, len(values), dtype=values.dtype).roll(run.start, 1)
    slopes = torch.autograd.grad(
        values,
        params,
        seeds if batched else seeds[0],
        is_grads_batched=batched,
        retain_graph=True,
        allow_unused=True,
    )
    parts = [
        values.new_zeros(count, p.numel()) if s is None else s.reshape(count, -1)
        for s, p in zip(slopes, params, strict=True)
    ]
    return torch.cat(parts, 1)


def hessian(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Dense (P, P) Hessian of a scalar, by double backward."""
    grad = gradient(loss, params, create_graph=True)
    if not grad.requires_grad:
        return torch.zeros(grad.numel(), grad.numel(), dtype=grad.dtype)
    return rows(grad, params)


def jacobian(outputs: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Dense Jacobian (#outputs, P), by backward passes."""
    return rows(outputs.reshape(-1), params)


def outer_hessian(
    outputs: Tensor, loss: Callable[[Tensor], Tensor], params: Sequence[Tensor]
) -> Tensor:
    """Gauss-Newton matrix Jᵀ (∂²ℓ/∂Z²) J of loss(outputs), dense."""
    z = outputs.detach().requires_grad_(True)
    lam = hessian(loss(z), [z])
    jac = jacobian(outputs, params)
    return jac.T @ lam @ jac


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖ in Frobenius norm (absolute when ``want`` is zero)."""
    scale = float(torch.linalg.norm(want))
    error = float(torch.linalg.norm(got - want))
    return error / scale if scale > 0 else error


class HandWrittenNorm(torch.nn.Module):
    """Stands in for LayerNorm or RMSNorm modules under the same parameter names."""

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        self.weight = getattr(original, "weight", None)
        self.bias = getattr(original, "bias", None)
        eps = getattr(original, "eps", getattr(original, "variance_epsilon", None))
        # torch's RMSNorm without an eps takes that of the dtype.
        self.eps = torch.finfo(torch.float64).eps if eps is None else float(eps)
        self.centred = isinstance(original, torch.nn.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def with_hand_written_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Replace every normalisation module in place (parameters are shared, names unchanged)."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.LayerNorm) or type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, HandWrittenNorm(child))
    return model


def product(loss: Tensor, params: Sequence[Tensor], vector: Tensor) -> Tensor:
    """H v by double backward."""
    return gradient(gradient(loss, params, create_graph=True) @ vector, params)


def finite_difference_product(
    gradient_at: Callable[[Tensor], Tensor], point: Tensor, vector: Tensor, *, step: float
) -> Tensor:
    """H v from gradients on a line, central differences of order eight."""
    weights = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
    total = torch.zeros_like(point)
    for k, weight in enumerate(weights, start=1):
        ahead, behind = (
            gradient_at(point + k * step * vector),
            gradient_at(point - k * step * vector),
        )
        total += weight * (ahead - behind)
    return total / step
