"""Matrices with few different eigenvalues: every Krylov space ends early, and rounding goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.spectra.summary import _quantile_condition
from spectra.spectrum_operators import DenseOperator, SpectrumOperator

SIZE = 600
# Shares of the size with an eigenvalue; the last one takes the rest.
CLUSTERS = {
    "projector": ((0.5, 1.0), (0.5, 0.0)),
    "thin projector": ((0.02, 1.0), (0.98, 0.0)),
    "two": ((0.25, 3.0), (0.75, -1.0)),
    "three": ((0.05, 5.0), (0.2, -2.0), (0.75, 0.3)),
    "five": ((0.01, 50.0), (0.04, 9.0), (0.15, -1.0), (0.3, 0.01), (0.5, 0.0)),
}
TURN = torch.linalg.qr(
    torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
)[0]


class Rough(SpectrumOperator):
    """Products off by 30 roundings in a random direction, as those of a network are."""

    def __init__(self, values: Tensor, seed: int) -> None:
        super().__init__(values)
        self.random = torch.Generator().manual_seed(seed)

    def _columns(self, columns: Tensor) -> Tensor:
        images = super()._columns(columns)
        noise = torch.randn(columns.shape, generator=self.random, dtype=columns.dtype)
        size = 30 * torch.finfo(self.dtype).eps * self.values.abs().max() / len(columns) ** 0.5
        return images + size * columns.norm(dim=0) * noise


def clusters(name: str) -> Tensor:
    parts = [torch.full((int(s * SIZE),), x, dtype=torch.float64) for s, x in CLUSTERS[name]]
    return torch.cat(parts)


def turned(name: str, count: int) -> Iterator[tuple[int, Tensor]]:
    """(seed, matrix): the eigenvalues dealt anew to the columns of an orthogonal matrix."""
    for seed in range(count):
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
        matrix = (TURN * clusters(name)[order]) @ TURN.T
        yield seed, (matrix + matrix.T) / 2


def check(operator: ca.LinearOperator, values: Tensor, seed: int, budget: int) -> None:
    """The density's nodes are eigenvalues, and what is read off them is theirs."""
    true, largest = values.unique().numpy(), float(values.abs().max())
    sizes = values.abs()[values != 0].sort().values
    condition = largest / float(sizes[int(np.ceil(0.05 * len(sizes))) - 1])
    found = ca.spectral_density(operator, max_products=budget, seed=seed)
    nodes = found.nodes.numpy()
    far = np.abs(nodes[:, None] - true).min(1)
    assert far.max() <= 1e-4 * largest, (seed, operator.dtype, nodes[far.argmax()])
    measured, *_ = _quantile_condition(found, torch.finfo(operator.dtype).eps)
    assert measured == pytest.approx(condition, rel=0.02), (seed, operator.dtype)
    assert found.negative_mass == pytest.approx(float((values < 0).double().mean()), abs=0.05)
    assert float(found.grid.abs().max()) <= 1.5 * largest
    assert found.products <= budget


@pytest.mark.parametrize("name", list(CLUSTERS))
def test_nodes_are_eigenvalues_and_rounding_adds_none(name: str) -> None:
    for seed, matrix in turned(name, 20 if name == "projector" else 3):
        check(DenseOperator(matrix), clusters(name), seed, 120)
        check(DenseOperator(matrix.float()), clusters(name), seed, 90)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(CLUSTERS))
def test_products_far_above_rounding_add_none_either(name: str, dtype: torch.dtype) -> None:
    for seed in range(8):
        check(Rough(clusters(name).to(dtype), seed), clusters(name), seed, 120)


@pytest.mark.parametrize("options", [{"deflate": 0}, {"reorthogonalise": False}], ids=str)
def test_probes_alone_find_the_few_eigenvalues_too(options: dict[str, int]) -> None:
    for name in ("projector", "three"):
        values = clusters(name)
        for seed, matrix in turned(name, 4):
            found = ca.spectral_density(
                DenseOperator(matrix), max_products=120, seed=seed, **options
            )
            far = (found.nodes[:, None] - values.unique()).abs().min(1).values
            assert float(far.max()) <= 1e-8 * float(values.abs().max())


def test_the_quantile_condition_of_a_projector_is_one() -> None:
    for seed, matrix in turned("projector", 3):
        found = ca.curvature_summary(DenseOperator(matrix), max_products=120, seed=seed)
        assert found.quantile_condition == pytest.approx(1.0, rel=1e-6)
        assert found.null_share == pytest.approx(0.5, abs=0.05)


def test_functions_are_not_evaluated_at_what_rounding_added() -> None:
    def root(values: np.ndarray) -> np.ndarray:
        if values.min() < -1e-9 or values.max() > 1 + 1e-9:
            raise AssertionError(f"evaluated outside the spectrum: {values.min()}, {values.max()}")
        return np.sqrt(np.maximum(values, 0.0))

    for seed, matrix in turned("projector", 5):
        operator = DenseOperator(matrix)
        found = ca.trace_function(operator, root, rtol=0.05, max_products=400, seed=seed)
        assert found.value == pytest.approx(SIZE / 2, rel=0.05)
        start = torch.randn(
            SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        form = ca.quadratic_form(operator, start, function=root)
        assert form.value == pytest.approx(float(start @ (matrix @ start)), rel=1e-6)


def test_an_invariant_space_costs_no_products_beyond_its_dimension() -> None:
    _, matrix = next(turned("three", 1))
    operator = DenseOperator(matrix)
    found = ca.spectral_density(operator, probes=6, steps=30, deflate=0, max_products=200)
    assert found.products == operator.products <= 6 * 4
