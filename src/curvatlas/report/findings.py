"""What is worth saying about measured stages, ranked: the verdict and the cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from curvatlas.analysis.atlas.result import Atlas, RankedBlock
from curvatlas.analysis.diagnostics import (
    ADAPTIVE,
    LAYERS_DIFFER,
    Advice,
    Recommendation,
    Situation,
)
from curvatlas.analysis.trial import Trial
from curvatlas.report.layout import Card, Reading, Verdict
from curvatlas.report.reading import Measured, Stage
from curvatlas.report.words import (
    brackets,
    capitalised,
    listed,
    number,
    percent,
    ratio,
    says_nothing,
    sign_unknown,
    wider,
    with_interval,
)

_DEEP = 0.1  # |λmin| / λmax from which downward curvature competes with the sharpest direction
_SEES_TOP, _MISSES_LITTLE, _MISSES_MUCH = 0.9, 0.35, 0.6  # of Gauss-Newton


# --- the verdict ----------------------------------------------------------------------------------


def verdict(stages: Sequence[Stage]) -> Verdict | None:
    """What to do at the last stage, or what was ruled out there."""
    advised = [stage.advice for stage in stages if stage.advice is not None]
    if not advised:
        return _without_advice(stages)
    advice = advised[-1]
    if not advice.recommendations:
        return _nothing_to_do(advice)
    ranked = sorted(advice.recommendations, key=lambda item: item.strength != "strong")
    first, *others = ranked
    return Verdict(
        tone="act",
        says=f"{capitalised(first.action)}.",
        because=f"{capitalised(first.evidence)}. {capitalised(_effect(first))}".strip(),
        more=(
            *(f"{capitalised(item.action)}: {item.evidence}." for item in others),
            *(f"Not advised: {tried(trial)}." for trial in advice.ruled_out),
        ),
    )


def _effect(item: Recommendation) -> str:
    """What the step did where it was tried, else what it is expected to do."""
    if item.trial is None:
        return f"{item.effect}." if item.effect else ""
    lengths, change = item.trial.confirmed_at, item.trial.value
    low, high = item.trial.held_out_intervals[item.trial.held_out.index(change)]
    fall = with_interval(-change, (-high, -low))
    return (
        f"Tried: {item.trial.verdict}, there by up to {fall} (steps of length "
        f"{number(min(lengths))} to {number(max(lengths))})."
    )


def tried(trial: Trial) -> str:
    """A direction and what came of it."""
    return f"{trial.direction}: {trial.verdict}"


def _without_advice(stages: Sequence[Stage]) -> Verdict | None:
    tops = [stage.largest().value for stage in stages]
    top = next((value for value in reversed(tops) if value is not None), None)
    if top is None or not top > 0:
        return None
    return Verdict(
        tone="unsure",
        says=f"Plain gradient descent is stable for steps below {number(2 / top)}.",
        because="That is 2/λmax. Advice was left out of this run, so nothing else was judged.",
    )


def _nothing_to_do(advice: Advice) -> Verdict:
    situation = advice.situation or Situation()
    using = optimizer_words(situation)
    states = {True: "trained model", False: "untrained model", None: "model"}
    state = states[situation.trained]
    ruled_out = list(_ruled_out(advice, situation))
    because = f"Ruled out: {listed(ruled_out)}." if ruled_out else ""
    if situation.adaptive:
        because += (
            f" Not measured: the edge of stability that {_name(situation)} itself feels; "
            "curvatlas train watches it."
        )
    return Verdict(
        tone="good",
        says=f"Nothing to change{using}: no measurement of the {state} asks for it.",
        because=because.strip(),
    )


def _ruled_out(advice: Advice, situation: Situation) -> Iterator[str]:
    now = advice.conditioning
    if now.stability is not None and not situation.adaptive:
        yield f"a rate beyond the edge (η·λmax/2 = {number(now.stability)}; the edge is 1)"
    if situation.trained is not False and not advice.ruled_out:
        share = now.indefiniteness
        yield f"downward curvature that matters (|λmin| is {percent(share)} of λmax; from " \
            f"{percent(_DEEP)} on it would)"  # fmt: skip
    if not situation.adaptive and 0 < now.heterogeneity <= LAYERS_DIFFER:
        yield (
            f"layers that need rates of their own (parts of like size differ × "
            f"{number(now.heterogeneity)}; from × {number(LAYERS_DIFFER)})"
        )
    yield from (tried(trial) for trial in advice.ruled_out)


def _name(situation: Situation) -> str:
    known = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "gd": "GD"}
    name = situation.optimizer or ""
    return known.get(name.lower(), name.capitalize())


def optimizer_words(situation: Situation | None) -> str:
    """`` with AdamW at rate 0.005``; empty where none was named."""
    if situation is None or not situation.optimizer:
        return ""
    rate = situation.learning_rate
    return f" with {_name(situation)}{f' at rate {number(rate)}' if rate is not None else ''}"


def conditions(advice: Advice | None) -> Iterator[str]:
    """What the advice takes for granted, so that a reader can see whether it is meant for them."""
    if advice is None or advice.situation is None:
        return
    situation = advice.situation
    states = {True: "trained", False: "not trained yet", None: "trained or not (it cannot be told)"}
    because = f" ({situation.because})" if situation.because else ""
    using = optimizer_words(situation) or "; optimizer not named (--optimizer, --lr)"
    yield f"Advice is for a model that is {states[situation.trained]}{because}{using}."


# --- the cards ------------------------------------------------------------------------------------


def cards(stages: Sequence[Stage]) -> tuple[Card, ...]:
    """Three to five numbers that say where the model stands, where they say anything."""
    ends = [stages[0], stages[-1]] if len(stages) > 1 else list(stages)
    made = (_sharpest(ends), _downward(ends), _where(ends), _total(ends), _travels(ends))
    return tuple(card for card in made if card is not None)


def _readings(
    stages: Sequence[Stage], values: Sequence[Measured]
) -> tuple[tuple[Reading, ...], str]:
    """A reading a stage that says something, and how the last compares to the first."""
    told = [
        Reading(stage=stage.label, value=number(m.value), interval=brackets(m.widest))
        for stage, m in zip(stages, values, strict=True)
        if m.value is not None and not sign_unknown(m.value, m.interval)
    ]
    both = len(told) > 1
    return tuple(told), ratio(values[0].value, values[-1].value) if both else ""


def _sharpest(stages: Sequence[Stage]) -> Card | None:
    values = [stage.largest() for stage in stages]
    readings, factor = _readings(stages, values)
    top = values[-1].value
    if not readings or top is None:
        return None
    advice = stages[-1].advice
    situation = (advice.situation if advice else None) or Situation()
    return Card(
        title="Sharpest direction, λmax",
        readings=readings,
        ratio=factor,
        note=_edge(top, situation) if top > 0 else "no direction curves upwards",
    )


def _edge(top: float, situation: Situation) -> str:
    """Where this optimizer becomes unstable."""
    rate, plain = situation.learning_rate, number(2 * (1 + situation.momentum) / top)
    if situation.optimizer is None:
        return f"gradient descent is stable for steps below 2/λmax = {plain}"
    if situation.optimizer.lower() in ADAPTIVE:
        return (
            f"plain gradient descent: steps below {plain}; "
            f"{_name(situation)} has an edge of its own"
        )
    if rate is None:
        return f"{_name(situation)} is stable for rates below {plain}"
    share = rate * top / 2 / (1 + situation.momentum)
    return f"{_name(situation)} is stable below {plain}: at {number(rate)} it uses {percent(share)}"


def _downward(stages: Sequence[Stage]) -> Card | None:
    values = [stage.smallest() for stage in stages]
    readings, factor = _readings(stages, values)
    low, top = values[-1], stages[-1].largest().value
    if not readings or low.value is None or sign_unknown(low.value, low.interval):
        return None
    if low.value >= 0:
        note = "no direction curves downwards"
    elif top is None or top <= 0:
        note = "the loss also curves downwards"
    else:
        share = -low.value / top
        weight = "little beside" if share < _DEEP else "it competes with"
        note = f"{percent(share)} of λmax in size: {weight} the sharpest direction"
        note += _place(stages[-1])
        if sign_unknown(low.value, low.data_interval):
            note += "; other samples may have none"
    return Card(title="Downward curvature, λmin", readings=readings, ratio=factor, note=note)


def _place(stage: Stage) -> str:
    """What steps along the negative curvature have shown the point to be; empty: none taken."""
    if stage.advice is None:
        return ""
    given = [item.trial for item in stage.advice.recommendations]
    trials = [trial for trial in (*given, *stage.advice.ruled_out) if trial is not None]
    told = [trial.place for trial in trials if "negative" in trial.direction]
    return f"; {told[0]}" if told else ""


def short_names(names: Sequence[str]) -> dict[str, str]:
    """``blocks.0.output`` → "output 0" (or "output", of the only block), ``embedding.patch`` →
    "patch embedding"."""
    blocks = {name.split(".")[1] for name in names if name.startswith("blocks.")}
    return {name: _short(name, single=len(blocks) == 1) for name in names}


def _short(name: str, *, single: bool) -> str:
    words = name.split(".")
    if words[0] == "blocks" and len(words) > 2:
        said = " ".join(words[2:]) + ("" if single else f" {words[1]}")
    elif words[0] == "embedding" and len(words) == 2:
        said = f"{words[1]} embedding"
    else:
        said = " ".join(words).replace(" weight", "")
    return said.replace("_residual", " sum").replace("_", " ")


def block_name(atlas: Atlas, block: RankedBlock) -> str:
    """A block as a person would call it: "patch embedding × value"."""
    names = short_names(atlas.names)
    return " × ".join(dict.fromkeys(names.get(name, name) for name in (block.row, block.column)))


def _share_interval(block: RankedBlock) -> tuple[float, float]:
    """Of ‖H‖², to first order: the block's own error, as a share of the rest."""
    low, high = (end / max(block.frobenius, 1e-300) for end in block.interval)
    rest = 1 - block.share

    def share(factor: float) -> float:
        part = block.share * factor**2
        return part / (part + rest) if part + rest > 0 else 0.0

    return share(low), share(high)


def _where(stages: Sequence[Stage]) -> Card | None:
    readings = []
    for stage in stages:
        blocks = stage.atlas.ranking(1) if stage.atlas is not None else ()
        if (
            stage.atlas is not None
            and blocks
            and not says_nothing(blocks[0].share, _share_interval(blocks[0]))
        ):
            low, high = (percent(end) for end in _share_interval(blocks[0]))
            within = "" if low == high else f" [{low}, {high}]"
            readings.append(
                Reading(
                    stage=stage.label,
                    value=block_name(stage.atlas, blocks[0]),
                    interval=f"{percent(blocks[0].share)}{within} of ‖H‖²",
                )
            )
    if not readings:
        return None
    atlas = stages[-1].atlas
    note = ""
    if atlas is not None:
        several = atlas.ranking(5)
        total = sum(block.share for block in several)
        note = f"the five largest blocks hold {percent(total)} of the squared norm of H"
    return Card(title="Where it lives", readings=tuple(readings), note=note)


def _total(stages: Sequence[Stage]) -> Card | None:
    values = [stage.trace() for stage in stages]
    readings, factor = _readings(stages, values)
    note = gauss_newton_words(stages[-1])
    if not readings:
        return None
    return Card(title="Total curvature, tr H", readings=readings, ratio=factor, note=note)


def gauss_newton_words(stage: Stage) -> str:
    """Whether Gauss-Newton suffices, with the numbers that say so."""
    seen, missed = stage.outer_sharpness().value, stage.missed_share()
    if seen is None:
        return ""
    sees = f"Gauss-Newton holds {percent(seen)} of λmax"
    if missed.value is None or says_nothing(missed.value, missed.interval):
        return sees
    told = f"{sees} and misses {percent(missed.value)} of ‖H‖"
    if seen >= _SEES_TOP and missed.value <= _MISSES_LITTLE:
        return f"{told}: it suffices"
    if missed.value >= _MISSES_MUCH:
        return f"{told}: it does not suffice"
    return f"{told}: a rough stand-in"


def _travels(stages: Sequence[Stage]) -> Card | None:
    """Only where curvature by depth is all there is: the maps say more."""
    if any(stage.ends is not None for stage in stages):
        return None
    flows = [(stage, stage.flow) for stage in stages]
    known = [(stage, flow) for stage, flow in flows if flow is not None]
    readings = tuple(
        Reading(
            stage=stage.label,
            value=f"× {number(flow.amplification)}",
            interval=brackets(wider(flow.amplification_interval)),
        )
        for stage, flow in known
        if len(flow.activations) > 1
    )
    return Card(title="From head to embedding", readings=readings) if readings else None
