"""Role × role views against the same block of the whole matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import curvatlas as ca
import families
import oracles


@pytest.mark.parametrize("name", ["zoo gpt pre-norm", "torch encoder post-norm", "hf gpt2"])
@pytest.mark.parametrize("kind", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian])
def test_a_view_equals_the_block_of_the_whole_product(name: str, kind: type) -> None:
    model, batch, loss = families.make(name)
    problem = ca.Problem(model, loss, batch)
    rows = problem.anatomy.select("blocks.0.query")
    cols = problem.anatomy.select("blocks.1.value")
    full = kind(problem)
    view = kind(problem)["blocks.0.query", "blocks.1.value"]
    row_places = torch.cat([s.indices for s in rows])
    col_places = torch.cat([s.indices for s in cols])
    assert view.shape == (len(row_places), len(col_places))
    columns = torch.randn(len(col_places), 3, dtype=torch.float64)
    padded = torch.zeros(problem.size, 3, dtype=torch.float64)
    padded[col_places] = columns
    want = (full @ padded)[row_places]
    # Cross blocks can be far smaller than the rounding of the whole: compare with its scale.
    scale = float(torch.linalg.norm(full @ padded))
    assert float(torch.linalg.norm(view @ columns - want)) < 1e-12 * scale
    transposed = view.T @ torch.randn(len(row_places), 2, dtype=torch.float64)
    assert transposed.shape == (len(col_places), 2)
    u, w = torch.randn(len(row_places)).double(), torch.randn(len(col_places)).double()
    assert float(u @ (view @ w)) == pytest.approx(float((view.T @ u) @ w), rel=1e-9, abs=1e-12)
    # The same view on an operator that is already linearised as a whole.
    shared = full["blocks.0.query", "blocks.1.value"] @ columns
    assert float(torch.linalg.norm(shared - want)) < 1e-12 * scale


def test_views_tile_the_whole_matrix() -> None:
    torch.manual_seed(0)
    from curvatlas.zoo.models import ViT, ViTConfig

    model = ViT(ViTConfig(d_model=4, n_heads=1, n_layers=1, d_ff=6, classes=3)).double()
    data = (torch.randn(5, 8, 8, dtype=torch.float64), torch.randint(0, 3, (5,)))
    problem = ca.Problem(model, "cross_entropy", data)
    operator = ca.Hessian(problem)
    whole = operator.dense()
    slices = list(problem.anatomy.slices)
    tiled = torch.zeros_like(whole)
    for row in slices:
        for col in slices:
            tiled[row.indices[:, None], col.indices] = operator[row, col].dense()
    assert oracles.relative_error(tiled, whole) < 1e-12
    assert oracles.relative_error(whole, whole.T) < 1e-13


def test_lists_globs_and_colons_select() -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    problem = ca.Problem(model, loss, batch)
    operator = ca.Hessian(problem)
    values = problem.anatomy.select("blocks.*.value")
    assert operator["blocks.*.value"].shape[0] == sum(s.size for s in values)
    assert operator[:, "blocks.*.value"].shape == (problem.size, sum(s.size for s in values))
    both = operator[["blocks.0.value", "blocks.1.value"], :]
    assert both.shape[1] == problem.size
    assert operator["blocks.0.query"].tags.symmetric
    assert not operator["blocks.0.query", "blocks.0.key"].tags.symmetric


def test_an_unknown_role_is_refused_with_near_matches() -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    operator = ca.Hessian(ca.Problem(model, loss, batch))
    with pytest.raises(KeyError, match=r"blocks\.0\.quer"):
        operator["blocks.0.querry"]


@pytest.mark.parametrize("engine", ["tangent", "autograd"])
def test_a_view_of_the_last_layer_does_not_follow_the_layers_below(engine: Any) -> None:
    """The cost claim, by what is built: nothing is kept of what lies below the last layer."""
    model, batch, loss = families.make("zoo gpt pre-norm")
    problem = ca.Problem(model, loss, batch)
    whole = ca.Hessian(problem, engine=engine)
    whole @ torch.randn(problem.size, dtype=torch.float64)
    part = ca.Hessian(problem, engine=engine)
    view = part["blocks.1.down"]
    view @ torch.randn(view.shape[1], dtype=torch.float64)
    small = next(iter(part._partial))[1].held_bytes
    share = 0.5 if engine == "autograd" else 0.6  # one of two blocks, and the tail
    assert small < share * next(iter(whole._full))[1].held_bytes
    torch.testing.assert_close(
        view.dense(), ca.Hessian(problem, engine="autograd")["blocks.1.down"].dense()
    )


def test_a_model_whose_graph_saves_nothing_still_has_products() -> None:
    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    problem = ca.Problem(Shift(), "mse", (x, y))
    want = torch.eye(3, dtype=torch.float64) * 2 / 3
    assert oracles.relative_error(ca.Hessian(problem).dense(), want) < 1e-14
    assert oracles.relative_error(ca.GaussNewton(problem).dense(), want) < 1e-14


# --- by index -------------------------------------------------------------------------------------


def _small() -> tuple[ca.Problem, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)
    ).double()
    batch = (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64))
    problem = ca.Problem(model, "mse", batch)
    leaves = list(model.parameters())
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    slopes = torch.autograd.grad(loss, leaves, create_graph=True)
    flat = torch.cat([s.reshape(-1) for s in slopes])
    rows = [torch.autograd.grad(entry, leaves, retain_graph=True) for entry in flat]
    return problem, torch.stack([torch.cat([r.reshape(-1) for r in row]) for row in rows])


_MASK = [True, False, True] * 7 + [False, True]  # of 23

INDEX_PAIRS = {
    "lists": ([0, 2], [1, 3]),
    "across parameters, in any order": ([22, 3, 13, 4, 0], [14, 1]),
    "the whole, backwards": (range(22, -1, -1), range(23)),
    "a permutation of one parameter": (range(11, -1, -1), [12, 13, 14]),
    "an entry twice": ([5, 5, 1], [2, 20, 2]),
    "negative": ([-1, -23], -2),
    "numbers": (3, 4),
    "slices": (slice(2, 19, 3), slice(None, 7)),
    "tensors and arrays": (torch.tensor([3, 1]), np.array([7, 9, 11])),
    "masks": (torch.tensor(_MASK), _MASK),
    "everything": (slice(None), [20]),
}


@pytest.mark.parametrize(("rows", "columns"), INDEX_PAIRS.values(), ids=INDEX_PAIRS.keys())
def test_rows_and_columns_by_index_are_those_of_the_matrix(rows, columns) -> None:
    problem, matrix = _small()

    def places(selector) -> torch.Tensor:
        chosen = list(selector) if isinstance(selector, range) else selector
        return torch.arange(23)[chosen].reshape(-1)

    want = matrix[places(rows)][:, places(columns)]
    for op in (ca.Hessian(problem), ca.Hessian(problem) + 0 * ca.Hessian(problem)):
        view = op[rows, columns]
        assert view.shape == tuple(want.shape)
        assert float((view.dense() - want).abs().max()) < 1e-14
        assert float((view.T.dense() - want.T).abs().max()) < 1e-14
    assert not ca.Hessian(problem)[[0, 2], [1, 3]].tags.symmetric


def test_an_index_alone_is_a_block_on_the_diagonal() -> None:
    problem, matrix = _small()
    view = ca.Hessian(problem)[[7, 2, 21]]
    assert view.tags.symmetric
    assert oracles.relative_error(view.dense(), matrix[[7, 2, 21]][:, [7, 2, 21]]) < 1e-13
    assert ca.trace(view).value == pytest.approx(float(matrix.diagonal()[[7, 2, 21]].sum()))
    values = ca.diagonal(ca.GaussNewton(problem)[[21, 2]]).value
    whole = ca.GaussNewton(problem).dense().diagonal()
    assert oracles.relative_error(values, whole[[21, 2]]) < 1e-12


def test_names_and_indices_mix_and_views_are_indexed_again() -> None:
    problem, matrix = _small()
    op = ca.Hessian(problem)
    mixed = op["2.weight", [0, 1]]
    assert float((mixed.dense() - matrix[15:21, :2]).abs().max()) < 1e-14
    again = mixed[[4, 0], [1]]
    assert float((again.dense() - matrix[[19, 15]][:, [1]]).abs().max()) < 1e-14
    damped = (op + 2 * ca.IdentityOperator.like(op))["2.weight"]
    want = matrix[15:21, 15:21] + 2 * torch.eye(6, dtype=torch.float64)
    assert oracles.relative_error(damped.dense(), want) < 1e-13


def test_an_index_follows_only_the_parameters_that_it_meets() -> None:
    problem, _ = _small()
    op = ca.Hessian(problem)
    view = op[[16], [22, 17]]
    view @ torch.ones(2, dtype=torch.float64)
    assert op._full is None
    assert op._partial is not None
    assert list(op._partial.names) == ["2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([0.0, 1.0], TypeError, "whole numbers"),
        ([0, 23], IndexError, "index 23 is outside of 23"),
        ([-24], IndexError, "index -24"),
        ([True, False], IndexError, "one entry for each of 23"),
        (slice(5, 5), IndexError, "selects nothing"),
        ([], KeyError, "selects no rows"),
        (torch.zeros(2, 2, dtype=torch.int64), IndexError, "one axis"),
        ([0, "2.weight"], TypeError, "whole numbers"),
        (slice(None, None, -1), IndexError, "forward"),
    ],
)
def test_indices_that_pick_nothing_or_the_unknown_are_refused(rows, error, words) -> None:
    problem, _ = _small()
    with pytest.raises(error, match=words):
        ca.Hessian(problem)[rows, :]
