from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import curvatlas as ca
from curvatlas.spectra.eigenpairs import CHECKED_EVERY, Following
from curvatlas.spectra.krylov import KrylovBasis
from curvatlas.zoo import ViT, ViTConfig, digits
from spectra.spectrum_operators import (
    DenseOperator,
    SpectrumOperator,
    most_misses,
    rotated,
    spectra,
)


def wanted(values: torch.Tensor, k: int, which: str) -> torch.Tensor:
    down = values.sort(descending=True).values
    if which == "largest":
        return down[:k]
    if which == "smallest":
        return down.flip(0)[:k]
    if which == "both":
        return torch.cat([down[:k], down[-k:]])
    return values[values.abs().argsort(descending=True)][:k]


@pytest.mark.parametrize("which", ["largest", "smallest", "both", "magnitude"])
@pytest.mark.parametrize("name", ["hessian_like", "heavy_tailed", "degenerate", "rank_deficient"])
def test_every_interval_contains_its_eigenvalue(name: str, which: str) -> None:
    values = spectra()[name]
    truth = wanted(values, 4, which)
    for seed in range(8):
        found = ca.eigenpairs(SpectrumOperator(values), k=4, which=which, seed=seed)
        assert found.converged
        got = found.values.abs() if which == "magnitude" else found.values
        want = truth.abs() if which == "magnitude" else truth
        assert bool(((got - want).abs() <= found.residuals).all()), (name, which, seed, found)
        low, high = found.interval
        assert bool((low <= found.values).all() and (found.values <= high).all())


def test_vectors_are_unit_columns_with_the_residuals_reported() -> None:
    matrix = rotated(spectra()["hessian_like"])
    found = ca.eigenpairs(DenseOperator(matrix), k=3, which="both", tol=1e-6)
    true = torch.linalg.vector_norm(matrix @ found.vectors - found.vectors * found.values, dim=0)
    assert found.vectors.shape == (800, 6)
    assert torch.allclose(found.vectors.norm(dim=0), torch.ones(6, dtype=torch.float64))
    assert bool((true <= found.residuals).all())
    assert bool((true >= 0.2 * (found.residuals - 1e-12)).all())


def test_all_copies_of_a_degenerate_eigenvalue_are_found() -> None:
    values = torch.cat([torch.tensor([5.0, 5, 5, 3, 3]), torch.linspace(-1, 1, 300)]).double()
    for seed in range(10):
        found = ca.eigenpairs(SpectrumOperator(values), k=5, tol=1e-6, seed=seed)
        assert torch.allclose(found.values, values[:5], atol=1e-5), (seed, found)


def test_one_run_serves_both_ends_within_55_products() -> None:
    # The trained ViT's shape: five large outliers, small negative ones, a bulk around zero.
    values = 0.1 * torch.randn(2500, generator=torch.Generator().manual_seed(0)).double()
    values = values.clamp(-0.35, 0.35)
    values[:20] = torch.logspace(1.93, -0.2, 20).double()
    values[20:26] = -torch.tensor([3.68, 1.77, 1.59, 1.43, 1.22, 0.9]).double()
    truth = wanted(values, 5, "both")
    for seed in range(5):
        found = ca.eigenpairs(SpectrumOperator(values), k=5, which="both", seed=seed)
        assert found.products <= 55, found.products
        assert bool((found.residuals <= 1.001e-4 * truth.max()).all())
        assert bool(((found.values - truth).abs() <= found.residuals).all())


def test_the_list_is_complete_where_it_says_so() -> None:
    # Copies of outliers are what a single start vector cannot see.
    values = 0.1 * torch.randn(600, generator=torch.Generator().manual_seed(1)).double()
    values[:7] = torch.tensor([9.0, 9, 7, 5, 5, 5, 3]).double()
    values[7:11] = torch.tensor([-4.0, -4, -2.5, -2]).double()
    whole = 0
    for seed in range(10):
        found = ca.eigenpairs(SpectrumOperator(values), k=4, which="both", seed=seed)
        low, high = found.complete_outside
        assert low < 0 < high
        high = max(high, float(found.largest.min()) + 0.01)
        low = min(low, float(found.smallest.max()) - 0.01)
        truth = values[(values > high) | (values < low)].sort().values
        reported = found.values[(found.values > high) | (found.values < low)].sort().values
        whole += len(truth) == len(reported) and torch.allclose(truth, reported, atol=1e-2)
        assert len(truth) >= 3
    assert whole >= 9, whole


def test_a_thorough_search_excludes_what_a_short_one_cannot() -> None:
    values = torch.cat([torch.tensor([2.0, 1.8, 1.8]), torch.linspace(-1, 1, 300)]).double()
    short = ca.eigenpairs(SpectrumOperator(values), k=3)
    thorough = ca.eigenpairs(SpectrumOperator(values), k=3, thorough=True)
    assert thorough.products >= short.products
    assert thorough.complete_outside[1] == pytest.approx(1.8, abs=1e-3)  # the innermost
    assert torch.allclose(thorough.values, values[:3], atol=1e-3)


@pytest.mark.parametrize("which", ["largest", "smallest", "both", "magnitude"])
def test_completeness_is_not_claimed_further_in_than_the_list_reaches(which: Any) -> None:
    # Outliers far beyond the rest: the search excludes much more than what was asked for.
    values = 1e-3 * torch.randn(500, generator=torch.Generator().manual_seed(3)).double()
    values[:6] = torch.tensor([9e5, 8e5, 7e5, 6e5, 5e5, 4e5]).double()
    values[6:10] = -torch.tensor([7.5e5, 6.5e5, 5.5e5, 4.5e5]).double()
    found = ca.eigenpairs(SpectrumOperator(values), k=2, which=which)
    low, high = found.complete_outside
    reached = {"largest": (-np.inf, 8e5), "smallest": (-6.5e5, np.inf), "both": (-6.5e5, 8e5)}
    expected = reached.get(which, (-8e5, 8e5))
    assert low == pytest.approx(expected[0], rel=1e-3)
    assert high == pytest.approx(expected[1], rel=1e-3)
    assert ("complete above 8" in str(found)) == (which != "smallest")
    if which in ("smallest", "both"):
        assert "below -6.5" in str(found) or "below -65" in str(found)


def test_a_list_that_was_not_searched_claims_no_completeness() -> None:
    values = spectra()["hessian_like"]
    found = ca.eigenpairs(SpectrumOperator(values), k=1, bounded=1e-2)
    assert found.converged
    assert "not searched" in str(found)
    assert "inf" not in str(found)


@pytest.mark.parametrize("name", ["hessian_like", "heavy_tailed", "power_law"])
def test_the_spectrum_lies_within_its_bounds_as_often_as_they_say(name: str) -> None:
    values = spectra()[name]
    inside = 0
    for seed in range(60):
        found = ca.eigenpairs(SpectrumOperator(values), k=1, tol=0.3, seed=seed)
        low, high = found.spectrum_within
        inside += low <= float(values.min()) and float(values.max()) <= high
    assert inside >= 60 - most_misses(60), inside
    near = ca.eigenpairs(SpectrumOperator(values), k=1, tol=0.3, bounded=1e-3)
    assert near.spectrum_within[1] <= (1 + 1.01e-3) * float(values.max())


def test_a_warm_start_needs_fewer_products() -> None:
    values = spectra()["hessian_like"]
    matrix = rotated(values)
    cold = ca.eigenpairs(DenseOperator(matrix), k=5)
    shift = 1e-3 * torch.eye(len(values), dtype=torch.float64)
    warm = ca.eigenpairs(DenseOperator(matrix + shift), k=5, start=cold.vectors)
    assert warm.converged
    assert torch.allclose(warm.values, wanted(values, 5, "largest") + 1e-3, atol=3e-3)
    assert warm.products < cold.products


def _sgd_run(steps: int) -> Iterator[tuple[ca.Hessian, torch.Tensor]]:
    """The Hessian and the weights of a small ViT after each step of SGD with momentum."""
    torch.manual_seed(0)
    data, model = digits(), ViT(ViTConfig(d_model=8, n_heads=2, d_ff=16))
    problem = ca.Problem(model, "cross_entropy", data.train.take(48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for step in range(steps):
        batch = slice(32 * step, 32 * step + 32)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.train.inputs[batch]), data.train.targets[batch])
        loss.backward()
        optimizer.step()
        yield ca.Hessian(problem), problem.parameters


def test_following_the_top_five_over_a_run_costs_a_third_of_cold_starts() -> None:
    following = Following(k=5, which="largest", tol=1e-2)
    warm, cold = 0, 0
    for step, (operator, weights) in enumerate(_sgd_run(12)):
        found = following.measure(operator, weights)
        if step == 0:
            continue  # a cold start as well
        anew = ca.eigenpairs(operator, k=5, tol=1e-2, data_error=False)
        assert found.converged
        vectors, limit = found.vectors.double(), 1.02e-2 * found.norm
        residuals = (operator @ found.vectors).double() - vectors * found.values
        assert float(residuals.norm(dim=0).max()) <= limit
        warm, cold = warm + found.products, cold + anew.products
    truth = torch.linalg.eigvalsh(operator.dense().double()).flip(0)[:5]
    assert torch.allclose(found.values, truth, atol=2 * limit)
    assert warm <= 0.35 * cold, (warm, cold)


def test_following_finds_an_eigenvalue_that_came_from_elsewhere() -> None:
    values = spectra()["hessian_like"].sort(descending=True).values
    following = Following(k=3, which="largest", tol=1e-6)
    found = [following.measure(SpectrumOperator(values)) for _ in range(3)]
    assert found[0].complete_outside[1] < np.inf
    assert found[1].products == 3
    assert "not searched" in str(found[1])
    values[-1] = 2 * values[0]  # orthogonal to all that is followed: no residual shows it
    later = [following.measure(SpectrumOperator(values)) for _ in range(CHECKED_EVERY)]
    assert later[0].value == pytest.approx(float(values[0]))
    assert later[-1].value == pytest.approx(float(values[-1]))


def test_following_goes_on_from_its_state_with_the_same_numbers() -> None:
    whole, first = (Following(k=2, which="both", tol=1e-3) for _ in range(2))
    second = Following(k=2, which="both", tol=1e-3)
    run = list(_states(6))
    expected = [whole.measure(op, at) for op, at in run]
    for op, at in run[:3]:
        first.measure(op, at)
    second.restore(first.state())
    for (op, at), want in zip(run[3:], expected[3:], strict=True):
        found = second.measure(op, at)
        assert torch.equal(found.values, want.values)
        assert found.products == want.products


def _states(count: int) -> Iterator[tuple[DenseOperator, torch.Tensor]]:
    """Matrices A + t B at the positions t."""
    values = spectra()["hessian_like"]
    matrix, change = rotated(values), rotated(values, seed=1)
    for step in range(count):
        at = torch.full((4,), 0.02 * step, dtype=torch.float64)
        yield DenseOperator(matrix + 0.02 * step * change), at


def test_a_path_of_matrices_is_followed_by_its_own_direction() -> None:
    still, along = (Following(k=4, which="largest", tol=1e-3) for _ in range(2))
    products = [0, 0]
    for op, at in _states(8):
        for i, found in enumerate((still.measure(op), along.measure(op, at))):
            products[i] += found.products
            assert found.converged
    assert products[1] < products[0]


def test_rows_multiplied_together_give_the_coefficients_of_one_by_one() -> None:
    matrix = rotated(spectra()["heavy_tailed"])
    bases = [KrylovBasis(DenseOperator(matrix), 20) for _ in range(2)]
    for basis in bases:
        for column in range(4):
            basis.add(torch.eye(len(matrix), dtype=torch.float64)[column])
    bases[0].expand_together(4)
    for _ in range(4):
        bases[1].expand()
    assert bases[0].products == bases[1].products == 4
    assert np.allclose(bases[0].coefficients, bases[1].coefficients, atol=1e-10)
    assert torch.allclose(bases[0].rows[:8], bases[1].rows[:8], atol=1e-8)


def test_a_small_memory_restarts_and_still_converges() -> None:
    values = spectra()["heavy_tailed"]
    few = 30 * len(values) * 8
    found = ca.eigenpairs(SpectrumOperator(values), k=4, which="both", memory=few, tol=1e-6)
    assert found.converged
    assert found.products > 30
    assert torch.allclose(found.values, wanted(values, 4, "both"), atol=1e-3)


def test_memory_that_holds_too_few_vectors_is_refused_with_what_would_do() -> None:
    values = spectra()["heavy_tailed"]
    row = len(values) * 8
    with pytest.raises(ValueError, match="need at least 25, give memory='101 kB'") as refused:
        ca.eigenpairs(SpectrumOperator(values), k=4, which="both", memory=20 * row)
    enough = str(refused.value).split("'")[1]
    found = ca.eigenpairs(SpectrumOperator(values), k=4, which="both", memory=enough)
    assert torch.allclose(found.values, wanted(values, 4, "both"), atol=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_basis_that_is_accepted_converges(seed: int) -> None:
    # A restart with two pending rows, in the step that turns them, kept where they were before.
    values = spectra()["heavy_tailed"]
    found = ca.eigenpairs(
        SpectrumOperator(values), k=4, which="both", memory=25 * 8 * len(values), seed=seed
    )
    assert found.converged
    low, high = found.interval
    inside = (low[:, None] <= values) & (values <= high[:, None])
    assert bool(inside.any(1).all())
    assert torch.allclose(found.values, wanted(values, 4, "both"), atol=0.05)


@pytest.mark.parametrize("which", ["largest", "smallest", "both", "magnitude"])
def test_a_restarted_run_on_an_operator_of_low_rank_is_not_called_asymmetric(which: Any) -> None:
    n, k, random = 150, 2, torch.Generator().manual_seed(0)
    wanted_pairs = 2 * k if which == "both" else k
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.float64)):
        for rank in (1, 12, 40):
            basis = torch.linalg.qr(torch.randn(n, rank, generator=random, dtype=torch.float64)).Q
            values = torch.randn(rank, generator=random, dtype=torch.float64)
            values = values if seed else values.abs()  # semi-definite: zero is its smallest value
            matrix = ((basis * values) @ basis.T).to(dtype)
            start = torch.randn(n, n // 2, generator=random, dtype=torch.float64).to(dtype)
            true = torch.linalg.eigvalsh(matrix.double())
            for rows, warm in ((9, None), (9, start), (20, None)):  # with 9 it only just restarts
                memory = (2 * wanted_pairs + rows) * n * dtype.itemsize
                found = ca.eigenpairs(
                    DenseOperator(matrix), k=k, which=which, memory=memory, seed=seed, start=warm
                )
                distance = (found.values.double()[:, None] - true).abs().amin(1)
                assert bool((distance <= found.residuals).all()), (seed, rank, rows)


def test_what_a_restart_keeps_of_the_start_goes_with_the_checkpoint() -> None:
    values = spectra()["heavy_tailed"]
    basis = KrylovBasis(SpectrumOperator(values), 12)
    basis.add_random(torch.Generator().manual_seed(0))
    while basis.count < 10:
        basis.expand()
    before = basis.asymmetry_of_start()
    basis.restart(np.arange(4), basis.ritz())
    twin = KrylovBasis(SpectrumOperator(values), 12)
    twin.restore(*basis.state())
    assert 0 < before == basis.asymmetry_of_start() == twin.asymmetry_of_start()


@pytest.mark.parametrize("device_bytes", [2**31, 2**36])
def test_the_basis_does_not_depend_on_what_is_free(
    device_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = spectra()["heavy_tailed"]
    before = ca.eigenpairs(SpectrumOperator(values), k=4, tol=1e-8)
    monkeypatch.setattr("curvatlas.budget._machine", lambda entry: {
        "MemTotal:": device_bytes, "MemAvailable:": 50_000,
    }[entry])  # fmt: skip
    after = ca.eigenpairs(SpectrumOperator(values), k=4, tol=1e-8)
    assert after.products == before.products
    assert torch.equal(after.values, before.values)


def test_float32_lanczos_of_300_steps_keeps_orthogonality_and_makes_no_ghosts() -> None:
    values = spectra()["hessian_like"].float()
    basis = KrylovBasis(SpectrumOperator(values), 302)
    basis.add_random(torch.Generator().manual_seed(0))
    for _ in range(300):
        basis.expand()
    rows = basis.rows[:300].double()
    assert float((rows @ rows.T - torch.eye(300)).norm()) <= 1e-5
    ritz = torch.from_numpy(basis.ritz().values)
    near = (ritz - values.max()).abs() < 1e-3 * values.max()
    assert int(near.sum()) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(50, 120), st.integers(1, 4), st.integers(0, 10_000))
def test_random_spectra_stay_within_their_certificates(n: int, k: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=random, dtype=torch.float64)
    found = ca.eigenpairs(SpectrumOperator(values), k=k, which="both", tol=1e-6, seed=seed)
    gaps = (found.values[:, None] - values[None]).abs().min(1).values
    assert bool((gaps <= found.residuals).all())


def test_an_exhausted_budget_returns_what_was_reached() -> None:
    values = spectra()["hessian_like"]
    found = ca.eigenpairs(SpectrumOperator(values), k=5, max_products=8)
    assert not found.converged
    assert found.products == 8
    assert "NOT converged" in str(found)
    near = (found.values[:, None] - values[None]).abs().min(1).values
    assert bool((near <= found.residuals).all())


def test_the_zero_operator_has_zero_eigenvalues() -> None:
    found = ca.eigenpairs(SpectrumOperator(torch.zeros(200)), k=3, which="both")
    assert found.converged
    assert found.products < 30
    assert torch.equal(found.values, torch.zeros(6, dtype=torch.float64))


def test_all_eigenvalues_come_from_the_dense_matrix() -> None:
    values = torch.linspace(-1, 2, 80, dtype=torch.float64)
    found = ca.eigenpairs(SpectrumOperator(values), k=80)
    assert found.exact
    assert torch.allclose(found.values, values.flip(0), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"k": 0}, "k must"), ({"k": 201}, "k must"), ({"which": "top"}, "which must"),
     ({"tol": 0.0}, "tol must"), ({"max_products": 0}, "max_products"),
     ({"k": 2.5}, "k must"), ({"bounded": 0.0}, "bounded must")],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ca.eigenpairs(SpectrumOperator(torch.ones(200)), **options)  # type: ignore[arg-type]


def test_nan_from_a_product_is_an_error() -> None:
    values = torch.ones(200)
    values[7] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        ca.eigenpairs(SpectrumOperator(values), k=2)


def test_a_non_symmetric_operator_is_refused_by_tag_and_by_measurement() -> None:
    matrix = torch.randn(200, 200, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(ValueError, match="symmetric"):
        ca.eigenpairs(DenseOperator(matrix, symmetric=False), k=2)
    with pytest.raises(ValueError, match="not symmetric"):
        ca.eigenpairs(DenseOperator(matrix, symmetric=True), k=2)
