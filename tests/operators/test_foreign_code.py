"""Models written in the ways of other people's packages: right numbers, or one true line.

Every model is called by curvatlas first: a call by the test would fill its caches and hide what a
first call does. The oracle is an equal model of its own and central differences of its loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.errors import DifferentiationError, ProblemError


@dataclass(frozen=True)
class _Case:
    """A model with its data, float64."""

    model: Callable[[], nn.Module]
    batches: Callable[[], list[tuple[Any, Tensor]]]
    state: Callable[[nn.Module], Any] = lambda model: None  # what calls may change and must not


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _regression(*shapes: tuple[int, ...], outputs: tuple[int, ...] | None = None) -> Any:
    def batches() -> list[tuple[Any, Tensor]]:
        return [
            (_numbers(*shape, seed=place), _numbers(*(outputs or shape), seed=100 + place))
            for place, shape in enumerate(shapes)
        ]

    return batches


# --- caches that the first call fills -------------------------------------------------------------


class _RotaryBuffer(nn.Module):
    """Angles kept in a buffer, their number in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("angles", torch.zeros(16, 4), persistent=False)
        self.known = 0

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.known:
            place = torch.arange(length, dtype=x.dtype)[:, None]
            self.angles[:length] = place * torch.tensor([1.0, 0.3, 0.1, 0.03])
            self.known = length
        return torch.tanh(self.mix(x)) * self.angles[:length].cos()


class _RotaryAttributes(nn.Module):
    """Tables as plain attributes, made at the first call and when a sequence is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.cos: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None or len(self.cos) < x.shape[1]:
            self.cos = torch.arange(x.shape[1], dtype=x.dtype)[:, None].mul(0.3).cos()
        return torch.tanh(self.mix(x)) * self.cos[: x.shape[1]]


class _LateBuffer(nn.Module):
    """A buffer that is registered in forward, for the length at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask") or self.mask.shape[0] != x.shape[1]:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
            self.register_buffer("mask", mask / mask.sum(1, keepdim=True), persistent=False)
        return torch.tanh(self.mix(self.mask @ x))


class _ByLength(nn.Module):
    """A dictionary of tables by length, filled on the way, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.tables: dict[int, Any] = {}
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = (torch.zeros(length, 1, dtype=x.dtype), [])
            self.tables[length][0].copy_(torch.arange(length)[:, None])
            self.tables[length][1].append(0.2)
            self.seen.append(length)
        place, (rate,) = self.tables[length]
        return torch.tanh(self.mix(x)) * (rate * place * len(self.seen)).cos()


class _Helper:
    """What a package keeps beside its modules."""

    def __init__(self) -> None:
        self.table = torch.zeros(16, 1, dtype=torch.float64)
        self.filled = 0

    def upto(self, length: int) -> Tensor:
        if length > self.filled:
            self.table[:length] = torch.arange(length, dtype=torch.float64)[:, None] * 0.2
            self.filled = length
        return self.table[:length]


class _ByHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("scale", torch.zeros(1))
        self.helper = _Helper()

    def forward(self, x: Tensor) -> Tensor:
        if not self.helper.filled:
            self.scale.fill_(0.5)
        return torch.tanh(self.mix(x)) * (self.scale + self.helper.upto(x.shape[1])).cos()


class _KeysInPlace(nn.Module):
    """Keys are written into a plain tensor before they are read, as reference inference code does.

    A second call would write onto the first one's graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)
        self.keys = torch.zeros(8, 8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.keys = self.keys.to(x)
        self.keys[: x.shape[0], : x.shape[1]] = self.key(x)
        keys = self.keys[: x.shape[0], : x.shape[1]]
        return (x @ keys.mT).softmax(-1) @ self.value(x)


class _Counts(nn.Module):
    """Counts its calls, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.mix(x)) * self.calls


# --- derivatives inside of forward ----------------------------------------------------------------


class _InnerStep(nn.Module):
    """Takes a step on its own weights before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        inner = (self.last(h) - x).square().mean()
        (slope,) = torch.autograd.grad(inner, self.last.weight, create_graph=True)
        return F.linear(h, self.last.weight - 0.3 * slope, self.last.bias)


class _Forces(nn.Module):
    """Minus the gradient of an energy by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        energy = self.last(torch.tanh(self.first(x))).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return -slope


class _EnergiesAndForces(_Forces):
    """Asks for gradients itself, also where they are switched off around it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


class _WritesInputs(nn.Module):
    """Normalises its inputs where they lie, and asks them for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        x.requires_grad_(True)
        return torch.tanh(self.mix(x))


# --- other things ---------------------------------------------------------------------------------


class _SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        mask = torch.zeros(2, 3, dtype=torch.bool)
        mask[1, 2] = True
        self.register_buffer("heads", mask.to_sparse(), persistent=False)
        with warnings.catch_warnings():  # that the layout is new
            warnings.simplefilter("ignore")
            self.register_buffer("graph", torch.eye(4).to_sparse_csr())
        self.coordinates = torch.eye(4).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x)) + (self.graph.to(x.dtype) @ x.mT).mT


class _ChannelsLast(nn.Module):
    """A batch norm whose upstream gradient has its channels innermost, by an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.head = nn.Parameter(torch.randn(4, 2))
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.einsum("bchw,ck->bhwk", self.norm(self.mix(x)), self.head)
        return torch.tanh(z).mean((1, 2))


class _Spectral(nn.Module):
    """Coefficients put into a table of zeros in single precision, as spectral adapters do."""

    single = torch.float32  # the oracle takes float64, as curvatlas does

    def __init__(self) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(5))
        self.base = nn.Linear(4, 4)
        self.places = torch.tensor([[0, 1, 2, 3, 0], [0, 2, 1, 3, 3]])

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(4, 4, dtype=self.single)
        table[self.places[0], self.places[1]] = self.coefficients.to(self.single)
        delta = torch.fft.ifft2(table).real
        return torch.tanh(self.base(x) + x @ delta.to(x.dtype))


class _SingleTables(nn.Module):
    """Rounds its input to single precision and multiplies it by constants made in it."""

    single = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(16.0, dtype=self.single).reshape(4, 4) / 16
        h = torch.tanh(self.mix(x)).to(self.single)
        mask = torch.zeros(4, dtype=self.single).scatter_add(0, torch.tensor([0, 1]), h[0, :2])
        return (h @ table + torch.einsum("bi,ij->bj", h, table) * mask).to(x.dtype)


_TOKENS = _regression((3, 5, 4), (2, 7, 4), (3, 5, 4))
_ROWS = _regression((5, 4), (3, 4))

CASES: dict[str, _Case] = {
    "rotary buffer": _Case(_RotaryBuffer, _TOKENS, lambda m: (m.known, m.angles.clone())),
    "rotary attributes": _Case(_RotaryAttributes, _TOKENS, lambda m: m.cos),
    "late buffer": _Case(_LateBuffer, _TOKENS, lambda m: list(m._buffers)),
    "tables by length": _Case(
        _ByLength, _regression((3, 5, 4), (2, 5, 4)), lambda m: (dict(m.tables), list(m.seen))
    ),
    "helper object": _Case(
        _ByHelper, _TOKENS, lambda m: (m.helper.filled, m.helper.table.clone(), m.scale.clone())
    ),
    "keys in place": _Case(_KeysInPlace, _TOKENS, lambda m: m.keys.clone()),
    "inner step": _Case(_InnerStep, _ROWS),
    "forces": _Case(_Forces, _ROWS),
    "energies and forces": _Case(_EnergiesAndForces, _ROWS),
    "inputs in place": _Case(_WritesInputs, _ROWS),
    "sparse buffers": _Case(_SparseBuffer, _ROWS),
    "channels-last batch norm": _Case(
        _ChannelsLast, _regression((3, 3, 3, 5), (3, 3, 5, 3), outputs=(3, 2))
    ),
    "spectral adapter": _Case(_Spectral, _ROWS),
    "tables in single precision": _Case(_SingleTables, _ROWS),
}


def _model(case: _Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model().double().eval()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_the_models_own_loss(name: str) -> None:
    case = CASES[name]
    model, batches = _model(case), case.batches()
    before = case.state(model)
    problem = ca.Problem(model, "mse", batches)
    gauss_newton = ca.GaussNewton(problem)
    v = _numbers(problem.size, seed=9)
    v /= v.norm()
    outer = float(v @ (gauss_newton @ v))
    hessian = ca.Hessian(problem)
    slope, curvature = float(problem.gradient() @ v), float(v @ (hessian @ v))
    assert problem.value() == problem.value()
    assert _same(case.state(model), before)
    assert _same(
        [p.requires_grad for p in model.parameters()], [True] * len(list(model.parameters()))
    )

    def outputs(step: float) -> Tensor:
        """Of models of their own, one for each batch: calls of one change nothing in another."""
        found = []
        for x, _ in batches:
            other: Any = _model(case)
            other.single = torch.float64
            start = torch.nn.utils.parameters_to_vector(other.parameters()).detach()
            torch.nn.utils.vector_to_parameters(start + step * v, other.parameters())
            found.append(other(x.clone()).detach().reshape(-1))
        return torch.cat(found)

    targets = torch.cat([y.reshape(-1) for _, y in batches])
    h = 1e-4
    up, here, down = outputs(h), outputs(0.0), outputs(-h)
    loss = [float((z - targets).square().mean()) for z in (up, here, down)]
    tangent = (up - down) / (2 * h)
    assert problem.value() == pytest.approx(loss[1], rel=1e-6)
    assert slope == pytest.approx((loss[0] - loss[2]) / (2 * h), rel=1e-5, abs=1e-8)
    assert curvature == pytest.approx((loss[0] - 2 * loss[1] + loss[2]) / h**2, rel=1e-4, abs=1e-6)
    assert outer == pytest.approx(2 * float(tangent @ tangent) / len(targets), rel=1e-5)


# --- functions with a backward pass of their own --------------------------------------------------


class _SavesInTraining(torch.autograd.Function):
    """Keeps what its backward pass needs in training only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        ctx.save_for_backward(*([x] if training else []))
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return slope * (1 - x.tanh() ** 2), None


class _AssertsTraining(_SavesInTraining):
    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        ctx.training = training
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("no backward pass in eval mode")


class _RefusesForward(_SavesInTraining):
    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        raise AttributeError("no kernel for eval mode")


class _CallsNumPy(_SavesInTraining):
    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(slope.numpy() * (1 - x.tanh().numpy() ** 2)), None


class _WritesIntoSaved(_CallsNumPy):
    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return x.tanh_().square_().neg_().add_(1).mul_(slope), None


class _WritesIntoInput(_CallsNumPy):
    """Saves its result, which is its input written over without a word to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        y = x.tanh_()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return slope * (1 - y * y), None


class _ByFunction(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 4), function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function.apply(self.first(x), self.training)  # type: ignore[no-untyped-call]
        return self.last(h)


@pytest.mark.parametrize("operator", [ca.Hessian, ca.GaussNewton])
@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (_SavesInTraining, DifferentiationError, "backward pass of .*_SavesInTraining.*not enough"),
        (_AssertsTraining, DifferentiationError, "backward pass of .*_AssertsTraining.*in eval"),
        (_RefusesForward, ProblemError, "forward pass of .*_RefusesForward.*AttributeError: no k"),
        (_CallsNumPy, DifferentiationError, "backward pass of .*_CallsNumPy.*numpy"),
        (_WritesIntoSaved, DifferentiationError, "_WritesIntoSaved.*in place"),
    ],
)
def test_a_function_that_fails_is_named(
    operator: Any, function: Any, error: type[Exception], words: str
) -> None:
    model = _ByFunction(function).double().eval()
    with pytest.raises(error, match=words) as raised:
        operator(ca.Problem(model, "mse", _ROWS())).dense()
    assert "\n" not in str(raised.value)


def test_a_function_that_writes_over_its_input_is_named() -> None:
    torch.manual_seed(0)
    model = _ByFunction(_WritesIntoInput).double().eval()
    with pytest.raises(DifferentiationError, match=r"_WritesIntoInput.*no usable double"):
        ca.Hessian(ca.Problem(model, "mse", _ROWS())).dense()


# --- batches of no rows ---------------------------------------------------------------------------


class _Reshapes(nn.Module):
    """Cannot be called on no rows, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        outputs = self.mix(x).view(len(x), -1)
        return outputs, None if targets is None else F.mse_loss(outputs, targets)


@pytest.mark.parametrize("loss", ["mse", F.l1_loss, lambda z, y: (z - y).square().mean(), None])
@pytest.mark.parametrize("place", [0, 1])
def test_batches_of_no_rows_add_nothing(loss: Any, place: int) -> None:
    model = _model(_Case(_Reshapes, _ROWS))
    if loss not in ("mse", None):
        model.forward = lambda x: model.mix(x)  # type: ignore[method-assign]
    batches = _ROWS()
    empty = batches[0][0][:0], batches[0][1][:0]
    problem = ca.Problem(model, loss, [*batches[:place], empty, *batches[place:]])
    plain = ca.Problem(model, loss, batches)
    assert problem.value() == plain.value()
    assert torch.equal(problem.gradient(), plain.gradient())
    v = _numbers(problem.size, seed=9)
    assert torch.equal(ca.Hessian(problem) @ v, ca.Hessian(plain) @ v)
    with pytest.raises(ProblemError, match="no batch has a row"):
        ca.Problem(model, loss or "mse", [empty, empty])
