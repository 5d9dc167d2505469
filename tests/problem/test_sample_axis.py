"""Batches are cut where their samples lie, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvatlas as ca
import oracles
from curvatlas.errors import ProblemError
from curvatlas.operators.per_sample import (
    exact_outer_diagonal,
    sample_gradients,
    sample_quantities,
    sampled_gradients,
    subset,
)
from curvatlas.problem import Batch
from curvatlas.problem.problem import BatchStream

KINDS: dict[str, Callable[..., Any]] = {
    "H": ca.Hessian,
    "H_o": ca.GaussNewton,
    "H_f": ca.FunctionalHessian,
    "empirical": lambda problem, **o: ca.Fisher(problem, kind="empirical", **o),
    "mc": lambda problem, **o: ca.Fisher(problem, kind="mc", **o),
}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*shape: int, seed: int = 0, count: int = 3) -> Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(seed))


class TimeMajor(nn.Module):
    """An encoder layer as torch makes it by default: inputs (L, B, d)."""

    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


class Pooled(TimeMajor):
    """Inputs (L, B, d), outputs (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(0)


class Masked(nn.Module):
    """Attention (B, L, d) with a mask (L, L) that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.query(x) @ x.mT).masked_fill(mask, -1e9)
        return self.head(scores.softmax(-1) @ x)


class Centred(nn.Module):
    """Samples meet in their mean, times a gate that may be closed."""

    def __init__(self, gate: float = 1.0, power: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.gate, self.power = nn.Parameter(torch.tensor(gate)), power

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden - self.gate**self.power * hidden.mean(0))


class WithTable(nn.Module):
    """A shared table comes first, then what is looked up in it and a weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)

    def forward(self, table: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        return self.head(table[places].sin() * weights[:, None])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRU(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def causal(length: int) -> Tensor:
    return torch.ones(length, length).triu(1).bool()


# name → model, inputs, targets, axes of the inputs and targets (None: shared), of the outputs
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Any, Any, tuple[int | None, ...], int]] = {
    "usual": (mlp, rand(5, 4), classes(5), (0, 0), 0),
    "time-major": (TimeMajor, rand(5, 3, 4), classes(5, 3), (1, 1), 1),
    "time-major, L = B": (TimeMajor, rand(4, 4, 4), classes(4, 4), (1, 1), 1),
    "time-major, L = B = d": (TimeMajor, rand(4, 4, 4, seed=5), classes(4, 4, seed=5), (1, 1), 1),
    "recurrent": (Recurrent, rand(5, 3, 4), classes(5, 3), (1, 1), 1),
    "targets elsewhere": (Pooled, rand(5, 3, 4), classes(3), (1, 0), 0),
    "targets elsewhere, L = B": (Pooled, rand(3, 3, 4), classes(3), (1, 0), 0),
    "shared mask": (Masked, (rand(5, 3, 4), causal(3)), classes(5, 3), (0, None, 0), 0),
    "shared mask, L = B": (Masked, (rand(4, 4, 4), causal(4)), classes(4, 4), (0, None, 0), 0),
    "mask that masks nothing": (
        Masked,
        (rand(4, 4, 4), torch.zeros(4, 4).bool()),
        classes(4, 4),
        (0, None, 0),
        0,
    ),
    "mask for each sample": (
        Masked,
        (rand(4, 4, 4), torch.stack([causal(4).roll(i, 0) for i in range(4)])),
        classes(4, 4),
        (0, 0, 0),
        0,
    ),
    "three tensors, the first one shared": (
        WithTable,
        (rand(6, 4), classes(6, count=6), rand(6, seed=1)),
        classes(6),
        (None, 0, 0, 0),
        0,
    ),
    "mapping": (
        WithTable,
        {"weights": rand(4, seed=1), "table": rand(4, 4), "places": classes(4, count=4)},
        classes(4),
        (0, None, 0, 0),
        0,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_axis_of_every_tensor_is_found(name: str, dtype: torch.dtype) -> None:
    make, inputs, targets, axes, outputs = LAYOUTS[name]

    def as_dtype(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: as_dtype(value) for key, value in item.items()}
        if isinstance(item, tuple):
            return tuple(map(as_dtype, item))
        return item.to(dtype) if item.is_floating_point() else item

    problem = ca.Problem(make().to(dtype).eval(), "cross_entropy", [(as_dtype(inputs), targets)])
    assert problem.separable
    layout = next(problem.batches()).layout
    assert layout is not None
    assert layout.leaves == axes
    assert layout.outputs == (outputs,)


@pytest.mark.parametrize("name", LAYOUTS)
def test_samples_one_by_one_add_up_to_the_batch(name: str) -> None:
    make, inputs, targets, *_ = LAYOUTS[name]
    problem = ca.Problem(make().double().eval(), "cross_entropy", [(inputs, targets)])
    batch = next(problem.batches())
    pieces = list(batch.singles(problem.loss.count))
    assert len(pieces) == batch.samples > 1
    assert sum(piece.count for piece in pieces) == batch.count
    total = sum(piece.count * problem.with_batches([piece]).gradient() for piece in pieces) / sum(
        piece.count for piece in pieces
    )
    assert oracles.relative_error(total, problem.gradient()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "samples"), [(5, 7), (6, 6)])
def test_a_time_major_encoder_is_the_same_under_every_budget(
    kind: str, length: int, samples: int
) -> None:
    model = TimeMajor().double().eval()
    data = (rand(length, samples, 4), classes(length, samples))
    whole = KINDS[kind](ca.Problem(model, "cross_entropy", data))
    vector = rand(whole.shape[1], seed=3)
    want = whole @ vector
    if kind == "H":
        with sdpa_kernel(SDPBackend.MATH):
            loss = F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())
        params = list(model.parameters())
        assert oracles.relative_error(want, oracles.hessian(loss, params) @ vector) < 1e-11
    cuts = set()
    for budget in ("300KB", "60KB", "50KB", "42KB", "10KB"):
        operator = KINDS[kind](ca.Problem(model, "cross_entropy", data), budget=budget)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one sample takes more than the budget
            got = operator @ vector
        cuts.add(operator._full._most_samples)
        assert oracles.relative_error(got, want) < 1e-12, budget
    assert len(cuts) > 2  # it was cut, in several ways


def test_batch_first_and_time_major_encoders_have_the_same_hessian_when_cut() -> None:
    time_major, batch_first = TimeMajor().double().eval(), TimeMajor(batch_first=True).double()
    batch_first.load_state_dict(time_major.state_dict())
    x, y = rand(5, 6, 4), classes(5, 6)
    first = ca.Hessian(ca.Problem(time_major, "cross_entropy", (x, y)), budget="60KB")
    second = ca.Hessian(
        ca.Problem(batch_first.eval(), "cross_entropy", (x.transpose(0, 1), y.T)), budget="60KB"
    )
    vector = rand(first.shape[1])
    assert oracles.relative_error(first @ vector, second @ vector) < 1e-12


@pytest.mark.parametrize("name", ["shared mask, L = B", "three tensors, the first one shared"])
def test_shared_tensors_are_not_cut(name: str) -> None:
    make, inputs, targets, *_ = LAYOUTS[name]
    problem = ca.Problem(make().double().eval(), "cross_entropy", [(inputs, targets)])
    want = ca.Hessian(problem).dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut = ca.Hessian(problem, budget="4KB")
        got = cut.dense()
    assert cut._full is not None
    assert cut._full._most_samples == 1
    assert oracles.relative_error(got, want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("gate", "power"), [(1.0, 1), (0.0, 1), (0.0, 2), (1e-3, 1)])
def test_samples_that_meet_are_never_cut(gate: float, power: int, dtype: torch.dtype) -> None:
    model = Centred(gate, power).to(dtype)
    data = (rand(40, 4).to(dtype), classes(40))
    problem = ca.Problem(model, "cross_entropy", data)
    assert not problem.separable
    assert next(problem.batches()).samples == 1
    want = ca.Hessian(problem).dense()
    with pytest.warns(UserWarning, match=r"cannot be told apart.*batch_axis"):
        got = ca.Hessian(ca.Problem(model, "cross_entropy", data), budget="20KB").dense()
    assert oracles.relative_error(got, want) < 100 * torch.finfo(dtype).eps
    loss = F.cross_entropy(model(data[0]), data[1])
    exact = oracles.hessian(loss, list(model.parameters()))
    assert oracles.relative_error(got, exact) < 1000 * torch.finfo(dtype).eps


class Opposed(nn.Module):
    """Every sample sees the others: x_i + c Σ_j≠i x_j; with x and −x their sum is the same as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.7]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x - 1.4899799 * (x.sum(0) - x)) @ self.weight


def test_two_samples_that_cancel_do_not_fool_the_exact_trace() -> None:
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    problem = ca.Problem(Opposed(), "mse", (x, torch.zeros(2, 1, dtype=torch.float64)))
    operator = ca.GaussNewton(problem)
    assert float(ca.trace(operator).value) == pytest.approx(float(operator.dense().trace()))
    assert float(operator.dense().trace()) == pytest.approx(12.4, rel=1e-6)
    assert exact_outer_diagonal(problem) is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_exact_diagonal_of_the_outer_part_follows_the_axis(name: str) -> None:
    make, inputs, targets, *_ = LAYOUTS[name]
    problem = ca.Problem(make().double().eval(), "cross_entropy", [(inputs, targets)])
    operator = ca.GaussNewton(problem)
    want = operator.dense().diagonal()
    found = exact_outer_diagonal(problem)
    assert found is not None
    assert oracles.relative_error(found[0], want) < 1e-12
    if name == "recurrent":
        return  # cannot be mapped over samples: the trace is estimated
    trace = ca.trace(operator)
    assert abs(float(trace.value) - float(want.sum())) < 1e-10 * float(want.sum())
    assert trace.interval[1] - trace.interval[0] < 1e-9 * float(want.sum())  # exact


@pytest.mark.parametrize("name", ["usual", "time-major, L = B", "shared mask, L = B", "mapping"])
def test_per_sample_quantities_follow_the_axis(name: str) -> None:
    make, inputs, targets, *_ = LAYOUTS[name]
    problem = ca.Problem(make().double().eval(), "cross_entropy", [(inputs, targets)])
    batch = next(problem.batches())
    singles = [problem.with_batches([p]) for p in batch.singles(problem.loss.count)]
    gradients = torch.stack([single.gradient() for single in singles])
    assert oracles.relative_error(sample_gradients(problem, 99), gradients) < 1e-11
    directions = rand(problem.size, 2)
    quantities = sample_quantities(problem, directions)
    slopes = gradients @ directions
    assert oracles.relative_error(quantities.slopes, slopes) < 1e-11
    curvatures = torch.stack([directions.T @ (ca.Hessian(s) @ directions) for s in singles])
    assert oracles.relative_error(quantities.curvatures, curvatures) < 1e-10
    few = subset(problem, torch.tensor([2, 0]))
    want = (gradients[0] + gradients[2]) / 2
    assert oracles.relative_error(few.gradient(), want) < 1e-11
    assert sampled_gradients(problem, samples=99).shape == (batch.samples, problem.size)


def test_per_sample_gradients_of_samples_that_meet_are_refused() -> None:
    problem = ca.Problem(Centred().double(), "cross_entropy", (rand(6, 4), classes(6)))
    with pytest.raises(ProblemError, match=r"single samples.*influence each other"):
        sampled_gradients(problem, samples=4)


def test_the_axis_can_be_told() -> None:
    model = TimeMajor().double().eval()
    data = (rand(4, 4, 4), classes(4, 4))
    problem = ca.Problem(model, "cross_entropy", data, batch_axis=1)
    assert problem.separable
    layout = next(problem.with_data(data).batches()).layout
    assert layout is not None
    assert layout.leaves == (1, 1)
    wrong = ca.Problem(model, "cross_entropy", data, batch_axis=0)
    with pytest.raises(ProblemError, match=r"batch_axis=0.*influence each other"):
        ca.Hessian(wrong) @ torch.zeros(wrong.size, dtype=torch.float64)


def test_evaluating_without_a_cut_runs_no_probe() -> None:
    calls: list[int] = []
    model = mlp().double()
    model.register_forward_hook(lambda _m, inputs, _o: calls.append(len(inputs[0])))
    problem = ca.Problem(model, "cross_entropy", (rand(6, 4), classes(6)))
    problem.value()
    problem.gradient()
    assert set(calls) == {6}
    calls.clear()
    ca.Hessian(problem) @ rand(problem.size)
    first = len(calls)
    ca.GaussNewton(problem) @ rand(problem.size)
    assert len(calls) - first <= first - 6  # the probe ran once


def test_the_probe_takes_few_samples_at_a_time_under_a_small_budget() -> None:
    calls: list[int] = []
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    model.register_forward_hook(lambda _m, inputs, _o: calls.append(len(inputs[0])))
    problem = ca.Problem(model, "cross_entropy", (rand(200, 4), classes(200)))
    problem.sample_axes.room = 20_000
    assert problem.separable
    assert 2 <= max(calls) < 20


@pytest.mark.parametrize("room", [1, 3_000, 10_000, 10**9])
def test_the_axes_are_found_with_little_room(room: int) -> None:
    for name in ("time-major, L = B", "shared mask, L = B", "targets elsewhere"):
        make, inputs, targets, axes, _ = LAYOUTS[name]
        problem = ca.Problem(make().double().eval(), "cross_entropy", [(inputs, targets)])
        problem.sample_axes.room = room
        layout = next(problem.batches()).layout
        assert layout is not None, name
        assert layout.leaves == axes, name


def test_weights_that_overflow_when_moved_are_tried_as_they_are() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            bad = torch.where(self.scale == 0, 0.0, float("inf"))
            return self.head(x) * (1 + self.scale) + bad.detach()

    problem = ca.Problem(Fragile().double(), "cross_entropy", (rand(5, 4), classes(5)))
    assert problem.separable


def test_later_batches_of_other_shapes_are_cut_alike() -> None:
    model = Masked().double()
    batches = [
        ((rand(4, 4, 4), torch.zeros(4, 4).bool()), classes(4, 4)),  # masks nothing, L = B
        ((rand(3, 3, 4), causal(3)), classes(3, 3)),
        ((rand(5, 3, 4), causal(3)), classes(5, 3)),
        ((rand(1, 2, 4), causal(2)), classes(1, 2)),
    ]
    problem = ca.Problem(model, "cross_entropy", batches)
    want = ca.Hessian(problem).dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ca.Hessian(problem, budget="3KB").dense()
    assert oracles.relative_error(got, want) < 1e-12


class PickedMask(Masked):
    """A mask for each sample whose row is picked by number, as some libraries do."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask[: len(x), None, :])


def test_a_mask_that_masks_nothing_in_the_first_batch_is_still_cut_in_the_next() -> None:
    model = PickedMask().double()
    nothing = torch.zeros(4, 5).bool()
    padded = nothing.clone()
    padded[2, 3:], padded[3, 1:] = True, True
    batches = [((rand(4, 5, 4, seed=i), nothing), classes(4, 5)) for i in range(2)]
    batches.append(((rand(4, 5, 4, seed=2), padded), classes(4, 5)))
    problem = ca.Problem(model, "cross_entropy", batches)
    want = ca.Hessian(ca.Problem(model, "cross_entropy", batches)).dense()
    first, second, third = (batch.layout for batch in problem.batches())
    assert first is second is not third
    assert first is not None
    assert first.uncertain == (1,)
    assert third is not None
    assert (third.leaves, third.uncertain) == ((0, 0, 0), ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ca.Hessian(problem, budget="3KB").dense()
    assert oracles.relative_error(got, want) < 1e-12


def test_a_first_batch_of_one_sample_does_not_decide() -> None:
    model = TimeMajor(batch_first=True).double().eval()
    batches = [(rand(1, 5, 4), classes(1, 5)), (rand(6, 5, 4), classes(6, 5))]
    problem = ca.Problem(model, "cross_entropy", batches)
    assert problem.separable
    assert [batch.samples for batch in problem.batches()] == [1, 6]


@pytest.mark.parametrize("name", ["time-major, L = B", "shared mask, L = B"])
def test_processes_share_samples_where_they_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs, targets, *_ = LAYOUTS[name]
    problem = ca.Problem(make().double().eval(), "cross_entropy", [(inputs, targets)])
    monkeypatch.setattr("curvatlas.problem.problem.parallel.world_size", lambda: 3)
    shares: list[Batch] = []
    for rank in range(3):
        monkeypatch.setattr("curvatlas.problem.problem.parallel.rank", lambda r=rank: r)
        stream = BatchStream(
            problem.data, problem._objective, problem.device, True, problem.sample_axes
        )
        shares += list(stream)
    assert sum(share.samples for share in shares) == next(problem.batches()).samples
    total = sum(share.count * problem.with_batches([share]).gradient() for share in shares)
    whole = problem.gradient() * problem.total_count
    assert oracles.relative_error(total, whole) < 1e-12


def test_processes_take_whole_batches_whose_samples_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(rand(4, 4, seed=i), classes(4, seed=i)) for i in range(3)]
    problem = ca.Problem(Centred().double(), "cross_entropy", batches)
    monkeypatch.setattr("curvatlas.problem.problem.parallel.world_size", lambda: 2)
    indices = []
    for rank in range(2):
        monkeypatch.setattr("curvatlas.problem.problem.parallel.rank", lambda r=rank: r)
        stream = BatchStream(
            problem.data, problem._objective, problem.device, True, problem.sample_axes
        )
        indices.append([batch.index for batch in stream])
        assert all(len(batch.targets) == 4 for batch in stream)
    assert indices == [[0, 2], [1]]
