"""Products a second of two processes with one core each, against one process with one core.

    python benchmarks/parallel.py [--quick] [--rounds 12]

Two gloo processes, each held to a core of its own and one thread. They take turns: the first alone
with all the data, then both with half of it each and one reduction a product. Only the ratio of
neighbouring turns is kept, by the clock and by processor time (of the busier process, with gloo's
threads): where other work runs on the cores, the two wait for each other as well.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import curvatlas as ca
from harness.cases import Case, gpt_1m, gpt_100k
from harness.results import RESULTS, keep, requirement
from harness.timing import clocked, quartiles

WANTED = 1.7  # times the products per second of one process
KINDS = {"H": ca.Hessian, "H_o": ca.GaussNewton}
TIMES = (1, 4, 16)  # the products' benchmark's 512 tokens, and more


def worker(rank: int, port: int, folder: str, rounds: int, case_name: str) -> None:
    """One process of the group; the first writes what it saw."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    case = {"gpt-1m": gpt_1m, "gpt-100k": gpt_100k}[case_name]()
    rows = [reductions(case.size, rounds)]
    for times in TIMES:
        inputs, targets = (t.repeat(times, 1) for t in (case.inputs, case.targets))
        larger = Case(case.name, case.model, inputs, targets)
        for quantity in KINDS:
            rows.append(measure(larger, quantity, rounds))
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0:
        content = {"case": case.name, "parameters": case.size, "rows": rows}
        Path(folder, "found.json").write_text(json.dumps(content), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, quantity: str, rounds: int) -> dict[str, Any]:
    """Ratios of one process's time to two processes', and how far their answers lie apart."""
    data = (case.inputs, case.targets)
    kind = KINDS[quantity]
    alone = kind(ca.Problem(case.model, "cross_entropy", data, distributed=False), checks=False)
    shared = kind(ca.Problem(case.model, "cross_entropy", data, shard=True), checks=False)
    right = torch.randn(case.size, generator=torch.Generator().manual_seed(1))
    got = shared @ right
    want = alone @ right if dist.get_rank() == 0 else got
    calls = max(1, 2 * 512 // case.inputs.numel())
    walls, processors, seconds = [], [], []
    for _ in range(rounds):
        single = turn(lambda: alone @ right, calls) if dist.get_rank() == 0 else (0.0, 0.0)
        dist.barrier()
        both = turn(lambda: shared @ right, calls)
        # The slower process decides, and its processor time is what a free core would take.
        slowest = torch.tensor(both)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        walls.append(single[0] / float(slowest[0]))
        processors.append(single[1] / float(slowest[1]))
        seconds.append(float(slowest[0]) / calls)
    low, middle, high = quartiles(walls)
    return {
        "quantity": quantity,
        "tokens": case.inputs.numel(),
        "times_the_products_per_second": round(middle, 3),
        "lower_quartile": round(low, 3),
        "upper_quartile": round(high, 3),
        "by_processor_time": round(statistics.median(processors), 3),
        "milliseconds_a_product": round(1e3 * statistics.median(seconds), 2),
        "difference": float(f"{float((got - want).norm() / want.norm()):.2g}"),
    }


def turn(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """(wall, processor) seconds of ``calls`` calls."""
    return clocked(lambda: [run() for _ in range(calls)])


def reductions(size: int, rounds: int) -> dict[str, Any]:
    """One all-reduce of a vector of the model's size."""
    vector, found = torch.zeros(size + 1), []
    for _ in range(4 * rounds):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(vector)
        found.append(time.perf_counter() - start)
    middle = statistics.median(found)
    return {"quantity": "one reduction", "milliseconds_a_product": round(1e3 * middle, 2)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(case_name: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(free_port(), folder, rounds, case_name), nprocs=2)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="a small model; nothing is kept")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    options = parser.parse_args(argv)
    found = run("gpt-100k" if options.quick else "gpt-1m", 2 if options.quick else options.rounds)
    lines = [
        requirement(
            f"{row['quantity']}·v of {row['tokens']} tokens: time of two processes in one's",
            round(1 / row["times_the_products_per_second"], 3),
            round(1 / WANTED, 3),
        )
        for row in found["rows"]
        if "tokens" in row
    ]
    if options.results or not options.quick:
        content = {"requirements": lines, "parameters": found["parameters"], "rows": found["rows"]}
        print(f"kept in {keep('parallel', content, folder=options.results or RESULTS).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
