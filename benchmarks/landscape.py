"""Per-sample curvature differences to k = 10,000 on a 10 k-parameter ViT: time and memory.

python benchmarks/landscape.py [--sizes 1000 10000]

Every k runs in a process of its own, whose peak memory is that of ``ca.landscape_convergence``
alone: what stands in memory before it (libraries, model, data) is measured first and taken off.
Fashion-MNIST where it is installed, noise of the same shape otherwise: the cost does not depend
on the pixels.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import json
import subprocess
import sys
import time
from typing import Any

import torch

import curvatlas as ca
from curvatlas import zoo
from harness.peak import peak_bytes
from harness.results import keep, requirement


def reset_peak() -> float:
    """Forget the peak of loading the data (Linux); megabytes in use now."""
    gc.collect()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return peak_mb()


def peak_mb() -> float:
    return peak_bytes() / 2**20


def images(count: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    try:
        found = zoo.fashion_mnist().train.take(count)
        return "Fashion-MNIST", found.inputs, found.targets
    except FileNotFoundError:
        torch.manual_seed(0)
        return "noise", torch.randn(count, 28, 28), torch.randint(0, 10, (count,))


def measure(size: int, most: int) -> dict[str, Any]:
    """One size; the data of the largest one stands in memory in all of them."""
    name, inputs, targets = images(most)
    model = zoo.reference_vit(d_model=26, image_size=28, patch_size=7).eval()
    data = [(inputs[i : i + 256], targets[i : i + 256]) for i in range(0, len(inputs), 256)]
    problem = ca.Problem(model, "cross_entropy", data)
    problem.value()
    before = reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    found = ca.landscape_convergence(problem, limit=size, spectra=2, spectrum_samples=256)
    return {
        "k": size,
        "data": name,
        "parameters": problem.size,
        "products": found.products,
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "memory_before_mb": round(before),
        "memory_added_mb": round(peak_mb() - before, 1),
        "loss_exponent": round(found.difference.value, 3),
        "noise_exponent": round(found.null.value, 3),
        "hessian_exponent": round(found.hessian.value, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, max(options.sizes))))
        return
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        command = [sys.executable, __file__, "--one", str(size), "--sizes"]
        command += [str(s) for s in options.sizes]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    growth = rows[-1]["memory_added_mb"] / max(rows[0]["memory_added_mb"], 1.0)
    print(
        keep(
            "landscape",
            {
                "rows": rows,
                "requirements": [
                    requirement("minutes for the largest k", rows[-1]["wall_seconds"] / 60, 10),
                    requirement("memory at the largest k over the smallest", round(growth, 3), 1.1),
                ],
            },
        )
    )


if __name__ == "__main__":
    main()
