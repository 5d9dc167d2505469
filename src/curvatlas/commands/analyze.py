"""``curvatlas analyze MODEL DATA``: the survey of the user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvatlas.commands.options import (
    AsJson,
    Debug,
    Memory,
    Output,
    Products,
    Quiet,
    Seed,
    Time,
    Verbose,
)  # fmt: skip

_MODEL = "pkg.module:make_model, a Hugging Face folder on disk, or vit, gpt, benchmark-gpt, mlp."
_DATA = (
    "pkg.module:make_data, an .npz or .safetensors file (inputs and targets), a text file, "
    "or digits, text, fashion-mnist, mnist."
)


def analyze(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    data: Annotated[str, typer.Argument(metavar="DATA", help=_DATA)],
    output: Output = None,
    loss: Annotated[
        str, typer.Option(help="auto, cross_entropy or mse (auto: by the targets).")
    ] = "auto",
    roles: Annotated[
        list[str] | None,
        typer.Option("--roles", help="Only these parameters: roles, names or globs; repeatable."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Load these weights (.safetensors) into the model.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Most samples to use.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a batch.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Tokens a window, for text.")] = 64,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, characters or a folder (default: the model's own, or bytes)."),
    ] = None,
    eigenvalues: Annotated[int, typer.Option(min=1, help="Eigenvalues at each end.")] = 5,
    seed: Seed = 0,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda:0.")] = "cpu",
    time: Time = None,
    memory: Memory = None,
    products: Products = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Measure the curvature of your model: spectrum, traces and densities of H, H_o and H_f."""
    if loss not in ("auto", "cross_entropy", "mse"):
        raise typer.BadParameter(f"--loss is auto, cross_entropy or mse, not {loss!r}.")

    import curvatlas as ca
    from curvatlas.budget import parse_bytes
    from curvatlas.commands.budgets import Budget, parse_time
    from curvatlas.commands.console import Console
    from curvatlas.commands.data import find_data
    from curvatlas.commands.execution import carry_out, open_run, quiet_libraries
    from curvatlas.commands.models import find_model, parse_dtype
    from curvatlas.commands.survey import Effort, Survey
    from curvatlas.runs import fingerprints

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    if memory is not None:
        parse_bytes(memory)
    budget = Budget(
        seconds=None if time is None else parse_time(time), memory=memory, products=products
    )
    with quiet_libraries():
        named = find_model(
            model, dtype=parse_dtype(dtype), device=device, seed=seed, weights=weights
        )
        found = find_data(
            data, named, samples=samples, batch_size=batch_size, context=context,
            tokenizer=tokenizer, loss=loss, seed=seed,
        )  # fmt: skip
        problem = ca.Problem(named.model, found.loss, found.batches)
        if roles:
            problem.anatomy.select(*roles)  # a wrong name is told before anything is computed
    options = {
        "command": "analyze", "model": model, "data": data, "loss": found.loss, "roles": roles,
        "weights": None if weights is None else str(weights), "samples": samples,
        "batch_size": batch_size, "context": context, "tokenizer": tokenizer,
        "eigenvalues": eigenvalues, "seed": seed, "dtype": str(problem.dtype), "device": device,
        "memory": memory, "products": products,
    }  # fmt: skip
    run = open_run(
        "analyze",
        output,
        options=options,
        model_fingerprint=fingerprints.of_model(named.model),
        data_fingerprint=fingerprints.of_data(
            (batch.inputs, batch.targets) for batch in problem.batches()
        ),
    )

    def work() -> None:
        console.say(f"curvatlas analyze {model} {data}, into {run.path}")
        Survey(
            run, problem, stage="model", effort=Effort(eigenvalues=eigenvalues, seed=seed),
            budget=budget, console=console, roles=roles,
        ).carry_out(name=named.name, data=found.name)  # fmt: skip

    carry_out(run, work, console)
