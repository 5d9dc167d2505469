"""Products on the tape against double backward of the whole model."""

from __future__ import annotations

import pytest
import torch

import curvatlas as ca
from curvatlas import zoo
from curvatlas.tape.record import record
from curvatlas.tape.run import Tape


@pytest.fixture(scope="module")
def problem() -> ca.Problem:
    torch.manual_seed(0)
    return ca.Problem(zoo.reference_vit().double(), "cross_entropy", zoo.digits().train.take(6))


@pytest.fixture(scope="module")
def tape(problem: ca.Problem) -> Tape:
    batch = next(problem.batches())
    named = dict(problem.model.named_parameters())
    with problem.evaluating():
        return Tape(
            record(
                problem.model,
                {name: named[name] for name in problem.layout.names},
                lambda: problem.predictions(batch, {}),
                lambda outputs: problem.loss.value(outputs, batch.targets),
            )
        )


def columns_of(problem: ca.Problem, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(problem.size, count, dtype=torch.float64, generator=generator)
    return flat, dict(zip(problem.layout.names, problem.layout.split(flat), strict=True))


def flat_of(problem: ca.Problem, rows: list[torch.Tensor | None], count: int) -> torch.Tensor:
    sizes = problem.layout.sizes
    parts = [
        torch.zeros(count, size, dtype=torch.float64) if row is None else row.reshape(count, size)
        for row, size in zip(rows, sizes, strict=True)
    ]
    return torch.cat(parts, 1).T


@pytest.mark.parametrize(
    ("part", "operator"),
    [("hessian", ca.Hessian), ("outer", ca.GaussNewton), ("functional", ca.FunctionalHessian)],
)
def test_products_equal_double_backward(
    problem: ca.Problem, tape: Tape, part: str, operator: type
) -> None:
    flat, columns = columns_of(problem, 3)
    rows = getattr(tape, part)(columns, problem.layout.names)
    exact = operator(problem, engine="autograd") @ flat
    assert (flat_of(problem, rows, 3) - exact).norm() <= 1e-13 * exact.norm()


def test_quadratic_forms_need_no_backward_pass(problem: ca.Problem, tape: Tape) -> None:
    flat, columns = columns_of(problem, 3)
    product = flat_of(problem, tape.hessian(columns, problem.layout.names), 3)
    torch.testing.assert_close(tape.quadratic(columns), (flat * product).sum(0))


@pytest.mark.parametrize("operator", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian])
@pytest.mark.parametrize("engine", ["tape", "autograd"])
def test_quadratic_forms_of_an_operator_are_those_of_its_products(
    problem: ca.Problem, operator: type, engine: str
) -> None:
    uneven = problem.with_data(
        [(x[:n], y[:n]) for x, y in [zoo.digits().train.take(6)] for n in (6, 2)]
    )
    curvature = operator(uneven, engine=engine)
    flat, _ = columns_of(problem, 3)
    expected = (flat * (operator(uneven, engine="autograd") @ flat)).sum(0)
    torch.testing.assert_close(curvature.quadratic(flat), expected)
    torch.testing.assert_close(curvature.quadratic(flat[:, 0]), expected[0])


def test_both_parts_add_up_to_the_hessian(problem: ca.Problem, tape: Tape) -> None:
    _, columns = columns_of(problem, 2)
    outer, functional = tape.parts(columns, problem.layout.names)
    total = flat_of(problem, tape.hessian(columns, problem.layout.names), 2)
    both = flat_of(problem, outer, 2) + flat_of(problem, functional, 2)
    torch.testing.assert_close(both, total)


def test_the_gradient_is_the_problems(problem: ca.Problem, tape: Tape) -> None:
    own = torch.cat([tape.gradient[name].flatten() for name in problem.layout.names])
    torch.testing.assert_close(own, problem.gradient())
