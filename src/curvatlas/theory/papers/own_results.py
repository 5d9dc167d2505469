"""What is ours: bounds of any block or stack, and third derivatives along a direction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvatlas.figures.theory import lines_figure, looseness_figure
from curvatlas.layers.losses import resolve_loss
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import WEIGHT_NAMES, Norm
from curvatlas.theory import reference
from curvatlas.theory.norm_bounds import bounds
from curvatlas.theory.papers.growth import logspace, slope
from curvatlas.theory.reference import KINDS, Case, climb, draw_case, normal
from curvatlas.theory.statements import (
    HOLDS,
    CheckEffort,
    Outcome,
    Rows,
    log_log,
    outcome,
    spread,
    statement,
    worst,
)
from curvatlas.theory.third_order import Jet, directional_derivatives
from curvatlas.theory.token_bound import entry_bounds, rows_by_backward

_SLACK = 1.0 + 1e-9  # rounding
_NORMS: tuple[Norm, Norm] = ("layer", "rms")


def climb_token_bound(case: Case, steps: int) -> tuple[float, Case]:
    """Ascent on true/bound over inputs, weights and (mse) targets of a small case."""
    names = [n for n in WEIGHT_NAMES if n in case.weights]
    free_target = case.loss == "mse"

    def rebuild(tensors: Sequence[Tensor]) -> Case:
        weights = dict(zip(names, tensors[1 : 1 + len(names)], strict=True))
        return Case(
            case.spec, weights, tensors[0], tensors[-1] if free_target else case.target, case.loss
        )

    def ratio(tensors: Sequence[Tensor]) -> Tensor:
        c = rebuild(tensors)
        z = reference.block_output(c.spec, c.weights, c.x)
        loss = resolve_loss(c.loss)
        value = loss.seeds(z, c.target).value
        true = reference.spectral_norm(
            reference.hessian(value, list(c.weights.values()), graph=True)
        )
        rows = partial(rows_by_backward, c.spec, c.weights, c.x, loss, c.target)
        result = entry_bounds(c.spec, c.weights, c.x, loss.seeds(z, c.target), norm_rows=rows)
        return true / result.norm()

    start = [case.x, *(case.weights[n] for n in names)]
    best, where = climb(ratio, [*start, case.target] if free_target else start, steps=steps)
    return best, rebuild(where)


@statement("token-structured-bound", HOLDS, plot=looseness_figure)
def token_structured(effort: CheckEffort) -> Outcome:
    """Token-structured bound: never violated, within a small factor of the truth

    ‖Σ_i α_iβ_iᵀ⊗M_i‖ ≤ [λ_max(Σ w αα ᵀ⊗USUᵀ) λ_max(Σ w⁻¹ββᵀ⊗VSVᵀ)]^½ per block, signed on the
    diagonal, Frobenius norms from token Grams, γ and β rows exact; then λ_max of the matrix of
    block bounds
    Source: ours: all parameters of attention layers, post- and pre-norm blocks
    Assumptions: softmax attention (any heads, causal, grouped), LayerNorm or RMSNorm, any
        activation, gated or not, biases, γ, β; loss that does not couple tokens
    Tested by: random blocks (--full: 2,000) and gradient ascent on true/bound (--full: 50)
    """
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for trial in effort.trials(45, 2000):
        kind = KINDS[trial % 3]
        case = draw_case(effort.generator(trial), kind)
        result = bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
        if result.exact > 0:
            ratios[kind].append(result.looseness["token_structured"])
    climbed = []
    for start in effort.trials(3, 50):
        case = draw_case(effort.generator(50_000 + start), KINDS[start % 3], small=True)
        best, where = climb_token_bound(case, effort.choose(12, 60))
        result = bounds((where.spec, where.weights), where.x, where.target, loss=where.loss)
        climbed.append(max(best, 1.0 / result.looseness["token_structured"]))
    every = sorted(r for found_ratios in ratios.values() for r in found_ratios)
    medians = {k: sorted(v)[len(v) // 2] for k, v in ratios.items()}
    valid = every[0] >= 1 / _SLACK and max(climbed) <= _SLACK
    return outcome(
        printed=valid and max(medians.values()) <= 3.0 and every[-1] <= 6.0,
        figure=f"bound/true {spread(every)} over {len(every)} blocks; adversary reached"
        f" {max(climbed):.4f} of 1 in {len(climbed)} ascents",
        numbers={
            "smallest": every[0],
            "largest": every[-1],
            "medians": medians,
            "adversary": max(climbed),
            "trials": len(every),
            "ascents": len(climbed),
        },
        series={"ratios": ratios, "climbed": climbed},
    )


@statement("data-free-bound", HOLDS)
def data_free(effort: CheckEffort) -> Outcome:
    """A bound from norms of inputs and weights alone, for any block or stack

    ‖H_gh‖ ≤ ‖Λ‖ jac_g jac_h + ‖δ‖_F hess_gh, both carried through attention, norms and feed-forward
    from ‖X‖, ‖W‖, L, d_k, min σ
    Source: ours: norm calculus through the whole block
    Assumptions: as token-structured-bound; σ in front of each norm bounded below
    Tested by: random attention layers, post- and pre-norm blocks against the exact norm
    """
    ratios = []
    for trial in effort.trials(12, 400):
        case = draw_case(effort.generator(70_000 + trial), KINDS[trial % 3])
        result = bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
        if result.exact > 0:
            ratios.append(result.looseness["data_free"])
    return outcome(
        printed=min(ratios) >= 1 / _SLACK,
        figure=f"bound/true {spread(ratios)} over {len(ratios)} blocks",
        numbers={"smallest": min(ratios), "largest": max(ratios)},
    )


@statement("stack-bounds", HOLDS)
def stack_bounds(effort: CheckEffort) -> Outcome:
    """Both bounds for stacks of blocks

    H_ab = (∂h_{b−1}/∂θ_a)ᵀ ∂²ℓ/∂h_{b−1}∂θ_b exact through N·d numbers; diagonal blocks: exact outer
    part plus token-structured functional part
    Source: ours: extension to stacks
    Tested by: random stacks of two and three blocks, post- and pre-norm, against the exact norm
    """
    token, data = [], []
    for trial in effort.trials(4, 120):
        generator = effort.generator(80_000 + trial)
        case = draw_case(generator, KINDS[1 + trial % 2])
        more = [
            (case.spec, reference.draw_weights(case.spec, generator)) for _ in range(1 + trial % 2)
        ]
        layers = [(case.spec, case.weights), *more]
        result = bounds(layers, case.x, case.target, loss=case.loss)
        token.append(result.looseness["token_structured"])
        data.append(result.looseness["data_free"])
    return outcome(
        printed=min(*token, *data) >= 1 / _SLACK,
        figure=f"bound/true token-structured {spread(token)}, data-free {spread(data)}",
        numbers={"token_largest": max(token), "token_smallest": min(token), "data_free": min(data)},
    )


def _nested(value: Tensor, t: Tensor) -> Tensor:
    """value and its first three derivatives in the scalar t (4, …), entry by entry."""
    orders = [value.reshape(-1)]
    for _ in range(3):
        orders.append(reference.jacobian(orders[-1], [t], graph=True)[:, 0])
    return torch.stack(orders).reshape(4, *value.shape)


@statement("third-order-normalisation", HOLDS, derivation="19-third-order", limit=1e-11)
def third_normalisation(effort: CheckEffort) -> Rows:
    """Third directional derivative of LayerNorm and RMSNorm

    σ n = c, σ² = m: n''' = −(3σ'n'' + 3σ''n' + σ'''n)/σ along a line in x
    Source: ours: extension to third order
    Assumptions: σ > 0, any ε
    Tested by: against three nested backward passes, both norms, ε ∈ {0, 0.1}
    """
    for trial in effort.trials(4, 40):
        norm, eps = _NORMS[trial % 2], (1e-300, 0.1)[trial // 2 % 2]
        x, u = normal(effort.generator(trial), 2, 5)
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        truth = _nested(reference.normalize(x + t * u, norm, eps), t)
        line: Any = Jet.line(x, u)
        n: Any = normalize(line, eps=eps, norm=norm)[0]
        yield from zip(n.orders, truth, strict=True)
        c = line - line.mean(-1, keepdim=True) if norm == "layer" else line
        m = (c * c).map(torch.mean)
        s0 = (m.value + eps).sqrt()  # σ, σ', σ'', σ''' from σ² = m, then n''' as printed
        s1 = 0.5 * m.first / s0
        s2 = (0.5 * m.second - s1**2) / s0
        s3 = (0.5 * m.third - 3.0 * s1 * s2) / s0
        n0, n1, n2, _ = n.orders
        yield (c.third - 3.0 * s1 * n2 - 3.0 * s2 * n1 - s3 * n0) / s0, truth[3]


def _loss_along(case: Case, move: dict[str, Tensor], t: Tensor) -> Tensor:
    weights = {n: w + t * move[n] for n, w in case.weights.items()}
    z = reference.block_output(case.spec, weights, case.x)
    return reference.loss_of(case.loss, case.target)(z)


def _along_a_line(effort: CheckEffort, kinds: tuple[str, ...], short: int, full: int) -> Rows:
    for trial in effort.trials(short, full):
        generator = effort.generator(trial)
        case = draw_case(generator, kinds[trial % len(kinds)])
        move = {n: normal(generator, *w.shape) for n, w in case.weights.items()}
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        truth = _nested(_loss_along(case, move, t), t)
        found = directional_derivatives(
            (case.spec, case.weights), case.x, case.target, move, loss=case.loss
        )
        orders = (found.value, found.first, found.second, found.third)
        got = torch.tensor(orders, dtype=torch.float64)
        yield from zip(got, truth, strict=True)


@statement("third-order-attention", HOLDS, derivation="19-third-order", limit=1e-09)
def third_attention(effort: CheckEffort) -> Rows:
    """Third directional derivative of the loss of an attention layer

    T = sQKᵀ; A''' by cumulants of T', T'', T''' under the rows of A; ℓ''' by the chain rule
    Source: ours: extension to third order
    Assumptions: softmax attention, any heads, causal or not, mse or cross-entropy
    Tested by: against three nested backward passes along random directions
    """
    return _along_a_line(effort, ("attention",), 5, 60)


@statement("third-order-block", HOLDS, derivation="19-third-order", limit=1e-08)
def third_block(effort: CheckEffort) -> Rows:
    """Third directional derivative of the loss of a whole block

    jets (f, f', f'', f''') through norm, attention, feed-forward and loss
    Source: ours: extension to third order
    Assumptions: post- or pre-norm, LayerNorm or RMSNorm, plain or gated, any activation
    Tested by: against three nested backward passes along random directions
    """
    return _along_a_line(effort, KINDS[1:], 6, 80)


@statement("taylor-remainder", HOLDS, derivation="19-third-order", plot=lines_figure)
def taylor_remainder(effort: CheckEffort) -> Outcome:
    """The quadratic model's error is t³ℓ'''/6 to leading order

    ℓ(θ+tv) − (ℓ + tℓ' + t²ℓ''/2) = t³ℓ'''/6 + O(t⁴)
    Source: article and Petrov et al.: second-order Taylor model of the loss
    Assumptions: smooth activation
    Tested by: log-log slopes of the remainder without (3) and with (4) the cubic term
    """
    steps = logspace(3e-3, 3e-2, 6)
    slopes, ratios = [], []
    curves: dict[str, list[float]] = {}
    for trial in effort.trials(4, 20):
        generator = effort.generator(100 + trial)
        case = draw_case(generator, KINDS[trial % 3], small=True)
        move = {n: normal(generator, *w.shape) for n, w in case.weights.items()}
        size = sum(float(v.pow(2).sum()) for v in move.values()) ** 0.5
        move = {n: v / size for n, v in move.items()}
        result = directional_derivatives(
            (case.spec, case.weights), case.x, case.target, move, loss=case.loss
        )
        truth = [
            float(_loss_along(case, move, torch.tensor(t, dtype=torch.float64))) for t in steps
        ]
        quadratic = [abs(v - result.predict(t, order=2)) for v, t in zip(truth, steps, strict=True)]
        cubic = [abs(v - result.predict(t)) for v, t in zip(truth, steps, strict=True)]
        slopes.append(slope(steps, quadratic))
        ratios.append(quadratic[0] / abs(steps[0] ** 3 * result.third / 6))
        curves = {"quadratic model": quadratic, "with cubic term": [max(c, 1e-18) for c in cubic]}
    deviation = worst([abs(r - 1.0) for r in ratios])
    return outcome(
        printed=deviation < 0.2 and worst([abs(s - 3.0) for s in slopes]) < 0.3,
        figure=f"remainder/(t³ℓ'''/6) within {deviation:.3f} of 1 at t = {steps[0]}; slopes"
        f" {min(slopes):.2f} to {max(slopes):.2f}",
        numbers={"deviation": deviation, "slopes": slopes},
        series=log_log(steps, curves, "step t", "error of the Taylor model"),
    )
