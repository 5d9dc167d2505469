"""Models that are functions of a parameter dict, one mapping as the argument, NumPy batches."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import oracles
from curvatlas.errors import ProblemError


def _network(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ parameters["layers.0.weight"].T + parameters["layers.0.bias"])
    return hidden @ parameters["head"].T


def _weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.weight": (4, 3), "layers.0.bias": (4,), "head": (2, 4)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def _data(sizes: tuple[int, ...] = (5, 2)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 3, generator=generator, dtype=torch.float64),
            torch.randn(n, 2, generator=generator, dtype=torch.float64),
        )
        for n in sizes
    ]


def _oracle(data: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(H, H_o) of the function above by double backward on the concatenated batch."""
    leaves = {name: p.clone().requires_grad_() for name, p in _weights().items()}
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    outputs = _network(leaves, x)
    params = list(leaves.values())
    hessian = oracles.hessian((outputs - y).pow(2).mean(), params)
    outer = oracles.outer_hessian(outputs, lambda z: (z - y).pow(2).mean(), params)
    return hessian, outer


def test_a_function_of_its_parameters_has_the_curvature_of_double_backward() -> None:
    problem = ca.Problem(_network, "mse", _data(), parameters=_weights())
    assert problem.parameter_names == ("layers.0.weight", "layers.0.bias", "head")
    hessian, outer = _oracle(_data())
    assert oracles.relative_error(ca.Hessian(problem).dense(), hessian) < 1e-13
    assert oracles.relative_error(ca.GaussNewton(problem).dense(), outer) < 1e-13
    block = ca.Hessian(problem)["head", "layers.0"].dense()
    assert oracles.relative_error(block, hessian[16:, :16]) < 1e-13


def test_a_function_follows_its_tensors_when_they_change_in_place() -> None:
    weights = _weights()
    problem = ca.Problem(_network, "mse", _data(), parameters=weights)
    operator = ca.Hessian(problem)
    before = operator.dense()
    weights["head"].mul_(2)
    after = operator.dense()
    assert oracles.relative_error(after, before) > 0.1
    fresh = ca.Hessian(ca.Problem(_network, "mse", _data(), parameters=weights)).dense()
    assert oracles.relative_error(after, fresh) < 1e-14


def test_a_function_keeps_its_parameters_on_other_data() -> None:
    problem = ca.Problem(_network, "mse", _data((9,)), parameters=_weights()).with_data(_data())
    assert oracles.relative_error(ca.Hessian(problem).dense(), _oracle(_data())[0]) < 1e-13


def test_functions_are_refused_where_it_is_unclear_what_varies() -> None:
    data = _data()
    with pytest.raises(ProblemError, match=r"parameters=\{name: tensor\}"):
        ca.Problem(_network, "mse", data)
    with pytest.raises(ProblemError, match="is empty"):
        ca.Problem(_network, "mse", data, parameters={})
    with pytest.raises(ProblemError, match="floating tensor"):
        ca.Problem(_network, "mse", data, parameters={"head": torch.arange(3)})
    twice = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ProblemError, match="'a' and 'b' are one tensor"):
        ca.Problem(_network, "mse", data, parameters={"a": twice, "b": twice})
    with pytest.raises(ProblemError, match="'forward' needs another name"):
        ca.Problem(_network, "mse", data, parameters={"forward": twice})
    with pytest.raises(ProblemError, match=r"must be an nn\.Module"):
        ca.Problem(3, "mse", data)


def test_a_mapping_of_a_modules_own_parameters_chooses_them() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    chosen = {"2.weight": model[2].weight}
    assert ca.Problem(model, "mse", _data(), parameters=chosen).parameter_names == ("2.weight",)
    with pytest.raises(ProblemError, match="not the module's own"):
        ca.Problem(model, "mse", _data(), parameters={"2.weight": torch.zeros(2, 4)})
    with pytest.raises(ProblemError, match=r"no parameter '5\.weight'"):
        ca.Problem(model, "mse", _data(), parameters={"5.weight": model[2].weight})


# --- one mapping as the argument ------------------------------------------------------------------


class _Reads(nn.Module):
    """forward(data) reads data["x"] and data["scale"]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, data: Mapping[str, Tensor]) -> Tensor:
        return torch.tanh(self.linear(data["x"])) * data["scale"]


class _ByName(_Reads):
    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward({"x": x, "scale": scale})


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("wrap", [False, True], ids=["by signature", "as a tuple"])
def test_a_model_of_one_mapping_gets_it_whole(kind: type, wrap: bool) -> None:
    torch.manual_seed(0)
    model = _Reads().double()
    named = _ByName().double()
    named.load_state_dict(model.state_dict())
    batches, plain = [], []
    for x, y in _data((5, 3)):
        inputs = kind({"x": x, "scale": x[:, :1]})
        batches.append(((inputs,) if wrap else inputs, y))
        plain.append(((x, x[:, :1]), y))
    got = ca.Hessian(ca.Problem(model, "mse", batches)).dense()
    want = ca.Hessian(ca.Problem(named, "mse", plain)).dense()
    assert oracles.relative_error(got, want) < 1e-14
    keywords = [({"x": x, "scale": x[:, :1]}, y) for x, y in _data((5, 3))]
    by_name = ca.Hessian(ca.Problem(named, "mse", keywords)).dense()
    assert oracles.relative_error(by_name, want) < 1e-14


def test_a_function_may_take_its_inputs_as_one_mapping() -> None:
    def network(parameters: Mapping[str, Tensor], data: Mapping[str, Tensor]) -> Tensor:
        return _network(parameters, data["x"])

    batches = [({"x": x}, y) for x, y in _data()]
    problem = ca.Problem(network, "mse", batches, parameters=_weights())
    assert oracles.relative_error(ca.Hessian(problem).dense(), _oracle(_data())[0]) < 1e-13


def test_a_missing_argument_is_not_taken_for_one_mapping() -> None:
    model = _ByName().double()
    (x, y), *_ = _data()
    with pytest.raises(ProblemError, match="'x'"):
        ca.Problem(model, "mse", ({"scale": x}, y)).value()


# --- NumPy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy_batches_give_what_tensors_give(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).to(dtype)
    x = np.random.default_rng(0).normal(size=(6, 3))  # float64, as NumPy has it
    labels = np.arange(6, dtype=np.int32) % 5
    tensors = (torch.from_numpy(x).to(dtype), torch.from_numpy(labels).long())
    want = ca.Hessian(ca.Problem(model, "cross_entropy", tensors)).dense()
    pairs = [(x[:4], labels[:4]), (x[4:], labels[4:])]
    for data in [(x, labels), [x, labels], [(x, labels)], pairs, [{"input": x, "labels": labels}]]:
        got = ca.Hessian(ca.Problem(model, "cross_entropy", data)).dense()
        assert oracles.relative_error(got, want) < 50 * torch.finfo(dtype).eps
    x *= 0  # the problem holds a copy
    assert oracles.relative_error(got, want) < 50 * torch.finfo(dtype).eps


def test_arrays_that_are_no_numbers_are_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ProblemError, match="batch 0 holds a NumPy array of <U"):
        ca.Problem(model, "mse", (np.array([["a", "b", "c"]]), np.zeros((1, 2))))
    with pytest.raises(ProblemError, match="single array"):
        ca.Problem(model, "mse", np.zeros((4, 3)))


# --- which parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (re.compile(r"\.weight$"), ["0.weight", "2.weight", "4.weight"]),
        (re.compile(r"^[02]\."), ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ([re.compile("bias"), "4.weight"], ["0.bias", "2.bias", "4.weight", "4.bias"]),
        ("*.bias", ["0.bias", "2.bias", "4.bias"]),
        ("2", ["2.weight", "2.bias"]),
        ("[24].*", ["2.weight", "2.bias", "4.weight", "4.bias"]),
    ],
)
def test_patterns_choose_parameters(wanted, names: list[str]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)]
    model = nn.Sequential(*layers).double()
    problem = ca.Problem(model, "mse", _data(), parameters=wanted)
    assert list(problem.parameter_names) == names
    full = ca.Problem(model, "mse", _data())
    places = torch.cat([piece.indices for n in names for piece in full.anatomy.select(n)])
    want = ca.Hessian(full).dense()[places][:, places]
    assert oracles.relative_error(ca.Hessian(problem).dense(), want) < 1e-13


def test_a_pattern_without_a_match_and_strange_choices_are_refused() -> None:
    model = nn.Linear(3, 2).double()
    with pytest.raises(ProblemError, match="'gamma'"):
        ca.Problem(model, "mse", _data(), parameters=re.compile("gamma"))
    with pytest.raises(ProblemError, match="got a int"):
        ca.Problem(model, "mse", _data(), parameters=[3])
