"""Third derivatives along a direction: closed forms against nested differentiation."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.theory import reference
from curvatlas.theory.figures import lines_figure
from curvatlas.theory.growth import _logspace, slope
from curvatlas.theory.jets import Jet, normalize_jet
from curvatlas.theory.statements import HOLDS, Effort, Outcome, judge, statement, worst
from curvatlas.theory.third_order import directional_derivatives
from curvatlas.theory.trials import KINDS, Case, draw_case

_DERIVATION = "docs/theory/derivations.md#third-order"


def _nested(value: Tensor, t: Tensor) -> list[Tensor]:
    """value and its first three derivatives in the scalar t, entry by entry."""
    flat = value.reshape(-1)
    orders = [flat]
    for _ in range(3):
        rows = []
        for entry in orders[-1]:
            grad = None
            if entry.requires_grad:
                (grad,) = torch.autograd.grad(entry, t, create_graph=True, allow_unused=True)
            rows.append(torch.zeros_like(t) if grad is None else grad)
        orders.append(torch.stack(rows))
    return orders


@statement(
    name="third-order-normalisation",
    source="ours: extension to third order",
    title="Third directional derivative of LayerNorm and RMSNorm",
    formula="σ n = c, σ² = m: n''' = −(3σ'n'' + 3σ''n' + σ'''n)/σ along a line in x",
    assumptions="σ > 0, any ε",
    tested_by="against three nested backward passes, both norms, ε ∈ {0, 0.1}",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def third_normalisation(effort: Effort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 40)):
        kind, eps = ("layer", "rms")[trial % 2], (0.0, 0.1)[trial // 2 % 2]
        x, u = torch.randn(2, 5, generator=effort.generator(trial), dtype=torch.float64)
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        truth = _nested(reference.normalize(x + t * u, kind, eps), t)
        jet = normalize_jet(Jet.line(x, u), eps=eps, norm=kind)  # type: ignore[arg-type]
        errors += [reference.relative_error(a, b) for a, b in zip(jet.orders, truth, strict=True)]
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-11),
        figure=f"largest relative error {worst(errors):.0e}",
        numbers={"error": worst(errors)},
    )


def _loss_along(case: Case, move: dict[str, Tensor], t: Tensor) -> Tensor:
    weights = {n: w + t * move[n] for n, w in case.weights.items()}
    z = reference.block_output(case.spec, weights, case.x)
    return reference.loss_of(case.loss, case.target)(z)


def _direction(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        n: torch.randn(w.shape, generator=generator, dtype=torch.float64)
        for n, w in case.weights.items()
    }


def _compare(effort: Effort, kinds: tuple[str, ...], trials: int) -> list[float]:
    errors = []
    for trial in range(trials):
        generator = effort.generator(trial)
        case = draw_case(generator, kinds[trial % len(kinds)])
        move = _direction(case, generator)
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        truth = [float(v.detach()) for v in _nested(_loss_along(case, move, t), t)]
        found = directional_derivatives(
            (case.spec, case.weights), case.x, case.target, move, loss=case.loss
        )
        got = (found.value, found.first, found.second, found.third)
        errors += [
            abs(a - b) / (abs(b) + 1e-300) for a, b in zip(got, truth, strict=True) if b != 0.0
        ]
    return errors


@statement(
    name="third-order-attention",
    source="ours: extension to third order",
    title="Third directional derivative of the loss of an attention layer",
    formula="T = sQKᵀ; A''' by cumulants of T', T'', T''' under the rows of A; ℓ''' by the chain "
    "rule",
    assumptions="softmax attention, any heads, causal or not, mse or cross-entropy",
    tested_by="against three nested backward passes along random directions",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def third_attention(effort: Effort) -> Outcome:
    errors = _compare(effort, ("attention",), effort.trials(5, 60))
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-9),
        figure=f"largest relative error {worst(errors):.0e} over {len(errors)} derivatives",
        numbers={"error": worst(errors)},
    )


@statement(
    name="third-order-block",
    source="ours: extension to third order",
    title="Third directional derivative of the loss of a whole block",
    formula="jets (f, f', f'', f''') through norm, attention, feed-forward and loss",
    assumptions="post- or pre-norm, LayerNorm or RMSNorm, plain or gated, any activation",
    tested_by="against three nested backward passes along random directions",
    verdict=HOLDS,
    derivation=_DERIVATION,
)
def third_block(effort: Effort) -> Outcome:
    errors = _compare(effort, KINDS[1:], effort.trials(6, 80))
    return Outcome(
        verdict=judge(printed=worst(errors) < 1e-8),
        figure=f"largest relative error {worst(errors):.0e} over {len(errors)} derivatives",
        numbers={"error": worst(errors)},
    )


@statement(
    name="taylor-remainder",
    source="article and Petrov et al.: second-order Taylor model of the loss",
    title="The quadratic model's error is t³ℓ'''/6 to leading order",
    formula="ℓ(θ+tv) − (ℓ + tℓ' + t²ℓ''/2) = t³ℓ'''/6 + O(t⁴)",
    assumptions="smooth activation",
    tested_by="log-log slopes of the remainder without (3) and with (4) the cubic term",
    verdict=HOLDS,
    derivation=_DERIVATION,
    plot=lines_figure,
)
def taylor_remainder(effort: Effort) -> Outcome:
    steps = _logspace(3e-3, 3e-2, 6)
    slopes, ratios = [], []
    curves: dict[str, list[float]] = {}
    for trial in range(effort.trials(4, 20)):
        generator = effort.generator(100 + trial)
        case = draw_case(generator, KINDS[trial % 3], small=True)
        move = _direction(case, generator)
        size = sum(float(v.pow(2).sum()) for v in move.values()) ** 0.5
        move = {n: v / size for n, v in move.items()}
        found = directional_derivatives(
            (case.spec, case.weights), case.x, case.target, move, loss=case.loss
        )
        truth = [
            float(_loss_along(case, move, torch.tensor(t, dtype=torch.float64))) for t in steps
        ]
        quadratic = [abs(v - found.predict(t, order=2)) for v, t in zip(truth, steps, strict=True)]
        cubic = [abs(v - found.predict(t)) for v, t in zip(truth, steps, strict=True)]
        slopes.append(slope(steps, quadratic))
        ratios.append(quadratic[0] / abs(steps[0] ** 3 * found.third / 6))
        curves = {"quadratic model": quadratic, "with cubic term": [max(c, 1e-18) for c in cubic]}
    deviation = worst([abs(r - 1.0) for r in ratios])
    return Outcome(
        verdict=judge(printed=deviation < 0.2 and worst([abs(s - 3.0) for s in slopes]) < 0.3),
        figure=f"remainder/(t³ℓ'''/6) within {deviation:.3f} of 1 at t = {steps[0]}; slopes"
        f" {min(slopes):.2f} to {max(slopes):.2f}",
        numbers={"deviation": deviation, "slopes": slopes},
        series={
            "x": steps,
            "curves": curves,
            "xscale": "log",
            "yscale": "log",
            "xlabel": "step t",
            "ylabel": "error of the Taylor model",
        },
    )
