"""Options that several commands share, declared once."""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from curvatlas.budget import available_bytes, limit_bytes, parse_bytes, readable
from curvatlas.progress import set_progress

# -------------------------------------------------------------------------------------------------
# Budgets of a command: time, memory, products.
# -------------------------------------------------------------------------------------------------


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class TimeUp(KeyboardInterrupt):
    """The time budget is used up: ends a run as Ctrl-C does, resumable."""


class Interrupted(Exception):
    """Ctrl-C, with the words that say how to resume. (typer swallows KeyboardInterrupt.)"""


def parse_time(text: str) -> float:
    """``"90"``, ``"90s"``, ``"1.5m"`` or ``"2h"`` in seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|)\s*", text.lower())
    if match is None or not float(match[1]) > 0:
        raise ValueError(f"cannot read {text!r} as a time: write for example 90s, 5m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]


MOST_PRODUCTS = 300  # of one estimate, unless --products says otherwise
_MEMORY = 2 * 10**9  # of a survey, unless --memory says otherwise
_FIRST_USE = 90 * 10**6  # measured: what libraries load and keep when they are first used
_VECTORS = 60  # that a survey needs room for, however large the model


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one run may use; ``memory`` in bytes; None for the default."""

    seconds: float | None = None
    memory: int | None = None
    products: int | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def most_products(self) -> int:
        """For one estimate."""
        return self.products or MOST_PRODUCTS

    @property
    def told_products(self) -> int | str:
        """For the manifest. The map takes more than other estimates unless a number is asked."""
        return self.products or f"{MOST_PRODUCTS} by default"

    def check(self) -> None:
        """Raise ``TimeUp`` when the time is used up; of several processes by the first's clock."""
        if self.seconds is None:
            return
        from curvatlas import parallel

        if parallel.from_every_process(time.monotonic() - self.started > self.seconds)[0]:
            raise TimeUp(f"the time budget of {self.seconds:g} s is used up")

    def watch(self, operator: Any) -> Any:
        """Let every product of ``operator`` look at the clock first; returns the operator.

        An estimate that keeps a checkpoint is then stopped between two products and goes on there
        when the run is resumed, with the same numbers as if it had never stopped.
        """
        if self.seconds is not None:
            operator.before_product = self.check
        return operator


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a survey divides its memory: one operator and one estimate are at work at a time.

    Made of what was asked for or of fixed numbers, never of what is free: bases and pieces of
    batches, and with them the last digits of the results, are the same on a busy machine.
    """

    total: int

    @property
    def graphs(self) -> int:
        """For what an operator keeps and what its products allocate."""
        return self._divided * 40 // 100

    @property
    def vectors(self) -> int:
        """For the vectors of an estimate; the rest is left to the allocator's gaps."""
        return self._divided * 42 // 100

    @property
    def _divided(self) -> int:
        return self.total - min(_FIRST_USE, self.total // 3)


def memory_plan(asked: int | None, parameter_bytes: int) -> MemoryPlan:
    """The plan for what was asked; by default 2 GB, more for models that need more.

    The default stays below three quarters of what the process may use; less memory than that is
    free is said at once, not when it runs out.
    """
    from curvatlas import parallel

    total = asked
    if total is None:
        total = min(max(_MEMORY, _VECTORS * parameter_bytes), limit_bytes() * 3 // 4)
        total = parallel.smallest_over_processes(total)
    if total > available_bytes():
        warnings.warn(
            f"{readable(total)} are planned and {readable(available_bytes())} are free: if memory "
            "runs out, start again with a smaller --memory.",
            stacklevel=2,
        )
    return MemoryPlan(total=total)


def budget_of(
    *, time: str | None = None, memory: str | None = None, products: int | None = None
) -> Budget:
    """The budget that the options describe; ValueError when one cannot be read."""
    seconds = None if time is None else parse_time(time)
    return Budget(
        seconds=seconds,
        memory=None if memory is None else parse_bytes(memory),
        products=products,
    )


class LossName(str, Enum):
    """How the loss is chosen."""

    auto = "auto"
    cross_entropy = "cross_entropy"
    mse = "mse"
    bce_with_logits = "bce_with_logits"
    model = "model"


# --- what is analysed ---------------------------------------------------------------------------
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="pkg.module:make_model, a Hugging Face folder on disk, or vit, gpt, benchmark-gpt, "
        "mlp.",
    ),
]
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="pkg.module:make_data, an .npz or .safetensors file (inputs and targets), a text "
        "file, or digits, text, fashion-mnist, mnist.",
    ),
]
Loss = Annotated[
    LossName,
    typer.Option("--loss", help="auto decides by the targets; model takes the model's own."),
]
Weights = Annotated[
    Path | None, typer.Option(help="Load these weights (.safetensors) into the model.")
]
Samples = Annotated[int, typer.Option(min=1, help="Most samples to use.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples a batch.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens a window, for text.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="bytes, characters or a folder (default: the model's own, or bytes)."),
]
Dtype = Annotated[str | None, typer.Option(help="float32 or float64 (default: the model's).")]
Device = Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda:0.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every random draw.")]

# --- how much may be used -----------------------------------------------------------------------
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

# --- what is written and said -------------------------------------------------------------------
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Folder of the run (default: under curvatlas-runs). The same command resumes it.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print each step to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


# -------------------------------------------------------------------------------------------------
# What commands print: results on stdout, everything else on stderr, JSON when asked.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Console:
    """How talkative a command is. With ``as_json`` only one JSON document goes to stdout."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False

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

    def answer(self, value: Any, text: object) -> None:
        """What the command is for: JSON when asked, else the text, also when quiet."""
        if self.as_json:
            print(json.dumps(value, indent=1, default=str), flush=True)
        else:
            print(text, flush=True)
