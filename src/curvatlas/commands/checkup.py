"""The checks of ``curvatlas doctor``: versions, kernels, guards, and the LayerNorm self-test.

PyTorch's ``torch.func.hessian`` is silently wrong through LayerNorm with weights; the self-test
measures its error and ours against the Hessian of the same function written out by hand.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.budget import available_bytes, readable

_PACKAGES = (
    "torch", "numpy", "scipy", "safetensors", "typer", "matplotlib", "transformers",
)  # fmt: skip
_WIDTH = 6


def checkup() -> dict[str, Any]:
    """Everything doctor prints; ``healthy`` is False when our own numbers are wrong."""
    layer_norm = layer_norm_test()
    guards = guard_tests()
    healthy = layer_norm["curvatlas_error"] < 1e-10 and all(guards.values())
    return {
        "healthy": healthy,
        "versions": versions(),
        "machine": machine(),
        "kernels": kernels(),
        "guards": {name: "works" if works else "FAILS" for name, works in guards.items()},
        "layer_norm": layer_norm,
    }


def versions() -> dict[str, str]:
    """Installed versions; "absent" for an optional package that is not there."""
    found = {"curvatlas": ca.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def machine() -> dict[str, str]:
    """Processors, threads and memory."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "free memory": readable(available_bytes()),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
    }


def kernels() -> dict[str, str]:
    """Which attention kernels are on by default, and which of them can be differentiated twice."""
    found = {}
    for name in ("flash", "mem_efficient", "math"):
        on = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        found[f"{name} attention"] = "on" if on else "off"
    found["default differentiates twice"] = "yes" if _default_attention_works() else "no"
    found["curvatlas switches to math attention"] = "yes, while it computes"
    return found


def _default_attention_works() -> bool:
    query = torch.ones(1, 1, 2, 4, requires_grad=True)
    out = F.scaled_dot_product_attention(query, query, query).pow(2).sum()
    try:
        (gradient,) = torch.autograd.grad(out, query, create_graph=True)
        torch.autograd.grad(gradient.sum(), query)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def layer_norm_test() -> dict[str, float]:
    """Relative error of the Hessian through LayerNorm with weights, ours and torch.func's."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 2))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs = torch.randn(5, _WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def loss(flat: Tensor, norm: Any) -> Tensor:
        weights, position = [], 0
        for parameter in model.parameters():
            size = parameter.numel()
            weights.append(flat[position : position + size].reshape(parameter.shape))
            position += size
        hidden = norm(inputs @ weights[0].T + weights[1], weights[2], weights[3])
        error: Tensor = hidden @ weights[4].T + weights[5] - targets
        return error.pow(2).mean()

    truth = _double_backward(lambda flat: loss(flat, _norm_by_hand), start)
    composed = torch.func.hessian(
        lambda flat: loss(flat, lambda x, g, b: F.layer_norm(x, (_WIDTH,), g, b))
    )(start)
    ours = ca.Hessian(ca.Problem(model, "mse", (inputs, targets))).dense()
    scale = float(truth.norm())
    return {
        "curvatlas_error": float((ours - truth).norm()) / scale,
        "torch_func_hessian_error": float((composed - truth).norm()) / scale,
    }


def _norm_by_hand(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gamma + beta


def _double_backward(function: Any, start: Tensor) -> Tensor:
    flat = start.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(function(flat), flat, create_graph=True)
    rows = [torch.autograd.grad(entry, flat, retain_graph=True)[0] for entry in gradient]
    return torch.stack(rows)


def guard_tests() -> dict[str, bool]:
    """Whether the guards refuse what would give a wrong number."""
    inputs, targets = torch.ones(4, 3), torch.zeros(4, 2)

    def refuses(model: nn.Module) -> bool:
        try:
            ca.Hessian(ca.Problem(model, "mse", (inputs, targets))) @ torch.ones(
                sum(p.numel() for p in model.parameters())
            )
        except (ValueError, RuntimeError):
            return True
        return False

    broken = nn.Linear(3, 2)
    with torch.no_grad():
        broken.weight[0, 0] = float("nan")
    return {
        "active dropout is refused": refuses(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))),
        "NaN weights are refused": refuses(broken),
        "a sound model is accepted": not refuses(nn.Linear(3, 2).eval()),
    }
