"""Options that several commands share, declared once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


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
