"""The command: table, JSON, pictures, and a non-zero end when a verdict differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from curvatlas.theory import statements as registry
from curvatlas.theory.statements import HOLDS, describe, find, run_verify

QUICK = ("softmax-derivative", "theorem-7-segment", "growth-input-outer")


def test_entries_json_and_pictures_are_written(tmp_path: Path) -> None:
    result = run_verify(QUICK, output=tmp_path)
    assert result.agrees
    listed = json.loads((tmp_path / "verify.json").read_text(encoding="utf-8"))
    assert [e["name"] for e in listed] == list(QUICK)
    for entry in listed:
        assert {"name", "source", "verdict", "figure", "recorded", "derivation"} <= set(entry)
    assert (tmp_path / "figures" / "growth-input-outer.png").stat().st_size > 5_000
    assert "every verdict is the recorded one" in str(result)
    assert all(name in str(result) for name in QUICK)


def test_a_wrong_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = find("softmax-derivative")
    wrong = dataclasses.replace(true, verdict=HOLDS)
    monkeypatch.setattr(registry, "all_statements", lambda: (wrong,))
    result = run_verify([true.name])
    assert not result.agrees
    assert "differ from the recorded verdict" in str(result)


def test_a_check_that_breaks_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(effort: object) -> object:
        raise RuntimeError("no such thing")

    true = find("relu-lemma")
    wrong = dataclasses.replace(true, check=broken)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "all_statements", lambda: (wrong,))
    result = run_verify([true.name])
    assert not result.agrees
    assert "no such thing" in result.entries[0]["figure"]


def test_one_statement_is_shown_at_length() -> None:
    text = describe(run_verify(["theorem-7-assumption"]).entries[0])
    assert "docs/theory/derivations.md#14-one-more-sample" in text
    assert "counterexample" in text
    assert "measured" in text


def test_an_unknown_statement_is_refused() -> None:
    with pytest.raises(ValueError, match="no statement is called"):
        run_verify(["pythagoras"])
