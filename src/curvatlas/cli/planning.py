"""The command ``plan``: what products with a model will take, before its weights are loaded."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvatlas.cli.options import Console, Inputs, Memory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from curvatlas.planning import LayeredModel

_DEVICE_MEMORY, _DEVICE_RATE, _DEVICE_LINK = "80GB", 60e12, 25e9


def plan(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As for analyze; of a Hugging Face folder only config.json is read.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA", help="As for analyze (default: tokens drawn at random, as --tokens)."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in all.")] = 2048,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Most samples of DATA.")] = 128,
    devices: Annotated[
        str | None,
        typer.Option(help="Numbers of devices to spread weights and vectors over, by commas."),
    ] = None,
    device_memory: Annotated[str, typer.Option(help="Memory of one device.")] = _DEVICE_MEMORY,
    device_rate: Annotated[
        float, typer.Option(help="Operations that one device does in a second.")
    ] = _DEVICE_RATE,
    device_link: Annotated[
        float, typer.Option(help="Bytes a second between devices.")
    ] = _DEVICE_LINK,
    memory: Memory = None,
    console: Console,
) -> None:
    """Say what products will take: time, memory, and which option makes them fit."""
    from curvatlas.budget import parse_bytes
    from curvatlas.cost_model import Device
    from curvatlas.planning import plan as make_plan

    device = None
    counts: list[int] = []
    if devices is not None:
        if not all(word.strip().isdigit() and int(word) > 0 for word in devices.split(",")):
            raise typer.BadParameter(f"--devices takes numbers by commas, got {devices!r}.")
        counts = sorted({int(word) for word in devices.split(",")})
        device = Device(
            operations_per_second=device_rate,
            memory=parse_bytes(device_memory),
            link_bytes_per_second=device_link,
        )
    found = make_plan(
        _with_data(model, data, samples) if data else _with_tokens(model, tokens, length),
        memory=memory,
        devices=counts,
        device=device,
    )
    console.answer(found.to_dict(), found)


def _with_data(model: str, data: str, samples: int) -> LayeredModel:
    """The user's model on the user's data."""
    from curvatlas.cli.inputs import prepare
    from curvatlas.planning import layered

    defaults: dict[str, Any] = {
        field.name: field.default for field in fields(Inputs) if field.name not in ("model", "data")
    }
    prepared = prepare(Inputs(model=model, data=data, **defaults), samples, keep_half=True)
    return layered(prepared.problem, name=prepared.model_name)


def _with_tokens(text: str, tokens: int, length: int) -> LayeredModel:
    """A language model on tokens drawn at random."""
    import torch

    from curvatlas.cli.inputs import ZOO_MODELS, find_model, is_reference, zoo_name
    from curvatlas.cli.pretrained import cached_folder, unloaded_model
    from curvatlas.planning import LayeredModel, layered
    from curvatlas.problem import Problem

    samples = max(tokens // length, 1)
    folder = Path(text) if Path(text).is_dir() else None
    if folder is None and not is_reference(text) and zoo_name(text, ZOO_MODELS) is None:
        folder = cached_folder(text)
    if folder is None or not (folder / "config.json").is_file():
        named = find_model(text, keep_half=True)
        drawn = _drawn(named.model, samples, length)
        how: Any = {"compute_dtype": named.compute_dtype}
        return layered(Problem(named.model, "cross_entropy", drawn, **how), name=named.name)
    whole, source = unloaded_model(folder), folder

    def of(layers: int, count: int) -> Problem:
        torch.manual_seed(0)
        model = unloaded_model(source, layers=layers)
        half = any(p.dtype.itemsize < 4 for p in model.parameters())
        ids = _drawn(model, count, length)[0]
        return Problem(
            model,
            "cross_entropy",
            {"input_ids": ids, "labels": ids},
            compute_dtype=torch.float32 if half else None,
        )

    return LayeredModel(
        name=folder.resolve().name,
        whole=whole,
        size=sum(p.numel() for p in whole.parameters()),
        samples=samples,
        batch=samples,
        tokens=length,
        of=of,
    )


def _drawn(model: nn.Module, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens (n, L) and those that follow them."""
    import torch
    from torch import nn

    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise ValueError(
            f"{type(model).__name__} has no table of tokens: name DATA for it, as for analyze."
        )
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, max(tables), (samples, length + 1), generator=random)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
