r"""Curvature from an observed trajectory: no second derivative is computed.

From weights w_t and gradients g_t: steps S = w_{t+1} − w_t and changes Y = g_{t+1} − g_t satisfy
Y = H S in a quadratic landscape. In an orthonormal basis Q of the span of S, A = Qᵀ Y R⁺ is the
projected Hessian; its symmetric part gives Ritz values, its antisymmetric part, which is zero for a
quadratic, measures how much the landscape changed on the way and so the uncertainty.

From losses alone: the decrease Δ_t = L_t − L_{t+1} of a mode falls like (1 − ηλ)^{2t}, so the rate
of the slowest mode still alive is λ = (1 − (Δ_{t+1}/Δ_t)^½)/η.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from curvatlas.analysis.taylor_result import ObservedCurvature, empty

_SMALL = 1e-8  # directions below this share of the largest step carry only rounding


def observed_curvature(
    trajectory: Tensor | Sequence[float] | Sequence[Tensor],
    learning_rate: float | None,
    gradients: Tensor | Sequence[Tensor] | None,
    momentum: float,
) -> ObservedCurvature:
    """From losses (T,) with a learning rate, or weights (T, P) with gradients or a rate."""
    stacked = _stacked(trajectory)
    if not bool(torch.isfinite(stacked).all()):
        raise ValueError("the trajectory holds NaN or infinite values: cut it before them.")
    if learning_rate is not None and not learning_rate > 0:
        raise ValueError(f"the learning rate must be positive, got {learning_rate!r}.")
    if stacked.ndim == 1:
        if learning_rate is None:
            raise ValueError(
                "losses alone give a rate: pass the learning_rate they were made with."
            )
        return _from_losses(stacked.numpy(), learning_rate)
    if gradients is not None:
        slopes = _stacked(gradients)
    elif learning_rate is None:
        raise ValueError("weights alone have no scale: pass gradients= or the learning_rate.")
    else:
        velocity = (stacked[:-1] - stacked[1:]) / learning_rate
        slopes = velocity.clone()
        slopes[1:] -= momentum * velocity[:-1]
    count = min(len(stacked), len(slopes))
    if count < 3:
        raise ValueError(f"a trajectory of {count} points shows no curvature: give at least 3.")
    return _from_weights(stacked[:count], slopes[:count])


def _stacked(values: Tensor | Sequence[float] | Sequence[Tensor]) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    if len(values) and isinstance(values[0], Tensor):
        rows = [torch.as_tensor(v).detach().cpu().double().reshape(-1) for v in values]
        stacked = torch.stack(rows)
        return stacked.squeeze(1) if stacked.shape[1] == 1 else stacked
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def _from_weights(weights: Tensor, gradients: Tensor) -> ObservedCurvature:
    steps = (weights[1:] - weights[:-1]).T  # (P, T − 1)
    changes = (gradients[1:] - gradients[:-1]).T
    directional = (steps * changes).sum(0) / (steps * steps).sum(0).clamp_min(1e-300)
    q, sizes, right = torch.linalg.svd(steps, full_matrices=False)
    keep = sizes > _SMALL * sizes[0]
    q, sizes, right = q[:, keep], sizes[keep], right[keep]
    action = q.T @ changes @ right.T / sizes  # (m, m), H in the basis q
    symmetric, skew = (action + action.T) / 2, (action - action.T) / 2
    values = torch.linalg.eigvalsh(symmetric).flip(0)
    noise = float(torch.linalg.matrix_norm(skew, 2))
    scale = float(torch.linalg.matrix_norm(symmetric, 2))
    top = float(values[0])
    rounding = 1e-12 * scale * float(sizes[0] / sizes[-1])
    half = 1.96 * noise + rounding
    return ObservedCurvature(
        value=top,
        interval=(top - half, top + half),
        values=values,
        steps=len(weights),
        source="weights",
        asymmetry=noise / max(scale, 1e-300),
        directional=directional,
    )


def _from_losses(losses: np.ndarray, rate: float) -> ObservedCurvature:
    drops = losses[:-1] - losses[1:]
    floor = 1e-13 * np.abs(losses).max()
    alive = np.flatnonzero(drops <= floor)
    drops = drops[: alive[0]] if len(alive) else drops  # up to where rounding or noise takes over
    if len(drops) < 3:
        raise ValueError(
            "the losses do not fall for three steps in a row: a rate needs a decreasing start."
        )
    series = (1 - np.sqrt(drops[1:] / drops[:-1])) / rate
    tail = np.log(drops[len(drops) // 2 :]) if len(drops) >= 6 else np.log(drops)
    fit = stats.linregress(np.arange(len(tail)), tail)
    spread = (stats.t.ppf(0.975, len(tail) - 2) if len(tail) > 2 else 12.7) * fit.stderr
    value, *ends = (
        (1 - math.exp(slope / 2)) / rate
        for slope in (fit.slope, fit.slope + spread, fit.slope - spread)
    )
    return ObservedCurvature(
        value=value,
        interval=(min(ends), max(ends)),
        values=torch.from_numpy(series.copy()),
        steps=len(losses),
        source="losses",
        asymmetry=0.0,
        directional=empty(),
    )
