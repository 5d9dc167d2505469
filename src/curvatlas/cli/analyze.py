"""``curvatlas analyze MODEL DATA``: the survey of the user's own model."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from curvatlas.cli.options import (  # fmt: skip
    AsJson,
    BatchSize,
    Context,
    Data,
    Debug,
    Device,
    Dtype,
    Loss,
    LossName,
    Memory,
    Model,
    Output,
    Products,
    Quiet,
    Seed,
    Time,
    Tokenizer,
    Verbose,
    Weights,
)


class Part(str, Enum):
    """What can be left out of the survey."""

    trace = "trace"
    map = "map"
    propagation = "propagation"
    density = "density"
    advice = "advice"


def analyze(
    model: Model,
    data: Data,
    output: Output = None,
    loss: Loss = LossName.auto,
    roles: Annotated[
        list[str] | None,
        typer.Option("--roles", help="Only these parameters: names, roles or globs; repeatable."),
    ] = None,
    weights: Weights = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most samples to use (default: 512, fewer where a product takes long)."
        ),
    ] = None,
    batch_size: BatchSize = 128,
    context: Context = 64,
    tokenizer: Tokenizer = None,
    eigenvalues: Annotated[int, typer.Option(min=1, help="Eigenvalues at each end.")] = 5,
    skip: Annotated[
        list[Part] | None, typer.Option("--skip", help="Leave this out; repeatable.")
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    time: Time = None,
    memory: Memory = None,
    products: Products = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Measure the curvature of your model: spectrum, traces, map over roles, densities."""
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.cli.options import Console, budget_of
    from curvatlas.surveying import Effort, Survey, chosen_slices

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    budget = budget_of(time=time, memory=memory, products=products)
    inputs = prepare(
        model, data, loss=loss.value, weights=weights, samples=samples, batch_size=batch_size,
        context=context, tokenizer=tokenizer, seed=seed, dtype=dtype, device=device,
    )  # fmt: skip
    if roles:
        chosen_slices(inputs.problem.anatomy, roles)  # a wrong name is told at once
    left_out = sorted(part.value for part in skip or ())
    run = inputs.open_run(
        "analyze", output, roles=roles, eigenvalues=eigenvalues, skip=left_out,
        effort={"memory": budget.memory, "products": budget.told_products, "time": time},
    )  # fmt: skip

    def work() -> None:
        console.say(f"curvatlas analyze {model} {data}, into {run.path}")
        Survey(
            run, inputs.problem, stage="model", budget=budget, console=console, roles=roles,
            effort=Effort(eigenvalues=eigenvalues, seed=seed, skip=tuple(left_out)),
        ).carry_out(name=inputs.model_name, data=inputs.data_name)  # fmt: skip

    carry_out(run, work, console)
