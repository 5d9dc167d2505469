from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import curvatlas as ca
import forked
from curvatlas.results import same
from spectra.spectrum_operators import SpectrumOperator, spectra

ESTIMATES: dict[str, Callable[..., ca.Result]] = {
    "eigenpairs": lambda op, **o: ca.eigenpairs(op, k=4, which="both", tol=1e-6, **o),
    "restarted": lambda op, **o: ca.eigenpairs(op, k=3, tol=1e-8, memory=24 * 6400, **o),
    "trace": lambda op, **o: ca.trace(op, rtol=0.03, **o),
    "trace in little memory": lambda op, **o: ca.trace(
        op, rtol=0.03, max_products=60, memory=20 * 6400, **o
    ),
    "frobenius": lambda op, **o: ca.frobenius_norm(op, rtol=0.03, **o),
    "diagonal": lambda op, **o: ca.diagonal(op, rtol=0.01, max_products=100, **o),
    "density": lambda op, **o: ca.spectral_density(op, max_products=150, **o),
    "spectral_norm": lambda op, **o: ca.spectral_norm(op, rtol=1e-6, **o),
}


@pytest.mark.parametrize("name", list(ESTIMATES))
def test_an_interrupted_run_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    estimate = ESTIMATES[name]
    values = spectra()["hessian_like"]
    whole = estimate(SpectrumOperator(values))
    stops = (1, 5, 17, whole.products - 2)  # type: ignore[attr-defined]
    for stop in (s for s in stops if s < whole.products):  # type: ignore[attr-defined]
        file = tmp_path / f"{stop}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            estimate(SpectrumOperator(values, fail_at=stop), checkpoint=file)
        resumed = estimate(SpectrumOperator(values), checkpoint=file)
        assert same(resumed, whole), (name, stop)


def test_a_finished_checkpoint_gives_the_result_without_products(tmp_path: Path) -> None:
    values = spectra()["hessian_like"]
    first = ca.eigenpairs(SpectrumOperator(values), k=3, checkpoint=tmp_path / "c")
    again = SpectrumOperator(values)
    assert same(ca.eigenpairs(again, k=3, checkpoint=tmp_path / "c"), first)
    assert again.products == 0


@pytest.mark.slow
def test_a_killed_process_leaves_a_checkpoint_that_resumes_exactly(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time, torch
            import curvatlas as ca
            class Slow(ca.LinearOperator):
                def __init__(self, pause):
                    tags = ca.Tags(symmetric=True)
                    super().__init__((600, 600), dtype=torch.float64, tags=tags)
                    g = torch.Generator().manual_seed(0)
                    self.values = torch.randn(600, generator=g, dtype=torch.float64) ** 3
                    self.pause = pause
                def _columns(self, columns):
                    time.sleep(self.pause)
                    return self.values[:, None] * columns
            file, pause, out = sys.argv[1], float(sys.argv[2]), sys.argv[3]
            ca.eigenpairs(Slow(pause), k=4, which="both", tol=1e-8, checkpoint=file).save(out)
            """
        )
    )

    def start(file: str, pause: float, out: str) -> forked.Forked:
        return forked.Forked(script, file, pause, out, cwd=tmp_path)

    assert start("whole", 0.0, "a.safetensors").finished().returncode == 0
    victim = start("killed", 0.05, "b.safetensors")
    deadline = time.monotonic() + 60
    while not (tmp_path / "killed").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.finished().returncode == -signal.SIGKILL
    assert not (tmp_path / "b.safetensors").exists()
    assert start("killed", 0.0, "b.safetensors").finished().returncode == 0
    left, right = ca.load(tmp_path / "a.safetensors"), ca.load(tmp_path / "b.safetensors")
    assert same(left, right)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    values = spectra()["hessian_like"]
    file = tmp_path / "c.safetensors"
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        ca.trace(SpectrumOperator(values), checkpoint=file)
    file.unlink()
    ca.trace(SpectrumOperator(values), checkpoint=file)
    with pytest.raises(ValueError, match="another estimate"):
        ca.trace(SpectrumOperator(values), checkpoint=file, seed=1)
    with pytest.raises(ValueError, match="another estimate"):
        ca.trace(SpectrumOperator(values.float()), checkpoint=file)
    with pytest.raises(ValueError, match="another estimate"):
        ca.spectral_density(SpectrumOperator(values), checkpoint=file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        ca.trace(SpectrumOperator(values), checkpoint=file)


def test_results_save_and_load(tmp_path: Path) -> None:
    values = spectra()["hessian_like"]
    for name, estimate in ESTIMATES.items():
        result = estimate(SpectrumOperator(values))
        assert same(ca.load(result.save(tmp_path / name)), result)
        assert str(result)
        assert result.plot() is not None  # type: ignore[attr-defined]


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    values = spectra()["hessian_like"]
    first, second, other = (ca.trace(SpectrumOperator(values), seed=s) for s in (0, 0, 1))
    assert same(first, second)
    assert first.value != other.value
    assert torch.get_default_dtype() == torch.float32


def problem(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> ca.Problem:
    return ca.Problem(model, "cross_entropy", [(x[:3], y[:3]), (x[3:], y[3:])])


@pytest.mark.parametrize("name", ["eigenpairs", "trace", "density", "diagonal", "frobenius"])
def test_a_checkpoint_knows_its_weights_data_and_loss(name: str, tmp_path: Path) -> None:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=numbers, dtype=torch.float64)
    y = torch.randint(0, 4, (8,), generator=numbers)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    ).double()
    file, estimate = tmp_path / "c", ESTIMATES[name]
    first = estimate(ca.Hessian(problem(model, x, y)), checkpoint=file)
    again = estimate(ca.Hessian(problem(model, x, y)), checkpoint=file)
    assert same(first, again)
    words = "other weights, data or loss"
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.raises(ValueError, match=words):
        estimate(ca.Hessian(problem(model, x, y)), checkpoint=file)
    with torch.no_grad():
        model[0].weight.div_(1.5)
    with pytest.raises(ValueError, match=words):
        estimate(ca.Hessian(problem(model, x + 1, y)), checkpoint=file)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.raises(ValueError, match=words):
        estimate(ca.Hessian(ca.Problem(model, loss, (x, y))), checkpoint=file)


def test_the_analyzer_measures_trained_weights_anew(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    model = torch.nn.Linear(4, 3)
    first = ca.TransformerHessianAnalyzer(model, folder=tmp_path)
    before = first.compute_hessian_eigenvalues(x, y, k=1).values
    with torch.no_grad():
        model.weight.mul_(4)
    second = ca.TransformerHessianAnalyzer(model, folder=tmp_path)
    truth = ca.TransformerHessianAnalyzer(model).compute_hessian_eigenvalues(x, y, k=1).values
    after = second.compute_hessian_eigenvalues(x, y, k=1).values
    assert torch.equal(after, truth)
    assert not torch.equal(after, before)
