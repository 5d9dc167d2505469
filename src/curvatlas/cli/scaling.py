"""``curvatlas scaling``: loss and curvature of a grid of trained ViTs, with fitted laws."""

from __future__ import annotations

from typing import Annotated

import typer

from curvatlas.cli.options import AsJson, Debug, Output, Quiet, Seed, Verbose


def scaling(
    output: Output = None,
    widths: Annotated[str, typer.Option(help="Widths of the models, by commas.")] = "4,8,12,16",
    sizes: Annotated[
        str, typer.Option(help="Numbers of training digits, by commas.")
    ] = "100,240,580,1400",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 600,
    curvature_samples: Annotated[
        int, typer.Option(min=4, help="Samples the curvature is measured on.")
    ] = 192,
    products: Annotated[int, typer.Option(min=8, help="Products for each spectrum.")] = 60,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train ViTs of several widths on growing numbers of digits and fit the scaling laws."""
    models, data_sizes = (
        _integers(text, name) for text, name in ((widths, "--widths"), (sizes, "--sizes"))
    )
    from curvatlas import zoo
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.cli.options import Console
    from curvatlas.scaling.analyzer import ScalingLawAnalyzer

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    available = zoo.digits().train.size
    if max(data_sizes) > available:
        raise typer.BadParameter(
            f"--sizes goes to {max(data_sizes)}, there are {available} digits."
        )
    run = open_run(
        "scaling",
        output,
        options={
            "command": "scaling", "widths": models, "sizes": data_sizes, "steps": steps,
            "curvature_samples": curvature_samples, "products": products, "seed": seed,
        },
    )  # fmt: skip
    analyzer = ScalingLawAnalyzer(lambda width: zoo.reference_vit(d_model=width, seed=seed))

    def work() -> None:
        console.say(
            f"curvatlas scaling: {len(models)} × {len(data_sizes)} ViTs on digits, into {run.path}"
        )
        grid = analyzer.analyze_scaling_with_size(
            models, data_sizes, output=run, steps=steps, curvature_samples=curvature_samples,
            products=products, seed=seed,
        )  # fmt: skip
        console.say(grid)
        if len(data_sizes) >= 3 and len(models) >= 2:
            console.say(run.step("comparison", analyzer.compare_predictions))
        else:
            run.warn("predictions were not compared: that takes 3 data sizes and 2 widths")

    carry_out(run, work, console)


def _integers(text: str, option: str) -> list[int]:
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 2:
        raise typer.BadParameter(f"{option} takes numbers of at least 2 by commas, got {text!r}.")
    return found
