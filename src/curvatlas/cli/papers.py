"""The papers' experiments on the user's model: ``growth`` with a scale, sinks, Gauss-Newton."""

from __future__ import annotations

from typing import Annotated

import typer

from curvatlas.cli.options import Console, Inputs, Memory, Output, Samples


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
    probes: Annotated[int, typer.Option(min=3, help="Products a block and factor.")] = 16,
    samples: Samples = 32,
    memory: Memory = None,
    console: Console,
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
    run = prepared.open_run(
        "growth", output, scale=scale, scales=factors, fit=window, roles=roles, probes=probes
    )

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
                probes=probes,
                seed=inputs.seed,
                budget=size,
                output=run,
            )
        )

    carry_out(run, work, console)
