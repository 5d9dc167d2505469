"""The scalar attention model: every eigenvalue of its Hessian in closed form (derivations §16).

found = ca.scalar_attention_spectrum(x, y, query=w_Q, key=w_K, value=w_V)
found.outliers, found.bulk, found.bulk_ratio, found.condition_number
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class ScalarAttentionSpectrum(Result):
    """All 2 d_k + 1 eigenvalues of the Hessian: three outliers and the bulk ±g, d_k − 1 times each.

    The Gauss-Newton matrix has rank two and does not see the bulk.
    """

    outliers: Tensor  # (3,) ascending
    bulk: float  # |g|
    pairs: int  # d_k − 1
    gauss_newton: Tensor  # (2,) its non-zero eigenvalues, ascending

    @property
    def values(self) -> Tensor:
        """The distinct eigenvalues: −g, g and the outliers (the outliers alone for d_k = 1)."""
        bulk = [-self.bulk, self.bulk] if self.pairs else []
        return torch.cat([torch.tensor(bulk, dtype=torch.float64), self.outliers])

    @property
    def multiplicities(self) -> tuple[int, ...]:
        """How often each of ``values`` occurs."""
        return (self.pairs,) * (2 if self.pairs else 0) + (1, 1, 1)

    @property
    def eigenvalues(self) -> Tensor:
        """The whole spectrum (2 d_k + 1,), ascending."""
        counts = torch.tensor(self.multiplicities)
        return self.values.repeat_interleave(counts).sort().values

    @property
    def bulk_ratio(self) -> float:
        """|g| over the largest outlier's size: what an attention sink shrinks."""
        largest = float(self.outliers.abs().max())
        return self.bulk / largest if largest > 0 else math.nan

    @property
    def condition_number(self) -> float:
        """Largest over smallest |eigenvalue|."""
        sizes = self.values.abs()
        smallest = float(sizes.min())
        return float(sizes.max()) / smallest if smallest > 0 else math.inf

    def _rows(self) -> list[dict[str, Any]]:
        kinds = ["bulk"] * (len(self.values) - 3) + ["outlier"] * 3
        rows = zip(kinds, self.values.tolist(), self.multiplicities, strict=True)
        return [{"kind": k, "eigenvalue": v, "multiplicity": m} for k, v, m in rows]

    def __str__(self) -> str:
        shown = ", ".join(f"{value:.4g}" for value in self.outliers.tolist())
        return (
            f"outliers {shown}; bulk ±{self.bulk:.4g} ({self.pairs} pairs, "
            f"{self.bulk_ratio:.3g} of the largest outlier); "
            f"condition number {self.condition_number:.4g}"
        )


@dataclass(frozen=True)
class ScalarAttention:
    """f(x) = w_V A(x) x, A = softmax(β x xᵀ + sink), β = s w_Qᵀw_K, s = 1/√d_k; x, target (n, L).

    The loss is the mean of (f − y)² over all n L entries.
    """

    x: Tensor
    query: Tensor  # (d_k,)
    key: Tensor  # (d_k,)
    value: float
    target: Tensor
    sink: float = 0.0  # added to every logit of the first token

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(len(self.query))

    def attention(self, query: Tensor, key: Tensor) -> Tensor:
        """A (n, L, L)."""
        logits = self.scale * (query @ key) * self.x.unsqueeze(2) * self.x.unsqueeze(1)
        first = torch.zeros_like(self.x)
        first[:, 0] = self.sink
        return torch.softmax(logits + first.unsqueeze(1), -1)

    def output(self, query: Tensor, key: Tensor, value: Tensor | float) -> Tensor:
        return value * (self.attention(query, key) @ self.x.unsqueeze(2))[..., 0]

    def derivatives(self) -> dict[str, float]:
        """ℓ_VV, ℓ_β, ℓ_Vβ, ℓ_ββ and the outer-product parts of the last two, from row moments."""
        a = self.attention(self.query, self.key)
        mean = (a @ self.x.unsqueeze(2))[..., 0]
        centred = self.x.unsqueeze(1) - mean.unsqueeze(2)  # (n, i, j)
        variance, third = (a * centred**2).sum(2), (a * centred**3).sum(2)
        w, x, residual = self.value, self.x, self.value * mean - self.target
        terms = {
            "vv": mean**2,
            "b": residual * w * x * variance,
            "vb": (w * mean + residual) * x * variance,
            "bb": w**2 * x**2 * variance**2 + residual * w * x**2 * third,
            "outer_vb": w * mean * x * variance,
            "outer_bb": w**2 * x**2 * variance**2,
        }
        return {name: 2.0 / x.numel() * float(term.sum()) for name, term in terms.items()}

    def spectrum(self) -> ScalarAttentionSpectrum:
        """Bulk ±sℓ_β; outliers from a 3 × 3 matrix over (w_V, w_Q + w_K, w_Q − w_K)."""
        d, s = self.derivatives(), self.scale
        z = math.hypot(float(self.query.norm()), float(self.key.norm()))
        cross = s * d["outer_vb"] * z
        rows = [[d["vv"], cross], [cross, s**2 * d["outer_bb"] * z**2]]
        outer = torch.tensor(rows, dtype=torch.float64)
        g, c = s * d["b"], s * d["vb"]
        alpha, delta = sum_and_difference(self.query, self.key)
        core = torch.zeros(3, 3, dtype=torch.float64)
        core[1:, 1:] = pair_core(g, s**2 * d["bb"], self.query, self.key)
        core[0] = core[:, 0] = torch.tensor([d["vv"], c * alpha, c * delta], dtype=torch.float64)
        return ScalarAttentionSpectrum(
            outliers=torch.linalg.eigvalsh(core),
            bulk=abs(g),
            pairs=len(self.query) - 1,
            gauss_newton=torch.linalg.eigvalsh(outer),
        )


def sum_and_difference(first: Tensor, second: Tensor) -> tuple[float, float]:
    """‖w + v‖/√2 and ‖w − v‖/√2."""
    return float((first + second).norm()) / 2**0.5, float((first - second).norm()) / 2**0.5


def pair_core(g: float, h: float, first: Tensor, second: Tensor) -> Tensor:
    """The Hessian of ℓ(wᵀv) over (w, v) on the plane of its outliers, g = ℓ', h = ℓ'' (2, 2).

    In the basis (u; u)/√2, (u'; −u')/√2 with u, u' the directions of w + v and w − v.
    """
    ends = torch.tensor(sum_and_difference(first, second), dtype=torch.float64)
    return torch.diag(torch.tensor([g, -g], dtype=torch.float64)) + h * torch.outer(ends, ends)


def scalar_attention_spectrum(
    x: Tensor,
    target: Tensor,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor | float,
    sink: float = 0.0,
) -> ScalarAttentionSpectrum:
    """The Hessian's spectrum of attention with scalar tokens, f(x) = w_V A(x) x, in closed form.

    Over (w_Q, w_K, w_V) with the mean of (f − y)² as loss: d_k − 1 pairs ±g and three outliers.

    x, target: (L,) one sequence, or (n, L). query, key: w_Q, w_K (d_k,); logits are divided by
    √d_k. value: the number w_V. sink: added to every logit of the first token.
    """
    if x.shape != target.shape or x.ndim not in (1, 2):
        raise ValueError(
            "x and target must both be (L,) or (n, L), "
            f"got {tuple(x.shape)} and {tuple(target.shape)}."
        )
    if query.ndim != 1 or query.shape != key.shape or not len(query):
        raise ValueError(
            "query and key must be vectors of one length d_k, "
            f"got {tuple(query.shape)} and {tuple(key.shape)}."
        )
    tensors = [t.detach().double() for t in (x, query, key, target)]
    if not all(bool(torch.isfinite(t).all()) for t in tensors):
        raise ValueError("the input contains NaN or Inf: no spectrum is defined there.")
    x, query, key, target = tensors
    length = x.shape[-1]
    model = ScalarAttention(
        x.reshape(-1, length), query, key, float(value), target.reshape(-1, length), float(sink)
    )
    return model.spectrum()
