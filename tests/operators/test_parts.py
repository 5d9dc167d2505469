"""H, H_o and H_f of the same columns from one product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import curvatlas as ca
import families
import oracles
from curvatlas.operators.curvature import PARTS, CurvatureParts, check_parts

NAMES = ["zoo gpt pre-norm", "zoo vit post-norm", "torch multihead", "hf gpt2"]


@pytest.mark.parametrize("name", NAMES)
def test_one_product_gives_the_three_operators(name: str) -> None:
    model, batch, loss = families.make(name)
    problem = ca.Problem(model, loss, batch)
    columns = torch.randn(problem.size, 2, dtype=torch.float64)
    got = CurvatureParts(problem).flat_parts(columns)
    scale = float(torch.linalg.norm(ca.Hessian(problem) @ columns))
    for part, operator in zip(
        PARTS, (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian), strict=True
    ):
        want = operator(problem) @ columns
        error = float(torch.linalg.norm(got[part] - want))
        assert error < 1e-11 * max(scale, float(torch.linalg.norm(want))), part


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_both_ways_back_of_one_way_forward_leave_each_other_alone(
    head: bool, norm_first: bool
) -> None:
    """Without a last norm the last block's tangent is the head's input, or the output itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    layers = [copy.deepcopy(layer), layer]
    ends = [nn.Linear(8, 5, dtype=torch.float64)] if head else []
    model = nn.Sequential(*layers, *ends)
    inputs = torch.randn(3, 4, 8, dtype=torch.float64)
    problem = ca.Problem(model, "mse", (inputs, torch.randn(3, 4, 5 if head else 8).double()))
    columns = torch.randn(problem.size, 2, dtype=torch.float64)
    operator = CurvatureParts(problem, engine="tangent")
    operator.flat_parts(columns.flip(1))  # the second product works in the memory of the first
    got = operator.flat_parts(columns)
    for part, kind in (("outer", ca.GaussNewton), ("functional", ca.FunctionalHessian)):
        want = kind(problem, engine="autograd") @ columns
        assert oracles.relative_error(got[part], want) < 1e-11, part


def test_a_column_that_lives_in_one_parameter_equals_the_padded_one() -> None:
    model, batch, loss = families.make(NAMES[0])
    problem = ca.Problem(model, loss, batch)
    layout = problem.layout
    place = 2
    name, shape = layout.names[place], layout.shapes[place]
    column = torch.randn(3, *shape, dtype=torch.float64)
    padded = torch.zeros(problem.size, 3, dtype=torch.float64)
    start = layout.starts[place]
    padded[start : start + layout.sizes[place]] = column.reshape(3, -1).T
    operator = CurvatureParts(problem)
    alone = operator.parts({name: column}, layout.names)
    for part, want in operator.flat_parts(padded).items():
        assert oracles.relative_error(alone[part].T, want) < 1e-12
    assert operator.products == 6


def test_uneven_batches_equal_the_concatenated_batch() -> None:
    model, (inputs, targets), loss = families.make(NAMES[0])
    whole = CurvatureParts(ca.Problem(model, loss, (inputs, targets)))
    cut = CurvatureParts(
        ca.Problem(model, loss, [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])])
    )
    vector = torch.randn(whole.shape[0], 1, dtype=torch.float64)
    for part, want in whole.flat_parts(vector).items():
        assert oracles.relative_error(cut.flat_parts(vector)[part], want) < 1e-12


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="parts are 'total', 'outer', 'functional'"):
        check_parts("gauss")
