"""Whole models by hand against double backward: stems, blocks, tails, and what they are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.engines.tangent import model as whole
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.zoo.models import GPT, GPTConfig, ViT, ViTConfig
from model_products import EXACT, TOKENS, family, linearised, off


def _gpt(**options: Any) -> tuple[nn.Module, Any, str]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=19, context=16, d_model=16, **options))
    return model, (TOKENS[:, :-1], TOKENS[:, 1:]), "cross_entropy"


def _vit(**options: Any) -> tuple[nn.Module, Any, str]:
    torch.manual_seed(0)
    images = torch.rand(4, 8, 8, dtype=torch.float64)
    return ViT(ViTConfig(**options)), (images, torch.tensor([1, 0, 7, 3])), "cross_entropy"


class Encoder(nn.Module):
    """What a user writes: own embeddings, torch's encoder, own head."""

    def __init__(self, *, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(19, 16, padding_idx=3)
        self.positions = nn.Parameter(torch.randn(1, 20, 16))
        layer = nn.TransformerEncoderLayer(
            16, 2, 24, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        if self.batch_first:
            result: Tensor = self.head(self.encoder(x))
            return result
        logits: Tensor = self.head(self.encoder(x.transpose(0, 1))).transpose(0, 1)
        return logits


def _encoder(**options: Any) -> tuple[nn.Module, Any, str]:
    torch.manual_seed(0)
    return Encoder(**options), (TOKENS, TOKENS.flip(1)), "cross_entropy"


def _adapted(kind: str, targets: list[str], *, frozen: bool) -> tuple[nn.Module, Any, None]:
    peft = pytest.importorskip("peft")
    model, data, loss = family(kind)
    options = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, options)
    return adapted if frozen else adapted.requires_grad_(True), data, loss


CASES: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "gpt": _gpt,
    "gpt tied": lambda: _gpt(tied=True),
    "gpt rope gated": lambda: _gpt(
        positions="rope", norm="rms", activation="swiglu", n_kv_heads=2, bias=False
    ),
    "gpt post-norm": lambda: _gpt(norm_first=False, positions="none"),
    "vit": _vit,
    "vit class token": lambda: _vit(pooling="class_token", n_layers=2, norm_first=True),
    "encoder": lambda: _encoder(batch_first=True, norm_first=True),
    "encoder, time first": lambda: _encoder(batch_first=False),
    "gpt2": lambda: family("gpt2"),
    "llama": lambda: family("llama"),
    "bert, masked": lambda: family("bert"),
    "albert": lambda: family("albert"),
    "opt": lambda: family("opt"),
    "bart": lambda: family("bart"),
    "gpt2 with lora": lambda: _adapted("gpt2", ["c_attn", "c_fc"], frozen=True),
    "llama with lora": lambda: _adapted("llama", ["q_proj", "v_proj", "down_proj"], frozen=False),
}


@functools.cache
def problem_of(name: str) -> ca.Problem:
    """The problem of a case, which no test changes."""
    model, data, loss = CASES[name]()
    return ca.Problem(model.double().eval(), loss, data)


@pytest.mark.parametrize("part", EXACT)
@pytest.mark.parametrize("name", CASES)
def test_products_of_a_whole_model_are_those_of_double_backward(name: str, part: str) -> None:
    problem = problem_of(name)
    with problem.evaluating():
        ours = linearised(problem, part)
        assert off(problem, ours, part) < 1e-11
    assert ours.value == pytest.approx(problem.value(), rel=1e-12)


@pytest.mark.parametrize("part", EXACT)
@pytest.mark.parametrize("name", ["gpt tied", "vit class token", "bert, masked", "albert"])
def test_columns_of_some_parameters_equal_padded_ones(name: str, part: str) -> None:
    problem = problem_of(name)
    names, shapes = problem.parameter_names, problem.layout.shapes
    # two columns for each parameter, zero for all the others
    count = 2 * len(names)
    padded = {
        n: torch.zeros(count, *s, dtype=torch.float64) for n, s in zip(names, shapes, strict=True)
    }
    for place, name in enumerate(names):
        padded[name][2 * place : 2 * place + 2].normal_()
    with problem.evaluating():
        ours = linearised(problem, part)
        every = [r if r is None else r.clone() for r in ours.product(padded, names)]
        for place, chosen in enumerate(names):
            two = slice(2 * place, 2 * place + 2)
            column = {chosen: padded[chosen][two]}
            want = {n: r if r is None else r[two] for n, r in zip(names, every, strict=True)}
            for rows in (names, names[::3]):
                got = torch.cat([r.flatten() for r in ours.product(column, rows) if r is not None])
                expected = torch.cat([r.flatten() for n in rows if (r := want[n]) is not None])
                torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


def test_a_batch_in_several_runs_of_samples_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, loss = CASES["gpt2"]()  # labels are ignored in different numbers
    problem = ca.Problem(model.double().eval(), loss, data)
    monkeypatch.setattr(whole, "ONE_RUN_BYTES", 1)
    monkeypatch.setattr(whole, "RUN_SHARE", 0.0)
    with problem.evaluating():
        ours = linearised(problem, "total")
        assert len(ours.chains) == 2
        assert off(problem, ours, "total") < 1e-12


@pytest.mark.parametrize("part", EXACT)
@pytest.mark.parametrize("name", ["gpt rope gated", "encoder", "albert", "llama with lora"])
def test_blocks_that_are_made_anew_give_the_same_and_keep_less(name: str, part: str) -> None:
    problem = problem_of(name)
    with problem.evaluating():
        kept, anew = (linearised(problem, part, recompute=again) for again in (False, True))
        assert off(problem, anew, part) < 1e-11
    assert anew.held_bytes < kept.held_bytes


@pytest.mark.parametrize("part", EXACT)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert, masked"])
def test_a_large_vocabulary_is_worked_through_in_chunks(name: str, part: str) -> None:
    problem = problem_of(name)
    with problem.evaluating():
        ours = linearised(problem, part, logit_room=2000)
        assert type(ours.chains[0].tail).__name__ in ("ChunkedTail", "AutogradTail")
        assert off(problem, ours, part) < 1e-11


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, 19, dtype=torch.float64)),
        nn.CrossEntropyLoss(ignore_index=7, reduction="sum"),
        lambda outputs, targets: (outputs.exp().mean(-1) + targets).pow(2).mean(),
    ],
)
def test_any_loss_stands_behind_the_tail(loss: Any) -> None:
    model, (inputs, targets), _ = _gpt()
    named = isinstance(loss, nn.CrossEntropyLoss)
    model = nn.Sequential(model, Flattened()) if named else model
    data = (inputs, targets if named else targets.double())
    problem = ca.Problem(model.double().eval(), loss, data)
    for operator in (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian):
        v = torch.randn(problem.size, dtype=torch.float64)
        want = operator(problem, engine="autograd") @ v
        got = operator(problem, engine="tangent") @ v
        assert float((got - want).norm() / want.norm()) < 1e-11


class Flattened(nn.Module):
    """(B, L, C) → (B, C, L), the layout of torch.nn's losses."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits.transpose(1, 2)


@pytest.mark.parametrize("scaled", [False, True])
def test_embeddings_with_a_forward_of_their_own_are_recognised_by_their_values(
    scaled: bool,
) -> None:
    """BART multiplies its tokens by a number, and its positions begin with the third row."""
    kind, options = ("bart", {"scale_embedding": True}) if scaled else ("opt", {})
    tokens = {"input_ids": TOKENS, "labels": TOKENS}
    model, _, loss = family(kind, **options)
    problem = ca.Problem(model.double().eval(), loss, [tokens])
    with problem.evaluating():
        ours = linearised(problem, "total")
        assert off(problem, ours, "total") < 1e-11
    assert [type(stem).__name__ for stem in ours.chains[0].stems] == ["Stem"] * (1 + scaled)


def test_a_part_that_two_layers_share_has_the_rates_of_both() -> None:
    model, data, loss = CASES["encoder"]()
    first, second = model.encoder.layers  # type: ignore[union-attr]
    second.linear1, second.self_attn = first.linear1, first.self_attn
    problem = ca.Problem(model.double().eval(), loss, data)
    with problem.evaluating():
        assert off(problem, linearised(problem, "total"), "total") < 1e-11


def test_what_depends_on_parameters_is_no_patch() -> None:
    """ALBERT projects its embeddings: values alone would take them for data."""
    model, data, loss = CASES["albert"]()
    problem = ca.Problem(model.double().eval(), loss, data)
    with problem.evaluating():
        ours = linearised(problem, "total")
    assert type(ours.chains[0].stem).__name__ == "AutogradStem"


class Skipping(nn.Module):
    """The second layer takes more than the first one gives."""

    def __init__(self) -> None:
        super().__init__()
        make = nn.TransformerEncoderLayer
        self.first = make(16, 2, 24, batch_first=True, dropout=0.0)
        self.second = make(16, 2, 24, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x) + x)
        return result


def test_layers_that_do_not_follow_each_other_are_refused_by_name() -> None:
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    problem = ca.Problem(Skipping().double().eval(), "mse", (x, x))
    with problem.evaluating(), pytest.raises(UnmappedModuleError, match="second does not take"):
        linearised(problem, "total")


def test_a_model_without_known_layers_is_refused_by_name() -> None:
    with pytest.raises(UnmappedModuleError, match="Linear has no layer"):
        whole.read_model(nn.Linear(3, 3))
