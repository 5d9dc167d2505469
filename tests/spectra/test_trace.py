from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import curvatlas as ca
from curvatlas.spectra.trace import TraceSampler
from spectra.spectrum_operators import SpectrumOperator, deflate, most_misses, rotated, spectra


@pytest.mark.parametrize(
    ("name", "rtol"),
    [("hessian_like", 0.1), ("heavy_tailed", 0.3), ("degenerate", 0.1), ("power_law", 0.1)],
)
def test_the_interval_covers_the_truth_in_200_trials_as_often_as_it_says(
    name: str, rtol: float
) -> None:
    values = spectra()[name]
    truth = float(values.sum())
    covered = 0
    for seed in range(200):
        found = ca.trace(SpectrumOperator(values), rtol=rtol, seed=seed, max_products=250)
        covered += found.interval[0] <= truth <= found.interval[1]
    # 95 % intervals cover all 200 with a chance of 4e-5
    assert 200 - most_misses(200) <= covered <= 199, (name, covered)


def test_deflation_beats_plain_probes() -> None:
    values = spectra()["hessian_like"]
    truth, square = float(values.sum()), float((values**2).sum())
    found = [ca.trace(SpectrumOperator(values), rtol=0.01, seed=s) for s in range(5)]
    plain = 2 * square * (1.96 / (0.01 * truth)) ** 2
    assert all(f.converged and not f.exact for f in found)
    assert all(abs(f.value - truth) <= 0.02 * truth for f in found)
    assert max(f.products for f in found) < plain / 10


def test_a_matrix_at_hand_gives_the_exact_trace_without_products() -> None:
    matrix = rotated(spectra()["flat"])
    found = ca.trace(ca.MatrixOperator(matrix))
    assert found.exact
    assert found.products == 0
    assert found.interval[0] <= float(matrix.diagonal().sum()) <= found.interval[1]


def test_a_trace_near_zero_is_read_exactly_instead_of_sampled_forever() -> None:
    values = torch.linspace(-1, 1, 300, dtype=torch.float64)
    values = torch.cat([values, torch.tensor([1e-3], dtype=torch.float64)])
    found = ca.trace(SpectrumOperator(values))
    assert found.exact
    assert found.value == pytest.approx(1e-3, rel=1e-9)


def test_an_exhausted_budget_is_said() -> None:
    values = torch.linspace(-1, 1.01, 3000, dtype=torch.float64)
    found = ca.trace(SpectrumOperator(values), max_products=40)
    assert not found.converged
    assert found.products <= 40
    assert found.interval[0] < found.value < found.interval[1]
    assert "NOT converged" in str(found)


def test_a_single_product_still_gives_a_result() -> None:
    found = ca.trace(SpectrumOperator(spectra()["flat"]), max_products=1)
    assert not found.converged
    assert found.products == 1


def test_the_zero_operator_has_trace_zero() -> None:
    found = ca.trace(SpectrumOperator(torch.zeros(100)))
    assert found.value == 0.0


def test_nan_and_wrong_options_are_refused() -> None:
    values = torch.ones(100)
    with pytest.raises(ValueError, match="rtol"):
        ca.trace(SpectrumOperator(values), rtol=0.0)
    values[3] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        ca.trace(SpectrumOperator(values))


def test_float32_agrees_with_float64() -> None:
    values = spectra()["hessian_like"]
    found = ca.trace(SpectrumOperator(values.float()), rtol=0.02)
    assert found.value == pytest.approx(float(values.sum()), rel=0.04)


def test_a_million_columns_are_estimated_with_the_default_options() -> None:
    # A basis of n rows would be 4 TB.
    values = torch.linspace(0.5, 1.5, 1_000_000)
    values[:3] = torch.tensor([3e4, 1e4, -5e3])
    found = ca.trace(SpectrumOperator(values))
    assert found.converged
    assert found.interval[0] <= float(values.double().sum()) <= found.interval[1]


def test_a_trace_near_zero_ends_at_the_default_cap() -> None:
    values = torch.linspace(-1, 1, 3000, dtype=torch.float64)
    operator = SpectrumOperator(values)
    found = ca.trace(operator)
    assert operator.products == found.products <= 300
    assert not found.converged
    assert found.interval[0] <= 0.0 <= found.interval[1]


@pytest.mark.parametrize(("vectors", "products"), [(12, 40), (24, 60), (60, 120)])
def test_the_interval_covers_the_truth_where_memory_holds_few_vectors(
    vectors: int, products: int
) -> None:
    values = spectra()["hessian_like"]
    truth, bytes_of = float(values.sum()), 8 * len(values)
    covered = 0
    for seed in range(40):
        found = ca.trace(
            SpectrumOperator(values), rtol=0.02, seed=seed, max_products=products,
            memory=vectors * bytes_of,
        )  # fmt: skip
        assert found.products <= products
        covered += found.interval[0] <= truth <= found.interval[1]
    assert covered >= 40 - most_misses(40), covered


def test_letting_the_probes_go_changes_nothing_but_rounding() -> None:
    op = SpectrumOperator(spectra()["heavy_tailed"])
    held, let_go = (
        TraceSampler(op, 40, torch.Generator().manual_seed(3), room=room) for room in (400, 44)
    )
    for sampler in (held, let_go):
        deflate(sampler, 10)
        for _ in range(8):
            assert (sampler.probe(4) or sampler.probe(4)) == 4
    assert len(let_go.let_go) > 1
    assert not held.let_go
    few, all_pairs = let_go.rest(), held.rest()
    assert few.values == pytest.approx(all_pairs.values, rel=1e-12)
    assert few.centred == pytest.approx(all_pairs.centred, rel=1e-12)


def test_bands_of_entries_give_the_same_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TraceSampler(
        SpectrumOperator(spectra()["hessian_like"]), 40, torch.Generator().manual_seed(3), room=400
    )
    deflate(sampler, 10)
    sampler.probe(7)
    at_once = sampler.rest()
    monkeypatch.setattr("curvatlas.spectra.deflated._BAND", 500)
    banded = sampler.rest()
    for name in ("values", "centred", "third", "fourth"):
        assert getattr(banded, name) == pytest.approx(getattr(at_once, name), rel=1e-11), name


def test_too_little_memory_is_refused_with_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"holds 8 vectors of 6\.4 kB: trace needs at least 12"):
        ca.trace(SpectrumOperator(spectra()["hessian_like"]), memory=8 * 6400)


def test_what_an_estimate_prints_has_its_error_or_says_that_it_is_exact() -> None:
    matrix = ca.MatrixOperator(torch.eye(3, dtype=torch.float64))
    assert str(ca.trace(matrix)).startswith("trace = 3 (exact)")
    values = spectra()["hessian_like"]
    sampled = ca.trace(SpectrumOperator(values), rtol=0.2)
    assert not sampled.exact
    assert re.fullmatch(r"trace = [-\d.]+ (± |\[)[-\d., \]]+ \(95 %\), \d+ products", str(sampled))
    free = dataclasses.replace(sampled, products=0, method="tr H − tr H_o")
    assert str(free).endswith("(95 %), by tr H − tr H_o")  # nothing of its own, and no "0 products"
