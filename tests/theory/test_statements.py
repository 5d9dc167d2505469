"""The registry: complete, and every check measures the recorded verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from curvatlas.theory.statements import (
    CORRECTED,
    FALSE,
    HOLDS,
    UNCONFIRMED,
    VERDICTS,
    Statement,
    all_statements,
    find,
    judge,
    statements_by_paper_id,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "theory"
SLOW = {"token-structured-bound", "norm-and-condition-against-data-size"}
ALL = [
    pytest.param(s, id=s.name, marks=[pytest.mark.slow] if s.name in SLOW else [])
    for s in all_statements()
]
# The least to cover: a topic that vanishes is noticed here.
REQUIRED = {
    "attention-outer-blocks", "attention-functional-blocks", "attention-key-blocks",
    "softmax-derivative", "attention-moments", "layer-norm-jacobian", "layer-norm-hessian",
    "relu-lemma", "block-derivatives", "block-hessian-25-blocks", "theorem-1-draft", "theorem-6",
    "data-free-bound", "token-structured-bound", "stack-bounds", "theorem-7-quadratic",
    "theorem-7-segment", "theorem-7-assumption", "loss-difference-slope", "growth-input-outer",
    "growth-input-functional", "growth-weights", "growth-saturation", "linear-attention-growth",
    "linear-mlp-data-dependence", "data-dependence-grows-with-depth", "pre-norm-partial-fix",
    "scalar-spectrum", "gamma-bulk", "gauss-newton-blind-to-bulk", "gauss-newton-top-eigenvalue",
    "sinks-stretch-the-spectrum", "many-zero-blocks", "block-diagonal-dominance",
    "layer-norm-bounds-curvature", "norm-and-condition-against-data-size",
    "extension-cross-entropy", "extension-multi-head", "extension-causal", "extension-rms-swiglu",
    "third-order-normalisation", "third-order-attention", "taylor-remainder",
    "attention-one-matrix", "attention-two-matrices", "attention-rank",
    "attention-second-derivative", "layer-norm-norm-bounds", "theorem-1-published",
    "theorem-1-lines", "theorem-6-residual", "block-sublayer-norms", "linear-pair-spectrum",
    "relu-pair-spectrum",
}  # fmt: skip


@pytest.mark.parametrize("item", ALL)
def test_the_measured_verdict_is_the_recorded_one(item: Statement) -> None:
    outcome = item.run()
    assert outcome.verdict == item.verdict, outcome.figure
    assert outcome.figure
    assert outcome.numbers


def test_every_required_topic_has_its_statement() -> None:
    assert {s.name for s in all_statements()} >= REQUIRED


def test_statements_are_complete_and_uniquely_named() -> None:
    names = [s.name for s in all_statements()]
    assert len(names) == len(set(names))
    for s in all_statements():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", s.name)
        assert s.verdict in VERDICTS
        for text in (s.source, s.title, s.formula, s.assumptions, s.tested_by):
            assert text.strip(), s.name
        assert bool(s.counterexample) == (s.verdict != HOLDS), s.name


def test_every_number_of_the_papers_leads_to_its_statements() -> None:
    table = statements_by_paper_id()
    assert [s.name for s in table["petrov-thm3"]] == ["layer-norm-hessian"]
    assert {f"petrov-thm{n}" for n in range(1, 11)} <= set(table)
    assert {f"petrov-prop{n}" for n in range(2, 11)} | {"petrov-lemma2", "petrov-lemma4"} <= set(
        table
    )
    assert {f"ormaniec-{n}" for n in ("lemma-4.1", "remark-d.1", "lemma-d.2")} <= set(table)
    assert {f"cracking-thm-3.{n}" for n in (1, 4, 5)} <= set(table)
    for paper_id, statements in table.items():
        assert re.fullmatch(r"(petrov|ormaniec|cracking)(-[a-z0-9.]+)+", paper_id)
        assert all(paper_id in s.papers for s in statements)


def test_every_derivation_link_leads_to_a_section() -> None:
    text = (DOCS / "derivations.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).strip().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("## ")
    }
    for s in all_statements():
        page, _, anchor = s.derivation.partition("#")
        assert page == "docs/theory/derivations.md"
        assert anchor in anchors, (s.name, anchor)


def test_a_verdict_follows_from_what_was_measured() -> None:
    assert judge(printed=True) == HOLDS
    assert judge(printed=False) == FALSE
    assert judge(printed=False, corrected=True) == CORRECTED
    assert judge(printed=True, corrected=True) == HOLDS
    assert judge(printed=True, corrected=False) == UNCONFIRMED
    assert judge(printed=False, corrected=False) == UNCONFIRMED


def test_an_unknown_name_is_answered_with_the_three_nearest() -> None:
    with pytest.raises(ValueError, match="theorem-7-segment"):
        find("theorem-7")
    with pytest.raises(ValueError, match="petrov-thm3"):
        find("petrov-thm33")


def test_a_number_of_a_paper_names_its_statement() -> None:
    assert find("petrov-thm3") is find("layer-norm-hessian")
    assert find("cracking-thm-3.5") is find("scalar-spectrum")


def test_a_check_repeats_itself_for_the_same_seed_and_moves_with_another() -> None:
    item = find("norm-and-block-maximum")
    assert item.run(seed=3).numbers == item.run(seed=3).numbers
    assert item.run(seed=3).numbers != item.run(seed=4).numbers
