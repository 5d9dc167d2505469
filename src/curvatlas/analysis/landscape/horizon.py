r"""Gradient descent in the quadratic model, and the number of steps for which it predicts the loss.

All iterates lie in the Krylov space of H and g. With the Ritz pairs (λ_i, u_i) of an m-step Lanczos
run started at g, each mode evolves on its own,

    δ_i ← δ_i − η v_i,   v_i ← μ v_i + (g_i + λ_i δ_i),   L = L₀ + Σ_i (g_i δ_i + ½ λ_i δ_i²).

What this leaves out is measured at some of the predicted points, one gradient each: the remainder
of the loss, ρ_t = L(w + δ_t) − model, and that of the gradient, r_t = ∇L(w + δ_t) − model, whose
leading terms are the third derivative's, ⅙ ∂³L[δ, δ, δ] and ½ ∂³L[δ, δ, ·]. The real run is pushed
off the predicted one by e_t = −η Σ_s h_{t−1−s}(λ) r_s, with h the model's response to a push, and
its loss differs from the prediction by at most about

    |ρ_t| + |∇L(w + δ_t) · e_t| + ½ λmax ‖e_t‖².

The horizon is the last step up to which this is within a tolerance of the change of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from curvatlas.fits import Array
from curvatlas.operators.curvature import Hessian
from curvatlas.progress import bar
from curvatlas.spectra.krylov import KrylovBasis


class QuadraticDescent:
    """Steps of gradient descent with momentum in the quadratic model at weights w.

    at: L and ∇L (P,) at any weights;  size: Lanczos steps;  losses, lengths: (steps + 1,).
    """

    def __init__(
        self,
        operator: Hessian,
        at: Callable[[Tensor], tuple[float, Tensor]],
        start: Tensor,
        *,
        size: int,
        steps: int,
        rate: float,
        momentum: float,
    ) -> None:
        self._at, self._start, self._rate = at, start, rate
        loss, gradient = at(start)
        self._basis = KrylovBasis(operator, size + 1)
        self.values, self.slopes = np.zeros(1), np.zeros(1)
        self._turn: Array | None = None  # (m, m): Ritz vectors in the basis; None for g = 0
        if self._basis.add(gradient):
            with bar("Lanczos from the gradient", total=size) as progress:
                while (before := self._basis.products) < size and self._basis.pending:
                    self._basis.advance(size - before)
                    progress.update(self._basis.products - before)
            ritz = self._basis.ritz()
            self._turn, self.values = ritz.coordinates, ritz.values
            self.slopes = float(torch.linalg.vector_norm(gradient)) * ritz.coordinates[0]
        self._positions: Array  # (steps + 1, m), in the modes
        self._follow(loss, steps, momentum)
        # per checked step: ρ, r in the modes with its norm outside of them, ∇L likewise
        self._seen: dict[int, tuple[float, Array, Array]] = {
            0: (0.0, np.zeros(len(self.values) + 1), np.append(self.slopes, 0.0))
        }

    def _follow(self, loss: float, steps: int, momentum: float) -> None:
        """Positions and losses; and the response h_k(λ) to a push, for each mode and for λ = 0."""
        position, velocity = np.zeros_like(self.values), np.zeros_like(self.values)
        with_flat = np.append(self.values, 0.0)
        pushed, speed = np.ones_like(with_flat), np.ones_like(with_flat)
        positions, losses, response = [position], [loss], [pushed]
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(steps):
                velocity = momentum * velocity + self.slopes + self.values * position
                position = position - self._rate * velocity
                positions.append(position)
                change = self.slopes @ position + 0.5 * self.values @ position**2
                losses.append(loss + float(change))
                speed = momentum * speed - self._rate * with_flat * pushed
                pushed = pushed + speed
                response.append(pushed)
            self._positions, self._response = np.array(positions), np.array(response)
            lengths = np.linalg.norm(self._positions, axis=1)  # the Ritz vectors are orthonormal
        self.losses, self.lengths = (
            np.nan_to_num(np.array(s), nan=np.inf) for s in (losses, lengths)
        )

    def horizon(self, tolerance: float) -> int:
        """Steps up to which the predicted change of the loss is within ``tolerance`` of the real.

        Steps 1, 2, 4, … are checked and the first failure is closed in on: about 2 log₂ gradients.
        """
        last = len(self.losses) - 1
        if self._turn is None:
            return last  # at a stationary point nothing moves
        good, step = 0, 1
        while good < last and self._holds(step, tolerance):
            good, step = step, min(2 * step, last)
        bad = step
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._holds(middle, tolerance) else (good, middle)
        return good

    def _holds(self, step: int, tolerance: float) -> bool:
        error = self._error(step)
        change = abs(float(self.losses[step] - self.losses[0]))
        return bool(error <= tolerance * (change - error))  # the real change is at least change − E

    def _error(self, step: int) -> float:
        if not self._measure(step):
            return math.inf
        remainder, _, slope = self._seen[step]
        checked = [k for k in sorted(self._seen) if k <= step]
        known = np.array([self._seen[k][1] for k in checked])  # (checks, m + 1)
        before = np.arange(step)
        pushes = np.array([np.interp(before, checked, column) for column in known.T]).T
        with np.errstate(over="ignore", invalid="ignore"):
            response = self._response[step - 1 - before]
            response[:, -1] = np.abs(response[:, -1])
            off = self._rate * (response * pushes).sum(0)  # −e_t in the modes, ‖e_t‖ outside
            top = max(float(self.values.max()), 0.0)
            error = abs(remainder) + abs(slope[:-1] @ off[:-1]) + slope[-1] * off[-1]
            error += 0.5 * top * float(off @ off)
        return float(error) if math.isfinite(error) else math.inf

    def _measure(self, step: int) -> bool:
        """ρ and r at a predicted point; False where the model has left all numbers."""
        if step in self._seen:
            return True
        place = self._positions[step]
        assert self._turn is not None
        if not np.isfinite(place).all():
            return False
        moved = self._basis.vectors((self._turn @ place)[:, None]).squeeze(1)
        value, gradient = self._at(self._start + moved)
        if not math.isfinite(value) or not bool(torch.isfinite(gradient).all()):
            return False
        rows = self._basis.rows[: self._basis.multiplied]
        inside = rows @ gradient  # (m,)
        outside = float(torch.linalg.vector_norm(gradient - inside @ rows))
        slope = self._turn.T @ inside.cpu().double().numpy()
        missing = slope - (self.slopes + self.values * place)
        self._seen[step] = (
            value - float(self.losses[step]),
            np.append(missing, outside),
            np.append(slope, outside),
        )
        return True
