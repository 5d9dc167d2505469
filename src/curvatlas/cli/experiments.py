"""Commands that train: ``train`` a zoo model with the monitor on, ``scaling`` a grid of models."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvatlas.cli.options import LossOption, Output, PageConsole, Seed, Time, whole_numbers

if TYPE_CHECKING:
    from curvatlas.training.snapshot import CurvatureHistory
    from curvatlas.zoo.training import TrainingHistory


class ModelName(str, Enum):
    """Which zoo model is trained."""

    vit = "vit"
    gpt = "gpt"


class OptimizerName(str, Enum):
    """What takes the steps."""

    curvature = "curvature"
    adamw = "adamw"
    sgd = "sgd"


def train(
    *,
    model: Annotated[
        ModelName, typer.Argument(metavar="MODEL", help="vit (on digits) or gpt (on characters).")
    ] = ModelName.vit,
    output: Output = None,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="curvature, adamw or sgd.")
    ] = OptimizerName.curvature,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 400,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate (default: one that suits the optimizer).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a step (default: 64 images, 16 windows).")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = 50,
    budget: Annotated[
        float, typer.Option(help="Share of the wall time the monitor may use; 1: no limit.")
    ] = 1.0,
    samples: Annotated[
        int, typer.Option(min=2, help="Training samples the curvature is measured on.")
    ] = 64,
    maps: Annotated[
        bool, typer.Option("--maps", help="Maps of H, H_o and H_f over training, as a film.")
    ] = False,
    seed: Seed = 0,
    time: Time = None,
    console: PageConsole,
) -> None:
    """Train a zoo model and watch its curvature: sharpness, trace, events, by step and by role."""
    if lr is not None and not 0 < lr < float("inf"):
        raise typer.BadParameter(f"--lr is a positive number, got {lr:g}.")
    if not 0 < budget <= 1:
        raise typer.BadParameter(f"--budget is a share in (0, 1], got {budget:g}.")
    from curvatlas import zoo
    from curvatlas.budget import Clock, one_thread
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.cli.training_session import RATES, Session, make_optimizer
    from curvatlas.problem import Problem
    from curvatlas.runs.subject import of_data, of_model, weights_of
    from curvatlas.surveying import subject_of
    from curvatlas.training.monitor import Monitor

    clock = Clock(time)
    if model is ModelName.vit:
        data, network = zoo.digits(), zoo.reference_vit(seed=seed)
        model_name, size = "reference ViT", batch_size or 64
    else:
        data = zoo.text(level="character", context=64)
        network = zoo.reference_gpt(seed=seed, vocabulary=data.classes)  # type: ignore[assignment]
        model_name, size = "reference GPT", batch_size or 16
    watched = tuple(data.train.take(samples))
    rate = RATES[optimizer.value] if lr is None else lr
    run = open_run(
        output,
        {
            "command": "train",
            "model": model.value,
            "optimizer": optimizer.value,
            "steps": steps,
            "lr": rate,
            "batch_size": size,
            "every": every,
            "budget": budget,
            "samples": samples,
            "seed": seed,
            **({"maps": True} if maps else {}),
        },
        model_fingerprint=of_model(network),
        data_fingerprint=of_data(watched),
    )
    updates = make_optimizer(optimizer.value, network, lr=rate)
    monitor = Monitor(
        network,
        "cross_entropy",
        watched,
        every=every,
        budget=budget,
        optimizer=updates,
        maps=maps,
        seed=seed,
    )
    session = Session(
        network,
        data,
        updates,
        monitor,
        steps=steps,
        batch_size=size,
        seed=seed,
        checkpoint=run.checkpoint_path("training"),
        checkpoint_every=every,
    )

    def watch(step: int, loss: float) -> None:
        if monitor.snapshots and monitor.snapshots[-1].step == step - 1:
            console.say(monitor.snapshots[-1])
        clock.check()

    @cache
    def finished() -> TrainingHistory:
        return session.run(watch)

    def dynamics() -> CurvatureHistory:
        finished()
        return monitor.history

    def work() -> None:
        console.say(
            f"curvatlas train {model.value}: {steps} steps of {optimizer.value}, {run.path}"
        )
        problem = Problem(network, "cross_entropy", watched)
        console.say(
            run.step("model.subject", lambda: subject_of(problem, name=model_name, data=str(data)))
        )
        # The checkpoint goes when "training" is stored: until then a stopped run has both.
        history = run.step("dynamics", dynamics)
        trained = run.step("training", lambda: weights_of(network, finished()))
        if len(history.mapped) > 1:
            console.say(run.step("early_blocks", history.early_blocks))
        for event in history.events:
            console.say(event)
        console.say(trained)

    with one_thread():
        carry_out(run, work, console)


class MatchName(str, Enum):
    """What the runs of a scaling grid have alike."""

    compute = "compute"
    steps = "steps"


_DEFAULT_DATA = {"vit": "digits", "gpt": "text"}  # of the zoo's models, by --model
_DIGIT_SIZES = [100, 240, 580, 1400]


def scaling(
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="FACTORY",
            help="mine.py:make_model or pkg.module:make_model, called with a size (and seed= if "
            "it has such an argument); or vit, gpt.",
        ),
    ] = "vit",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="A text file, or any other DATA of 'curvatlas analyze' (default: digits for vit, "
            "text for gpt).",
        ),
    ] = None,
    output: Output = None,
    widths: Annotated[
        str, typer.Option(help="Sizes the factory is called with, by commas.")
    ] = "4,8,12,16",
    sizes: Annotated[
        str | None,
        typer.Option(help="Numbers of training samples, by commas (default: four, up to all)."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at each pair of sizes, 2 or more: errors between seeds."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps of the model that computes most.")
    ] = 600,
    match: Annotated[
        MatchName,
        typer.Option(help="What runs have alike: compute (smaller models go on) or steps."),
    ] = MatchName.compute,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 5e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a training step.")] = 32,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a window, for text.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, characters or a folder, for text.")
    ] = None,
    loss: LossOption = "auto",
    curvature_samples: Annotated[
        int,
        typer.Option(min=0, help="Samples the curvature is measured on; 0: all of a run's."),
    ] = 192,
    products: Annotated[int, typer.Option(min=8, help="Products for each spectrum.")] = 60,
    seed: Seed = 0,
    console: PageConsole,
) -> None:
    """Train models of several sizes on growing data, over seeds, and fit the scaling laws."""
    models = whole_numbers(widths, "--widths")
    asked = None if sizes is None else whole_numbers(sizes, "--sizes")
    if not 0 < lr < float("inf"):
        raise typer.BadParameter(f"--lr is a positive number, got {lr:g}.")
    if seeds == 1:
        raise typer.BadParameter("an error between seeds needs at least 2 seeds, got 1.")
    from curvatlas.article import ScalingLawAnalyzer
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.cli.inputs import find_factory, find_split

    named = data or _DEFAULT_DATA.get(model)
    if named is None:
        raise typer.BadParameter(f"--model {model} comes without data: give --data.")
    analyzer = ScalingLawAnalyzer(find_factory(model))
    found = find_split(
        named,
        analyzer.made(models[0], seed),
        name=model,
        context=context,
        tokenizer=tokenizer,
        loss=loss,
        seed=seed,
    )
    available = found.dataset.train.size
    default = _DIGIT_SIZES if named == "digits" else _four_sizes(available)
    data_sizes = asked or [size for size in default if size <= available]
    if max(data_sizes) > available:
        raise typer.BadParameter(
            f"--sizes goes to {max(data_sizes)}, {named} has {available} training samples."
        )
    how: dict[str, Any] = {
        "seeds": seeds,
        "steps": steps,
        "match": match.value,
        "lr": lr,
        "batch_size": batch_size,
        "curvature_samples": curvature_samples or None,
        "products": products,
        "seed": seed,
    }
    analyzer.loss = found.objective
    marks = analyzer.fingerprints(models, found.dataset, seed)
    options: dict[str, Any] = {"command": "scaling", "model": model, "data": named}
    options |= {
        "context": context,
        "tokenizer": tokenizer,
        "loss": found.loss,
        "widths": models,
        "sizes": data_sizes,
    }
    run = open_run(output, {**options, **how}, **marks)

    def work() -> None:
        runs = f"{len(models)} × {len(data_sizes)} sizes × {seeds or 1} seeds"
        console.say(f"curvatlas scaling {model} on {found.dataset}: {runs}, into {run.path}")
        for note in found.notes:
            run.warn(f"data: {note}")
        grid = analyzer.train_grid(models, data_sizes, data=found.dataset, output=run, **how)
        console.say(grid)
        for note in grid.notes:
            run.warn(note)
        try:
            console.say(run.step("comparison", analyzer.compare_predictions))
        except ValueError as reason:
            run.warn(f"predictions were not compared: {reason}")

    carry_out(run, work, console)


def _four_sizes(available: int) -> list[int]:
    """Up to all samples, each 2.4 times the one before."""
    return sorted({max(2, round(available / 2.4**k)) for k in range(4)})
