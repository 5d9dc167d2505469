"""The feed-forward part with its Jacobians and Hessian written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.block import block_hessian
from curvatlas.closed_form.derivatives import BlockDerivatives
from curvatlas.closed_form.evaluation import Evaluation, evaluate_feed_forward, seeds_at
from curvatlas.closed_form.result import BlockHessian
from curvatlas.engines.tangent.block import LinearisedFeedForward
from curvatlas.engines.tangent.losses import OutputLoss
from curvatlas.engines.tangent.structure import Activation, BlockSpec
from curvatlas.linear_operator import Part
from curvatlas.problem.evaluation import say_evaluation_mode
from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class FeedForwardJacobians(Result):
    """Jacobians of y = x + W2 g(h), h = W1 x + b1, at every token; indexable by field name.

    d_ffn_d_w1[…, o, k, a] = W2[o, k] (∂g_k/∂h_k) x_a,    d_ffn_d_w2[…, o, o', k] = δ_oo' g_k
    """

    d_ffn_d_w1: Tensor  # (…, d, d_ff, d), the up-projection
    d_ffn_d_w2: Tensor  # (…, d, d, d_ff)
    d_ffn_d_gate: Tensor | None  # (…, d, d_ff, d), gated only
    activation_derivative: Tensor  # ∂g/∂h of the up-projection (…, d_ff)
    intermediate: Tensor  # h, before the activation (…, d_ff)


# block of the Hessian → the linear map, by the article's name
_LINEAR = {"gate": "w_gate", "up": "w1", "down": "w2"}
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "identity": nn.Identity,
}


class FFNHessian(nn.Module):
    """y = x + W2 act(W1 x + b1) + b2 with exact derivatives; ``w1`` and ``w2`` are ``nn.Linear``.

    gated: y = x + W2 (act(W_g x) ⊙ W1 x), with a third map ``w_gate``. Derivatives are those in
    evaluation mode, without dropout; in train mode this is said once.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.0,
        activation: Activation = "gelu",
        *,
        bias: bool = True,
        gated: bool = False,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(f"unknown activation {activation!r}: choose one of {known}.")
        if min(d_model, d_ff) < 1:
            raise ValueError(f"sizes must be positive, got d_model={d_model}, d_ff={d_ff}.")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}.")
        self.d_model, self.d_ff = d_model, d_ff
        self.spec = BlockSpec(
            d_model=d_model,
            d_ff=d_ff,
            norm="none",
            norm_first=True,
            activation=activation,
            gated=gated,
        )
        if gated:
            self.w_gate = nn.Linear(d_model, d_ff, bias=bias)
        self.w1 = nn.Linear(d_model, d_ff, bias=bias)
        self.w2 = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = _ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of the Hessian's blocks, in flat order."""
        roles = {linear: role for role, linear in _LINEAR.items()}
        split = {name: name.split(".") for name, _ in self.named_parameters()}
        return {
            f"{roles[linear]}_{kind}": self.get_parameter(name)
            for name, (linear, kind) in split.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d), the residual x included."""
        if self.spec.gated:
            hidden = self.activation(self.w_gate(x)) * self.w1(x)
        else:
            hidden = self.activation(self.w1(x))
        y: Tensor = self.dropout(self.w2(hidden)) + x
        return y

    def _evaluate(self, x: Tensor) -> Evaluation:
        if self.training and self.dropout.p > 0:
            say_evaluation_mode(self, f"dropout of {self.dropout.p:g}")
        if x.shape[-1] != self.d_model:
            raise ValueError(f"x must end in {self.d_model}, got {tuple(x.shape)}.")
        weights = {name: p.detach().clone() for name, p in self.weights.items()}
        if x.dtype != weights["up_weight"].dtype:
            raise TypeError(
                f"the input is {x.dtype}, the weights {weights['up_weight'].dtype}: convert one."
            )
        x = _three_axes(x.detach())
        evaluation = evaluate_feed_forward(self.spec, weights, x)
        return replace(evaluation, output=evaluation.output + x)

    def compute_ffn_jacobians(self, x: Tensor) -> FeedForwardJacobians:
        """Jacobians with respect to both weight matrices at every token of x (…, d)."""
        evaluation = self._evaluate(x)
        units, weights = evaluation.hidden, evaluation.weights
        assert units is not None
        lead = x.shape[:-1]
        tokens, W2 = x.detach(), weights["down_weight"]
        slope = units.slope_up.view(*lead, -1)
        value = units.value.view(*lead, -1)
        h = nn.functional.linear(tokens, weights["up_weight"], weights.get("up_bias"))
        identity = torch.eye(self.d_model, dtype=x.dtype, device=x.device)

        def first_layer(slope: Tensor) -> Tensor:
            return (W2 * slope.unsqueeze(-2)).unsqueeze(-1) * tokens[..., None, None, :]

        gate = None
        if units.slope_gate is not None:
            gate = first_layer(units.slope_gate.view(*lead, -1))
        return FeedForwardJacobians(
            d_ffn_d_w1=first_layer(slope),
            d_ffn_d_w2=identity.unsqueeze(-1) * value[..., None, None, :],
            d_ffn_d_gate=gate,
            activation_derivative=slope,
            intermediate=h,
        )

    def derivatives(
        self,
        x: Tensor,
        target: Tensor | None = None,
        *,
        loss: str | OutputLoss = "mse",
        budget: int | None = None,
    ) -> BlockDerivatives:
        """The Hessian as an operator, with single blocks, exact diagonal and norms."""
        evaluation = self._evaluate(x)
        if target is not None and target.is_floating_point():
            target = _three_axes(target)
        elif target is not None:
            target = target.reshape(evaluation.output.shape[:2])
        linearise = partial(
            LinearisedFeedForward, evaluation.spec, evaluation.weights, evaluation.x
        )
        seeds = seeds_at(evaluation.output, target, loss)
        return BlockDerivatives(evaluation, seeds, linearise, budget=budget)

    def compute_hessian(
        self,
        x: Tensor,
        target: Tensor | None = None,
        loss: str | OutputLoss = "mse",
        *,
        part: Part = "total",
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> BlockHessian:
        r"""The Hessian over gate, up and down weights and biases for x (…, d).

        W2W2 = Σ ĝĝᵀ ⊗ Λ,  W1W1 = Σ v̂v̂ᵀ ⊗ (D1 W2ᵀ Λ W2 D1 + ρ),  ρ = D2 ⊙ W2ᵀδ,
        W1W2 = Σ v̂ ĝ (D1 W2ᵀ Λ) + v̂ D1 δ                                          (derivations §9)

        Without a target the objective is ½‖y‖², summed over the features and averaged over the
        tokens.
        """
        derivatives = self.derivatives(x, target, loss=loss)
        return block_hessian(derivatives, part=part, out=out, workspace=workspace)

    def compute_hessian_wrt_w2(
        self, x: Tensor, target: Tensor | None = None, loss: str | OutputLoss = "mse"
    ) -> Tensor:
        """∂²ℓ/∂W2² (d·d_ff, d·d_ff) = Σ_i Λ_i ⊗ g_i g_iᵀ.

        y is linear in W2, so the Gauss-Newton form is the whole Hessian. Without a target the
        objective is that of ``compute_hessian``.
        """
        return self.derivatives(x, target, loss=loss).block("down_weight", "down_weight")


def _three_axes(t: Tensor) -> Tensor:
    """(…, d) → (B, L, d)."""
    if t.ndim == 3:
        return t
    return t.reshape(1, -1, t.shape[-1]) if t.ndim <= 2 else t.flatten(0, -3)
