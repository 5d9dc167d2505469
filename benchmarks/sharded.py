"""A GPT of 50 M parameters that FSDP2 spreads over two processes, against one that holds it whole.

    python benchmarks/sharded.py [--quick] [--turns 1]

Two gloo processes, each held to a core of its own and one thread, and one process, all of them
fresh. Weights, vector and product stay spread. The operator of one process may use 2 GB, that of
each of two 1 GB: then both go through their samples one at a time. Peaks are what the system has
seen of each process, the libraries' own part (which no sharding makes smaller) included, and
without it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import curvatlas as ca
from curvatlas.zoo.models import GPT, GPTConfig
from harness.results import RESULTS, keep, requirement
from parallel import free_port


@dataclass(frozen=True)
class Size:
    """A GPT and how many samples of its whole context are multiplied."""

    d_model: int
    n_layers: int
    context: int
    samples: int


SIZES = {False: Size(640, 10, 256, 8), True: Size(64, 2, 32, 4)}
BUDGET = {1: "2GB", 2: "1GB"}  # of each process's operator, by how many there are
PEAK, TIME, DIFFERENCE = 0.55, 0.65, 1e-6  # of one process's, and of its product


def spread_gpt(size: Size, world: int) -> torch.nn.Module:
    """The GPT, spread over processes, without memory for its weights."""
    config = GPTConfig(
        vocabulary=1024,
        context=size.context,
        d_model=size.d_model,
        n_heads=size.d_model // 64 or 1,
        n_layers=size.n_layers,
    )
    with torch.device("meta"):
        model = GPT(config)
    if world > 1:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model.eval()


def fill(model: torch.nn.Module, world: int, rank: int) -> None:
    """Give every process its rows of weights that do not depend on how many there are."""
    model.to_empty(device="cpu")
    for number, (name, parameter) in enumerate(model.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        drawn = drawn * 0.02 + float("norm" in name and name.endswith("weight"))
        rows = -(-len(drawn) // world)
        local: Any = parameter.to_local() if world > 1 else parameter  # type: ignore[operator]
        with torch.no_grad():
            local.copy_(drawn[rank * rows : (rank + 1) * rows])


def spread_worker(rank: int, world: int, port: int, folder: str, quick: bool, turns: int) -> None:
    """A fresh process: products with one vector, its times and its peak."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    size = SIZES[quick]
    model = spread_gpt(size, world)
    libraries = peak_megabytes()
    fill(model, world, rank)
    seeded = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, 1024, (2, size.samples, size.context), generator=seeded)
    problem = ca.Problem(model, "cross_entropy", (tokens, targets), shard=world > 1)
    hessian = ca.Hessian(problem, budget=BUDGET[world])
    layout, shards = problem.layout, problem.shards
    pieces = []  # of the vector: a parameter at a time
    for start, length in zip(layout.starts, layout.sizes, strict=True):
        drawn = torch.randn(length, generator=torch.Generator().manual_seed(start))
        own = [(0, layout.size)] if shards is None else shards.own
        cut = [(max(a - start, 0), min(b - start, length)) for a, b in own]
        pieces += [drawn[a:b].clone() for a, b in cut if a < b]
    vector = torch.cat(pieces)
    del pieces, drawn
    walls, processors = [], []
    for turn_number in range(turns + 1):
        if world > 1:
            dist.barrier()
        start_wall, start_processor = time.perf_counter(), time.process_time()
        product = hessian @ vector if shards is None else hessian.sharded_matvec(vector, shards)
        wall = time.perf_counter() - start_wall
        processor = time.process_time() - start_processor
        if turn_number:  # the first one finds out what the model is
            walls.append(wall)
            processors.append(processor)
        print(f"{world} process(es), rank {rank}: {wall:.2f} s", flush=True)
    peak = peak_megabytes()
    whole = product if shards is None else shards.gathered(product)
    assert whole is not None
    if rank == 0:
        torch.save(whole, Path(folder, f"product{world}.pt"))
    row = {
        "processes": world,
        "rank": rank,
        "parameters": problem.size,
        "tokens": tokens.numel(),
        "seconds_a_product": min(walls),
        "processor_seconds_a_product": min(processors),
        "peak_megabytes": peak,
        "libraries_megabytes": libraries,
        "peak_without_libraries": peak - libraries,
        "engine": str(problem.engine),
    }
    Path(folder, f"{world} {rank}.json").write_text(json.dumps(row), encoding="utf-8")
    if world > 1:
        dist.destroy_process_group()


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sharded(quick: bool, turns: int) -> dict[str, Any]:
    """Two processes with half of everything each, and one with all of it."""
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 1):
            arguments = (world, free_port(), folder, quick, turns)
            mp.spawn(spread_worker, args=arguments, nprocs=world)
        names = ("1 0", "2 0", "2 1")
        rows = [json.loads(Path(folder, f"{name}.json").read_text()) for name in names]
        one, two = (torch.load(Path(folder, f"product{n}.pt"), weights_only=True) for n in (1, 2))
        difference = float((one - two).norm() / one.norm())
    alone, *both = rows

    def ratio(what: str) -> float:
        return round(max(row[what] for row in both) / alone[what], 3)

    lines = [
        requirement("peak of each of two processes in one's", ratio("peak_megabytes"), PEAK),
        requirement("the same without the libraries", ratio("peak_without_libraries"), PEAK),
        requirement(
            "time of two processes in one's, by the clock", ratio("seconds_a_product"), TIME
        ),
        requirement("difference of the products", float(f"{difference:.2g}"), DIFFERENCE),
    ]
    by_processor = ratio("processor_seconds_a_product")
    return {
        "requirements": lines,
        "time_by_processor": by_processor,
        "budgets": [BUDGET[1], BUDGET[2]],
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small model; nothing is kept")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    options = parser.parse_args(argv)
    content = sharded(options.quick, options.turns)
    if options.results or not options.quick:
        print(f"kept in {keep('sharded', content, folder=options.results or RESULTS).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
