"""The cases of curvlinops' suite on KFAC and EKFAC, in our words."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from peers.cases import GROUPS
from peers.matrices import drawn, error
from peers.table import Table
from peers.test_curvlinops import LOSSES, ReadsDict, Setup, setup

table = Table("curvlinops", GROUPS)


def _operator(name: str, problem: ca.Problem, **options: Any) -> Any:
    return getattr(ca, name)(problem, **options)


def _by_layer(problem: ca.Problem, matrix: Tensor) -> Tensor:
    """The blocks on the diagonal that belong to one layer each, weight and bias together."""
    kept = torch.zeros_like(matrix)
    owners: dict[str, list[Tensor]] = {}
    layout = problem.layout
    for name, start, size in zip(layout.names, layout.starts, layout.sizes, strict=True):
        owners.setdefault(name.rpartition(".")[0], []).append(torch.arange(start, start + size))
    for places in map(torch.cat, owners.values()):
        kept[places[:, None], places] = matrix[places[:, None], places]
    return kept


def _chosen(model: nn.Module, which: str) -> list[str]:
    left_out = {"all": "none", "no weights": "weight", "no biases": "bias"}[which]
    return [name for name, _ in model.named_parameters() if not name.endswith(left_out)]


def _linear(shape: str, reduction: str) -> Setup:
    """A deep linear network with MSE, whose slopes do not depend on the inputs."""
    torch.manual_seed(0)
    outputs = 1 if shape == "one output" else 3
    if shape == "a dict as input":
        model: Any = ReadsDict(3)
        model.net[1] = nn.Identity()
    else:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, outputs))
    batches: list[tuple[Any, Tensor]] = []
    for place, size in enumerate((2, 5)):
        x = drawn(size, 6 if shape == "a dict as input" else 5, seed=place)
        inputs: Any = {"x": x} if shape == "a dict as input" else x
        batches.append((inputs, drawn(size, outputs, seed=9 + place)))
    return Setup(model.double(), nn.MSELoss(reduction=reduction), batches)


class _Pooled(nn.Module):
    """Linear maps over positions, or a convolution; averaged over positions or not."""

    def __init__(self, kind: str, approximation: str) -> None:
        super().__init__()
        self.convolves, self.averages = kind == "convolution", approximation == "reduce"
        layers: list[nn.Module] = [nn.Linear(5, 4), nn.Linear(4, 3)]
        if self.convolves:
            layers = [nn.Conv2d(2, 3, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        if self.convolves:
            y = y.movedim(1, -1)
        return y.mean((1, 2)) if self.averages else y


def _shared(kind: str, approximation: str, reduction: str) -> Setup:
    torch.manual_seed(0)
    model = _Pooled(kind, approximation).double()
    batches: list[tuple[Any, Tensor]] = []
    for place, size in enumerate((2, 3)):
        shape = (size, 2, 3, 4) if kind == "convolution" else (size, 3, 2, 5)
        x = drawn(*shape, seed=place)
        batches.append((x, drawn(*model(x).shape, seed=9 + place)))
    return Setup(model, nn.MSELoss(reduction=reduction), batches)


@table.right("KFAC of deep linear regression is exact")
def test_kfac_of_deep_linear_regression_is_exact(case: str) -> None:
    name, shape, reduction, which = case.split("; ")
    whole = _linear(shape, reduction)
    problem = ca.Problem(
        whole.model, whole.loss, whole.batches, parameters=_chosen(whole.model, which)
    )
    want = _by_layer(problem, ca.GaussNewton(problem).dense())
    assert error(_operator(name, problem).dense(), want) < 1e-12


@table.refused("KFAC of deep linear regression is exact")
def test_weight_and_bias_are_one_matrix(case: str) -> None:
    problem = _linear("three outputs", "mean").problem()
    with pytest.raises(TypeError, match="separate_weight_and_bias"):
        ca.KFAC(problem, separate_weight_and_bias=True)  # type: ignore[call-arg]
    apart = ca.KFAC(problem)["0.bias"].dense()
    assert error(apart, ca.GaussNewton(problem)["0.bias"].dense()) < 1e-12


@table.right("KFAC of shared weights is exact")
def test_kfac_of_shared_weights_is_exact(case: str) -> None:
    name, kind, approximation, reduction, which = case.split("; ")
    whole = _shared(kind, approximation, reduction)
    problem = ca.Problem(
        whole.model, whole.loss, whole.batches, parameters=_chosen(whole.model, which)
    )
    want = _by_layer(problem, ca.GaussNewton(problem).dense())
    got = _operator(name, problem, approximation=approximation).dense()
    assert error(got, want) < 1e-11


class _Halves(nn.Module):
    """One weight on both halves of the input, its biases as told."""

    def __init__(self, first: bool, second: bool, *, one: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=first)
        self.second = self.first if one else nn.Linear(4, 4, bias=second)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.split(4, -1)
        return torch.cat([self.first(left), self.second(right)], -1)


def _tied(model: nn.Module, reduction: str) -> ca.Problem:
    data = (drawn(1, 8), drawn(1, 8, seed=1))
    return ca.Problem(model.double(), nn.MSELoss(reduction=reduction), data)


@table.right("KFAC of tied weights is exact for one sample")
def test_kfac_of_tied_weights_is_exact_for_one_sample(case: str) -> None:
    name, reduction, bias = case.split("; ")
    torch.manual_seed(0)
    problem = _tied(_Halves(bias == "with bias", bias == "with bias", one=True), reduction)
    want = _by_layer(problem, ca.GaussNewton(problem).dense())
    assert error(_operator(name, problem).dense(), want) < 1e-12


@table.right("KFAC of tied weights with a bias in one place")
def test_kfac_of_tied_weights_with_a_bias_in_one_place(case: str) -> None:
    torch.manual_seed(0)
    problem = _tied(_Halves(True, False, one=False), case)
    got, want = ca.KFAC(problem).dense(), ca.GaussNewton(problem).dense()
    assert error(got[:16, :16], want[:16, :16]) < 1e-12
    assert error(got[16:, 16:], want[16:, 16:]) < 1e-12


@table.right("KFAC of tied weights with two biases")
def test_kfac_of_tied_weights_with_two_biases(case: str) -> None:
    torch.manual_seed(0)
    problem = _tied(_Halves(True, True, one=False), case)
    got, want = ca.KFAC(problem).dense(), ca.GaussNewton(problem).dense()
    assert error(got[:16, :16], want[:16, :16]) < 1e-12  # the weight, both uses
    for places in (slice(16, 20), slice(20, 24)):
        assert error(got[places, places], want[places, places]) < 1e-12


@table.right("KFAC of one sample is exact")
def test_kfac_of_one_sample_is_exact(case: str) -> None:
    name, kind, loss, reduction = case.split("; ")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    y = torch.tensor([1]) if loss == "cross-entropy" else torch.rand(1, 2, dtype=torch.float64)
    problem = ca.Problem(model, LOSSES[loss](reduction=reduction), (drawn(1, 4), y))
    options = {"samples": 30, "seed": 3} if kind == "mc" else {}
    fisher = ca.Fisher(problem, kind=kind, **options)  # type: ignore[arg-type]
    want = _by_layer(problem, fisher.dense())
    assert error(_operator(name, problem, kind=kind, **options).dense(), want) < 1e-12


@table.right("sampled KFAC approaches the exact one")
def test_sampled_kfac_approaches_the_exact_one(case: str) -> None:
    name, shape, reduction = case.split("; ")
    problem = _linear(shape, reduction).problem()
    got = _operator(name, problem, kind="mc", samples=200).dense()
    assert error(got, _operator(name, problem).dense()) < 0.2


@table.right("sampled KFAC of shared weights approaches the exact one")
def test_sampled_kfac_of_shared_weights_approaches_the_exact_one(case: str) -> None:
    name, kind, approximation, reduction = case.split("; ")
    problem = _shared(kind, approximation, reduction).problem()
    got = _operator(name, problem, approximation=approximation, kind="mc", samples=60).dense()
    assert error(got, _operator(name, problem, approximation=approximation).dense()) < 0.3


@table.right("KFAC with activations in place")
def test_kfac_with_activations_in_place(case: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    problem = ca.Problem(model, nn.MSELoss(), (drawn(1, 6), drawn(1, 2, seed=1)))
    want = _by_layer(problem, ca.GaussNewton(problem).dense())
    assert error(_operator(case, problem).dense(), want) < 1e-12
    model[1].inplace = False
    assert error(_by_layer(problem, ca.GaussNewton(problem).dense()), want) < 1e-14


class _Flat(nn.Module):
    """A network's outputs with their positions flattened into the samples."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(0, -2)


class _ClassesSecond(_Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(-1, 1)


@table.right("KFAC of outputs with more axes is that of flat ones")
def test_kfac_of_outputs_with_more_axes_is_that_of_flat_ones(case: str) -> None:
    name, kind, loss, reduction = case.split("; ")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    deep, flat = [], []
    for place, size in enumerate((2, 1)):
        x = drawn(size, 2, 3, 5, seed=place)
        if loss == "cross-entropy":
            y = torch.randint(0, 3, (size, 2, 3))
            flat.append((x, y.flatten()))
        else:
            y = torch.rand(size, 2, 3, 3, dtype=torch.float64)
            flat.append((x, y.flatten(0, -2)))
        deep.append((x, y))
    module = LOSSES[loss](reduction=reduction)
    model = _ClassesSecond(net) if loss == "cross-entropy" else net
    options: dict[str, Any] = {"kind": kind}
    if kind == "mc":
        options["samples"] = 40
    got = _operator(name, ca.Problem(model, module, deep), **options).dense()
    want = _operator(name, ca.Problem(_Flat(net), module, flat), **options).dense()
    # the flat problem numbers its targets otherwise, so that others are drawn
    assert error(got, want) < (0.6 if kind == "mc" else 1e-12)


@table.right("KFAC of a sum is that of the mean, scaled")
def test_kfac_of_a_sum_is_that_of_the_mean_scaled(case: str) -> None:
    name, kind, loss = case.split("; ")
    torch.manual_seed(0)
    upsampled = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1, stride=2),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Conv2d(2, 3, 3, padding=1),
    ).double()
    model = upsampled if loss == "cross-entropy" else _Last(upsampled)
    data = []
    for place, size in enumerate((1, 2)):
        x = drawn(size, 2, 4, 4, seed=place)
        y = torch.randint(0, 3, (size, 4, 4))
        if loss != "cross-entropy":
            y = torch.rand(size, 4, 4, 3, dtype=torch.float64)
        data.append((x, y))
    matrices = [
        _operator(name, ca.Problem(model, LOSSES[loss](reduction=r), data), kind=kind).dense()
        for r in ("sum", "mean")
    ]
    entries = 3 * 16 * (1 if loss == "cross-entropy" else 3)  # over which the mean runs
    if kind == "empirical" and loss != "cross-entropy":
        entries *= 3  # a slope of the mean over outputs is smaller by 3, its square by 9
    assert error(matrices[0] / entries, matrices[1]) < 1e-12


class _Last(_Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(1, -1)


@functools.cache
def _with_matrix(kind: str, name: str) -> tuple[Any, Tensor]:
    """KFAC or EKFAC of the problem of that name, and its matrix; no test changes them."""
    op = _operator(kind, setup(name).problem())
    matrix = op.dense()
    return op, (matrix + matrix.T) / 2


def _property(case: str, op: Any, matrix: Tensor) -> None:
    damping = 0.0
    if "determinant" in case:
        damping = 1e-2 * float(matrix.diagonal().mean())  # what is semidefinite has none
        matrix = matrix + damping * torch.eye(len(matrix), dtype=torch.float64)
    if case == "trace":
        assert ca.trace(op).value == pytest.approx(float(matrix.trace()), rel=1e-11)
    elif case == "Frobenius norm":
        assert ca.frobenius_norm(op).value == pytest.approx(float(matrix.norm()), rel=1e-11)
    else:
        got = ca.log_determinant(op, damping=damping).value
        want = float(torch.linalg.slogdet(matrix)[1])
        assert got == pytest.approx(want, rel=1e-9)


@table.right("trace, norm and determinants of KFAC")
def test_trace_norm_and_determinants_of_kfac(case: str) -> None:
    name, what = case.split("; ")
    _property(what, *_with_matrix("KFAC", name))


@table.right("trace, norm and determinants of EKFAC")
def test_trace_norm_and_determinants_of_ekfac(case: str) -> None:
    name, what = case.split("; ")
    _property(what, *_with_matrix("EKFAC", name))


@table.refused("KFAC from the forward pass alone")
def test_kfac_has_slopes(case: str) -> None:
    with pytest.raises(ValueError, match="exact, mc, empirical"):
        ca.KFAC(setup("MSE, mean").problem(), kind="forward-only")  # type: ignore[arg-type]


@table.right("KFAC leaves gradients alone")
def test_kfac_leaves_gradients_alone(case: str) -> None:
    model = nn.Linear(3, 2)
    before = []
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
        before.append(parameter.grad.clone())
    _operator(case, ca.Problem(model, "mse", (torch.rand(4, 3), torch.rand(4, 2))))
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, old)


@table.refused("KFAC saved and loaded")
def test_operators_are_not_pickled(case: str, tmp_path: Path) -> None:
    problem = ca.Problem(nn.Linear(3, 2), "mse", (torch.rand(4, 3), torch.rand(4, 2)))
    with pytest.raises(TypeError, match="not pickled"):
        torch.save(_operator(case, problem), tmp_path / "operator.pt")


@table.right("options of KFAC as strings")
def test_options_of_kfac(case: str) -> None:
    approximation, kind = case.split("; ")
    op = ca.KFAC(setup("MSE, mean").problem(), approximation=approximation, kind=kind)  # type: ignore[arg-type]
    assert bool((torch.linalg.eigvalsh(op.dense()) > -1e-12).all())
    assert float(op.dense().norm()) > 0


@table.right("the damped inverse of KFAC")
def test_the_damped_inverse_of_kfac(case: str) -> None:
    name, problem = case.split("; ")
    op = _operator(name, setup(problem).problem())
    eye = torch.eye(op.shape[0], dtype=torch.float64)
    want = torch.linalg.inv(op.dense() + 1e-2 * eye)
    assert error(op.inverse(1e-2).dense(), want) < 1e-11
    assert error(ca.inverse(op, damping=1e-2).dense(), want) < 1e-11


@table.refused("the damped inverse of KFAC")
def test_other_ways_of_damping_are_not_taken(case: str) -> None:
    op = ca.KFAC(setup("MSE, mean").problem())
    option = "use_exact_damping" if "factor" in case else "use_heuristic_damping"
    with pytest.raises(TypeError, match=option):
        op.inverse(1e-2, **{option: "factor" not in case})


@table.right("KFAC of flattened inputs in batches of different sizes")
def test_kfac_of_flattened_inputs(case: str) -> None:
    torch.manual_seed(0)
    data = [(drawn(n, 2, 3, seed=n), drawn(n, 3, seed=9 + n)) for n in (2, 5)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).double()
    problem = ca.Problem(model, nn.MSELoss(), data)
    assert error(_operator(case, problem).dense(), ca.GaussNewton(problem).dense()) < 1e-12


@table.right("KFAC of a function of parameters")
def test_kfac_of_a_function_of_parameters(case: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    data = (drawn(5, 4), drawn(5, 2, seed=1))

    def function(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (x,))

    named = {name: p.detach() for name, p in model.named_parameters()}
    want = _operator(case, ca.Problem(model, "mse", data)).dense()
    got = _operator(case, ca.Problem(function, "mse", data, parameters=named)).dense()
    assert error(got, want) < 1e-13
    other = {name: 2 * p for name, p in named.items()}
    moved = _operator(case, ca.Problem(function, "mse", data, parameters=other)).dense()
    assert error(moved, want) > 0.1


@table.right("parameters that no layer explains")
def test_parameters_that_no_layer_explains(case: str) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.strange = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.outer(self.strange, self.strange).sum()

    torch.manual_seed(0)
    problem = ca.Problem(Scaled().double(), "mse", (drawn(5, 4), drawn(5, 2, seed=1)))
    with pytest.warns(UserWarning, match="strange"):
        op = ca.KFAC(problem)
    assert float(op["strange"].dense().abs().max()) == 0


@table.right("EKFAC is nearer to the exact blocks than KFAC")
def test_ekfac_is_nearer_to_the_exact_blocks_than_kfac(case: str) -> None:
    name, kind, approximation = case.split("; ")
    if name == "a convolutional network":
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
        problem = ca.Problem(net, nn.CrossEntropyLoss(), (drawn(6, 1, 4, 4), torch.arange(6) % 3))
    else:
        problem = setup(name).problem()
    options: dict[str, Any] = {"kind": kind}
    if kind == "mc":
        options |= {"samples": 5, "seed": 2}
    want = _by_layer(problem, ca.Fisher(problem, **options).dense())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        near, far = (
            error(_operator(o, problem, approximation=approximation, **options).dense(), want)
            for o in ("EKFAC", "KFAC")
        )
    assert near <= far * (1 + 1e-9) + 1e-13
