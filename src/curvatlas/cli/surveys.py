"""Commands that measure a model's curvature: ``demo``, ``analyze``, ``atlas``, ``landscape``."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from curvatlas.cli.options import (
    Inputs,
    Memory,
    Output,
    PageConsole,
    Products,
    Samples,
    Seed,
    Time,
    whole_numbers,
)

if TYPE_CHECKING:
    from curvatlas.results import Result
    from curvatlas.runs.subject import TrainedWeights

R = TypeVar("R", bound="Result")
_DEMO_RATE = 5e-3  # of AdamW, for the reference ViT
_DEMO_BATCHES = 8


class Part(str, Enum):
    """What can be left out of the survey."""

    trace = "trace"
    map = "map"
    propagation = "propagation"
    density = "density"
    advice = "advice"


def demo(
    *,
    output: Output = None,
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 800,
    samples: Annotated[int, typer.Option(min=2, help="Digits the curvature is measured on.")] = 128,
    time: Time = None,
    console: PageConsole,
) -> None:
    """Train a small ViT on digits and show its curvature before and after."""
    import torch

    from curvatlas import zoo
    from curvatlas.budget import Clock, one_thread
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.problem import Problem
    from curvatlas.runs.subject import of_data, of_model, weights_of
    from curvatlas.surveying import survey

    def look(stage: str) -> None:
        survey(
            Problem(model, "cross_entropy", batches),
            output=run,
            stage=stage,
            optimizer="adamw",
            learning_rate=_DEMO_RATE,
            held_out=tuple(held_out),
            time=clock,
            seed=seed,
            name="reference ViT",
            data=f"{batch.size} digits of 8 × 8 pixels",
            say=console.say,
            detail=console.follow,
        )

    def training() -> TrainedWeights:
        model.float()  # training needs no more than float32; curvature is measured in float64
        history = zoo.train(model, data, steps=steps, lr=_DEMO_RATE, seed=seed)
        return weights_of(model, history)

    def work() -> None:
        console.say(f"curvatlas demo: a small ViT on digits, into {run.path}")
        look("initial")
        clock.check()
        trained = run.step("training", training)
        console.say(f"training: {trained}")
        trained.load_into(model)
        model.double().eval()
        look("trained")

    with one_thread():
        clock = Clock(time)
        model, data = zoo.reference_vit(seed=seed).double().eval(), zoo.digits()
        batch = data.train.take(samples).to(torch.float64)
        held_out = data.validation.take(samples).to(torch.float64)
        # several batches, so that it shows how far other samples would move a number
        batches = [tuple(part) for part in batch.batches(-(-batch.size // _DEMO_BATCHES))]
        run = open_run(
            output,
            {"command": "demo", "seed": seed, "steps": steps, "samples": samples},
            model_fingerprint=of_model(model),
            data_fingerprint=of_data(tuple(batch)),
        )
        carry_out(run, work, console)


def analyze(
    *,
    inputs: Inputs,
    output: Output = None,
    roles: Annotated[
        list[str] | None,
        typer.Option("--roles", help="Only these parameters: names, roles or globs; repeatable."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most samples to use (default: 512, fewer where a product takes long)."
        ),
    ] = None,
    eigenvalues: Annotated[int, typer.Option(min=1, help="Eigenvalues at each end.")] = 5,
    skip: Annotated[
        list[Part] | None, typer.Option("--skip", help="Leave this out; repeatable.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="What it is trained with, such as sgd or adamw: advice depends on it."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the training.")] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            "--held-out",
            metavar="DATA",
            help="Data it was not trained on: advice is tried on them, too (default: the other "
            "part of data that come split; none of others).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it will take: steps, time, memory.")
    ] = False,
    time: Time = None,
    memory: Memory = None,
    products: Products = None,
    console: PageConsole,
) -> None:
    """Measure the curvature of your model: spectrum, traces, map over roles, densities."""
    from curvatlas.analysis.diagnostics import Situation
    from curvatlas.budget import Clock, parse_bytes
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.surveying import SKIPPABLE, chosen_slices, effort, plan_survey, survey

    Situation(optimizer=optimizer, learning_rate=lr).checked()  # a wrong name is told at once
    clock, size = Clock(time), None if memory is None else parse_bytes(memory)
    prepared = prepare(inputs, samples, keep_half=True)
    if roles:
        chosen_slices(prepared.problem.anatomy, roles)  # a wrong name makes no folder
    left_out = [part for part in sorted(SKIPPABLE) if Part(part) in (skip or ())]
    if dry_run:
        plan = plan_survey(
            prepared.problem,
            roles=roles,
            skip=left_out,
            eigenvalues=eigenvalues,
            products=products,
            memory=size,
        )
        console.answer(plan.to_dict(), f"{prepared.model_name} on {prepared.data_name}: {plan}")
        return
    others = prepared.held_out
    if held_out is not None:
        others = prepared.test_data(held_out, prepared.options["samples"])
    advised = {"optimizer": optimizer, "learning_rate": lr, "held_out": held_out}
    run = prepared.open_run(
        "analyze",
        output,
        roles=roles,
        eigenvalues=eigenvalues,
        skip=left_out,
        **{key: value for key, value in advised.items() if value is not None},
        effort=effort(memory=size, products=products, time=time),
    )

    def work() -> None:
        console.say(f"curvatlas analyze {inputs.model} {inputs.data}, into {run.path}")
        survey(
            prepared.problem,
            output=run,
            roles=roles,
            skip=left_out,
            eigenvalues=eigenvalues,
            products=products,
            optimizer=optimizer,
            learning_rate=lr,
            held_out=others,
            memory=size,
            time=clock,
            seed=inputs.seed,
            name=prepared.model_name,
            data=prepared.data_name,
            basis=prepared.basis,
            say=console.say,
            detail=console.follow,
        )

    carry_out(run, work, console)


def atlas(
    *,
    inputs: Inputs,
    output: Output = None,
    heads: Annotated[bool, typer.Option("--heads", help="One block a head.")] = False,
    biases: Annotated[
        bool, typer.Option("--biases", help="Biases as blocks of their own.")
    ] = False,
    rtol: Annotated[float, typer.Option(help="Relative error of the entries to reach.")] = 0.05,
    exact: Annotated[bool, typer.Option("--exact", help="Dense, exact (small models).")] = False,
    samples: Samples = 512,
    memory: Memory = None,
    products: Products = None,
    console: PageConsole,
) -> None:
    """Map the curvature of H, H_o and H_f over every pair of roles and layers."""
    from curvatlas.analysis.atlas.mapping import atlas as make_atlas
    from curvatlas.budget import parse_bytes
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare

    size = None if memory is None else parse_bytes(memory)
    if not rtol > 0:
        raise typer.BadParameter(f"--rtol must be positive, got {rtol}.")
    prepared = prepare(inputs, samples, keep_half=True)
    run = prepared.open_run(
        "atlas",
        output,
        heads=heads,
        biases=biases,
        rtol=rtol,
        exact=exact,
        effort={"memory": size, "products": products or "default"},
    )

    def work() -> None:
        console.say(f"curvatlas atlas {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        console.say(
            run.step(
                "model.atlas",
                lambda: make_atlas(
                    prepared.problem,
                    heads=heads,
                    biases=biases,
                    rtol=rtol,
                    products=products,
                    seed=inputs.seed,
                    method="dense" if exact else "auto",
                    budget=size,
                ),
                spends=("products",),
            )
        )

    carry_out(run, work, console)


def landscape(
    *,
    inputs: Inputs,
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
    loss_only: Annotated[
        bool,
        typer.Option(
            "--loss-only", help="Only how the loss settles, by forward passes: for 10⁵ samples."
        ),
    ] = False,
    retrain: Annotated[
        bool,
        typer.Option("--retrain", help="Also train again for every number of samples (minutes)."),
    ] = False,
    optimizers: Annotated[
        str, typer.Option(help="For --retrain: of sgd, adam, rmsprop, nadam, adagrad, by commas.")
    ] = "sgd,adam,rmsprop",
    schedules: Annotated[
        str, typer.Option(help="For --retrain: of cosine, constant, by commas.")
    ] = "cosine,constant",
    sizes: Annotated[
        str | None,
        typer.Option(help="For --retrain: numbers of samples by commas (default: 5, to half)."),
    ] = None,
    train_orders: Annotated[
        int, typer.Option(min=3, help="For --retrain: random orders, each trained anew.")
    ] = 4,
    train_steps: Annotated[
        int, typer.Option(min=1, help="For --retrain: steps of each training.")
    ] = 300,
    polish: Annotated[
        int, typer.Option(min=0, help="For --retrain: most iterations of L-BFGS to the minimum.")
    ] = 500,
    penalty: Annotated[
        float, typer.Option(min=0.0, help="For --retrain: μ of μ‖w − w₀‖²/2 in the loss.")
    ] = 1e-2,
    samples: Samples = 256,
    time: Time = None,
    console: PageConsole,
) -> None:
    """Expand the loss to third order, check its quadratic model, follow it as samples are added."""
    from curvatlas.analysis.conditioning import effective_conditioning
    from curvatlas.analysis.landscape.convergence import landscape_convergence
    from curvatlas.analysis.landscape.taylor import (
        critical_rate,
        predict_trajectory,
        taylor_expansion,
        trust_radius,
    )
    from curvatlas.budget import Clock
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.operators.per_sample import count_samples
    from curvatlas.studies.retraining import (
        check_schedules,
        optimizers_of,
        plan_sizes,
        retrained_convergence,
    )

    clock, seed = Clock(time), inputs.seed
    if not 0 < accuracy < 1:
        raise typer.BadParameter(f"--accuracy lies between 0 and 1, got {accuracy}.")
    how: dict[str, Any] = {
        "optimizers": optimizers.split(","),
        "schedules": schedules.split(","),
        "sizes": None if sizes is None else whole_numbers(sizes, "--sizes"),
        "orders": train_orders,
        "steps": train_steps,
        "polish": polish,
        "penalty": penalty,
    }
    prepared = prepare(inputs, samples)
    problem = prepared.problem
    if retrain:  # wrong words make no folder
        optimizers_of(how["optimizers"], {})
        check_schedules(how["schedules"])
        plan_sizes(how["sizes"], count_samples(problem))
    run = prepared.open_run(
        "landscape",
        output,
        accuracy=accuracy,
        steps=steps,
        orders=orders,
        spectra=spectra,
        **({"loss_only": True} if loss_only else {}),
        **({"retrain": how} if retrain else {}),
    )

    def step(name: str, function: Callable[[], R]) -> R:
        clock.check()
        result = run.step(f"landscape.{name}", function)
        console.say(result)
        return result

    def expansion() -> None:
        step("radius", lambda: trust_radius(problem, accuracy=accuracy))
        rate = step("rate", lambda: critical_rate(problem, seed=seed)).value / 2
        step(
            "taylor",
            lambda: taylor_expansion(problem, -rate * problem.gradient(), accuracy=accuracy),
        )
        step("trajectory", lambda: predict_trajectory(problem, steps, rate))
        step(
            "conditioning",
            lambda: effective_conditioning(
                problem, learning_rate=rate, products=80, layers=True, seed=seed
            ),
        )

    def work() -> None:
        console.say(f"curvatlas landscape {inputs.model} {inputs.data}, into {run.path}")
        if not loss_only:
            console.say(run.step("model.subject", prepared.subject))
            expansion()
        if loss_only or count_samples(problem) >= 20:
            step(
                "convergence",
                lambda: landscape_convergence(
                    problem, orders=orders, spectra=spectra, curvature=not loss_only, seed=seed
                ),
            )
        else:
            run.warn("fewer than 20 samples: convergence with their number was left out")
        if retrain:
            console.say(retrained_convergence(problem, seed=seed, output=run, **how))

    carry_out(run, work, console)
