"""The first paper's figures made small: what is confirmed, and what a wrong number changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.studies.growth import pair_squares
from curvatlas.studies.papers import ormaniec_entries as pictures, ormaniec_growth as curves
from curvatlas.studies.papers.reproduction import Reproduction


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes do not depend on the width: 12 instead of 128, 8 sums, three models, four σ.

    The norms themselves do: they are left out.
    """
    monkeypatch.setattr(curves, "WIDTH", 12)
    monkeypatch.setattr(curves, "SAMPLES", 8)
    monkeypatch.setattr(curves.Size, "chosen", lambda size, full: (3, 2, 4))
    monkeypatch.setattr(curves, "_values", lambda *_, **__: [])
    monkeypatch.setattr(curves, "within_factor", lambda *_, **__: _said)
    monkeypatch.setattr(pictures, "seeds", lambda ask, count: range(1234, 1237))
    pictures.two_blocks.cache_clear()


_said = curves.near("norms are left out", 1.0, paper=1.0, within=0.1)


def _wrong_exponent(patch: pytest.MonkeyPatch) -> None:
    redraw = curves.redraw_embeddings
    patch.setattr(
        curves, "redraw_embeddings", lambda model, sigma, seed: redraw(model, sigma**1.2, seed=seed)
    )


def _without(part: str) -> Callable[[pytest.MonkeyPatch], None]:
    def drop(patch: pytest.MonkeyPatch) -> None:
        def measured(*arguments: Any, **options: Any) -> dict[str, Tensor]:
            found = pair_squares(*arguments, **options)
            other = "outer" if part == "functional" else "functional"
            return {**found, part: torch.zeros_like(found[part]), "total": found[other]}

        patch.setattr(curves, "pair_squares", measured)

    return drop


def _other_block(patch: pytest.MonkeyPatch) -> None:
    """The block of the queries stands where that of the values should."""

    def swapped(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        return {p: s.flip(0) for p, s in pair_squares(*arguments, **options).items()}

    patch.setattr(curves, "pair_squares", swapped)


def _with_softmax(patch: pytest.MonkeyPatch) -> None:
    make = zoo.ormaniec_gpt
    for module in (curves, pictures):
        patch.setattr(
            module, "ormaniec_gpt", lambda width, **o: make(width, **{**o, "softmax": True})
        )


def _swapped_roles(patch: pytest.MonkeyPatch) -> None:
    named = pictures.block
    other = {"value": "query", "query": "value"}
    patch.setattr(pictures, "block", lambda one, role: named(one, other.get(role, role)))


def _a_mean(patch: pytest.MonkeyPatch) -> None:
    """The norm of an MLP's block times σ: as if its error were not squared in the data."""
    patch.setattr(curves, "linear_mlp", _tilted(curves.linear_mlp))


def _tilted(make: Callable[[int], Any]) -> Callable[[int], Any]:
    def other(layers: int) -> Any:
        def problem(seed: int) -> Any:
            found, redraw = make(layers)(seed)
            return found, lambda sigma, draw: redraw(sigma**1.1, draw)

        return problem

    return other


@pytest.mark.parametrize(
    ("name", "perturb"),
    [
        ("ormaniec-fig3a", _wrong_exponent),
        ("ormaniec-fig3a", _without("functional")),
        ("ormaniec-fig3a", _other_block),
        ("ormaniec-growth-tables", _without("functional")),
        ("ormaniec-growth-tables", _other_block),
        ("ormaniec-depth", _wrong_exponent),
        ("ormaniec-no-softmax", _with_softmax),
        ("ormaniec-fig8", _a_mean),
        ("ormaniec-fig1a", _swapped_roles),
        ("ormaniec-fig4", _with_softmax),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_exponent_a_dropped_term_or_a_permuted_block_changes_the_verdict(
    name: str, perturb: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = _figure(name)
    assert "refuted" not in {one.verdict for one in right.findings}, right
    with monkeypatch.context() as patch:
        perturb(patch)
        pictures.two_blocks.cache_clear()
        wrong = _figures[name](curves.Ask())
    assert wrong.verdict == "refuted" or wrong.verdict.startswith("true only"), wrong


_figures: dict[str, Callable[[Any], Reproduction]] = {
    "ormaniec-fig1a": pictures.figure_1a,
    "ormaniec-fig3a": curves.figure_3a,
    "ormaniec-fig4": pictures.figure_4,
    "ormaniec-fig8": curves.figure_8,
    "ormaniec-depth": curves.depth,
    "ormaniec-growth-tables": curves.growth_tables,
    "ormaniec-no-softmax": curves.no_softmax,
}
_made: dict[str, Reproduction] = {}


def _figure(name: str) -> Reproduction:
    """Made once: several perturbations start from it."""
    if name not in _made:
        _made[name] = _figures[name](curves.Ask())
    return _made[name]


def test_pre_norm_makes_the_norms_fall() -> None:
    """The six slopes are those of width 128; at any width they are negative."""
    found = curves.figure_3b(curves.Ask())
    slopes = [one.value for one in found.findings if one.where == "all σ"]
    assert len(slopes) == 6
    assert all(slope < -0.2 for slope in slopes)


def test_linear_axes_are_linear() -> None:
    found = curves.linear_axes(curves.Ask())
    assert len(found.panels) == 12
    assert {panel.yscale for panel in found.panels} == {"linear"}


def test_figures_have_the_papers_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "WIDTH", 4)
    growth, maps = _figure("ormaniec-fig3a"), pictures.figure_1b(curves.Ask())
    assert [panel.title for panel in growth.panels] == [
        "V, H_o", "V, H_f", "V, H", "Q, H_o", "Q, H_f", "Q, H",
    ]  # fmt: skip
    assert growth.panels[1].note == "exactly 0"
    dashed = [m.label for p in growth.panels for m in p.marks if m.style == "dashed"]
    assert dashed == ["slope 2", "slope 2", "slope 6", "slope 5", "slope 5"]
    whole, attention = maps.panels
    assert whole.limits == attention.limits
    assert whole.blocks[2:6] == attention.blocks == ("Q", "K", "V", "O")
    assert len(growth.plot().axes) == 6


def test_a_model_of_ones_own_takes_the_place_of_the_papers() -> None:
    model = zoo.reference_gpt(
        vocabulary=12, context=8, d_model=8, n_heads=2, n_layers=1, norm="none"
    ).double()
    tokens = torch.randint(12, (8, 8), generator=torch.Generator().manual_seed(0))
    problem = ca.Problem(model, "cross_entropy", (tokens, tokens.roll(-1, 1)))
    tables = curves.growth_tables(curves.Ask(problem=problem))
    slope = tables.finding("slope of blocks.0.query × blocks.0.value H_o")
    assert slope.verdict == "confirmed", tables
    histogram = pictures.figure_1a(curves.Ask(problem=problem))
    assert [one.what for one in histogram.findings] == ["mode of V over mode of Q"]
    assert "GPT" in histogram.setting


def test_the_papers_model_has_its_parameters_and_its_norms_are_those_of_the_definition() -> None:
    model = zoo.ormaniec_gpt(16)
    assert sum(p.numel() for p in model.parameters()) == 3836
    assert all(not p.any() for n, p in model.named_parameters() if n.endswith("bias"))
    weights = torch.cat([p.flatten() for p in model.parameters() if p.ndim == 2])
    assert abs(float(weights.std()) - 0.2) < 0.01
    (batch,) = zoo.five_digit_addition(4)
    logits = model(batch.inputs)
    assert logits.shape == (4, 6, 12)
    whole = nn.CrossEntropyLoss()(logits.flatten(0, 1), batch.targets.flatten())
    assert float(whole) == pytest.approx(
        ca.Problem(model, "cross_entropy", [batch]).value(), rel=1e-5
    )
