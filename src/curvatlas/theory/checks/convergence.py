"""Theorem 7: how much one more sample changes the loss landscape."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.figures.theory import lines_figure
from curvatlas.layers.structure import BlockSpec
from curvatlas.theory import reference
from curvatlas.theory.checks.growth import slope
from curvatlas.theory.reference import normal
from curvatlas.theory.statements import CheckEffort, Outcome, check, judge, log_log, spread

_SLACK = 1.0 + 1e-9


def _quadratic_samples(
    effort: CheckEffort, trial: int
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Samples ℓ_i(w) = c_i + ½ΔᵀH_iΔ around a shared stationary w*; Δ, k+1 Hessians, M, L."""
    generator = effort.generator(trial)
    k, p = 3 + trial % 8, 4
    h = normal(generator, k + 1, p, p)
    h = 0.5 * (h + h.mT)
    offset = torch.rand(k + 1, generator=generator, dtype=torch.float64)
    delta = normal(generator, p)
    bound = float(torch.linalg.matrix_norm(h, 2).max())
    return delta, h, offset, bound, float(offset.max())


@check("loss-difference-identity")
def loss_difference(effort: CheckEffort) -> Outcome:
    printed, corrected = [], []
    for trial in range(effort.trials(20, 200)):
        delta, h, offset, _, _ = _quadratic_samples(effort, trial)
        losses = offset + 0.5 * torch.einsum("a,iab,b->i", delta, h, delta)
        k = len(h) - 1
        true = float(losses.mean() - losses[:k].mean())
        constant = float(offset[k] - offset[:k].mean()) / (k + 1)
        bend = float(0.5 * delta @ (h[k] - h[:k].mean(0)) @ delta)
        printed.append(abs(constant + bend - true) / abs(true))
        corrected.append(abs(constant + bend / (k + 1) - true) / abs(true))
    return Outcome(
        verdict=judge(printed=max(printed) < 1e-9, corrected=max(corrected) < 1e-9),
        figure=f"printed off by {spread(printed)}; corrected {max(corrected):.0e}",
        numbers={"printed": max(printed), "corrected": max(corrected)},
    )


@check("theorem-7-quadratic")
def theorem_7(effort: CheckEffort) -> Outcome:
    ratios, sharper = [], []
    for trial in range(effort.trials(200, 5000)):
        delta, h, offset, m, top = _quadratic_samples(effort, trial)
        losses = offset + 0.5 * torch.einsum("a,iab,b->i", delta, h, delta)
        k = len(h) - 1
        difference = abs(float(losses.mean() - losses[:k].mean()))
        square = float(delta @ delta)
        ratios.append(difference * (k + 1) / (2 * top + m * square))
        sharper.append(difference * (k + 1) / (top + m * square))
    # ℓ_1 = −½M w², ℓ_2 = L + ½M w²: L_2 − L_1 = (L + M w²)/2, the bound with L exactly
    k, m, top, w = 1, 3.0, 0.7, 0.4
    first, second = -0.5 * m * w**2, top + 0.5 * m * w**2
    attained = abs((first + second) / 2 - first) * (k + 1) / (top + m * w**2)
    return Outcome(
        verdict=judge(printed=max(*ratios, *sharper) <= _SLACK and abs(attained - 1) < 1e-12),
        figure=f"difference/bound up to {max(ratios):.3f} (2L), {max(sharper):.3f} (L);"
        f" the pair attains {attained:.6f} of the bound with L",
        numbers={"largest": max(ratios), "sharper": max(sharper), "attained": attained},
    )


@check("theorem-7-segment")
def theorem_7_segment(effort: CheckEffort) -> Outcome:
    a, w, k = 1.0, 1.0, 1
    difference = abs((0.0 + a * w**4) / 2 - 0.0)
    at_optimum = 0.0 * w**2 / (k + 1)
    points = torch.linspace(0.0, w, 101, dtype=torch.float64)
    on_segment = float((12 * a * points**2).max()) * w**2 / (k + 1)
    return Outcome(
        verdict=judge(
            printed=difference <= at_optimum * _SLACK, corrected=difference <= on_segment * _SLACK
        ),
        figure=f"difference {difference:.2f}; bound {at_optimum:.2f} at w*, {on_segment:.2f} on "
        f"segment",
        numbers={"difference": difference, "at_optimum": at_optimum, "on_segment": on_segment},
    )


@check("theorem-7-assumption")
def theorem_7_assumption(effort: CheckEffort) -> Outcome:
    k, gradient, w, m, top = 7, 1.0, 1.0, 1e-3, 5e-3
    difference = gradient * w / (k + 1)
    printed = (2 * top + m * w**2) / (k + 1)
    ratios = []
    for trial in range(effort.trials(200, 5000)):
        delta, h, offset, bound, highest = _quadratic_samples(effort, trial)
        slopes = normal(effort.generator(10_000 + trial), len(h), len(delta))
        losses = offset + slopes @ delta + 0.5 * torch.einsum("a,iab,b->i", delta, h, delta)
        n = len(h) - 1
        true = abs(float(losses.mean() - losses[:n].mean()))
        jump = float((slopes[n] - slopes[:n].mean(0)).norm() * delta.norm())
        ratios.append(true * (n + 1) / (highest + jump + bound * float(delta @ delta)))
    largest_gradient = _trained_gradients(effort)
    return Outcome(
        verdict=judge(printed=difference <= printed * _SLACK, corrected=max(ratios) <= _SLACK),
        figure=f"linear sample: {difference:.3f} against {printed:.4f}; corrected at most"
        f" {max(ratios):.3f} of its bound; trained block: max ‖∇ℓ_i(w*)‖ = {largest_gradient:.2f}",
        numbers={
            "difference": difference,
            "printed_bound": printed,
            "corrected_largest": max(ratios),
            "trained_gradient": largest_gradient,
        },
    )


def _trained_gradients(effort: CheckEffort) -> float:
    """Largest per-sample gradient norm at the optimum of a small trained block."""
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6)
    generator = effort.generator(77)
    weights = reference.tracked(reference.draw_weights(spec, generator))
    x, y = normal(generator, 2, 12, 3, 4)
    params = list(weights.values())
    for _ in range(150):
        loss = reference.loss_of("mse", y)(reference.block_output(spec, weights, x))
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p -= 0.2 * g
    per_sample = (reference.block_output(spec, weights, x) - y).pow(2).mean((1, 2))
    return float(reference.jacobian(per_sample, params).norm(dim=1).max())


def difference_slope(losses: Tensor) -> tuple[float, Tensor, Tensor]:
    """Log-log slope of |L_{k+1} − L_k| over permutations; k and mean difference for drawing.

    losses: (permutations, n) per-sample losses at a fixed w
    """
    n = losses.shape[1]
    counts = torch.arange(1, n + 1, dtype=torch.float64)
    running = losses.cumsum(1) / counts
    difference = (running[:, 1:] - running[:, :-1]).abs().mean(0)
    k = counts[1:]
    keep = k >= 20
    return slope(k[keep].tolist(), difference[keep].tolist()), k, difference


@check("loss-difference-slope", plot=lines_figure)
def slope_null_control(effort: CheckEffort) -> Outcome:
    n, permutations = effort.trials(1500, 6000), 40
    generator = effort.generator()
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6)
    weights = reference.draw_weights(spec, generator)
    x, y = normal(generator, 2, n, 3, 4)
    block = (reference.block_output(spec, weights, x) - y).pow(2).mean((1, 2))
    noise = torch.rand(n, generator=generator, dtype=torch.float64)
    heavy = normal(generator, n).pow(2)
    slopes, curves, k = {}, {}, torch.zeros(1)
    for name, values in {"block losses": block, "uniform noise": noise, "χ² noise": heavy}.items():
        order = torch.stack([torch.randperm(n, generator=generator) for _ in range(permutations)])
        slopes[name], k, difference = difference_slope(values[order])
        curves[name] = difference
    null = all(abs(slopes[name] + 1.0) < 0.15 for name in ("uniform noise", "χ² noise"))
    shown = torch.logspace(0, float(torch.log10(k[-1])), 60).long() - 1
    shown = torch.tensor(sorted({int(i) for i in shown if i >= 0}))
    curves["guide 1/k"] = curves["uniform noise"][20] * k[20] / k
    return Outcome(
        # the slope would be evidence only if noise did not have it
        verdict=judge(printed=not null),
        figure="slopes " + ", ".join(f"{name} {s:.2f}" for name, s in slopes.items()),
        numbers={"slopes": slopes},
        series=log_log(
            k[shown].tolist(),
            {name: c[shown].tolist() for name, c in curves.items()},
            "k",
            "mean |L(k+1) − L(k)|",
        ),
    )
