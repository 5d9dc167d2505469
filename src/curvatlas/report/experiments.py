"""What every other kind of run has to say: a verdict, cards, and a section of its own.

A kind is told by its name: results of studies are made in rooms that come after this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from curvatlas.report.layout import (
    Account,
    Card,
    Fold,
    Picture,
    Reading,
    Section,
    Table,
    Verdict,
    cut,
    rows_of,
    table,
)
from curvatlas.report.words import (
    PARTS,
    brackets,
    capitalised,
    listed,
    number,
    percent,
    ratio,
    sign_unknown,
    with_interval,
)
from curvatlas.results import Interval, Result
from curvatlas.training.alarms import YOUNG

if TYPE_CHECKING:
    from curvatlas.analysis.landscape import (
        convergence as settling,
        flatness as flat,
        taylor_result as taylor,
    )
    from curvatlas.scaling import PredictionComparison, ScalingGrid
    from curvatlas.studies import (
        gauss_newton,
        generalisation as general,
        growth as scales,
        retraining,
        sinks as attention_sinks,
    )
    from curvatlas.studies.claims import Claim, ClaimReport
    from curvatlas.studies.papers.reproduction import Reproduction
    from curvatlas.theory.statements import Verification
    from curvatlas.training import compression, pruning as pruned, snapshot

    Named = list[tuple[str, Any]]  # the results of one kind, by the names of their steps


# --- what accounts are made of --------------------------------------------------------------------


def account(
    key: str,
    question: str,
    answer: str,
    *,
    short: str,
    whole: Table | None = None,
    folds: Sequence[Fold] = (),
    picture: Picture | None = None,
    verdict: Verdict | None = None,
    cards: Sequence[Card] = (),
) -> Account:
    """One section with a table that is cut where it is long; the picture is on the first screen."""
    shown, rest = cut(whole)
    section = Section(
        key=key, question=question, answer=answer, short=short, table=shown, folds=(*rest, *folds)
    )
    pictures = () if picture is None else (picture,)
    return Account(verdict=verdict, cards=tuple(cards), pictures=pictures, sections=(section,))


def told(value: float | None, interval: Interval | None = None, stage: str = "") -> Reading:
    """A reading of a card."""
    if value is None:
        return Reading(stage, "–")
    return Reading(stage, number(value), brackets(value, interval))


def card(title: str, *readings: Reading, note: str = "", ratio: str = "") -> Card:
    return Card(title, readings, ratio=ratio, note=note)


def drawn(result: Result, title: str, alt: str, caption: str = "") -> Picture:
    """The one picture of a result."""
    return Picture(title, alt, result.plot, caption)


def folded(title: str, *tables: Table | None, text: Sequence[str] = ()) -> list[Fold]:
    """A fold with what there is; none where there is nothing."""
    there = tuple(one for one in tables if one is not None)
    return [Fold(title, tables=there, text=tuple(text))] if there or text else []


def law_words(law: Any, nothing: str = "–") -> str:
    """The exponent of a fitted power law."""
    return nothing if law is None else with_interval(law.exponent, law.interval)


# --- training -------------------------------------------------------------------------------------


def history(named: Named) -> Account | None:
    """A monitored training: where loss, sharpness and the optimizer's edge went."""
    training: snapshot.CurvatureHistory = named[0][1]
    if len(training.snapshots) < 2:
        return None
    first, last = training.snapshots[0], training.snapshots[-1]

    def over_steps(title: str, name: str) -> Card:
        values = [(float(s[name]), getattr(s, f"{name}_interval", None)) for s in (first, last)]
        ends = [
            told(*pair, f"step {s.step}") for pair, s in zip(values, (first, last), strict=True)
        ]
        return card(title, *ends, ratio=ratio(values[0][0], values[1][0]))

    ratios = [
        (s.edge_ratio, s.step)
        for s in training.snapshots
        if s.edge_ratio is not None and (s.step >= YOUNG or s.edge == s.sharpness)
    ]
    cards = [over_steps("Loss", "loss"), over_steps("Sharpest direction, λmax", "sharpness")]
    if not sign_unknown(last.trace, last.trace_interval):
        cards.append(over_steps("Total curvature, tr H", "trace"))
    metric, _, reason = last.metric.partition(" (")
    if ratios:
        nearest, step = max(ratios)
        own = "λmax" if metric == "plain" else f"λmax as {metric} sees it"
        note = f"{own}, over where this optimizer's own steps begin to grow"
        reading = Reading(f"step {step}", percent(nearest))
        cards.insert(1, card("Nearest to the edge of stability", reading, note=note))
    plain = (
        f" The edge is that of plain gradient descent: {reason.removesuffix(')')}."
        if metric == "plain" and reason
        else ""
    )
    shown = training.snapshots
    kept = [*shown[:: max(1, len(shown) // 10)][:-1], shown[-1]]
    rows = [
        [
            s.step,
            s.loss,
            with_interval(s.sharpness, s.sharpness_interval),
            s.most_negative,
            with_interval(s.trace, s.trace_interval),
            "–" if s.edge_ratio is None else percent(s.edge_ratio),
        ]
        for s in kept
    ]
    head = ["step", "loss", "λmax", "λmin", "tr H", "of the edge"]
    events = [
        [e.step, "alarm" if e.alarm else "note", e.name.replace("_", " "), e.message]
        for e in training.events
    ]
    steps = account(
        "steps",
        "How did it go?",
        f"{len(shown)} snapshots, {len(training.events)} events; measuring took "
        f"{percent(training.overhead)} of the time of training.{plain}",
        short="Steps",
        whole=table("Snapshots", head, rows),
        folds=folded("Events", table("", ["step", "", "what", "why"], events)),
        picture=drawn(
            training,
            "Over the steps",
            "Loss, the optimizer's own edge, eigenvalues and trace of H over the steps.",
            "Bands are 95 % intervals; upright lines are events",
        ),
        verdict=_training_verdict([e for e in training.events if e.alarm], ratios),
        cards=cards,
    )
    return Account(
        verdict=steps.verdict,
        cards=steps.cards,
        pictures=steps.pictures,
        sections=(*steps.sections, *_film(training)),
    )


def _training_verdict(alarms: Sequence[Any], ratios: Sequence[tuple[float, int]]) -> Verdict:
    over = [step for value, step in ratios if value > 1]
    if alarms:
        count = "1 alarm" if len(alarms) == 1 else f"{len(alarms)} alarms, the first"
        says = f"{count} at step {alarms[0].step}: {alarms[0].name.replace('_', ' ')}."
        more = tuple(f"Step {e.step}: {e.message}" for e in alarms[1:3])
        return Verdict("act", says, f"{capitalised(alarms[0].message).rstrip('.')}.", more)
    if over:
        return Verdict(
            "act",
            f"The optimizer was beyond its edge of stability in {len(over)} of {len(ratios)} "
            f"snapshots, first at step {over[0]}.",
            "Steps along the sharpest direction grow there: lower the rate, or warm up for longer, "
            "if the loss spikes.",
        )
    if ratios:
        nearest, step = max(ratios)
        return Verdict(
            "good",
            "Nothing to change: the optimizer stayed below its edge of stability.",
            f"Nearest at step {step}, with {percent(nearest)} of it. No alarm rose.",
        )
    return Verdict(
        "unsure",
        "No alarm rose; the optimizer's own edge of stability was not measured.",
        "It shows once an optimizer is given and has taken its first steps.",
    )


def _film(training: snapshot.CurvatureHistory) -> Iterator[Section]:
    count = len(training.mapped)
    if count < 2:
        return
    whole, *parts = (
        Picture(
            f"{symbol} over training",
            f"Maps of {symbol} over pairs of roles at {count} steps.",
            partial(training.film, part=part),
        )
        for part, symbol in PARTS.items()
    )
    yield Section(
        key="maps",
        question="Where did it move?",
        short="Maps",
        answer=f"The maps at {count} steps, on one scale of colours.",
        picture=whole,
        folds=(Fold("The maps of H_o and H_f", pictures=tuple(parts)),),
    )


def early_blocks(named: Named) -> Account:
    """Whether blocks with much curvature early on move more."""
    blocks: snapshot.EarlyBlocks = named[0][1]
    tests = {
        "curvature per weight, and movement per weight": blocks.per_weight,
        "norm of a block, and how far it moves": blocks.dominance,
        "size of a block alone (control)": blocks.size_alone,
    }
    rows = [
        [name, with_interval(t.value, t.interval), with_interval(0.0, t.null), number(t.p_value, 2)]
        for name, t in tests.items()
    ]
    return account(
        "early",
        "Does early curvature tell what moves?",
        f"{capitalised(blocks.answer)} (steps {blocks.step} to {blocks.until}, "
        f"{len(blocks.names)} blocks).",
        short="Early curvature",
        whole=table("Rank correlations", ["", "ρ", "shuffled blocks give", "p"], rows),
    )


# --- the landscape --------------------------------------------------------------------------------


def critical_rate(named: Named) -> Account:
    """Where plain gradient descent fails, tried on both sides."""
    rate: taylor.CriticalLearningRate = named[0][1]
    tried = listed([number(r) for r in rate.ratios]) if rate.ratios else ""
    confirms = "confirms" if rate.confirmed else "does NOT confirm"
    because = f"Training at {tried} times this rate {confirms} it." if tried else ""
    tries = zip(rate.ratios, rate.growth, rate.expected, strict=False)
    rows = [[f"× {number(r)}", number(g, 4), number(e, 4)] for r, g, e in tries]
    head = ["rate over the critical one", "measured", "by the quadratic model"]
    note = f"2/λmax with λmax = {number(rate.sharpness)}"
    return account(
        "rate",
        "Where does gradient descent fail?",
        f"At the rate {with_interval(rate.value, rate.interval)}. {because}".strip(),
        short="Edge",
        whole=table("Growth of a deviation a step", head, rows),
        picture=drawn(rate, "Below and above the edge", "Growth of a deviation by rate."),
        verdict=Verdict(
            "good" if rate.confirmed else "unsure",
            f"Keep the rate of plain gradient descent below {number(rate.value)}.",
            because,
        ),
        cards=[card("Critical learning rate", told(rate.value, rate.interval), note=note)],
    )


def trust_radius(named: Named) -> Account:
    """How far along a direction the Taylor polynomial holds."""
    one: taylor.TrustRadius = named[0][1]
    note = f"within {percent(one.accuracy)} of the change of the loss; seen to fail at "
    reading = Reading("length of a step", number(one.radius))
    title = f"Model of order {one.order} holds for"
    return Account(cards=(card(title, reading, note=note + number(one.measured_radius)),))


def trajectory(named: Named) -> Account:
    """Gradient descent, predicted and real."""
    path: taylor.PredictedTrajectory = named[0][1]
    last = len(path.losses) - 1
    answer, cards = str(path), []
    if path.horizon is not None:
        beyond = " Beyond that the quadratic model is no forecast." if path.horizon < last else ""
        within = f"within {percent(path.tolerance)} of the change of the loss"
        steps = f"{path.horizon} of {last}"
        answer = f"It predicts gradient descent {within} for {steps} steps.{beyond}"
        cards = [card("The quadratic model predicts", Reading("steps", steps), note=within)]
    chosen = path.rows[:: max(1, last // 10)]
    rows = [[row["step"], row["loss_predicted"], row["loss"]] for row in chosen]
    return account(
        "trajectory",
        "How long does the quadratic model hold?",
        answer,
        short="Forecast",
        whole=table("Loss", ["step", "predicted", "real"], rows),
        picture=drawn(
            path,
            "Gradient descent, predicted and real",
            "Loss over steps, as the quadratic model predicts it and as training gives it.",
            f"Learning rate {number(path.learning_rate)}",
        ),
        cards=cards,
    )


_TERMS = {
    "constant": "loss before the step",
    "linear": "linear term",
    "quadratic": "quadratic term",
    "cubic": "cubic term",
    "remainder": "remainder",
    "actual": "loss after the step",
}


def expansion(named: Named) -> Account:
    """The terms of the Taylor expansion along one step."""
    one: taylor.TaylorExpansion = named[0][1]
    rows = [[words, float(one[key])] for key, words in _TERMS.items()]
    return account(
        "taylor",
        "What is a step made of?",
        f"A step of length {number(one.displacement_norm)} changes the loss by "
        f"{number(one.actual - one.constant)}; its quadratic model says "
        f"{number(one.linear + one.quadratic)}.",
        short="Taylor",
        whole=table("Terms", ["term", "loss"], rows),
        picture=drawn(one, "Terms of the expansion", "The terms and the true change."),
    )


def convergence(named: Named) -> Account:
    """How the loss and its Hessian settle as samples are added."""
    one: settling.LandscapeConvergence = named[0][1]
    fit, noise = one.difference.fit, not one.against_null["p_value"] <= 0.01
    curves = {
        "loss": one.difference,
        "loss, noise alone": one.null,
        "Hessian": one.hessian,
        "Hessian, noise alone": one.hessian_null,
    }
    rows = [[name, law_words(curve.fit)] for name, curve in curves.items() if curve is not None]
    law = told(None) if fit is None else told(fit.exponent, fit.interval, "exponent in k")
    cards = [card("Change of the loss by one more sample", law, note=one.verdict)]
    if one.stable_loss.value is not None:
        settled = Reading("samples", f"{one.stable_loss.value:,.0f}")
        note = f"on, to {number(one.stable_loss.tolerance)}"
        cards.append(card("The loss is settled from", settled, note=note))
    way = "as" if noise else "otherwise than"
    doubt = ": no evidence about curvature" if noise else ""
    return account(
        "convergence",
        "How does it settle with samples?",
        f"{one.stable_loss}.",
        short="Samples",
        whole=table("Exponents in the number of samples k", ["change of", "exponent"], rows),
        picture=drawn(one, "One more sample", "Change of loss and Hessian against samples."),
        verdict=Verdict(
            "unsure" if noise else "act",
            f"One more sample changes the loss {way} averaging alone does{doubt}.",
            f"{capitalised(one.verdict)}.",
        ),
        cards=cards,
    )


_RETRAINED = ("retrained", "control", "followed", "fixed", "noise")


def retrained(named: Named) -> Account:
    """The minimum, trained again for every number of samples."""
    one: retraining.RetrainedConvergence = named[0][1]
    rows = []
    for cell in one.cells:
        laws = [cell.curves[key].fit if key in cell.curves else None for key in _RETRAINED]
        said = [law_words(law) for law in (*laws, cell.gap.fit)]
        rows.append([f"{cell.optimizer}, {cell.schedule}", *said, percent(cell.converged)])
    verdicts = [cell.verdict for cell in one.cells] or ["no cell reached a minimum"]
    head = ["optimizer, schedule", *_RETRAINED, "gap", "at a minimum"]
    return account(
        "retrained",
        "And when it is trained again?",
        f"{one.orders} random orders of {one.samples} samples, trained for "
        f"{listed([str(k) for k in one.sizes])} of them.",
        short="Retrained",
        whole=table("Exponents in k [95 %]", head, rows),
        picture=drawn(one, "The minimum, trained again", "Change of the minimum with samples."),
        verdict=Verdict(
            "unsure",
            f"{capitalised(verdicts[0])}.",
            "Where retrained minima lie on the control, training again decides, not the sample.",
        ),
    )


# --- experiments of the papers --------------------------------------------------------------------


def growth(named: Named) -> Account:
    """Exponents of the norms of every role's block, as weights are scaled."""
    one: scales.Growth = named[0][1]
    shown = [name for name in one.names if not name.endswith("bias")]
    rows = [[name, *(law_words(one.laws[part][name], "0") for part in PARTS)] for name in shown]
    laws = [(name, law) for name in shown if (law := one.laws["total"][name]) is not None]
    laws.sort(key=lambda item: -abs(item[1].exponent))
    says = "No block of H follows a power law of the scale."
    if laws:
        name, law = laws[0]
        says = f"Scaling {one.scaled} moves {name} the most: its norm goes like scale to the "
        says += f"{number(law.exponent)}."
    window = f"{number(one.window[0])} to {number(one.window[1])}"
    return account(
        "growth",
        "How does curvature grow with the scale?",
        f"{len(rows)} blocks, {one.scaled} scaled {number(one.scales[0])} to "
        f"{number(one.scales[-1])} times; 0 is a block that is zero throughout.",
        short="Growth",
        whole=table("Exponents [95 %]", ["block", *PARTS.values()], rows),
        picture=drawn(one, "Norms along the scale", f"Norm of the blocks as {one.scaled} grows."),
        verdict=Verdict("unsure", says, f"Fitted for scales from {window}."),
        cards=[
            card(name, told(law.exponent, law.interval, "exponent of ‖H‖"))
            for name, law in laws[:4]
        ],
    )


def sinks(named: Named) -> Account:
    """The spectrum as attention is drawn to the first token."""
    one: attention_sinks.Sinks = named[0][1]
    first, last = one.levels[0], one.levels[-1]
    rows = [
        [
            number(level.bias),
            percent(float(level.mass.mean())),
            number(level.loss, 4),
            with_interval(level.largest, level.largest_interval),
            with_interval(level.bulk, level.bulk_interval),
            with_interval(level.ratio, level.ratio_interval),
        ]
        for level in one.levels
    ]
    head = ["bias", "mass on the first token", "loss", "λmax", "bulk", "λmax / bulk"]
    ways = {"rises": "The sink sharpens the spectrum", "falls": "The sink flattens the spectrum"}
    way = ways.get(one.verdict, "The sink moves the spectrum both ways")
    ends = f"λmax over the bulk goes from {number(first.ratio)} to {number(last.ratio)}"
    names = [f"bias {number(level.bias)}" for level in (first, last)]
    masses = [
        Reading(name, percent(float(level.mass.mean())))
        for name, level in zip(names, (first, last), strict=True)
    ]
    spectrum = [
        told(level.ratio, level.ratio_interval, name)
        for name, level in zip(names, (first, last), strict=True)
    ]
    return account(
        "sinks",
        "What does a sink do to the spectrum?",
        f"{ends} as the bias grows to {number(last.bias)}.",
        short="Sink",
        whole=table("The spectrum along the sink", head, rows),
        folds=_head_folds(one),
        picture=drawn(one, "Along the sink", "λmax over the bulk, and norms, along the sink."),
        verdict=Verdict(
            "unsure",
            f"{way}: {ends}.",
            f"Over {len(one.levels)} strengths of the sink; uniform attention would put "
            f"{percent(one.uniform)} on the first token.",
        ),
        cards=[
            card("λmax over the bulk", *spectrum, ratio=ratio(first.ratio, last.ratio)),
            card("Mass on the first token", *masses),
        ],
    )


def _head_folds(one: attention_sinks.Sinks) -> list[Fold]:
    roles = list(dict.fromkeys(role for head in one.heads for role in head.norms))
    rows = [
        [
            f"layer {h.layer}, head {h.head}",
            number(h.mass),
            *(number(h.norms[r]["total"]) if r in h.norms else None for r in roles),
        ]
        for h in one.heads[:60]
    ]
    heads = table("", ["head", "sink mass", *(f"‖H‖ of its {r}" for r in roles)], rows)
    said = [
        f"Rank correlation of mass and norm, {role}, {PARTS.get(part, part)}: {value}"
        for role, parts in one.correlations.items()
        for part, value in parts.items()
    ]
    return folded("Every head of the model", heads, text=said)


def sink_study(named: Named) -> Account:
    """Sinks over seeds: the claim and its verdict."""
    one: attention_sinks.SinkStudy = named[0][1]
    rows = [
        [f"seed {seed}", " → ".join(number(r) for r in run.ratios), run.verdict]
        for seed, run in zip(one.seeds, one.runs, strict=True)
    ]
    return account(
        "sinks",
        "Is it so for every seed?",
        f"{one.claim.statement}: {one.claim.verdict}.",
        short="Seeds",
        whole=table("λmax over the bulk", ["", "along the sink", "it"], rows),
        picture=drawn(one, "Every seed", "λmax over the bulk along the sink, a line a seed."),
        verdict=_claim_verdict([one.claim]),
        cards=_claim_cards([one.claim]),
    )


def _claim_table(claims: Sequence[Claim]) -> Table | None:
    rows = [
        [c.statement, c.verdict, with_interval(c.value.mean, c.value.interval), c.source]
        for c in claims
    ]
    return table("Claims", ["claim", "verdict", "measured", "source"], rows)


def _claim_verdict(claims: Sequence[Claim]) -> Verdict:
    first, *others = claims
    return Verdict(
        "good" if {c.verdict for c in claims} == {"holds"} else "unsure",
        f"{first.statement}: {first.verdict}.",
        f"{capitalised(first.figure)}: {with_interval(first.value.mean, first.value.interval)}.",
        tuple(f"{c.statement}: {c.verdict}." for c in others[:2]),
    )


def _claim_cards(claims: Sequence[Claim]) -> list[Card]:
    return [
        card(c.figure, told(c.value.mean, c.value.interval), note=f"{c.statement}: {c.verdict}")
        for c in claims[:4]
    ]


def claims(named: Named) -> Account:
    """Claims of the papers, tested over seeds."""
    report: ClaimReport = named[0][1]
    return account(
        "claims",
        "Which claims hold?",
        f"On {report.dataset}, over {report.seeds} seeds.",
        short="Claims",
        whole=_claim_table(report.claims),
        verdict=_claim_verdict(report.claims),
        cards=_claim_cards(report.claims),
    )


def quality(named: Named) -> Account:
    """What Gauss-Newton and its approximations miss."""
    one: gauss_newton.GaussNewtonQuality = named[0][1]
    missed = one.functional_share["model"]
    rows = []
    for name, p in one.approximations.items():
        pairs = [p.to_hessian, p.to_outer]
        cells = ["–" if d is None else with_interval(d.value, d.interval) for d in pairs]
        for which in ("hessian", "outer"):
            value, bound = p[f"condition_{which}"], p[f"condition_{which}_is_bound"]
            exact = with_interval(value, p[f"condition_{which}_interval"])
            cells.append(f"≥ {number(value)}" if bound and value is not None else exact)
        rows.append([name.replace("_", " "), *cells])
    shares = one.functional_share.items()
    roles = [[role, with_interval(d.value, d.interval)] for role, d in shares if role != "model"]
    near = one.ratio >= 0.9 and missed.value <= 0.35
    head = ["stands in for H", "distance to H", "distance to H_o", "κ of P⁻¹|H|", "κ of P⁻¹H_o"]
    sees, lacks = percent(one.ratio), percent(missed.value)
    return account(
        "gauss-newton",
        "What can stand in for the Hessian?",
        f"Distances relative to the norm, with damping {number(one.damping)}.",
        short="Stand-ins",
        whole=table("Stand-ins", head, rows),
        folds=folded("What it leaves out, by role", table("", ["role", "‖H_f‖ / ‖H‖"], roles)),
        picture=drawn(
            one, "What stands in for the Hessian", "Shares of H_f, distances, conditions."
        ),
        verdict=Verdict(
            "good" if near else "unsure",
            "Gauss-Newton stands in well for the Hessian here."
            if near
            else "Gauss-Newton leaves out a part of the Hessian that matters.",
            f"It holds {sees} of λmax and misses {lacks} of ‖H‖.",
        ),
        cards=[
            card("Of λmax, Gauss-Newton holds", Reading("λmax(H_o) / λmax(H)", sees)),
            card("Of ‖H‖, it leaves out", told(missed.value, missed.interval, "‖H_f‖ / ‖H‖")),
        ],
    )


def comparison(named: Named) -> Account:
    """A Transformer beside an MLP of equal size."""
    one: gauss_newton.GaussNewtonComparison = named[0][1]
    quantities = dict.fromkeys(q for row in one.rows.values() for q in row)
    rows = [
        [q, *(with_interval(row[q].mean, row[q].interval) for row in one.rows.values())]
        for q in quantities
    ]
    return account(
        "gauss-newton",
        "Is it worse than for an MLP?",
        f"Over {len(one.seeds)} seeds, models of equal size.",
        short="Models",
        whole=table("Means over seeds [95 %]", ["", *one.rows], rows),
        folds=folded("The claims", _claim_table(one.claims)),
        verdict=_claim_verdict(one.claims),
        cards=_claim_cards(one.claims),
    )


# --- flatness -------------------------------------------------------------------------------------

_MEASURES = {
    "sharpness": "λmax of H",
    "trace": "tr H",
    "effective_rank": "effective rank of H",
    "sam": "SAM sharpness",
    "asam": "ASAM sharpness",
    "fisher_rao": "Fisher–Rao norm",
    "relative_flatness": "relative flatness, all layers",
    "pac_bayes_isotropic": "PAC-Bayes bound, isotropic noise",
    "pac_bayes_diagonal": "PAC-Bayes bound, diagonal noise",
    "log_volume": "log-volume",
}


def flatness(named: Named) -> Account | None:
    """Measures of flatness at one point, bounds beside losses."""
    here = [one for name, one in named if not name.startswith("rescaled")]
    if not here:
        return None
    one: flat.Flatness = here[0]
    rows = [
        [_MEASURES.get(name, name), with_interval(value, one.intervals.get(name))]
        for name, value in one.measures.items()
        if not math.isnan(value)
    ]
    if one.test_loss is not None:
        gap = number(one.test_loss - one.loss)
        rows.append(["generalisation gap: test loss − training loss", gap])
    certified = "a certified local maximum" if one.sam.certified else "not certified as a maximum"
    radius, rise = number(one.sam.radius), number(one.sam.value)
    agreeing = f"{certified}; {one.sam.agreeing} of {one.sam.starts} starts agree"
    because = f"{capitalised(certified)}."
    cards = [
        card("Sharpest direction, λmax", told(one.sharpness, one.sharpness_interval)),
        card(f"Rise within {radius} (SAM)", told(one.sam.value), note=agreeing),
    ]
    bounds = [b for b in (one.isotropic, one.diagonal) if b is not None]
    if bounds:
        best = min(bounds, key=lambda b: b.value)
        on_test = "" if best.test_loss is None else f", {number(best.test_loss)} on test samples"
        because += (
            f" With {best.posterior} noise on the weights the loss on new samples is below "
            f"{number(best.value)} ({percent(best.confidence)}); it is {number(best.loss)} on the "
            f"training samples{on_test}{' (the bound is vacuous)' if best.vacuous else ''}."
        )
        note = f"PAC-Bayes, {best.posterior} noise, {percent(best.confidence)}"
        cards.append(card("Loss on new samples, at most", told(best.value), note=note))
    return account(
        "flatness",
        "How flat is it?",
        f"{one.parameters:,} parameters on {one.samples:,} samples, loss {number(one.loss, 4)}.",
        short="Flatness",
        whole=table("Measures of flatness", ["measure", "value"], rows),
        folds=_layer_folds(one),
        picture=drawn(one, "Flatness", "Sharpness by radius, flatness by layer, bounds."),
        verdict=Verdict(
            "unsure", f"Within a distance of {radius} the loss rises by {rise}.", because
        ),
        cards=cards,
    )


def _layer_folds(one: flat.Flatness) -> list[Fold]:
    relative = one.relative_flatness
    if relative is None:
        return []
    names = sorted(relative.values, key=lambda name: -abs(relative.values[name]))[:60]
    rows = [[n, with_interval(relative.values[n], relative.intervals.get(n))] for n in names]
    return folded("Relative flatness by layer", table("", ["layer", "κ"], rows))


def invariance(named: Named) -> Account:
    """Which measures survive rescalings that leave the function as it is."""
    one: flat.Invariance = named[0][1]
    rows = []
    for measure, verdicts in one.verdicts.items():
        pairs = zip(one.change(measure), verdicts, strict=True)
        cells = ["same" if v == "invariant" else f"{number(c)} ({v})" for c, v in pairs]
        rows.append([_MEASURES.get(measure, measure.replace("_", " ")), *cells])
    steady = [row[0] for row in rows if set(row[1:]) == {"same"}]
    return account(
        "invariance",
        "Which measures survive a rescaling?",
        f"{capitalised(listed(steady))} stay the same."
        if steady
        else "None: every measure changes with some rescaling.",
        short="Rescalings",
        whole=table("Relative change", ["measure", *one.rescalings], rows),
        folds=folded("Not tried", text=one.refused),
        picture=drawn(one, "Relative change", "Change of each measure by rescaling."),
    )


def generalisation(named: Named) -> Account:
    """Which measures order models as their gaps do."""
    one: general.Generalisation = named[0][1]
    ranked = sorted(one.correlations, key=lambda c: -abs(c.value))
    clear = [c for c in ranked if c.interval[0] > 0 or c.interval[1] < 0]
    rows = [
        [c.measure, with_interval(c.value, c.interval), with_interval(0.0, c.control), c.p_value]
        for c in ranked
    ]
    says = (
        f"{capitalised(clear[0].measure)} orders the models best: τ = {number(clear[0].value)}."
        if clear
        else "No measure of flatness orders these models as their gaps do."
    )
    return account(
        "measures",
        "Which measures tell the gap?",
        f"{listed([c.measure for c in clear])} do." if clear else "None does.",
        short="Measures",
        whole=table("Kendall's τ [95 %]", ["measure", "τ", "gaps shuffled", "p"], rows),
        folds=[*_model_folds(one.models), *folded("Left out", text=one.left_out)],
        picture=drawn(one, "τ of every measure", "Kendall's τ of each measure with the gap."),
        verdict=Verdict(
            "unsure",
            says,
            f"{len(clear)} of {len(ranked)} measures are told from chance over {len(one.models)} "
            f"models trained on {one.dataset}.",
        ),
        cards=[card(c.measure, told(c.value, c.interval, "Kendall's τ")) for c in ranked[:4]],
    )


def _model_folds(models: Sequence[general.StudiedModel]) -> list[Fold]:
    ends = ("train_loss", "test_loss", "train_error", "test_error")
    names = list(models[0].options) if models else []
    rows = [
        [f"model {i}", *(m.options.get(n) for n in names), *(float(m[end]) for end in ends)]
        for i, m in enumerate(models, 1)
    ]
    head = ["", *(word.replace("_", " ") for word in (*names, *ends))]
    return folded(f"The {len(models)} models", table("", head, rows))


def studied(named: Named) -> Account:
    """Models of a study that is not finished."""
    models = [one for _, one in named]
    answer = f"{len(models)} models so far."
    folds = _model_folds(models)
    return account("models", "Which models were trained?", answer, short="Models", folds=folds)


# --- scaling --------------------------------------------------------------------------------------


def scaling(named: Named) -> Account:
    """Laws of loss and curvature over sizes of model and data."""
    one: ScalingGrid = named[0][1]
    rows = [
        [f"{name}: {key}", with_interval(value, fit.get(f"{key}_interval"))]
        for name, fit in one.fits.items()
        for key, value in fit.items()
        if not key.endswith("_interval")
    ]
    law, cards = one.law, []
    if law is not None:
        by_size = told(law.alpha, law.alpha_interval, "N to the −α")
        by_data = told(law.beta, law.beta_interval, "D to the −β")
        cards.append(card("Loss falls with parameters and data", by_size, by_data))
    for name, plane in list(one.planes.items())[:3]:
        by_size = told(plane.by_parameters, plane.parameters_interval, "exponent in N")
        by_data = told(plane.by_samples, plane.samples_interval, "exponent in D")
        cards.append(card(capitalised(name.replace("_", " ")), by_size, by_data))
    said = [str(phases) for phases in one.phases.values()]
    said += [str(one.descent)] if one.descent is not None else []
    fits = "A law of loss in parameters and data fits these runs."
    bends = f" {capitalised(said[0])}." if said else ""
    return account(
        "laws",
        "Which laws fit?",
        f"{len(one.fits)} laws over {len(one.trained)} runs.",
        short="Laws",
        whole=table("Exponents [95 %]", ["law", "value"], rows),
        folds=[
            *folded("Phases of training, and double descent", text=said),
            *folded("Left out", text=one.notes),
            *folded("Every run", rows_of(one)),
        ],
        picture=drawn(one, "Runs and laws", "Every quantity against data, with its law."),
        verdict=Verdict(
            "unsure",
            fits if law is not None else "Too few sizes for a law of the loss.",
            f"{len(one.trained)} of {len(one.cells)} runs count.{bends}",
        ),
        cards=cards,
    )


def prediction(named: Named) -> Account:
    """Whether curvature predicts the loss of held-out runs better."""
    one: PredictionComparison = named[0][1]
    best = min(one.errors, key=lambda name: one.errors[name])
    rows = [[name, with_interval(e, one.intervals.get(name))] for name, e in one.errors.items()]
    return account(
        "prediction",
        "Does curvature help to predict the loss?",
        f"The smallest error ({one.held_out}) is that by {best}.",
        short="Prediction",
        whole=table("Relative error of the predicted loss", ["by", "error"], rows),
    )


# --- pruning and rounding -------------------------------------------------------------------------

_RISE = ("predicted rise", "measured rise", "quadratic model")


def _rise(one: pruned.ChangedWeights) -> list[str]:
    held = "holds" if one.in_quadratic_range else "outside its range"
    predicted = with_interval(one.predicted_rise, one.predicted_interval)
    return [predicted, number(one.loss_after - one.loss_before), held]


def pruning(named: Named) -> Account:
    """Prunings side by side."""
    prunings: list[pruned.Pruning] = [one for _, one in named]
    best = min(prunings, key=lambda one: one.loss_after)
    rows = [
        [f"{one.method}, layers by {one.layers}", percent(one.sparsity), *_rise(one)]
        for one in prunings
    ]
    told_by = {
        True: "That is what the derivatives at the weights predict.",
        False: "It is outside the quadratic range: derivatives at the weights do not tell it.",
    }
    cards = [
        card(
            f"Loss without {percent(one.sparsity)}, {one.method}",
            told(one.loss_before, stage="before"),
            told(one.loss_after, stage="after"),
            ratio=ratio(one.loss_before, one.loss_after),
            note=told_by[one.in_quadratic_range],
        )
        for one in prunings[:4]
    ]
    parts = [[name, percent(value)] for name, value in best.part_sparsity.items()]
    return account(
        "pruning",
        "What does removing weights cost?",
        f"{len(prunings)} way{'s' if len(prunings) > 1 else ''} tried, on the same samples.",
        short="Pruning",
        whole=table("Rise of the loss", ["weights chosen by", "removed", *_RISE], rows),
        folds=folded("What every part loses", table("", ["part", "removed"], parts)),
        picture=drawn(
            best, "On the way to the pruned weights", "Loss on the way; what parts lose."
        ),
        verdict=Verdict(
            "good" if best.in_quadratic_range else "unsure",
            f"Remove {percent(best.sparsity)} of the weights by {best.method}: the loss goes from "
            f"{number(best.loss_before, 4)} to {number(best.loss_after, 4)}.",
            told_by[best.in_quadratic_range],
        ),
        cards=cards,
    )


def rounding(named: Named) -> Account:
    """Roundings by groups, nearest and by curvature."""
    one: compression.QuantizationTable = named[0][1]
    rows = [[row.name, number(row.bits_per_weight), *_rise(row)] for row in one.rows]
    best = min(one.rows, key=lambda row: row.loss_after)
    return account(
        "rounding",
        "What does rounding cost?",
        f"{one.weights:,} weights; the loss before is {number(one.loss, 4)}.",
        short="Rounding",
        whole=table("Rounding all weights", ["rounded to", "bits a weight", *_RISE], rows),
        picture=drawn(one, "Rounding by groups", "Measured and predicted rise by bits."),
        verdict=Verdict(
            "good" if best.in_quadratic_range else "unsure",
            f"{capitalised(best.name)} costs least: the loss changes by {number(best.rise)}.",
            f"At {number(best.bits_per_weight)} bits a weight, scales included.",
        ),
        cards=[
            card(
                row.name,
                told(row.rise, stage="rise of the loss"),
                note=f"{number(row.bits_per_weight)} bits a weight",
            )
            for row in one.rows[:4]
        ],
    )


def _part_table(caption: str, rows: Sequence[compression.PartCost]) -> Table | None:
    cells = [
        [r.name, r.bits, r.weights, percent(r.changed), number(r.predicted), number(r.measured)]
        for r in rows
    ]
    return table(caption, ["part", "bits", "weights", "changed", "predicted", "measured"], cells)


def costs(named: Named) -> Account:
    """What changing every part alone costs."""
    sections: list[Section] = []
    for index, (_, one) in enumerate(named):
        cost: compression.CostTable = one
        dearest = max(cost.rows, key=lambda row: row.measured)
        rise = f"{capitalised(dearest.name)}: the loss changes by {number(dearest.measured)}."
        together = f" All at once: {number(cost.measured)}." if cost.measured is not None else ""
        whole = _part_table(f"Every {cost.by} alone: change of the loss", cost.rows)
        question = f"{capitalised(cost.what)}: which {cost.by} costs most?"
        made = account(
            f"costs{index}", question, rise + together, short=f"By {cost.by}", whole=whole
        )
        sections += made.sections
    return Account(sections=tuple(sections))


def bits(named: Named) -> Account:
    """Bits given out by curvature, beside as many everywhere."""
    one: compression.BitAllocation = named[0][1]
    used, alike = number(one.used), f"{one.uniform_bits} bits everywhere"
    readings = told(one.measured, stage="by curvature"), told(one.uniform_measured, stage=alike)
    note = f"{one.weights:,} weights, {used} bits each on average"
    return account(
        "bits",
        "Which part gets how many bits?",
        f"{used} bits each, at most {number(one.average)}.",
        short="Bits",
        whole=_part_table("Bits of every part", one.rows),
        verdict=Verdict(
            "good" if one.measured < one.uniform_measured else "unsure",
            f"Give out {used} bits a weight by curvature: the loss changes by "
            f"{number(one.measured)}.",
            f"With {alike} it changes by {number(one.uniform_measured)}.",
        ),
        cards=[card("Change of the loss", *readings, note=note)],
    )


# --- statements -----------------------------------------------------------------------------------


def verification(named: Named) -> Account:
    """Statements of the papers, tested on this machine."""
    found: list[Verification] = [one for _, one in named]
    entries: list[Mapping[str, Any]] = [entry for one in found for entry in one.entries]
    counts: dict[str, int] = {}
    for entry in entries:
        counts[str(entry["verdict"])] = counts.get(str(entry["verdict"]), 0) + 1
    differ = [str(e["name"]) for e in entries if e["verdict"] != e["recorded"]]
    rows = [[str(e[key]) for key in ("title", "verdict", "figure", "source")] for e in entries]
    formulas = [[str(e["name"]), str(e["formula"])] for e in entries]
    summary = listed([f"{count} {verdict}" for verdict, count in counts.items()])
    seconds = sum(one.seconds for one in found)
    return account(
        "verdicts",
        "Theorems and claims: which hold?",
        f"{len(entries)} statements tested in {seconds:.0f} s: {summary}.",
        short="Statements",
        whole=table("Statements", ["statement", "verdict", "measured", "source"], rows),
        folds=folded("The formulas", table("", ["name", "formula"], formulas)),
        verdict=Verdict(
            "act" if differ else "good",
            f"{len(differ)} statements came out otherwise than recorded: {listed(differ)}."
            if differ
            else f"All {len(entries)} statements came out as recorded.",
            f"{capitalised(summary)}.",
        ),
        cards=[
            card(capitalised(verdict), Reading("statements", str(count)))
            for verdict, count in list(counts.items())[:4]
        ],
    )


def reproductions(named: Named) -> Account:
    """Figures and claims of the papers: the paper's numbers beside ours, a section each."""
    found: list[Reproduction] = [one for _, one in named]
    made: list[Section] = []
    for one in found:
        head = ["number", "where", "here", "paper", "verdict"]
        rows = [[f.what, f.where or "–", f.ours, f.paper, f.verdict] for f in one.findings]
        text = [*(f"Smaller than the paper: {line}." for line in one.smaller), *one.notes]
        made += account(
            one.id,
            one.shows,
            f"{capitalised(one.verdict)}. The paper ({one.source}): {one.claim}",
            short=one.id,
            whole=table(one.setting, head, rows),
            folds=folded("What was made smaller, and what to know", text=text),
        ).sections
        if one.panels:
            made[-1] = replace(made[-1], picture=drawn(one, one.id, one.shows, one.setting))
    counts: dict[str, int] = {}
    for one in found:
        word = "true only in part" if one.verdict.startswith("true only") else one.verdict
        counts[word] = counts.get(word, 0) + 1
    summary = listed([f"{count} {verdict}" for verdict, count in counts.items()])
    one = found[0]
    return Account(
        verdict=Verdict(
            "good" if set(counts) == {"confirmed"} else "unsure",
            f"{one.id}: {one.verdict}." if len(found) == 1 else f"{len(found)} made again.",
            one.claim if len(found) == 1 else f"{capitalised(summary)}.",
        ),
        cards=tuple(
            card(f.what, Reading("here", f.ours), Reading("paper", f.paper), note=f.verdict)
            for f in (one.findings if len(found) == 1 else ())
        ),
        sections=tuple(made),
    )


ACCOUNTS: dict[str, Callable[[Any], Account | None]] = {
    "CurvatureHistory": history,
    "EarlyBlocks": early_blocks,
    "CriticalLearningRate": critical_rate,
    "TrustRadius": trust_radius,
    "PredictedTrajectory": trajectory,
    "TaylorExpansion": expansion,
    "LandscapeConvergence": convergence,
    "RetrainedConvergence": retrained,
    "Growth": growth,
    "SinkStudy": sink_study,
    "Sinks": sinks,
    "GaussNewtonComparison": comparison,
    "GaussNewtonQuality": quality,
    "Flatness": flatness,
    "Invariance": invariance,
    "Generalisation": generalisation,
    "StudiedModel": studied,
    "ScalingGrid": scaling,
    "PredictionComparison": prediction,
    "Pruning": pruning,
    "QuantizationTable": rounding,
    "CostTable": costs,
    "BitAllocation": bits,
    "Verification": verification,
    "ClaimReport": claims,
    "Reproduction": reproductions,
}
_PARTS_OF = {  # kinds that are parts of another: told there when it is in the run
    "Sinks": "SinkStudy",
    "GaussNewtonQuality": "GaussNewtonComparison",
    "StudiedModel": "Generalisation",
}


def accounts(results: Mapping[str, Result]) -> list[Callable[[], Account | None]]:
    """One maker an account, for every kind that the run has results of."""
    by_kind: dict[str, Named] = {}
    for name, result in results.items():
        by_kind.setdefault(result.kind, []).append((name, result))
    return [
        partial(make, by_kind[kind])
        for kind, make in ACCOUNTS.items()
        if kind in by_kind and _PARTS_OF.get(kind) not in by_kind
    ]
