from __future__ import annotations

import numpy as np
import pytest
import torch

import curvatlas as ca
from curvatlas.spectra.quadrature import wasserstein
from curvatlas.zoo.models import ViT, ViTConfig
from spectra.spectrum_operators import (
    DenseOperator,
    SpectrumOperator,
    most_misses,
    rotated,
    spectra,
)


class Batched(DenseOperator):
    """A mean over batches that can be asked for each."""

    def __init__(self, matrices: list[torch.Tensor]) -> None:
        super().__init__(sum(matrices) / len(matrices))  # type: ignore[arg-type]
        self.matrices = matrices

    def per_batch(self) -> list[tuple[float, ca.LinearOperator]]:
        return [(1 / len(self.matrices), DenseOperator(m)) for m in self.matrices]


def batched(seed: int, count: int = 12, size: int = 80) -> Batched:
    """Batches whose matrices scatter around a fixed mean."""
    random = torch.Generator().manual_seed(seed)
    mean = rotated(torch.logspace(1, -2, size).double())
    draws = []
    for _ in range(count):
        noise = torch.randn(size, size, generator=random, dtype=torch.float64)
        bump = 0.5 * torch.randn(1, generator=random, dtype=torch.float64)
        draws.append(mean + 0.02 * (noise + noise.T) + bump * torch.eye(size))
    return Batched(draws)


def test_the_data_interval_covers_the_mean_over_all_data() -> None:
    truth = float(torch.logspace(1, -2, 80).double().sum())
    covered = 0
    for seed in range(60):
        found = ca.trace(batched(seed), rtol=0.05, seed=seed)
        assert found.data_interval is not None
        covered += found.data_interval[0] <= truth <= found.data_interval[1]
    assert covered >= 60 - most_misses(60), covered


def test_data_and_probe_errors_are_kept_apart_and_advised_on() -> None:
    few = ca.trace(batched(0, count=4), rtol=0.02)
    assert few.data_interval is not None
    assert "more data" in few.advice
    alone = ca.trace(SpectrumOperator(spectra()["power_law"]), rtol=0.05)
    assert alone.data_interval is None
    top = ca.eigenpairs(batched(0), k=2)
    assert top.data_interval is not None
    assert ca.frobenius_norm(batched(0)).data_interval is not None
    assert ca.spectral_norm(batched(0)).data_interval is not None
    assert ca.eigenpairs(batched(0), k=2, data_error=False).data_interval is None


def test_derived_numbers_agree_with_the_exact_spectrum() -> None:
    values = spectra()["hessian_like"]
    found = ca.curvature_summary(SpectrumOperator(values), rtol=0.02)
    down = values.sort(descending=True).values
    assert found.sharpness == pytest.approx(float(down[0]), rel=1e-6)
    assert found.smallest == pytest.approx(float(down[-1]), rel=1e-3)
    assert found.critical_learning_rate == pytest.approx(2 / float(down[0]), rel=1e-6)
    assert found.spectral_gap == pytest.approx(float(down[0] - down[1]), rel=1e-4)
    stable = float((values**2).sum() / values.abs().max() ** 2)
    low, high = found.stable_rank_interval
    assert low <= stable <= high
    rank = float(values.abs().sum() ** 2 / (values**2).sum())
    assert found.effective_rank == pytest.approx(rank, rel=0.1)
    sizes = values.abs().sort().values
    at = float(sizes[int(0.05 * len(sizes))])
    true = float(sizes[-1]) / at
    assert true / 4 <= found.quantile_condition <= 4 * true
    assert found.quantile_interval[0] <= found.quantile_condition <= found.quantile_interval[1]
    assert found.condition_interval[0] <= float(down[0] / sizes.mean())
    assert float(down[0] / sizes.mean()) <= found.condition_interval[1]
    assert str(found)


def test_the_quantile_condition_leaves_the_null_space_out() -> None:
    values = torch.zeros(100, dtype=torch.float64)
    values[:50] = torch.linspace(0.5, 5, 50, dtype=torch.float64)
    found = ca.curvature_summary(SpectrumOperator(values))
    assert found.condition_quantile == 0.0
    assert found.quantile_condition == pytest.approx(10.0)
    assert found.condition_number == pytest.approx(5.0 / float(values.mean()))
    assert found.null_share == pytest.approx(0.5)


def test_flat_directions_of_a_transformer_are_named() -> None:
    torch.manual_seed(0)
    model = ViT(ViTConfig(d_model=8, d_ff=8)).double().eval()
    data = (torch.rand(6, 8, 8, dtype=torch.float64), torch.randint(0, 10, (6,)))
    problem = ca.Problem(model, "cross_entropy", data)
    found = ca.curvature_summary(ca.Hessian(problem), max_products=100, rtol=0.1)
    names = " ".join(found.null_space)
    assert "key_bias" in names, found.null_space
    assert "head" in names, found.null_space  # a shift of all logits
    assert "query" not in names.replace("query_bias", "")


def test_participation_adds_up_and_finds_a_planted_role() -> None:
    torch.manual_seed(0)
    model = ViT(ViTConfig(d_model=8, d_ff=8)).eval()
    data = (torch.rand(2, 8, 8), torch.randint(0, 10, (2,)))
    anatomy = ca.Problem(model, "cross_entropy", data).anatomy
    piece = next(p for p in anatomy if p.role == "value")
    planted = torch.zeros(anatomy.size)
    planted[torch.as_tensor(piece.indices)] = 1.0
    spread = torch.stack([planted, torch.ones(anatomy.size)], 1)
    found = ca.participation(spread, anatomy)
    assert torch.allclose(found.mass.sum(1), torch.ones(2, dtype=torch.float64))
    assert float(found.mass[0, found.groups.index("value")]) == pytest.approx(1.0)
    assert float(found.ratio[0]) == pytest.approx(1.0)
    assert float(found.ratio[1]) > 2
    assert float(found.entries[0]) == pytest.approx(piece.size)


def test_estimates_on_a_real_hessian_cover_its_exact_numbers() -> None:
    torch.manual_seed(1)
    model = ViT(ViTConfig(d_model=8, d_ff=16)).double().eval()
    data = (torch.rand(8, 8, 8, dtype=torch.float64), torch.randint(0, 10, (8,)))
    for kind in (ca.Hessian, ca.GaussNewton):
        op = kind(ca.Problem(model, "cross_entropy", data))
        matrix = op.dense()
        values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        top = ca.eigenpairs(op, k=3, which="both")
        want = torch.cat([values.flip(0)[:3], values[:3].flip(0)])
        assert bool(((top.values - want).abs() <= top.residuals).all())
        total = ca.trace(op, rtol=0.05)
        assert abs(total.value - float(values.sum())) <= 3 * total.error
        density = ca.spectral_density(op, max_products=120)
        n = len(values)
        distance = wasserstein(
            density.nodes.numpy(), density.weights.numpy(), values.numpy(), np.full(n, 1 / n)
        )
        assert distance <= density.wasserstein_error
