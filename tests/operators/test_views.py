"""Role × role views against the same block of the whole matrix."""

from __future__ import annotations

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
    from curvatlas.zoo.vit import ViT, ViTConfig

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


def test_a_view_of_the_last_layer_does_not_follow_the_layers_below() -> None:
    """The cost claim, by what is built: no graph reaches below the last layer."""
    model, batch, loss = families.make("zoo gpt pre-norm")
    problem = ca.Problem(model, loss, batch)
    whole = ca.Hessian(problem)
    whole @ torch.randn(problem.size, dtype=torch.float64)
    part = ca.Hessian(problem)
    view = part["blocks.1.down"]
    view @ torch.randn(view.shape[1], dtype=torch.float64)
    small = next(iter(part._partial))[1].size.bytes
    assert small < 0.5 * next(iter(whole._full))[1].size.bytes


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
