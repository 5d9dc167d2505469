"""What rounding the weights costs: curvature-weighted error, role by role, beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.operators import Hessian
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.results import Result
from curvatlas.training.pruning import PRUNED_ROLES, value_at


@dataclass(frozen=True, kw_only=True)
class QuantizationSensitivity(Result):
    """Predicted and measured rise of the loss when one role is rounded to so many bits."""

    bits: tuple[int, ...]
    roles: tuple[str, ...]
    predicted: Tensor  # (roles, bits): gᵀδ + ½ δᵀHδ
    measured: Tensor  # (roles, bits): L(θ + δ) − L(θ)
    loss: float

    def __str__(self) -> str:
        lines = [f"loss {self.loss:.4g}; rise by role, predicted (measured)"]
        for row, role in enumerate(self.roles):
            cells = [
                f"{bit} bits {float(self.predicted[row, col]):.2g} "
                f"({float(self.measured[row, col]):.2g})"
                for col, bit in enumerate(self.bits)
            ]
            lines.append(f"  {role}: " + ", ".join(cells))
        return "\n".join(lines)


def quantization_sensitivity(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    bits: Sequence[int] = (8, 4, 3),
    roles: Sequence[str] = PRUNED_ROLES,
) -> QuantizationSensitivity:
    """Round each role's weights (symmetric, one scale a row) and say what it costs."""
    if any(bit < 2 for bit in bits):
        raise ValueError(f"at least 2 bits are needed for a sign and a step, got {tuple(bits)}.")
    problem = Problem(model, loss, data)
    present = tuple(r for r in roles if any(s.role == r for s in problem.anatomy.slices))
    if not present:
        raise ValueError(f"the model has none of the roles {tuple(roles)}.")
    theta, gradient, base = problem.parameters, problem.gradient(), problem.value()
    columns = []
    for role in present:
        for bit in bits:
            delta = torch.zeros_like(theta)
            for piece in problem.anatomy.select(role=role):
                weights = piece.view(theta)
                delta[piece.indices] = (round_to(weights, bit) - weights).reshape(-1)
            columns.append(delta)
    stacked = torch.stack(columns, 1)
    curved = Hessian(problem) @ stacked
    predicted = gradient @ stacked + 0.5 * (stacked * curved).sum(0)
    measured = [value_at(problem, theta + delta) - base for delta in columns]
    shape = (len(present), len(bits))
    return QuantizationSensitivity(
        bits=tuple(bits),
        roles=present,
        predicted=in_float64(predicted).reshape(shape),
        measured=torch.tensor(measured, dtype=torch.float64).reshape(shape),
        loss=base,
    )


def round_to(weights: Tensor, bits: int) -> Tensor:
    """Nearest of 2^bits − 1 evenly spaced values, symmetric about zero, one scale a row."""
    rows = weights.reshape(weights.shape[0], -1) if weights.ndim > 1 else weights.reshape(1, -1)
    levels: int = 2 ** (bits - 1) - 1
    scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny) / levels
    rounded: Tensor = (rows / scale).round().clamp(-levels, levels) * scale
    return rounded.reshape(weights.shape)
