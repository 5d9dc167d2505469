"""Small seeded forms of ``make drill`` and ``make sweep``."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import script_loading

SCRIPTS = script_loading.ROOT / "scripts"


@pytest.mark.parametrize(
    ("part", "scale"),
    [("kills", 0.05), ("disk", 0.03), ("memory", 0.1), ("fuzz", 0.02), ("writers", 0.05)],
)
def test_nothing_is_lost_or_wrong_in_a_small_drill(part: str, scale: float) -> None:
    drill = script_loading.load(SCRIPTS / "drill.py")
    told = [case for case in drill.PARTS[part](scale, random.Random(1)) if case[0] != "survived"]
    assert not told


def test_a_small_sweep_finds_nothing_silently_wrong() -> None:
    sweep = script_loading.load(SCRIPTS / "sweep.py")
    verdicts = list(sweep.verdicts(sweep.products_case, 25, 10_000))
    assert not [case for case in verdicts if case[1] in ("WRONG", "CRASHED")]
    assert Counter(verdict for _, verdict, _ in verdicts)["equal"] >= 20


@pytest.mark.huggingface
def test_labelled_batches_are_never_silently_read_otherwise() -> None:
    sweep = script_loading.load(SCRIPTS / "sweep.py")
    verdicts = list(sweep.verdicts(sweep.labels_case, 40, 10_000))
    assert not [case for case in verdicts if case[1] in ("WRONG", "CRASHED")]
    assert Counter(verdict for _, verdict, _ in verdicts)["equal"] >= 15


@pytest.mark.huggingface
def test_hand_written_layers_of_every_family_equal_double_backward() -> None:
    sweep = script_loading.load(SCRIPTS / "sweep.py")
    verdicts = list(sweep.verdicts(sweep.layers_case, 57, 57 * 200))
    assert not [case for case in verdicts if case[1] in ("WRONG", "CRASHED")]
    assert Counter(verdict for _, verdict, _ in verdicts)["equal"] >= 50


@pytest.mark.huggingface
def test_whole_models_of_many_families_are_the_same_by_both_engines() -> None:
    sweep = script_loading.load(SCRIPTS / "sweep.py")
    verdicts = [(seed, *sweep.models_case(seed)) for seed in range(9900, 9957, 3)]
    assert not [case for case in verdicts if case[1] in ("WRONG", "CRASHED")]
    assert Counter(verdict for _, verdict, _ in verdicts)["equal"] >= 14
