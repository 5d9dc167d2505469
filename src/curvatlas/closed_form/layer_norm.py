"""LayerNorm and RMSNorm with Jacobian, second derivative and parameter Hessian written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.func import functional_call

from curvatlas.closed_form.evaluation import seeds_at
from curvatlas.closed_form.result import BlockHessian, ZeroStructure
from curvatlas.engines.tangent.losses import OutputLoss
from curvatlas.engines.tangent.norm import norm_hessian, norm_jacobian, norm_second, normalize
from curvatlas.engines.tangent.reading import map_norm
from curvatlas.engines.tangent.structure import Norm
from curvatlas.precision import COMPUTED
from curvatlas.results import Result

N = TypeVar("N", bound="LayerNormHessian")


class LayerNormHessian(nn.Module):
    """y = γ ⊙ (x − μ)/√(var + ε) + β over the last axis, with its exact derivatives.

    ``norm="rms"`` is RMSNorm (no mean, no β). ``normalized_shape`` is the width d.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...] | list[int],
        eps: float = 1e-5,
        *,
        norm: Norm = "layer",
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"the closed form normalises over one axis of positive width, got {tuple(shape)}."
            )
        if norm not in ("layer", "rms"):
            raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}.")
        if eps < 0:
            raise ValueError(f"eps must not be negative, got {eps!r}.")
        self.normalized_shape, self.eps, self.norm = tuple(shape), float(eps), norm
        has_bias = elementwise_affine and norm == "layer"
        self.weight = nn.Parameter(torch.ones(shape[0])) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(shape[0])) if has_bias else None

    @classmethod
    def from_module(cls: type[N], module: nn.Module) -> N:
        """Wrap ``nn.LayerNorm``, ``nn.RMSNorm`` or a Llama-style RMSNorm, sharing its memory."""
        mapped = map_norm(module)
        if mapped.offset:
            raise TypeError(
                f"{type(module).__name__} multiplies by {mapped.offset:g} + weight: add it to the "
                "weight of an nn.RMSNorm and wrap that."
            )
        norm_layer = cls.__new__(cls)
        LayerNormHessian.__init__(norm_layer, mapped.size, mapped.eps, norm=mapped.norm)
        norm_layer.weight = None if mapped.weight is None else nn.Parameter(mapped.weight)
        norm_layer.bias = None if mapped.bias is None else nn.Parameter(mapped.bias)
        return norm_layer

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        n, _ = normalize(x, eps=self.eps, norm=self.norm)
        y = n if self.weight is None else n * self.weight
        return y if self.bias is None else y + self.bias

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """n (…, d), 1/σ (…, 1) and γ (d,) of checked tokens."""
        d = self.normalized_shape[0]
        if x.ndim < 1 or x.shape[-1] != d:
            raise ValueError(f"x must end in {d}, got {tuple(x.shape)}.")
        if x.dtype not in COMPUTED:
            raise TypeError(
                f"x must be of a floating dtype, float32 or float64, got {x.dtype}: convert the "
                "layer and x."
            )
        if not bool(torch.isfinite(x).all()):
            raise ValueError("x holds NaN or infinity: no derivative is defined there.")
        gamma = torch.ones(d, dtype=x.dtype, device=x.device)
        if self.weight is not None:
            gamma = self.weight.detach()
            if gamma.dtype != x.dtype:
                raise TypeError(f"x is {x.dtype}, the weight {gamma.dtype}: convert one of them.")
            if gamma.device != x.device:
                raise ValueError(f"x is on {x.device}, the weight on {gamma.device}: move one.")
        n, inv_std = normalize(x.detach(), eps=self.eps, norm=self.norm)
        return n, inv_std, gamma

    def token_jacobians(self, x: Tensor) -> Tensor:
        r"""∂y/∂x of every token, J = diag(γ)(C − n nᵀ/d)/σ:  (…, d) → (…, d, d).

        Both terms of the P(X)·M(X) form, γ included; C = I − 11ᵀ/d (I for RMSNorm).
        """
        n, inv_std, gamma = self._statistics(x)
        return gamma.unsqueeze(-1) * norm_jacobian(n, inv_std, norm=self.norm)

    def compute_jacobian(self, x: Tensor) -> Tensor:
        """∂y/∂x as one matrix a sample:  (…, L, d) → (…, L·d, L·d), and (d,) → (d, d).

        Block-diagonal over the tokens; ``token_jacobians`` gives the blocks alone.
        """
        blocks = self.token_jacobians(x)
        if x.ndim == 1:
            return blocks
        *lead, length, d = x.shape
        matrix = blocks.new_zeros(*lead, length, d, length, d)
        matrix.diagonal(dim1=-4, dim2=-2).copy_(blocks.movedim(-3, -1))
        return matrix.reshape(*lead, length * d, length * d)

    def compute_hessian(self, x: Tensor, *, cotangent: Tensor | None = None) -> Tensor:
        r"""∂²y_a/∂x_b∂x_c of every token:  (…, d) → (…, d, d, d), or its contraction.

        −γ_a (J_ab n_c + J_ac n_b + J_bc n_a)/(dσ) with J without γ. With ``cotangent`` δ (…, d):
        Σ_a δ_a ∂²y_a = Ψ(γ ⊙ δ) (…, d, d), in O(d²) per token.
        """
        n, inv_std, gamma = self._statistics(x)
        if cotangent is None:
            return gamma[:, None, None] * norm_hessian(n, inv_std, norm=self.norm)
        if cotangent.shape != x.shape:
            raise ValueError(
                f"cotangent must have x's shape {tuple(x.shape)}, got {tuple(cotangent.shape)}."
            )
        return norm_second(n, inv_std, gamma * cotangent.detach(), norm=self.norm)

    def compute_hessian_wrt_weight(
        self, x: Tensor, target: Tensor | None = None, loss: str | OutputLoss = "mse"
    ) -> Tensor:
        """∂²ℓ/∂γ² (d, d) of x (d,), (L, d) or (B, L, d); ``compute_hessian_wrt_parameters`` has β.

        Without a target the objective is ½‖y‖², summed over the features and averaged over the
        tokens: γγ = diag(mean n²).
        """
        return self.compute_hessian_wrt_parameters(x, target, loss).block("weight", "weight")

    def compute_hessian_wrt_parameters(
        self, x: Tensor, target: Tensor | None = None, loss: str | OutputLoss = "mse"
    ) -> BlockHessian:
        r"""The true Hessian over (γ, β):  γγ = Σ diag(n)Λ diag(n),  γβ = Σ diag(n)Λ,  ββ = ΣΛ.

        y is linear in γ and β, so the functional part is exactly zero and the outer part is the
        whole Hessian. x (d,), (L, d) or (B, L, d); ``result.block("weight", "bias")``. Without a
        target as ``compute_hessian_wrt_weight``.
        """
        if self.weight is None:
            raise ValueError("this norm has no weight: its parameter Hessian is empty.")
        n, _, gamma = self._statistics(x)
        y = n * gamma if self.bias is None else n * gamma + self.bias.detach()
        lead = (1,) * (3 - x.ndim)
        outputs = y.view(*lead, *y.shape)
        targets = None if target is None else target.view(*lead, *target.shape)
        seeds = seeds_at(outputs, targets, loss)
        tokens = n.reshape(-1, n.shape[-1])
        d = tokens.shape[-1]
        rows = [torch.diag_embed(tokens)]  # ∂y/∂γ = diag(n), ∂y/∂β = I
        if self.bias is not None:
            rows.append(torch.eye(d, dtype=n.dtype, device=n.device).expand(len(tokens), d, d))
        directions = torch.cat(rows, 1)  # (n, P, d)
        columns = directions.permute(1, 0, 2).reshape(-1, *outputs.shape)  # (P, B, L, d)
        moved = seeds.product(columns).reshape(columns.shape[0], -1)
        H = columns.reshape(columns.shape[0], -1) @ moved.mT
        names = ("weight",) if self.bias is None else ("weight", "bias")
        zero = tuple((a, b) for i, a in enumerate(names) for b in names[i:])
        return BlockHessian(
            loss=float(seeds.value),
            names=names,
            block_sizes=dict.fromkeys(names, d),
            structure=ZeroStructure(zeros={"total": (), "outer": (), "functional": zero}),
            parts={"total": H, "outer": H, "functional": torch.zeros_like(H)},
        )


class RMSNormHessian(LayerNormHessian):
    """``LayerNormHessian`` with norm="rms"."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...] | list[int],
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(normalized_shape, eps, norm="rms", elementwise_affine=elementwise_affine)


@dataclass(frozen=True, kw_only=True)
class NormVerification(Result):
    """Largest relative errors of the closed forms against double backward."""

    jacobian: float
    hessian: float
    contraction: float
    weight_hessian: float
    tolerance: float
    passed: bool

    def __str__(self) -> str:
        word = "agrees" if self.passed else "DISAGREES"
        return (
            f"closed form {word} with double backward: Jacobian {self.jacobian:.1e}, Hessian "
            f"{self.hessian:.1e}, contraction {self.contraction:.1e}, weight Hessian "
            f"{self.weight_hessian:.1e} (relative; tolerance {self.tolerance:.1e})"
        )


def verify_layernorm_hessian(
    d_model: int = 8,
    length: int = 4,
    *,
    eps: float = 1e-5,
    norm: Norm = "layer",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> NormVerification:
    """Compare every closed form of a random norm with double backward at random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device="cpu")

    layer = LayerNormHessian(d_model, eps, norm=norm).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(random(d_model))
    x, target, cotangent = random(length, d_model), random(length, d_model), random(length, d_model)
    names = [name for name, _ in layer.named_parameters()]

    def loss(*values: Tensor) -> Tensor:
        outputs: Tensor = functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return (outputs - target).square().mean()

    # reverse over reverse: torch.func.hessian is silently wrong through normalisations
    jacobian: Callable[..., Any] = functional.jacobian
    hessian: Callable[..., Any] = functional.hessian
    tensor = [jacobian(partial(jacobian, layer, create_graph=True), token) for token in x]
    contraction = [
        hessian(lambda t, v=v: (layer(t) * v).sum(), token)
        for token, v in zip(x, cotangent, strict=True)
    ]
    weight = [torch.cat(row, 1) for row in hessian(loss, tuple(layer.parameters()))]
    compared = (
        (layer.token_jacobians(x), torch.stack([jacobian(layer, token) for token in x])),
        (layer.compute_hessian(x), torch.stack(tensor)),
        (layer.compute_hessian(x, cotangent=cotangent), torch.stack(contraction)),
        (layer.compute_hessian_wrt_parameters(x, target).H, torch.cat(weight)),
    )
    errors = [float(torch.linalg.norm(a - b) / torch.linalg.norm(b)) for a, b in compared]
    tolerance = 200 * torch.finfo(dtype).eps
    return NormVerification(
        jacobian=errors[0],
        hessian=errors[1],
        contraction=errors[2],
        weight_hessian=errors[3],
        tolerance=tolerance,
        passed=max(errors) <= tolerance,
    )
