"""Every derivative is the loss's, or one line says what it is of.

The oracle is the loss of the untouched model, its weights moved in their own memory.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import curvatlas as ca
from curvatlas.errors import DifferentiationError, NoGradientPath, ProblemError
from curvatlas.problem.truth import overlapping

WIDTH, CLASSES, SAMPLES = 4, 3, 6
NOT_THE_LOSSES = "the gradient is not the loss's, at "


class Net(nn.Module):
    """Two layers; the cases below change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Linear(5, CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.hidden(x))

    def between(self, h: Tensor) -> Tensor:
        return self.second(h)


class Elsewhere(Net):
    """Reads the first layer's weight once through the layer and once by what ``hold`` made."""

    def __init__(self, hold: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.held = hold(self.first.weight)

    def hidden(self, x: Tensor) -> Tensor:
        held = self.held
        if callable(held) and not isinstance(held, Tensor):
            again = held(x)
        elif isinstance(held, dict):
            again = x @ held["weight"].T
        elif isinstance(held, list | tuple):
            again = x @ held[0].T
        else:
            again = x @ held
        return torch.tanh(self.first(x)) + torch.sin(again)


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(20)
        self.left, self.right = nn.Parameter(memory[:12]), nn.Parameter(memory[8:20])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.left.view(4, 3)) + x @ self.right.view(4, 3)


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH, **options)
        nn.init.normal_(self.table.weight)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)).mean(1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


def made(**methods: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A ``Net`` with other methods."""
    return type("Changed", (Net,), methods)


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = self.first(x).sigmoid().mean(1, keepdim=True)
    return torch.tanh(self.first(x)) * gate


def with_a_hook(self: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    result: Tensor = self.second(h)
    return result


def with_columns_of_norm_one(self: Any, x: Tensor) -> Tensor:  # as DoRA does
    weight = self.first.weight
    return torch.tanh(x @ (weight / weight.norm(dim=1, keepdim=True).detach()).T + self.first.bias)


def in_place(self: Any, h: Tensor) -> Tensor:
    outputs: Tensor = self.second(h)
    h.mul_(2)
    return outputs + h[:, :CLASSES]


def of_a_leaf(self: Any, x: Tensor) -> Tensor:
    self.first.weight.mul_(0.9)
    result: Tensor = torch.tanh(self.first(x))
    return result


def of_a_leafs_data(self: Any, x: Tensor) -> Tensor:
    self.first.weight.data.clamp_(-0.2, 0.2)
    result: Tensor = torch.tanh(self.first(x))
    return result


def with_other_data(self: Any, x: Tensor) -> Tensor:
    self.first.weight.data = self.first.weight.data / 2
    result: Tensor = torch.tanh(self.first(x))
    return result


def pushed(self: Any, x: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(self.first, (x,), (torch.ones_like(x),))
    return torch.tanh(value) + tangent**2


def pushed_by_dual_numbers(self: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = torch.tanh(self.first(forward_ad.make_dual(x, torch.ones_like(x))))
        value, tangent = forward_ad.unpack_dual(dual)
    return value + tangent


PLAIN = [
    ("list", functools.partial(Elsewhere, lambda w: [w])),
    ("dict", functools.partial(Elsewhere, lambda w: {"weight": w})),
    ("tuple", functools.partial(Elsewhere, lambda w: (w,))),
    ("partial", functools.partial(Elsewhere, lambda w: functools.partial(F.linear, weight=w))),
    ("closure", functools.partial(Elsewhere, lambda w: lambda x: x @ w.T)),
    ("view of __init__", functools.partial(Elsewhere, lambda w: w.t())),
    ("scale_grad_by_freq", functools.partial(Words, scale_grad_by_freq=True)),
    ("sparse table", functools.partial(Words, sparse=True)),
    ("jvp", made(hidden=pushed)),
]
SAID = [
    ("detach", made(between=lambda s, h: s.second(h) * h.detach().mean()), "first.weight"),
    ("no_grad", made(hidden=without_gradients), "first.weight"),
    ("hook", made(between=with_a_hook), "first.weight, first.bias: "),
    (
        "straight through",
        made(between=lambda s, h: s.second(h + ((4 * h).round() / 4 - h).detach())),
        "first.weight, first.bias: ",
    ),
    ("DoRA", made(hidden=with_columns_of_norm_one), "first.weight: "),
    (
        "detached view",
        functools.partial(Elsewhere, lambda w: w.data.t()),
        NOT_THE_LOSSES + "first.weight: ",
    ),
    (
        "grad mode",
        made(between=lambda s, h: s.second(h) * (2 if torch.is_grad_enabled() else 1)),
        "branches on torch.is_grad_enabled()",
    ),
    (
        "training",
        made(between=lambda s, h: s.second(h) * (2 if s.training else 1)),
        "the model is in train mode, where its loss is another",
    ),
    ("overlap", Overlapping, "left, right overlap in memory"),
    ("padding", functools.partial(Words, padding_idx=0), "table.weight: the loss depends on the "),
]
REFUSED = [
    ("activation in place", made(between=in_place), "in place .of shape"),
    ("leaf in place", made(hidden=of_a_leaf), "changes parameter 'first.weight' in place"),
    ("leaf's data", made(hidden=of_a_leafs_data), "changes parameter 'first.weight' in place"),
    (
        "data exchanged",
        made(hidden=with_other_data),
        "changes parameter 'first.weight' in place",
    ),
    ("complex", Complex, "parameter 'weight' is complex128"),
    ("detached", made(between=lambda s, h: s.second(h).detach()), "no gradient path"),
]
ORDINARY = {
    "relu": lambda: nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU6()),
    "norm": lambda: nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.GELU(), nn.Dropout(0.0)),
    "closed gate": lambda: made(
        __init__=lambda s: (Net.__init__(s), nn.init.zeros_(s.second.weight))[0]
    )(),
    "constant": made(hidden=lambda s, x: torch.tanh(s.first(x)) * x.detach().mean()),
}


def batch_of(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    if isinstance(model, Words):
        tokens = torch.randint(1, 6, (SAMPLES, 5), generator=generator)
        tokens[:, 3:] = 0
        return tokens, targets
    drawn = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return drawn.to(dtype), targets


def model_of(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def along(model: nn.Module, loss: Callable[[], Tensor], v: Tensor) -> tuple[float, float]:
    """First and second derivative of the untouched loss along v, by differences."""
    parameters = list(model.parameters())
    pieces = torch.split(v, [p.numel() for p in parameters])

    def at(t: float) -> float:
        before = [p.data.clone() for p in parameters]
        for p, piece in zip(parameters, pieces, strict=True):
            p.data.add_(piece.view_as(p), alpha=t)
        with torch.no_grad():
            value = float(loss())
        for p, own in zip(parameters, before, strict=True):
            p.data.copy_(own)
        return value

    near, far = 1e-5, 2e-4
    first = (at(near) - at(-near)) / (2 * near)
    return first, (at(far) - 2 * at(0.0) + at(-far)) / far**2


def assert_derivatives(problem: ca.Problem, loss: Callable[[], Tensor]) -> None:
    v = torch.randn(problem.size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    hv = ca.Hessian(problem) @ v  # first: nothing has been called before
    slope, curvature = along(problem.model, loss, v)
    assert float(problem.gradient() @ v) == pytest.approx(slope, rel=1e-7, abs=1e-8)
    assert float(hv @ v) == pytest.approx(curvature, rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in PLAIN])
def test_derivatives_are_those_of_the_untouched_loss(make: Callable[[], nn.Module]) -> None:
    model = model_of(make).eval()
    x, y = batch_of(model, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        problem = ca.Problem(model, F.cross_entropy, (x, y))
        assert_derivatives(problem, lambda: F.cross_entropy(model(x), y))


@pytest.mark.parametrize("whole", [True, False], ids=["all", "some vary"])
def test_a_loss_that_reads_the_weights_is_differentiated_by_them_too(whole: bool) -> None:
    model = model_of(Net).eval()
    x, y = batch_of(model, torch.float64)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.1 * sum(
            (p.pow(4).sum() for p in model.parameters()), torch.zeros(())
        )

    if not whole:
        for parameter in model.second.parameters():
            parameter.requires_grad_(False)
    problem = ca.Problem(model, loss, (x, y))
    v = torch.randn(problem.size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    rest = sum(p.numel() for p in model.parameters()) - problem.size
    hv = ca.Hessian(problem) @ v
    slope, curvature = along(model, lambda: loss(model(x), y), F.pad(v, (0, rest)))
    assert float(problem.gradient() @ v) == pytest.approx(slope, rel=1e-7)
    assert float(hv @ v) == pytest.approx(curvature, rel=2e-6)
    assert problem.engine.name == "autograd"
    with pytest.warns(UserWarning, match=r"the loss itself reads first\.bias.*H is not their sum"):
        ca.GaussNewton(problem) @ v


def penalised(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    value = F.cross_entropy(outputs, targets)
    slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    return value + 0.1 * sum((slope.square().sum() for slope in slopes), torch.zeros(()))


def test_a_loss_that_takes_a_gradient_belongs_into_the_model() -> None:
    model = model_of(Net).eval()
    x, y = batch_of(model, torch.float64)
    with pytest.raises(ProblemError, match="takes a gradient itself: let the model's forward"):
        ca.Problem(model, lambda z, t: penalised(model, z, t), (x, y)).gradient()

    class Penalised(Net):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
            outputs = super().forward(x)
            return outputs if targets is None else (outputs, penalised(self, outputs, targets))

    model = model_of(Penalised).eval()
    problem = ca.Problem(model, "model", {"x": x, "targets": y})
    assert_derivatives(problem, lambda: _with_graph(model, x, y))


def _with_graph(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        value: Tensor = model(x, y)[1]
        return value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("make", "word"), [pytest.param(make, word, id=name) for name, make, word in SAID]
)
def test_one_line_says_what_a_derivative_is_of(
    make: Callable[[], nn.Module], word: str, dtype: torch.dtype
) -> None:
    model = model_of(make, dtype)
    problem = ca.Problem(model, F.cross_entropy, batch_of(model, dtype))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hv = ca.Hessian(problem) @ torch.ones(problem.size, dtype=dtype)
        problem.gradient()
        ca.Problem(model, F.cross_entropy, batch_of(model, dtype)).gradient()
    assert bool(torch.isfinite(hv).all())
    lines = [str(w.message) for w in said if re.search(word, str(w.message))]
    assert len(lines) == 1, [str(w.message) for w in said]


def test_a_row_of_padding_is_found_in_the_last_sample_too() -> None:
    model = model_of(functools.partial(Words, padding_idx=0)).eval()
    tokens = torch.randint(1, 6, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
    tokens[-1, 2] = 0
    problem = ca.Problem(model, F.cross_entropy, (tokens, batch_of(model, torch.float64)[1]))
    assert problem.separable  # so that few samples decide what else is said
    with pytest.warns(UserWarning, match="the loss depends on the row of padding_idx"):
        problem.gradient()


@pytest.mark.parametrize(
    ("make", "word"), [pytest.param(make, word, id=name) for name, make, word in REFUSED]
)
def test_what_cannot_be_differentiated_ends_in_one_clear_line(
    make: Callable[[], nn.Module], word: str
) -> None:
    model = model_of(make).eval()
    for number in (
        lambda p: p.gradient(),
        lambda p: ca.Hessian(p) @ torch.ones(p.size, dtype=p.dtype),
    ):
        with pytest.raises((ProblemError, NoGradientPath, DifferentiationError), match=word):
            number(ca.Problem(model, F.cross_entropy, batch_of(model, torch.float64)))


@pytest.mark.parametrize("by", [lambda w: w.square(), lambda w: torch.stack([w, 2 * w])[1]])
def test_values_computed_before_the_call_are_held_fixed_and_said(by: Any) -> None:
    model = model_of(functools.partial(Elsewhere, lambda w: by(w).t())).eval()
    x, y = batch_of(model, torch.float64)
    with pytest.warns(UserWarning, match="values computed from first.weight before its forward"):
        assert_derivatives(
            ca.Problem(model, F.cross_entropy, (x, y)), lambda: F.cross_entropy(model(x), y)
        )


def test_a_cache_that_keeps_a_graph_of_the_weights_is_held_fixed_and_still_works_after() -> None:
    @functools.lru_cache
    def gram(model: Any) -> Tensor:
        weight: Tensor = model.first.weight
        return torch.tanh(weight @ weight.T)

    model = model_of(made(between=lambda s, h: s.second(h @ gram(s)))).eval()
    x, y = batch_of(model, torch.float64)
    with pytest.warns(UserWarning, match="values computed from first.weight before its forward"):
        assert_derivatives(
            ca.Problem(model, F.cross_entropy, (x, y)), lambda: F.cross_entropy(model(x), y)
        )
    (slope,) = torch.autograd.grad(gram(model).sum(), model.first.weight)  # of the user's own
    assert bool(slope.any())


def test_dual_numbers_inside_a_model_are_differentiated() -> None:
    model = model_of(made(hidden=pushed_by_dual_numbers)).eval()
    x, y = batch_of(model, torch.float64)
    problem = ca.Problem(model, F.cross_entropy, (x, y))
    assert_derivatives(problem, lambda: F.cross_entropy(model(x), y))


def test_nested_inputs_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with pytest.raises(ProblemError, match=r"a nested tensor.*pad it"):
        ca.Problem(nn.Linear(4, 3), F.cross_entropy, (nested, torch.tensor([0, 1])))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ORDINARY)
def test_nothing_is_said_of_ordinary_models(name: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = ORDINARY[name]().to(dtype)
        problem = ca.Problem(model, F.cross_entropy, batch_of(model, dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            problem.gradient()


def minimum() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = batch_of(model, torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-2 * model.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_nothing_is_said_at_a_minimum(dtype: torch.dtype) -> None:
    model = minimum().to(dtype)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 1e-2 * model.weight.square().sum()

    problem = ca.Problem(model, loss, batch_of(model, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert float(problem.gradient().norm()) < 1e-3


def test_the_weights_keep_their_bits_and_their_versions() -> None:
    model = model_of(functools.partial(Elsewhere, lambda w: [w])).eval()
    before = [(p.detach().clone(), p._version) for p in model.parameters()]
    kept = F.cross_entropy(model(x := torch.randn(3, 4).double()), torch.tensor([0, 1, 2]))
    ca.Problem(model, F.cross_entropy, (x, torch.tensor([0, 1, 2]))).gradient()
    kept.backward()  # a graph of the user's from before
    for parameter, (own, version) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, own)
        assert parameter._version == version


def test_hooks_on_parameters_change_no_derivative() -> None:
    model = model_of(Net).eval()
    problem = ca.Problem(model, F.cross_entropy, batch_of(model, torch.float64))
    hessian, v = ca.Hessian(problem, engine="autograd"), torch.ones(problem.size).double()
    gradient, product = problem.gradient(), hessian @ v
    model.first.weight.register_hook(lambda g: 3 * g)
    assert torch.equal(problem.gradient(), gradient)
    assert torch.equal(hessian @ v, product)  # of the graph that was kept
    assert torch.equal(ca.Hessian(problem, engine="autograd") @ v, product)


def test_parameters_frozen_after_the_first_product_are_still_followed() -> None:
    model = model_of(Net).eval()
    problem = ca.Problem(model, F.cross_entropy, batch_of(model, torch.float64))
    hessian, v = ca.Hessian(problem, engine="autograd"), torch.ones(problem.size).double()
    product = hessian @ v
    model.requires_grad_(False)
    assert torch.equal(hessian @ v, product)


def test_other_weights_are_refused_where_the_model_reads_its_own_elsewhere() -> None:
    model = model_of(functools.partial(Elsewhere, lambda w: [w])).eval()
    problem = ca.Problem(model, F.cross_entropy, batch_of(model, torch.float64))
    problem.gradient()
    values = {n: p.detach() + 0.1 for n, p in model.named_parameters()}
    batch = next(problem.batches())
    with pytest.raises(ProblemError, match=r"first\.weight: read other than through"):
        problem.outputs(batch, values)


def test_a_frozen_weight_that_is_read_elsewhere_is_refused() -> None:
    model = model_of(functools.partial(Elsewhere, lambda w: [w])).eval()
    model.first.weight.requires_grad_(False)
    data = batch_of(model, torch.float64)
    problem = ca.Problem(model, F.cross_entropy, data, parameters="first.weight")
    with pytest.raises(ProblemError, match=r"first\.weight: read other than through"):
        problem.gradient()


def test_losses_with_weights_for_each_target_say_how_batches_are_weighted() -> None:
    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, weights = targets
        return (F.cross_entropy(outputs, labels, reduction="none") * weights).sum() / weights.sum()

    model = model_of(Net)
    x, y = batch_of(model, torch.float64)
    weights = torch.rand(SAMPLES, dtype=torch.float64)
    halves = [(x[s], (y[s], weights[s])) for s in (slice(0, 2), slice(2, None))]
    with pytest.warns(UserWarning, match="several batches are weighted by their targets all the"):
        ca.Problem(model, loss, halves)
    counted = ca.Problem(model, loss, halves, count=lambda t: float(t[1].sum()))
    assert counted.value() == pytest.approx(float(loss(model(x), (y, weights))), rel=1e-12)
    assert ca.Problem(model, loss, (x, [y, weights])).value() == pytest.approx(counted.value())


def views() -> Iterator[tuple[str, dict[str, Tensor], list[str]]]:
    memory = torch.zeros(12)
    table = memory.view(3, 4)
    yield "apart", {"a": memory[:6], "b": memory[6:]}, []
    yield "columns", {"a": table[:, :2], "b": table[:, 2:]}, []
    yield "crossing", {"a": table[:, :2], "b": table[1]}, ["a", "b"]
    yield "transposed", {"a": table, "b": table.t()}, ["a", "b"]
    yield "repeated", {"a": torch.zeros(1).expand(5)}, ["a"]
    yield "other memory", {"a": torch.zeros(3), "b": torch.zeros(3)}, []


@pytest.mark.parametrize(
    ("named", "expected"), [v[1:] for v in views()], ids=[v[0] for v in views()]
)
def test_parameters_that_share_entries_are_found(
    named: dict[str, Tensor], expected: list[str]
) -> None:
    assert overlapping(named) == expected


def test_several_defects_are_told_apart_by_parameter() -> None:
    wrong = {"first.weight": False, "first.bias": True, "second.weight": True}
    for cut in itertools.compress(wrong, wrong.values()):
        layer, kind = cut.split(".")

        def between(self: Any, h: Tensor, layer: str = layer, kind: str = kind) -> Tensor:
            extra = getattr(getattr(self, layer), kind).detach().square().sum()
            result: Tensor = self.second(h) * (1 + extra)
            return result

        problem = ca.Problem(
            model := model_of(made(between=between)),
            "cross_entropy",
            batch_of(model, torch.float64),
        )
        with pytest.warns(UserWarning, match=NOT_THE_LOSSES + re.escape(cut) + ": "):
            problem.gradient()
