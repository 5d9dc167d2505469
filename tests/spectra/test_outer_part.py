from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.errors import ProblemError


class Pooled(nn.Module):
    """An encoder with a class token and position embeddings, whose gradients share memory."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        out: Tensor = self.head(self.encoder(tokens + self.position)[:, 0])
        return out


class Meeting(Pooled):
    """Samples meet: the batch mean is taken away."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class Looking(Pooled):
    """Looks at its values, which no map over samples allows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().abs().sum()) > 0 else -x)


def problem(
    model: nn.Module, loss: str = "cross_entropy", sizes: tuple[int, ...] = (4, 7)
) -> ca.Problem:
    random = torch.Generator().manual_seed(3)
    model = model.double().eval()
    batches = []
    for n in sizes:
        x = torch.randn(n, 4, 5, generator=random, dtype=torch.float64)
        y = torch.randint(0, 3, (n,), generator=random)
        if loss == "mse":
            batches.append((x, torch.randn(n, 3, generator=random, dtype=torch.float64)))
        else:
            y[0] = -100  # an ignored target weighs nothing
            batches.append((x, y))
    return ca.Problem(model, loss, batches)


def model(kind: type[Pooled] = Pooled) -> Pooled:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("kind", [ca.GaussNewton, ca.Fisher])
def test_the_factors_of_the_samples_give_the_exact_diagonal(loss: str, kind: type) -> None:
    operator = kind(problem(model(), loss))
    found = ca.diagonal(operator)
    truth = operator.dense().diagonal()
    assert found.exact
    assert found.method == "factors of the samples"
    assert found.products <= 3
    torch.testing.assert_close(found.values, truth, rtol=1e-10, atol=1e-12 * float(truth.max()))


def test_the_trace_of_a_gauss_newton_matrix_costs_a_few_products() -> None:
    operator = ca.GaussNewton(problem(model()))
    found = ca.trace(operator, data_error=False)
    assert operator.products == found.products <= 3
    assert found.exact
    assert found.value == pytest.approx(float(operator.dense().trace()), rel=1e-12)


def test_of_a_hessian_only_the_functional_part_is_estimated() -> None:
    operator = ca.Hessian(problem(model()))
    truth = float(operator.dense().trace())
    before = operator.products
    found = ca.trace(operator, rtol=0.2, data_error=False)
    assert "factors of the samples" in found.method
    assert found.products == operator.products - before
    assert found.interval[0] <= truth <= found.interval[1]


def test_blocks_have_their_own_exact_traces() -> None:
    operator = ca.GaussNewton(problem(model()))
    for selector in ("blocks.0.query", "*norm1*", "blocks.0.up"):
        block = operator[selector]
        found = ca.trace(block, data_error=False)
        assert found.exact
        assert found.value == pytest.approx(float(block.dense().trace()), rel=1e-10)
        assert found.products <= 3


@pytest.mark.parametrize("kind", [Meeting, Looking])
def test_where_samples_cannot_be_told_apart_the_trace_is_estimated(kind: type[Pooled]) -> None:
    operator = ca.GaussNewton(problem(model(kind), sizes=(6,)))
    found = ca.trace(operator, rtol=0.1, data_error=False)
    assert "factors" not in found.method
    assert found.value == pytest.approx(float(operator.dense().trace()), rel=0.3)


def test_active_dropout_is_refused_before_any_factor_is_taken() -> None:
    made = problem(model())
    made.model.train()
    made.model.encoder.layers[0].dropout.p = 0.5
    with pytest.raises(ProblemError, match="dropout"):
        ca.trace(ca.GaussNewton(made))


def test_many_outputs_are_left_to_the_estimate() -> None:
    from curvatlas.zoo.models import GPT, GPTConfig

    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocabulary=17, context=8, d_model=8, n_heads=2, n_layers=1, d_ff=16))
    tokens = torch.randint(0, 17, (3, 8))
    operator = ca.GaussNewton(ca.Problem(gpt.double().eval(), "cross_entropy", (tokens, tokens)))
    found = ca.trace(operator, rtol=0.2)
    assert "factors" not in found.method
