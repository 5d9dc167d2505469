"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="DIR", show_default="curvatlas-runs/…",
        help="Folder of the run. The same command on the same folder resumes.",
    ),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print each step to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
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
        "--time", metavar="SPAN",
        help="Stop after this long, such as 90s, 5m or 1h; the same command then goes on.",
    ),
]  # fmt: skip
