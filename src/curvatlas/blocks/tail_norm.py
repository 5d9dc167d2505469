"""One normalisation at the tokens of a chunk: its Jacobian, its bend, its γ and β."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from curvatlas.blocks.evaluation import NormState
from curvatlas.blocks.normalization import norm_jacobian, norm_jacobian_product, norm_second

Take = Callable[[Tensor], Tensor]  # (B, L, ·) → the chunk's (n, ·)


class NormTokens:
    """One normalisation at the n tokens of a chunk."""

    def __init__(self, state: NormState, kind: str, take: Take) -> None:
        self.kind: str = kind
        self.prefix = state.prefix
        self.n, self.inv_std = take(state.n), take(state.inv_std)  # (n, d), (n, 1)
        self.gamma = state.gamma
        self.has_gamma, self.has_beta = state.gamma is not None, state.beta is not None

    def scaled(self, t: Tensor) -> Tensor:
        """γ ⊙ t on the last axis."""
        return t if self.gamma is None else t * self.gamma

    def pull(self, t: Tensor) -> Tensor:
        """J (γ ⊙ t) on the last axis of (n, d) or (n, c, d)."""
        n, inv_std = self.n, self.inv_std
        if t.ndim == 3:
            n, inv_std = n.unsqueeze(1), inv_std.unsqueeze(1)
        return norm_jacobian_product(n, inv_std, self.scaled(t), norm=self.kind)  # type: ignore[arg-type]

    @cached_property
    def jacobian(self) -> Tensor:
        """J without γ (n, d, d)."""
        return norm_jacobian(self.n, self.inv_std, norm=self.kind)  # type: ignore[arg-type]

    def second(self, delta: Tensor) -> Tensor:
        """Ψ(γ ⊙ δ) (n, d, d)."""
        return norm_second(self.n, self.inv_std, self.scaled(delta), norm=self.kind)  # type: ignore[arg-type]

    def affine(self, beta_rows: Tensor, delta: Tensor | None) -> Tensor:
        """Rows (γ, β) of a second derivative from its β rows (n, d, c), γ first.

        ∂/∂γ = n ⊙ ∂/∂β, plus diag(δ) J towards the norm's own input (``delta`` given, c = d).
        """
        parts = []
        if self.has_gamma:
            gamma_rows = self.n.unsqueeze(-1) * beta_rows
            if delta is not None:
                gamma_rows = torch.addcmul(gamma_rows, delta.unsqueeze(-1), self.jacobian)
            parts.append(gamma_rows)
        if self.has_beta:
            parts.append(beta_rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
