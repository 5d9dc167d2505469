"""Which layers: costs by layer, role and head, bits for a size, and the two verbs."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import curvatlas as ca
from curvatlas import zoo
from curvatlas.training.compression import give_out_bits
from curvatlas.training.pruning import round_to, step_sizes


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    data, model = zoo.digits(), zoo.reference_vit(d_model=8, n_heads=2)
    zoo.train(model, data, steps=60, lr=1.6e-2)
    inputs, targets = data.train.take(24)
    return model.double().eval(), (inputs.double(), targets)


def _loss(model: Any, batch: Any) -> float:
    return ca.Problem(model, "cross_entropy", batch).value()


@pytest.mark.parametrize("by", ["part", "layer", "role", "head"])
def test_every_group_is_removed_alone_and_measured(trained: Any, by: Any) -> None:
    model, batch = trained
    pruning = ca.prune(model, "cross_entropy", batch, sparsity=0.3, method="magnitude")
    table = ca.pruning_costs(model, "cross_entropy", batch, pruning, by=by)
    assert sum(row.weights for row in table.rows) == sum(
        p.size for p in ca.anatomy_of(model) if p.role in pruning.role_sparsity
    )
    assert table.measured == pytest.approx(pruning.loss_after - pruning.loss_before, abs=1e-12)
    numbers = [n for row in table.rows for n in (row.predicted, row.measured, row.changed)]
    assert all(torch.isfinite(torch.tensor(numbers)))
    if by == "head":
        assert any(row.name.endswith(".head1") for row in table.rows)


def test_a_role_alone_costs_what_writing_its_pruned_weights_costs(trained: Any) -> None:
    model, batch = trained
    pruning = ca.prune(model, "cross_entropy", batch, sparsity=0.5, method="obd")
    table = ca.pruning_costs(model, "cross_entropy", batch, pruning, by="role")
    (row,) = [row for row in table.rows if row.role == "value"]
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if "value.weight" in name:
            parameter.data.copy_(pruning.weights[name])
    expected = _loss(other, batch) - _loss(model, batch)
    assert row.measured == pytest.approx(expected, rel=1e-9, abs=1e-13)
    assert row.changed == pytest.approx(pruning.role_sparsity["value"], abs=1e-9)


def test_a_small_change_is_predicted_to_third_order(trained: Any) -> None:
    model, batch = trained
    table = ca.rounding_costs(model, "cross_entropy", batch, bits=(10, 9), by="layer")
    for row in table.rows:
        assert row.predicted == pytest.approx(row.measured, rel=0.02)
    assert {row.bits for row in table.rows} == {9, 10}


def test_magnitude_pruning_predicts_its_rise(trained: Any) -> None:
    model, batch = trained
    pruning = ca.prune(model, "cross_entropy", batch, sparsity=0.02, method="magnitude")
    assert pruning.predicted_rise == pytest.approx(
        pruning.loss_after - pruning.loss_before, rel=0.1, abs=1e-9
    )


def test_bits_are_given_out_as_an_exhaustive_search_gives_them() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = {"a": 4, "b": 4, "c": 4}
        scale = torch.rand(3, generator=generator).tolist()
        costs = {p: {b: s * 4.0**-b for b in (2, 4, 6)} for p, s in zip(sizes, scale, strict=True)}
        chosen = give_out_bits(costs, sizes, 4.0)
        best = min(
            (
                sum(costs[p][b] for p, b in zip(sizes, choice, strict=True))
                for choice in itertools.product((2, 4, 6), repeat=3)
                if sum(choice) <= 12
            ),
        )
        assert sum(costs[p][b] for p, b in chosen.items()) <= best * (1 + 1e-9)
    with pytest.raises(ValueError, match="less than the 2 bits"):
        give_out_bits(costs, sizes, 1.5)


def test_an_allocation_stays_within_its_size_and_rounds_as_it_says(trained: Any) -> None:
    model, batch = trained
    allocation = ca.allocate_bits(model, "cross_entropy", batch, average=3.5, bits=(2, 3, 4, 8))
    assert allocation.used <= 3.5
    assert len({row.bits for row in allocation.rows}) > 1
    other = copy.deepcopy(model)
    allocation.apply(other)
    assert _loss(other, batch) - _loss(model, batch) == pytest.approx(
        allocation.measured, abs=1e-12
    )
    (row,) = [row for row in allocation.rows if row.name == "blocks.0.up"]
    assert row.bits is not None
    weights = dict(model.named_parameters())
    (name,) = [n for n in allocation.rounded if "up.weight" in n or n.endswith("up.weight")]
    torch.testing.assert_close(allocation.rounded[name], round_to(weights[name].detach(), row.bits))


def test_rounding_by_curvature_costs_less_than_rounding_to_the_nearest(trained: Any) -> None:
    model, batch = trained
    table = ca.quantization_table(
        model, "cross_entropy", batch, bits=(4, 3), groups=(4, None), samples=200
    )
    rows = {(row.bits, row.group, row.rounding): row for row in table.rows}
    assert len(rows) == 8
    for row in table.rows:
        low, high = row.predicted_interval
        assert low <= row.rise <= high
    assert rows[4, 4, "nearest"].bits_per_weight == 4 + 16 / 4
    assert table.plot().axes
    costs = {}
    for rounding in ("nearest", "curvature"):
        result = ca.quantize(
            model, "cross_entropy", batch, bits=3, group=None, rounding=rounding, samples=200
        )
        problem = ca.Problem(model, "cross_entropy", batch, parameters=list(result.weights))
        new = torch.cat([result.weights[n].reshape(-1) for n in problem.parameter_names])
        delta = new - problem.parameters
        costs[rounding] = float(delta @ (ca.GaussNewton(problem) @ delta))
    assert costs["curvature"] < 0.8 * costs["nearest"]


def test_quantized_weights_are_on_the_grid_of_their_groups(trained: Any) -> None:
    model, batch = trained
    for rounding in ("nearest", "curvature"):
        result = ca.quantize(
            model, "cross_entropy", batch, bits=4, group=4, rounding=rounding, samples=24
        )
        other = copy.deepcopy(model)
        result.apply(other)
        assert _loss(other, batch) == pytest.approx(result.loss_after, rel=1e-12)
        for name, weights in result.weights.items():
            own = dict(model.named_parameters())[name].detach()
            levels = weights / step_sizes(own, 4, 4)
            assert float((levels - levels.round()).abs().max()) < 1e-9, (name, rounding)
            assert float(levels.abs().max()) < 7 + 1e-9
    nearest = ca.quantize(model, "cross_entropy", batch, bits=4, group=4, rounding="nearest")
    for name, weights in nearest.weights.items():
        own = dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(weights, round_to(own, 4, 4))


def test_a_transposed_matrix_is_grouped_along_its_inputs() -> None:
    from huggingface_models import tiny_model

    model = tiny_model("gpt2").double().eval()
    tokens = torch.arange(12).reshape(2, 6) % 7
    batch = {"input_ids": tokens, "labels": tokens}
    result = ca.quantize(model, None, batch, bits=3, group=2, rounding="nearest")
    name = next(n for n in result.weights if n.endswith("c_fc.weight"))  # stored (in, out)
    own = dict(model.named_parameters())[name].detach()
    torch.testing.assert_close(result.weights[name], round_to(own.T, 3, 2).T)
    fused = next(n for n in result.weights if n.endswith("c_attn.weight"))
    own = dict(model.named_parameters())[fused].detach()
    torch.testing.assert_close(result.weights[fused], round_to(own.T, 3, 2).T)


def _run(arguments: list[str], cwd: Path, monkeypatch: Any, capsys: Any) -> tuple[int, str, str]:
    from curvatlas import cli

    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["curvatlas", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    code: Any = stopped.value.code
    return code, captured.out, captured.err


@pytest.mark.draws
def test_the_verbs_print_a_table_and_save_weights_that_load_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for function in (ca.prune, ca.quantization_table):  # gradients, of which hundreds say no more
        monkeypatch.setitem(inspect.unwrap(function).__kwdefaults__, "samples", 32)
    words = ["vit", "digits", "--samples", "8", "--dtype", "float64"]
    code, out, err = _run(
        ["prune", *words, "--by", "layer", "--stages", "1", "--save", "less.safetensors"],
        tmp_path,
        monkeypatch,
        capsys,
    )
    assert code == 0, err
    assert "blocks.0" in out
    assert "magnitude at 50%" in out
    assert "nan" not in out.lower()
    (page,) = tmp_path.glob("curvatlas-runs/prune-*/report.html")
    text = page.read_text(encoding="utf-8")
    for words_of_page in (
        'id="pruning"',
        "What does removing weights cost?",
        "the loss on the way to the pruned weights",
        "obs, layers by curvature",
        "magnitude, layers by curvature",
    ):
        assert words_of_page in text
    short = ["--bits", "8,4", "--groups", "4,row"]
    arguments = ["quantize", *words, "--weights", "less.safetensors", *short, "--json"]
    code, out, err = _run(arguments, tmp_path, monkeypatch, capsys)
    assert code == 0, err
    results = json.loads(out)["results"]
    assert results["model.bits"]["used"] <= 4.0
    assert results["model.rounding_costs"]["rows"]
    rows = results["model.rounding"]["rows"]
    assert [(row["bits"], row["group"], row["rounding"]) for row in rows][:3] == [
        (8, 4, "nearest"),
        (8, 4, "curvature"),
        (8, None, "nearest"),
    ]
    (page,) = tmp_path.glob("curvatlas-runs/quantize-*/report.html")
    assert "Rounding all weights" in page.read_text(encoding="utf-8")
    code, _, err = _run(["quantize", *words, "--groups", "a"], tmp_path, monkeypatch, capsys)
    assert code == 2
    assert "--groups takes whole numbers or row" in err
    code, _, err = _run(["quantize", *words, "--bits", "a"], tmp_path, monkeypatch, capsys)
    assert code == 2
    assert "--bits takes whole numbers" in err
    code, _, err = _run(["prune", *words, "--sparsity", "2"], tmp_path, monkeypatch, capsys)
    assert code == 2
