"""The cost model counts what is really done, and finds the rates it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import curvatlas as ca
from curvatlas.studies.cost_model import (
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    SMOLLM2_135M,
    Machine,
    Task,
    TransformerShape,
)
from curvatlas.zoo.models import GPT, GPTConfig
from script_loading import ROOT, load

cost_fits = load(ROOT / "benchmarks" / "harness" / "cost_fits.py")

KINDS = {"H": ca.Hessian, "H_o": ca.GaussNewton, "H_f": ca.FunctionalHessian}
SHAPES = [
    TransformerShape(layers=1, width=32, hidden=128, heads=2, vocabulary=50),
    TransformerShape(layers=3, width=24, hidden=60, heads=4, vocabulary=300),
    TransformerShape(
        layers=2, width=32, hidden=96, heads=4, key_value_heads=2, vocabulary=70, gated=True,
        tied=True,
    ),
]  # fmt: skip


def problem_of(shape: TransformerShape, samples: int, length: int) -> ca.Problem:
    torch.manual_seed(0)
    tokens = torch.randint(0, shape.vocabulary, (samples, length + 1))
    if not shape.gated:
        config = GPTConfig(
            vocabulary=shape.vocabulary, context=length, d_model=shape.width, d_ff=shape.hidden,
            n_heads=shape.heads, n_layers=shape.layers, tied=shape.tied,
        )  # fmt: skip
        batch: Any = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return ca.Problem(GPT(config).eval(), "cross_entropy", batch)
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.hidden, vocab_size=shape.vocabulary,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    ids = tokens[:, :length]
    batch = {"input_ids": ids, "labels": ids}
    return ca.Problem(transformers.LlamaForCausalLM(llama).eval(), "cross_entropy", batch)


@pytest.mark.parametrize("shape", SHAPES, ids=["one layer", "three layers", "gated, grouped"])
def test_the_operations_are_those_that_torch_counts(shape: TransformerShape) -> None:
    samples, length = 2, 12
    problem = problem_of(shape, samples, length)
    assert problem.size == pytest.approx(
        shape.parameters, rel=0.08
    )  # biases and norms are left out
    for quantity, kind in KINDS.items():
        # the model of costs is autograd's: hand-written passes only undercut it
        operator = kind(problem, engine="autograd", checks=False)
        vector = torch.randn(problem.size)
        operator @ vector
        with FlopCounterMode(display=False) as counter:
            operator @ vector
        task = Task(shape=shape, quantity=quantity, tokens=samples * length, length=length)  # type: ignore[arg-type]
        assert counter.get_total_flops() == pytest.approx(task.operations, rel=1e-3), quantity
        held = next(iter(operator._full))[1].held_bytes  # type: ignore[arg-type]
        assert held == pytest.approx(task.graph_bytes, rel=0.12), quantity


def test_published_sizes_come_out() -> None:
    known = {SMOLLM2_135M: 134.5e6, LLAMA_1B: 1.236e9, LLAMA_8B: 8.03e9, LLAMA_70B: 70.55e9}
    for shape, parameters in known.items():
        assert shape.parameters == pytest.approx(parameters, rel=2e-3)


def tasks(**options: Any) -> list[Task]:
    return [
        Task(shape=shape, quantity=quantity, tokens=tokens, length=16, **options)  # type: ignore[arg-type]
        for shape in SHAPES
        for quantity in ("H", "H_o")
        for tokens in (16, 64, 256)
    ]


def test_the_fit_finds_the_rates_that_made_the_times() -> None:
    machine = Machine(
        operations_per_second=5e10, bytes_per_second=4e9, seconds_per_call=2e-4,
        weight_bytes_per_second=3e8, link_bytes_per_second=1e9, seconds_per_message=1e-4,
        slowdown=1.2,
    )  # fmt: skip
    alone, shared = tasks(), tasks(processes=2)
    found = cost_fits.fit_machine(alone, [machine.seconds(task) for task in alone])
    found = cost_fits.fit_link(
        found, shared, [machine.seconds(task) for task in shared],
        reductions=[machine.reduction_seconds(task) for task in shared],
    )  # fmt: skip
    unseen = Task(shape=LLAMA_1B, tokens=4096, length=512, processes=4)
    assert found.seconds(unseen) == pytest.approx(machine.seconds(unseen), rel=1e-6)
    assert found.slowdown == pytest.approx(1.2, rel=1e-6)


def test_too_few_or_mixed_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least four"):
        cost_fits.fit_machine(tasks()[:3], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="one process"):
        cost_fits.fit_machine(tasks(processes=2), [1.0] * 18)


def test_costs_move_as_the_algorithm_says() -> None:
    task = Task(shape=LLAMA_8B, tokens=8192, length=1024)
    assert replace(task, tokens=16384).operations == 2 * task.operations
    assert replace(task, processes=8).operations == task.operations / 8
    assert task.messages == 0
    assert replace(task, processes=8).message_bytes == pytest.approx(
        2 * 7 / 8 * 4 * LLAMA_8B.parameters
    )
    # Micro-batches and checkpointing hold less at once and pay a gradient for it.
    cut = replace(task, at_once=1024)
    assert cut.graph_bytes == task.graph_bytes / 8
    assert cut.operations == pytest.approx(1.5 * task.operations)
    assert replace(cut, checkpointed=True).graph_bytes < cut.graph_bytes / 8
    # A sharded basis takes its share, a replicated model all of it.
    spread = replace(task, processes=64, at_once=1024)
    one, many = (t.memory_bytes(basis=40, basis_itemsize=2) for t in (cut, spread))
    assert one - many == pytest.approx(40 * 2 * LLAMA_8B.parameters * 63 / 64)
    assert Machine(operations_per_second=1e12, memory=one).fits(cut, basis=39, basis_itemsize=2)
    assert not Machine(operations_per_second=1e12, memory=0.9 * one).fits(
        cut, basis=40, basis_itemsize=2
    )
