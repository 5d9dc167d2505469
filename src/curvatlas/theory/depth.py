"""Depth and normalisation: linear MLPs, stacks, and what pre- and post-norm do to growth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvatlas.blocks.products import Part
from curvatlas.blocks.stack import BlockStack
from curvatlas.blocks.structure import BlockSpec, Weights
from curvatlas.theory import reference
from curvatlas.theory.efficient import block_hessian
from curvatlas.theory.figures import growth_figure
from curvatlas.theory.growth import _logspace, slope
from curvatlas.theory.statements import HOLDS, Effort, Outcome, judge, statement, worst

_DERIVATION = "docs/theory/derivations.md#growth"


def _mlp_outer(x: Tensor, target: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """H_o of the linear network X W_1 ⋯ W_m under mean squared error."""
    tracked = [w.clone().requires_grad_(True) for w in weights]
    y = x
    for w in tracked:
        y = y @ w
    jac = reference.jacobian(y, tracked)
    return 2.0 / target.numel() * jac.T @ jac


def stack_outer_norms(
    layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor, target: Tensor, part: Part = "outer"
) -> dict[str, float]:
    """Frobenius norms of every weight's diagonal block of a stack, from closed-form products."""
    here = BlockStack(list(layers)).linearise(x, target)
    dense = here.product(torch.eye(here.shape[0], dtype=x.dtype), part=part)
    found, start = {}, 0
    for name, size in zip(here.names, here._sizes, strict=True):
        found[name] = float(dense[start : start + size, start : start + size].norm())
        start += size
    return found


@statement(
    name="linear-mlp-data-dependence",
    source="Ormaniec et al., comparison with MLPs",
    title="A linear MLP's H_o depends on the data through Σ_XX at any depth; attention through X⁶",
    formula="f = X W_1 ⋯ W_m: every H_o block ∝ t² for any m; self-attention H_o(Q,Q) ∝ t⁶",
    tested_by="log-log slopes of MLPs of depth 1 to 4 (exact) beside those of growth-input-outer",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def linear_mlp(effort: Effort) -> Outcome:
    scales = _logspace(0.01, 100.0, 5)
    generator = effort.generator()
    x, y = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    slopes = {}
    for depth in (1, 2, 3, 4):
        weights = [
            torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(depth)
        ]
        norms = [float(_mlp_outer(t * x, y, weights).norm()) for t in scales]
        slopes[f"depth {depth}"] = slope(scales, norms)
    error = worst([abs(s - 2.0) for s in slopes.values()])
    return Outcome(
        verdict=judge(printed=error < 1e-6),
        figure="slopes " + ", ".join(f"{k}: {v:.4f}" for k, v in slopes.items()),
        numbers={"slopes": slopes, "largest_deviation": error},
    )


@statement(
    name="data-dependence-grows-with-depth",
    source="Ormaniec et al., data dependence and depth",
    title="Softmax-free attention depends on the data more steeply with every layer",
    formula="m layers of linear attention: all H_o blocks ∝ t^{2·3^m} (6, 18, 54), linear MLP: t²",
    assumptions="no residual, no norm (each layer is cubic in its input)",
    tested_by="log-log slopes of stacks of one, two and three layers, in closed form",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def depth_dependence(effort: Effort) -> Outcome:
    spec = BlockSpec(d_model=3, d_k=2, d_v=3, residual=False, softmax=False)
    generator = effort.generator()
    x, y = torch.randn(2, 1, 3, 3, generator=generator, dtype=torch.float64)
    layers = [(spec, reference.draw_weights(spec, generator, affine=False)) for _ in range(3)]
    scales = _logspace(0.8, 1.25, 3)
    slopes: dict[int, list[float]] = {}
    for depth in (1, 2, 3):
        norms = [stack_outer_norms(layers[:depth], t * x, y) for t in scales]
        slopes[depth] = [slope(scales, [n[name] for n in norms]) for name in norms[0]]
    errors = [abs(s - 2.0 * 3.0**depth) for depth, found in slopes.items() for s in found]
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-6),
        figure="slopes " + ", ".join(f"{m} layer(s): {s[0]:.2f}" for m, s in slopes.items()),
        numbers={"slopes": {str(m): s for m, s in slopes.items()}, "deviation": worst(errors)},
    )


@statement(
    name="growth-rates-carry-over-to-depth",
    source="Ormaniec et al., deeper Transformers",
    title="The rates of one layer hold in every layer of a residual Transformer without norms",
    formula="every layer: H_o(Q,Q) ∝ t⁶ and H_o(V,V) ∝ t² under X → tX at small logits",
    assumptions="residual stream, feed-forward with GELU, no normalisation, small t",
    tested_by="log-log slopes in each of three layers, t from 0.002 to 0.02",
    verdict=HOLDS,
    derivation=_DERIVATION,
    plot=growth_figure,
)
def carry_over(effort: Effort) -> Outcome:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, norm="none", norm_first=True)
    generator = effort.generator()
    layers = [(spec, reference.draw_weights(spec, generator)) for _ in range(3)]
    x, y = torch.randn(2, 1, 4, 4, generator=generator, dtype=torch.float64)
    scales = _logspace(2e-3, 2e-2, 4)
    norms = [stack_outer_norms(layers, t * x, y) for t in scales]
    curves: dict[str, list[float]] = {}
    slopes, errors = {}, []
    for layer in range(3):
        for letter, weight, rate in (("Q", "query_weight", 6.0), ("V", "value_weight", 2.0)):
            name = f"layer {layer} {letter}{letter}"
            curves[name] = [n[f"blocks.{layer}.{weight}"] for n in norms]
            slopes[name] = slope(scales, curves[name])
            errors.append(abs(slopes[name] - rate))
    return Outcome(
        verdict=judge(printed=worst(errors) < 0.1),
        figure="slopes " + ", ".join(f"{k} {v:.2f}" for k, v in slopes.items()),
        numbers={"slopes": slopes, "largest_deviation": worst(errors)},
        series={
            "panels": {"H_o, three layers": curves},
            "slopes": {"H_o, three layers": slopes},
            "scales": scales,
            "xlabel": "input scale t",
        },
    )


def _block_curves(
    spec: BlockSpec, weights: Weights, x: Tensor, y: Tensor, scales: list[float], part: str
) -> dict[str, list[float]]:
    names = ("query_weight", "key_weight", "value_weight", "up_weight", "down_weight")
    curves: dict[str, list[float]] = {n.removesuffix("_weight"): [] for n in names}
    for t in scales:
        result = block_hessian(spec, weights, t * x, y)
        for n in names:
            curves[n.removesuffix("_weight")].append(float(result.block(n, part).norm()))
    return curves


@statement(
    name="pre-norm-partial-fix",
    source="Ormaniec et al., pre-LayerNorm",
    title="Pre-norm removes the input's scale at small scale; through the residual it comes back",
    formula="small t: every block of H flat (slope 0); large t: blocks of H_f driven by Z − Y "
    "grow like t",
    assumptions="pre-norm block, ε → 0",
    tested_by="log-log slopes of H at t = 1e-4 to 1e-2 and of H_f at t = 1e3 to 1e5",
    verdict=HOLDS,
    derivation=_DERIVATION,
    plot=growth_figure,
)
def pre_norm_fix(effort: Effort) -> Outcome:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, norm_first=True, eps=1e-30)
    generator = effort.generator()
    weights = reference.draw_weights(spec, generator)
    x, y = torch.randn(2, 1, 4, 4, generator=generator, dtype=torch.float64)
    small, large = _logspace(1e-4, 1e-2, 4), _logspace(1e3, 1e5, 4)
    flat = {
        n: slope(small, v) for n, v in _block_curves(spec, weights, x, y, small, "total").items()
    }
    driven = _block_curves(spec, weights, x, y, large, "functional")
    grows = {n: slope(large, driven[n]) for n in ("query", "key")}
    scales = _logspace(1e-3, 1e4, 12)
    curves = _block_curves(spec, weights, x, y, scales, "total")
    deviation = worst([abs(v) for v in flat.values()])
    return Outcome(
        verdict=judge(
            printed=deviation < 0.05 and worst([abs(v - 1.0) for v in grows.values()]) < 0.1
        ),
        figure=f"small t: slopes within {deviation:.3f} of 0; large t, H_f: "
        + ", ".join(f"{n} {v:.2f}" for n, v in grows.items()),
        numbers={"small": flat, "large": grows},
        series={
            "panels": {"pre-norm block, H": curves},
            "scales": scales,
            "xlabel": "input scale t",
        },
    )


@statement(
    name="post-norm-scaling",
    source="ours",
    title="Post-norm: value and feed-forward blocks are scale-free, query and key blocks go like "
    "t⁴",
    formula="small t, ε → 0: ‖H(V,V)‖, ‖H(W1,W1)‖, ‖H(W2,W2)‖ ∝ t⁰; ‖H(Q,Q)‖, ‖H(K,K)‖ of H_o ∝ t⁴",
    assumptions="post-norm block, ε → 0, small logits",
    tested_by="log-log slopes at t = 1e-3 to 1e-2",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def post_norm_scaling(effort: Effort) -> Outcome:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, eps=1e-30)
    generator = effort.generator()
    weights = reference.draw_weights(spec, generator)
    x, y = torch.randn(2, 1, 4, 4, generator=generator, dtype=torch.float64)
    scales = _logspace(1e-3, 1e-2, 4)
    curves = _block_curves(spec, weights, x, y, scales, "outer")
    slopes = {n: slope(scales, v) for n, v in curves.items()}
    want = {"query": 4.0, "key": 4.0, "value": 0.0, "up": 0.0, "down": 0.0}
    error = worst([abs(slopes[n] - rate) for n, rate in want.items()])
    return Outcome(
        verdict=judge(printed=error < 0.05),
        figure="slopes " + ", ".join(f"{n} {v:.2f}" for n, v in slopes.items()),
        numbers={"slopes": slopes, "largest_deviation": error},
    )
