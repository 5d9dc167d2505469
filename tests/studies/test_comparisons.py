"""One-call comparisons: the numbers are the atlases', the intervals are over seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import curvatlas as ca
from curvatlas.studies.comparisons import (
    QUANTITIES,
    compare,
    compare_checkpoints,
    compare_input_scale,
    compare_norm_placement,
    compare_softmax,
    compare_training,
    compare_with_mlp,
    spread_of,
)
from curvatlas.zoo import digits, reference_vit

CHEAP: dict[str, Any] = {"samples": 2, "seeds": (0,), "rtol": 1.0}


def test_a_spread_is_the_student_interval_of_the_mean() -> None:
    spread = spread_of([1.0, 2.0, 3.0])
    assert spread.mean == 2
    assert spread.interval[1] - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    ratio = spread_of([0.5, 2.0], ratio=True)
    assert ratio.mean == pytest.approx(1)
    assert ratio.interval[0] * ratio.interval[1] == pytest.approx(1)
    assert spread_of([4.0]).interval == (4, 4)


def test_a_comparison_reports_what_the_atlas_of_each_model_says() -> None:
    batch = digits().train.take(4)

    def maker(scale: float) -> Any:
        def make(seed: int) -> ca.Problem:
            model = reference_vit(seed=seed, d_model=4)
            return ca.Problem(model, "cross_entropy", (batch.inputs * scale, batch.targets))

        return make

    found = compare("scales", {"one": maker(1.0), "two": maker(2.0)}, seeds=(0, 1), rtol=1.0)
    alone = ca.atlas(maker(2.0)(1), method="sketch", rtol=1.0, seed=1)
    assert found["two"]["norm"].values[1] == pytest.approx(alone.view("model")["model"], rel=1e-6)
    assert found["two"]["loss"].values[0] == pytest.approx(maker(2.0)(0).value(), rel=1e-6)
    ratio = found.ratio("norm", "two", "one")
    assert ratio.values[0] == pytest.approx(
        found["two"]["norm"].values[0] / found["one"]["norm"].values[0]
    )
    assert all(label in str(found) for label in QUANTITIES.values())
    panels = [axes for axes in found.plot().axes if axes.images]
    assert len({axes.images[0].get_clim() for axes in panels}) == 1


@pytest.mark.parametrize(
    "call",
    [
        compare_norm_placement,
        compare_input_scale,
        compare_softmax,
        compare_with_mlp,
        compare_training,
    ],
)
def test_every_comparison_is_one_call(call: Any) -> None:
    extra: dict[str, Any] = {"steps": 3} if call is compare_training else {}
    if call is compare_norm_placement:
        extra = {"depth": 1}
    found = call(**CHEAP, **extra)
    assert len(found.rows) >= 2
    for row in found.rows.values():
        assert row["norm"].mean > 0
        assert 0 <= row["outer_share"].mean <= 1


def test_two_checkpoints_differ_and_the_model_keeps_its_weights() -> None:
    model = reference_vit(d_model=4)
    first = {k: v.clone() for k, v in model.state_dict().items()}
    second = {k: 2 * v for k, v in first.items()}
    batch = digits().train.take(4)
    found = compare_checkpoints(
        model, {"first": first, "second": second}, "cross_entropy",
        (batch.inputs, batch.targets), rtol=1.0,
    )  # fmt: skip
    assert found["first"]["norm"].mean != found["second"]["norm"].mean
    assert all(torch.equal(v, first[k]) for k, v in model.state_dict().items())
