"""Sinks: the biased model's own derivatives, masses by definition, verdicts, refusals, resuming."""

from __future__ import annotations

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
from curvatlas.spectra.density_result import exact_density
from curvatlas.studies import sinks as module
from curvatlas.studies.sinks import bulk_of, rank_correlation
from huggingface_models import tiny_config
from oracles import hessian, relative_error, with_hand_written_norms


def small_gpt(seed: int = 0, **options: Any) -> ca.Problem:
    sizes = {"vocabulary": 10, "context": 6, "n_layers": 1, "d_model": 4, "n_heads": 2, **options}
    model = zoo.reference_gpt(seed=seed, **sizes).double()
    tokens = torch.randint(10, (3, 7), generator=torch.Generator().manual_seed(seed))
    return ca.Problem(model, "cross_entropy", (tokens[:, :-1], tokens[:, 1:]))


def test_the_spectrum_is_that_of_a_model_with_the_bias_in_its_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = small_gpt()
    result = ca.sinks(problem, levels=(0, 3))
    batch = next(problem.batches())
    tokens, targets = batch.inputs, batch.targets
    names = [n for n in problem.parameter_names if ".attention." in n]
    model = with_hand_written_norms(problem.model)
    parameters = [model.get_parameter(name) for name in names]
    masked_fill = Tensor.masked_fill
    for level in result.levels:
        # zoo's attention masks its logits last: the bias is put in there, by plain addition
        first = level.bias * F.one_hot(torch.tensor(0), 6).double()
        monkeypatch.setattr(Tensor, "masked_fill", lambda t, *a, b=first: masked_fill(t + b, *a))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        monkeypatch.undo()
        dense = hessian(loss, parameters)
        values = torch.linalg.eigvalsh(dense)
        assert level.loss == pytest.approx(float(loss), rel=1e-12)
        assert level.largest == pytest.approx(float(values[-1]), rel=1e-9)
        assert relative_error(level.density.nodes.sort().values, values) < 1e-9
        place = result.names.index("blocks.0.query")
        assert names[0].endswith("query.weight")
        query = dense[:16, :16].norm()
        assert float(level.norms["total"][place, 0]) == pytest.approx(float(query), rel=1e-9)


def test_masses_are_the_mean_attention_on_the_first_token() -> None:
    problem = small_gpt(n_layers=2)
    result = ca.sinks(problem, levels=(0, 2), probes=3, heads=False)
    tokens = next(problem.batches()).inputs
    model: Any = problem.model
    x = model.token_embedding(tokens) + model.position_embedding
    for layer, block in enumerate(model.blocks):
        attention = block.attention.weights(block.norm1(x))
        want = attention[:, :, 1:, 0].mean((0, 2))
        assert torch.allclose(result.levels[0].mass[layer], want, atol=1e-12)
        x = block(x)
    assert float(result.levels[1].mass.mean()) > float(result.levels[0].mass.mean())
    steps = torch.arange(2.0, 7.0)
    assert result.uniform == pytest.approx(float((1 / steps).mean()), rel=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit"])
def test_hugging_face_models_take_a_sink_as_they_are(family: str) -> None:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, ViTForImageClassification

    torch.manual_seed(0)
    classes: Any = {
        "gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM, "vit": ViTForImageClassification
    }  # fmt: skip
    model = classes[family](tiny_config(family, num_hidden_layers=1)).double().eval()
    tokens = torch.randint(19, (2, 6))
    batch: Any = {"input_ids": tokens, "labels": tokens}
    if family == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 8, 8).double(), "labels": torch.tensor([0, 1])}
    problem = ca.Problem(model, "cross_entropy", batch)
    before = problem.value()
    result = ca.sinks(problem, levels=(0, 9), products=30, probes=3)
    assert float(result.levels[1].mass.min()) > 0.9 > float(result.levels[0].mass.max())
    assert result.levels[0].loss == pytest.approx(before, rel=1e-6)
    assert result.levels[1].loss != pytest.approx(before, rel=1e-9)
    assert problem.value() == before  # the model itself is as it was
    assert len(result.heads) == model.config.num_attention_heads
    masses = [head.mass for head in result.heads]
    assert masses == sorted(masses, reverse=True)
    assert set(result.heads[0].norms) == {"query", "key", "value", "output"}
    assert set(result.correlations) == {"query", "key", "value", "output"}
    assert "λmax over bulk" in str(result)
    assert result.plot().axes


def test_the_bulk_is_the_mean_size_of_the_ninety_percent_nearest_to_zero() -> None:
    values = torch.tensor([*[0.1, -0.1] * 9, 5.0, -7.0]).double()
    assert bulk_of(exact_density(values, 20, psd=False)) == pytest.approx(0.1)


@pytest.mark.draws
def test_the_verdict_over_seeds_counts_those_in_which_the_ratio_rises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: Any = {"seeds": (0, 1), "levels": (0, 3, 6), "probes": 3, "output": tmp_path / "run"}
    study = ca.sinks_over_seeds(small_gpt, **how)
    assert (tmp_path / "run" / "report.html").is_file()
    assert len(study.plot().axes[0].get_lines()) == 2
    with monkeypatch.context() as patched:
        patched.setattr(module, "sinks", None)  # nothing is computed again
        assert ca.sinks_over_seeds(small_gpt, **how).to_dict() == study.to_dict()
    rising = sum(run.verdict == "rises" for run in study.runs)
    assert study.verdict == {2: "holds", 1: "undecided", 0: "fails"}[rising]
    assert study.runs[0].verdict == (
        "rises" if list(study.runs[0].ratios) == sorted(study.runs[0].ratios) else "mixed"
    )
    with pytest.raises(ValueError, match="at least 2 seeds, got 1"):
        ca.sinks_over_seeds(small_gpt, seeds=(0,))


@pytest.mark.slow
def test_a_sink_stretches_the_spectrum_in_four_of_five_seeds() -> None:
    def make(seed: int) -> ca.Problem:
        model = zoo.reference_gpt(
            seed=seed, vocabulary=16, context=8, n_layers=1, d_model=8, n_heads=2
        )
        tokens = torch.randint(16, (6, 9), generator=torch.Generator().manual_seed(seed))
        return ca.Problem(model.double(), "cross_entropy", (tokens[:, :-1], tokens[:, 1:]))

    study = ca.sinks_over_seeds(make, probes=3)
    assert len(study.runs[0].levels) == 5
    assert sum(run.verdict == "rises" for run in study.runs) == 4
    assert study.verdict == "holds"
    # docs/case-studies/claims.md tells these
    assert study.claim.value.mean == pytest.approx(3.5, abs=0.05)
    assert study.claim.value.interval == pytest.approx((2.2, 5.4), abs=0.05)


def test_what_has_no_sink_is_one_clear_line() -> None:
    mlp = ca.Problem(zoo.MLP(), "cross_entropy", zoo.digits().train.take(4))
    with pytest.raises(ProblemError, match="MLP has no attention that is known"):
        ca.sinks(mlp)
    with pytest.raises(ProblemError, match="no softmax attention in layer 0"):
        ca.sinks(small_gpt(softmax=False))
    with pytest.raises(ValueError, match="2 or more finite levels"):
        ca.sinks(small_gpt(), levels=(1,))


@pytest.mark.draws
def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"levels": (0, 1, 2), "probes": 3, "output": tmp_path / "run"}
    measure, calls = module._level, []

    def dies_at_the_second(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no more")
        return measure(*args)

    monkeypatch.setattr(module, "_level", dies_at_the_second)
    with pytest.raises(MemoryError):
        ca.sinks(small_gpt(), **options)
    resumed = ca.sinks(small_gpt(), **options)
    assert len(calls) == 4  # the first level was kept
    assert same(resumed, ca.sinks(small_gpt(), **{**options, "output": None}))
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "What does a sink do to the spectrum?" in page


def test_a_rank_correlation_knows_order_and_its_doubt() -> None:
    rising = rank_correlation(range(20), [x**3 for x in range(20)])
    assert rising.value == pytest.approx(1.0)
    noise = torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist()
    low, high = rank_correlation(range(20), noise).interval
    assert low < 0 < high
