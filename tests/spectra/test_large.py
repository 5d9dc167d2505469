"""Spectra of models that fill the memory: bases in fewer bits, restarts, three-vector Lanczos."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import curvatlas as ca
from curvatlas import files
from curvatlas.results import same
from curvatlas.spectra.krylov import KrylovBasis
from spectra.spectrum_operators import SpectrumOperator, spectra


class InFloat32(ca.LinearOperator):
    """The same operator, computing in float32."""

    def __init__(self, values: Tensor) -> None:
        self.inner = SpectrumOperator(values)
        super().__init__(self.inner.shape, dtype=torch.float32, tags=self.inner.tags)

    def _columns(self, columns: Tensor) -> Tensor:
        return (self.inner @ columns.double()).float()


@pytest.mark.parametrize("rows", [None, 12])
@pytest.mark.parametrize("which", ["largest", "both"])
def test_a_bfloat16_basis_gives_intervals_that_hold(which: str, rows: int | None) -> None:
    values = spectra()["hessian_like"]
    op = InFloat32(values)
    memory = None if rows is None else rows * 2 * op.shape[0]
    found = ca.eigenpairs(op, k=3, which=which, tol=0.02, storage=torch.bfloat16, memory=memory)
    assert found.converged
    assert found.vectors.dtype == torch.bfloat16
    want = values.sort(descending=True).values[:3]
    low, high = found.interval
    inside = (low[:, None] <= values) & (values <= high[:, None])
    assert bool(inside.any(1).all())  # every interval holds an eigenvalue
    assert bool(((low[:3] <= want) & (want <= high[:3])).all())
    # Rounding a basis costs the square of its error: far less than bfloat16's 0.4 %.
    assert float(((found.values[:3] - want).abs() / want.abs().max()).max()) < 1e-3


def test_the_residual_of_a_rounded_basis_is_the_true_one() -> None:
    values = spectra()["hessian_like"]
    op = InFloat32(values)
    basis = KrylovBasis(op, 40, storage=torch.bfloat16)
    basis.add_random(torch.Generator().manual_seed(0))
    for _ in range(25):
        basis.expand()
    ritz = basis.ritz()
    top = basis.vectors(ritz.coordinates[:, -1:])[:, 0]
    true = float((op @ top - ritz.values[-1] * top).norm() / top.norm())
    assert 0.2 * ritz.residuals[-1] <= true <= 1.05 * ritz.residuals[-1]


def test_a_bfloat16_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    values = spectra()["hessian_like"]
    options = {"k": 3, "tol": 0.02, "storage": torch.bfloat16}
    whole = ca.eigenpairs(SpectrumOperator(values), **options)
    with pytest.raises(KeyboardInterrupt):
        ca.eigenpairs(SpectrumOperator(values, fail_at=6), checkpoint=tmp_path / "c", **options)
    again = ca.eigenpairs(SpectrumOperator(values), checkpoint=tmp_path / "c", **options)
    assert same(again, whole)


def test_three_vector_lanczos_integrates_like_the_reorthogonalised_one(tmp_path: Path) -> None:
    values = spectra()["hessian_like"]
    op = InFloat32(values)
    found = ca.spectral_density(op, max_products=160, probes=4, steps=40, reorthogonalise=False)
    for function in (lambda x: x, lambda x: x**2, torch.exp):
        got = float(found.weights @ function(found.nodes))
        every = [float(function(values.double()).mean())]
        # One probe's scatter is √(2 Σ f² / n²); four of them halve it.
        spread = float((2 * function(values.double()).square().sum()).sqrt()) / len(values) / 2
        assert abs(got - every[0]) < 4 * spread
    assert float(found.nodes.max()) == pytest.approx(float(values.max()), rel=1e-4)
    with pytest.raises(KeyboardInterrupt):
        ca.spectral_density(
            SpectrumOperator(values, fail_at=50), max_products=160, probes=4, steps=40,
            reorthogonalise=False, checkpoint=tmp_path / "c",
        )  # fmt: skip
    resumed = SpectrumOperator(values)
    again = ca.spectral_density(
        resumed, max_products=160, probes=4, steps=40, reorthogonalise=False,
        checkpoint=tmp_path / "c",
    )  # fmt: skip
    assert resumed.products < 120  # the rest was in the checkpoint
    whole = ca.spectral_density(
        SpectrumOperator(values), max_products=160, probes=4, steps=40, reorthogonalise=False
    )
    assert torch.equal(again.nodes, whole.nodes)


def test_our_writer_is_read_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16()[:2],
        "double": torch.randn(4, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "number": torch.tensor(3, dtype=torch.int64),
    }
    files.write(tmp_path / "file", tensors, {"a": "b"})
    read = load_file(tmp_path / "file")
    assert {k: v.dtype for k, v in read.items()} == {k: v.dtype for k, v in tensors.items()}
    assert all(torch.equal(read[k], v) for k, v in tensors.items())


def test_a_full_disk_costs_no_result_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = spectra()["hessian_like"]
    whole = ca.eigenpairs(SpectrumOperator(values), k=3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ca.eigenpairs(SpectrumOperator(values), k=3, checkpoint=tmp_path / "c")
    assert same(found, whole)
    messages = [str(w.message).lower() for w in caught]
    assert any("no space left" in m and "free some space" in m for m in messages)
    assert not list(tmp_path.iterdir())  # no debris


def test_a_start_is_spread_over_a_basis_as_before() -> None:
    values = spectra()["hessian_like"]
    op = SpectrumOperator(values)
    basis = KrylovBasis(op, 12)
    basis.add_random(torch.Generator().manual_seed(3))
    for _ in range(10):
        basis.expand()
    rows = basis.rows[: basis.count]
    assert float((rows @ rows.T - torch.eye(basis.count)).abs().max()) < 1e-12
    assert np.all(basis.drift == 0)


def test_a_basis_in_bfloat16_also_measures_the_scatter_of_batches() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(3)]
    operator = ca.Hessian(ca.Problem(model, "cross_entropy", batches))
    plain = ca.eigenpairs(operator, k=2)
    packed = ca.eigenpairs(operator, k=2, storage=torch.bfloat16)
    assert packed.data_interval is not None
    assert plain.data_interval is not None
    widths = [float((r.data_interval[1] - r.data_interval[0])[0]) for r in (plain, packed)]
    assert widths[1] == pytest.approx(widths[0], rel=0.05)
