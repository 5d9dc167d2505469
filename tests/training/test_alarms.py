"""The rules of the alarms, on snapshots, rates and losses that are made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import curvatlas as ca
from curvatlas.training.alarms import RateWatch, Thresholds, events_of, loss_events
from curvatlas.training.snapshot import Snapshot


def snapshot_at(step: int, **changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "step": step, "loss": 1.0, "learning_rate": 0.1, "sharpness": 1.0,
        "sharpness_interval": (1.0, 1.0), "most_negative": -0.1, "trace": 1.0,
        "trace_interval": (1.0, 1.0), "negative_mass": 0.1, "negative_mass_interval": (0.0, 0.2),
        "gradient_norm": 1.0, "gradient_alignment": 0.5, "drift": None, "role_sharpness": {},
        "role_trace": {}, "role_gradient": {"query": 1.0, "value": 1.0}, "products": 1,
        "seconds": 0.1, "edge": 1.0, "edge_threshold": 20.0,
    }  # fmt: skip
    return Snapshot(**{**values, **changes})


def names(snapshot: Snapshot, earlier: list[Snapshot], **thresholds: float) -> list[str]:
    return [event.name for event in events_of(snapshot, earlier, Thresholds(**thresholds))]


def losses(*values: float, **thresholds: float) -> list[str]:
    looks = list(enumerate(values))
    return [event.name for event in loss_events(looks, Thresholds(**thresholds))]


def test_the_edge_is_noted_once_and_an_alarm_needs_it_twice_far_beyond() -> None:
    calm = [snapshot_at(20 + i) for i in range(3)]
    assert names(snapshot_at(23), calm) == []
    assert names(snapshot_at(23, edge=21.0), calm) == ["edge_of_stability"]
    assert names(snapshot_at(23, edge=21.0), calm, edge=1.5) == []
    beyond = snapshot_at(23, edge=80.0)
    assert names(beyond, calm) == ["edge_of_stability"]
    assert names(snapshot_at(24, edge=70.0), [*calm, beyond]) == ["spike_ahead"]
    again = [*calm, beyond, snapshot_at(24, edge=70.0)]
    assert names(snapshot_at(25, edge=70.0), again) == []
    # Muon turns with the gradient: its edge is a guide
    guide = [*calm, snapshot_at(23, edge=80.0, edge_is_law=False)]
    assert names(snapshot_at(24, edge=70.0, edge_is_law=False), guide) == []
    # once is enough where it is twice as far
    assert names(snapshot_at(23, edge=101.0), calm) == ["edge_of_stability", "spike_ahead"]


def test_a_run_that_begins_beyond_its_edge_was_not_warmed_up() -> None:
    plain = [snapshot_at(5 * i, edge=22.0, sharpness=22.0) for i in range(3)]
    assert names(plain[0], []) == ["edge_of_stability", "spike_ahead"]
    assert names(plain[1], plain[:1]) == []  # said once
    late = snapshot_at(25, edge=22.0, sharpness=22.0)
    assert names(late, []) == ["edge_of_stability"]
    # the running means of the first steps are no metric yet; P = I needs none
    assert names(snapshot_at(5, edge=22.0), []) == []
    assert names(snapshot_at(15, edge=22.0), []) == ["edge_of_stability", "spike_ahead"]
    guide = {"edge_is_law": False}
    assert names(snapshot_at(15, edge=90.0, **guide), []) == ["edge_of_stability"]
    assert names(snapshot_at(15, edge=110.0, **guide), []) == ["edge_of_stability", "spike_ahead"]


def test_an_optimizer_that_limits_its_own_rate_raises_a_note_and_no_alarm() -> None:
    held = {"edge": 200.0, "edge_is_law": False, "rate_limited": True}
    (event,) = events_of(snapshot_at(12, **held), [], Thresholds())
    assert (event.name, event.alarm) == ("edge_of_stability", False)
    assert "guide" in event.message
    watched = watch(*[0.1] * 12, 0.8)
    assert watched.alarm(31, 0.8, [snapshot_at(20, **held)]) is None
    assert watched.alarm(31, 0.8, [snapshot_at(20, **{**held, "rate_limited": False})]) is not None


def test_the_page_takes_no_metric_of_the_first_steps_for_one(tmp_path: Path) -> None:
    snapshots = (snapshot_at(0, edge=999.0), snapshot_at(20, edge=15.0))
    history = ca.CurvatureHistory(snapshots=snapshots, events=(), skipped=0, overhead=0.0)
    page = ca.training_page(history, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Nearest at step 20, with 75 % of it." in page


def test_alarms_carry_their_evidence_and_a_rate_of_false_ones() -> None:
    calm = [snapshot_at(20 + i) for i in range(3)]
    earlier = [*calm, snapshot_at(23, edge=80.0)]
    (event,) = events_of(snapshot_at(24, edge=70.0), earlier, Thresholds())
    assert event.alarm
    assert event.value == pytest.approx(3.5)
    assert event.evidence["of the threshold before"] == pytest.approx(4.0)
    assert event.false_alarm_rate is not None
    low, high = event.false_alarm_rate
    assert 0.0 <= low < high < 0.3


def watch(*rates: float) -> RateWatch:
    watched = RateWatch(Thresholds())
    for rate in rates:
        watched.see(rate)
    return watched


def test_a_rate_raised_between_two_measurements_is_an_alarm_at_once() -> None:
    last = snapshot_at(20, edge=10.0, learning_rate=0.1)  # half of the threshold
    assert watch(0.1, 0.2).alarm(21, 0.2, [last]) is None
    event = watch(0.1, 0.8).alarm(21, 0.8, [last])
    assert event is not None
    assert event.name == "spike_ahead"
    assert event.value == pytest.approx(4.0)
    # Muon's edge is a guide: healthy runs are far beyond it
    guide = snapshot_at(20, edge=10.0, learning_rate=0.1, edge_is_law=False)
    assert watch(0.1, 0.8).alarm(21, 0.8, [guide]) is None


def test_a_rate_above_the_one_a_run_settled_on_is_an_alarm_at_the_edge_only() -> None:
    settled = [0.1] * 12
    at_the_edge = snapshot_at(20, edge=18.0, learning_rate=0.1)
    assert watch(*settled, 0.109).alarm(25, 0.109, [at_the_edge]) is None
    event = watch(*settled, 0.13).alarm(25, 0.13, [at_the_edge])
    assert event is not None
    assert event.evidence == pytest.approx(
        {"rate": 0.13, "limit": 0.11, "of the threshold": 0.9 * 1.3}
    )
    below = snapshot_at(20, edge=8.0, learning_rate=0.1)
    assert watch(*settled, 0.13).alarm(25, 0.13, [below]) is None
    # the sharpest of the last snapshots counts, and a guide from five times the edge
    assert watch(*settled, 0.13).alarm(25, 0.13, [at_the_edge, below]) is not None
    assert watch(*settled, 0.13).alarm(25, 0.13, [at_the_edge, *[below] * 8]) is None
    for edge, alarms in ((60.0, False), (80.0, True)):
        guide = snapshot_at(15, edge=edge, learning_rate=0.1, edge_is_law=False)
        assert (watch(*settled, 0.13).alarm(25, 0.13, [guide]) is not None) == alarms


def test_curvature_gives_way_to_a_rate_that_rises_slowly() -> None:
    last = snapshot_at(20, edge=25.0, learning_rate=0.1)
    slow = [0.1] * 12 + [0.1 * 1.005**i for i in range(60)]
    assert watch(*slow).alarm(90, slow[-1], [last]) is None
    assert watch(*slow, 1.1 * slow[-1]).alarm(91, 1.1 * slow[-1], [last]) is not None


FALLING = [0.1 - 0.006 * i for i in range(16)]  # settles on 0.1 and leaves it, down to 0.01


def test_a_rate_that_comes_back_to_where_it_was_is_no_news() -> None:
    """Curvature that grew while the rate was low must stand twice as far beyond the edge."""
    grown = snapshot_at(20, edge=6.0, edge_threshold=20.0, learning_rate=0.01)
    for rate in (0.1, 0.12):
        assert watch(*FALLING, rate).alarm(36, rate, [grown]) is None  # 3.0 and 3.6 of the edge
    event = watch(*FALLING, 0.13).alarm(36, 0.13, [grown])  # more than the run has known
    assert event is not None
    assert event.evidence["limit"] == pytest.approx(2.5)
    far = snapshot_at(20, edge=11.0, edge_threshold=20.0, learning_rate=0.01)
    event = watch(*FALLING, 0.1).alarm(36, 0.1, [far])
    assert event is not None
    assert event.evidence["limit"] == pytest.approx(5.0)
    # without the way down it is a jump
    assert watch(*[0.01] * 12, 0.1).alarm(36, 0.1, [grown]) is not None


def test_a_return_lasts_twenty_steps_and_is_one_to_a_known_rate_only() -> None:
    back = watch(*FALLING)
    assert not back.returned(15)
    told = []
    for step in range(16, 46):
        back.see(0.1)
        told.append(step in back.returned(step))
        assert back.returned(step) == range(16, 36)
    assert told == [True] * 20 + [False] * 10
    # a run that settles beyond what it knew does not make that jump a return
    assert not watch(*FALLING, *[0.5] * 12).returned(27)
    # the same from stored snapshots, several steps each
    resumed = RateWatch(Thresholds())
    for rate, steps in ((0.1, 12), (0.02, 5), (0.1, 5)):
        resumed.see(rate, steps)
    assert resumed.returned(21) == range(17, 37)


def test_while_a_rate_returns_a_loss_must_stay_up() -> None:
    falling = [2.4, 2.2, 2.0, 1.8, 1.62, 1.45, 1.31, 1.2]

    def told(*values: float) -> list[str]:
        looks = list(enumerate(values))
        return [event.name for event in loss_events(looks, Thresholds(), returned=range(20))]

    assert losses(*falling, 3.0) == ["loss_spike"]
    assert told(*falling, 3.0) == []
    assert told(*falling, 3.0, 2.0) == ["loss_rising"]
    calm = [with_roles(i, query=1.0, value=1.0) for i in range(4)]
    exploded = with_roles(4, loss=2.1, query=50.0, value=1.0)
    assert names(exploded, calm) == ["exploding_block"]
    assert not list(events_of(exploded, calm, Thresholds(), returned=range(3, 23)))


@pytest.mark.parametrize("end", [24, 43])
def test_while_a_rate_returns_curvature_must_stay_beyond_the_edge(end: int) -> None:
    earlier = [snapshot_at(20 + i) for i in range(3)]
    told = []
    for step in (23, 24, 25):
        far = snapshot_at(step, edge=110.0)
        events = events_of(far, earlier, Thresholds(), returned=range(23, end))
        told.append([event.name for event in events])
        earlier.append(far)
    assert told == [["edge_of_stability"], ["spike_ahead"], []]
    assert names(snapshot_at(23, edge=110.0), earlier[:3]) == ["edge_of_stability", "spike_ahead"]


def test_a_warm_up_may_meet_the_edge_but_not_go_on_to_twice_the_rate() -> None:
    met = snapshot_at(20, edge=19.0, learning_rate=0.1)
    after = snapshot_at(25, edge=16.0, learning_rate=0.15)
    rising = [0.01 * i for i in range(1, 20)]
    assert watch(*rising).alarm(30, 0.19, [met, after]) is None
    event = watch(*rising, 0.2).alarm(31, 0.2, [met, after])
    assert event is not None
    assert "step 20" in event.message
    calm = snapshot_at(25, edge=5.0, learning_rate=0.15)  # curvature fell faster than it rose
    assert watch(*rising, 0.2).alarm(31, 0.2, [met, *[calm] * 8]) is None


def test_a_raised_rate_is_said_again_only_where_it_rose_by_half() -> None:
    watched, last = watch(*[0.1] * 12), snapshot_at(20, edge=19.0, learning_rate=0.1)
    told = []
    for step in range(21, 33):
        rate = 0.1 + 0.0101 * (step - 20)
        watched.see(rate)
        if watched.alarm(step, rate, [last]) is not None:
            told.append(round(rate, 2))
    assert told == [0.11, 0.17]


def test_losses_alarm_when_they_rise_beyond_their_usual_scatter() -> None:
    falling = [2.4, 2.2, 2.0, 1.8, 1.62, 1.45, 1.31, 1.2]
    assert losses(*falling) == []
    assert losses(*falling, 1.9) == []  # once may be chance
    assert losses(*falling, 1.9, 1.9) == ["loss_rising"]
    assert losses(*falling, 1.9, 1.9, 1.9) == []  # said once
    assert losses(*falling, 3.0) == ["loss_spike"]
    assert losses(*falling, math.nan) == ["loss_spike"]
    assert losses(*falling, 1.9, 1.9, loss_rising=2.0) == []
    noisy = [2.0, 1.3, 2.1, 1.2, 1.9, 1.3, 2.0]
    assert losses(*noisy, 1.8, 1.9) == []


def with_roles(step: int, loss: float = 1.0, **norms: float) -> Snapshot:
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    return snapshot_at(step, loss=loss, role_gradient=norms, gradient_norm=total)


def test_blocks_alarm_when_they_explode_and_lead_or_die_alone() -> None:
    calm = [with_roles(i, query=1.0, value=1.0, key_bias=1e-8) for i in range(4)]
    exploded = {"query": 50.0, "value": 1.0, "key_bias": 1e-8}
    assert names(with_roles(4, loss=2.1, **exploded), calm) == ["exploding_block"]
    assert names(with_roles(4, loss=0.9, **exploded), calm) == []  # it begins to learn
    # a block that grows with all the others, or that stays small, does not explode
    small = [with_roles(i, query=1e-3, value=1.0) for i in range(4)]
    assert names(with_roles(4, query=0.05, value=1.0), small) == []
    died = with_roles(4, query=1.0, value=1e-6, key_bias=1e-8)
    assert names(died, calm) == []
    again = with_roles(5, query=1.0, value=1e-6, key_bias=1e-8)
    assert names(again, [*calm, died]) == ["dead_block"]
    # training that converges takes every gradient with it
    late = [with_roles(4 + i, query=1e-6, value=1e-6, key_bias=1e-14) for i in range(2)]
    assert names(late[1], [*calm, late[0]]) == []


def test_a_gradient_that_is_zero_by_theory_never_alarms() -> None:
    calm = [with_roles(i, query=1.0, key_bias=1e-9) for i in range(4)]
    for rounding in (1e-5, 0.0, 1e-30, 3e-7):
        raised = [with_roles(4 + i, query=1.0, key_bias=rounding) for i in range(2)]
        assert names(raised[1], [*calm, raised[0]]) == []
