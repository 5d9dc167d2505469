"""Refined spectral norms of stages against dense matrices and chosen spectra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import curvatlas as ca
import families
from curvatlas.analysis.propagation.spectral import refined_interval
from curvatlas.zoo.models import GPT, GPTConfig


def _split(batch: Any) -> tuple[Any, Any]:
    return (batch, None) if isinstance(batch, dict) else batch


def _entries(flow: ca.CurvatureFlow) -> list[ca.FlowEntry]:
    return [*flow.activations, *flow.sublayers]


@pytest.mark.parametrize(
    ("sweep", "names"),
    [
        (False, ["zoo gpt pre-norm", "hf gpt2", "hf llama"]),
        (True, ["zoo vit post-norm", "zoo vit post-norm"]),
    ],
)
def test_the_dense_norm_of_every_stage_is_covered_and_within_a_percent(
    sweep: bool, names: list[str]
) -> None:
    covered = close = total = 0
    for seed, name in enumerate(names):
        model, batch, loss = families.make(name, seed=seed)
        x, target = _split(batch)
        dense = ca.CurvaturePropagationAnalyzer(model, loss, method="dense")
        free = ca.CurvaturePropagationAnalyzer(
            model, loss, method="matrix-free", spectral="refine", sweep=sweep, seed=seed
        )
        flow = dense.analyze_curvature_flow(x, target)
        truths = {(e.place, e.name): e.spectral_norm for e in _entries(flow)}
        for entry in _entries(free.analyze_curvature_flow(x, target)):
            truth = truths[entry.place, entry.name]
            low, high = entry.spectral_interval
            total += 1
            covered += low <= truth * (1 + 1e-10) and truth * (1 - 1e-10) <= high
            close += 0.99 * truth <= low <= high <= 1.01 * truth
    assert covered >= 0.95 * total
    assert close >= 0.99 * total


def test_refining_takes_at_most_twice_the_products_of_the_account_more() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=32, context=16, d_model=32, n_heads=2, n_layers=3, d_ff=48)
    model = GPT(config).eval()
    x = torch.randint(0, 32, (2, 16))
    analyzer = ca.CurvaturePropagationAnalyzer(model, method="matrix-free")
    plain = analyzer.analyze_curvature_flow(x, x)
    refined = analyzer.analyze_curvature_flow(x, x, spectral="refine")
    assert 0 < plain.products < refined.products <= 3 * plain.products
    for entry in _entries(refined):
        low, high = entry.spectral_interval
        assert 0 < low <= entry.spectral_norm <= high <= 1.01 * low
    widths = [e.spectral_interval[1] / e.spectral_interval[0] for e in _entries(plain)]
    assert min(widths) > 1.5  # what the probes alone say


def _of_matrices(matrices: Tensor) -> tuple[float, float]:
    samples, size, _ = matrices.shape

    def product(vectors: Tensor) -> Tensor:
        return torch.einsum("snm,ksm->ksn", matrices, vectors)

    start = torch.randn(samples, size, dtype=matrices.dtype)
    return refined_interval(product, samples, start, product(start[None])[0])


def test_the_largest_sample_counts_whatever_its_sign() -> None:
    torch.manual_seed(1)
    spectra = torch.rand(3, 200, dtype=torch.float64)
    spectra[1, 7] = -4.0
    basis = torch.linalg.qr(torch.randn(3, 200, 200, dtype=torch.float64)).Q
    matrices = basis @ torch.diag_embed(spectra) @ basis.mT
    low, high = _of_matrices(matrices)
    assert 3.96 <= low <= 4.0 + 1e-9
    assert 4.0 - 1e-9 <= high <= 4.04


def test_a_crowded_edge_is_still_covered() -> None:
    torch.manual_seed(2)
    spectrum = torch.linspace(0, 1, 400, dtype=torch.float64)
    covered = 0
    for _ in range(20):
        basis = torch.linalg.qr(torch.randn(1, 400, 400, dtype=torch.float64)).Q
        low, high = _of_matrices(basis @ torch.diag(spectrum) @ basis.mT)
        covered += low <= 1 + 1e-12 <= high + 1e-9
        assert low >= 0.98
    assert covered >= 19


@pytest.mark.parametrize("matrix", [torch.zeros(2, 5, 5), torch.eye(4).repeat(2, 1, 1)])
def test_matrices_with_few_eigenvalues_end_at_once(matrix: Tensor) -> None:
    low, high = _of_matrices(matrix.double())
    truth = float(matrix.max())
    assert low == pytest.approx(truth, abs=1e-12)
    assert high == pytest.approx(truth, abs=1e-12)


def test_an_unknown_way_is_refused() -> None:
    model, (x, y), loss = families.make("zoo vit post-norm")
    analyzer = ca.CurvaturePropagationAnalyzer(model, loss)
    with pytest.raises(ValueError, match="spectral is 'bracket' or 'refine', got 'exact'"):
        analyzer.analyze_curvature_flow(x, y, spectral="exact")
