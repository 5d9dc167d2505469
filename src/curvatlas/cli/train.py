"""``curvatlas train``: a zoo model trained with the monitor on, and its training dynamics."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from curvatlas.cli.options import AsJson, Debug, Output, Quiet, Seed, Time, Verbose


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
    seed: Seed = 0,
    time: Time = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train a zoo model and watch its curvature: sharpness, trace, events, by step and by role."""
    if lr is not None and not 0 < lr < float("inf"):
        raise typer.BadParameter(f"--lr is a positive number, got {lr:g}.")
    if not 0 < budget <= 1:
        raise typer.BadParameter(f"--budget is a share in (0, 1], got {budget:g}.")
    from functools import cache

    import curvatlas as ca
    from curvatlas import zoo
    from curvatlas.budget import one_thread
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.cli.options import Console, budget_of
    from curvatlas.cli.training_session import RATES, Session, make_optimizer
    from curvatlas.runs import subject
    from curvatlas.runs.subject import subject_of, weights_of
    from curvatlas.training.snapshot import CurvatureHistory
    from curvatlas.zoo.training import TrainingHistory

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    clock = budget_of(time=time)
    if model is ModelName.vit:
        data, network = zoo.digits(), zoo.reference_vit(seed=seed)
        named, size = "reference ViT", batch_size or 64
    else:
        data = zoo.text(level="character", context=64)
        network = zoo.reference_gpt(seed=seed, vocabulary=data.classes)  # type: ignore[assignment]
        named, size = "reference GPT", batch_size or 16
    watched = tuple(data.train.take(samples))
    rate = RATES[optimizer.value] if lr is None else lr
    run = open_run(
        "train",
        output,
        options={
            "command": "train", "model": model.value, "optimizer": optimizer.value,
            "steps": steps, "lr": rate, "batch_size": size, "every": every, "budget": budget,
            "samples": samples, "seed": seed,
        },
        model_fingerprint=subject.of_model(network),
        data_fingerprint=subject.of_data(watched),
    )  # fmt: skip
    chosen = make_optimizer(optimizer.value, network, lr=rate)
    monitor = ca.Monitor(
        network, "cross_entropy", watched, every=every, budget=budget, optimizer=chosen, seed=seed
    )
    session = Session(
        network, data, chosen, monitor, steps=steps, batch_size=size, seed=seed,
        checkpoint=run.checkpoint_path("training"), checkpoint_every=every,
    )  # fmt: skip

    def watch(step: int, loss: float) -> None:
        if monitor.snapshots and monitor.snapshots[-1].step == step - 1:
            console.say(monitor.snapshots[-1])
        clock.check()

    @cache
    def finished() -> TrainingHistory:
        return session.run(watch)

    def dynamics() -> CurvatureHistory:
        finished()
        history: CurvatureHistory = monitor.history
        return history

    def work() -> None:
        console.say(
            f"curvatlas train {model.value}: {steps} steps of {optimizer.value}, {run.path}"
        )
        problem = ca.Problem(network, "cross_entropy", watched)
        console.say(run.step("model.subject", lambda: subject_of(problem, name=named,
                                                                 data=str(data))))  # fmt: skip
        # The checkpoint goes when "training" is stored: until then a stopped run has both.
        history = run.step("dynamics", dynamics)
        trained = run.step("training", lambda: weights_of(network, finished()))
        for event in history.events:
            console.say(event)
        console.say(trained)

    with one_thread():
        carry_out(run, work, console)
