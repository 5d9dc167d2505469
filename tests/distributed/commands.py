"""Commands that two ranks of one launcher run; started by torch.multiprocessing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cli_models import make_data, make_model
from curvatlas import cli


def arguments(model: str, data: str, output: Path) -> list[str]:
    return ["analyze", model, data, "--dtype", "float64", "--output", str(output)]


def every_case(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Run one command after the other; store exit code, out and err of each."""
    torch.set_num_threads(1)
    place = Path(folder)
    told: dict[str, Any] = {}
    if rank == 0:
        assert run(block(place / "alone"))["code"] == 0
        (place / "filled").mkdir()
        (place / "filled" / "something").touch()
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
    )  # fmt: skip
    shared = block(place / "shared")
    cases = {
        "analyze": shared,
        "again": [*shared, "--verbose"],
        "no such model": arguments("nothing", "cli_models:make_data", place / "no"),
        "a folder that is no run": block(place / "filled"),
        "another model on one rank": arguments(
            f"{__name__}:model_of_this_rank", "cli_models:make_data", place / "no"
        ),
        "no data on one rank": arguments(
            "cli_models:make_model", f"{__name__}:data_of_rank_0", place / "no"
        ),
        "another command": ["atlas", *shared[1:]],
        "no time left": [*block(place / "late"), "--time", "0.001"],
    }
    for number, (name, words) in enumerate(cases.items()):
        os.environ["MASTER_PORT"] = str(port + number)
        told[name] = run(words)
    (place / f"rank{rank}.json").write_text(json.dumps(told))


def block(output: Path) -> list[str]:
    return [
        *arguments("cli_models:make_block_model", "cli_models:make_tokens", output),
        *("--skip=density", "--skip=advice"),
    ]


def run(words: list[str]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["curvatlas", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(words)
        except SystemExit as end:
            code = end.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def model_of_this_rank() -> nn.Module:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).add_(int(os.environ["RANK"]))
    return model


def data_of_rank_0() -> list[tuple[Tensor, Tensor]]:
    if os.environ["RANK"] != "0":
        raise FileNotFoundError("there is no second.pt here")
    return make_data()
