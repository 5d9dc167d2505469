"""Laws and the papers' experiments: scaling, growth with a scale, sinks, Gauss-Newton's quality."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    GRID,
    MUTED,
    ORANGE,
    PINK,
    SERIES,
    PathLike,
    draws,
    legend,
    lying_bars,
    panels,
    plain_numbers,
    points,
    saved,
    shade,
)
from curvatlas.fits import (
    Array,
    PlanePowerLaw,
    ScalingLaw,
    plane_power_law,
    power_law,
)
from curvatlas.linear_operator import SYMBOLS
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.scaling import ScalingGrid
    from curvatlas.studies.gauss_newton import GaussNewtonQuality
    from curvatlas.studies.growth import Growth
    from curvatlas.studies.sinks import Sinks, SinkStudy

_MOST_PANELS = 8
_ATTENTION = {"query": BLUE, "key": ORANGE, "value": GREEN, "output": PINK}

# quantity of a run → its axis and the field of its interval
QUANTITIES = {
    "validation_loss": ("validation loss", "validation_interval"),
    "hessian_norm": ("‖H‖ (loss / parameter²)", "hessian_norm_interval"),
    "trace": ("trace (loss / parameter²)", "trace_interval"),
    "effective_rank": ("effective rank (eigenvalues)", "effective_rank_interval"),
    "condition_number": ("λmax / mean |λ|", "condition_interval"),
    "critical_batch_size": ("critical batch size (samples)", "critical_batch_interval"),
}


def plot_scaling_law_predictions(
    model_sizes: Any = None,
    hessian_norms: Any = None,
    dataset_sizes: Any = None,
    *,
    path: PathLike | None = None,
    quantity: str = "hessian_norm",
) -> Figure:
    """Norms against model size and against data size, with the law C Nᵃ Dᵇ fitted to both at once.

    hessian_norms: of every pair, (models, data sizes), or one a model, each measured with the data
    size at the same place; where the lists differ in length, norms of models alone, with the guide
    over the data sizes. The law is drawn for every size in its colour; its exponents' 95 %
    intervals are in the legends. The 1/√D guide is only a guide. A ``ScalingGrid`` may stand for
    all three, ``quantity`` for the norm.
    """
    if isinstance(model_sizes, Result):
        cells = [one for one in model_sizes["cells"] if one.trained and one.get(quantity, 1) > 0]
        columns = ("parameters", quantity, "samples")
        model_sizes, hessian_norms, dataset_sizes = ([c[k] for c in cells] for k in columns)
    sizes, samples, values = _paired(model_sizes, hessian_norms, dataset_sizes)
    figure, (left, right) = panels(2, width=1.2)
    if np.isfinite(samples).all():  # which data every norm was measured with
        try:
            law = plane_power_law(sizes, samples, values)
        except ValueError:  # too few sizes, or N and D grow together
            law = None
        _draw_against(left, sizes, values, samples, law, "N")
        _draw_against(right, samples, values, sizes, law, "D")
    else:
        samples = np.asarray(dataset_sizes, dtype=np.float64)
        _draw_against(left, sizes, values, np.zeros_like(sizes), None, "N")
        right.set(xlabel=_AXES["D"], xscale="log", yscale="log")
        values = np.full_like(samples, values[-1]) * np.sqrt(samples.min() / samples)
    grid = np.geomspace(samples.min(), samples.max(), 50)
    anchor = np.exp(np.mean(np.log(values) + 0.5 * np.log(samples)))
    right.plot(grid, anchor / np.sqrt(grid), color=MUTED, linestyle=":", label="guide 1/√D")
    for axes in (left, right):
        axes.set_ylabel(quantity.replace("_", " "))
        legend(axes)
    return saved(figure, path)


_AXES = {"N": "parameters N", "D": "samples D"}


def _draw_against(axes: Any, x: Array, y: Array, groups: Array, law: Any, axis: str) -> None:
    """Points by group, and the joint law of each group; without one, the law of x alone."""
    distinct = np.unique(groups)
    grid = np.geomspace(x.min(), x.max(), 50)
    other = "D" if axis == "N" else "N"
    for index, group in enumerate(distinct):
        chosen, colour = groups == group, shade(index, len(distinct))
        told = "measured" if group == 0 else f"{_AXES[other]} = {group:g}"
        axes.plot(x[chosen], y[chosen], "o", color=colour, markersize=4.5, label=told, zorder=3)
        if law is not None:
            curve = law(grid, group) if axis == "N" else law(group, grid)
            axes.plot(grid, curve, color=colour, linewidth=1.0)
    if law is not None:
        exponent = law.by_parameters if axis == "N" else law.by_samples
        low, high = law.parameters_interval if axis == "N" else law.samples_interval
        words = f"joint fit ∝ {axis}^{exponent:.2f} [{low:.2f}, {high:.2f}]"
        axes.plot([], [], color=MUTED, linewidth=1.0, label=words)
    elif len(x) > 2 and len(np.unique(x)) > 1 and (y > 0).all():
        fit = power_law(x, y)
        low, high = fit.interval
        told = f"fit of {axis} alone ∝ {axis}^{fit.exponent:.2f} [{low:.2f}, {high:.2f}]"
        axes.plot(grid, fit(grid), color=ORANGE, linestyle="--", label=told)
    axes.set(xlabel=_AXES[axis], xscale="log", yscale="log")


def _paired(sizes: Any, norms: Any, samples: Any) -> tuple[Array, Array, Array]:
    """Model and data size of every norm; data sizes are nan where a norm belongs to no one."""
    if sizes is None or norms is None or samples is None:
        raise ValueError("give all three: model_sizes, hessian_norms and dataset_sizes.")
    sizes, norms, samples = (
        np.asarray(plain_numbers(part), dtype=np.float64) for part in (sizes, norms, samples)
    )
    if sizes.ndim != 1 or samples.ndim != 1 or not sizes.size or not samples.size:
        raise ValueError("model_sizes and dataset_sizes are lists of numbers.")
    if not all((part > 0).all() for part in (sizes, norms, samples)):
        raise ValueError("sizes and norms must be positive: they are drawn on logarithmic axes.")
    if norms.shape == (len(sizes), len(samples)):
        pairs = np.meshgrid(sizes, samples, indexing="ij")
        return pairs[0].ravel(), pairs[1].ravel(), norms.ravel()
    if norms.shape != sizes.shape:
        raise ValueError(
            f"hessian_norms has shape {norms.shape}: expected ({len(sizes)},), one a model, or "
            f"({len(sizes)}, {len(samples)}), one for every pair of sizes."
        )
    return sizes, samples if len(samples) == len(sizes) else np.full_like(sizes, np.nan), norms


@draws("ScalingGrid")
def draw_grid(grid: ScalingGrid) -> Figure:
    """Every quantity against D, one line a model size, with the fitted laws; then the training."""
    figure, axes = panels(3, 3 if grid.phases else 2, sharex=False)
    for panel, quantity in zip(axes, QUANTITIES, strict=False):
        _draw_quantity(panel, grid, quantity)
    if grid.phases:
        for panel, quantity in zip(axes[6:], _LOOKED_AT, strict=True):
            _draw_training(panel, grid, quantity)
    legend(axes[0], _title(grid.law_of(next(iter(QUANTITIES)))))
    return figure


_LOOKED_AT = {
    "sharpness": "λmax (loss / parameter²)",
    "training_loss": "training loss",
    "validation_loss": "validation loss",
}


def _draw_quantity(axes: Any, grid: ScalingGrid, quantity: str) -> None:
    sizes = sorted({cell.parameters for cell in grid.cells})
    cells = grid.points(quantity)
    law = grid.law_of(quantity)
    for index, size in enumerate(sizes):
        colour = shade(index, len(sizes))
        line = [p for p in cells if p.parameters == size]
        x, y = [p.samples for p in line], [p.value for p in line]
        if line:
            label = f"N = {size:,}"
            intervals = [p.interval for p in line]
            points(axes, x, y, intervals, color=colour, label=label, joined=False, reach=9)
        if law is not None and len(line) > 1:
            data_sizes = np.geomspace(min(x), max(x), 40)
            axes.plot(data_sizes, law(size, data_sizes), color=colour, linewidth=0.9)
        _draw_outsiders(axes, grid, quantity, size, colour)
    axes.set(xlabel="training samples D", ylabel=QUANTITIES[quantity][0])
    axes.set(xscale="log", yscale="log")
    axes.set_title(_title(law))
    if not cells:
        axes.text(0.5, 0.5, "not measurable here", ha="center", transform=axes.transAxes)


def _draw_outsiders(axes: Any, grid: ScalingGrid, quantity: str, size: int, colour: Any) -> None:
    """Runs that the laws leave out as crosses, critical batch sizes that are bounds as arrows."""
    for cell in grid.cells:
        value = float(getattr(cell, quantity))
        if cell.parameters != size or not (np.isfinite(value) and value > 0):
            continue
        bound = quantity == "critical_batch_size" and cell.critical_batch_is_bound
        if bound or not cell.trained:
            style: Any = {"color": colour, "markersize": 5, "alpha": 0.6, "linestyle": "none"}
            axes.plot([cell.samples], [value], marker="^" if bound else "x", **style)


def _draw_training(axes: Any, grid: ScalingGrid, quantity: str) -> None:
    """A curve of every run over its training, and where the runs bend."""
    sizes = sorted({cell.parameters for cell in grid.cells})
    for cell in grid.trained:
        if cell.looks is not None:
            steps = np.array(cell.looks.steps) / max(cell.steps, 1)
            colour = shade(sizes.index(cell.parameters), len(sizes))
            axes.plot(steps, getattr(cell.looks, quantity), color=colour, linewidth=0.6, alpha=0.6)
    phases = grid.phases.get(quantity)
    if phases is not None:
        axes.axvspan(*phases.change_range, color=MUTED, alpha=0.12, linewidth=0)
        axes.axvline(phases.change, color=MUTED, linestyle="--", linewidth=1)
        axes.set_title(f"{phases.verdict}; {phases.bent} of {phases.runs} runs bend")
    axes.set(xlabel="share of the steps", ylabel=_LOOKED_AT[quantity], yscale="log")


def _title(law: PlanePowerLaw | ScalingLaw | None) -> str:
    if isinstance(law, ScalingLaw):
        (a, b), (c, d) = law.alpha_interval, law.beta_interval
        return f"E + A/N^α + B/D^β: α [{a:.2f}, {b:.2f}], β [{c:.2f}, {d:.2f}]"
    if law is None:
        return "no fit"
    (a, b), (c, d) = law.parameters_interval, law.samples_interval
    return f"∝ N^[{a:.2f}, {b:.2f}] D^[{c:.2f}, {d:.2f}] (95 %)"


# --- growth with a scale, attention sinks --------------------------------------------------------


@draws("Growth")
def draw_growth(result: Growth, *, part: str = "outer") -> Figure:
    """‖H_bb‖_F against the scale, one panel a role and one line a layer, with the fitted laws."""
    steepest: dict[str, float] = {}
    for name, role in zip(result.names, result.roles, strict=True):
        law = result.laws[part][name]
        if not role.endswith("bias"):
            steepest[role] = max(steepest.get(role, 0.0), abs(law.exponent) if law else 0.0)
    roles = sorted(steepest, key=lambda role: -steepest[role])[:_MOST_PANELS]
    columns = min(len(roles), 4)
    figure, axes = panels(columns, -(-len(roles) // columns), width=0.82, height=0.75)
    for panel, role in zip(axes, roles, strict=False):
        places = [i for i, own in enumerate(result.roles) if own == role]
        for index, place in enumerate(places):
            _growth_line(panel, result, part, place, shade(index, len(places)))
        panel.set(xscale="log", yscale="log", xlabel=f"{result.scaled} × t")
        panel.axvspan(*result.window, color=GRID, alpha=0.4, linewidth=0, zorder=0)
        legend(panel, role)
    for panel in axes[len(roles) :]:
        panel.set_visible(False)
    title = f"‖{SYMBOLS[part]}‖ of every role while {result.scaled} are scaled"
    figure.suptitle(title, fontsize=10)
    return figure


def _growth_line(axes: Any, result: Growth, part: str, place: int, colour: Any) -> None:
    values = result.norms[part][:, place].tolist()
    if max(values) <= 0:
        return
    name, layer = result.names[place], result.layers[place]
    law = result.laws[part][name]
    label = name if layer is None else f"layer {layer}"
    label += "" if law is None else f": {law.exponent:.2f}"
    axes.plot(result.scales, values, "o-", color=colour, markersize=3.5, linewidth=1, label=label)


@draws("Sinks")
def draw_sinks(result: Sinks) -> Figure:
    """λmax over bulk, norms of the attention roles along the sink, and heads against their mass."""
    figure, (left, middle, right) = panels(3)
    biases = [level.bias for level in result.levels]
    intervals = [level.ratio_interval for level in result.levels]
    points(left, biases, [level.ratio for level in result.levels], intervals, color=BLUE, reach=9)
    left.set(yscale="log", ylabel="λmax / bulk")
    left.set_title(f"{result.verdict} with the sink")
    told = set()
    weights = [i for i, name in enumerate(result.names) if name.split(".")[-1] in _ATTENTION]
    for place in weights[:_MOST_PANELS]:
        values = [float(level.norms["total"][place, 0]) for level in result.levels]
        role = result.names[place].split(".")[-1]
        label = "_" if role in told else role
        told.add(role)
        colour = _ATTENTION[role]
        middle.plot(biases, values, "o-", markersize=3.5, color=colour, linewidth=1, label=label)
    middle.set(yscale="log", ylabel="Frobenius norm of the block")
    legend(middle, "every layer's attention")
    for axes in (left, middle):
        axes.set_xlabel("bias on the first token's logits")
    for role, colour in _ATTENTION.items():
        rows = [head for head in result.heads if role in head.norms]
        values = [head.norms[role]["total"] for head in rows]
        right.plot([h.mass for h in rows], values, "o", markersize=4, color=colour, label=role)
    right.set(xlabel="sink mass of the head", ylabel="Frobenius norm of the head")
    legend(right, "heads as they are")
    if result.heads:
        right.set_yscale("log")
    return figure


@draws("SinkStudy")
def draw_sink_seeds(study: SinkStudy) -> Figure:
    """λmax over bulk along the sink, one line a seed."""
    figure, (axes,) = panels()
    for place, (seed, run) in enumerate(zip(study.seeds, study.runs, strict=True)):
        biases = [level.bias for level in run.levels]
        label = f"seed {seed}: {run.verdict}"
        colour = SERIES[place % len(SERIES)]
        axes.plot(biases, run.ratios, "o-", markersize=4, color=colour, label=label)
    axes.set(yscale="log", xlabel="bias on the first token's logits", ylabel="λmax / bulk")
    legend(axes, f"sinks stretch the spectrum: {study.verdict}")
    return figure


# --- how good Gauss-Newton is --------------------------------------------------------------------


@draws("GaussNewtonQuality")
def draw_quality(result: GaussNewtonQuality) -> Figure:
    """Shares of H_f by role, distances of the approximations, and what they condition."""
    figure, (left, middle, right) = panels(3)
    shares = result.functional_share
    intervals = [share.interval for share in shares.values()]
    lying_bars(left, list(shares), [share.value for share in shares.values()], intervals, most=20)
    left.set_xlabel("‖H_f‖ / ‖H‖")
    left.set_title(f"λmax(H_o) / λmax(H) = {result.ratio:.2f}")
    near = {n: one for n, one in result.approximations.items() if one.to_hessian is not None}
    for shift, colour, label in ((-0.2, ORANGE, "to H"), (0.2, GREEN, "to H_o")):
        found: list[Any] = [
            one.to_hessian if label == "to H" else one.to_outer for one in near.values()
        ]
        values, intervals = [d.value for d in found], [d.interval for d in found]
        look: Any = {"color": colour, "label": label, "shift": shift, "width": 0.36}
        lying_bars(middle, list(near), values, intervals, **look)
    middle.set_xlabel("‖P − A‖ / ‖A‖")
    legend(middle, "distance")
    kappas = {
        n: one.condition_hessian
        for n, one in result.approximations.items()
        if one.condition_hessian is not None
    }
    lying_bars(right, list(kappas), list(kappas.values()), color=PINK, logarithmic=bool(kappas))
    right.set_xlabel(f"κ of P⁻¹|H|, damped by {result.damping:g} ‖H‖")
    right.set_title("as a preconditioner")
    return figure
