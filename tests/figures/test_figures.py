"""The article's figures: drawn from true numbers, saved where told, never shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import curvatlas as ca
from curvatlas.figures import draw
from curvatlas.spectra.density_result import exact_density
from result_samples import sample


def test_the_spectrum_shows_every_eigenvalue_and_its_statistics(tmp_path: Path) -> None:
    values = torch.tensor([4.0, 1.0, -0.5, 1e-9])
    figure = ca.visualize_hessian_spectrum(values, path=tmp_path / "s.png")
    _, ranked, text = figure.axes
    drawn = sorted(y for line in ranked.lines for y in line.get_ydata())
    assert drawn == pytest.approx(sorted(values.abs().tolist()))
    said = text.texts[0].get_text()
    assert "largest  4" in said
    assert "gap      3" in said
    assert "negative 25.0%" in said
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_a_spectrum_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no eigenvalues"):
        ca.visualize_hessian_spectrum([])


def _flow(step: int, scale: float) -> Any:
    names = ("embedding", "blocks.0", "blocks.1")
    entries = tuple(
        SimpleNamespace(name=n, norm=scale * (i + 1), gradient_scale=0.1 * (i + 1),
                        interval=(scale * i, scale * (i + 2)))
        for i, n in enumerate(names)
    )  # fmt: skip
    return SimpleNamespace(stream=entries, step=step)


def test_curvature_flow_has_two_maps_lines_and_bars(tmp_path: Path) -> None:
    flows = [_flow(0, 1.0), _flow(10, 2.0)]
    figure = ca.visualize_curvature_flow(flows, path=tmp_path / "flow.svg")
    maps = [axes for axes in figure.axes if axes.images]
    assert len(maps) == 2
    assert np.asarray(maps[0].images[0].get_array()).T.tolist() == [[1, 2, 3], [2, 4, 6]]
    (lines,) = [axes for axes in figure.axes if len(axes.lines) == 3 and not axes.patches]
    assert [line.get_ydata().tolist() for line in lines.lines] == [[1, 2], [2, 4], [3, 6]]
    (bars,) = [axes for axes in figure.axes if len(axes.patches) == 3]
    assert [bar.get_height() for bar in bars.patches] == [2, 4, 6]
    assert (tmp_path / "flow.svg").read_text().startswith("<?xml")


def test_flows_of_different_models_are_refused() -> None:
    other = SimpleNamespace(stream=_flow(0, 1.0).stream[:2], step=1)
    with pytest.raises(ValueError, match="different layers"):
        ca.visualize_curvature_flow([_flow(0, 1.0), other])


def test_scaling_shows_the_fit_of_both_sizes(tmp_path: Path) -> None:
    sizes, data = np.array([100.0, 1000, 10000]), np.array([64.0, 256])
    norms = 2.0 * sizes[:, None] ** 0.3 * data**-0.5
    figure = ca.plot_scaling_law_predictions(sizes, norms, data, path=tmp_path / "scaling.png")
    labels = [text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()]
    assert any("N^0.30" in label for label in labels)
    assert any("D^-0.50" in label for label in labels)
    assert "guide 1/√D" in labels


def test_the_cells_of_a_scaling_grid_stand_for_the_three_lists() -> None:
    grid = sample("ScalingGrid")
    left, _ = ca.plot_scaling_law_predictions(grid, quantity="trace").axes
    drawn = sorted(y for line in left.lines for y in line.get_ydata() if line.get_marker() == "o")
    assert drawn == pytest.approx(sorted(cell.trace for cell in grid.trained))


def test_a_density_draws_as_many_eigenvalues_as_there_are() -> None:
    values = torch.cat([torch.zeros(90), torch.linspace(1, 10, 10)]).double()
    density = exact_density(values, 0, psd=False)
    (axes,) = draw({"now": density}).axes
    line = axes.get_lines()[0]
    x, y = (np.asarray(side, dtype=float) for side in line.get_data())
    typical = float((density.weights * density.nodes.abs()).sum())
    # per e-fold of the drawn axis: the integral over d asinh(x / typical) counts eigenvalues
    counted = np.trapezoid(y, np.arcsinh(x / typical))
    assert counted == pytest.approx(100, rel=0.03)
