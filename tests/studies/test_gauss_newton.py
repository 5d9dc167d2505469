"""How good Gauss-Newton is: dense oracles, probes that cover them, KFAC's layers, the verdict."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import curvatlas as ca
from curvatlas import zoo
from curvatlas.errors import ProblemError
from curvatlas.results import same
from curvatlas.studies import gauss_newton as module
from curvatlas.studies.gauss_newton import adam_diagonal
from huggingface_models import tiny_config
from oracles import gradient, hessian, outer_hessian, with_hand_written_norms


def small_vit(samples: int = 6) -> tuple[ca.Problem, Tensor, Tensor]:
    model = zoo.reference_vit(d_model=4, d_ff=4, patch_size=4).double()
    batch = zoo.digits().train.take(samples)
    data = batch.inputs.double(), batch.targets
    return ca.Problem(model, "cross_entropy", data), *data


@functools.cache
def exact_quality() -> ca.GaussNewtonQuality:
    """Of the small ViT, from dense matrices."""
    return ca.gauss_newton_quality(small_vit()[0], damping=0.01)


def test_every_number_is_that_of_the_dense_matrices() -> None:
    problem, images, labels = small_vit()
    result = exact_quality()
    kfac, ekfac = (kind(problem).dense() for kind in (ca.KFAC, ca.EKFAC))
    model = with_hand_written_norms(problem.model)
    parameters = [model.get_parameter(name) for name in problem.parameter_names]
    outputs = model(images)
    whole = hessian(F.cross_entropy(outputs, labels), parameters)
    outer = outer_hessian(outputs, lambda z: F.cross_entropy(z, labels), parameters)
    slopes = torch.stack(
        [
            gradient(F.cross_entropy(model(images[n : n + 1]), labels[n : n + 1]), parameters)
            for n in range(len(images))
        ]
    )
    adam = slopes.pow(2).mean(0).sqrt()
    assert torch.allclose(adam_diagonal(problem), adam, atol=1e-12)

    assert result.exact
    top, top_outer = (torch.linalg.eigvalsh(m)[-1] for m in (whole, outer))
    assert result.ratio == pytest.approx(float(top_outer / top), rel=1e-9)
    share = result.functional_share["model"].value
    assert share == pytest.approx(float((whole - outer).norm() / whole.norm()), rel=1e-9)
    query = torch.cat([p.indices for p in problem.anatomy if p.role in ("query", "query_bias")])
    own = [m[query][:, query].norm() for m in (whole - outer, whole)]
    assert result.functional_share["query"].value == pytest.approx(float(own[0] / own[1]), rel=1e-8)

    blocks = torch.zeros_like(outer)
    for block in module.blocks_of(problem.anatomy, biases=False):
        blocks[block.indices[:, None], block.indices] = outer[block.indices[:, None], block.indices]
    stand_ins = {
        "gauss_newton": outer, "kfac": kfac, "ekfac": ekfac, "adam": adam.diag(),
        "block_diagonal": blocks,
    }  # fmt: skip
    for name, matrix in stand_ins.items():
        one = result[name]
        for found, target, kappa in (
            (one.to_hessian, whole, one.condition_hessian),
            (one.to_outer, outer, one.condition_outer),
        ):
            want = float((matrix - target).norm() / target.norm())
            assert found.value == pytest.approx(want, rel=1e-8, abs=1e-12), name
            values, vectors = torch.linalg.eigh(target)
            delta = 0.01 * float(values.abs().max())
            scale = float(values.abs().sum() / matrix.trace()) if name == "adam" else 1.0
            eye = torch.eye(len(values), dtype=torch.float64)
            top_part = (vectors * (values.abs() + delta)) @ vectors.T
            ends = torch.linalg.eigvals(torch.linalg.solve(scale * matrix + delta * eye, top_part))
            want = float(ends.real.max() / ends.real.min())
            assert kappa == pytest.approx(want, rel=1e-5), name
    assert result["gauss_newton"].condition_outer == pytest.approx(1.0)
    assert result["ekfac"].to_outer.value <= result["kfac"].to_outer.value
    assert "block diagonal of H_o" in str(result)
    assert result.plot().axes


def test_probes_cover_the_exact_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, *_ = small_vit()
    exact = exact_quality()
    monkeypatch.setattr(module, "DENSE_UP_TO", 1)
    monkeypatch.setattr(module, "_END_PRODUCTS", 8)  # condition numbers have a test of their own
    misses = 0
    for seed in range(3):
        probed = ca.gauss_newton_quality(problem, probes=12, seed=seed)
        assert not probed.exact
        assert probed.ratio == pytest.approx(exact.ratio, rel=2e-3)
        for name, one in probed.approximations.items():
            if name == "identity":
                continue
            for found, want in (
                (one.to_hessian, exact[name].to_hessian),
                (one.to_outer, exact[name].to_outer),
            ):
                low, high = found.interval
                misses += not low <= want.value * (1 + 1e-9) <= high * (1 + 2e-9)
    # Of 190 intervals of 19 other seeds 4 were missed, by 3 seeds. Negative binomial counts of this
    # mean and variance lie above 8 of 30 once in 30,000.
    assert misses <= 8


def test_condition_numbers_without_dense_matrices_hold_the_exact_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, *_ = small_vit()
    exact = exact_quality()
    monkeypatch.setattr(module, "DENSE_UP_TO", 1)
    probed = ca.gauss_newton_quality(problem, damping=0.01, probes=3)
    assert probed["gauss_newton"].condition_outer == 1.0
    for name in ("ekfac", "kfac", "adam", "identity"):
        found, want = probed[name], exact[name]
        low, high = found.condition_outer_interval
        assert low <= want.condition_outer <= high, name
        assert high < 1.1 * low
        assert not found.condition_outer_is_bound
        # with |H| only bounds: never above the truth, and not far below it
        least, most = found.condition_hessian_interval
        assert found.condition_hessian_is_bound
        assert least <= want.condition_hessian <= most, name
        assert found.condition_hessian > want.condition_hessian / 4
    assert "≥" in str(probed)


def test_a_quality_run_that_was_stopped_goes_on_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DENSE_UP_TO", 1)
    monkeypatch.setattr(module, "_END_PRODUCTS", 8)
    problem, *_ = small_vit()
    whole = ca.gauss_newton_quality(problem, probes=3)
    ends = module._Conditions.of

    def stopped(self: Any, name: str, *rest: Any) -> Any:
        if name == "kfac":
            raise KeyboardInterrupt
        return ends(self, name, *rest)

    monkeypatch.setattr(module._Conditions, "of", stopped)
    with pytest.raises(KeyboardInterrupt):
        ca.gauss_newton_quality(problem, probes=3, output=tmp_path / "run")
    kept = set(ca.runs.load(tmp_path / "run").results)
    assert kept == {"gauss_newton.distances", "gauss_newton.ends", "gauss_newton.ekfac"}
    monkeypatch.setattr(module._Conditions, "of", ends)
    monkeypatch.setattr(module, "_distances", lambda *_: pytest.fail("computed twice"))
    assert same(ca.gauss_newton_quality(problem, probes=3, output=tmp_path / "run"), whole)


def test_a_gpt2_as_it_is_has_every_parameter_in_a_layer_of_kfac(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(tiny_config("gpt2", n_embd=8, n_head=2, n_layer=1)).double().eval()
    tokens = torch.randint(19, (1, 4))
    problem = ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    assert ca.KFAC(problem).uncovered == ()
    monkeypatch.setattr(module, "DENSE_UP_TO", 1)
    monkeypatch.setattr(module, "_END_PRODUCTS", 8)
    result = ca.gauss_newton_quality(problem, probes=3)
    assert result["ekfac"].to_outer.value < 1
    assert set(result.approximations) == set(module.NAMES)


def test_a_transformer_is_compared_with_an_mlp_of_its_size_and_seeds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(seed: int) -> Any:
        return zoo.reference_vit(seed=seed, d_model=4, d_ff=4, patch_size=4)

    options: Any = {"seeds": (0, 1), "steps": 5, "samples": 8, "output": tmp_path / "run"}
    result = ca.compare_gauss_newton(make, **options)
    small, large = sorted(result.sizes.values())
    assert large - small < 40
    assert len(result.claims) == 6
    first = result.claims[0]
    row = {name: result.rows[f"{name} at initialisation"] for name in result.sizes}
    misses = {n: [abs(1 - v) for v in row[n]["λmax(H_o)/λmax(H)"].values] for n in row}
    want = [a - b for a, b in zip(misses["Transformer"], misses["MLP"], strict=True)]
    assert first.value.values == pytest.approx(want)
    assert result.verdict == first.verdict
    monkeypatch.setattr(module, "gauss_newton_quality", None)  # nothing is measured again
    assert same(ca.compare_gauss_newton(make, **options), result)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "worse for the Transformer" in page


def test_what_cannot_be_compared_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="at least 2 seeds, got 1"):
        ca.compare_gauss_newton(seeds=(0,))
    tokens = torch.randint(9, (4, 6))
    with pytest.raises(ProblemError, match="a matched MLP reads numbers"):
        ca.compare_gauss_newton(lambda seed: zoo.reference_gpt(), (tokens, tokens))
    problem, *_ = small_vit(2)
    with pytest.raises(ValueError, match="damping is a share"):
        ca.gauss_newton_quality(problem, damping=0.0)
