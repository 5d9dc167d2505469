"""A plan is drawn out from the first layers, and is right about all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import cli, planning
from curvatlas.cost_model import Device
from curvatlas.engines.kept import KeptLinearisations, kept_samples
from curvatlas.planning import LiveBytes, layered, shape_of
from curvatlas.problem.checkpointing import shortened
from curvatlas.zoo.models import GPT, GPTConfig


def gpt_problem(layers: int, *, samples: int = 3, parts: int = 1) -> ca.Problem:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=20, context=8, d_model=16, n_heads=2, n_layers=layers)
    tokens = torch.randint(0, 20, (parts, samples, 9))
    batches = [(some[:, :-1].contiguous(), some[:, 1:].contiguous()) for some in tokens]
    return ca.Problem(GPT(config).eval(), "cross_entropy", batches)


class Residual(nn.Module):
    """A layer that nobody has written out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.inner(x))


def test_a_shortened_model_shares_its_weights_and_leaves_the_whole_one_alone() -> None:
    problem = gpt_problem(5)
    short = problem.with_fewer_blocks(2)
    whole, cut = dict(problem.model.named_parameters()), dict(short.model.named_parameters())
    assert all(cut[name] is whole[name] for name in cut)
    assert len(list(problem.model.modules())) > len(list(short.model.modules()))
    assert short.size == sum(p.numel() for p in cut.values())
    # the same layers in the same places as a model of two layers has
    alone = gpt_problem(2)
    alone.model.load_state_dict(short.model.state_dict())
    batch = next(problem.batches())
    torch.testing.assert_close(short.model(batch.inputs), alone.model(batch.inputs))
    torch.testing.assert_close(short.gradient(), alone.gradient())


def test_live_bytes_counts_what_is_alive_and_no_views() -> None:
    outside = torch.zeros(1000)
    with LiveBytes() as live:
        a = torch.zeros(500, dtype=torch.float64)  # 4000
        b = a.view(5, 100)[1:]
        c = outside + 1  # 4000
        outside.mul_(2).view(10, 100)
        assert live.now == 8000
        del c
        d = b * 2  # 3200
        assert live.now == 7200
        del a
        assert live.now == 7200  # the view holds it
        del b, d
        assert live.now == 0
    assert live.peak == 8000


def test_memory_drawn_out_from_four_layers_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvatlas.engines.tangent.model.ONE_RUN_BYTES", 2**18)
    monkeypatch.setattr("curvatlas.engines.tangent.model.RUN_SHARE", 0.0)
    problem, budget = gpt_problem(7, samples=40), 2**30
    model = layered(problem)
    way = planning._way_of(model, budget)
    assert way.run == 20
    cost = planning._cost(model, way, "H", recompute=False, count=True)
    monkeypatch.setattr(planning, "_LONG", 7)  # the whole model is its own trial
    truth = planning._cost(model, way, "H", recompute=False, count=True)
    assert cost.beside == pytest.approx(truth.beside, rel=0.02)
    operator = ca.Hessian(problem)
    operator @ torch.ones(problem.size)
    assert cost.sample * 40 == pytest.approx(operator.held_bytes, rel=0.01)


@pytest.mark.parametrize("budget", [2**17, 2**18, 2**19, 2**20, 2**22])
@pytest.mark.parametrize("samples", [1, 7, 64])
@pytest.mark.filterwarnings("ignore:the budget of")
def test_what_is_kept_is_decided_as_by_the_operator(budget: int, samples: int) -> None:
    problem = gpt_problem(1, samples=samples)
    for sample_bytes in (100, 3000, 40_000):
        kept = KeptLinearisations(
            problem, problem.parameter_names, lambda *_: None, budget=budget,  # type: ignore[arg-type, return-value]
            probe_bytes=sample_bytes, probe_samples=1,
        )  # fmt: skip
        found = kept_samples(
            budget=budget, vector_bytes=4 * problem.size, sample_bytes=sample_bytes, samples=samples
        )
        assert found == (kept._most_samples, kept._keep_all)


def test_a_plan_says_what_to_do_and_saves_itself(tmp_path: Path) -> None:
    plan = ca.plan(gpt_problem(6, parts=2))
    assert (plan.parameters, plan.samples, plan.tokens) == (gpt_problem(6).size, 6, 8)
    assert plan.engine == "tangent"
    kept, anew = plan.options
    assert kept.memory > anew.memory
    assert plan.best is kept or plan.best is anew
    assert all(option.fits and option.seconds["H"] > 0 for option in plan.options)
    text = str(plan)
    assert "activations kept" in text
    assert "checkpoint_activations" in anew.how
    plan.save(tmp_path / "plan.safetensors")
    again = ca.load(tmp_path / "plan.safetensors")
    assert isinstance(again, ca.Plan)
    assert str(again) == text
    narrow = tuple(replace(option, limit=20_000) for option in plan.options)
    tight = replace(plan, options=narrow)
    assert tight.best is None
    assert tight.value == float("inf")
    assert "None of these fits" in str(tight)


def test_layers_that_are_not_known_are_planned_on_the_tape() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*[Residual() for _ in range(6)]), nn.Linear(4, 2))
    problem = ca.Problem(model, "mse", (torch.randn(5, 4), torch.randn(5, 2)))
    plan = ca.plan(problem)
    assert plan.engine == "tape"
    assert [option.name for option in plan.options] == ["activations kept"]
    device = Device(operations_per_second=1e12, memory=1e9)
    with pytest.raises(ValueError, match="cannot be read"):
        ca.plan(problem, devices=(2,), device=device)
    with pytest.raises(ValueError, match="needs device="):
        ca.plan(problem, devices=(2,))


def test_shortening_keeps_what_is_tied() -> None:
    stack = nn.Sequential(*[Residual() for _ in range(5)])
    stack[1].inner = stack[0].inner
    short = shortened(stack, 3)
    assert len(list(short.children())) == 3
    assert len(list(short.parameters())) == 4
    assert len(list(stack.children())) == 5


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    streams = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 1), streams.out, streams.err


@pytest.mark.huggingface
def test_eight_billion_parameters_are_planned_from_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    how = ("--tokens", "65536", "--length", "1024", "--devices", "1,64", "--json")
    code, out, _ = told(capsys, str(tmp_path), *how)
    assert code == 0
    plan = json.loads(out)
    assert plan["parameters"] == 8_030_261_248
    one, many = plan["options"]
    assert one["memory"] > one["limit"]
    assert many["memory"] < many["limit"]
    code, _, err = told(capsys, str(tmp_path))
    assert code == 2
    assert "--devices" in err


@pytest.mark.huggingface
def test_a_folder_is_tried_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    small: dict[str, Any] = {
        **LLAMA,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 50,
    }
    (tmp_path / "config.json").write_text(json.dumps(small))
    code, out, err = told(capsys, str(tmp_path), "--tokens", "32", "--length", "8", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["engine"], plan["samples"], plan["tokens"]) == ("tangent", 4, 8)


def test_wrong_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "gpt", "--devices", "two")[0] == 2
    code, _, err = told(capsys, "vit")
    assert code == 2
    assert "name DATA" in err
    code, out, _ = told(capsys, "vit", "digits", "--samples", "4")
    assert code == 0
    assert "4 × 16 tokens" in out


def test_the_shape_of_a_model_is_read_without_weights() -> None:
    with torch.device("meta"):
        config = GPTConfig(vocabulary=50, context=8, d_model=16, n_heads=2, n_layers=3, d_ff=40)
        model = GPT(config)
    shape = shape_of(model)
    assert (shape.layers, shape.width, shape.hidden, shape.heads) == (3, 16, 40, 2)
    assert shape.vocabulary == 50
