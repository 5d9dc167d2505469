"""What each process of a distributed test runs; started by torch.multiprocessing."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

import curvatlas as ca
from curvatlas.zoo.gpt import GPT, GPTConfig


def model_and_data() -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=11, context=6, d_model=8, n_heads=2, n_layers=2)
    tokens, targets = torch.randint(0, 11, (2, 7, 6))
    targets[2, 1:] = -100
    targets[5] = -100
    return GPT(config).double().eval(), (tokens, targets)


def join_group(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)


def products(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Save this rank's products; mode 'own' gives uneven shards, 'shared' lets shard=True cut."""
    join_group(rank, world, port)
    model, (tokens, targets) = model_and_data()
    if mode == "own":
        cut = slice(0, 5) if rank == 0 else slice(5, 7)
        problem = ca.Problem(model, "cross_entropy", (tokens[cut], targets[cut]))
    else:
        problem = ca.Problem(model, "cross_entropy", (tokens, targets), shard=True)
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(problem.size, 3, dtype=torch.float64, generator=generator)
    results = {
        "gradient": problem.gradient(),
        "value": torch.tensor(problem.value()),
        **{
            kind.__name__: kind(problem) @ columns
            for kind in (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian, ca.Fisher)
        },
    }
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def failing(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Rank 1's weights turn NaN: every rank must stop, each with a message."""
    join_group(rank, world, port)
    model, (tokens, targets) = model_and_data()
    problem = ca.Problem(model, "cross_entropy", (tokens, targets), shard=True)
    if rank == 1:
        with torch.no_grad():
            model.head.weight[0, 0] = float("nan")
    try:
        ca.Hessian(problem) @ torch.zeros(problem.size, dtype=torch.float64)
        message = "no error"
    except (RuntimeError, ValueError) as error:
        message = str(error)
    (Path(folder) / f"rank{rank}.txt").write_text(message)
    dist.destroy_process_group()
