"""Rotary positions: an orthogonal map of each head's coordinates, different at every position.

Pairs are (p, p + s/2), the layout of Llama: coordinate p turns with coordinate p + s/2 by the
angle i · f_p at position i, f_p = base^(−2p/s). The map is linear, so its tangent is the same
rotation and its adjoint the rotation by the opposite angle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.precision import float64_device


class Rotation:
    """The rotation R_i of L positions; ``angles`` (L, s/2)."""

    def __init__(self, angles: Tensor) -> None:
        self.cos = angles.cos()
        self.sin = angles.sin()

    @classmethod
    def from_base(
        cls, base: float, *, length: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> Rotation:
        """Angles i · base^(−2p/s) for positions 0 … L−1 and p < s/2."""
        if size % 2:
            raise ValueError(f"rotary positions pair coordinates: head size {size} is odd.")
        if not base > 0:
            raise ValueError(f"rope_base must be positive, got {base!r}.")
        half = size // 2
        # Angles in float64 whatever the dtype: position × frequency loses digits for long inputs.
        place = float64_device(device)
        exponent = torch.arange(half, dtype=torch.float64, device=place) / half
        position = torch.arange(length, dtype=torch.float64, device=place)
        return cls((position[:, None] * base ** (-exponent)).to(dtype=dtype).to(device=device))

    def apply(self, x: Tensor) -> Tensor:
        """R_i x_i:  (…, L, s) → (…, L, s)."""
        return _turn(x, self.cos, self.sin)

    def adjoint(self, x: Tensor) -> Tensor:
        """R_iᵀ x_i:  (…, L, s) → (…, L, s)."""
        return _turn(x, self.cos, -self.sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
