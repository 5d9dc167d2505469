"""Logits in chunks: the same loss, gradient and products as with all of them in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import families
import oracles
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.problem.large_heads import HiddenLogits
from curvatlas.zoo.models import GPT, GPTConfig

OPERATORS: dict[str, Any] = {
    "H": ca.Hessian,
    "H_o": ca.GaussNewton,
    "H_f": ca.FunctionalHessian,
    "parts": CurvatureParts,
    "empirical": lambda p, **k: ca.Fisher(p, kind="empirical", **k),
    "mc": lambda p, **k: ca.Fisher(p, kind="mc", samples=3, seed=4, **k),
}


class Biased(GPT):
    """A head with a bias."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.d_model, config.vocabulary)


def model(kind: str, *, layers: int = 1) -> GPT:
    torch.manual_seed(3)
    config = GPTConfig(
        vocabulary=23, context=7, d_model=8, n_heads=2, n_layers=layers, tied=kind == "tied"
    )
    return (Biased if kind == "biased" else GPT)(config).double().eval()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 23, (3, 7), generator=generator)
    targets = torch.randint(0, 23, (3, 7), generator=generator)
    targets[0, 2:5] = -100
    targets[2, -1] = -100
    return tokens, targets


LOSSES: dict[str, Any] = {
    "plain": "cross_entropy",
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2),
    "weighted": nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 23), ignore_index=4),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["untied", "tied", "biased"])
def test_every_operator_is_the_same_with_logits_in_chunks(
    kind: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = model(kind)
    tokens, targets = batch()
    if loss == "weighted":
        targets = targets.clamp_min(0)
    problem = ca.Problem(subject, LOSSES[loss], (tokens, targets))
    columns = torch.randn(
        problem.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    want = {name: make(problem) @ columns for name, make in OPERATORS.items()}
    value, gradient = problem.value(), problem.gradient()

    # Room for two tokens of 21: every operator works through eleven chunks.
    monkeypatch.setattr("curvatlas.problem.large_heads._CHUNKS", 2 * 4 * 23 * 8)
    chunked = ca.Problem(subject, LOSSES[loss], (tokens, targets))
    read = chunked.predictions(next(chunked.batches()), chunked.leaves())
    assert isinstance(read, HiddenLogits)
    assert chunked.value() == pytest.approx(value, rel=1e-13)
    assert oracles.relative_error(chunked.gradient(), gradient) < 1e-12
    for name, make in OPERATORS.items():
        assert oracles.relative_error(make(chunked) @ columns, want[name]) < 1e-10, name


@pytest.mark.parametrize("kind", ["tied", "biased"])
def test_chunked_products_agree_with_double_backward(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = model(kind)
    data = batch()
    monkeypatch.setattr("curvatlas.problem.large_heads._CHUNKS", 4 * 23 * 8)
    problem = ca.Problem(subject, "cross_entropy", data)
    direction = torch.randn(problem.size, dtype=torch.float64)
    parameters = list(subject.parameters())
    loss = nn.functional.cross_entropy(subject(data[0]).flatten(0, 1), data[1].flatten())
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([s.reshape(-1) for s in slopes])
    want = torch.cat([g.reshape(-1) for g in torch.autograd.grad(flat @ direction, parameters)])
    assert oracles.relative_error(ca.Hessian(problem) @ direction, want) < 1e-10


def test_torchs_reading_of_logits_as_long_as_wide_stays_with_logits_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of (B, L, L) torch's module reads the second axis as the classes, whatever made it."""
    torch.manual_seed(3)
    config = GPTConfig(vocabulary=7, context=7, d_model=8, n_heads=2, n_layers=1)
    subject = GPT(config).double().eval()
    tokens, targets = torch.randint(0, 7, (2, 3, 7))
    loss = nn.CrossEntropyLoss()
    monkeypatch.setattr("curvatlas.problem.large_heads._CHUNKS", 4 * 7 * 8)
    problem = ca.Problem(subject, loss, (tokens, targets))
    direction = torch.randn(problem.size, dtype=torch.float64)
    parameters = list(subject.parameters())
    want = oracles.hessian(loss(subject(tokens), targets), parameters) @ direction
    assert oracles.relative_error(ca.Hessian(problem) @ direction, want) < 1e-10


@pytest.mark.parametrize("rows", ["head", "blocks.0.query", "token_embedding"])
def test_views_with_and_without_the_head_are_the_same_in_chunks(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = model("untied", layers=2)
    whole = ca.Problem(subject, "cross_entropy", batch())
    for operator in (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian):
        view = operator(whole)[rows, "blocks.1.value"]
        column = torch.randn(view.shape[1], dtype=torch.float64)
        want = view @ column
        with monkeypatch.context() as patch:
            patch.setattr("curvatlas.problem.large_heads._CHUNKS", 3 * 4 * 23 * 8)
            got = operator(ca.Problem(subject, "cross_entropy", batch()))[rows, "blocks.1.value"]
            assert oracles.relative_error(got @ column, want) < 1e-10


@pytest.mark.huggingface
@pytest.mark.parametrize("family", ["hf llama", "hf gpt2"])
def test_a_shifted_padded_tied_hugging_face_model_is_the_same_in_chunks(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, data, loss = families.make(family)
    problem = ca.Problem(subject, loss, data)
    direction = torch.randn(problem.size, dtype=torch.float64)
    want = {name: make(problem) @ direction for name, make in OPERATORS.items()}
    monkeypatch.setattr("curvatlas.problem.large_heads._CHUNKS", 4 * 17 * 8)
    chunked = ca.Problem(subject, loss, data)
    with chunked.evaluating():
        read = chunked.predictions(next(chunked.batches()), {})
    assert isinstance(read, HiddenLogits)
    for name, make in OPERATORS.items():
        assert oracles.relative_error(make(chunked) @ direction, want[name]) < 1e-10, name


class Capped(nn.Module):
    """Something after the head: its result is not what the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model("untied")

    def forward(self, tokens: Tensor) -> Tensor:
        return 5 * torch.tanh(self.inner(tokens) / 5)


def test_a_model_that_changes_its_logits_is_not_cut_at_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("curvatlas.problem.large_heads._CHUNKS", 4 * 23 * 8)
    problem = ca.Problem(Capped().double().eval(), "cross_entropy", batch())
    read = problem.predictions(next(problem.batches()), problem.leaves())
    assert isinstance(read, Tensor)


def test_the_model_keeps_its_head_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model("untied")
    monkeypatch.setattr("curvatlas.problem.large_heads._CHUNKS", 4 * 23 * 8)
    before = subject(batch()[0])
    ca.Hessian(ca.Problem(subject, "cross_entropy", batch())) @ torch.zeros(
        sum(p.numel() for p in subject.parameters()), dtype=torch.float64
    )
    assert "forward" not in subject.head.__dict__
    assert torch.equal(subject(batch()[0]), before)
