"""Models that return their own loss, in the ways they are written outside of Hugging Face."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
import oracles
from curvatlas.errors import ProblemError

SYMBOLS = 7


class Tokens(nn.Module):
    """Logits of the next token, with a loss where targets are given."""

    ignored = -1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mix = nn.Embedding(SYMBOLS, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, SYMBOLS)
        self.double()

    def hidden(self, idx: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embedding(idx).cumsum(1)))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows, classes = logits.reshape(-1, SYMBOLS), targets.reshape(-1)
        return F.cross_entropy(rows, classes, ignore_index=self.ignored)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.hidden(idx))
        return logits, None if targets is None else self.loss(logits, targets)


class LastPosition(Tokens):
    """Without targets the logits of the last position alone."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        if targets is None:
            return self.head(self.hidden(idx)[:, [-1], :]), None
        return super().forward(idx, targets)


class LossFirst(Tokens):
    def forward(self, idx: Tensor, y: Tensor) -> Any:
        logits, loss = super().forward(idx, y)
        return loss, logits


class Named(Tokens):
    def forward(self, idx: Tensor, target: Tensor | None = None) -> Any:
        logits, loss = super().forward(idx, target)
        return {"logits": logits, "loss": loss}


class Attributes(Tokens):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits, loss = super().forward(x, labels)
        return SimpleNamespace(logits=logits, loss=loss)


class Bare(Tokens):
    """The loss and nothing else, of a second argument with a name of its own."""

    def forward(self, idx: Tensor, next_ones: Tensor) -> Any:
        return super().forward(idx, next_ones)[1]


class WholeBatch(Tokens):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        return super().forward(*batch)[1]


class Penalised(Tokens):
    """No formula that is known."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, targets) + 1e-2 * logits.square().mean()


def batches(*, ignored: bool = False) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, SYMBOLS, (n, 6), generator=generator) for n in (4, 2)]
    pairs = [(tokens[:, :-1], tokens[:, 1:].clone()) for tokens in drawn]
    if ignored:
        pairs[0][1][:, 3:] = -1
    return pairs


def own_hessian(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[float, Tensor]:
    """Of the mean over all targets that count, by the model's own cross-entropy."""
    logits = torch.cat([model.head(model.hidden(x)).reshape(-1, SYMBOLS) for x, _ in data])
    loss = model.loss(logits, torch.cat([y.reshape(-1) for _, y in data]))
    return float(loss.detach()), oracles.hessian(loss, list(model.parameters()))


KINDS = [Tokens, LastPosition, LossFirst, Named, Attributes, Bare, WholeBatch]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_returns_its_loss_needs_no_other(kind: type[Tokens]) -> None:
    model, data = kind(), batches()
    problem = ca.Problem(model, data=data)
    value, hessian = own_hessian(model, data)
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert oracles.relative_error(ca.Hessian(problem).dense(), hessian) < 1e-12
    assert (problem.loss.name == "model") == (kind in (Bare, WholeBatch))


@pytest.mark.parametrize("kind", [Tokens, LastPosition])
def test_its_formula_is_found_with_the_targets_it_ignores(kind: type[Tokens]) -> None:
    model, data = kind(), batches(ignored=True)
    problem = ca.Problem(model, data=data)
    assert problem.total_count == 12 + 10
    assert problem.loss.name == "cross_entropy"
    assert problem.value() == pytest.approx(own_hessian(model, data)[0], rel=1e-12)
    assert float(ca.trace(ca.GaussNewton(problem)).value) > 0


@pytest.mark.parametrize("loss", ["cross_entropy", None])
@pytest.mark.parametrize("kind", [Tokens, LastPosition, Named])
def test_batches_may_name_their_targets_as_the_model_does(
    kind: type[Tokens], loss: str | None
) -> None:
    name = "target" if kind is Named else "targets"
    model, data = kind(), batches()
    problem = ca.Problem(model, loss, [{"idx": x, name: y} for x, y in data])
    value, hessian = own_hessian(model, data)
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert oracles.relative_error(ca.Hessian(problem).dense(), hessian) < 1e-12


def test_a_loss_by_name_reads_the_outputs_that_fit_the_targets() -> None:
    model, data = LastPosition(), batches()
    problem = ca.Problem(model, "cross_entropy", data)
    value, hessian = own_hessian(model, data)
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert oracles.relative_error(ca.Hessian(problem).dense(), hessian) < 1e-12


def test_an_unknown_loss_has_a_hessian() -> None:
    model, data = Penalised(), batches()
    problem = ca.Problem(model, data=data)
    value, hessian = own_hessian(model, data)
    assert problem.loss.name == "model"
    assert problem.value() == pytest.approx(value, rel=1e-12)
    assert oracles.relative_error(ca.Hessian(problem).dense(), hessian) < 1e-12
    with pytest.raises(ProblemError, match="only its Hessian exists"):
        ca.GaussNewton(problem).dense()


def test_a_model_without_a_loss_says_so() -> None:
    with pytest.raises(ProblemError, match="say which loss"):
        ca.Problem(nn.Linear(3, 2), data=(torch.randn(4, 3), torch.randn(4, 2)))
