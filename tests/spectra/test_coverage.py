"""Intervals of the density and of the data: a small version of benchmarks/coverage.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.linear_operator import LinearOperator
from spectra.spectrum_operators import SpectrumOperator, most_misses

TRIALS = 40
FEWEST = TRIALS - most_misses(TRIALS, counts=3)  # 31, of at most three kinds of intervals a test


def normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def indefinite() -> Tensor:
    values = 0.3 * normal(220, 1)
    values[:6] += torch.linspace(3, 9, 6, dtype=torch.float64)
    return values


def with_null_space() -> Tensor:
    values = torch.zeros(240, dtype=torch.float64)
    values[:60] = normal(60, 2) + 0.5
    return values


def degenerate() -> Tensor:
    parts = ((10, 5.0), (40, -1.5), (180, 0.4))
    return torch.cat([torch.full((n,), x, dtype=torch.float64) for n, x in parts])


def near_a_minimum() -> Tensor:
    """Most eigenvalues small and positive, crowded at zero, a few negative."""
    values = normal(300, 3).square()
    values[:24] *= -0.3
    values[24:27] += torch.tensor([20.0, 15.0, 11.0], dtype=torch.float64)
    return values


@pytest.mark.parametrize("make", [indefinite, with_null_space, degenerate, near_a_minimum])
def test_density_intervals_hold_the_truth_and_are_not_the_worst_case(
    make: Callable[[], Tensor],
) -> None:
    values = make()
    negative = float((values < 0).double().mean())
    rank = float(values.abs().sum() ** 2 / values.square().sum())
    held, narrow = [0, 0, 0], 0
    for seed in range(TRIALS):
        found = ca.spectral_density(SpectrumOperator(values), max_products=90, seed=seed)
        low, high = found.negative_mass_interval
        held[0] += low <= negative <= high
        narrow += high - low <= 0.25
        low, high = found.effective_rank_interval
        held[1] += low <= rank <= high
        low, high = found.clear_negative_mass_interval
        held[2] += low <= float((values < -found.resolution).double().mean()) <= high
    assert min(held) >= FEWEST, held
    assert narrow >= 33


@pytest.mark.parametrize("small", [0.0, -1e-7, 1e-7])
def test_what_lies_at_zero_may_be_null_or_small_and_the_intervals_hold_either_way(
    small: float,
) -> None:
    values = 0.3 * normal(260, 4)
    values[:80] = small
    values[80:84] += torch.linspace(4, 9, 4, dtype=torch.float64)
    sizes = values.abs().sort().values
    sizes = sizes[sizes > 1e-10 * sizes[-1]]
    negative = float((values < -1e-10 * sizes[-1]).double().mean())
    quantile = float(sizes[int(np.ceil(0.05 * len(sizes))) - 1])
    held = [0, 0]
    for seed in range(TRIALS):
        found = ca.spectral_density(SpectrumOperator(values), max_products=90, seed=seed)
        low, high = found.negative_mass_interval
        held[0] += low <= negative <= high
        low, high = found.small_magnitude_interval
        held[1] += low <= quantile <= high
    assert min(held) >= FEWEST, held


class Sampled(SpectrumOperator):
    """The mean of batches drawn by a seed, each off by a common factor and by noise of its own."""

    def __init__(self, values: Tensor, seed: int) -> None:
        own = normal(8 * len(values), 100 + seed).reshape(8, -1)
        common = normal(8, 900 + seed)[:, None]
        self._batches = values * (1 + 0.2 * common + 0.1 * own)
        super().__init__(self._batches.mean(0))

    def per_batch(self) -> list[tuple[float, LinearOperator]]:
        return [(1 / 8, SpectrumOperator(values)) for values in self._batches]


@pytest.mark.parametrize("estimate", [ca.trace, ca.frobenius_norm])
def test_data_intervals_hold_the_value_of_all_data(estimate: Callable[..., Any]) -> None:
    values = indefinite()  # a trace hard to sample: six probes alone would not know the scatter
    truth = float(values.sum() if estimate is ca.trace else values.norm())
    held = 0
    for seed in range(TRIALS):
        interval = estimate(Sampled(values, seed), rtol=0.02, seed=seed).data_interval
        assert interval is not None
        held += interval[0] <= truth <= interval[1]
    assert held >= FEWEST, held


@pytest.mark.parametrize(
    ("estimate", "truth", "trials"),
    [
        (lambda op, seed: ca.frobenius_norm(op, rtol=0.05, seed=seed), Tensor.norm, 1000),
        (lambda op, seed: ca.trace(op, rtol=0.05, seed=seed, max_products=40), Tensor.sum, 150),
        (lambda op, seed: ca.spectral_norm(op, rtol=0.02, seed=seed), Tensor.max, 40),
    ],
    ids=["frobenius_norm", "trace", "spectral_norm"],
)
def test_intervals_on_a_ramp_through_zero_miss_no_more_often_than_they_say(
    estimate: Callable[..., Any], truth: Callable[[Tensor], Tensor], trials: int
) -> None:
    values = torch.linspace(-1, 1, 120, dtype=torch.float64) + 1e-3
    wanted = float(truth(values))
    missed = 0
    for seed in range(trials):
        low, high = estimate(SpectrumOperator(values), seed).interval
        missed += not low <= wanted <= high
    assert missed <= most_misses(trials), missed
