"""``curvatlas prune`` and ``quantize``: which layers, at what cost, predicted and measured."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvatlas.cli.options import Inputs, Memory, Output, PageConsole, Samples

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


class Shares(str, Enum):
    """How many weights every layer loses."""

    curvature = "curvature"
    uniform = "uniform"


class Rounding(str, Enum):
    """How weights are rounded."""

    nearest = "nearest"
    curvature = "curvature"


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
    ] = PruningMethod.obs,
    layers: Annotated[
        Shares, typer.Option(help="What each layer can spare, or the same share of every part.")
    ] = Shares.curvature,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Of obs: the curvature is taken anew for each.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also the other choice of --layers, side by side.")
    ] = False,
    by: By = Grouping.part,
    save: Save = None,
    samples: Samples = 256,
    memory: Memory = None,
    console: PageConsole,
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
    run = prepared.open_run(
        "prune",
        output,
        sparsity=sparsity,
        method=method.value,
        layers=layers.value,
        stages=stages,
        compare=compare,
        by=by.value,
    )

    def pruned(step: str, how: str, shares: str) -> Any:
        return run.step(
            step,
            lambda: choose(
                model,
                prepared.objective,
                prepared.batches,
                sparsity=sparsity,
                method=how,  # type: ignore[arg-type]
                layers=shares,  # type: ignore[arg-type]
                stages=stages,
                seed=inputs.seed,
                memory=memory,
                checkpoint=run.checkpoint_path(step),
            ),
        )

    def work() -> None:
        console.say(f"curvatlas prune {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        pruning = pruned("model.pruning", method.value, layers.value)
        console.say(pruning)
        if method is not PruningMethod.magnitude:
            console.say(pruned("magnitude.pruning", "magnitude", layers.value))
        if compare:
            other = Shares.uniform if layers is Shares.curvature else Shares.curvature
            console.say(f"layers by {other.value}:")
            console.say(pruned(f"{other.value}.pruning", method.value, other.value))
        table = run.step(
            "model.pruning_costs",
            lambda: pruning_costs(
                model,
                prepared.objective,
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
    groups: Annotated[
        str, typer.Option(help="Inputs that share a scale, by commas; row: all of an output's.")
    ] = "32,64,128,row",
    rounding: Annotated[
        Rounding | None,
        typer.Option(help="--save all weights rounded so, to the fewest bits and first group."),
    ] = None,
    by: By = Grouping.part,
    save: Save = None,
    samples: Samples = 256,
    memory: Memory = None,
    console: PageConsole,
) -> None:
    """Say what rounding costs by layer, role or head, and give out bits for a size."""
    from curvatlas.cli.execution import carry_out
    from curvatlas.cli.inputs import prepare
    from curvatlas.training.compression import (
        allocate_bits,
        quantization_table,
        quantize as round_all,
        rounding_costs,
    )

    try:
        choices = tuple(int(word) for word in bits.split(","))
    except ValueError:
        raise typer.BadParameter(f"--bits takes whole numbers by commas, got {bits!r}.") from None
    if min(choices) < 2 or average < min(choices):
        raise typer.BadParameter(
            f"--bits start at 2 and --average is at least the fewest of them, got {bits} and "
            f"{average:g}."
        )
    shared = _groups(groups)
    _check_place(save)
    prepared = prepare(inputs, samples)
    model: Any = prepared.problem.model
    run = prepared.open_run(
        "quantize",
        output,
        bits=list(choices),
        average=average,
        groups=[group or 0 for group in shared],
        by=by.value,
    )

    def work() -> None:
        console.say(f"curvatlas quantize {inputs.model} {inputs.data}, into {run.path}")
        console.say(run.step("model.subject", prepared.subject))
        console.say(
            run.step(
                "model.rounding_costs",
                lambda: rounding_costs(
                    model,
                    prepared.objective,
                    prepared.batches,
                    bits=choices,
                    by=by.value,
                ),
            )
        )
        console.say(
            run.step(
                "model.rounding",
                lambda: quantization_table(
                    model,
                    prepared.objective,
                    prepared.batches,
                    bits=choices,
                    groups=shared,
                    seed=inputs.seed,
                    memory=memory,
                ),
            )
        )
        allocation = run.step(
            "model.bits",
            lambda: allocate_bits(
                model, prepared.objective, prepared.batches, average=average, bits=choices
            ),
        )
        console.say(allocation)
        if save is not None:
            if rounding is None:
                allocation.apply(model)
            else:
                rounded = round_all(
                    model,
                    prepared.objective,
                    prepared.batches,
                    bits=min(choices),
                    group=shared[0],
                    rounding=rounding.value,
                    seed=inputs.seed,
                    memory=memory,
                )
                console.say(rounded)
                rounded.apply(model)
            _write_weights(model, save)
            console.say(f"weights: {save}")

    carry_out(run, work, console)


def _groups(text: str) -> tuple[int | None, ...]:
    try:
        found = tuple(None if word.strip() == "row" else int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if any(group is not None and group < 1 for group in found):
        raise typer.BadParameter(f"--groups takes whole numbers or row by commas, got {text!r}.")
    return found


def _check_place(save: Path | None) -> None:
    if save is not None and save.suffix != ".safetensors":
        raise typer.BadParameter(f"--save writes .safetensors files, got {save}.")


def _write_weights(model: nn.Module, path: Path) -> None:
    """Every weight once: tied ones under their first name."""
    from curvatlas import files

    files.write(path, {name: p.detach().contiguous() for name, p in model.named_parameters()}, {})
