"""``paper`` makes the papers' figures and claims again; their experiments on the user's model:
``growth`` with a scale, ``sinks``, ``gauss-newton``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvatlas.cli.options import Inputs, LossOption, Memory, Output, PageConsole, Samples, Seed

if TYPE_CHECKING:
    from curvatlas.cli.inputs import Prepared
    from curvatlas.problem import Problem
    from curvatlas.runs import Run
    from curvatlas.studies.papers.exhibits import Ask, Exhibit


def paper(
    *,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="list | all | ID...",
            help="Ids of figures, tables and claims as 'list' shows them; all of them with 'all'.",
        ),
    ],
    full: Annotated[
        bool, typer.Option("--full", help="At the paper's own size, which may take hours.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A model of yours, with --data its data."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="The data of --model; without it a folder with MNIST's IDX files, CIFAR's binary "
            "files or its PNG sheets.",
        ),
    ] = None,
    loss: LossOption = "auto",
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB=ROLE", help="What parameters of --model are; repeatable."),
    ] = None,
    samples: Samples = 64,
    output: Output = None,
    seed: Seed = 0,
    console: PageConsole,
) -> None:
    """Make the figures, tables and claims of the papers again: our number beside theirs, a verdict.

    'paper list' shows what there is. An interrupted 'paper all' goes on where it was.
    """
    from curvatlas.cli.execution import carry_out, open_run
    from curvatlas.studies.papers.exhibits import Ask, all_exhibits, named, paper as papers

    if names == ["list"]:
        table = papers.list()
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        console.answer(rows, table)
        return
    everything = names == ["all"]
    chosen = list(all_exhibits().values()) if everything else [e for n in names for e in named(n)]
    prepared = None
    if model is not None:
        from curvatlas.cli.inputs import prepare

        if data is None:
            raise typer.BadParameter("--model needs its data: give --data DATA.")
        inputs = Inputs(model=model, data=data, loss=loss, role=role, seed=seed)
        prepared = prepare(inputs, samples)
    ask = Ask(
        full=full,
        seed=seed,
        problem=None if prepared is None else prepared.problem,
        data=None if data is None or prepared is not None else Path(data),
    )
    if everything and prepared is not None:
        chosen = [one for one in chosen if "model" in one.takes]
    if not everything:
        for one in chosen:
            one.check(ask)
    options = {"names": names, "full": full, "seed": seed}
    if prepared is None:
        options |= {} if data is None else {"data": data}
        run = open_run(output, {"command": "paper", **options})
    else:
        run = prepared.open_run("paper", output, **options)

    def work() -> None:
        for one in chosen:
            console.follow(f"step {one.id}: {one.shows}")
            _reproduce(one, ask, run, console, alone=not everything)

    carry_out(run, work, console)


def _reproduce(one: Exhibit, ask: Ask, run: Run, console: PageConsole, *, alone: bool) -> None:
    """One of them; of many, one that fails leaves the others to be made."""
    from curvatlas.errors import OutOfMemory
    from curvatlas.studies.papers.exhibits import reproduced

    try:
        console.say(reproduced(one, one.served(ask, run.step)))
    except (ArithmeticError, LookupError, OutOfMemory, RuntimeError, ValueError, OSError) as error:
        if alone:
            raise
        run.fail(f"paper.{one.id}", " ".join(str(error).split()))


def _numbers(text: str | None, option: str) -> list[float] | None:
    """Positive numbers by commas; None where nothing was said."""
    if text is None:
        return None
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers by commas, got {text!r}.") from None


def growth(
    *,
    inputs: Inputs,
    output: Output = None,
    scale: Annotated[
        str,
        typer.Option(help="embeddings, query_key, or a role, name or glob such as value."),
    ] = "embeddings",
    scales: Annotated[
        str | None, typer.Option(help="Factors by commas (default: 0.01 to 3.16).")
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(help="LOW,HIGH: the factors whose exponents are fitted (default: 0.01,0.1)."),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option("--roles", help="Only these blocks: roles, names or globs; repeatable."),
    ] = None,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Also the blocks of two roles of one layer.")
    ] = False,
    probes: Annotated[int, typer.Option(min=3, help="Products a block and factor.")] = 16,
    samples: Samples = 32,
    memory: Memory = None,
    console: PageConsole,
) -> None:
    """Scale activations or weights and fit how H, H_o and H_f grow, by role and layer."""
    from curvatlas.budget import parse_bytes
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.studies.growth import Scaler, growth as measure, plan

    window = _numbers(fit, "--fit")
    if window is not None and len(window) != 2:
        raise typer.BadParameter(f"--fit takes LOW,HIGH, got {fit!r}.")
    factors = _numbers(scales, "--scales")
    between = None if window is None else (window[0], window[1])
    plan(factors, between)  # wrong numbers make no folder
    size = None if memory is None else parse_bytes(memory)
    prepared = prepare(inputs, samples)
    Scaler(prepared.problem, scale)  # nor does a part that the model does not have
    asked = {"scale": scale, "scales": factors, "fit": window, "roles": roles, "probes": probes}
    run = prepared.open_run("growth", output, **asked, **({"mixed": True} if mixed else {}))

    def work() -> None:
        console.say(f"curvatlas growth {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        console.say(
            measure(
                prepared.problem,
                scale=scale,
                scales=factors,
                fit=between,
                roles=roles,
                mixed=mixed,
                probes=probes,
                seed=inputs.seed,
                budget=size,
                output=run,
            )
        )

    carry_out(run, work, console)


def _at_seeds(inputs: Inputs, prepared: Prepared, seeds: int | None) -> Callable[[int], Problem]:
    """seed → the problem for a model that is made anew; the first one is there already."""
    from curvatlas.cli.inputs import find_model, parse_dtype

    if seeds is not None and (inputs.weights is not None or Path(inputs.model).is_dir()):
        raise ValueError(
            "--seeds makes the model anew from each seed, stored weights are one model: leave "
            "--seeds out, or name a factory (pkg.module:make_model)."
        )
    if seeds == 1:
        raise ValueError("an interval over seeds needs at least 2 seeds, got 1.")

    def problem(seed: int) -> Problem:
        if seed == inputs.seed:
            return prepared.problem
        dtype, device = parse_dtype(inputs.dtype), inputs.device
        model = find_model(inputs.model, dtype=dtype, device=device, seed=seed)
        return prepared.problem.with_model(model.model)

    return problem


Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="Make the model anew from so many seeds, and give a verdict."),
]


def sinks(
    *,
    inputs: Inputs,
    output: Output = None,
    levels: Annotated[
        str, typer.Option(help="Biases on the first token's logits, by commas.")
    ] = "0,1,2,4,8",
    seeds: Seeds = None,
    products: Annotated[
        int | None, typer.Option(min=30, help="Products for each spectrum (default: 300, or all).")
    ] = None,
    probes: Annotated[int, typer.Option(min=3, help="Products for each block's norm.")] = 16,
    samples: Samples = 32,
    memory: Memory = None,
    console: PageConsole,
) -> None:
    """Draw attention to the first token: spectra and norms along the sink, heads by sink mass."""
    from curvatlas.budget import parse_bytes
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.studies.sinks import attention_paths, sinks as measure, sinks_over_seeds

    strengths = _numbers(levels, "--levels") or []
    if len(set(strengths)) < 2:
        raise typer.BadParameter(f"--levels takes 2 or more biases, got {levels!r}.")
    size = None if memory is None else parse_bytes(memory)
    prepared = prepare(inputs, samples)
    attention_paths(prepared.problem)  # a model without attention makes no folder
    make = _at_seeds(inputs, prepared, seeds)
    run = prepared.open_run(
        "sinks", output, levels=strengths, seeds=seeds, products=products, probes=probes
    )

    def work() -> None:
        console.say(f"curvatlas sinks {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        how: Any = {"levels": strengths, "products": products, "probes": probes, "budget": size}
        if seeds is None:
            console.say(measure(prepared.problem, seed=inputs.seed, output=run, **how))
            return
        chosen = range(inputs.seed, inputs.seed + seeds)
        console.say(sinks_over_seeds(make, seeds=chosen, output=run, **how))

    carry_out(run, work, console)


def gauss_newton(
    *,
    inputs: Inputs,
    output: Output = None,
    damping: Annotated[
        float, typer.Option(help="δ / ‖A‖ of the condition numbers, in (0, 1).")
    ] = 1e-3,
    probes: Annotated[
        int, typer.Option(min=3, help="Random vectors for models of more than 2048 parameters.")
    ] = 24,
    against_mlp: Annotated[
        bool, typer.Option("--against-mlp", help="Compare with an MLP of equal size, over seeds.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of that comparison.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of both in it.")] = 200,
    train_samples: Annotated[
        int, typer.Option(min=2, help="Samples that both are trained on in it.")
    ] = 1024,
    samples: Samples = 64,
    memory: Memory = None,
    console: PageConsole,
) -> None:
    """Measure what Gauss-Newton, KFAC, EKFAC and Adam miss of the Hessian, by role."""
    if not 0 < damping < 1:
        raise typer.BadParameter(f"--damping lies between 0 and 1, got {damping:g}.")
    from curvatlas.budget import parse_bytes
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.studies.gauss_newton import (
        compare_gauss_newton,
        gauss_newton_quality,
        matched_inputs,
    )

    size = None if memory is None else parse_bytes(memory)
    prepared = prepare(inputs, train_samples if against_mlp else samples)
    make = _at_seeds(inputs, prepared, seeds if against_mlp else None)
    batches = list(prepared.problem.batches())
    data = matched_inputs(batches) if against_mlp else None
    compared = {"seeds": seeds, "steps": steps, "curvature_samples": samples}
    run = prepared.open_run(
        "gauss-newton",
        output,
        damping=damping,
        probes=probes,
        **(compared if against_mlp else {}),
    )

    def work() -> None:
        console.say(f"curvatlas gauss-newton {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        if data is None:
            how: Any = {"damping": damping, "probes": probes, "seed": inputs.seed}
            console.say(gauss_newton_quality(prepared.problem, budget=size, output=run, **how))
            return
        console.say(
            compare_gauss_newton(
                lambda seed: copy.deepcopy(make(seed).model),  # each is trained
                data,
                seeds=range(inputs.seed, inputs.seed + seeds),
                steps=steps,
                samples=samples,
                damping=damping,
                output=run,
            )
        )

    carry_out(run, work, console)
