"""Options that several commands share, declared once, and what commands print.

A command takes a group of options (``Console``, ``Inputs``) as one keyword argument;
``with_groups`` shows typer the fields of the group as options of the command.
"""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from curvatlas.progress import set_progress


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each keyword that is a dataclass replaced by the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: hint for n, hint in hints.items() if is_dataclass(hint)}
    options: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name in groups:
            options += _fields_as_options(groups[parameter.name])
        else:
            options.append(parameter.replace(annotation=hints[parameter.name]))

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    del expanded.__wrapped__  # typer would read the signature of the command itself
    expanded.__signature__ = Signature(options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    return expanded


def _fields_as_options(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


@dataclass(frozen=True, kw_only=True)
class Console:
    """How talkative a command is. With ``as_json`` only one JSON document goes to stdout."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = (
        False
    )
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the answer (of a run: its verdict).")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print each step to stderr.")] = (
        False
    )
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ValueError("--quiet and --verbose exclude each other: give one of them.")
        set_progress(not self.quiet)

    def say(self, text: object) -> None:
        """What a person wants to see."""
        if not self.quiet and not self.as_json:
            print(text, flush=True)

    def detail(self, text: object) -> None:
        """What only a curious person wants to see."""
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    def follow(self, text: object) -> None:
        """How far a survey is ("step 5 of 14 …") for all, its other details for the curious."""
        (self.say if str(text).startswith("step ") else self.detail)(text)

    def answer(self, value: Any, text: object) -> None:
        """What the command is for: JSON when asked, else the text, also when quiet."""
        if self.as_json:
            print(json.dumps(value, indent=1, default=str), flush=True)
        else:
            print(text, flush=True)


@dataclass(frozen=True, kw_only=True)
class PageConsole(Console):
    """Of a command that ends with a page: its findings are the last that is printed."""

    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False

    def end(self, value: Any, findings: str, page: Path) -> None:
        """The findings and where the page is; only the verdict when quiet."""
        verdict = findings.partition("\n")[0]
        told = [verdict] if self.quiet and verdict else [findings, f"report: {page}"]
        self.answer(value, "\n".join(line for line in told if line))
        self.show(page)

    def show(self, page: Path) -> None:
        """Open the page where that was asked for."""
        if self.open_page:
            webbrowser.open(page.resolve().as_uri())


LOSSES = ("auto", "cross_entropy", "mse", "bce_with_logits", "model")


def _loss(text: str) -> str:
    """A loss by name, or a reference to one, as it was typed."""
    if text not in LOSSES and ":" not in text:
        raise typer.BadParameter(
            f"{text!r} is none of {', '.join(LOSSES)}, nor mine.py:loss or pkg.module:loss."
        )
    return text


LossOption = Annotated[
    str,
    typer.Option(
        metavar="LOSS",
        callback=_loss,
        help="auto (by the targets, or the loss that the model returns), cross_entropy, mse, "
        "bce_with_logits, model (the model's own), or mine.py:loss, a function "
        "(outputs, targets) -> mean loss or a loss module.",
    ),
]


class BrokenImages(str, Enum):
    """What becomes of files that cannot be read."""

    refuse = "refuse"
    skip = "skip"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is analysed, as the user named it; ``cli.inputs.prepare`` makes a problem of it."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="mine.py:make_model or pkg.module:make_model, a Hugging Face folder or PEFT "
            "adapter on disk, a name of the local Hugging Face cache, or vit, cifar-vit, gpt, "
            "benchmark-gpt, mlp.",
        ),
    ]
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="mine.py:make_data or pkg.module:make_data (batches or a torch dataset), an .npz "
            "or .safetensors file (inputs and targets), a table of texts and labels (.csv, .tsv, "
            ".jsonl or a folder of datasets), a text file, a folder of images (one folder a "
            "class), of CIFAR's binary version or of IDX files, or digits, text, fashion-mnist, "
            "mnist, cifar-10, cifar-100.",
        ),
    ]
    loss: LossOption = "auto"
    weights: Annotated[
        Path | None, typer.Option(help="Load these weights (.safetensors) into the model.")
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a batch.")] = 128
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a window, for text (default: 64, or the positions)."),
    ] = None
    text_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the texts, for a table.")
    ] = None
    label_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the labels, for a table.")
    ] = None
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="Scale and cut images of a folder to so many pixels a side."),
    ] = None
    broken: Annotated[
        BrokenImages, typer.Option(help="Images of a folder that cannot be read: refuse or skip.")
    ] = BrokenImages.refuse
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, characters or a folder (default: the model's own, or bytes)."),
    ] = None
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB=ROLE",
            help="What parameters are, where names do not say it: '*.net.1.weight=up'; repeatable.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Compute in float32 or float64 (default: the model's; float32 for weights in "
            "bfloat16 or float16, which stay as they are)."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda:0.")] = "cpu"


Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Folder of the run (default: under curvatlas-runs). The same command resumes it.",
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Most samples to use.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every random draw.")]
Products = Annotated[
    int | None,
    typer.Option("--products", min=1, help="Most matrix-vector products for one estimate."),
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory budget, such as 2GB.")
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="SPAN",
        help="Stop after this long, such as 90s, 5m or 1h; the same command then goes on.",
    ),
]


def whole_numbers(text: str, option: str) -> list[int]:
    """Numbers by commas, in order, each once."""
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 2:
        raise typer.BadParameter(f"{option} takes numbers of at least 2 by commas, got {text!r}.")
    return numbers
