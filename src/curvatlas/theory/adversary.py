"""Gradient ascent against a bound: climb true/bound, look for a value above one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Objective = Callable[[Sequence[Tensor]], Tensor]


def climb(
    objective: Objective, start: Sequence[Tensor], *, steps: int, rate: float = 0.05
) -> tuple[float, list[Tensor]]:
    """Adam ascent on log(objective); returns the best value met and where.

    Written out because ``torch.optim`` costs seconds of imports that nothing else here needs.
    A kink or a degenerate eigenvalue can make one gradient NaN: such entries are left unmoved.
    """
    point = [t.detach().clone() for t in start]
    mean, square = ([torch.zeros_like(t) for t in point] for _ in range(2))
    best, where = -float("inf"), point
    for step in range(1, steps + 1):
        tracked = [t.clone().requires_grad_(True) for t in point]
        value = objective(tracked)
        reached = float(value.detach())
        if not math.isfinite(reached):
            break
        if reached > best:
            best, where = reached, [t.clone() for t in point]
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            value.clamp_min(1e-300).log(), tracked, allow_unused=True
        )
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            g = torch.nan_to_num(gradient, 0.0, 0.0, 0.0)
            mean[i] = 0.9 * mean[i] + 0.1 * g
            square[i] = 0.999 * square[i] + 0.001 * g * g
            size = (square[i] / (1 - 0.999**step)).sqrt() + 1e-12
            point[i] = point[i] + rate * mean[i] / (1 - 0.9**step) / size
    return best, where
