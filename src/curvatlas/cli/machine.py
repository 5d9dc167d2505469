"""What this machine has, whether second derivatives come out right on it, and what they cost.

PyTorch's ``torch.func.hessian`` is silently wrong through LayerNorm with weights; the self-test
measures its error and ours against the Hessian of the same function written out by hand.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas import __version__
from curvatlas.budget import available_bytes, readable
from curvatlas.operators.curvature import FunctionalHessian, GaussNewton, Hessian
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.zoo.models import GPT, GPTConfig

_COLUMNS = 8
_PACKAGES = ("torch", "numpy", "scipy", "safetensors", "typer", "matplotlib", "transformers")
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
    installed = {"curvatlas": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "absent"
    return installed


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
    states = {}
    for name in ("flash", "mem_efficient", "math"):
        on = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        states[f"{name} attention"] = "on" if on else "off"
    states["default differentiates twice"] = "yes" if _default_attention_works() else "no"
    states["curvatlas switches to math attention"] = "yes, while it computes"
    return states


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
    ours = Hessian(Problem(model, "mse", (inputs, targets))).dense()
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
            Hessian(Problem(model, "mse", (inputs, targets))) @ torch.ones(
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


def describe_checkup(findings: dict[str, Any]) -> str:
    """The table that doctor prints."""
    lines = []
    for title, content in findings.items():
        if not isinstance(content, dict):
            continue
        lines.append(title)
        width = max(len(key) for key in content)
        lines += [f"  {key:<{width}}  {value}" for key, value in content.items()]
    verdict = "everything is in order" if findings["healthy"] else "NOT in order, see above"
    return "\n".join([*lines, verdict])


def measure(*, layers: int, width: int, rounds: int, seed: int) -> dict[str, Any]:
    """Medians over rounds of (time of a product) / (columns · time of a gradient)."""
    torch.manual_seed(seed)
    config = GPTConfig(vocabulary=1000, context=64, d_model=width, n_heads=4, n_layers=layers)
    model = GPT(config).eval()
    inputs, targets = torch.randint(0, 1000, (2, 8, 64))
    weights = list(model.parameters())

    def gradient() -> None:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        torch.autograd.grad(loss, weights)

    problem = Problem(model, "cross_entropy", (inputs, targets))
    operators = (Hessian(problem), GaussNewton(problem), FunctionalHessian(problem))
    right = torch.randn(problem.size, _COLUMNS)
    ratios: dict[tuple[str, int], list[float]] = {}
    seconds: list[float] = []
    for turn in track(range(rounds + 1), "rounds"):
        for operator in operators:
            for columns in (right[:, 0].contiguous(), right):
                count = 1 if columns.ndim == 1 else _COLUMNS
                before = _seconds(gradient)
                taken = _seconds(lambda op=operator, v=columns: op @ v)  # type: ignore[misc]
                unit = (before + _seconds(gradient)) / 2
                if turn:  # the first round builds the graphs
                    kind = (type(operator).__name__, count)
                    ratios.setdefault(kind, []).append(taken / count / unit)
                    seconds.append(unit)
    return {
        "parameters": problem.size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": rounds,
        "gradient_seconds": statistics.median(seconds),
        "products": [
            {"operator": kind, "columns": count, "gradients": statistics.median(costs)}
            for (kind, count), costs in ratios.items()
        ],
    }


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def describe_timing(findings: dict[str, Any]) -> str:
    """The table that bench prints."""
    threads = findings["threads"]
    lines = [
        f"GPT of {findings['parameters']} parameters, 8 × 64 tokens, {threads} thread"
        f"{'s' if threads != 1 else ''}: a gradient takes {findings['gradient_seconds']:.3g} s.",
        "A product with one vector costs, in gradients:",
    ]
    for row in findings["products"]:
        how = "alone" if row["columns"] == 1 else f"of {row['columns']}"
        lines.append(f"  {row['operator']:<18} {how:<6} {row['gradients']:6.2f}")
    return "\n".join(lines)
