"""Fits recover known exponents, and their intervals cover them as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from curvatlas.fits import power_law, scaling_law

TRIALS = 200
# 95 % intervals must cover in 90 to 99 % of 200 trials
LEAST, MOST = 0.90, 0.99


def covers(interval: tuple[float, float], truth: float) -> bool:
    return interval[0] <= truth <= interval[1]


def test_exact_data_are_recovered_exactly() -> None:
    x = np.geomspace(10, 1e5, 12)
    plain = power_law(x, 3.0 * x**-0.7)
    assert plain.exponent == pytest.approx(-0.7, abs=1e-12)
    assert plain.factor == pytest.approx(3.0, rel=1e-10)
    n, d = (v.ravel() for v in np.meshgrid(np.geomspace(1e3, 1e5, 4), np.geomspace(1e2, 1e4, 4)))
    law = scaling_law(n, d, 0.5 + 20 * n**-0.4 + 7 * d**-0.55, replicas=20)
    assert (law.alpha, law.beta) == pytest.approx((0.4, 0.55), abs=1e-5)
    assert pytest.approx((0.5, 20, 7), rel=1e-3) == (law.E, law.A, law.B)
    assert law(1e4, 1e3) == pytest.approx(0.5 + 20 * 1e4**-0.4 + 7 * 1e3**-0.55, rel=1e-6)


def test_power_law_intervals_cover() -> None:
    random = np.random.default_rng(0)
    x = np.geomspace(10, 1e4, 10)
    hits = known = rejected = 0
    for _ in range(TRIALS):
        y = 2.0 * x**-0.8 * np.exp(0.1 * random.standard_normal(len(x)))
        fitted = power_law(x, y)
        hits += covers(fitted.interval, -0.8)
        rejected += fitted.p_value is not None and fitted.p_value < 0.05
        known += covers(power_law(x, y, log_errors=[0.1] * len(x)).interval, -0.8)
    assert LEAST <= hits / TRIALS <= MOST
    assert LEAST <= known / TRIALS <= 1.0  # overdispersion may only widen these
    assert 0.01 <= rejected / TRIALS <= 0.10


def test_a_saturating_curve_is_no_power_law() -> None:
    x = np.geomspace(10, 1e4, 12)
    y = (0.3 + 4.0 * x**-0.7) * np.exp(0.02 * np.random.default_rng(1).standard_normal(12))
    assert not power_law(x, y).fits


@pytest.mark.slow
def test_scaling_law_intervals_cover_on_a_four_by_four_grid() -> None:
    random = np.random.default_rng(2)
    n, d = (v.ravel() for v in np.meshgrid([1e3, 3e3, 1e4, 3e4], [1e2, 3e2, 1e3, 3e3]))
    hits = np.zeros(2)
    for trial in range(TRIALS):
        noise = np.exp(0.02 * random.standard_normal(len(n)))
        law = scaling_law(
            n, d, (0.2 + 20 * n**-0.5 + 10 * d**-0.5) * noise, replicas=100, seed=trial
        )
        hits += covers(law.alpha_interval, 0.5), covers(law.beta_interval, 0.5)
    assert ((hits / TRIALS >= LEAST) & (hits / TRIALS <= MOST)).all(), hits / TRIALS


def test_outliers_move_the_robust_fit_little() -> None:
    n, d = (v.ravel() for v in np.meshgrid([1e3, 3e3, 1e4, 3e4], [1e2, 3e2, 1e3, 3e3]))
    y = (0.2 + 20 * n**-0.5 + 10 * d**-0.5) * np.exp(
        0.005 * np.random.default_rng(3).standard_normal(16)
    )
    y[5] *= 1.5
    law = scaling_law(n, d, y, replicas=50)
    assert law.beta == pytest.approx(0.5, abs=0.05)


def test_too_few_or_negative_points_are_refused() -> None:
    with pytest.raises(ValueError, match="positive finite"):
        power_law([1, 2, 3], [1, -2, 3])
    with pytest.raises(ValueError, match="3 points"):
        power_law([1, 2], [1, 2])
    with pytest.raises(ValueError, match="5 parameters"):
        scaling_law([1, 2, 3], [1, 2, 3], [1, 2, 3])
