"""How Hessian blocks of attention grow with the input and with each weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvatlas.figures.theory import growth_figure
from curvatlas.layers.losses import TokenSquaredError
from curvatlas.layers.structure import BlockSpec, Weights
from curvatlas.linear_operator import Part
from curvatlas.theory import reference
from curvatlas.theory.reference import (
    SingleHead,
    attention_hessian_blocks,
    block_hessian,
    draw_head,
    head_as_block,
    normal,
)
from curvatlas.theory.statements import CheckEffort, Outcome, check, judge, worst
from curvatlas.theory.token_bound import stack_hessian

_BLOCKS = ("QQ", "QK", "KK", "VQ", "VK", "VV")


def block_norms(head: SingleHead) -> dict[str, dict[str, float]]:
    """Frobenius norms of all blocks of H_o and H_f, in closed form."""
    return {
        part: {name: float(b.norm()) for name, b in attention_hessian_blocks(head, part).items()}
        for part in ("outer", "functional")
    }


def sweep(
    make: Callable[[float], SingleHead], scales: list[float]
) -> dict[str, dict[str, list[float]]]:
    """Block norms along a family of heads; {part: {block: values}}."""
    curves: dict[str, dict[str, list[float]]] = {
        p: {b: [] for b in _BLOCKS} for p in ("outer", "functional")
    }
    for t in scales:
        for part, norms in block_norms(make(t)).items():
            for name, value in norms.items():
                curves[part][name].append(value)
    return curves


def slope(scales: list[float], values: list[float]) -> float:
    """Least-squares slope on log-log axes; NaN for a block that vanishes."""
    if min(values) <= 0.0:
        return float("nan")
    x = torch.tensor(scales, dtype=torch.float64).log()
    y = torch.tensor(values, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def logspace(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def _slopes(
    curves: dict[str, dict[str, list[float]]], scales: list[float]
) -> dict[str, dict[str, float]]:
    return {p: {b: slope(scales, v) for b, v in blocks.items()} for p, blocks in curves.items()}


def _scaled(head: SingleHead, t: float, *, target: bool = False) -> SingleHead:
    return SingleHead(t * head.x, *head.parameters, head.target * (t if target else 1.0))


def _errors(got: dict[str, float], want: dict[str, float]) -> dict[str, float]:
    return {name: abs(got[name] - rate) for name, rate in want.items()}


@check("growth-input-outer", plot=growth_figure)
def growth_outer(effort: CheckEffort) -> Outcome:
    scales = logspace(5e-3, 5e-2, 5)
    want = {"QQ": 6.0, "QK": 6.0, "KK": 6.0, "VQ": 4.0, "VK": 4.0, "VV": 2.0}
    errors, slopes = [], {}
    curves: dict[str, dict[str, list[float]]] = {}
    for trial in range(effort.trials(2, 10)):
        head = draw_head(effort.generator(trial), length=5, d=4, d_k=3)
        curves = sweep(lambda t, h=head: _scaled(h, t), scales)  # type: ignore[misc]
        slopes = _slopes(curves, scales)
        errors += list(_errors(slopes["outer"], want).values())
    shown = ", ".join(f"{k} {v:.2f}" for k, v in slopes["outer"].items())
    return Outcome(
        verdict=judge(printed=worst(errors) < 0.05),
        figure=f"slopes {shown} (off by at most {worst(errors):.3f})",
        numbers={"slopes": slopes["outer"], "largest_deviation": worst(errors)},
        series={
            "panels": {"H_o, small logits": curves["outer"]},
            "slopes": {"H_o, small logits": slopes["outer"]},
            "scales": scales,
            "xlabel": "input scale t",
        },
    )


@check("growth-input-functional", plot=growth_figure)
def growth_functional(effort: CheckEffort) -> Outcome:
    scales = logspace(5e-3, 5e-2, 5)
    right = {"QQ": 5.0, "KK": 5.0, "QK": 3.0, "VQ": 3.0, "VK": 3.0}
    fixed_errors, scaled_errors = [], []
    panels: dict[str, dict[str, list[float]]] = {}
    slopes: dict[str, dict[str, float]] = {}
    for trial in range(effort.trials(2, 10)):
        head = draw_head(effort.generator(trial), length=5, d=4, d_k=3)
        for along in (False, True):
            curves = sweep(lambda t, h=head, a=along: _scaled(h, t, target=a), scales)["functional"]  # type: ignore[misc]
            curves.pop("VV")
            got = {b: slope(scales, v) for b, v in curves.items()}
            title = "H_f, target " + ("∝ X" if along else "fixed")
            panels[title], slopes[title] = curves, got
            if along:
                scaled_errors += list(_errors(got, {b: r + 1 for b, r in right.items()}).values())
            else:
                fixed_errors += list(_errors(got, right).values())
    shown = ", ".join(f"{k} {v:.2f}" for k, v in slopes["H_f, target fixed"].items())
    return Outcome(
        verdict=judge(printed=worst([*fixed_errors, *scaled_errors]) < 0.05),
        figure=f"slopes {shown}; with the target ∝ X one more, off by at most"
        f" {worst([*fixed_errors, *scaled_errors]):.3f}",
        numbers={"slopes": slopes, "largest_deviation": worst([*fixed_errors, *scaled_errors])},
        series={"panels": panels, "slopes": slopes, "scales": scales, "xlabel": "input scale t"},
    )


@check("growth-saturation", plot=growth_figure)
def growth_saturation(effort: CheckEffort) -> Outcome:
    scales = logspace(1e-2, 3e2, 14)
    ratios, ends = [], []
    panels: dict[str, dict[str, list[float]]] = {}
    for trial in range(effort.trials(2, 8)):
        head = draw_head(effort.generator(trial), length=5, d=4, d_k=3)
        curves = sweep(lambda t, h=head: _scaled(h, t), scales)  # type: ignore[misc]
        qq, vv = curves["outer"]["QQ"], curves["outer"]["VV"]
        ratios.append(qq[-1] / max(qq))
        ends.append(slope(scales[-4:], vv[-4:]))
        floor = 1e-12
        panels = {
            "H_o": {b: [max(v, floor) for v in values] for b, values in curves["outer"].items()},
            "H_f": {
                b: [max(v, floor) for v in values]
                for b, values in curves["functional"].items()
                if b != "VV"
            },
        }
    saturates = worst(ratios) < 1e-6 and worst([abs(e - 2.0) for e in ends]) < 0.05
    return Outcome(
        verdict=judge(printed=min(ratios) > 0.99, corrected=saturates),
        figure=f"QQ at t=300 is {worst(ratios):.0e} of its peak; VV slope {ends[0]:.3f} there",
        numbers={"qq_over_peak": worst(ratios), "vv_slope": ends},
        series={"panels": panels, "scales": scales, "xlabel": "input scale t"},
    )


@check("growth-fixed-logits")
def growth_fixed_logits(effort: CheckEffort) -> Outcome:
    scales = logspace(0.1, 10.0, 5)
    head = draw_head(effort.generator(), length=5, d=4, d_k=3)
    curves = sweep(
        lambda t: SingleHead(t * head.x, head.query / t, head.key / t, head.value, head.target),
        scales,
    )
    got = {b: slope(scales, v) for b, v in curves["outer"].items()}
    want = {"QQ": 4.0, "QK": 4.0, "KK": 4.0, "VQ": 3.0, "VK": 3.0, "VV": 2.0}
    errors = _errors(got, want)
    return Outcome(
        verdict=judge(printed=worst(errors) < 0.02),
        figure="slopes " + ", ".join(f"{k} {v:.2f}" for k, v in got.items()),
        numbers={"slopes": got, "largest_deviation": worst(errors)},
    )


@check("growth-weights")
def growth_weights(effort: CheckEffort) -> Outcome:
    outer = {
        "QQ": (0, 2, 2), "QK": (1, 1, 2), "KK": (2, 0, 2), "VQ": (0, 1, 1), "VK": (1, 0, 1),
        "VV": (0, 0, 0),
    }  # fmt: skip
    functional = {
        "QQ": (0, 2, 1), "KK": (2, 0, 1), "QK": (0, 0, 1), "VQ": (0, 1, 0), "VK": (1, 0, 0)
    }  # fmt: skip
    scales = logspace(0.5, 2.0, 3)
    base = draw_head(effort.generator(), length=5, d=4, d_k=3, input_scale=0.03)
    errors: dict[str, float] = {}
    for which in range(3):

        def make(t: float, place: int = which) -> SingleHead:
            weights = list(base.parameters)
            weights[place] = t * weights[place]
            return SingleHead(base.x, weights[0], weights[1], weights[2], base.target)

        curves = sweep(make, scales)
        for part, table in (("outer", outer), ("functional", functional)):
            for name, exponents in table.items():
                got = slope(scales, curves[part][name])
                errors[f"{part} {name} W{'QKV'[which]}"] = abs(got - exponents[which])
    return Outcome(
        verdict=judge(printed=worst(errors) < 0.1),
        figure=f"{len(errors)} exponents, off by at most {worst(errors):.3f}",
        numbers={"exponents": len(errors), "largest_deviation": worst(errors)},
    )


@check("linear-attention-growth", plot=growth_figure)
def linear_attention(effort: CheckEffort) -> Outcome:
    head = draw_head(effort.generator(), length=5, d=4, d_k=3)
    spec = BlockSpec(d_model=4, d_k=3, d_v=4, residual=False, softmax=False)
    _, weights = head_as_block(head)
    panels: dict[str, dict[str, list[float]]] = {}
    slopes: dict[str, dict[str, float]] = {}
    diagonal = 0.0
    sweeps: tuple[tuple[str, Part, list[float]], ...] = (
        ("H_o", "outer", logspace(1e-2, 1e2, 6)),
        ("H_f, F ≪ Y", "functional", logspace(1e-3, 1e-2, 6)),
        ("H_f, F ≫ Y", "functional", logspace(1e2, 1e3, 6)),
    )
    for title, part, scales in sweeps:
        curves: dict[str, list[float]] = {b: [] for b in _BLOCKS}
        for t in scales:
            result = block_hessian(spec, weights, t * head.x.unsqueeze(0), head.target.unsqueeze(0))
            for b in _BLOCKS:
                curves[b].append(float(result.block(b[0], b[1], part).norm()))
        if part == "functional":
            diagonal = max(diagonal, *(max(curves.pop(b)) for b in ("QQ", "KK", "VV")))
        panels[title] = curves
        slopes[title] = {b: slope(scales, v) for b, v in curves.items()}
    want = {"H_o": 6.0, "H_f, F ≪ Y": 3.0, "H_f, F ≫ Y": 6.0}
    errors = [abs(s - want[t]) for t, rates in slopes.items() for s in rates.values()]
    return Outcome(
        verdict=judge(printed=worst(errors) < 0.02 and diagonal == 0.0),
        figure=f"{len(errors)} slopes off by at most {worst(errors):.4f}; diagonal H_f "
        f"{diagonal:.0e}",
        numbers={"slopes": slopes, "largest_deviation": worst(errors), "diagonal": diagonal},
        series={
            "panels": {"H_o": panels["H_o"]},
            "slopes": {"H_o": slopes["H_o"]},
            "scales": logspace(1e-2, 1e2, 6),
            "xlabel": "input scale t (no softmax)",
        },
    )


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
    """Frobenius norms of every weight's diagonal block of a stack, from exact products."""
    hessian = stack_hessian(layers, x, target, TokenSquaredError())
    dense = hessian.operator(part).dense()
    blocks = {name: slice(start, start + size) for name, (start, size) in hessian.offsets.items()}
    return {name: float(dense[block, block].norm()) for name, block in blocks.items()}


@check("linear-mlp-data-dependence")
def linear_mlp(effort: CheckEffort) -> Outcome:
    scales = logspace(0.01, 100.0, 5)
    generator = effort.generator()
    x, y = normal(generator, 2, 6, 3)
    slopes = {}
    for depth in (1, 2, 3, 4):
        weights = [normal(generator, 3, 3) for _ in range(depth)]
        norms = [float(_mlp_outer(t * x, y, weights).norm()) for t in scales]
        slopes[f"depth {depth}"] = slope(scales, norms)
    error = worst([abs(s - 2.0) for s in slopes.values()])
    return Outcome(
        verdict=judge(printed=error < 1e-6),
        figure="slopes " + ", ".join(f"{k}: {v:.4f}" for k, v in slopes.items()),
        numbers={"slopes": slopes, "largest_deviation": error},
    )


@check("data-dependence-grows-with-depth")
def depth_dependence(effort: CheckEffort) -> Outcome:
    spec = BlockSpec(d_model=3, d_k=2, d_v=3, residual=False, softmax=False)
    generator = effort.generator()
    x, y = normal(generator, 2, 1, 3, 3)
    layers = [(spec, reference.draw_weights(spec, generator, affine=False)) for _ in range(3)]
    scales = logspace(0.8, 1.25, 3)
    slopes: dict[int, list[float]] = {}
    for depth in (1, 2, 3):
        norms = [stack_outer_norms(layers[:depth], t * x, y) for t in scales]
        slopes[depth] = [slope(scales, [n[name] for n in norms]) for name in norms[0]]
    errors = [abs(s - 2.0 * 3.0**depth) for depth, rates in slopes.items() for s in rates]
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-6),
        figure="slopes " + ", ".join(f"{m} layer(s): {s[0]:.2f}" for m, s in slopes.items()),
        numbers={"slopes": {str(m): s for m, s in slopes.items()}, "deviation": worst(errors)},
    )


@check("growth-rates-carry-over-to-depth", plot=growth_figure)
def carry_over(effort: CheckEffort) -> Outcome:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, norm="none", norm_first=True)
    generator = effort.generator()
    layers = [(spec, reference.draw_weights(spec, generator)) for _ in range(3)]
    x, y = normal(generator, 2, 1, 4, 4)
    scales = logspace(2e-3, 2e-2, 4)
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
    spec: BlockSpec, weights: Weights, x: Tensor, y: Tensor, scales: list[float], part: Part
) -> dict[str, list[float]]:
    names = ("query_weight", "key_weight", "value_weight", "up_weight", "down_weight")
    curves: dict[str, list[float]] = {n.removesuffix("_weight"): [] for n in names}
    for t in scales:
        result = block_hessian(spec, weights, t * x, y)
        for n in names:
            curves[n.removesuffix("_weight")].append(float(result.block(n, n, part).norm()))
    return curves


@check("pre-norm-partial-fix", plot=growth_figure)
def pre_norm_fix(effort: CheckEffort) -> Outcome:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, norm_first=True, eps=1e-30)
    generator = effort.generator()
    weights = reference.draw_weights(spec, generator)
    x, y = normal(generator, 2, 1, 4, 4)
    small, large = logspace(1e-4, 1e-2, 4), logspace(1e3, 1e5, 4)
    flat = {
        n: slope(small, v) for n, v in _block_curves(spec, weights, x, y, small, "total").items()
    }
    driven = _block_curves(spec, weights, x, y, large, "functional")
    grows = {n: slope(large, driven[n]) for n in ("query", "key")}
    scales = logspace(1e-3, 1e4, 12)
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


@check("post-norm-scaling")
def post_norm_scaling(effort: CheckEffort) -> Outcome:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, eps=1e-30)
    generator = effort.generator()
    weights = reference.draw_weights(spec, generator)
    x, y = normal(generator, 2, 1, 4, 4)
    scales = logspace(1e-3, 1e-2, 4)
    curves = _block_curves(spec, weights, x, y, scales, "outer")
    slopes = {n: slope(scales, v) for n, v in curves.items()}
    want = {"query": 4.0, "key": 4.0, "value": 0.0, "up": 0.0, "down": 0.0}
    error = worst([abs(slopes[n] - rate) for n, rate in want.items()])
    return Outcome(
        verdict=judge(printed=error < 0.05),
        figure="slopes " + ", ".join(f"{n} {v:.2f}" for n, v in slopes.items()),
        numbers={"slopes": slopes, "largest_deviation": error},
    )
