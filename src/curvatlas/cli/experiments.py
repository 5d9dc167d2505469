"""Commands that train models of the zoo: ``train`` with the monitor on, ``scaling`` over a grid."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvatlas.cli.options import Console, Output, Seed, Time, whole_numbers

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
    console: Console,
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


def scaling(
    *,
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
    console: Console,
) -> None:
    """Train ViTs of several widths on growing numbers of digits and fit the scaling laws."""
    models, data_sizes = whole_numbers(widths, "--widths"), whole_numbers(sizes, "--sizes")
    from curvatlas import zoo
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.scaling import ScalingLawAnalyzer

    available = zoo.digits().train.size
    if max(data_sizes) > available:
        raise typer.BadParameter(
            f"--sizes goes to {max(data_sizes)}, there are {available} digits."
        )
    how: dict[str, Any] = {
        "steps": steps,
        "curvature_samples": curvature_samples,
        "products": products,
        "seed": seed,
    }
    run = open_run(output, {"command": "scaling", "widths": models, "sizes": data_sizes, **how})
    analyzer = ScalingLawAnalyzer(lambda width: zoo.reference_vit(d_model=width, seed=seed))

    def work() -> None:
        console.say(
            f"curvatlas scaling: {len(models)} × {len(data_sizes)} ViTs on digits, into {run.path}"
        )
        console.say(analyzer.analyze_scaling_with_size(models, data_sizes, output=run, **how))
        if len(data_sizes) >= 3 and len(models) >= 2:
            console.say(run.step("comparison", analyzer.compare_predictions))
        else:
            run.warn("predictions were not compared: that takes 3 data sizes and 2 widths")

    carry_out(run, work, console)
