"""Bounds on token sums against the matrices written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvatlas.theory.token_bound import TwoTerms, plain_frobenius, plain_sum, symmetric_sum


def draw(seed: int, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def written_out(alpha: Tensor, beta: Tensor, middle: Tensor) -> Tensor:
    full = torch.einsum("na,nb,nrs->arbs", alpha, beta, middle)
    return full.reshape(alpha.shape[1] * middle.shape[1], -1)


@pytest.mark.parametrize("seed", range(8))
def test_a_plain_sum_is_bounded_and_its_frobenius_norm_exact(seed: int) -> None:
    n = 2 + seed
    alpha, beta, middle = draw(seed, n, 3), draw(seed + 50, n, 4), draw(seed + 99, n, 2, 5)
    full = written_out(alpha, beta, middle)
    assert float(plain_frobenius(alpha, beta, middle)) == pytest.approx(float(full.norm()), 1e-12)
    true, bound = float(torch.linalg.matrix_norm(full, 2)), float(plain_sum(alpha, beta, middle))
    assert true <= bound * (1 + 1e-12)
    assert bound <= float(full.norm()) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_both_ends_of_a_symmetric_sum_are_bounded(seed: int) -> None:
    n = 2 + seed
    alpha, middle = draw(seed, n, 3), draw(seed + 7, n, 4, 4)
    middle = middle + middle.mT
    values = torch.linalg.eigvalsh(written_out(alpha, alpha, middle))
    found = symmetric_sum(alpha, middle)
    assert values[-1] <= found.high * (1 + 1e-12)
    assert -values[0] <= found.low * (1 + 1e-12)


def test_one_token_makes_the_bound_exact() -> None:
    alpha, beta, middle = draw(1, 1, 3), draw(2, 1, 4), draw(3, 1, 2, 5)
    true = torch.linalg.matrix_norm(written_out(alpha, beta, middle), 2)
    assert float(plain_sum(alpha, beta, middle)) == pytest.approx(float(true), rel=1e-12)


def test_a_definite_sum_has_no_lower_end() -> None:
    alpha, root = draw(1, 5, 3), draw(2, 5, 4, 4)
    found = symmetric_sum(alpha, root @ root.mT)
    assert float(found.low) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_two_terms_meet_their_cross_term(seed: int) -> None:
    n, a, c, r, k = 4, 2, 3, 2, 5
    terms = TwoTerms(
        draw(seed, n, a), draw(seed + 1, n, c), draw(seed + 2, n, r, k),
        draw(seed + 3, n, c, r), draw(seed + 4, n, k),
    )  # fmt: skip
    full = torch.einsum("na,nc,nrk->arck", terms.alpha, terms.first, terms.inner)
    full = full + torch.einsum("na,ncr,nk->arck", terms.alpha, terms.cross, terms.last)
    matrix = full.reshape(a * r, c * k)
    assert float(terms.frobenius()) == pytest.approx(float(matrix.norm()), rel=1e-12)
    assert torch.linalg.matrix_norm(matrix, 2) <= terms.norm() * (1 + 1e-12)
