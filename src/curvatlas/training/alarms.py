"""When the monitor speaks up: notes and alarms, with the numbers behind them.

Near the edge of stability a healthy run hovers at 1 (small batches: up to 2) of its optimizer's
threshold, so that being there is a note and no alarm. Reasons to act are a threshold passed far and
again, a rate that is raised where the curvature already stands at the edge, and a loss or a
gradient that leaves what it used to do. How often healthy runs raise one is measured by
``benchmarks/alarms.py``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from curvatlas.fits import share_interval
from curvatlas.results import Interval, Result

if TYPE_CHECKING:
    from curvatlas.training.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Event(Result):
    """Something worth a look (a note), or reason to act (an alarm), with what speaks for it."""

    step: int
    name: str  # a key of ``FALSE_ALARMS``, or edge_of_stability, not_measured, tracker_failed
    message: str
    value: float
    threshold: float
    alarm: bool = False
    evidence: dict[str, float] = field(default_factory=dict)  # the numbers behind it, by name
    # share of healthy runs in which this alarm rose, 95 % interval of benchmarks/alarms.py
    false_alarm_rate: Interval | None = None

    def __str__(self) -> str:
        return f"step {self.step}, {'ALARM ' if self.alarm else ''}{self.name}: {self.message}"


# Runs with a false alarm, by kind, of the healthy runs of benchmarks/alarms.py with seed 400, on
# which no rule was set.
HEALTHY_RUNS = 30
FALSE_ALARMS = {
    "spike_ahead": 0,
    "loss_rising": 0,
    "loss_spike": 0,
    "bad_batch": 0,
    "exploding_block": 0,
    "dead_block": 0,
    "not_finite": 0,
}


def alarm(name: str, step: int, message: str, evidence: Mapping[str, float]) -> Event:
    """An alarm with its rate of false ones; the first two numbers are its value and threshold."""
    numbers = list(evidence.values())
    false = share_interval(FALSE_ALARMS[name], HEALTHY_RUNS)
    return Event(
        step=step,
        name=name,
        message=message,
        value=numbers[0],
        threshold=numbers[1],
        alarm=True,
        evidence=dict(evidence),
        false_alarm_rate=false,
    )


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where the events start; a value of infinity (or 0 for dead blocks) switches one off."""

    edge: float = 1.0  # λmax(P⁻¹H) over the optimizer's threshold
    spike_ahead: float = 2.5  # times the edge, twice in a row, or twice that once
    first_steps: float = 1.0  # times the edge, in the first steps: there was no warm-up
    rising_rate: float = 1.1  # times the rate that the run had settled on, at the edge
    rising_warm_up: float = 2.0  # times the rate at which a rising one first met the edge
    loss_rising: float = 1.5  # times the lowest loss so far, and beyond what it used to scatter
    loss_spike: float = 2.0  # times the median of the last five losses, and beyond its scatter
    exploding: float = 10.0  # times a role's median gradient norm so far
    dead: float = 1e-4  # of a role's usual share of the gradient


_SCATTER = 4.0  # standard deviations of earlier changes that a rise must exceed
_LOOKS = 6  # losses from which their scatter is known
_NEAR = 0.9  # of the threshold: at the edge
YOUNG = 10  # steps in which running means of gradients are too short to be a metric
_FIRST = 15  # steps that a warm-up keeps far below the edge
_GUIDE = 5.0  # times a law's limit: where an edge that is a guide only is passed for certain
_FAST = 1.08  # times the highest rate of ten steps ago: curvature gives way to slower rises
_SETTLED = 10  # steps without a higher rate: warm-up is over
_LEFT = 0.5  # of the settled rate: below it the run has left that rate
_KNOWN = 1.25  # times a rate that was left: up to here a higher one is a return to it
_RETURNING = 20  # steps after a return in which curvature and loss find their place again
_RECENT = 8  # snapshots whose curvature a raised rate is held against
TRAINING_LOOKS = 50  # training losses, one a step, that tell their scatter
_BATCH_SCATTER = 6.0  # standard deviations: every step is looked at
_LEADING = 0.3  # share of the gradient's norm that an exploding block has at least

_OSCILLATES = ": steps oscillate along the top eigenvector"
_GUIDE_ONLY = "; for this optimizer the threshold is a guide"

Look = tuple[int, float]  # step and loss on the monitor's data
NEVER = range(0)


def events_of(
    snapshot: Snapshot,
    earlier: Sequence[Snapshot],
    thresholds: Thresholds,
    *,
    returned: range = NEVER,
) -> Iterator[Event]:
    """What is new in this snapshot compared with those before it; returned: as in loss_events."""
    yield from _stability(snapshot, earlier, thresholds, returned)
    yield from _blocks(snapshot, earlier, thresholds, returned)


def _grown(snapshot: Snapshot) -> bool:
    """Whether the metric is one: P is the identity, or running means have been filled."""
    return snapshot.step >= YOUNG or snapshot.edge == snapshot.sharpness


def _stability(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds, returned: range
) -> Iterator[Event]:
    now = snapshot.edge_ratio
    if now is None or snapshot.edge_threshold is None or not _grown(snapshot):
        return
    last = [s for s in earlier if _grown(s)][-2:]
    before = [s.edge_ratio or 0.0 for s in last]
    what = "λmax" if snapshot.metric.startswith("plain") else f"λmax(P⁻¹H) of {snapshot.metric}"
    told = (
        f"{what} = {snapshot.edge:.3g} is {now:.2f} of its threshold {snapshot.edge_threshold:.3g}"
    )
    if now >= thresholds.edge and not (before and before[-1] >= thresholds.edge):
        yield Event(
            step=snapshot.step,
            name="edge_of_stability",
            message=told + (_OSCILLATES if snapshot.edge_is_law else _GUIDE_ONLY),
            value=now,
            threshold=thresholds.edge,
        )
    if snapshot.rate_limited:
        return
    limit = thresholds.edge * thresholds.spike_ahead
    first = thresholds.edge * thresholds.first_steps * _certain(snapshot)
    evidence = {
        "of the threshold": now,
        "limit": limit,
        "share of the gradient in the top eigenspace": snapshot.gradient_alignment,
    }
    if before:
        told += f", after {before[-1]:.2f}"
        evidence["of the threshold before"] = before[-1]
    if snapshot.step <= _FIRST:
        if now >= first and not any(ratio >= first for ratio in before):
            message = f"{told}, in the first steps: a loss spike may follow; warm the rate up"
            yield alarm("spike_ahead", snapshot.step, message, {**evidence, "limit": first})
    elif (
        snapshot.edge_is_law
        and _far(now, before, limit, once=snapshot.step not in returned)
        and not (
            before and _far(before[-1], before[:-1], limit, once=last[-1].step not in returned)
        )
    ):
        message = f"{told}: a loss spike may follow; lower the rate"
        yield alarm("spike_ahead", snapshot.step, message, evidence)


def _far(now: float, before: Sequence[float], limit: float, *, once: bool) -> bool:
    """Beyond the limit twice in a row, or twice as far where once is enough."""
    return (once and now >= 2 * limit) or (now >= limit and bool(before) and before[-1] >= limit)


class RateWatch:
    """Every step, free: is the rate raised beyond what the curvature measured so far allows?

    A warm-up raises the rate before the run has settled: only then may the edge be met on the way
    up. Later a rate above the highest one that lasted moves the edge by as much: what counts is
    where the curvature of the last snapshots would stand at the new rate. A slow rise is no matter:
    at the edge curvature gives way as fast.

    A rate that the run held, left for less than half of it and comes back to is no news in itself.
    Curvature grew while the rate was low and gives way to it again, often with one jump of the
    loss: a return is an alarm where that curvature stands twice as far beyond the edge, or where
    the loss stays up.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.highest, self.lasted = 0.0, 0  # the highest rate, and steps since it came
        self.settled: float | None = None  # the highest rate that was not raised for a while
        self.said = 0.0  # the rate of the last alarm
        self.recent: deque[float] = deque(maxlen=_SETTLED)  # the highest rate, step by step
        self.left: float | None = None  # the settled rate when the rate last was below half of it
        self.back = 0  # steps since then
        self.known = False  # whether the rate is about one that was left, or below

    def see(self, rate: float, steps: int = 1) -> None:
        """Take note of a rate that was used for so many steps."""
        self.recent.extend([self.highest] * min(steps, _SETTLED))
        self.back += steps
        if rate > self.highest * (1 + 1e-6):
            self.highest, self.lasted = rate, 0
            steps -= 1
        self.lasted += steps
        if self.lasted >= _SETTLED:
            self.settled = self.highest
        if self.settled is not None and rate < _LEFT * self.settled:
            self.left, self.back = self.settled, 0
        self.known = self.left is not None and rate <= _KNOWN * self.left

    def returned(self, step: int) -> range:
        """The steps of the last return to a known rate, where ``step`` is the present one."""
        first = step - self.back + 1
        return range(first, first + _RETURNING) if self.known and self.back else NEVER

    def alarm(self, step: int, rate: float, snapshots: Sequence[Snapshot]) -> Event | None:
        """An alarm, once for every half that the rate rises further."""
        grown = [
            s
            for s in snapshots
            if _grown(s) and s.edge_ratio is not None and s.learning_rate and not s.rate_limited
        ]
        if not grown or rate < 1.5 * self.said:
            return None
        returning = step in self.returned(step)
        event = self._jumped(step, rate, grown[-1], returning=returning)
        if event is None and rate >= _FAST * self.recent[0] and not returning:
            event = self._raised(step, rate, grown)
        if event is not None:
            self.said = rate
        return event

    def _jumped(self, step: int, rate: float, last: Snapshot, *, returning: bool) -> Event | None:
        """Since the last snapshot, by so much that its curvature is far beyond the edge."""
        limit = self.thresholds.edge * self.thresholds.spike_ahead
        if returning:
            limit *= 2
        before = last.edge_ratio or 0.0
        now = _at(last, rate)
        if not (last.edge_is_law and before < limit <= now):
            return None
        message = (
            f"the rate rose to {rate:.3g}: λmax(P⁻¹H) of step {last.step} is {now:.2f} of its "
            "threshold at this rate; a loss spike may follow; lower the rate"
        )
        evidence = {"of the threshold": now, "limit": limit, "of the threshold before": before}
        return alarm("spike_ahead", step, message, evidence)

    def _raised(self, step: int, rate: float, grown: Sequence[Snapshot]) -> Event | None:
        """Above what the run had settled on, or on and on after the edge was met."""
        edge = self.thresholds.edge
        sharpest = max(grown[-_RECENT:], key=lambda s: _at(s, rate))
        now = _at(sharpest, rate)
        if self.settled is not None:
            usual, times, which = (
                self.settled,
                self.thresholds.rising_rate,
                "the run had settled on",
            )
        else:
            met = next((s for s in grown if (s.edge_ratio or 0.0) >= _NEAR * edge), None)
            if met is None:
                return None
            usual, times = met.learning_rate or 0.0, self.thresholds.rising_warm_up
            which = f"met the edge of stability at step {met.step}"
        if rate < times * usual or now < edge * _certain(sharpest):
            return None
        message = (
            f"the rate rose to {rate:.3g}, {rate / usual:.2g} times what {which}: λmax(P⁻¹H) of "
            f"step {sharpest.step} is {now:.2f} of its threshold at this rate; a loss "
            "spike may follow; hold the rate"
        )
        evidence = {"rate": rate, "limit": times * usual, "of the threshold": now}
        return alarm("spike_ahead", step, message, evidence)


def _certain(snapshot: Snapshot) -> float:
    """Times the edge from which its passing means something."""
    return 1.0 if snapshot.edge_is_law else _GUIDE


def _at(snapshot: Snapshot, rate: float) -> float:
    """λmax(P⁻¹H) over its threshold, were the rate another one: thresholds are c/η."""
    return (snapshot.edge_ratio or 0.0) * rate / (snapshot.learning_rate or math.inf)


def loss_events(
    looks: Sequence[Look], thresholds: Thresholds, *, returned: range = NEVER
) -> Iterator[Event]:
    """Rising or jumping losses, measured against how much the losses changed before.

    returned: steps in which the rate comes back (see ``RateWatch``): one jump is expected there.
    """
    step, loss = looks[-1]
    earlier = [value for _, value in looks[:-1]]
    if len(earlier) < _LOOKS:
        return
    noise = _scatter(earlier)
    scatter = min(_SCATTER * noise, 50.0)
    lowest, usual = min(earlier), statistics.median(earlier[-5:])
    rise = lowest * max(thresholds.loss_rising, math.exp(scatter))
    told = f"the loss is {loss:.4g}, {{}} {{:.4g}}; it used to scatter by {noise:.1%}"
    if loss > rise and earlier[-1] > rise and not earlier[-2] > rise:
        message = told.format("twice above its lowest", lowest)
        evidence = {"loss": loss, "limit": rise, "before": earlier[-1], "lowest": lowest}
        yield alarm("loss_rising", step, message, evidence)
    jump = usual * max(thresholds.loss_spike, math.exp(scatter))
    if not loss <= jump and not earlier[-1] > jump and step not in returned:
        message = told.format("usually", usual)
        yield alarm("loss_spike", step, message, {"loss": loss, "limit": jump, "usual": usual})


def batch_events(looks: Sequence[Look], thresholds: Thresholds) -> Iterator[Event]:
    """A training batch whose loss jumps, told at its own step, before the weights have moved on."""
    step, loss = looks[-1]
    before = [value for _, value in looks][:-1]
    if not math.isfinite(loss):
        if not before or math.isfinite(before[-1]):  # said once
            message = f"the training loss is {loss}: look at this batch and at the rate"
            yield alarm("not_finite", step, message, {"loss": loss, "limit": math.nan})
        return
    earlier = [value for value in before if math.isfinite(value)]
    if len(earlier) < TRAINING_LOOKS // 2:
        return
    noise, usual = _scatter(earlier), statistics.median(earlier[-5:])
    jump = usual * max(thresholds.loss_spike, math.exp(min(_BATCH_SCATTER * noise, 50.0)))
    if loss > jump and before[-1] <= jump:  # said once
        message = (
            f"the training loss jumped to {loss:.4g}, usually {usual:.4g}; it used to scatter by "
            f"{noise:.1%}: look at this batch"
        )
        yield alarm("bad_batch", step, message, {"loss": loss, "limit": jump, "usual": usual})


def _scatter(losses: Sequence[float]) -> float:
    """Robust standard deviation of the logarithm's changes around their trend."""
    if min(losses) <= 0:
        return math.inf
    logs = [math.log(value) for value in losses]
    changes = [b - a for a, b in itertools.pairwise(logs)]
    middle = statistics.median(changes)
    return 1.4826 * statistics.median(abs(change - middle) for change in changes)


def _blocks(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds, returned: range
) -> Iterator[Event]:
    """Roles whose gradient explodes and leads the others, or dies while the others live.

    A gradient that is zero by theory (a key's bias under softmax) is rounding in every snapshot:
    a role counts only where its usual share is above ``snapshot.rounding``. Gradients also grow
    tenfold when training begins to learn: they explode only where the loss rises with them.
    """
    if len(earlier) < 3:
        return
    rising = not snapshot.loss <= thresholds.loss_spike * min(s.loss for s in earlier)
    jumped = rising and snapshot.step not in returned  # there every gradient jumps once
    past = [*earlier, snapshot]
    for role, norm in snapshot.role_gradient.items():
        norms = [s.role_gradient.get(role, math.nan) for s in past]
        shares = [
            n / s.gradient_norm if s.gradient_norm > 0 else 0.0
            for n, s in zip(norms, past, strict=True)
        ]
        usual, usual_share = statistics.median(norms[:-1]), statistics.median(shares[:-1])
        if not usual_share > snapshot.rounding:
            continue
        most, least = thresholds.exploding * usual, thresholds.dead * usual_share
        if jumped and norm > most and shares[-1] > _LEADING and norm > 3 * max(norms[:-1]):
            message = f"the gradient of {role} is {norm:.3g}, usually {usual:.3g}"
            evidence = {"gradient": norm, "limit": most, "usual": usual, "share": shares[-1]}
            yield alarm("exploding_block", snapshot.step, message, evidence)
        if shares[-1] < least and shares[-2] < least and not shares[-3] < least:
            part = f"{shares[-1]:.2g} of the whole, usually {usual_share:.2g}"
            message = f"the gradient of {role} is {part}"
            evidence = {"share": shares[-1], "limit": least, "usual": usual_share}
            yield alarm("dead_block", snapshot.step, message, evidence)
