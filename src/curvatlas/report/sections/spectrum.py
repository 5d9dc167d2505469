"""The spectrum: bulk and outliers, before and after, for H, H_o and H_f."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import Series, chart, linear_scale, log_scale, symlog_scale
from curvatlas.report.contents import (
    PART_WORDS,
    PARTS,
    Contents,
    Section,
    eigenvalues,
    numbers,
    quantity,
    stage_words,
    with_interval,
)
from curvatlas.report.markup import Markup, join, switch, table, tag

_FLOOR = 1e-5  # densities below this share of the highest are not drawn


def spectrum(contents: Contents) -> Section | None:
    panels = {}
    for part, symbol in PARTS.items():
        body = join(_density(contents, part), _outliers(contents, part))
        if body:
            panels[f"{symbol}: {PART_WORDS[part]}"] = tag("div", body, class_="pair")
    tables = [_eigenvalue_table(contents), _trace_table(contents)]
    if not panels and not any(tables):
        return None
    pictures = (
        switch("spectrum", panels, label="Matrix whose spectrum is shown") if panels else None
    )
    lead = tag(
        "p",
        "Most directions hardly curve (the bulk near zero); a few curve strongly (the outliers). "
        "Curvature is H = H_o + H_f: H_o comes from the loss at fixed network slopes and is never "
        "negative, H_f from the network's own bending.",
    )
    return Section("spectrum", "Spectrum", join(lead, pictures, tables))


def _density(contents: Contents, part: str) -> Markup | None:
    curves = []
    for index, stage in enumerate(contents.stages("SpectralDensity")):
        content = contents.find("SpectralDensity", stage=stage, part=part)
        if content is None:
            continue
        grid, density = numbers(content.get("grid")), numbers(content.get("density"))
        if len(grid) > 1 and len(grid) == len(density):
            curves.append((index, stage, grid, density))
    if not curves:
        return None
    top = max(max(density) for _, _, _, density in curves)
    series = [
        Series(
            name=stage_words(stage) or "density",
            x=[x for x, y in zip(grid, density, strict=True) if y > _FLOOR * top],
            y=[y for y in density if y > _FLOOR * top],
            style="area",
            colour=index,
        )
        for index, stage, grid, density in curves
    ]
    return chart(
        series,
        x_scale=symlog_scale,
        y_scale=log_scale([_FLOOR * top, top]),
        x_label="eigenvalue",
        y_label="density",
        title=f"Density of {PARTS[part]}",
        description="How the eigenvalues are spread; smoothed for drawing, both axes compressed.",
    )


def _outliers(contents: Contents, part: str) -> Markup | None:
    series = []
    for index, stage in enumerate(contents.stages("Eigenpairs")):
        content = contents.find("Eigenpairs", stage=stage, part=part)
        pairs = sorted(eigenvalues(content), reverse=True) if content else []
        if not pairs:
            continue
        name = stage_words(stage) or "eigenvalues"
        series.append(
            Series(
                name=name,
                x=[float(rank) for rank in range(1, len(pairs) + 1)],
                y=[value for value, _ in pairs],
                style="points",
                intervals=[interval for _, interval in pairs],
                colour=index,
                labels=[
                    f"{name}, no. {rank}: {with_interval(value, interval)}"
                    for rank, (value, interval) in enumerate(pairs, 1)
                ],
            )
        )
    if not series:
        return None
    heights = [y for one in series for y in one.y]
    wide = max(map(abs, heights)) > 100 * (min(map(abs, heights)) or 1e-30)
    return chart(
        series,
        x_scale=linear_scale,
        y_scale=symlog_scale(heights) if wide else linear_scale(heights, zero=True),
        x_label="rank",
        y_label="eigenvalue",
        title=f"Outliers of {PARTS[part]}",
        description="The eigenvalues at the ends of the spectrum, with their certified intervals.",
    )


def _eigenvalue_table(contents: Contents) -> Markup | None:
    rows: list[list[object]] = []
    for entry in contents.of_kind("Eigenpairs"):
        content = entry.content
        pairs = sorted(eigenvalues(content), reverse=True)
        shown = join(
            *(tag("span", with_interval(*pair), class_="nowrap") for pair in pairs), by=" · "
        )
        rows.append(
            [
                _title(entry.stage, entry.part),
                shown,
                content.get("products"),
                str(content.get("completeness", "")),
            ]
        )
    if not rows:
        return None
    return table(
        ["matrix", "eigenvalues", "products", "certainty"],
        rows,
        caption="Eigenvalues at the ends; each interval contains an eigenvalue for certain",
    )


def _trace_table(contents: Contents) -> Markup | None:
    rows: list[list[object]] = []
    for entry in contents.of_quantity("trace"):
        value, interval = quantity(entry.content)
        rows.append(
            [
                f"tr {_title(entry.stage, entry.part)}",
                with_interval(value, interval),
                entry.content.get("products"),
                _known(entry.content, value, interval),
            ]
        )
    for entry in contents.of_kind("SpectralDensity"):
        mass, interval = quantity(entry.content, "negative_mass")
        if mass is not None:
            rows.append(
                [
                    f"{_title(entry.stage, entry.part)}: share of negative eigenvalues",
                    with_interval(mass, interval),
                    entry.content.get("products"),
                    "exact" if interval is None or interval[0] == interval[1] else "estimate",
                ]
            )
    if not rows:
        return None
    return table(
        ["quantity", "value [95 % interval]", "products", "how well"],
        rows,
        caption="Traces and negative mass",
    )


def _known(
    content: dict[str, Any], value: float | None, interval: tuple[float, float] | None
) -> str:
    if content.get("exact"):
        return "exact"
    if value is None or interval is None or value == 0:
        return "estimate"
    half = (interval[1] - interval[0]) / 2 / abs(value)
    return f"± {half:.0%}" if half < 10 else "sign uncertain"


def _title(stage: str, part: str) -> str:
    words = stage_words(stage)
    return f"{PARTS[part]} {words}".strip()
