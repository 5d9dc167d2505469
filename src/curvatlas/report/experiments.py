"""What every other kind of run has to say: a verdict, cards, and a section of its own.

A section shows what every result has: the words it prints, its one picture, its one table. Kinds
that say more are told by a function, registered by the kind's name: results of studies are made in
rooms that come after this one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from curvatlas.display import drawing_of
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
    from curvatlas.scaling import ScalingGrid
    from curvatlas.studies import gauss_newton, generalisation as general, sinks as attention_sinks
    from curvatlas.studies.claims import Claim, ClaimReport
    from curvatlas.studies.growth import Growth
    from curvatlas.studies.papers.reproduction import Reproduction
    from curvatlas.theory.statements import Verification
    from curvatlas.training import compression, pruning as pruned, snapshot

_CARDS = 4  # of one result

# kind → key and question of its section, in the order of the page
SECTIONS = {
    "CurvatureHistory": ("steps", "How did it go?"),
    "EarlyBlocks": ("early-curvature", "Does early curvature tell what moves?"),
    "CriticalLearningRate": ("edge", "Where does gradient descent fail?"),
    "TrustRadius": ("radius", "How far does the Taylor polynomial hold?"),
    "PredictedTrajectory": ("forecast", "How long does the quadratic model hold?"),
    "TaylorExpansion": ("taylor", "What is a step made of?"),
    "LandscapeConvergence": ("samples", "How does it settle with samples?"),
    "RetrainedConvergence": ("retrained", "And when it is trained again?"),
    "Growth": ("growth", "How does curvature grow with the scale?"),
    "SinkStudy": ("sinks", "Is it so for every seed?"),
    "Sinks": ("sinks", "What does a sink do to the spectrum?"),
    "GaussNewtonComparison": ("gauss-newton", "Is Gauss-Newton worse than for an MLP?"),
    "GaussNewtonQuality": ("gauss-newton", "What can stand in for the Hessian?"),
    "Flatness": ("flatness", "How flat is it?"),
    "Invariance": ("rescalings", "Which measures survive a rescaling?"),
    "Generalisation": ("measures", "Which measures tell the gap?"),
    "ScalingGrid": ("laws", "Which laws fit?"),
    "PredictionComparison": ("prediction", "Does curvature help to predict the loss?"),
    "Pruning": ("pruning", "What does removing weights cost?"),
    "QuantizationTable": ("rounding", "What does rounding cost?"),
    "CostTable": ("parts", "Which part costs most?"),
    "BitAllocation": ("bits", "Which part gets how many bits?"),
    "Verification": ("statements", "Theorems and claims: which hold?"),
    "ClaimReport": ("claims", "Which claims hold?"),
    "Reproduction": ("papers", "Do the papers' numbers come out again?"),
}
_PART_OF = {  # kinds that another one tells of where it is in the run
    "Sinks": "SinkStudy",
    "GaussNewtonQuality": "GaussNewtonComparison",
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a kind says beside its own words, picture and table."""

    verdict: Verdict | None = None
    cards: Sequence[Card] = ()
    question: str = ""  # instead of its kind's
    answer: str = ""  # instead of the first line that it prints
    rows: Table | None = None  # instead of its own table
    folds: Sequence[Fold] = ()


_TOLD: dict[str, Callable[[Any], Told]] = {}
_TOGETHER: set[str] = set()  # kinds of which all results of a run are told at once


def tells(kind: str, *, together: bool = False) -> Callable[[Any], Any]:
    """The function tells what a result of this kind says, or all of them together."""

    def registered(function: Callable[[Any], Told]) -> Any:
        _TOLD[kind] = function
        _TOGETHER.update([kind] if together else [])
        return function

    return registered


def accounts(results: Mapping[str, Result]) -> list[Callable[[], Account | None]]:
    """One maker an account, for every kind that the run has results of."""
    by_kind: dict[str, list[Result]] = {}
    for name, result in results.items():
        if not name.startswith("rescaled"):  # copies of a model that its invariance tells of
            by_kind.setdefault(result.kind, []).append(result)
    kinds = [k for k in SECTIONS if k in by_kind and _PART_OF.get(k) not in by_kind]
    spoken = sorted(kinds, key=lambda kind: kind not in _TOLD)  # whose verdict comes first
    films = [partial(film, training) for training in by_kind.get("CurvatureHistory", [])]
    return [*(partial(_account, kind, by_kind[kind]) for kind in spoken), *films]


def _account(kind: str, results: Sequence[Result]) -> Account:
    key, question = SECTIONS[kind]
    makes = _TOLD.get(kind, lambda _: Told())
    together = kind in _TOGETHER
    told = [makes(results)] if together else [makes(result) for result in results]
    pictured = drawing_of(type(results[0])) is not None
    sections = []
    for place, (one, result) in enumerate(zip(told, results, strict=False)):
        shown, rest = cut(one.rows or rows_of(result))
        answer = one.answer or f"{capitalised(str(result).partition(chr(10))[0])}."
        section = Section(
            key=f"{key}-{place}" if place else key,
            question=one.question or question,
            answer=answer,
            picture=picture_of(result) if place and pictured else None,  # the first one's: above
            table=shown,
            folds=(*rest, *one.folds),
        )
        sections.append(section)
    verdicts = [one.verdict for one in told if one.verdict is not None]
    others = tuple(one.says for one in verdicts[1:_CARDS])
    return Account(
        verdict=replace(verdicts[0], more=verdicts[0].more or others) if verdicts else None,
        cards=tuple(told[0].cards[:_CARDS]),
        pictures=(picture_of(results[0]),) if pictured else (),
        sections=tuple(sections),
    )


def picture_of(result: Result) -> Picture:
    """The one picture of a result, in the words of its drawing function."""
    said = (inspect.getdoc(drawing_of(type(result))) or result.kind).partition("\n\n")[0]
    words = " ".join(said.split()).rstrip(".")
    return Picture(title=words, alt=words, draw=result.plot)


def reading(value: float | None, interval: Interval | None = None, stage: str = "") -> Reading:
    """A number of a card."""
    return Reading(stage, "–" if value is None else number(value), brackets(interval))


def card(title: str, *readings: Reading, note: str = "", ratio: str = "") -> Card:
    return Card(title, readings, ratio=ratio, note=note)


def between(title: str, ends: Mapping[str, Any], name: str) -> Card:
    """A number at the first and the last of several stages, and their ratio."""
    values = [float(getattr(one, name)) for one in ends.values()]
    within = [getattr(one, f"{name}_interval", None) for one in ends.values()]
    readings = map(reading, values, within, ends)
    return card(title, *readings, ratio=ratio(values[0], values[-1]))


def law_words(law: Any) -> str:
    """The exponent of a fitted power law; 0 of a part that is zero."""
    return "0" if law is None else with_interval(law.exponent, law.interval)


# --- training -------------------------------------------------------------------------------------


@tells("CurvatureHistory")
def history(training: snapshot.CurvatureHistory) -> Told:
    """A monitored training: where loss, sharpness and the optimizer's edge went."""
    snapshots = training.snapshots
    first, last = snapshots[0], snapshots[-1]
    ends = {f"step {s.step}": s for s in (first, last)}
    cards = [between("Loss", ends, "loss"), between("Sharpest direction, λmax", ends, "sharpness")]
    if not sign_unknown(last.trace, last.trace_interval):
        cards.append(between("Total curvature, tr H", ends, "trace"))
    metric, _, reason = last.metric.partition(" (")
    ratios = [
        (s.edge_ratio, s.step)
        for s in snapshots
        if s.edge_ratio is not None and (s.step >= YOUNG or s.edge == s.sharpness)
    ]
    if ratios:
        nearest, step = max(ratios)
        own = "λmax" if metric == "plain" else f"λmax as {metric} sees it"
        note = f"{own}, over where this optimizer's own steps begin to grow"
        near = Reading(f"step {step}", percent(nearest))
        cards.insert(1, card("Nearest to the edge of stability", near, note=note))
    plain = (
        f" The edge is that of plain gradient descent: {reason.removesuffix(')')}."
        if metric == "plain" and reason
        else ""
    )
    events = [[e.step, "alarm" if e.alarm else "note", e.message] for e in training.events]
    happened = table("", ["step", "", "what"], events)
    columns = {"step": "step", "loss": "loss", "λmax": "sharpness", "λmin": "most_negative",
               "tr H": "trace", "λmax as the optimizer sees it": "edge"}  # fmt: skip
    return Told(
        verdict=_training_verdict([e for e in training.events if e.alarm], ratios),
        cards=cards,
        answer=f"{len(snapshots)} snapshots, {len(events)} events; measuring took "
        f"{percent(training.overhead)} of the time of training.{plain}",
        rows=rows_of(training, columns, caption="Snapshots"),
        folds=[Fold("Events", tables=(happened,))] if happened is not None else (),
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


def film(training: Any) -> Account | None:
    """The maps of a training, where there are two."""
    count = len(training.mapped)
    if count < 2:
        return None
    whole, *parts = (
        Picture(f"{symbol} over training", f"Maps of {symbol} over pairs of roles at {count} steps",
                partial(training.film, part=part))
        for part, symbol in PARTS.items()
    )  # fmt: skip
    section = Section(
        key="maps", question="Where did it move?", picture=whole,
        answer=f"The maps at {count} steps, on one scale of colours.",
        folds=(Fold("The maps of H_o and H_f", pictures=tuple(parts)),),
    )  # fmt: skip
    return Account(sections=(section,))


# --- the landscape --------------------------------------------------------------------------------


@tells("CriticalLearningRate")
def critical_rate(rate: taylor.CriticalLearningRate) -> Told:
    """Where plain gradient descent fails, tried on both sides."""
    tried = listed([number(r) for r in rate.ratios]) if rate.ratios else ""
    confirms = "confirms" if rate.confirmed else "does NOT confirm"
    because = f"Training at {tried} times this rate {confirms} it." if tried else ""
    says = f"Keep the rate of plain gradient descent below {number(rate.value)}."
    note = f"2/λmax with λmax = {number(rate.sharpness)}"
    return Told(
        verdict=Verdict("good" if rate.confirmed else "unsure", says, because),
        cards=[card("Critical learning rate", reading(rate.value, rate.interval), note=note)],
    )


@tells("TrustRadius")
def trust_radius(one: taylor.TrustRadius) -> Told:
    """How far along a direction the Taylor polynomial holds."""
    within = f"within {percent(one.accuracy)} of the change of the loss"
    note = f"{within}; seen to fail at {number(one.measured_radius)}"
    holds = Reading("length of a step", number(one.radius))
    return Told(cards=[card(f"Model of order {one.order} holds for", holds, note=note)])


@tells("PredictedTrajectory")
def trajectory(path: taylor.PredictedTrajectory) -> Told:
    """Gradient descent, predicted and real."""
    if path.horizon is None:
        return Told()
    last = len(path.losses) - 1
    beyond = " Beyond that the quadratic model is no forecast." if path.horizon < last else ""
    within = f"within {percent(path.tolerance)} of the change of the loss"
    steps = f"{path.horizon} of {last}"
    return Told(
        cards=[card("The quadratic model predicts", Reading("steps", steps), note=within)],
        answer=f"It predicts gradient descent {within} for {steps} steps.{beyond}",
    )


@tells("LandscapeConvergence")
def convergence(one: settling.LandscapeConvergence) -> Told:
    """How the loss and its Hessian settle as samples are added."""
    fit, noise = one.difference.fit, not one.against_null["p_value"] <= 0.01
    law = reading(None) if fit is None else reading(fit.exponent, fit.interval, "exponent in k")
    cards = [card("Change of the loss by one more sample", law, note=one.verdict)]
    if one.stable_loss.value is not None:
        settled = Reading("samples", f"{one.stable_loss.value:,.0f}")
        note = f"on, to {number(one.stable_loss.tolerance)}"
        cards.append(card("The loss is settled from", settled, note=note))
    way = "as" if noise else "otherwise than"
    doubt = ": no evidence about curvature" if noise else ""
    says = f"One more sample changes the loss {way} averaging alone does{doubt}."
    return Told(
        verdict=Verdict("unsure" if noise else "act", says, f"{capitalised(one.verdict)}."),
        cards=cards,
        answer=f"{one.stable_loss}.",
    )


# --- experiments of the papers --------------------------------------------------------------------


@tells("Growth")
def growth(one: Growth) -> Told:
    """Exponents of the norms of every role's block, as weights are scaled."""
    shown = [name for name in one.names if not name.endswith("bias")]
    rows = [[name, *(law_words(one.laws[part][name]) for part in PARTS)] for name in shown]
    laws = [(name, law) for name in shown if (law := one.laws["total"][name]) is not None]
    laws.sort(key=lambda item: -abs(item[1].exponent))
    says = "No block of H follows a power law of the scale."
    if laws:
        name, law = laws[0]
        says = f"Scaling {one.scaled} moves {name} the most: its norm goes like scale to the "
        says += f"{number(law.exponent)}."
    window = f"{number(one.window[0])} to {number(one.window[1])}"
    stage = "exponent of ‖H‖"
    return Told(
        verdict=Verdict("unsure", says, f"Fitted for scales from {window}."),
        cards=[card(n, reading(law.exponent, law.interval, stage)) for n, law in laws[:_CARDS]],
        rows=table("Exponents [95 %]", ["block", *PARTS.values()], rows),
    )


@tells("Sinks")
def sinks(one: attention_sinks.Sinks) -> Told:
    """The spectrum as attention is drawn to the first token."""
    ends = {f"bias {number(level.bias)}": level for level in (one.levels[0], one.levels[-1])}
    ways = {"rises": "The sink sharpens the spectrum", "falls": "The sink flattens the spectrum"}
    way = ways.get(one.verdict, "The sink moves the spectrum both ways")
    moved = f"λmax over the bulk goes from {number(one.ratios[0])} to {number(one.ratios[-1])}"
    masses = [Reading(name, percent(float(end.mass.mean()))) for name, end in ends.items()]
    return Told(
        verdict=Verdict("unsure", f"{way}: {moved}."),
        cards=[
            between("λmax over the bulk", ends, "ratio"),
            card("Mass on the first token", *masses),
        ],
        answer=f"Over {len(one.levels)} strengths of the sink; uniform attention would put "
        f"{percent(one.uniform)} on the first token.",
    )


@tells("SinkStudy")
def sink_study(one: attention_sinks.SinkStudy) -> Told:
    """Sinks over seeds: the claim and its verdict."""
    return _claimed([one.claim], answer=f"{one.claim.statement}: {one.claim.verdict}.")


@tells("GaussNewtonComparison")
def comparison(one: gauss_newton.GaussNewtonComparison) -> Told:
    """A Transformer beside an MLP of equal size."""
    quantities = dict.fromkeys(q for row in one.rows.values() for q in row)
    rows = [
        [q, *(with_interval(row[q].mean, row[q].interval) for row in one.rows.values())]
        for q in quantities
    ]
    return _claimed(
        one.claims,
        answer=f"Over {len(one.seeds)} seeds, models of equal size.",
        rows=table("Means over seeds [95 %]", ["", *one.rows], rows),
    )


@tells("ClaimReport")
def claims(report: ClaimReport) -> Told:
    """Claims of the papers, tested over seeds."""
    columns = {"claim": "statement", "verdict": "verdict", "measured": "value_mean",
               "source": "source"}  # fmt: skip
    return _claimed(report.claims, rows=rows_of(report, columns))


def _claimed(claims: Sequence[Claim], **told: Any) -> Told:
    first, *others = claims
    verdict = Verdict(
        "good" if {c.verdict for c in claims} == {"holds"} else "unsure",
        f"{first.statement}: {first.verdict}.",
        f"{capitalised(first.figure)}: {with_interval(first.value.mean, first.value.interval)}.",
        tuple(f"{c.statement}: {c.verdict}." for c in others[:2]),
    )
    cards = [
        card(c.figure, reading(c.value.mean, c.value.interval), note=f"{c.statement}: {c.verdict}")
        for c in claims
    ]
    return Told(verdict=verdict, cards=cards, **told)


@tells("GaussNewtonQuality")
def quality(one: gauss_newton.GaussNewtonQuality) -> Told:
    """What Gauss-Newton and its approximations miss."""
    missed = one.functional_share["model"]
    rows = []
    for name, p in one.approximations.items():
        cells = [
            "–" if d is None else with_interval(d.value, d.interval)
            for d in (p.to_hessian, p.to_outer)
        ]
        for which in ("hessian", "outer"):
            value, interval = p[f"condition_{which}"], p[f"condition_{which}_interval"]
            bound = "≥ " if p[f"condition_{which}_is_bound"] and value is not None else ""
            cells.append(f"{bound}{with_interval(value, None if bound else interval)}")
        rows.append([name.replace("_", " "), *cells])
    near = one.ratio >= 0.9 and missed.value <= 0.35
    holds, lacks = percent(one.ratio), percent(missed.value)
    says = "stands in well for" if near else "leaves out a part that matters of"
    head = ["stands in for H", "distance to H", "distance to H_o", "κ of P⁻¹|H|", "κ of P⁻¹H_o"]
    return Told(
        verdict=Verdict(
            "good" if near else "unsure",
            f"Gauss-Newton {says} the Hessian here.",
            f"It holds {holds} of λmax and misses {lacks} of ‖H‖.",
        ),
        cards=[
            card("Of λmax, Gauss-Newton holds", Reading("λmax(H_o) / λmax(H)", holds)),
            card("Of ‖H‖, it leaves out", reading(missed.value, missed.interval, "‖H_f‖ / ‖H‖")),
        ],
        answer=f"Distances relative to the norm, with damping {number(one.damping)}.",
        rows=table("", head, rows),
    )


# --- flatness -------------------------------------------------------------------------------------


@tells("Flatness")
def flatness(one: flat.Flatness) -> Told:
    """Measures of flatness at one point, bounds beside losses."""
    rows = [
        [name.replace("_", " "), with_interval(value, one.intervals.get(name))]
        for name, value in one.measures.items()
        if math.isfinite(value)
    ]
    if one.test_loss is not None:
        gap = number(one.test_loss - one.loss)
        rows.append(["generalisation gap: test loss − training loss", gap])
    certified = "a certified local maximum" if one.sam.certified else "not certified as a maximum"
    radius, rise = number(one.sam.radius), number(one.sam.value)
    agreeing = f"{certified}; {one.sam.agreeing} of {one.sam.starts} starts agree"
    because = f"{capitalised(certified)}."
    cards = [
        card("Sharpest direction, λmax", reading(one.sharpness, one.sharpness_interval)),
        card(f"Rise within {radius} (SAM)", reading(one.sam.value), note=agreeing),
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
        cards.append(card("Loss on new samples, at most", reading(best.value), note=note))
    says = f"Within a distance of {radius} the loss rises by {rise}."
    return Told(
        verdict=Verdict("unsure", says, because),
        cards=cards,
        rows=table("Measures of flatness", ["measure", "value"], rows),
    )


@tells("Invariance")
def invariance(one: flat.Invariance) -> Told:
    """Which measures survive rescalings that leave the function as it is."""
    steady = [name.replace("_", " ") for name in one.verdicts if one.invariant(name)]
    changing = "None: every measure changes with some rescaling."
    return Told(
        answer=f"{capitalised(listed(steady))} stay the same." if steady else changing,
        folds=[Fold("Not tried", text=one.refused)] if one.refused else (),
    )


@tells("Generalisation")
def generalisation(one: general.Generalisation) -> Told:
    """Which measures order models as their gaps do."""
    ranked = sorted(one.correlations, key=lambda c: -abs(c.value))
    clear = [c for c in ranked if not sign_unknown(c.value, c.interval)]
    says = "No measure of flatness orders these models as their gaps do."
    if clear:
        best = clear[0]
        says = f"{capitalised(best.measure)} orders the models best: τ = {number(best.value)}."
    columns = {"measure": "measure", "τ": "value", "gaps shuffled": "control", "p": "p_value"}
    return Told(
        verdict=Verdict("unsure", says),
        cards=[card(c.measure, reading(c.value, c.interval, "Kendall's τ")) for c in ranked],
        answer=f"{len(clear)} of {len(ranked)} measures are told from chance over "
        f"{len(one.models)} models trained on {one.dataset}.",
        rows=rows_of(one, columns, caption="Kendall's τ [95 %]"),
        folds=[Fold("Left out", text=one.left_out)] if one.left_out else (),
    )


# --- scaling --------------------------------------------------------------------------------------


@tells("ScalingGrid")
def scaling(one: ScalingGrid) -> Told:
    """Laws of loss and curvature over sizes of model and data."""
    rows = [
        [f"{name}: {key}", with_interval(value, fit.get(f"{key}_interval"))]
        for name, fit in one.fits.items()
        for key, value in fit.items()
        if not key.endswith("_interval")
    ]
    law, cards = one.law, []
    if law is not None:
        by_size = reading(law.alpha, law.alpha_interval, "N to the −α")
        by_data = reading(law.beta, law.beta_interval, "D to the −β")
        cards.append(card("Loss falls with parameters and data", by_size, by_data))
    for name, plane in one.planes.items():
        by_size = reading(plane.by_parameters, plane.parameters_interval, "exponent in N")
        by_data = reading(plane.by_samples, plane.samples_interval, "exponent in D")
        cards.append(card(capitalised(name.replace("_", " ")), by_size, by_data))
    if one.trained:
        best = min(one.trained, key=lambda cell: cell.validation_loss)
        lowest = reading(best.validation_loss, best.validation_interval, "on held-out samples")
        note = f"{best.parameters:,} parameters, {best.samples:,} samples"
        cards.append(card("Lowest loss", lowest, note=note))
    fits = "A law of loss in parameters and data fits these runs."
    said = [*map(str, one.phases.values()), *([str(one.descent)] if one.descent else [])]
    notes = (*said, *one.notes)
    return Told(
        verdict=Verdict(
            "unsure",
            fits if law is not None else "Too few sizes for a law of the loss.",
            f"{capitalised(said[0])}." if said else "",
        ),
        cards=cards,
        answer=f"{len(one.fits)} laws over {len(one.trained)} of {len(one.cells)} runs.",
        rows=table("Exponents [95 %]", ["law", "value"], rows),
        folds=[Fold("Phases of training, and what was left out", text=notes)] if notes else (),
    )


# --- pruning and rounding -------------------------------------------------------------------------

_RISE = ("predicted rise", "measured rise", "quadratic model")


def _rise(one: pruned.ChangedWeights) -> list[str]:
    held = "holds" if one.in_quadratic_range else "outside its range"
    predicted = with_interval(one.predicted_rise, one.predicted_interval)
    return [predicted, number(one.loss_after - one.loss_before), held]


@tells("Pruning", together=True)
def pruning(prunings: Sequence[pruned.Pruning]) -> Told:
    """Prunings side by side."""
    best = min(prunings, key=lambda one: one.loss_after)
    told_by = {
        True: "That is what the derivatives at the weights predict.",
        False: "It is outside the quadratic range: derivatives at the weights do not tell it.",
    }
    cards = [
        card(
            f"Loss without {percent(one.sparsity)}, {one.method}",
            reading(one.loss_before, stage="before"),
            reading(one.loss_after, stage="after"),
            ratio=ratio(one.loss_before, one.loss_after),
            note=told_by[one.in_quadratic_range],
        )
        for one in prunings
    ]
    rows = [
        [f"{one.method}, layers by {one.layers}", percent(one.sparsity), *_rise(one)]
        for one in prunings
    ]
    return Told(
        verdict=Verdict(
            "good" if best.in_quadratic_range else "unsure",
            f"Remove {percent(best.sparsity)} of the weights by {best.method}: the loss goes from "
            f"{number(best.loss_before, 4)} to {number(best.loss_after, 4)}.",
            told_by[best.in_quadratic_range],
        ),
        cards=cards,
        answer=f"{len(prunings)} tried on the same samples; the picture shows the first.",
        rows=table("Rise of the loss", ["weights chosen by", "removed", *_RISE], rows),
    )


@tells("QuantizationTable")
def rounding(one: compression.QuantizationTable) -> Told:
    """Roundings by groups, nearest and by curvature."""
    best = min(one.rows, key=lambda row: row.loss_after)
    cheapest = [
        min((row for row in one.rows if row.bits == bits), key=lambda row: abs(row.rise))
        for bits in dict.fromkeys(row.bits for row in one.rows)
    ]
    cards = [
        card(
            row.name,
            reading(row.rise, stage="rise of the loss"),
            note=f"{number(row.bits_per_weight)} bits a weight",
        )
        for row in cheapest
    ]
    rows = [[row.name, number(row.bits_per_weight), *_rise(row)] for row in one.rows]
    return Told(
        verdict=Verdict(
            "good" if best.in_quadratic_range else "unsure",
            f"{capitalised(best.name)} costs least: the loss changes by {number(best.rise)}.",
            f"At {number(best.bits_per_weight)} bits a weight, scales included.",
        ),
        cards=cards,
        rows=table("Rounding all weights", ["rounded to", "bits a weight", *_RISE], rows),
    )


@tells("CostTable")
def costs(cost: compression.CostTable) -> Told:
    """What changing every part alone costs."""
    dearest = max(cost.rows, key=lambda row: row.measured)
    rise = f"{dearest.name}, where the loss changes by {number(dearest.measured)}"
    together = f"; all at once: {number(cost.measured)}" if cost.measured is not None else ""
    return Told(answer=f"Of {cost.what}, {cost.by} by {cost.by}: {rise}{together}.")


@tells("BitAllocation")
def bits(one: compression.BitAllocation) -> Told:
    """Bits given out by curvature, beside as many everywhere."""
    used, alike = number(one.used), f"{one.uniform_bits} bits everywhere"
    ends = reading(one.measured, stage="by curvature"), reading(one.uniform_measured, stage=alike)
    note = f"{one.weights:,} weights, {used} bits each on average"
    says = f"Give out {used} bits a weight by curvature: the loss changes by "
    return Told(
        verdict=Verdict(
            "good" if one.measured < one.uniform_measured else "unsure",
            f"{says}{number(one.measured)}.",
            f"With {alike} it changes by {number(one.uniform_measured)}.",
        ),
        cards=[card("Change of the loss", *ends, note=note)],
    )


# --- statements -----------------------------------------------------------------------------------


@tells("Verification", together=True)
def verification(parts: Sequence[Verification]) -> Told:
    """Statements of the papers, tested on this machine."""
    entries: list[Mapping[str, Any]] = [entry for one in parts for entry in one.entries]
    verdicts = [str(entry["verdict"]) for entry in entries]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    differ = [str(e["name"]) for e in entries if e["verdict"] != e["recorded"]]
    says = f"All {len(entries)} statements came out as recorded."
    if differ:
        count = "1 statement" if len(differ) == 1 else f"{len(differ)} statements"
        says = f"{count} came out otherwise than recorded: {listed(differ)}."
    summary = listed([f"{count} {verdict}" for verdict, count in counts.items()])
    seconds = sum(one.seconds for one in parts)
    keys = ("title", "verdict", "figure", "source")
    formulas = table("", ["name", "formula"], [[e["name"], e["formula"]] for e in entries])
    return Told(
        verdict=Verdict("act" if differ else "good", says, f"{capitalised(summary)}."),
        cards=[card(capitalised(v), Reading("statements", str(n))) for v, n in counts.items()],
        answer=f"{len(entries)} statements tested in {seconds:.0f} s: {summary}.",
        rows=table("", keys, [[e[key] for key in keys] for e in entries]),
        folds=[Fold("The formulas", tables=(formulas,))] if formulas is not None else (),
    )


@tells("Reproduction")
def reproduction(one: Reproduction) -> Told:
    """A figure or claim of a paper: its numbers beside ours."""
    tone: Any = "good" if one.verdict == "confirmed" else "unsure"
    head = ["number", "where", "here", "paper", "verdict"]
    rows = [[f.what, f.where or None, f.ours, f.paper, f.verdict] for f in one.findings]
    text = (*(f"Smaller than the paper: {line}." for line in one.smaller), *one.notes)
    return Told(
        verdict=Verdict(tone, f"{one.id}: {one.verdict}.", one.claim),
        cards=[
            card(f.what, Reading("here", f.ours), Reading("paper", f.paper), note=f.verdict)
            for f in one.findings
        ],
        question=one.shows,
        answer=f"{capitalised(one.verdict)}. The paper ({one.source}): {one.claim}",
        rows=table(one.setting, head, rows),
        folds=[Fold("What was made smaller, and what to know", text=text)] if text else (),
    )
