"""Refined Ritz vectors: the same products, smaller residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvatlas as ca
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.eigen_result import select
from curvatlas.spectra.eigenpairs import refined, wanted_pairs
from curvatlas.spectra.krylov import KrylovBasis
from spectra.spectrum_operators import SpectrumOperator


def with_bulk_edge(seed: int) -> torch.Tensor:
    """Five outliers on top, and a lower end that is the edge of a bulk."""
    random = torch.Generator().manual_seed(seed)
    values = 0.3 * torch.randn(800, generator=random, dtype=torch.float64)
    values[:5] += torch.linspace(10, 30, 5, dtype=torch.float64)
    return values


def grown(values: torch.Tensor, products: int, seed: int) -> KrylovBasis:
    basis = KrylovBasis(SpectrumOperator(values), products + 2)
    basis.add_random(generator(seed))
    while basis.products < products:
        basis.expand()
    return basis


@pytest.mark.parametrize("seed", range(4))
def test_refined_vectors_are_orthonormal_and_their_residuals_true_and_smaller(seed: int) -> None:
    values = with_bulk_edge(seed)
    basis = grown(values, 40, seed)
    ritz = basis.ritz()
    chosen = select(ritz.values, 3, "both")
    found = refined(basis, ritz, chosen)
    vectors = basis.vectors(found.coordinates)
    images = values[:, None] * vectors - vectors * torch.from_numpy(found.values)
    np.testing.assert_allclose(
        images.norm(dim=0).numpy(), found.residuals, rtol=1e-8, atol=1e-13 * float(values.max())
    )
    gram = (vectors.T @ vectors).numpy()
    np.testing.assert_allclose(gram, np.eye(6), atol=1e-12)
    assert found.residuals.max() < 0.95 * ritz.residuals[chosen].max()


def test_ritz_pairs_that_have_converged_are_left_as_they_are() -> None:
    basis = grown(with_bulk_edge(1), 40, 1)
    ritz = basis.ritz()
    chosen = select(ritz.values, 3, "largest")
    found = wanted_pairs(basis, ritz, chosen, 2 * float(ritz.residuals[chosen].max()))
    np.testing.assert_array_equal(found.values, ritz.values[chosen])


def test_no_more_products_than_bare_lanczos_and_two_for_the_search() -> None:
    spent, bare = 0, 0
    for seed in range(6):
        values = with_bulk_edge(10 + seed)
        basis = grown(values, 12, seed)
        while True:
            ritz = basis.ritz()
            chosen = select(ritz.values, 3, "both")
            if ritz.residuals[chosen].max() <= 1e-3 * np.abs(ritz.values).max():
                break
            basis = grown(values, basis.products + 1, seed)
        bare += basis.products
        found = ca.eigenpairs(
            SpectrumOperator(values), k=3, which="both", tol=1e-3, seed=seed, data_error=False
        )
        assert found.converged
        spent += found.products
    assert spent <= bare + 2 * 6 - 3, (spent, bare)
