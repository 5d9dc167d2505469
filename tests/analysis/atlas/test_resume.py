"""A map that was stopped goes on with the same numbers; its traces agree with what is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import curvatlas as ca
from curvatlas.analysis.atlas import mapping
from curvatlas.analysis.atlas.mapping import atlas, with_known_traces
from curvatlas.analysis.atlas.result import blocks_of
from curvatlas.results import same
from digit_problems import vit_problem

_SKETCH: dict[str, Any] = {"method": "sketch", "biases": False, "rtol": 0.3, "worst": None}


@pytest.mark.parametrize("stop", [1, 7])
def test_a_map_that_was_stopped_goes_on_with_the_same_numbers(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = vit_problem(8)
    whole = atlas(problem, **_SKETCH)
    columns = mapping.Sketch.probe_column
    count = 0

    def stopped(self: Any, j: int, probes: int) -> None:
        nonlocal count
        count += 1
        if count == stop + 1:
            raise KeyboardInterrupt
        columns(self, j, probes)

    monkeypatch.setattr(mapping.Sketch, "probe_column", stopped)
    with pytest.raises(KeyboardInterrupt):
        atlas(problem, checkpoint=tmp_path / "map.safetensors", **_SKETCH)
    before = count
    again = atlas(problem, checkpoint=tmp_path / "map.safetensors", **_SKETCH)
    assert same(again, whole)
    assert count - before < whole.products / 5 + 1  # what was probed before is not probed again


def test_known_traces_make_the_roles_sum_to_them_and_are_never_negative_for_the_outer_part() -> (
    None
):
    problem = vit_problem(8)
    blocks = blocks_of(problem.anatomy, biases=False)
    found = atlas(problem, **_SKETCH)
    diagonal = {
        part: op.dense().diagonal()
        for part, op in (("outer", ca.GaussNewton(problem)), ("total", ca.Hessian(problem)))
    }
    functional = float((diagonal["total"] - diagonal["outer"]).sum())
    known = with_known_traces(
        found, blocks, outer=diagonal["outer"], traces={"functional": (functional, 0.0)}
    )
    total, scale = float(diagonal["total"].sum()), float(diagonal["total"].abs().sum())
    for view in ("block", "role", "layer"):
        entry = known.view(view, "trace", "total")
        assert float(entry.values.sum()) == pytest.approx(total, abs=1e-9 * scale)
        outer = known.view(view, "trace", "outer")
        assert torch.equal(outer.low, outer.values)
        assert float(outer.low.min()) >= 0
    exact = torch.stack([diagonal["outer"][b.indices].sum() for b in blocks])
    assert torch.allclose(known.trace["outer"].values, exact, atol=1e-12 * scale)
    truth = torch.stack([diagonal["total"][b.indices].sum() for b in blocks])
    entry, room = known.trace["total"], 1e-12 * scale
    held = (entry.low - room <= truth) & (truth <= entry.high + room)
    assert float(held.double().mean()) > 0.9  # 0.99 over forty seeds
