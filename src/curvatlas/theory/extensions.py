"""What the sources leave open: other losses, heads, masks, norms, in closed form and verified."""

from __future__ import annotations

import torch

from curvatlas.blocks.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.efficient import block_hessian
from curvatlas.theory.statements import HOLDS, Effort, Outcome, judge, statement, worst

_DERIVATION = "docs/theory/derivations.md#the-block"
_EXACT = 1e-12


def _errors(effort: Effort, spec: BlockSpec, loss: str, trial: int, *, bias: bool = True) -> float:
    """Largest error of H, H_o, H_f against double backward, relative to ‖H‖_F."""
    generator = effort.generator(trial)
    weights = reference.draw_weights(spec, generator, bias=bias)
    x, y = torch.randn(2, 2, 4, spec.d_model, generator=generator, dtype=torch.float64)
    target = torch.randint(spec.d_model, (2, 4), generator=generator)
    if loss == "mse":
        target = y
    found = block_hessian(spec, weights, x, target, loss=loss)
    tracked = reference.tracked(weights)
    z = reference.block_output(spec, tracked, x)
    truth = reference.split_hessian(z, reference.loss_of(loss, target), list(tracked.values()))
    scale = float(truth[0].norm())
    parts = (found.total, found.outer, found.functional)
    return max(float((a - b).norm()) / scale for a, b in zip(parts, truth, strict=True))


def _outcome(errors: list[float]) -> Outcome:
    return Outcome(
        verdict=judge(printed=worst(errors) < _EXACT),
        figure=f"H, H_o, H_f to {worst(errors):.0e} of ‖H‖ in {len(errors)} configurations",
        numbers={"error": worst(errors), "configurations": len(errors)},
    )


@statement(
    name="extension-cross-entropy",
    source="ours: the sources treat mean squared error",
    title="All closed forms under token cross-entropy",
    formula="H is linear in the seeds: δ_i = (π_i − e_y)/N, Λ_i = (diag π_i − π_iπ_iᵀ)/N",
    tested_by="bare attention, post- and pre-norm blocks against double backward",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def cross_entropy(effort: Effort) -> Outcome:
    specs = [
        BlockSpec(d_model=4, d_k=3, d_v=4, residual=False),
        BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=6),
        BlockSpec(d_model=4, d_k=3, d_v=4, d_ff=6, norm_first=True),
    ]
    trials = range(effort.trials(3, 30))
    return _outcome([_errors(effort, specs[t % 3], "cross_entropy", t) for t in trials])


@statement(
    name="extension-multi-head",
    source="ours: the sources treat one head without W_O",
    title="Several heads with an output projection, any d_k and d_v, grouped keys and values",
    formula="cross-head blocks only through Λ (no functional part); tied heads: EᵀHE",
    tested_by="two to four heads, grouped-query included, against double backward",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def multi_head(effort: Effort) -> Outcome:
    specs = [
        BlockSpec(d_model=4, n_heads=2, d_k=3, d_v=1, residual=False),
        BlockSpec(d_model=4, n_heads=4, n_kv_heads=2, d_k=2, d_v=2, d_ff=5),
        BlockSpec(d_model=6, n_heads=3, d_ff=5, norm_first=True),
    ]
    trials = range(effort.trials(3, 30))
    return _outcome([_errors(effort, specs[t % 3], "mse", t) for t in trials])


@statement(
    name="extension-causal",
    source="ours: the sources treat full attention",
    title="Causal masks change nothing in the formulas: A is zero there",
    formula="the same blocks with A_ij = 0 for j > i",
    tested_by="causal attention and blocks, one and two heads, against double backward",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def causal(effort: Effort) -> Outcome:
    specs = [
        BlockSpec(d_model=4, d_k=3, d_v=4, residual=False, causal=True),
        BlockSpec(d_model=4, n_heads=2, d_ff=6, causal=True, norm_first=True),
    ]
    trials = range(effort.trials(2, 20))
    return _outcome([_errors(effort, specs[t % 2], "mse", t) for t in trials])


@statement(
    name="extension-rms-swiglu",
    source="ours: the sources treat LayerNorm and ReLU",
    title="RMSNorm (C = I) and gated feed-forward (two channels per unit)",
    formula="J = (I − nnᵀ/d)/σ; per unit D1 = (f'h_u, f), D2 = [[f''h_u, f'], [f', 0]]",
    tested_by="RMSNorm with SwiGLU and GEGLU, post- and pre-norm, against double backward",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def rms_swiglu(effort: Effort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 32)):
        spec = BlockSpec(
            d_model=4, d_k=3, d_v=4, d_ff=5, norm="rms", gated=True,
            activation=("silu", "gelu", "gelu_tanh")[trial % 3], norm_first=trial % 2 == 1,
        )  # fmt: skip
        errors.append(_errors(effort, spec, "mse", trial))
    return _outcome(errors)


@statement(
    name="extension-pre-norm",
    source="ours: the papers' theory is post-norm, the article's code pre-norm",
    title="The pre-norm block in closed form, γ and β of both norms included",
    formula="U = X + Att(n₁(X)), Z = U + FFN(n₂(U)); γ₁, β₁ move the attention's input",
    tested_by="all activations, with biases, against double backward",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def pre_norm(effort: Effort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 32)):
        spec = BlockSpec(
            d_model=4, d_k=3, d_v=4, d_ff=5, norm_first=True,
            activation=("relu", "gelu", "gelu_tanh", "silu")[trial % 4],
        )  # fmt: skip
        errors.append(_errors(effort, spec, "mse", trial))
    return _outcome(errors)
