"""Convergence with the number of samples: per-sample curvature, curves, controls, stable k."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from curvatlas.analysis.landscape.convergence import (
    Bins,
    _square_weights,
    curve,
    differences,
    first_stable,
    landscape_convergence,
    matched_noise,
    matched_vectors,
    random_orders,
    squared_steps,
)
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import subset
from digit_problems import vit_problem


def test_differences_are_those_of_the_running_means() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 2500  # more than two slices of the streamed sum
    values = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    counts = torch.randint(1, 5, (size,), generator=generator).double()
    order = torch.randperm(size, generator=generator)
    weights = torch.tensor([1.0, 3.0], dtype=torch.float64)
    single = torch.stack([differences(values[:, j], counts, order) for j in range(2)], dim=1)
    squares = squared_steps(values.__getitem__, counts, order, weights)
    assert single.shape == (size - 1, 2)
    assert squares.shape == (size - 1,)
    for k in (1, 7, 29, 1023, 1024, 1025, 2048, 2499):
        means = [
            (counts[order[:j], None] * values[order[:j]]).sum(0) / counts[order[:j]].sum()
            for j in (k, k + 1)
        ]
        assert torch.allclose(single[k - 1], means[1] - means[0], atol=1e-14)
        want = float((weights * (means[1] - means[0]) ** 2).sum())
        assert squares[k - 1] == pytest.approx(want, rel=1e-9)


def test_frobenius_weights_are_unbiased() -> None:
    generator = torch.Generator().manual_seed(3)
    size, outliers, probes = 12, 2, 4
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.T
    top = torch.linalg.qr(torch.randn(size, outliers, generator=generator, dtype=torch.float64)).Q
    upper = torch.triu_indices(outliers + probes, outliers + probes)
    weights = _square_weights(upper, outliers, probes)
    squares = []
    for _ in range(4000):
        z = torch.randn(size, probes, generator=generator, dtype=torch.float64)
        w = torch.cat([top, z - top @ (top.T @ z)], dim=1)
        entries = (w.T @ matrix @ w)[upper[0], upper[1]]
        squares.append(float((weights * entries**2).sum()))
    error = np.std(squares) / np.sqrt(len(squares))
    assert abs(np.mean(squares) - float(matrix.norm()) ** 2) < 4 * error


def test_noise_has_the_moments_of_the_values_and_slope_minus_one() -> None:
    values = torch.distributions.Gamma(2.0, 1.0).sample((4000,)).double()
    noise = torch.cat([matched_noise(values, s)() for s in range(5)])
    assert float(noise.mean()) == pytest.approx(float(values.mean()), abs=0.05)
    assert float(noise.std()) == pytest.approx(float(values.std()), rel=0.05)
    skews = [float((((v - v.mean()) / v.std()) ** 3).mean()) for v in (noise, values)]
    assert skews[0] == pytest.approx(skews[1], rel=0.25)
    bins = Bins(4000)
    counts = torch.ones(4000, dtype=torch.float64)
    draw = matched_noise(values, 9)
    rows = [
        bins.mean(differences(draw(), counts, order).abs().numpy())
        for order in random_orders(4000, 20, 0)
    ]
    fitted = curve("noise", np.stack(rows), bins.centres).fit
    assert fitted is not None
    assert abs(fitted.exponent + 1) < 0.05


def test_gaussian_vectors_have_the_covariance_of_the_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(500, 3, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[1.0, 2.0, 0.0], [0.0, 1.0, 0.0], [0.0, 3.0, 0.1]], dtype=torch.float64
    )
    draw = matched_vectors(rows, 0)
    drawn = torch.cat([draw(torch.arange(500)) for _ in range(40)])
    assert torch.allclose(torch.cov(drawn.T), torch.cov(rows.T), rtol=0.1, atol=0.02)


def test_a_curve_that_is_not_a_power_law_is_rejected_and_one_that_is_is_not() -> None:
    bins = Bins(3000)
    generator = np.random.default_rng(0)
    noise = 1 + 0.02 * generator.standard_normal((200, 12, len(bins.centres)))
    bent = curve("b", np.exp(-0.0002 * bins.centres) / bins.centres * noise[0], bins.centres).fit
    assert bent is not None
    assert not bent.fits
    straight = [curve("s", rows / bins.centres, bins.centres).fit for rows in noise]
    rejected = np.mean([fit is not None and fit.p_value < 0.05 for fit in straight])
    covered = np.mean([f is not None and f.interval[0] <= -1 <= f.interval[1] for f in straight])
    assert 0.01 <= rejected <= 0.11
    assert 0.9 <= covered <= 1.0


def test_first_stable_is_the_step_after_the_last_excess() -> None:
    series = np.array([5.0, 0.1, 2.0, 0.1, *[0.1] * 40])
    assert first_stable(series, 1.0) == 4
    assert first_stable(series, 10.0) == 1
    series[-1] = 3.0
    assert first_stable(series, 1.0) is None


def test_landscape_of_a_vit_decomposes_exactly_and_matches_its_null() -> None:
    problem = vit_problem(120)
    before = problem.parameters
    found = landscape_convergence(
        problem, orders=10, outliers=2, probes=4, spectra=2, spectrum_samples=32, tolerance=0.5,
        curvature_tolerance=3.0,
    )  # fmt: skip
    assert torch.equal(before, problem.parameters)
    assert found.samples == 120
    assert found.difference.fit is not None
    assert abs(found.difference.fit.exponent + 1) < 0.15
    assert found.hessian is not None
    assert abs(found.hessian.value + 1) < 0.15
    assert found.against_null["p_value"] > 0.001
    assert "no evidence about curvature" in found.verdict
    assert found.bounds is not None
    assert (found.bounds.corrected >= found.difference.high).all()
    assert found.stable_loss.value is not None
    low, _ = found.stable_loss.interval
    assert low is not None
    assert low <= found.stable_loss.value
    assert [s.k for s in found.spectra] == [8, 16, 32]
    assert found.spectra[-1].wasserstein == 0.0
    assert found.spectra[0].wasserstein > 0
    assert found.plot().axes[0].get_xlabel() == "samples k"
    assert "noise alone" in str(found)


def test_hessian_difference_level_is_that_of_dense_hessians() -> None:
    problem = vit_problem(20)
    found = landscape_convergence(problem, orders=8, outliers=2, probes=8, spectra=0)
    single = [Hessian(subset(problem, torch.tensor([i])), checks=False) for i in range(20)]
    dense = torch.stack([operator.dense() for operator in single])
    spread = (dense - dense.mean(0)).flatten(1).norm(dim=1).pow(2).mean().sqrt()
    want = float(spread / dense.mean(0).norm())
    assert found.heterogeneity == pytest.approx(want, rel=6 * found.probe_error + 0.1)


def test_losses_alone_are_those_of_the_whole_analysis_and_take_no_derivative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = vit_problem(60)
    whole = landscape_convergence(problem, orders=6, outliers=0, probes=3, spectra=0)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a derivative was taken")

    monkeypatch.setattr(torch.autograd, "grad", refused)
    monkeypatch.setattr(torch.autograd, "backward", refused)
    monkeypatch.setattr(torch.func, "grad_and_value", refused)
    found = landscape_convergence(problem, orders=6, curvature=False)
    assert torch.allclose(found.difference.mean, whole.difference.mean, rtol=1e-10)
    assert torch.allclose(found.terms["value"].mean, whole.terms["value"].mean, rtol=1e-10)
    assert found.against_null == pytest.approx(whole.against_null, rel=1e-6)
    assert found.products == 0
    assert found.hessian is None
    assert found.bounds is None
    assert len(found.plot().axes) == 2
    assert "‖H" not in str(found)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 20 samples"):
        landscape_convergence(vit_problem(8), curvature=False)
    with pytest.raises(ValueError, match="at least 20 samples"):
        landscape_convergence(vit_problem(8), spectra=0)


def test_a_model_instead_of_a_problem_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a Problem, got a Linear"):
        landscape_convergence(nn.Linear(2, 2))  # type: ignore[arg-type]
