"""``curvatlas landscape MODEL DATA``: local models of the loss, and how it settles with data."""

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
    Model,
    Output,
    Quiet,
    Samples,
    Seed,
    Time,
    Tokenizer,
    Verbose,
    Weights,
)


def landscape(
    model: Model,
    data: Data,
    output: Output = None,
    accuracy: Annotated[
        float, typer.Option(help="Of the quadratic model, for its radius (relative).")
    ] = 0.01,
    steps: Annotated[
        int, typer.Option(min=2, help="Steps of gradient descent predicted and run.")
    ] = 30,
    orders: Annotated[int, typer.Option(min=5, help="Random orders of the samples.")] = 40,
    spectra: Annotated[
        int, typer.Option(min=0, help="Numbers of samples whose spectra are compared.")
    ] = 3,
    loss: Loss = LossName.auto,
    weights: Weights = None,
    samples: Samples = 256,
    batch_size: BatchSize = 128,
    context: Context = 64,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    time: Time = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Expand the loss to third order, check its quadratic model, follow it as samples are added."""
    from collections.abc import Callable
    from typing import TypeVar

    from curvatlas.analysis.conditioning import effective_conditioning
    from curvatlas.analysis.landscape.convergence import landscape_convergence
    from curvatlas.analysis.landscape.taylor import TaylorExpansionAnalyzer
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.cli.options import Console, budget_of
    from curvatlas.operators.per_sample import count_samples
    from curvatlas.results import Result
    from curvatlas.runs.subject import subject_of

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    budget = budget_of(time=time)
    if not 0 < accuracy < 1:
        raise typer.BadParameter(f"--accuracy lies between 0 and 1, got {accuracy}.")
    inputs = prepare(
        model, data, loss=loss.value, weights=weights, samples=samples, batch_size=batch_size,
        context=context, tokenizer=tokenizer, seed=seed, dtype=dtype, device=device,
    )  # fmt: skip
    run = inputs.open_run(
        "landscape", output, accuracy=accuracy, steps=steps, orders=orders, spectra=spectra
    )
    problem = inputs.problem
    analyzer = TaylorExpansionAnalyzer.from_problem(problem)

    Found = TypeVar("Found", bound=Result)

    def step(name: str, function: Callable[[], Found]) -> Found:
        budget.check()
        found = run.step(f"landscape.{name}", function)
        console.say(found)
        return found

    def work() -> None:
        console.say(f"curvatlas landscape {model} {data}, into {run.path}")
        named, given = inputs.model_name, inputs.data_name
        console.say(run.step("model.subject", lambda: subject_of(problem, name=named, data=given)))
        step("radius", lambda: analyzer.radius(accuracy=accuracy))
        rate = step("rate", lambda: analyzer.critical_learning_rate(seed=seed)).value / 2
        step(
            "taylor",
            lambda: analyzer.compute_taylor_coefficients(
                displacement=-rate * problem.gradient(), accuracy=accuracy
            ),
        )
        step("trajectory", lambda: analyzer.predict_convergence_trajectory(steps, rate))
        step(
            "conditioning",
            lambda: effective_conditioning(
                problem, learning_rate=rate, products=80, layers=True, seed=seed
            ),
        )
        if count_samples(problem) >= 20:
            step(
                "convergence",
                lambda: landscape_convergence(problem, orders=orders, spectra=spectra, seed=seed),
            )
        else:
            run.warn("fewer than 20 samples: convergence with their number was left out")

    carry_out(run, work, console)
