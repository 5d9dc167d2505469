"""When a snapshot deserves a word: thresholds the user sets, events they raise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from curvatlas.training.snapshot import Event, Snapshot


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where the events start; a value of infinity (or 0 for dead blocks) switches one off."""

    edge: float = 2.0  # λmax·η at which gradient descent is at the edge of stability
    spike_ahead: float = 1.5  # times the edge: the quadratic model predicts divergence
    loss_spike: float = 1.5  # times the median of the last five losses
    exploding: float = 10.0  # times a role's median gradient norm so far
    dead: float = 1e-4  # of a role's median gradient norm so far


def events_of(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    """What is new in this snapshot compared with those before it."""
    yield from _stability(snapshot, earlier, thresholds)
    recent = [s.loss for s in earlier[-5:]]
    if len(recent) >= 2:
        usual = statistics.median(recent)
        if not snapshot.loss <= thresholds.loss_spike * usual:
            yield Event(
                step=snapshot.step,
                name="loss_spike",
                message=f"the loss rose to {snapshot.loss:.4g} from a median of {usual:.4g}",
                value=snapshot.loss,
                threshold=thresholds.loss_spike * usual,
            )
    yield from _blocks(snapshot, earlier, thresholds)


def _stability(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    now = snapshot.stability
    if now is None:
        return
    before = earlier[-1].stability if earlier else None
    crossed = before is None or before < thresholds.edge
    if now >= thresholds.edge and crossed:
        yield Event(
            step=snapshot.step,
            name="edge_of_stability",
            message=f"λmax·η = {now:.3g} reached {thresholds.edge:g}: plain gradient descent at "
            "this rate oscillates along the top eigenvector",
            value=now,
            threshold=thresholds.edge,
        )
    limit = thresholds.edge * thresholds.spike_ahead
    if now >= limit and (before is None or before < limit):
        yield Event(
            step=snapshot.step,
            name="spike_ahead",
            message=f"λmax·η = {now:.3g} is {now / thresholds.edge:.1f} times the edge: expect a "
            "loss spike, or lower the rate below 2/λmax",
            value=now,
            threshold=limit,
        )


def _blocks(
    snapshot: Snapshot, earlier: Sequence[Snapshot], thresholds: Thresholds
) -> Iterator[Event]:
    if len(earlier) < 2:
        return
    for role, norm in snapshot.role_gradient.items():
        usual = statistics.median(s.role_gradient.get(role, math.nan) for s in earlier)
        if not usual > 0:
            continue
        for name, wrong, limit in (
            ("exploding_block", norm > thresholds.exploding * usual, thresholds.exploding * usual),
            ("dead_block", norm < thresholds.dead * usual, thresholds.dead * usual),
        ):
            if wrong:
                yield Event(
                    step=snapshot.step,
                    name=name,
                    message=f"the gradient of {role} is {norm:.3g}, usually {usual:.3g}",
                    value=norm,
                    threshold=limit,
                )
