"""A cost model fitted on small models, and how far it misses configurations it has not seen.

    python benchmarks/cost_model.py [--quick] [--rounds 5] [--without-large]

Fitted: products of GPTs of 0.1 to 5 M parameters by one process, and two of them by two gloo
processes with one core each. Predicted, then measured: a GPT of 6 M parameters by one and by two
processes, and the shape of SmolLM2-135M with random weights, far beyond the fit. Times are of the
processor, the least of the rounds and of two processes the longer one; the memory is the peak of a
fresh process above its weights (Linux).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import curvatlas as ca
from curvatlas.studies import cost_model
from curvatlas.studies.cost_model import (
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    Machine,
    Task,
    TransformerShape,
)
from curvatlas.zoo.models import GPT, GPTConfig
from harness.cost_fits import fit_link, fit_machine
from harness.peak import peak_bytes, settled
from harness.results import RESULTS, keep, requirement
from harness.sizes import smollm2_shaped

KINDS = {"H": ca.Hessian, "H_o": ca.GaussNewton}
GB = 1e9
# name → (shape, samples, length)
FITTED = {
    "0.1 M": (TransformerShape(layers=2, width=64, hidden=256, heads=4, vocabulary=256), 16, 32),
    "0.1 M, few tokens": (
        TransformerShape(layers=2, width=64, hidden=256, heads=4, vocabulary=256), 4, 32,
    ),
    "1 M": (TransformerShape(layers=4, width=128, hidden=512, heads=4, vocabulary=1000), 8, 64),
    "1 M, few tokens": (
        TransformerShape(layers=4, width=128, hidden=512, heads=4, vocabulary=1000), 2, 64,
    ),
    "1.7 M, long": (
        TransformerShape(layers=8, width=128, hidden=512, heads=4, vocabulary=256), 2, 128,
    ),
    "1.5 M, wide": (
        TransformerShape(layers=3, width=192, hidden=768, heads=4, vocabulary=500), 6, 64,
    ),
    "5 M, vocabulary": (  # long vectors, little arithmetic
        TransformerShape(layers=1, width=128, hidden=512, heads=4, vocabulary=20000), 1, 64,
    ),
}  # fmt: skip
UNSEEN = {
    "6 M": (TransformerShape(layers=6, width=256, hidden=1024, heads=8, vocabulary=2000), 4, 128),
}
LARGE = {"SmolLM2's shape": (cost_model.SMOLLM2_135M, 2, 64)}
BOTH_FITTED = ("0.1 M", "1 M")  # also by two processes
MEMORY = ("1 M", "1.5 M, wide")  # nothing is fitted there: the graph is counted
WITHIN = 0.25


def problem_of(shape: TransformerShape, samples: int, length: int, **options: Any) -> ca.Problem:
    """A model of that shape with random weights on random tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(0, shape.vocabulary, (samples, length + 1))
    if shape.gated:
        model: Any = smollm2_shaped()
    else:
        model = GPT(GPTConfig(
            vocabulary=shape.vocabulary, context=length, d_model=shape.width, d_ff=shape.hidden,
            n_heads=shape.heads, n_layers=shape.layers,
        )).eval()  # fmt: skip
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return ca.Problem(model, "cross_entropy", batch, **options)


def times_of(names: list[str], rounds: int) -> dict[str, float]:
    """In this process: "name/quantity" → least processor seconds of one product."""
    found = {}
    for name in names:
        problem = problem_of(*everything()[name])
        vector = torch.randn(problem.size)
        for quantity, kind in kinds_of(name).items():
            operator = kind(problem, checks=False)
            operator @ vector
            times = []
            for _ in range(1 if name in LARGE else rounds):
                start = time.process_time()
                operator @ vector
                times.append(time.process_time() - start)
            found[f"{name}/{quantity}"] = min(times)
    return found


def peak_of(name: str, quantity: str) -> int:
    """In this process: the peak of a product above the weights, bytes."""
    warm = TransformerShape(layers=1, width=16, hidden=32, heads=2, vocabulary=20)
    small = problem_of(warm, 1, 4)
    KINDS[quantity](small) @ torch.randn(small.size)  # what torch loads is no cost of ours
    problem = problem_of(*everything()[name])
    operator = KINDS[quantity](problem, checks=False)
    vector = torch.randn(problem.size)
    before = settled() - vector.numel() * 4  # the vector counts as part of the work
    for _ in range(2):
        operator @ vector
    return peak_bytes() - before


def child(**task: Any) -> Any:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(task)]
    environment = dict(os.environ)
    if "quantity" in task:
        # Freed pieces go back to the system at once, so that the peak is of what is in use; every
        # product is then twice as slow, so that times are taken elsewhere.
        environment["MALLOC_MMAP_THRESHOLD_"] = "32768"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"cost_model: {task} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def kinds_of(name: str) -> dict[str, Any]:
    return {"H": ca.Hessian} if name in LARGE else KINDS


def worker(rank: int, port: int, folder: str, names: tuple[str, ...], rounds: int) -> None:
    """One of two processes: seconds of the products, and of their reductions alone."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {}
    for name in names:
        problem = problem_of(*everything()[name], shard=True)
        vector = torch.randn(problem.size, generator=torch.Generator().manual_seed(1))
        for quantity, kind in KINDS.items():
            operator = kind(problem, checks=False)
            seconds = [together(lambda op=operator, v=vector: op @ v) for _ in range(rounds + 1)][
                1:
            ]
            reduced = torch.zeros(problem.size + 1)
            reduction = [together(lambda r=reduced: dist.all_reduce(r)) for _ in range(rounds + 1)]
            found[f"{name}/{quantity}"] = (min(seconds), min(reduction))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def together(run: Any) -> float:
    """Processor seconds of the one that has more to do, gloo's threads included; no waiting."""
    dist.barrier()
    start = time.process_time()
    run()
    taken = torch.tensor(time.process_time() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def two_processes(names: tuple[str, ...], rounds: int) -> dict[str, tuple[float, float]]:
    from parallel import free_port

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(free_port(), folder, names, rounds), nprocs=2)
        content = Path(folder, "found.json").read_text(encoding="utf-8")
    found: dict[str, tuple[float, float]] = json.loads(content)
    return found


def everything() -> dict[str, tuple[TransformerShape, int, int]]:
    return {**FITTED, **UNSEEN, **LARGE}


def task_of(name: str, quantity: Any, processes: int = 1) -> Task:
    shape, samples, length = everything()[name]
    tokens = samples * length
    return Task(
        shape=shape, quantity=quantity, tokens=tokens, length=length, processes=processes
    )  # fmt: skip


def row(what: str, task: Task, predicted: float, measured: float, *, unit: str, seen: bool,
        name: str) -> dict[str, Any]:  # fmt: skip
    found = {
        "what": what, "model": name, "quantity": task.quantity, "tokens": task.tokens,
        "processes": task.processes, "predicted": float(f"{predicted:.3g}"),
        "measured": float(f"{measured:.3g}"), "unit": unit,
        "ratio": round(float(predicted / measured), 3), "used_in_the_fit": seen,
    }  # fmt: skip
    print(found, flush=True)
    return found


def measure(names: list[str], rounds: int, *, both: tuple[str, ...]) -> dict[str, Any]:
    """Fit on what is fitted, predict everything, and lay both side by side."""
    alone = child(names=names, rounds=rounds)
    peaks = {
        f"{name}/{quantity}": child(name=name, quantity=quantity)
        for name in names
        if name in (*MEMORY, *UNSEEN, *LARGE)
        for quantity in kinds_of(name)
    }
    fitted = [key for key in alone if key.split("/")[0] in FITTED]
    machine = fit_machine(
        [task_of(*key.split("/")) for key in fitted], [alone[key] for key in fitted],
        name="one core of this machine",
    )  # fmt: skip
    shared = two_processes(both, rounds) if both else {}
    linking = [key for key in shared if key.split("/")[0] in FITTED]
    if linking:
        tasks = [task_of(*key.split("/"), processes=2) for key in linking]
        machine = fit_link(
            machine, tasks, [shared[key][0] for key in linking],
            reductions=[shared[key][1] for key in linking],
        )  # fmt: skip
    rows = []
    for key, seconds in alone.items():
        name, quantity = key.split("/")
        task, seen = task_of(name, quantity), name in FITTED
        rows.append(row("time", task, 1e3 * machine.seconds(task), 1e3 * seconds, unit="ms",
                        seen=seen, name=name))  # fmt: skip
        if key in peaks:
            rows.append(row("memory", task, task.working_bytes / 1e6, peaks[key] / 1e6, unit="MB",
                            seen=seen, name=name))  # fmt: skip
    for key, (seconds, _) in shared.items():
        name, quantity = key.split("/")
        task = task_of(name, quantity, processes=2)
        rows.append(row("time", task, 1e3 * machine.seconds(task), 1e3 * seconds, unit="ms",
                        seen=name in FITTED, name=name))  # fmt: skip
    rates = {k: v for k, v in asdict(machine).items() if isinstance(v, float) and v < 1e30}
    return {"rows": rows, "machine": machine, "rates": rates}


# --- sizes nobody can measure here --------------------------------------------------------------

# Assumed, not measured: 60 × 10¹² operations a second in float32 arithmetic on matrix units (about
# 0.4 of what vendors print for TF32), 2 TB/s of memory, 25 GB/s between devices, 80 GB each.
DEVICE = Machine(
    operations_per_second=60e12, bytes_per_second=0.5e12, weight_bytes_per_second=1e12,
    seconds_per_call=1e-4, link_bytes_per_second=25e9, seconds_per_message=2e-5, memory=80 * GB,
    name="assumed accelerator",
)  # fmt: skip
SIZES = {"1 B": LLAMA_1B, "8 B": LLAMA_8B, "70 B": LLAMA_70B}
TOKENS, LENGTH = 65_536, 2048


def projections(machine: Machine) -> list[dict[str, Any]]:
    """Products of 65,536 tokens by checkpointed sequences, and 60 of them with a basis of 40."""
    rows = []
    for name, shape in SIZES.items():
        for devices in (1, 8, 32):
            task = Task(shape=shape, tokens=TOKENS, length=LENGTH, processes=devices,
                        at_once=LENGTH, checkpointed=True)  # fmt: skip
            memory = task.memory_bytes(basis=40, basis_itemsize=2)
            seconds = DEVICE.seconds(task)
            here = replace(task, processes=1)
            rows.append({
                "model": name, "parameters": shape.parameters, "devices": devices,
                "seconds_a_product": float(f"{seconds:.3g}"),
                "of_it_reduction": round(DEVICE.reduction_seconds(task) / seconds, 3),
                "hours_for_60_products": float(f"{60 * seconds / 3600:.3g}"),
                "gigabytes_a_device": round(memory / GB, 1),
                "fits_in_80_gb": memory <= DEVICE.memory,
                "hours_a_product_on_one_core_here": float(f"{machine.seconds(here) / 3600:.3g}"),
            })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small models; nothing is kept")
    parser.add_argument("--without-large", action="store_true", help="not SmolLM2's shape")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        torch.set_num_threads(1)
        task = json.loads(options.child)
        print(json.dumps(times_of(**task) if "names" in task else peak_of(**task)))
        return 0
    large = not options.without_large and find_spec("transformers") is not None
    names = [*FITTED, *UNSEEN, *(LARGE if large else ())]
    if options.quick:
        names = names[:4]
    both = () if options.quick else (*BOTH_FITTED, *UNSEEN)
    found = measure(names, 2 if options.quick else options.rounds, both=both)
    lines = []
    for what in ("time", "memory"):
        for where, known in (("unseen configurations", UNSEEN), ("SmolLM2's shape", LARGE)):
            rows = [r for r in found["rows"] if r["what"] == what and r["model"] in known]
            if rows:
                miss = round(max(abs(row["ratio"] - 1) for row in rows), 3)
                name = f"{what}: largest miss of a prediction, {where}"
                lines.append(requirement(name, miss, WITHIN))
    for line in lines:
        print(line)
    if options.results or not options.quick:
        content = {
            "requirements": lines, "rates": found["rates"], "rows": found["rows"],
            "projections": projections(found["machine"]), "assumed": asdict(DEVICE),
        }  # fmt: skip
        print(f"kept in {keep('cost_model', content, folder=options.results or RESULTS).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
