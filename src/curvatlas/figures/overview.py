"""One picture of a run: the spectrum at every stage, where curvature lives, how it travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from curvatlas.display import drawing_on
from curvatlas.figures.flow import draw_flow
from curvatlas.figures.maps import draw_atlas
from curvatlas.figures.spectrum import draw_density
from curvatlas.figures.style import PathLike, panels, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.atlas.result import Atlas
    from curvatlas.analysis.propagation.result import CurvatureFlow
    from curvatlas.spectra.density_result import SpectralDensity


def visualize_overview(
    *,
    densities: Mapping[str, SpectralDensity],
    atlas: Atlas | None = None,
    flows: Mapping[str, CurvatureFlow] | None = None,
    atlas_words: str = "",
    title: str = "",
    path: PathLike | None = None,
) -> Figure:
    """Densities of H by stage, the map of the last stage, curvature by depth at every stage.

    Keys are the words of the legend, such as "at initialisation"; what is missing is left out.
    atlas_words: the stage of the map, for its title.
    """
    pictures: list[tuple[str, Callable[[], Any]]] = []
    if densities:
        pictures.append(("", partial(draw_density, densities)))
    if atlas is not None:
        words = f"where it lives {atlas_words}".strip()
        pictures.append((words, partial(draw_atlas, {"": atlas}, part="total")))
    if flows:
        pictures.append(("", partial(draw_flow, flows)))
    if not pictures:
        raise ValueError("there is no density, no map and no flow to draw.")
    figure, axes = panels(len(pictures), width=1.05, height=1.1)
    for place, (words, draw) in zip(axes, pictures, strict=True):
        with drawing_on(place):
            draw()
        if words:
            place.set_title(words, fontsize=9.5, pad=14)
    figure.suptitle(title, fontsize=11)
    return saved(figure, path)
