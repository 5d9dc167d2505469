"""How blocks of the Hessian grow with the input and with each weight (Ormaniec et al., tables).

X → tX; norms are Frobenius norms of exact blocks in closed form; laws are slopes on log-log axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.figures.theory import growth_figure
from curvatlas.layers.losses import TokenSquaredError
from curvatlas.layers.structure import BlockSpec, Weights
from curvatlas.linear_operator import Part
from curvatlas.theory import reference
from curvatlas.theory.papers.attention import PAIRS
from curvatlas.theory.reference import (
    SingleHead,
    attention_hessian_blocks,
    block_hessian,
    draw_head,
    head_as_block,
    normal,
)
from curvatlas.theory.statements import (
    CORRECTED,
    HOLDS,
    CheckEffort,
    Outcome,
    outcome,
    statement,
    worst,
)
from curvatlas.theory.token_bound import stack_hessian

Curves = dict[str, list[float]]  # block → its norm at every scale
_TABLES = "ormaniec-growth-tables"


def slope(scales: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope on log-log axes; NaN for a block that vanishes."""
    if min(values) <= 0.0:
        return float("nan")
    x = torch.tensor(scales, dtype=torch.float64).log()
    y = torch.tensor(values, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def logspace(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def sweep(norms: Callable[[float], Mapping[str, float]], scales: Sequence[float]) -> Curves:
    """Norms by name at every scale."""
    rows = [norms(t) for t in scales]
    return {name: [row[name] for row in rows] for name in rows[0]}


def slopes_of(curves: Curves, scales: Sequence[float]) -> dict[str, float]:
    return {name: slope(scales, values) for name, values in curves.items()}


def head_norms(head: SingleHead, part: Part) -> dict[str, float]:
    """Norms of the blocks of H_o or H_f of one head."""
    blocks = attention_hessian_blocks(head, part)
    return {pair: float(blocks[pair].norm()) for pair in PAIRS}


def block_norms(
    spec: BlockSpec, weights: Weights, x: Tensor, y: Tensor, part: Part
) -> dict[str, float]:
    """Norms of the diagonal blocks of a block's weight matrices."""
    result = block_hessian(spec, weights, x, y)
    return {
        name.removesuffix("_weight"): float(result.block(name, name, part).norm())
        for name in weights
        if name.endswith("_weight") and not name.startswith("norm")
    }


def stack_norms(
    layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor, target: Tensor
) -> dict[str, float]:
    """Norms of every weight's diagonal block of H_o of a stack, from exact products."""
    hessian = stack_hessian(layers, x, target, TokenSquaredError())
    dense = hessian.operator("outer").dense()
    places = {name: slice(start, start + size) for name, (start, size) in hessian.offsets.items()}
    return {name: float(dense[place, place].norm()) for name, place in places.items()}


def law(
    measured: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
    *,
    within: float,
    also: bool = True,
    series: Mapping[str, Any] | None = None,
) -> Outcome:
    """Slopes against the claimed exponents, each pair (measured, claimed); the first one is shown.

    also: what must hold besides.
    """
    error = worst([abs(got[name] - rate) for got, want in measured for name, rate in want.items()])
    shown = {name: measured[0][0][name] for name in measured[0][1]}
    listed = ", ".join(f"{name} {value:.2f}" for name, value in shown.items())
    words = f"slopes {listed}" if len(shown) <= 8 else f"{len(shown)} slopes"
    return outcome(
        f"{words} (off by at most {error:.3f})",
        printed=error < within and also,
        numbers={"slopes": shown, "largest_deviation": error},
        series=series,
    )


def drawn(
    scales: Sequence[float], panels: Mapping[str, Curves], words: str = "input scale t"
) -> dict[str, Any]:
    """What ``growth_figure`` draws."""
    slopes = {title: slopes_of(curves, scales) for title, curves in panels.items()}
    return {"panels": dict(panels), "slopes": slopes, "scales": list(scales), "xlabel": words}


def _scaled(head: SingleHead, t: float, *, target: bool = False) -> SingleHead:
    return SingleHead(t * head.x, *head.parameters, head.target * (t if target else 1.0))


def _head_curves(
    head: SingleHead, part: Part, scales: Sequence[float], *, target: bool = False
) -> Curves:
    return sweep(lambda t: head_norms(_scaled(head, t, target=target), part), scales)


def _random_head(effort: CheckEffort, trial: int = 0, input_scale: float = 1.0) -> SingleHead:
    return draw_head(effort.generator(trial), length=5, d=4, d_k=3, input_scale=input_scale)


# ---- one head -----------------------------------------------------------------------------------


@statement("growth-input-outer", HOLDS, plot=growth_figure)
def growth_outer(effort: CheckEffort) -> Outcome:
    """H_o blocks grow like X⁶ (QQ, QK, KK), X⁴ (VQ, VK), X² (VV) while logits are small

    ‖H_o(Q,Q)‖ ∝ t⁶, ‖H_o(V,Q)‖ ∝ t⁴, ‖H_o(V,V)‖ ∝ t² under X → tX
    Source: Ormaniec et al., growth of H_o in the input [ormaniec-growth-tables]
    Assumptions: small logits (t ≤ 0.1); at large t softmax saturates, see growth-saturation
    Tested by: log-log slopes of Frobenius norms, t from 0.005 to 0.05, several heads
    """
    scales = logspace(5e-3, 5e-2, 5)
    want = {"QQ": 6.0, "QK": 6.0, "KK": 6.0, "VQ": 4.0, "VK": 4.0, "VV": 2.0}
    heads = [_random_head(effort, trial) for trial in effort.trials(2, 10)]
    curves = [_head_curves(head, "outer", scales) for head in heads]
    measured = [(slopes_of(c, scales), want) for c in curves]
    return law(measured, within=0.05, series=drawn(scales, {"H_o, small logits": curves[0]}))


@statement("growth-input-functional", HOLDS, plot=growth_figure)
def growth_functional(effort: CheckEffort) -> Outcome:
    """H_f blocks grow like X⁵ (QQ, KK) and X³ (VQ, VK); QK has both terms, X³ leads

    fixed target: H_f(Q,Q) ∝ t⁵, H_f(V,Q) ∝ t³, H_f(Q,K) = t⁵ term + Γ⊗I term ∝ t³; target ∝ X:
    every exponent one higher
    Source: Ormaniec et al., growth of H_f in the input (X⁵, X³) [ormaniec-growth-tables]
    Assumptions: small logits (t ≤ 0.1)
    Tested by: log-log slopes with the target fixed and with the target scaled along
    """
    scales = logspace(5e-3, 5e-2, 5)
    want = {"QQ": 5.0, "KK": 5.0, "QK": 3.0, "VQ": 3.0, "VK": 3.0}
    measured, panels = [], {}
    for trial in effort.trials(2, 10):
        for along in (False, True):
            head = _random_head(effort, trial)
            curves = _head_curves(head, "functional", scales, target=along)
            del curves["VV"]
            panels["H_f, target " + ("∝ X" if along else "fixed")] = curves
            expected = {name: rate + float(along) for name, rate in want.items()}
            measured.append((slopes_of(curves, scales), expected))
    return law(measured, within=0.05, series=drawn(scales, panels))


@statement("growth-saturation", CORRECTED, plot=growth_figure)
def growth_saturation(effort: CheckEffort) -> Outcome:
    """The rates end where softmax saturates: Q and K blocks vanish, only VV keeps slope 2

    t → ∞: covariances under A die exponentially, ‖H_o(Q,Q)‖ → 0; ‖H_o(V,V)‖ ∝ t²
    Source: Ormaniec et al., growth rates read as laws at any scale [ormaniec-growth-tables]
    Tested by: norms from t = 0.01 to 300: slope at the large end, and QQ there against its peak
    Counterexample: at t = 300 the QQ block is below 1e-6 of its peak instead of t⁶ above it
    """
    scales = logspace(1e-2, 3e2, 14)
    ratios, ends, panels = [], [], {}
    for trial in effort.trials(2, 8):
        head = _random_head(effort, trial)
        curves = {p: _head_curves(head, p, scales) for p in ("outer", "functional")}
        outer = curves["outer"]
        ratios.append(outer["QQ"][-1] / max(outer["QQ"]))
        ends.append(slope(scales[-4:], outer["VV"][-4:]))
        del curves["functional"]["VV"]
        panels = {
            f"H_{part[0]}": {b: [max(v, 1e-12) for v in values] for b, values in found.items()}
            for part, found in curves.items()
        }
    saturates = worst(ratios) < 1e-6 and worst([abs(e - 2.0) for e in ends]) < 0.05
    return outcome(
        f"QQ at t=300 is {worst(ratios):.0e} of its peak; VV slope {ends[0]:.3f} there",
        printed=min(ratios) > 0.99,
        corrected=saturates,
        numbers={"qq_over_peak": worst(ratios), "vv_slope": ends},
        series={"panels": panels, "scales": scales, "xlabel": "input scale t"},
    )


@statement("growth-fixed-logits", HOLDS)
def growth_fixed_logits(effort: CheckEffort) -> Outcome:
    """With the logits held fixed, H_o grows like t⁴, t³, t² by moments

    X → tX, W_Q → W_Q/t, W_K → W_K/t: H_o(Q,Q) ∝ t⁴, H_o(V,Q) ∝ t³, H_o(V,V) ∝ t²
    Source: Ormaniec et al., growth in attention moments (M2², M1M2, M1²) [ormaniec-growth-tables]
    Assumptions: none: exact at every t, since A does not change
    Tested by: log-log slopes over t = 0.1 to 10
    """
    scales, h = logspace(0.1, 10.0, 5), _random_head(effort)
    want = {"QQ": 4.0, "QK": 4.0, "KK": 4.0, "VQ": 3.0, "VK": 3.0, "VV": 2.0}
    curves = sweep(
        lambda t: head_norms(
            SingleHead(t * h.x, h.query / t, h.key / t, h.value, h.target), "outer"
        ),
        scales,
    )
    return law([(slopes_of(curves, scales), want)], within=0.02)


@statement("growth-weights", HOLDS)
def growth_weights(effort: CheckEffort) -> Outcome:
    """Exponents of every block in W_Q, W_K and W_V

    H_o: QQ ∝ W_K²W_V², QK ∝ W_QW_KW_V², KK ∝ W_Q²W_V², VQ ∝ W_KW_V, VK ∝ W_QW_V, VV ∝ 1;
    H_f: QQ ∝ W_K²W_V, KK ∝ W_Q²W_V, QK ∝ W_V, VQ ∝ W_K, VK ∝ W_Q
    Source: Ormaniec et al., growth in each weight [ormaniec-growth-tables]
    Assumptions: small logits; residual dominated by the target (F ≪ Y) for H_f
    Tested by: 33 log-log slopes, one weight scaled at a time
    """
    exponents: dict[Part, dict[str, tuple[int, int, int]]] = {
        "outer": {
            "QQ": (0, 2, 2), "QK": (1, 1, 2), "KK": (2, 0, 2), "VQ": (0, 1, 1), "VK": (1, 0, 1),
            "VV": (0, 0, 0),
        },
        "functional": {
            "QQ": (0, 2, 1), "KK": (2, 0, 1), "QK": (0, 0, 1), "VQ": (0, 1, 0), "VK": (1, 0, 0),
        },
    }  # fmt: skip
    scales, base = logspace(0.5, 2.0, 3), _random_head(effort, input_scale=0.03)
    got, want = {}, {}
    for part, table in exponents.items():
        for place, letter in enumerate("QKV"):

            def norms(t: float, at: int = place, p: Part = part) -> dict[str, float]:
                q, k, v = (t * w if i == at else w for i, w in enumerate(base.parameters))
                return head_norms(SingleHead(base.x, q, k, v, base.target), p)

            found = slopes_of(sweep(norms, scales), scales)
            for name, rates in table.items():
                key = f"H_{part[0]}({name}) in W_{letter}"
                got[key], want[key] = found[name], float(rates[place])
    return law([(got, want)], within=0.1)


@statement("linear-attention-growth", HOLDS, plot=growth_figure)
def linear_attention(effort: CheckEffort) -> Outcome:
    """Without softmax every H_o block grows like Σ_XX³ and H_f like Ω_xy Σ_XX

    A = s XW_QW_Kᵀ Xᵀ: all H_o blocks ∝ t⁶; H_f off-diagonal ∝ t³ for F ≪ Y, t⁶ for F ≫ Y;
    H_f diagonal blocks are zero
    Source: Ormaniec et al., attention without softmax [ormaniec-growth-tables]
    Tested by: log-log slopes of all blocks in closed form (softmax off)
    """
    head = _random_head(effort)
    spec = BlockSpec(d_model=4, d_k=3, d_v=4, residual=False, softmax=False)
    _, weights = head_as_block(head)
    x, y = head.x.unsqueeze(0), head.target.unsqueeze(0)
    ranges: dict[str, tuple[Part, float, list[float]]] = {
        "H_o": ("outer", 6.0, logspace(1e-2, 1e2, 6)),
        "H_f, F ≪ Y": ("functional", 3.0, logspace(1e-3, 1e-2, 6)),
        "H_f, F ≫ Y": ("functional", 6.0, logspace(1e2, 1e3, 6)),
    }
    measured, panels, diagonal = [], {}, 0.0
    for title, (part, rate, scales) in ranges.items():

        def norms(t: float, p: Part = part) -> dict[str, float]:
            result = block_hessian(spec, weights, t * x, y)
            return {pair: float(result.block(pair[0], pair[1], p).norm()) for pair in PAIRS}

        panels[title] = curves = sweep(norms, scales)
        if part == "functional":
            diagonal = max(diagonal, *(max(curves.pop(b)) for b in ("QQ", "KK", "VV")))
        measured.append((slopes_of(curves, scales), dict.fromkeys(curves, rate)))
    series = drawn(ranges["H_o"][2], {"H_o": panels["H_o"]}, "input scale t (no softmax)")
    return law(measured, within=0.02, also=diagonal == 0.0, series=series)


# ---- depth and norms ----------------------------------------------------------------------------


def _mlp_outer(x: Tensor, target: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """H_o of the linear network X W_1 ⋯ W_m under mean squared error."""
    tracked = [w.clone().requires_grad_(True) for w in weights]
    y = x
    for w in tracked:
        y = y @ w
    jac = reference.jacobian(y, tracked)
    return 2.0 / target.numel() * jac.T @ jac


@statement("linear-mlp-data-dependence", HOLDS)
def linear_mlp(effort: CheckEffort) -> Outcome:
    """A linear MLP's H_o depends on the data through Σ_XX at any depth; attention through X⁶

    f = X W_1 ⋯ W_m: every H_o block ∝ t² for any m; self-attention H_o(Q,Q) ∝ t⁶
    Source: Ormaniec et al., comparison with MLPs (Fig. 8) [ormaniec-growth-mlp]
    Tested by: log-log slopes of MLPs of depth 1 to 4 (exact) beside those of growth-input-outer
    """
    generator = effort.generator()
    x, y = normal(generator, 2, 6, 3)
    stacks = {f"depth {m}": list(normal(generator, m, 3, 3)) for m in (1, 2, 3, 4)}
    scales = logspace(0.01, 100.0, 5)
    curves = sweep(
        lambda t: {m: float(_mlp_outer(t * x, y, w).norm()) for m, w in stacks.items()}, scales
    )
    return law([(slopes_of(curves, scales), dict.fromkeys(curves, 2.0))], within=1e-6)


@statement("data-dependence-grows-with-depth", HOLDS)
def depth_dependence(effort: CheckEffort) -> Outcome:
    """Softmax-free attention depends on the data more steeply with every layer

    m layers of linear attention: all H_o blocks ∝ t^{2·3^m} (6, 18, 54), linear MLP: t²
    Source: Ormaniec et al., data dependence and depth [ormaniec-growth-tables]
    Assumptions: no residual, no norm (each layer is cubic in its input)
    Tested by: log-log slopes of stacks of one, two and three layers, in closed form
    """
    spec = BlockSpec(d_model=3, d_k=2, d_v=3, residual=False, softmax=False)
    generator = effort.generator()
    x, y = normal(generator, 2, 1, 3, 3)
    layers = [(spec, reference.draw_weights(spec, generator, affine=False)) for _ in range(3)]
    scales = logspace(0.8, 1.25, 3)
    got, want = {}, {}
    for depth in (1, 2, 3):
        curves = sweep(lambda t, m=depth: stack_norms(layers[:m], t * x, y), scales)  # type: ignore[misc]
        for name, value in slopes_of(curves, scales).items():
            got[f"depth {depth} {name}"], want[f"depth {depth} {name}"] = value, 2.0 * 3.0**depth
    return law([(got, want)], within=1e-6)


@statement("growth-rates-carry-over-to-depth", HOLDS, plot=growth_figure)
def carry_over(effort: CheckEffort) -> Outcome:
    """The rates of one layer hold in every layer of a residual Transformer without norms

    every layer: H_o(Q,Q) ∝ t⁶ and H_o(V,V) ∝ t² under X → tX at small logits
    Source: Ormaniec et al., deeper Transformers (Figs. 5 to 7) [ormaniec-growth-tables]
    Assumptions: residual stream, feed-forward with GELU, no normalisation, small t
    Tested by: log-log slopes in each of three layers, t from 0.002 to 0.02
    """
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, norm="none", norm_first=True)
    generator = effort.generator()
    layers = [(spec, reference.draw_weights(spec, generator)) for _ in range(3)]
    x, y = normal(generator, 2, 1, 4, 4)
    scales = logspace(2e-3, 2e-2, 4)
    rates = {"query_weight": 6.0, "value_weight": 2.0}
    want = {f"blocks.{layer}.{w}": rate for layer in range(3) for w, rate in rates.items()}
    every = sweep(lambda t: stack_norms(layers, t * x, y), scales)
    curves = {name: every[name] for name in want}
    series = drawn(scales, {"H_o, three layers": curves})
    return law([(slopes_of(curves, scales), want)], within=0.1, series=series)


def _small_block(effort: CheckEffort, *, norm_first: bool) -> tuple[Any, ...]:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, norm_first=norm_first, eps=1e-30)
    generator = effort.generator()
    weights = reference.draw_weights(spec, generator)
    return spec, weights, *normal(generator, 2, 1, 4, 4)


@statement("pre-norm-partial-fix", HOLDS, plot=growth_figure)
def pre_norm_fix(effort: CheckEffort) -> Outcome:
    """Pre-norm removes the input's scale at small scale; through the residual it comes back

    small t: every block of H flat (slope 0); large t: blocks of H_f driven by Z − Y grow like t
    Source: Ormaniec et al., pre-LayerNorm (Fig. 3b) [ormaniec-growth-pre-norm]
    Assumptions: pre-norm block, ε → 0
    Tested by: log-log slopes of H at t = 1e-4 to 1e-2 and of H_f at t = 1e3 to 1e5
    """
    spec, weights, x, y = _small_block(effort, norm_first=True)

    def curves(part: Part, scales: Sequence[float]) -> Curves:
        return sweep(lambda t: block_norms(spec, weights, t * x, y, part), scales)

    small, large, all_scales = (
        logspace(1e-4, 1e-2, 4),
        logspace(1e3, 1e5, 4),
        logspace(1e-3, 1e4, 12),
    )
    flat = slopes_of(curves("total", small), small)
    grows = slopes_of(curves("functional", large), large)
    deviation = worst([abs(v) for v in flat.values()])
    driven = {name: grows[name] for name in ("query", "key")}
    return outcome(
        f"small t: slopes within {deviation:.3f} of 0; large t, H_f: "
        + ", ".join(f"{n} {v:.2f}" for n, v in driven.items()),
        printed=deviation < 0.05 and worst([abs(v - 1.0) for v in driven.values()]) < 0.1,
        numbers={"small": flat, "large": driven},
        series=drawn(all_scales, {"pre-norm block, H": curves("total", all_scales)})
        | {"slopes": {}},
    )


@statement("post-norm-scaling", HOLDS)
def post_norm_scaling(effort: CheckEffort) -> Outcome:
    """Post-norm: value and feed-forward blocks are scale-free, query and key blocks go like t⁴

    small t, ε → 0: ‖H(V,V)‖, ‖H(W1,W1)‖, ‖H(W2,W2)‖ ∝ t⁰; ‖H(Q,Q)‖, ‖H(K,K)‖ of H_o ∝ t⁴
    Source: ours
    Assumptions: post-norm block, ε → 0, small logits
    Tested by: log-log slopes at t = 1e-3 to 1e-2
    """
    spec, weights, x, y = _small_block(effort, norm_first=False)
    scales = logspace(1e-3, 1e-2, 4)
    curves = sweep(lambda t: block_norms(spec, weights, t * x, y, "outer"), scales)
    want = {"query": 4.0, "key": 4.0, "value": 0.0, "up": 0.0, "down": 0.0}
    return law([(slopes_of(curves, scales), want)], within=0.05)
