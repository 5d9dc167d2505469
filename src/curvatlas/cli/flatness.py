"""``flatness`` of the user's model, and ``generalisation``: what it says over many models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from curvatlas.cli.options import (
    BrokenImages,
    Inputs,
    Output,
    PageConsole,
    Products,
    Samples,
    Seed,
    Time,
    whole_numbers,
)


def flatness(
    *,
    inputs: Inputs,
    output: Output = None,
    test: Annotated[
        str | None,
        typer.Option(help="Test data, named as DATA; our own sets give their held-out samples."),
    ] = None,
    prior: Annotated[
        Path | None,
        typer.Option(help="Weights at initialisation (.safetensors): the bounds' prior mean."),
    ] = None,
    radius: Annotated[float, typer.Option(help="ρ of SAM.")] = 0.05,
    adaptive_radius: Annotated[float, typer.Option(help="ρ of ASAM.")] = 0.5,
    draws: Annotated[int, typer.Option(min=2, help="Draws of the bounds' noise.")] = 100,
    loss_bound: Annotated[
        float | None, typer.Option(help="The bounds cut the loss off here (classes: 4 log C).")
    ] = None,
    invariance: Annotated[
        bool,
        typer.Option("--invariance", help="Also measure rescaled copies (float64, small models)."),
    ] = False,
    samples: Samples = 512,
    products: Products = None,
    time: Time = None,
    console: PageConsole,
) -> None:
    """Measure how flat the loss is: λmax, trace, SAM, ASAM, Fisher-Rao, PAC-Bayes, by layer."""
    for option, value in (("--radius", radius), ("--adaptive-radius", adaptive_radius)):
        if not 0 < value < float("inf"):
            raise typer.BadParameter(f"{option} is a positive number, got {value:g}.")
    from curvatlas.analysis.landscape.flatness import flatness as measure, rescaling_invariance
    from curvatlas.budget import Clock
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare, read_weights
    from curvatlas.runs.subject import of_data

    clock = Clock(time)
    prepared = prepare(inputs, samples)
    problem = prepared.problem
    held_out = None if test is None else prepared.test_data(test, samples)
    start = None if prior is None else read_weights(prior)
    how: dict[str, Any] = {
        "radius": radius,
        "adaptive_radius": adaptive_radius,
        "draws": draws,
        "loss_bound": loss_bound,
        "products": products or 150,
    }
    run = prepared.open_run(
        "flatness",
        output,
        **how,
        test=None if held_out is None else of_data(held_out),
        prior=None if start is None else of_data([(start, start)]),
        invariance=invariance,
    )

    def step(name: str, function: Callable[[], Any]) -> Any:
        clock.check()
        console.detail(name)
        return run.step(name, function)

    def work() -> None:
        console.say(f"curvatlas flatness {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        found = step(
            "model.flatness",
            lambda: measure(
                problem,
                test=held_out,
                prior=start,
                seed=inputs.seed,
                keep=lambda name, function: step(f"model.{name}", function),
                **how,
            ),
        )
        console.say(found)
        if invariance:
            console.say(
                step(
                    "model.invariance",
                    lambda: rescaling_invariance(problem, seed=inputs.seed, keep=step, **how),
                )
            )

    carry_out(run, work, console)


def generalisation(
    *,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="digits, fashion-mnist, mnist, cifar-10, cifar-100, a folder of images (one "
            "folder a class), of CIFAR's binary version or of IDX files, an .npz or .safetensors "
            "file, or mine.py:make_data (a torch dataset, a pair of tensors or a zoo.Dataset).",
        ),
    ] = "digits",
    output: Output = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="mine.py:make_model, called with width= and depth= (default: a ViT for images).",
        ),
    ] = None,
    models: Annotated[int, typer.Option(min=5, help="Models that are trained.")] = 24,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each.")] = 300,
    sizes: Annotated[
        str, typer.Option(help="Numbers of training samples, by commas.")
    ] = "100,220,480",
    widths: Annotated[str, typer.Option(help="Widths, by commas.")] = "8,12,16",
    draws: Annotated[int, typer.Option(min=2, help="Draws of the bounds' noise.")] = 40,
    products: Products = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="Scale and cut images of a folder to so many pixels a side."),
    ] = None,
    broken: Annotated[
        BrokenImages, typer.Option(help="Images of a folder that cannot be read: refuse or skip.")
    ] = BrokenImages.refuse,
    seed: Seed = 0,
    console: PageConsole,
) -> None:
    """Train many models and rank every measure of flatness against the generalisation gap."""
    axes = {
        "samples": whole_numbers(sizes, "--sizes"),
        "width": whole_numbers(widths, "--widths"),
    }
    from curvatlas.budget import one_thread
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.cli.inputs import find_dataset, model_factory
    from curvatlas.runs.subject import of_data
    from curvatlas.studies.generalisation import examine_generalisation, levels_of

    make = None if model is None else model_factory(model)
    dataset = find_dataset(data, size=image_size, broken=broken.value, seed=seed)
    levels_of(axes, dataset)  # wrong levels make no folder
    how: dict[str, Any] = {
        "models": models,
        "steps": steps,
        "axes": axes,
        "draws": draws,
        "products": products or 60,
        "seed": seed,
    }
    run = open_run(
        output,
        {"command": "generalisation", "data": data, "model": model, **how},
        data_fingerprint=of_data([tuple(dataset.train), tuple(dataset.validation)]),
    )
    for note in dataset.notes:
        run.warn(f"data: {note}")

    def work() -> None:
        console.say(f"curvatlas generalisation {data}: {models} models, into {run.path}")
        console.say(examine_generalisation(dataset, make=make, output=run, **how))

    with one_thread():
        carry_out(run, work, console)
