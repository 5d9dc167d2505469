"""The list of what can be reproduced: ids, verdicts, runs that go on, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import curvatlas as ca
from curvatlas import zoo
from curvatlas.errors import ProblemError
from curvatlas.studies.papers import exhibits
from curvatlas.studies.papers.exhibits import Ask, Exhibit, all_exhibits
from curvatlas.studies.papers.reproduction import (
    Finding,
    Mark,
    Panel,
    Reproduction,
    finding,
    joint_verdict,
    near,
    tensor,
    together,
    within_factor,
)
from curvatlas.theory import statements_by_paper_id


def _finding(verdict: str, where: str = "") -> Finding:
    return Finding(
        what="slope", value=2.0, low=1.9, high=2.1, paper="2", accepted=(1.9, 2.1),
        verdict=verdict, where=where,
    )  # fmt: skip


def _made(name: str, *findings: Finding) -> Reproduction:
    x = tensor([0.01, 0.1, 1.0])
    mark = Mark(x=x, y=x**2, low=x**2 * 0.9, high=x**2 * 1.1)
    panel = Panel(title="V", xlabel="σ", xscale="log", yscale="log", marks=(mark,))
    return Reproduction(
        id=name, shows="growth", source="a paper", claim="σ²", findings=findings, panels=(panel,),
        setting="two models", smaller=("2 of 20 models",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "interval", "verdict"),
    [
        (2.01, (1.95, 2.07), "confirmed"),
        (2.01, (1.85, 2.17), "undecided"),
        (2.30, (2.25, 2.35), "refuted"),
        (2.05, None, "confirmed"),
        (2.11, None, "refuted"),
        (math.nan, None, "undecided"),
    ],
)
def test_a_number_is_judged_by_its_whole_interval(
    value: float, interval: Any, verdict: str
) -> None:
    assert near("slope", value, interval, paper=2.0, within=0.1).verdict == verdict


def test_a_factor_is_judged_on_both_sides() -> None:
    assert within_factor("mode", 3.0, paper=2.0).verdict == "confirmed"
    assert within_factor("mode", 4.1, paper=2.0).verdict == "refuted"
    assert within_factor("mode", 0.9, paper=2.0).verdict == "refuted"
    assert finding("gap", 12.0, paper="≥ 10", accepted=(10, math.inf)).verdict == "confirmed"


def test_findings_together_confirm_refute_or_hold_in_a_regime() -> None:
    good, bad, open_ = map(_finding, ("confirmed", "refuted", "undecided"))
    assert joint_verdict([good, good]) == "confirmed"
    assert joint_verdict([good, bad]) == "refuted"
    assert joint_verdict([good, open_]) == "undecided"
    assert joint_verdict([]) == "undecided"
    small, large = _finding("confirmed", "σ ≤ 0.1"), _finding("refuted", "σ > 1")
    assert joint_verdict([small, small, large]) == "true only where σ ≤ 0.1"
    assert joint_verdict([_finding("undecided", "σ ≤ 0.1"), large]) == "refuted"
    assert joint_verdict([good, _finding("true only as corrected")]) == "true only as corrected"


def test_parts_of_a_figure_become_one_result_that_keeps_them_apart() -> None:
    both = together(
        "x-fig3",
        [_made("x-fig3a", _finding("confirmed")), _made("x-fig3b", _finding("refuted", "σ > 1"))],
    )
    assert [one.where for one in both.findings] == ["3a", "3b, σ > 1"]
    assert both.verdict == "true only where 3a"
    assert len(both.panels) == 2
    assert both.smaller == ("2 of 20 models",)


def test_a_reproduction_prints_tabulates_draws_and_is_stored_whole(tmp_path: Path) -> None:
    made = _made("x-fig3a", _finding("confirmed"))
    assert "x-fig3a: confirmed" in str(made)
    assert "smaller than the paper: 2 of 20" in str(made)
    assert made.table()["verdict"] == ["confirmed"]
    assert made.to_dict()["verdict"] == "confirmed"
    assert len(made.plot().axes) == 1
    loaded = ca.load(made.save(tmp_path / "made"))
    assert str(loaded) == str(made)
    with pytest.raises(KeyError, match="slope"):
        made.finding("intercept")


def test_the_list_has_every_numbered_claim_and_its_ids_are_those_of_the_papers() -> None:
    table = ca.paper.list()
    assert table.columns == ("id", "shows", "claim", "time here")
    assert set(statements_by_paper_id()) <= set(table["id"])
    assert len(set(table["id"])) == len(table)
    numbers = [name for name in table["id"] if name.startswith("petrov-thm")]
    assert numbers.index("petrov-thm9") + 1 == numbers.index("petrov-thm10")


def test_an_unknown_id_is_answered_with_the_three_nearest() -> None:
    with pytest.raises(ValueError, match="petrov-thm3, petrov-thm") as caught:
        ca.paper("petrov-thm33")
    assert str(caught.value).count("petrov-") == 1 + 3


def test_a_theorem_shows_its_statement_and_the_verdict_of_its_check() -> None:
    true, corrected = ca.paper("petrov-thm3"), ca.paper("petrov-thm7")
    assert true.verdict == "confirmed"
    assert "∂²LN" in true.claim
    assert true.findings[0].value < 1e-12
    assert corrected.verdict == "true only as corrected"
    assert any("counterexample" in note for note in corrected.notes)


def _registered(monkeypatch: pytest.MonkeyPatch, *made: Exhibit) -> None:
    every = {one.id: one for one in made}
    monkeypatch.setattr(exhibits, "all_exhibits", lambda: every)


def test_what_is_stored_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    stop = [True]

    def first(ask: Ask) -> Reproduction:
        calls.append("a")
        return _made("petrov-a", _finding("confirmed"))

    def second(ask: Ask) -> Reproduction:
        part = ask.step("part", lambda: calls.append("part") or _made("p", _finding("confirmed")))
        if stop:
            raise KeyboardInterrupt
        return part

    common: Any = {"shows": "x", "claim": "σ²", "source": "x", "seconds": 1.0}
    _registered(
        monkeypatch,
        Exhibit(id="petrov-fig1a", make=first, **common),
        Exhibit(id="petrov-fig1b", make=second, **common),
    )
    with pytest.raises(KeyboardInterrupt):
        ca.paper("petrov-fig1", output=tmp_path / "run")
    stop.clear()
    result = ca.paper("petrov-fig1", output=tmp_path / "run")
    assert calls == ["a", "part"]
    assert result.id == "petrov-fig1"
    assert len(result.findings) == 2


def test_a_model_without_attention_is_refused_in_one_line() -> None:
    data = zoo.digits().train.take(8)
    problem = ca.Problem(zoo.MLP(), "cross_entropy", data)
    with pytest.raises(ProblemError) as caught:
        Ask(problem=problem).attention("ormaniec-fig3a")
    text = str(caught.value)
    assert "no query or value" in text
    assert "\n" not in text
    assert Ask().attention("ormaniec-fig3a") is None


def test_what_takes_no_model_says_so() -> None:
    data = zoo.digits().train.take(8)
    problem = ca.Problem(zoo.reference_vit(), "cross_entropy", data)
    with pytest.raises(ValueError, match="takes no --model"):
        ca.paper("petrov-thm3", problem=problem)
    with pytest.raises(ValueError, match="takes no --data"):
        ca.paper("petrov-thm3", data="somewhere")


def test_every_exhibit_says_what_it_shows_and_how_long_it_takes() -> None:
    for one in all_exhibits().values():
        assert all((one.shows, one.claim, one.source)), one.id
        assert 0 < one.seconds < 150, one.id
    assert sum(one.seconds for one in all_exhibits().values()) <= 12 * 60
