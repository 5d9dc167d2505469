"""Entries of H by blocks: of any model, of all rows or of some drawn from every block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvatlas as ca
import oracles
from curvatlas import zoo
from curvatlas.figures import draw
from curvatlas.figures.maps import cells, draw_entry_histograms


@pytest.fixture(scope="module")
def problem() -> ca.Problem:
    model = zoo.petrov_vit("mnist", image_size=4, patch_size=2, d_model=4, d_ff=6, classes=3)
    batch = torch.randn(5, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    return ca.Problem(model.double(), "cross_entropy", batch)


def plain_hessian(problem: ca.Problem) -> torch.Tensor:
    return ca.Hessian(problem, engine="autograd").dense()


def test_entries_are_the_dense_matrix_in_the_order_of_the_roles(problem: ca.Problem) -> None:
    found = ca.entries(problem)
    order = torch.cat([piece.indices for piece in problem.anatomy.slices])
    truth = plain_hessian(problem)[order][:, order]
    assert oracles.relative_error(found.matrix, truth) < 1e-12
    query = problem.anatomy.select("query").indices
    key = problem.anatomy.select("key").indices
    block = found.block("blocks.0.query", "blocks.0.key")
    assert oracles.relative_error(block, plain_hessian(problem)[query][:, key]) < 1e-12


def test_outer_and_functional_entries_add_up_to_those_of_the_hessian(problem: ca.Problem) -> None:
    outer, functional = (ca.entries(problem, part=p).matrix for p in ("outer", "functional"))
    total = ca.entries(problem).matrix
    assert oracles.relative_error(outer + functional, total) < 1e-12
    assert min(float(outer.norm()), float(functional.norm())) > 0.01 * float(total.norm())


def test_chosen_blocks_are_the_same_entries_as_in_the_whole(problem: ca.Problem) -> None:
    names = ["blocks.0.value", "head.weight"]
    some = ca.entries(problem, blocks=["head.weight", "value"])
    assert list(some.names) == names  # in the model's order
    assert torch.allclose(some.matrix, ca.entries(problem).only(*names).matrix, atol=1e-14)


def test_rows_drawn_at_random_are_rows_of_the_whole(problem: ca.Problem) -> None:
    whole, some = ca.entries(problem), ca.entries(problem, most=40, seed=3)
    assert sum(some.sizes) <= 40
    assert all(0 < few <= all_ for few, all_ in zip(some.sizes, some.whole, strict=True))
    for name in some.names:
        seen = {round(float(v), 12) for v in whole.block(name).flatten()}
        assert {round(float(v), 12) for v in some.block(name).flatten()} <= seen
    assert "drawn at random" in str(some)
    levels = [
        ca.entries(problem, blocks=["up"], most=8, seed=seed).level("blocks.0.up", eps=1e-6)
        for seed in range(40)
    ]
    truth = whole.level("blocks.0.up", eps=1e-6)
    assert abs(np.mean(levels) - truth) < 4 * np.std(levels) / 40**0.5 + 0.05


def test_a_histogram_counts_every_entry_that_is_not_zero(problem: ca.Problem) -> None:
    found = ca.entries(problem)
    edges, counts = found.histogram("blocks.0.value", bins=20)
    block = found.block("blocks.0.value").abs()
    assert counts.sum() == (block > 0).sum()
    assert edges[-1] == pytest.approx(float(block.max()))
    assert edges[0] == pytest.approx(max(1e-8, float(block[block > 0].min())))
    middle = int((block < edges[10]).sum())
    assert counts[:10].sum() == middle
    assert draw_entry_histograms({"": found}, ["blocks.0.value", "blocks.0.query"]).axes


def test_stages_share_one_colour_scale_and_the_blur_is_a_mean_of_logarithms(
    problem: ca.Problem,
) -> None:
    found = ca.entries(problem)
    larger = ca.Entries(**{**dict(found), "matrix": 100 * found.matrix})
    figure = draw({"start": found, "end": larger}, eps=1e-6, blur=True)
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert len({image.get_clim() for image in images}) == 1
    logs = (found.matrix.abs() + 1e-6).log()
    by_hand = logs[3:8, 2:7].mean().exp()  # around entry (5, 4)
    assert float(images[0].get_array()[5, 4]) == pytest.approx(float(by_hand))
    corner = logs[:3, :3].mean().exp()
    assert float(images[0].get_array()[0, 0]) == pytest.approx(float(corner))


def test_wrong_parts_and_names_are_refused_in_one_line(problem: ca.Problem) -> None:
    with pytest.raises(ValueError, match="parts are total, outer, functional"):
        ca.entries(problem, part="inner")
    with pytest.raises(KeyError, match="no block 'value' here"):
        ca.entries(problem).level("value")


def test_a_matrix_of_more_rows_than_dots_is_drawn_by_means_of_logarithms() -> None:
    matrix = torch.logspace(-3, 0, 2000, dtype=torch.float64).expand(2000, 2000)
    shown, step = cells(matrix)
    assert step == 3
    assert shown.shape == (667, 667)
    assert float(shown[0, 1]) == pytest.approx(float(matrix[0, 4]))  # the middle of three
