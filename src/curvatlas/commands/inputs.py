"""MODEL and DATA of a command turned into a problem and the fingerprints of its run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import curvatlas as ca
from curvatlas import parallel
from curvatlas.commands.data import NamedData, find_data
from curvatlas.commands.execution import open_run
from curvatlas.commands.models import NamedModel, find_model, parse_dtype
from curvatlas.commands.processes import join
from curvatlas.runs import Run, fingerprints


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the user named, ready to be differentiated."""

    problem: Any
    model_name: str
    data_name: str
    options: dict[str, Any]  # everything that decides the numbers
    notes: tuple[str, ...] = ()  # kept with the run

    def open_run(self, command: str, output: Path | None, **more: Any) -> Run:
        """The run folder of this command on these inputs."""
        batches = ((batch.inputs, batch.targets) for batch in self.problem.all_batches())
        run = open_run(
            command,
            output,
            options={"command": command, **self.options, **more},
            model_fingerprint=fingerprints.of_model(self.problem.model),
            data_fingerprint=fingerprints.of_data(batches),
        )
        for note in self.notes:
            run.warn(f"model: {note}")
        return run


def prepare(
    model: str,
    data: str,
    *,
    loss: str,
    weights: Path | None,
    samples: int,
    batch_size: int,
    context: int,
    tokenizer: str | None,
    seed: int,
    dtype: str | None,
    device: str,
) -> Inputs:
    """Find the model and the data and put them together; processes of torchrun share them."""
    device = join(device)

    def find() -> tuple[NamedModel, NamedData]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries that load models
            named = find_model(
                model, dtype=parse_dtype(dtype), device=device, seed=seed, weights=weights
            )
            found = find_data(
                data, named, samples=samples, batch_size=batch_size, context=context,
                tokenizer=tokenizer, loss=loss, seed=seed,
            )  # fmt: skip
        return named, found

    named, found = parallel.together(find)
    problem = ca.Problem(named.model, found.loss, found.batches, shard=True)
    options = {
        "model": model, "data": data, "loss": found.loss,
        "weights": None if weights is None else str(weights), "samples": samples,
        "batch_size": batch_size, "context": context, "tokenizer": tokenizer, "seed": seed,
        "dtype": str(problem.dtype).removeprefix("torch."), "device": device,
    }  # fmt: skip
    return Inputs(
        problem=problem,
        model_name=named.name,
        data_name=found.name,
        options=options,
        notes=named.notes,
    )
