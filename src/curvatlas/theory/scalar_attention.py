"""The scalar attention model f(x) = w_V A(x) x and its spectrum in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.theory import reference
from curvatlas.theory.statements import Effort


@dataclass(frozen=True)
class ScalarModel:
    """f(x) = w_V A(x) x, A = softmax(β x xᵀ + bias), β = w_Qᵀw_K/√d_k; x, target (n, L)."""

    x: Tensor
    query: Tensor  # (d_k,)
    key: Tensor  # (d_k,)
    value: float
    target: Tensor
    bias: float = 0.0  # added to every logit of the first token: an attention sink

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(len(self.query))

    def output(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = self.scale * (query @ key) * self.x.unsqueeze(2) * self.x.unsqueeze(1)
        sink = torch.zeros_like(self.x)
        sink[:, 0] = self.bias
        return value * (torch.softmax(logits + sink.unsqueeze(1), -1) @ self.x.unsqueeze(2))[..., 0]

    def hessians(self) -> tuple[Tensor, Tensor, Tensor]:
        """(H, H_o, H_f) over (w_Q, w_K, w_V) by double backward."""
        params = [
            self.query.clone().requires_grad_(True),
            self.key.clone().requires_grad_(True),
            torch.tensor(self.value, dtype=torch.float64, requires_grad=True),
        ]
        z = self.output(*params)
        return reference.split_hessian(z, lambda v: (v - self.target).pow(2).mean(), params)

    def derivatives(self) -> dict[str, float]:
        """ℓ_VV, ℓ_β, ℓ_Vβ, ℓ_ββ and their outer-product parts, from row moments."""
        logits = self.scale * (self.query @ self.key) * self.x.unsqueeze(2) * self.x.unsqueeze(1)
        sink = torch.zeros_like(self.x)
        sink[:, 0] = self.bias
        a = torch.softmax(logits + sink.unsqueeze(1), -1)
        mean = (a @ self.x.unsqueeze(2))[..., 0]
        centred = self.x.unsqueeze(1) - mean.unsqueeze(2)  # (n, i, j)
        variance, third = (a * centred**2).sum(2), (a * centred**3).sum(2)
        residual = self.value * mean - self.target
        w, x, c = self.value, self.x, 2.0 / self.x.numel()
        return {
            "vv": float(c * (mean**2).sum()),
            "b": float(c * (residual * w * x * variance).sum()),
            "vb": float(c * ((w * mean + residual) * x * variance).sum()),
            "bb": float(c * (w**2 * x**2 * variance**2 + residual * w * x**2 * third).sum()),
            "outer_vb": float(c * (w * mean * x * variance).sum()),
            "outer_bb": float(c * (w**2 * x**2 * variance**2).sum()),
        }

    def bulk(self) -> float:
        """g = s ℓ_β: the bulk sits at ±|g|."""
        return self.scale * self.derivatives()["b"]

    def spectrum(self) -> Tensor:
        """All 2 d_k + 1 eigenvalues in closed form, ascending (THEORY §16.1)."""
        d, s = self.derivatives(), self.scale
        g, c, h = s * d["b"], s * d["vb"], s**2 * d["bb"]
        alpha = float((self.query + self.key).norm()) / 2**0.5
        delta = float((self.query - self.key).norm()) / 2**0.5
        core = torch.tensor(
            [
                [d["vv"], c * alpha, c * delta],
                [c * alpha, g + h * alpha**2, h * alpha * delta],
                [c * delta, h * alpha * delta, -g + h * delta**2],
            ],
            dtype=torch.float64,
        )
        pairs = torch.full((len(self.query) - 1,), g, dtype=torch.float64)
        return torch.cat([torch.linalg.eigvalsh(core), pairs, -pairs]).sort().values

    def outer_spectrum(self) -> Tensor:
        """The two non-zero eigenvalues of the Gauss-Newton matrix."""
        d, s = self.derivatives(), self.scale
        z = float((self.query @ self.query + self.key @ self.key).sqrt())
        core = [
            [d["vv"], s * d["outer_vb"] * z],
            [s * d["outer_vb"] * z, s**2 * d["outer_bb"] * z**2],
        ]
        values: Tensor = torch.linalg.eigvalsh(torch.tensor(core, dtype=torch.float64))
        return values


def draw_scalar(effort: Effort, trial: int, d_k: int, *, batch: int = 2) -> ScalarModel:
    generator = effort.generator(trial)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return ScalarModel(draw(batch, 5), draw(d_k), draw(d_k), float(draw(1)), draw(batch, 5))
