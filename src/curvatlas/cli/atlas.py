"""``curvatlas atlas MODEL DATA``: the map of curvature over every pair of roles."""

from __future__ import annotations

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
    Samples,
    Seed,
    Tokenizer,
    Verbose,
    Weights,
)


def atlas(
    model: Model,
    data: Data,
    output: Output = None,
    heads: Annotated[bool, typer.Option("--heads", help="One block a head.")] = False,
    biases: Annotated[
        bool, typer.Option("--biases", help="Biases as blocks of their own.")
    ] = False,
    rtol: Annotated[float, typer.Option(help="Relative error of the entries to reach.")] = 0.05,
    exact: Annotated[bool, typer.Option("--exact", help="Dense, exact (small models).")] = False,
    loss: Loss = LossName.auto,
    weights: Weights = None,
    samples: Samples = 512,
    batch_size: BatchSize = 128,
    context: Context = 64,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    memory: Memory = None,
    products: Products = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Map the curvature of H, H_o and H_f over every pair of roles and layers."""
    from curvatlas.analysis.atlas.mapping import atlas as make_atlas
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.cli.options import Console, budget_of
    from curvatlas.runs.subject import subject_of

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    budget = budget_of(memory=memory)
    if not rtol > 0:
        raise typer.BadParameter(f"--rtol must be positive, got {rtol}.")
    inputs = prepare(
        model, data, loss=loss.value, weights=weights, samples=samples, batch_size=batch_size,
        context=context, tokenizer=tokenizer, seed=seed, dtype=dtype, device=device,
    )  # fmt: skip
    run = inputs.open_run(
        "atlas", output, heads=heads, biases=biases, rtol=rtol, exact=exact,
        effort={"memory": budget.memory, "products": products or "default"},
    )  # fmt: skip
    problem = inputs.problem

    def work() -> None:
        console.say(f"curvatlas atlas {model} {data}, into {run.path}")
        name, found = inputs.model_name, inputs.data_name
        console.say(run.step("model.subject", lambda: subject_of(problem, name=name, data=found)))
        console.say(
            run.step(
                "model.atlas",
                lambda: make_atlas(
                    problem, heads=heads, biases=biases, rtol=rtol, products=products, seed=seed,
                    method="dense" if exact else "auto", budget=memory,
                ),
                spends=("products",),
            )
        )  # fmt: skip

    carry_out(run, work, console)
