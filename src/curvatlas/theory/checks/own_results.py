"""Third derivatives along a direction: closed forms against nested differentiation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from curvatlas.figures.theory import lines_figure, looseness_figure
from curvatlas.layers.losses import resolve_loss
from curvatlas.layers.structure import WEIGHT_NAMES
from curvatlas.theory import reference
from curvatlas.theory.checks.growth import logspace, slope
from curvatlas.theory.norm_bounds import bounds
from curvatlas.theory.reference import KINDS, Case, climb, draw_case, normal
from curvatlas.theory.statements import (
    CheckEffort,
    Outcome,
    agreement,
    check,
    judge,
    log_log,
    spread,
    worst,
)
from curvatlas.theory.third_order import Jet, directional_derivatives, normalize_jet
from curvatlas.theory.token_bound import entry_bounds, rows_by_backward

_SLACK = 1.0 + 1e-9  # rounding


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


@check("token-structured-bound", plot=looseness_figure)
def token_structured(effort: CheckEffort) -> Outcome:
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for trial in range(effort.trials(45, 2000)):
        kind = KINDS[trial % 3]
        case = draw_case(effort.generator(trial), kind)
        result = bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
        if result.exact > 0:
            ratios[kind].append(result.looseness["token_structured"])
    climbed = []
    for start in range(effort.trials(3, 50)):
        case = draw_case(effort.generator(50_000 + start), KINDS[start % 3], small=True)
        best, where = climb_token_bound(case, effort.trials(12, 60))
        result = bounds((where.spec, where.weights), where.x, where.target, loss=where.loss)
        climbed.append(max(best, 1.0 / result.looseness["token_structured"]))
    every = sorted(r for found_ratios in ratios.values() for r in found_ratios)
    medians = {k: sorted(v)[len(v) // 2] for k, v in ratios.items()}
    valid = every[0] >= 1 / _SLACK and max(climbed) <= _SLACK
    return Outcome(
        verdict=judge(printed=valid and max(medians.values()) <= 3.0 and every[-1] <= 6.0),
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


@check("data-free-bound")
def data_free(effort: CheckEffort) -> Outcome:
    ratios = []
    for trial in range(effort.trials(12, 400)):
        case = draw_case(effort.generator(70_000 + trial), KINDS[trial % 3])
        result = bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
        if result.exact > 0:
            ratios.append(result.looseness["data_free"])
    return Outcome(
        verdict=judge(printed=min(ratios) >= 1 / _SLACK),
        figure=f"bound/true {spread(ratios)} over {len(ratios)} blocks",
        numbers={"smallest": min(ratios), "largest": max(ratios)},
    )


@check("stack-bounds")
def stack_bounds(effort: CheckEffort) -> Outcome:
    token, data = [], []
    for trial in range(effort.trials(4, 120)):
        generator = effort.generator(80_000 + trial)
        case = draw_case(generator, KINDS[1 + trial % 2])
        more = [
            (case.spec, reference.draw_weights(case.spec, generator)) for _ in range(1 + trial % 2)
        ]
        layers = [(case.spec, case.weights), *more]
        result = bounds(layers, case.x, case.target, loss=case.loss)
        token.append(result.looseness["token_structured"])
        data.append(result.looseness["data_free"])
    return Outcome(
        verdict=judge(printed=min(*token, *data) >= 1 / _SLACK),
        figure=f"bound/true token-structured {spread(token)}, data-free {spread(data)}",
        numbers={"token_largest": max(token), "token_smallest": min(token), "data_free": min(data)},
    )


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


@check("third-order-normalisation")
def third_normalisation(effort: CheckEffort) -> Outcome:
    errors = []
    for trial in range(effort.trials(4, 40)):
        kind, eps = ("layer", "rms")[trial % 2], (0.0, 0.1)[trial // 2 % 2]
        x, u = normal(effort.generator(trial), 2, 5)
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        truth = _nested(reference.normalize(x + t * u, kind, eps), t)
        jet = normalize_jet(Jet.line(x, u), eps=eps, norm=kind)  # type: ignore[arg-type]
        errors += [reference.relative_error(a, b) for a, b in zip(jet.orders, truth, strict=True)]
    return agreement(errors, 1e-11)


def _loss_along(case: Case, move: dict[str, Tensor], t: Tensor) -> Tensor:
    weights = {n: w + t * move[n] for n, w in case.weights.items()}
    z = reference.block_output(case.spec, weights, case.x)
    return reference.loss_of(case.loss, case.target)(z)


def _direction(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    return {n: normal(generator, *w.shape) for n, w in case.weights.items()}


def _compare(effort: CheckEffort, kinds: tuple[str, ...], trials: int) -> list[float]:
    errors = []
    for trial in range(trials):
        generator = effort.generator(trial)
        case = draw_case(generator, kinds[trial % len(kinds)])
        move = _direction(case, generator)
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        truth = [float(v.detach()) for v in _nested(_loss_along(case, move, t), t)]
        result = directional_derivatives(
            (case.spec, case.weights), case.x, case.target, move, loss=case.loss
        )
        got = (result.value, result.first, result.second, result.third)
        errors += [
            abs(a - b) / (abs(b) + 1e-300) for a, b in zip(got, truth, strict=True) if b != 0.0
        ]
    return errors


@check("third-order-attention")
def third_attention(effort: CheckEffort) -> Outcome:
    errors = _compare(effort, ("attention",), effort.trials(5, 60))
    return agreement(errors, 1e-9, "derivatives")


@check("third-order-block")
def third_block(effort: CheckEffort) -> Outcome:
    errors = _compare(effort, KINDS[1:], effort.trials(6, 80))
    return agreement(errors, 1e-8, "derivatives")


@check("taylor-remainder", plot=lines_figure)
def taylor_remainder(effort: CheckEffort) -> Outcome:
    steps = logspace(3e-3, 3e-2, 6)
    slopes, ratios = [], []
    curves: dict[str, list[float]] = {}
    for trial in range(effort.trials(4, 20)):
        generator = effort.generator(100 + trial)
        case = draw_case(generator, KINDS[trial % 3], small=True)
        move = _direction(case, generator)
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
    return Outcome(
        verdict=judge(printed=deviation < 0.2 and worst([abs(s - 3.0) for s in slopes]) < 0.3),
        figure=f"remainder/(t³ℓ'''/6) within {deviation:.3f} of 1 at t = {steps[0]}; slopes"
        f" {min(slopes):.2f} to {max(slopes):.2f}",
        numbers={"deviation": deviation, "slopes": slopes},
        series=log_log(steps, curves, "step t", "error of the Taylor model"),
    )
