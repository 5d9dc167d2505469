"""What is written down is the function: against double backward of the untouched model."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import curvatlas as ca
from curvatlas.errors import DifferentiationError, NoGradientPath
from curvatlas.problem.evaluation import evaluation
from curvatlas.tape.record import Record, record
from curvatlas.tape.run import Tape

WIDTH = 4
Loss = Callable[[Tensor], Tensor]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


INPUTS = drawn(3, WIDTH)


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs.logsumexp(-1) - outputs[..., 0]).mean() + 0.1 * outputs.pow(3).mean()


class Net(nn.Module):
    """x → tanh(W x) → ``middle`` → U h, the middle given by the test."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.middle = middle
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        if self.middle is not None:
            hidden = self.middle(self, hidden)
        result: Tensor = self.last(hidden)
        return result


def recorded(model: nn.Module, *inputs: Any, loss: Loss = loss_of, **options: Any) -> Record:
    named = dict(model.named_parameters())
    with evaluation(model, stay_double=True):
        return record(model, named, lambda: model(*(inputs or (INPUTS,)), **options), loss)


def assert_exact(model: nn.Module, *inputs: Any, loss: Loss = loss_of, **options: Any) -> Record:
    """Loss, gradient and H v of the record equal those of double backward; the record."""
    inputs = inputs or (INPUTS,)
    written = recorded(model, *inputs, loss=loss, **options)
    named = dict(model.named_parameters())
    with evaluation(model, stay_double=True):
        value = loss(model(*inputs, **options))
        gradient = torch.autograd.grad(
            value, list(named.values()), create_graph=True, allow_unused=True
        )
    moving = {n: g for n, g in zip(named, gradient, strict=True) if g is not None}
    v = {name: drawn(*p.shape, seed=7) for name, p in named.items()}
    along = sum(((g * v[n]).sum() for n, g in moving.items()), torch.zeros(()).double())
    exact = torch.autograd.grad(along, list(named.values()), allow_unused=True)
    tape = Tape(written)
    mine = tape.hessian({n: d.unsqueeze(0) for n, d in v.items()}, list(named))
    torch.testing.assert_close(tape.value, value.detach(), rtol=1e-13, atol=1e-14)
    for name, p in named.items():
        expected = moving[name].detach() if name in moving else torch.zeros_like(p)
        own = tape.gradient.get(name, torch.zeros_like(p))
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-13, msg=name)
    for (name, p), row, column in zip(named.items(), mine, exact, strict=True):
        expected = torch.zeros_like(p) if column is None else column
        row = torch.zeros_like(p) if row is None else row.squeeze(0)
        torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-12, msg=name)
    return written


def middle(change: Callable[[Net, Tensor], Tensor]) -> Net:
    return Net(change)


# --- stop-gradients -------------------------------------------------------------------------------


def test_what_is_detached_is_a_constant_told_by_its_module() -> None:
    class Stops(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h * h.detach()

    net = Net()
    net.gate = Stops()
    net.middle = lambda self, h: self.gate(h)
    assert assert_exact(net).stops == {"gate"}


@pytest.mark.parametrize("of", ["data", "no_grad"])
def test_data_and_no_grad_stop_the_derivative(of: str) -> None:
    def stopped(net: Net, h: Tensor) -> Tensor:
        if of == "data":
            return h + h.data.square()
        with torch.no_grad():
            norm = h.norm(dim=-1, keepdim=True)
        return h / norm

    assert assert_exact(middle(stopped)).stops == {"the model"}


def test_a_stopped_value_that_is_not_used_afterwards_is_no_stop() -> None:
    def looks(net: Net, h: Tensor) -> Tensor:
        with torch.no_grad():
            h.abs().max()
            order = h.sum(0).argsort()
        h.detach().mean()
        return h[:, order]

    assert assert_exact(middle(looks)).stops == set()


def test_what_is_computed_from_a_stopped_value_is_told_as_well() -> None:
    net = middle(lambda net, h: h * (h.detach().exp() + 1).log())
    assert assert_exact(net).stops == {"the model"}


def test_a_straight_through_estimator_is_the_identity_to_the_derivative() -> None:
    net = middle(lambda net, h: h + (h.round() - h).detach())
    assert assert_exact(net).stops == {"the model"}


def test_values_changed_without_gradients_keep_their_derivative() -> None:
    def halved(net: Net, h: Tensor) -> Tensor:
        with torch.no_grad():
            h.mul_(0.5)
        return h.square()

    assert_exact(middle(halved))


def test_nothing_moves_without_a_path() -> None:
    with pytest.raises(NoGradientPath, match="no gradient path"):
        recorded(middle(lambda net, h: h), loss=lambda z: loss_of(z.detach()))


# --- functions with a backward pass of their own --------------------------------------------------


class Doubled(torch.autograd.Function):
    """Forward x², backward of 2 x²."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 4 * x * grad


class Inplace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * grad


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, power: int = 2) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.power * ctx.saved_tensors[0] ** (ctx.power - 1) * grad, None


kept_doubled = Doubled.apply  # as people keep it, before anything of ours runs


@pytest.mark.parametrize(
    "function",
    [Doubled.apply, kept_doubled, lambda h: WithContext.apply(h, 3), WithContext.apply],
    ids=["apply", "kept", "context", "default"],
)
def test_an_autograd_function_is_one_node_with_the_users_backward(
    function: Callable[[Tensor], Tensor],
) -> None:
    written = assert_exact(middle(lambda net, h: function(h) + h))
    assert sum(node.name in ("Doubled", "WithContext") for node in written.nodes) == 1


def test_an_autograd_function_that_changes_its_input() -> None:
    assert_exact(middle(lambda net, h: Inplace.apply(h * 1.0).square()))


# --- mutation -------------------------------------------------------------------------------------


def _residuals(net: Net, h: Tensor) -> Tensor:
    h = h.clone()
    h += h.tanh()
    h[1:].view(-1)[::2].mul_(3)
    h.t()[0].mul_(h[:, 1].clone())
    h[h > 0.3] *= 2
    return h


def _filled(net: Net, h: Tensor) -> Tensor:
    table = torch.zeros(WIDTH, 3, dtype=h.dtype)
    for i in range(3):
        table[:, i] = h[i] ** 2
    other = torch.empty_like(table)
    other.copy_(table.sin())
    table = table + other
    table[0].zero_()
    return table.t().index_add(0, torch.tensor([0, 0]), h[1:])


def _into_a_detached_constant(net: Net, h: Tensor) -> Tensor:
    positions = torch.linspace(0, 1, WIDTH, dtype=h.dtype).sin().detach()
    positions += h[0]
    return h * positions


@pytest.mark.parametrize("change", [_residuals, _filled, _into_a_detached_constant])
def test_what_is_changed_in_place_is_followed(change: Callable[[Net, Tensor], Tensor]) -> None:
    written = assert_exact(middle(change))
    names = [node.name for node in written.nodes]
    assert not any(name.split(".")[1].endswith("_") for name in names if name.startswith("aten"))


def test_buffers_and_inputs_are_as_they_were() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x -= self.calls
            if self.kept is None:
                self.kept = torch.arange(WIDTH) + 1.0
            return super().forward(x * self.kept)

    model, x = Counting(), INPUTS.clone()
    problem = ca.Problem(model, "mse", (x, drawn(3, WIDTH, seed=2)))
    batch, named = next(problem.batches()), dict(model.named_parameters())
    with problem.evaluating():
        record(
            model,
            named,
            lambda: problem.predictions(batch, named),
            lambda outputs: problem.loss.value(outputs, batch.targets),
        )
    assert int(model.calls) == 0
    assert model.kept is None
    assert torch.equal(x, INPUTS)


def test_what_a_cache_outside_of_the_model_keeps_is_a_plain_tensor() -> None:
    kept: dict[str, Tensor] = {}

    @functools.lru_cache
    def positions(n: int) -> Tensor:
        table = torch.zeros(n, dtype=torch.float64)
        table[1:] = torch.arange(n - 1) / n
        return table

    def cached(net: Net, h: Tensor) -> Tensor:
        kept["hidden"] = h
        return h + positions(WIDTH)

    model = middle(cached)
    recorded(model)
    assert type(model(INPUTS)) is Tensor
    assert positions(WIDTH).numpy().tolist() == [0.0, 0.0, 0.25, 0.5]
    assert kept["hidden"].detach().numpy().shape == (3, WIDTH)
    assert_exact(model)


# --- a leaf is a parameter, however it is reached -------------------------------------------------


class Reaching(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        w = self.weight
        self.held: dict[str, Any] = {
            "list": [w],
            "dict": {"w": w},
            "tuple": (w, 1),
            "partial": functools.partial(F.linear, weight=w),
            "transposed": w.t(),
            "row": w[1],
            "window": w.unfold(0, 2, 1),
            "flat": w.view(-1),
        }
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        held = self.held[self.way]
        h = torch.tanh(x @ self.weight)
        match self.way:
            case "list" | "tuple":
                return h @ held[0]
            case "dict":
                return h @ held["w"]
            case "partial":
                return held(h)
            case "transposed":
                return h @ held
            case "row":
                return h * held
            case "window":
                return h * held.square().sum((0, 2))
        return h * held[3 : 3 + WIDTH]


@pytest.mark.parametrize(
    "way", ["list", "dict", "tuple", "partial", "transposed", "row", "window", "flat"]
)
def test_a_weight_is_the_same_leaf_whichever_way_it_is_reached(way: str) -> None:
    assert assert_exact(Reaching(way)).stops == set()


def test_a_weight_in_the_closure_of_the_loss_is_the_same_leaf() -> None:
    net = Net()
    assert_exact(net, loss=lambda z: loss_of(z) + (net.first.weight @ z.t()).square().mean())


@pytest.mark.parametrize("alias", ["detach", "data", "no_grad"])
def test_an_alias_without_a_graph_is_a_constant(alias: str) -> None:
    class Held(Net):
        def __init__(self) -> None:
            super().__init__()
            weight = self.first.weight
            with torch.no_grad():
                views = {"detach": weight.detach(), "data": weight.data.t(), "no_grad": weight.t()}
            self.held = [views[alias]]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.held[0]

    assert assert_exact(Held()).stops == {"the model"}


def test_parameters_that_overlap_in_memory_vary_each_by_itself() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = drawn(3 * WIDTH)
            self.a = nn.Parameter(flat[: 2 * WIDTH])
            self.b = nn.Parameter(flat[WIDTH:])
            self.c = nn.Parameter(flat[:WIDTH])
            self.views = [self.a[:WIDTH], self.b[WIDTH:], self.c.view(2, 2)]

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.views
            return torch.tanh(x * a) * b + c.flatten() * self.a[WIDTH:] * self.b[:WIDTH]

    assert_exact(Overlapping())


def test_tied_weights_are_one_leaf() -> None:
    net = Net()
    net.last.weight = net.first.weight
    assert_exact(net)


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "spectral", "own", "cached"])
def test_parametrised_weights(kind: str) -> None:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).t()

    def cached(net: Net, h: Tensor) -> Tensor:
        with parametrize.cached():
            return net.first(h) + net.first(h.sin())

    net = Net()
    if kind == "weight_norm":
        parametrizations.weight_norm(net.first)
    elif kind == "orthogonal":
        parametrizations.orthogonal(net.first, orthogonal_map="cayley", use_trivialization=False)
    elif kind == "spectral":
        parametrizations.spectral_norm(net.first)
    else:
        parametrize.register_parametrization(net.first, "weight", Symmetric())
    if kind == "cached":
        net.middle = cached
    assert_exact(net.eval())


def test_old_weight_norm_is_differentiated_right() -> None:
    net = Net()
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(net.first)
    assert_exact(net)


def test_scripted_functions_are_followed_and_scripted_weights_refused_by_name() -> None:
    scripted = torch.jit.script(F.hardswish)
    net = Net(lambda net, h: scripted(h) + h.sin())
    assert_exact(net)
    net.first = torch.jit.script(net.first)
    with pytest.raises(DifferentiationError, match=r"first is compiled by torch\.jit\.script"):
        recorded(net)


# --- what surrounds a module ----------------------------------------------------------------------


def test_hooks_that_change_outputs_are_part_of_the_function() -> None:
    net = Net()
    net.first.register_forward_hook(lambda module, args, out: out.sin() * net.scale)
    net.last.register_forward_pre_hook(lambda module, args: (args[0] ** 2,))
    assert_exact(net)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant: bool) -> None:
    net = middle(
        lambda net, h: checkpoint(lambda t: (t * net.scale).sin(), h, use_reentrant=reentrant)
    )
    assert_exact(net)


def test_hooks_on_gradients_are_told_and_not_followed() -> None:
    def hooked(net: Net, h: Tensor) -> Tensor:
        h.retain_grad()
        h.register_hook(lambda gradient: 2 * gradient)
        return h

    written, plain = recorded(middle(hooked)), recorded(Net())
    assert written.hooks == {"the model"}
    assert plain.hooks == set()
    torch.testing.assert_close(Tape(written).gradient, Tape(plain).gradient)


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    net = Net()
    with torch.no_grad():
        model = peft.get_peft_model(
            net, peft.LoraConfig(r=2, target_modules=["first", "last"], use_dora=True)
        )
        for p in model.parameters():
            p.requires_grad_().add_(drawn(*p.shape), alpha=0.1)
    assert_exact(model.double().eval())


def test_compiled_parts_run_as_they_were_written() -> None:
    net = Net()
    net.first.compile(backend="eager")
    net.middle = torch.compile(lambda net, h: h.sin() * net.scale, backend="eager")
    assert_exact(net)


def test_the_row_of_padding_idx_is_held_fixed() -> None:
    class Embedded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH, padding_idx=1)
            self.table.weight.data = drawn(5, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.table(x).square())

    assert_exact(Embedded(), torch.tensor([[1, 2], [4, 1], [0, 3]]))


def test_a_module_of_its_name_for_every_node() -> None:
    modules = {node.module for node in recorded(Net()).nodes}
    assert modules == {"", "first", "last"}


def test_requires_grad_reads_as_it_does_for_autograd() -> None:
    net = middle(lambda net, h: h.sin() if h.requires_grad and not INPUTS.requires_grad else h)
    assert_exact(net)


# --- derivatives inside forward -------------------------------------------------------------------


class Energy(nn.Module):
    """Forces: the derivative of an energy by the inputs is a part of the output."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way = Net(), way

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.net(x).square().sum()
        if self.way == "first order":
            (force,) = torch.autograd.grad(energy, x, retain_graph=True)
            return self.net(x) * force
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.net(x) - force


class InnerStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.net.named_parameters())
        inner = self.net(x).square().mean()
        slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        stepped = {n: p - 0.3 * g for (n, p), g in zip(named.items(), slopes, strict=True)}
        result: Tensor = torch.func.functional_call(self.net, stepped, (x,))
        return result


class Residual(nn.Module):
    """u'' + u of a network, as in a physics-informed loss, by ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return self.net(point).sum()

        return torch.vmap(torch.func.grad(u))(x) + self.net(x)


@pytest.mark.parametrize(
    "make", [lambda: Energy("second order"), lambda: Energy("first order"), InnerStep, Residual]
)
def test_models_that_differentiate_in_their_forward_pass(make: Callable[[], nn.Module]) -> None:
    assert_exact(make())


def test_masks_made_by_vmap_are_constants() -> None:
    def masked(net: Net, h: Tensor) -> Tensor:
        allowed = torch.arange(3) + 0 < 2

        def mask(row: Tensor, head: Tensor, column: Tensor) -> Tensor:
            return (row >= column) & allowed[row] & row.new_ones((), dtype=torch.bool)

        for places in ((None, None, 0), (None, 0, None), (0, None, None)):
            mask = torch.vmap(mask, in_dims=places)
        seen = mask(torch.arange(3) + 0, torch.arange(1), torch.arange(WIDTH))
        return h.masked_fill(~seen[:, 0], 0.5)

    assert_exact(middle(masked))


# --- what cannot be recorded ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "noise",
    [
        lambda h: h + torch.randn_like(h),
        lambda h: h * torch.rand(WIDTH, dtype=h.dtype),
        lambda h: F.dropout(h, 0.5, training=True),
        lambda h: h[:, torch.randperm(WIDTH)],
        lambda h: h.masked_fill(torch.rand(WIDTH) < 0.5, 0.0),
    ],
)
def test_randomness_on_the_way_is_refused_by_the_modules_name(
    noise: Callable[[Tensor], Tensor],
) -> None:
    class Noisy(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return noise(h)

    net = Net()
    net.noisy = Noisy()
    net.middle = lambda self, h: self.noisy(h)
    with pytest.raises(DifferentiationError, match=r"noisy draws random numbers.*model.eval"):
        recorded(net)


def test_random_numbers_off_the_way_do_not_matter() -> None:
    assert_exact(middle(lambda net, h: h if torch.rand(()) < 2 else h * 2))


def test_numpy_in_forward_is_refused_where_it_would_stop_the_derivative() -> None:
    net = middle(lambda net, h: h + torch.from_numpy(np.sin(h.numpy())))
    with pytest.raises(DifferentiationError, match="hands a value that depends on the param"):
        recorded(net)


def test_numpy_of_a_detached_value_is_a_constant() -> None:
    assert_exact(middle(lambda net, h: h * torch.from_numpy(np.cos(h.detach().numpy()))))


def test_complex_parameters_are_refused_by_name() -> None:
    net = Net()
    net.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    with pytest.raises(DifferentiationError, match="'phase' is complex"):
        recorded(net)


def test_nested_tensors_are_refused() -> None:
    def nested(net: Net, h: Tensor) -> Tensor:
        return torch.nested.nested_tensor([h.detach()[0], h.detach()[1]]).sin().unbind()[0] + h

    with pytest.raises(DifferentiationError, match=r"kind of tensor.*nested"):
        recorded(middle(nested))


def test_a_module_cast_in_forward_to_what_it_is_stays_as_it_is() -> None:
    net = Net()
    net.middle = lambda net, h: net.last.to(torch.float32)(h)
    assert_exact(net)


def test_assigning_data_in_forward_is_refused() -> None:
    def assigned(net: Net, h: Tensor) -> Tensor:
        h.data = h.data * 2
        return h

    with pytest.raises(DifferentiationError, match=r"assigns to the \.data"):
        recorded(middle(assigned))


# --- unusual tensors ------------------------------------------------------------------------------


def test_values_that_are_complex_on_the_way() -> None:
    def fourier(net: Net, h: Tensor) -> Tensor:
        spectrum = torch.fft.fftn(h * (1 + 0.5j), dim=(0, 1))
        return spectrum.real + (spectrum * spectrum.conj()).abs() * torch.angle(spectrum + 9)

    assert_exact(middle(fourier))


def test_rotations_by_complex_numbers() -> None:
    def rotated(net: Net, h: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(2).double(), torch.arange(2).double() + 1)
        pairs = torch.view_as_complex(h.view(3, 2, 2).contiguous())
        return torch.view_as_real(pairs * turns).flatten(1)

    assert_exact(middle(rotated))


@pytest.mark.parametrize(
    "cast",
    [
        lambda h: h.float(),
        lambda h: h.to(torch.float32),
        lambda h: h.type(torch.bfloat16),
        lambda h: torch.softmax(h, -1, dtype=torch.float32),
    ],
)
def test_casts_that_only_round_are_dropped(cast: Callable[[Tensor], Tensor]) -> None:
    written = assert_exact(middle(lambda net, h: cast(h).sin().to(h.dtype)))
    reached = {slot for node in written.nodes for slot in (*node.inputs, *node.outputs)}
    assert {written.values[slot].dtype for slot in reached if slot is not None} == {torch.float64}


def test_sparse_buffers() -> None:
    net = middle(lambda net, h: torch.sparse.mm(net.graph, h))
    net.register_buffer("graph", drawn(3, 3).relu().to_sparse())
    assert_exact(net)


def test_list_item_and_shape_steer_the_model() -> None:
    def steered(net: Net, h: Tensor) -> Tensor:
        rows = h.sum(1).argsort().tolist()
        count = int((h > 0).sum().item()) % WIDTH
        return h[rows] * h.size(0) + h[:, count : count + 1]

    assert_exact(middle(steered))


# --- the record -----------------------------------------------------------------------------------


def test_replayed_at_other_parameters_is_the_models_own_loss_there() -> None:
    def written_out(net: Net, h: Tensor) -> Tensor:
        h = _filled(net, _residuals(net, h))
        return F.scaled_dot_product_attention(h, h, h) + WithContext.apply(h, 2)

    model = middle(written_out)
    written = recorded(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(drawn(*p.shape), alpha=1e-3)
    own = loss_of(other(INPUTS))
    assert not torch.allclose(own, written.values[written.loss])
    replayed = written.replayed(dict(other.named_parameters()))
    torch.testing.assert_close(replayed, own, rtol=1e-13, atol=0)


def test_a_record_prints_operation_shapes_rule_and_module() -> None:
    lines = str(recorded(middle(lambda net, h: h.cumsum(0)))).splitlines()
    linear = next(line for line in lines if "linear" in line)
    assert "[4, 4]" in linear
    assert "→ [3, 4]" in linear
    assert linear.endswith("first")
    assert any("aten.tanh" in line and "pointwise" in line for line in lines)
    assert len(lines) == len(recorded(middle(lambda net, h: h.cumsum(0))).nodes)


def test_an_error_in_forward_puts_everything_back() -> None:
    def fails(net: Net, h: Tensor) -> Tensor:
        raise ValueError("out of order")

    code = vars(torch.autograd.Function)["apply"].__func__.__code__
    with pytest.raises(ValueError, match="out of order"):
        recorded(middle(fails))
    assert vars(torch.autograd.Function)["apply"].__func__.__code__ is code
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch._is_functional_tensor(torch.ones(1))
    assert F.has_torch_function is torch.overrides.has_torch_function
    assert_exact(Net())


def test_other_threads_do_not_notice() -> None:
    plain = Net()
    seen: list[Any] = []

    def elsewhere() -> None:
        value = Doubled.apply(plain(INPUTS)).sum()
        seen.append((type(value), value.requires_grad, torch._is_functional_tensor(value)))

    def starts(net: Net, h: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return h

    modules = {node.module for node in assert_exact(middle(starts)).nodes}
    assert seen[0] == (Tensor, True, False)
    assert modules == {"", "first", "last"}
