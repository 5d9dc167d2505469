"""The feed-forward part with its Jacobians and Hessian written out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.block import block_hessian
from curvatlas.closed_form.derivatives import BlockDerivatives
from curvatlas.closed_form.evaluation import Evaluation, evaluate_feed_forward
from curvatlas.closed_form.result import BlockHessian
from curvatlas.engines.tangent.block import LinearisedFeedForward
from curvatlas.engines.tangent.feed_forward import check_activation
from curvatlas.engines.tangent.losses import OutputLoss, resolve_loss
from curvatlas.engines.tangent.structure import Activation, BlockSpec
from curvatlas.linear_operator import Part
from curvatlas.problem.evaluation import say_evaluation_mode
from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class FeedForwardJacobians(Result):
    """Jacobians of y = W2 g(W1 x) at every token; indexable by field name.

    d_ffn_d_w1[…, o, k, a] = W2[o, k] (∂g_k/∂h_k) x_a,    d_ffn_d_w2[…, o, o', k] = δ_oo' g_k
    """

    d_ffn_d_w1: Tensor  # (…, d, d_ff, d), the up-projection
    d_ffn_d_w2: Tensor  # (…, d, d, d_ff)
    d_ffn_d_gate: Tensor | None  # (…, d, d_ff, d), gated only
    activation_derivative: Tensor  # ∂g/∂h of the up-projection (…, d_ff)
    intermediate: Tensor  # g (…, d_ff)


class FFNHessian(nn.Module):
    """y = W2 act(W1 x + b1) + b2, or gated y = W2 (act(W_g x) ⊙ W_u x), with exact derivatives.

    Derivatives are those in evaluation mode, without dropout; in train mode this is said once.
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
        check_activation(activation)
        if min(d_model, d_ff) < 1:
            raise ValueError(f"sizes must be positive, got d_model={d_model}, d_ff={d_ff}.")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}.")
        self.d_model, self.d_ff, self.dropout = d_model, d_ff, float(dropout)
        self.activation, self.gated = activation, gated
        if gated:
            self._linear("gate", d_ff, d_model, bias)
        self._linear("up", d_ff, d_model, bias)
        self._linear("down", d_model, d_ff, bias)

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> None:
        weight = nn.Parameter(torch.empty(rows, columns))
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        self.register_parameter(f"{name}_weight", weight)
        if bias:
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(rows)))

    @property
    def spec(self) -> BlockSpec:
        return BlockSpec(
            d_model=self.d_model,
            d_ff=self.d_ff,
            norm="none",
            norm_first=True,
            activation=self.activation,
            gated=self.gated,
        )

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        evaluation = evaluate_feed_forward(self.spec, dict(self.named_parameters()), x)
        if not (self.training and self.dropout > 0) or evaluation.hidden is None:
            return evaluation.output
        hidden = nn.functional.dropout(evaluation.hidden.value, self.dropout)
        down = dict(self.named_parameters())
        return nn.functional.linear(hidden, down["down_weight"], down.get("down_bias"))

    def _evaluate(self, x: Tensor) -> Evaluation:
        if self.training and self.dropout > 0:
            say_evaluation_mode(self, f"dropout of {self.dropout:g}")
        if x.shape[-1] != self.d_model:
            raise ValueError(f"x must end in {self.d_model}, got {tuple(x.shape)}.")
        weights = {name: p.detach().clone() for name, p in self.named_parameters()}
        if x.dtype != weights["up_weight"].dtype:
            raise TypeError(
                f"the input is {x.dtype}, the weights {weights['up_weight'].dtype}: convert one."
            )
        return evaluate_feed_forward(self.spec, weights, _three_axes(x.detach()))

    def compute_ffn_jacobians(self, x: Tensor) -> FeedForwardJacobians:
        """Jacobians with respect to both weight matrices at every token of x (…, d)."""
        evaluation = self._evaluate(x)
        units, weights = evaluation.hidden, evaluation.weights
        assert units is not None
        lead = x.shape[:-1]
        tokens, W2 = x.detach(), weights["down_weight"]
        slope = units.slope_up.view(*lead, -1)
        value = units.value.view(*lead, -1)
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
            intermediate=value,
        )

    def derivatives(
        self,
        x: Tensor,
        target: Tensor,
        *,
        loss: str | OutputLoss = "mse",
        budget: int | None = None,
    ) -> BlockDerivatives:
        """The Hessian as an operator, with single blocks, exact diagonal and norms."""
        evaluation = self._evaluate(x)
        resolved = resolve_loss(loss)
        if target.is_floating_point():
            target = _three_axes(target)
        else:
            target = target.reshape(evaluation.output.shape[:2])
        linearise = partial(
            LinearisedFeedForward, evaluation.spec, evaluation.weights, evaluation.x
        )
        seeds = resolved.seeds(evaluation.output, target)
        return BlockDerivatives(evaluation, seeds, linearise, budget=budget)

    def compute_hessian(
        self,
        x: Tensor,
        target: Tensor,
        loss: str | OutputLoss = "mse",
        *,
        part: Part = "total",
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> BlockHessian:
        r"""The Hessian over gate, up and down weights and biases for x (…, d).

        W2W2 = Σ ĝĝᵀ ⊗ Λ,  W1W1 = Σ v̂v̂ᵀ ⊗ (D1 W2ᵀ Λ W2 D1 + ρ),  ρ = D2 ⊙ W2ᵀδ,
        W1W2 = Σ v̂ ĝ (D1 W2ᵀ Λ) + v̂ D1 δ                                          (derivations §9)
        """
        derivatives = self.derivatives(x, target, loss=loss)
        return block_hessian(derivatives, part=part, out=out, workspace=workspace)

    def compute_hessian_wrt_w2(
        self, x: Tensor, target: Tensor | None = None, loss: str | OutputLoss = "mse"
    ) -> Tensor:
        """∂²ℓ/∂W2² (d·d_ff, d·d_ff) = Σ_i Λ_i ⊗ g_i g_iᵀ.

        y is linear in W2, so the Gauss-Newton form is the whole Hessian. For MSE it does not depend
        on the target, which may be left out.
        """
        if target is None:
            if loss != "mse":
                raise ValueError("only the MSE Hessian does not depend on the target: pass one.")
            target = self._evaluate(x).output.view_as(x)
        return self.derivatives(x, target, loss=loss).block("down_weight", "down_weight")


def _three_axes(t: Tensor) -> Tensor:
    """(…, d) → (B, L, d)."""
    if t.ndim == 3:
        return t
    return t.reshape(1, -1, t.shape[-1]) if t.ndim <= 2 else t.flatten(0, -3)
