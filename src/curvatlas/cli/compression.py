"""``curvatlas prune`` and ``quantize``: which layers, at what cost, predicted and measured."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvatlas.cli.options import Console, Inputs, Output, Samples

if TYPE_CHECKING:
    from torch import nn


class Grouping(str, Enum):
    """What a row of the table is."""

    part = "part"
    layer = "layer"
    role = "role"
    head = "head"


class PruningMethod(str, Enum):
    """How weights are chosen."""

    magnitude = "magnitude"
    obd = "obd"
    obs = "obs"


By = Annotated[Grouping, typer.Option(help="A row a part (role of a layer), layer, role or head.")]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the new weights (.safetensors), for --weights of any command."
    ),
]


def prune(
    *,
    inputs: Inputs,
    output: Output = None,
    sparsity: Annotated[float, typer.Option(help="Share of the weights that goes.")] = 0.5,
    method: Annotated[
        PruningMethod, typer.Option(help="By size, or by curvature: Brain Damage, Brain Surgeon.")
    ] = PruningMethod.obd,
    by: By = Grouping.part,
    save: Save = None,
    samples: Samples = 256,
    console: Console,
) -> None:
    """Say which layers, roles or heads can lose weights: the rise predicted and measured."""
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.training.compression import pruning_costs
    from curvatlas.training.pruning import prune as choose

    if not 0 <= sparsity < 1:
        raise typer.BadParameter(f"--sparsity is a share in [0, 1), got {sparsity}.")
    _check_place(save)
    prepared = prepare(inputs, samples)
    model: Any = prepared.problem.model
    run = prepared.open_run("prune", output, sparsity=sparsity, method=method.value, by=by.value)

    def work() -> None:
        console.say(f"curvatlas prune {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        pruning = run.step(
            "model.pruning",
            lambda: choose(
                model,
                prepared.loss,
                prepared.batches,
                sparsity=sparsity,
                method=method.value,
                seed=inputs.seed,
            ),
        )
        console.say(pruning)
        table = run.step(
            "model.pruning_costs",
            lambda: pruning_costs(
                model,
                prepared.loss,
                prepared.batches,
                pruning,
                by=by.value,
            ),
        )
        console.say(table)
        if save is not None:
            pruning.apply(model)
            _write_weights(model, save)
            console.say(f"weights: {save}")

    carry_out(run, work, console)


def quantize(
    *,
    inputs: Inputs,
    output: Output = None,
    bits: Annotated[str, typer.Option(help="Bits that are tried, by commas.")] = "8,6,4,3,2",
    average: Annotated[
        float, typer.Option(help="Bits a weight that the allocation may use.")
    ] = 4.0,
    by: By = Grouping.part,
    save: Save = None,
    samples: Samples = 256,
    console: Console,
) -> None:
    """Say what rounding costs by layer, role or head, and give out bits for a size."""
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.training.compression import allocate_bits, rounding_costs

    try:
        choices = tuple(int(word) for word in bits.split(","))
    except ValueError:
        raise typer.BadParameter(f"--bits takes whole numbers by commas, got {bits!r}.") from None
    if min(choices) < 2 or average < min(choices):
        raise typer.BadParameter(
            f"--bits start at 2 and --average is at least the fewest of them, got {bits} and "
            f"{average:g}."
        )
    _check_place(save)
    prepared = prepare(inputs, samples)
    model: Any = prepared.problem.model
    run = prepared.open_run("quantize", output, bits=list(choices), average=average, by=by.value)

    def work() -> None:
        console.say(f"curvatlas quantize {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        console.say(
            run.step(
                "model.rounding_costs",
                lambda: rounding_costs(
                    model,
                    prepared.loss,
                    prepared.batches,
                    bits=choices,
                    by=by.value,
                ),
            )
        )
        allocation = run.step(
            "model.bits",
            lambda: allocate_bits(
                model, prepared.loss, prepared.batches, average=average, bits=choices
            ),
        )
        console.say(allocation)
        if save is not None:
            allocation.apply(model)
            _write_weights(model, save)
            console.say(f"weights: {save}")

    carry_out(run, work, console)


def _check_place(save: Path | None) -> None:
    if save is not None and save.suffix != ".safetensors":
        raise typer.BadParameter(f"--save writes .safetensors files, got {save}.")


def _write_weights(model: nn.Module, path: Path) -> None:
    """Every weight once: tied ones under their first name."""
    from curvatlas import files

    files.write(path, {name: p.detach().contiguous() for name, p in model.named_parameters()}, {})
