"""``curvatlas demo``: the whole way on the embedded default, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvatlas.cli.options import AsJson, Debug, Output, Quiet, Seed, Time, Verbose


def demo(
    output: Output = None,
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 800,
    samples: Annotated[int, typer.Option(min=2, help="Digits the curvature is measured on.")] = 128,
    time: Time = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train a small ViT on digits and show its curvature before and after."""
    from curvatlas.budget import one_thread

    with one_thread():
        _before_and_after(
            output, seed=seed, steps=steps, samples=samples, time=time, as_json=as_json,
            quiet=quiet, verbose=verbose,
        )  # fmt: skip


def _before_and_after(
    output: Path | None,
    *,
    seed: int,
    steps: int,
    samples: int,
    time: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    import torch

    import curvatlas as ca
    from curvatlas import zoo
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.cli.options import Console, budget_of
    from curvatlas.runs import subject
    from curvatlas.runs.subject import TrainedWeights, weights_of
    from curvatlas.surveying import Effort, Survey

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    budget = budget_of(time=time)
    model, data = zoo.reference_vit(seed=seed).double().eval(), zoo.digits()
    batch = data.train.take(samples).to(torch.float64)
    run = open_run(
        "demo",
        output,
        options={"command": "demo", "seed": seed, "steps": steps, "samples": samples},
        model_fingerprint=subject.of_model(model),
        data_fingerprint=subject.of_data(tuple(batch)),
    )

    def look(stage: str) -> None:
        problem = ca.Problem(model, "cross_entropy", tuple(batch))
        Survey(
            run,
            problem,
            stage=stage,
            effort=Effort(density_products=150, seed=seed),
            budget=budget,
            console=console,
        ).carry_out(name="reference ViT", data=f"{batch.size} digits of 8 × 8 pixels")

    def training() -> TrainedWeights:
        model.float()  # training needs no more than float32; curvature is measured in float64
        history = zoo.train(model, data, steps=steps, seed=seed)
        return weights_of(model, history)

    def work() -> None:
        console.say(f"curvatlas demo: a small ViT on digits, into {run.path}")
        look("initial")
        budget.check()
        trained = run.step("training", training)
        console.say(f"training: {trained}")
        trained.load_into(model)
        model.double().eval()
        look("trained")

    carry_out(run, work, console)
