"""Uneven batches, padding, frozen and tied weights: the one-big-batch result, exactly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import curvatlas as ca
import families
import oracles
from curvatlas.zoo.models import GPT, GPTConfig

KINDS = [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian, ca.Fisher]


def small_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=7, context=5, d_model=4, n_heads=1, n_layers=1, **options)
    return GPT(config).double().eval()


@settings(max_examples=10, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 5), min_size=0, max_size=4, unique=True),
    ignored=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=25),
)
def test_uneven_batches_and_padding_equal_the_concatenated_batch(
    cuts: list[int], ignored: list[tuple[int, int]]
) -> None:
    model = small_gpt()
    tokens, targets = torch.randint(0, 7, (2, 6, 5), generator=torch.Generator().manual_seed(1))
    for row, column in ignored:
        targets[row, column] = -100
    if bool((targets == -100).all()):
        targets[0, 0] = 1
    edges = [0, *sorted(cuts), 6]
    pieces = [(tokens[a:b], targets[a:b]) for a, b in itertools.pairwise(edges)]
    whole = ca.Problem(model, "cross_entropy", (tokens, targets))
    parts = ca.Problem(model, "cross_entropy", pieces)
    logits = model(tokens).reshape(-1, 7)
    want = F.cross_entropy(logits, targets.reshape(-1), ignore_index=-100)
    assert parts.value() == pytest.approx(float(want.detach()), rel=1e-13)
    vector = torch.randn(whole.size, dtype=torch.float64)
    assert oracles.relative_error(parts.gradient(), whole.gradient()) < 1e-12
    for kind in KINDS:
        got, one = kind(parts) @ vector, kind(whole) @ vector
        assert oracles.relative_error(got, one) < 1e-12, kind


def test_regression_batches_of_unequal_size_are_weighted_by_entries() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    whole = ca.Problem(model, "mse", (x, y))
    parts = ca.Problem(model, "mse", [(x[:1], y[:1]), (x[1:5], y[1:5]), (x[5:], y[5:])])
    want = oracles.hessian((model(x) - y).pow(2).mean(), list(model.parameters()))
    assert oracles.relative_error(ca.Hessian(parts).dense(), want) < 1e-12
    assert oracles.relative_error(ca.Hessian(whole).dense(), want) < 1e-12
    empirical = ca.Fisher(parts, kind="empirical").dense()
    grads = torch.stack(
        [oracles.gradient((model(a[None]) - b).pow(2).mean(), list(model.parameters()))
         for a, b in zip(x, y, strict=True)]
    )  # fmt: skip
    assert oracles.relative_error(empirical, grads.T @ grads / 7) < 1e-12


def test_a_callable_loss_is_differentiated_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()

    def quartic(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(4).mean() - outputs.sin().mean()  # not convex

    problem = ca.Problem(model, quartic, [(x[:2], y[:2]), (x[2:], y[2:])])
    params = list(model.parameters())
    outputs = model(x)
    want = oracles.hessian(quartic(outputs, y), params)
    want_outer = oracles.outer_hessian(outputs, lambda z: quartic(z, y), params)
    assert oracles.relative_error(ca.Hessian(problem).dense(), want) < 1e-12
    outer = ca.GaussNewton(problem)
    assert oracles.relative_error(outer.dense(), want_outer) < 1e-12
    assert not outer.tags.psd
    assert oracles.relative_error(
        ca.FunctionalHessian(problem).dense(), want - want_outer
    ) < 1e-11  # fmt: skip


def test_a_loss_on_several_outputs_splits_at_all_of_them() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.body(x).tanh()
            return {"mean": self.a(hidden), "scale": self.b(hidden)}

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        spread = outputs["scale"].exp()
        return ((outputs["mean"] - targets).pow(2) * spread).mean() - outputs["scale"].mean()

    torch.manual_seed(0)
    model = TwoHeads().double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    params = list(model.parameters())
    outputs = model(x)
    stacked = torch.cat([outputs["mean"], outputs["scale"]], 1)
    want = oracles.outer_hessian(
        stacked, lambda z: loss({"mean": z[:, :2], "scale": z[:, 2:]}, y), params
    )
    problem = ca.Problem(model, loss, (x, y))
    assert oracles.relative_error(ca.GaussNewton(problem).dense(), want) < 1e-12


def test_tied_weights_are_one_variable() -> None:
    model = small_gpt(tied=True)
    tokens, targets = torch.randint(0, 7, (2, 3, 5))
    problem = ca.Problem(model, "cross_entropy", (tokens, targets))
    assert problem.size == sum(p.numel() for p in model.parameters())
    assert sum("embedding" in n or "head" in n for n in problem.parameter_names) == 2  # + positions
    loss = F.cross_entropy(model(tokens).reshape(-1, 7), targets.reshape(-1))
    want = oracles.hessian(loss, list(model.parameters()))
    assert oracles.relative_error(ca.Hessian(problem).dense(), want) < 1e-12


def test_frozen_weights_and_subsets_give_the_matching_block() -> None:
    model = small_gpt()
    tokens, targets = torch.randint(0, 7, (2, 3, 5))
    whole = ca.Problem(model, "cross_entropy", (tokens, targets))
    full = ca.Hessian(whole).dense()
    chosen = [n for n in whole.parameter_names if ".ffn." in n]
    places = torch.cat([s.indices for s in whole.anatomy.slices if s.parameter in chosen])
    subset = ca.Problem(model, "cross_entropy", (tokens, targets), parameters="*.ffn.*")
    assert list(subset.parameter_names) == chosen
    want = full[places][:, places]
    assert oracles.relative_error(ca.Hessian(subset).dense(), want) < 1e-12
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".ffn." in name)
    frozen = ca.Problem(model, "cross_entropy", (tokens, targets))
    assert oracles.relative_error(ca.Hessian(frozen).dense(), want) < 1e-12
    assert all(p.grad is None for p in model.parameters())


def test_loaders_lists_and_shuffling_agree() -> None:
    model = small_gpt()
    tokens, targets = torch.randint(0, 7, (2, 10, 5))
    dataset = torch.utils.data.TensorDataset(tokens, targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, shuffle=True)
    vector = torch.randn(ca.Problem(model, "cross_entropy", (tokens, targets)).size).double()
    want = ca.Hessian(ca.Problem(model, "cross_entropy", (tokens, targets))) @ vector
    problem = ca.Problem(model, "cross_entropy", loader)
    operator = ca.Hessian(problem)
    assert oracles.relative_error(operator @ vector, want) < 1e-12
    assert torch.equal(operator @ vector, operator @ vector)


def test_hugging_face_labels_are_shifted_for_causal_models_only() -> None:
    model, batch, loss = families.make("hf gpt2")
    value = ca.Problem(model, loss, batch).value()
    assert value == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)
    bert, labelled, _ = families.make("hf bert")
    inner = ca.Problem(bert, loss, labelled).value()
    assert inner == pytest.approx(float(bert(**labelled).loss.detach()), rel=1e-6)


@pytest.mark.huggingface
@pytest.mark.parametrize("family", ["T5", "Bart"])
@pytest.mark.parametrize("repeated", [False, True])
def test_decoders_read_the_labels_one_place_later(family: str, repeated: bool) -> None:
    transformers = pytest.importorskip("transformers")
    t5 = {
        "vocab_size": families.VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1,
        "num_heads": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    options = t5 if family == "T5" else families.BART_SIZES
    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).double().eval()
    tokens = torch.randint(3, families.VOCABULARY, (2, 5))
    # Labels that repeat the tokens would be next-token labels in a model without an encoder.
    labels = tokens.clone() if repeated else torch.randint(3, families.VOCABULARY, (2, 4))
    labels[0, -1] = -100
    batch = {"input_ids": tokens, "labels": labels}
    problem = ca.Problem(model, "cross_entropy", batch)
    assert problem.value() == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)
    given = {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
    assert ca.Problem(model, "cross_entropy", given).value() == problem.value()


@pytest.mark.huggingface
def test_experts_are_differentiated_in_float64() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double().eval()
    kept = getattr(model.config, "_experts_implementation", None)
    tokens = torch.randint(0, 11, (2, 5))
    problem = ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    v = torch.randn(problem.size, dtype=torch.float64)
    step = 1e-5
    moved = []
    weights = [p.detach().clone() for p in model.parameters()]
    for sign in (1, -1):
        with torch.no_grad():
            pieces = v.split([w.numel() for w in weights])
            for parameter, weight, piece in zip(model.parameters(), weights, pieces, strict=True):
                parameter.copy_(weight + sign * step * piece.view_as(weight))
        moved.append(problem.gradient())
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    want = (moved[0] - moved[1]) / (2 * step)
    assert oracles.relative_error(ca.Hessian(problem) @ v, want) < 1e-6
    assert getattr(model.config, "_experts_implementation", None) == kept


def test_label_smoothing_and_class_weights_follow_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = torch.randn(9, 3).double(), torch.randint(0, 4, (9,))
    for torch_loss in (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]).double()),
        nn.CrossEntropyLoss(ignore_index=2),
    ):
        params = list(model.parameters())
        want = oracles.hessian(torch_loss(model(x), y), params)
        parts = ca.Problem(model, torch_loss, [(x[:4], y[:4]), (x[4:], y[4:])])
        assert oracles.relative_error(ca.Hessian(parts).dense(), want) < 1e-12
        want_outer = oracles.outer_hessian(model(x), lambda z, loss=torch_loss: loss(z, y), params)
        assert oracles.relative_error(ca.GaussNewton(parts).dense(), want_outer) < 1e-12


def test_products_follow_the_weights_after_an_optimizer_step() -> None:
    model = small_gpt()
    data = tuple(torch.randint(0, 7, (2, 3, 5)))
    operator = ca.Hessian(ca.Problem(model, "cross_entropy", data))
    vector = torch.randn(operator.shape[0], dtype=torch.float64)
    before = operator @ vector
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = operator @ vector
    fresh = ca.Hessian(ca.Problem(model, "cross_entropy", data)) @ vector
    assert torch.equal(after, fresh)
    assert oracles.relative_error(before, after) > 1e-3


def test_the_model_is_left_as_it_was() -> None:
    model = small_gpt()
    model.blocks[0].train()
    flags = [module.training for module in model.modules()]
    tokens, targets = torch.randint(0, 7, (2, 3, 5))
    problem = ca.Problem(model, "cross_entropy", (tokens, targets))
    with torch.no_grad():
        ca.Hessian(problem) @ torch.randn(problem.size, dtype=torch.float64)
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


def test_per_batch_operators_average_to_the_whole() -> None:
    model = small_gpt()
    tokens, targets = torch.randint(0, 7, (2, 6, 5))
    problem = ca.Problem(
        model, "cross_entropy", [(tokens[:1], targets[:1]), (tokens[1:], targets[1:])]
    )
    operator = ca.Hessian(problem)
    vector = torch.randn(problem.size, dtype=torch.float64)
    shares = operator.per_batch()
    total = sum(share * (part @ vector) for share, part in shares)
    assert sum(share for share, _ in shares) == pytest.approx(1.0)
    assert oracles.relative_error(total, operator @ vector) < 1e-12
