"""MODEL and DATA of a command turned into a problem and the fingerprints of its run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import curvatlas as ca
from curvatlas import parallel
from curvatlas.commands.data import NamedData, find_data
from curvatlas.commands.execution import open_run
from curvatlas.commands.models import NamedModel, find_model, parse_dtype
from curvatlas.commands.processes import join
from curvatlas.runs import Run, fingerprints

MOST_SAMPLES = 512
_FEWEST_SAMPLES = 8
_FORWARD = 2**31


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
    samples: int | None,
    batch_size: int,
    context: int,
    tokenizer: str | None,
    seed: int,
    dtype: str | None,
    device: str,
) -> Inputs:
    """Find the model and the data and put them together; processes of torchrun share them.

    samples: None takes 512, or as many as keep two thousand products a matter of minutes.
    """
    device = join(device)
    count, size = samples or MOST_SAMPLES, batch_size

    def find() -> tuple[NamedModel, NamedData]:
        nonlocal count, size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries that load models
            named = find_model(
                model, dtype=parse_dtype(dtype), device=device, seed=seed, weights=weights
            )
            how: Any = {"context": context, "tokenizer": tokenizer, "loss": loss, "seed": seed}
            if samples is None:
                # On one sample: a large batch would take the memory that a small budget saves.
                one = find_data(data, named, samples=1, batch_size=1, **how)
                count = affordable_samples(named.model, one, most=MOST_SAMPLES)
            if samples is None and count < MOST_SAMPLES:
                size = min(batch_size, max(count // 4, 1))  # batches show how much data scatter
            found = find_data(data, named, samples=count, batch_size=size, **how)
        return named, found

    named, found = parallel.together(find)
    problem = ca.Problem(named.model, found.loss, found.batches, shard=True)
    options = {
        "model": model, "data": data, "loss": found.loss,
        "weights": None if weights is None else str(weights), "samples": count,
        "batch_size": size, "context": context, "tokenizer": tokenizer, "seed": seed,
        "dtype": str(problem.dtype).removeprefix("torch."), "device": device,
    }  # fmt: skip
    return Inputs(
        problem=problem,
        model_name=named.name,
        data_name=found.name,
        options=options,
        notes=named.notes,
    )


def affordable_samples(model: Any, data: NamedData, *, most: int) -> int:
    """How many samples take 2³¹ operations in a forward pass, a fixed number on every machine.

    A product with the Hessian is six of them: a survey of 2500 products then takes 3·10¹³
    operations, minutes on two cores.
    """
    from torch.utils.flop_counter import FlopCounterMode

    problem = ca.Problem(model, data.loss, data.batches, distributed=False)
    if not problem.loss.additive:
        return most
    sample = next(problem.batches()).part(0, 1, problem.loss.count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        problem.with_batches([sample]).value()
    operations = max(int(counter.get_total_flops()), 1)
    return max(min(_FORWARD // operations, most), _FEWEST_SAMPLES)
