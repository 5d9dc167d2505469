from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.operators.layer_uses import RecordedPass, record


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Model(nn.Module):
    """Parameters and a function of them and the inputs."""

    def __init__(
        self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def recorded(model: nn.Module, x: Tensor) -> RecordedPass:
    model = model.double().eval()
    problem = ca.Problem(model, lambda z, y: z.pow(2).mean(), (x, torch.zeros(len(x))))
    with problem.evaluating():
        return record(problem, next(iter(problem.batches())))


def gradients(passed: RecordedPass, seed: Tensor) -> dict[str, Tensor]:
    """Slopes of the parameters from a_m, n_m and g_m alone."""
    sums = {name: torch.zeros_like(leaf) for name, leaf in passed.leaves.items()}
    for use, slopes in zip(passed.uses, passed.pulled(seed.unsqueeze(0)), strict=True):
        g, a = slopes.reshape(-1, slopes.shape[-1]), use.read()
        if use.bias is not None:
            sums[use.bias] += g.sum(0).view_as(sums[use.bias])
        if use.weight is None:
            continue
        total = sums[use.weight]
        if use.kind == "embedding":
            rows = total.numel() // g.shape[1]
            learns = a != (-1 if use.padding is None else use.padding)
            a = F.one_hot(a, rows).double() * learns.unsqueeze(-1)
        a = a.reshape(-1, a.shape[-1])
        if use.kind == "gain":
            total += (g * a).sum(0).view_as(total)
        else:
            total += (a.T @ g if use.transposed else g.T @ a).reshape(total.shape)
    return sums


def conv1d(**options: Any) -> nn.Module:
    return nn.Conv1d(3, 2, 2, **options)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(*shape))


SEQUENCE = (2, 4, 3)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), SEQUENCE),
    "relu in place": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)),
        SEQUENCE,
    ),
    "strided, padded and dilated convolution": (
        lambda: nn.Conv2d(3, 2, (2, 3), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
        (2, 3, 6, 5),
    ),
    "convolution that keeps the size": (
        lambda: nn.Conv2d(3, 2, (2, 3), padding="same", bias=False),
        (2, 3, 4, 5),
    ),
    "reflecting convolution": (
        lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"),
        (2, 3, 4, 5),
    ),
    "one-dimensional convolution": (lambda: conv1d(padding=1, stride=2), (2, 3, 5)),
    "layer norm over two axes": (lambda: nn.LayerNorm((4, 3)), SEQUENCE),
    "rms norm": (lambda: nn.RMSNorm(3), SEQUENCE),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (2, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 3)),
    "gain and shift by hand": (
        lambda: Model(
            lambda m, x: m.gain * x.tanh() + m.shift, gain=parameter(3), shift=parameter(3)
        ),
        SEQUENCE,
    ),
    "matrix product": (lambda: Model(lambda m, x: x @ m.w, w=parameter(3, 2)), SEQUENCE),
    "rows of one weight": (
        lambda: Model(
            lambda m, x: sum(
                F.linear(x, w, b) for w, b in zip(m.w.split([2, 2]), m.b.chunk(2), strict=True)
            ),  # type: ignore[return-value]
            w=parameter(4, 3),
            b=parameter(4),
        ),
        SEQUENCE,
    ),
    "the transpose of a weight": (
        lambda: Model(lambda m, x: m.linear(x).tanh() @ m.linear.weight.T, linear=nn.Linear(3, 3)),
        SEQUENCE,
    ),
    "einsum to heads": (
        lambda: Model(lambda m, x: torch.einsum("bth,hnd->btnd", x, m.w), w=parameter(3, 2, 5)),
        SEQUENCE,
    ),
    "einsum from heads": (
        lambda: Model(lambda m, x: torch.einsum("hnd,bntd->htb", m.w, x), w=parameter(5, 4, 2)),
        (2, 4, 3, 2),
    ),
    "gain around one": (
        lambda: Model(lambda m, x: x.tanh() * (1.0 + m.gain), gain=parameter(3)),
        SEQUENCE,
    ),
    "own weights with rows of one bias": (
        lambda: Model(
            lambda m, x: m.attention(x, x[..., :2], x[..., :2])[0],
            attention=nn.MultiheadAttention(4, 2, kdim=2, vdim=2),
        ),
        (2, 3, 4),
    ),
    "rows that are read": (
        lambda: Model(lambda m, x: x * 2 + m.table[: x.shape[1]], table=parameter(6, 3)),
        SEQUENCE,
    ),
    "a table that is added": (
        lambda: Model(lambda m, x: x + m.table, table=parameter(1, 4, 3)),
        SEQUENCE,
    ),
    "a token that is repeated": (
        lambda: Model(
            lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], 1), token=parameter(1, 1, 3)
        ),
        SEQUENCE,
    ),
    "attention of torch": (
        lambda: Model(
            lambda m, x: m.attention(x, x, x)[0],
            attention=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        (2, 3, 4),
    ),
    "attention to other tokens": (
        lambda: Model(
            lambda m, x: m.attention(x, x.flip(1), x.flip(1))[0],
            attention=nn.MultiheadAttention(4, 2),
        ),
        (2, 3, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_uses_of_a_layer_give_its_gradient(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    for p in model.parameters():
        nn.init.normal_(p)
    passed = recorded(model, randn(*shape))
    assert passed.unexplained() == ()
    seed = randn(*passed.outputs.shape)
    expected = torch.autograd.grad(
        passed.outputs, list(passed.leaves.values()), seed, retain_graph=True
    )
    actual = gradients(passed, seed)
    for (leaf, own), truth in zip(actual.items(), expected, strict=True):
        error = float((own - truth).norm())
        assert error <= 1e-13 * float(truth.norm()), leaf


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"sparse": True}])
def test_the_uses_of_an_embedding_give_its_gradient(options: Any) -> None:
    torch.manual_seed(1)
    passed = recorded(nn.Embedding(5, 3, **options), torch.randint(0, 5, (4, 6)))
    seed = randn(*passed.outputs.shape)
    (truth,) = torch.autograd.grad(passed.outputs, passed.leaves["weight"], seed, retain_graph=True)
    truth = truth.to_dense() if truth.is_sparse else truth
    own = gradients(passed, seed)["weight"]
    assert float((own - truth).norm()) <= 1e-13 * float(truth.norm())
    assert passed.unexplained() == ()


def test_every_call_of_a_module_is_a_use() -> None:
    torch.manual_seed(2)
    step = nn.Linear(3, 3)
    passed = recorded(Model(lambda m, x: m.step(m.step(x).tanh()), step=step), randn(*SEQUENCE))
    assert [(use.weight, use.bias) for use in passed.uses] == [("step.weight", "step.bias")] * 2


def test_a_parameter_without_a_use_is_named() -> None:
    model = Model(
        lambda m, x: m.linear(x) * m.power.exp(), linear=nn.Linear(3, 2), power=parameter(1)
    )
    assert recorded(model, randn(*SEQUENCE)).unexplained() == ("power",)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "squared as well": lambda: Model(
        lambda m, x: m.linear(x) + x @ m.linear.weight.square(), linear=nn.Linear(3, 3)
    ),
    "turned round as well": lambda: Model(
        lambda m, x: F.linear(m.linear(x), m.linear.weight.flip(0)), linear=nn.Linear(3, 3)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_weight_with_another_use_as_well_is_refused(name: str) -> None:
    torch.manual_seed(3)
    passed = recorded(REFUSED[name](), randn(*SEQUENCE))
    with pytest.raises(ValueError, match=r"linear\.weight is used in other ways"):
        passed.unexplained()


def test_grouped_convolutions_are_refused_unless_they_are_fixed() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 2, 1)).double()
    data = (randn(3, 2, 4, 4), torch.randint(0, 2, (3, 2, 2)))
    loss = nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match=r"0\.weight belongs to a convolution with groups=2"):
        ca.KFAC(ca.Problem(model, loss, data))
    fixed = ca.Problem(model, loss, data, parameters=["1.weight", "1.bias"])
    assert ca.KFAC(fixed).covered == ("1",)


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(4)
    before = F.linear
    model = Model(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2))
    x = randn(2, 3, 4)
    outputs = model.double()(x)
    passed = recorded(model, x)
    assert F.linear is before
    assert torch.equal(model(x), outputs)
    assert float((passed.outputs - outputs).detach().abs().max()) <= 1e-14
