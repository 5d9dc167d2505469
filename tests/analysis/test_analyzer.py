from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import curvatlas as ca
from curvatlas.results import same
from curvatlas.zoo.models import ViT, ViTConfig
from oracles import hessian


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return ViT(ViTConfig(d_model=8, d_ff=8)).double().eval()


def batch(seed: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 8, 8, generator=random, dtype=torch.float64)
    return images, torch.randint(0, 10, (count,), generator=random)


@pytest.fixture(scope="module")
def dense(model: nn.Module) -> torch.Tensor:
    """The Hessian on the first batch, by double backward."""
    x, y = batch(0)
    return hessian(nn.functional.cross_entropy(model(x), y), list(model.parameters()))


@pytest.fixture(scope="module")
def exact(model: nn.Module) -> torch.Tensor:
    """Eigenvalues of the Hessian on two batches, by double backward of the mean loss."""
    (x1, y1), (x2, y2) = batch(0), batch(1, 4)
    loss = nn.functional.cross_entropy(model(torch.cat([x1, x2])), torch.cat([y1, y2]))
    return torch.linalg.eigvalsh(hessian(loss, list(model.parameters()))).flip(0)


def test_eigenvalues_are_the_hessians_own(model: nn.Module, dense: torch.Tensor) -> None:
    x, y = batch(0)
    truth = torch.linalg.eigvalsh(dense).flip(0)
    analyzer = ca.TransformerHessianAnalyzer(model)
    found = analyzer.compute_hessian_eigenvalues(x, y, 4)
    assert bool(((found.values - truth[:4]).abs() <= found.residuals).all())
    assert analyzer.history == [found]


def test_uneven_batches_weigh_by_their_samples(model: nn.Module, exact: torch.Tensor) -> None:
    analyzer = ca.TransformerHessianAnalyzer(model)
    found = analyzer.analyze_full_hessian([batch(0), batch(1, 4)], k=3)
    want = torch.cat([exact[:3], exact[-3:]])
    got = found.eigenpairs
    assert bool(((got.values - want).abs() <= got.residuals).all())
    assert found.top_eigenvalue == pytest.approx(float(exact[0]), rel=1e-4)
    assert found.spectral_gap == pytest.approx(float(exact[0] - exact[1]), rel=1e-2)
    assert found.values.shape == (2, 3)
    assert found.eigenvalue_std > 0
    assert found.trace.value == pytest.approx(float(exact.sum()), rel=0.1)
    assert got.data_interval is not None
    assert found.trace.data_interval is not None
    assert sum(found.roles.values()) == pytest.approx(1.0)
    assert "batches" in str(found)


def test_layer_wise_curvature_is_that_of_the_diagonal_blocks(
    model: nn.Module, dense: torch.Tensor
) -> None:
    x, y = batch(0)
    analyzer = ca.TransformerHessianAnalyzer(model)
    found = analyzer.analyze_layer_wise_curvature(x, y)
    anatomy = ca.Problem(model, "cross_entropy", (x, y)).anatomy
    assert sum(entry.size for entry in found.layers) == len(dense)
    for entry in found.layers:
        indices = torch.cat(
            [
                torch.as_tensor(piece.indices)
                for piece in anatomy
                if (piece.layer, piece.sublayer) == (entry.layer, entry.sublayer)
            ]
        )
        block = dense[indices][:, indices]
        values = torch.linalg.eigvalsh(block)
        norm = float(values.abs().max())
        assert entry.top_eigenvalue == pytest.approx(float(values[-1]), abs=2e-3 * norm)
        assert entry.spectral_norm.value == pytest.approx(norm, rel=2e-3)
        assert entry.frobenius.value == pytest.approx(float(block.norm()), rel=0.25)
    assert found.plot().axes
    # the curvature of outputs too: that of the logits is the loss's own, known in closed form
    logits = model(x).detach()
    p = logits.softmax(-1)
    curvature = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(x)
    low, high = found.activations[""].norm_interval
    assert low <= float(curvature.norm()) <= high
    assert set(found.activations) > {"", "head"}


def test_a_folder_makes_the_same_calls_resume(model: nn.Module, tmp_path: Path) -> None:
    x, y = batch(0)
    first = ca.TransformerHessianAnalyzer(model, folder=tmp_path)
    second = ca.TransformerHessianAnalyzer(model, folder=tmp_path)
    a = first.compute_hessian_eigenvalues(x, y, 3)
    assert list(tmp_path.iterdir())
    assert same(second.compute_hessian_eigenvalues(x, y, 3), a)


def test_the_history_accumulates_in_order(model: nn.Module) -> None:
    x, y = batch(0)
    analyzer = ca.TransformerHessianAnalyzer(model)
    analyzer.compute_hessian_eigenvalues(x, y, 2)
    analyzer.compute_hessian_eigenvalues(x, y, 2, which="smallest")
    assert [type(entry).__name__ for entry in analyzer.history] == ["Eigenpairs", "Eigenpairs"]
    assert analyzer.history[1].values[0] < 0  # type: ignore[attr-defined]
