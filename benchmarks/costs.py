"""What propagation costs against what docs/costs.md predicts: memory and time, by size.

python benchmarks/costs.py [--repeats 3] [--accounts]

Each row varies one size of a GPT and fits the exponent of the cost in it. Times are of the
processor, the least of the repeats; memory is the peak above what stood there before (Linux), in a
process of its own for every size.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import curvatlas as ca
from curvatlas.analysis.propagation.analyzer import ALIVE
from curvatlas.analysis.propagation.capture import capture
from curvatlas.analysis.propagation.matrix_free import FreeProducts
from curvatlas.zoo import GPT, GPTConfig
from harness.peak import peak_bytes
from harness.results import RESULTS, keep
from harness.timing import least_processor_seconds


def case(tokens: int, width: int, layers: int) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=64, context=tokens, d_model=width, n_heads=4, n_layers=layers)
    drawn = torch.randint(0, 64, (1, tokens + 1))
    return GPT(config).eval(), (drawn[:, :-1], drawn[:, 1:])


def dense(tokens: int, width: int, layers: int) -> Callable[[], Any]:
    """The whole account, with matrices that are not kept once they are measured."""
    model, batch = case(tokens, width, layers)
    room = (ALIVE + 1) * (tokens * width) ** 2 * 4
    analyzer = ca.CurvaturePropagationAnalyzer(model, "cross_entropy", budget=room, method="dense")
    return lambda: analyzer.analyze_curvature_flow(*batch)


def product(tokens: int, width: int, layers: int) -> Callable[[], Any]:
    """One product with the Hessian at the first activation: the whole model lies behind it."""
    model, batch = case(tokens, width, layers)
    problem = ca.Problem(model, "cross_entropy", batch)
    given = next(problem.batches())
    with problem.evaluating():
        captured = capture(problem, given)
        free = FreeProducts(problem, given, captured)
    node = captured.nodes[0]
    vector = torch.randn(1, *node.tensor.shape)

    def run() -> Any:
        with problem.evaluating():
            return free.total(node)(vector)

    return run


def account(tokens: int, width: int, layers: int, chosen: int | None = None) -> Callable[[], Any]:
    """The matrix-free account of all blocks in one sweep, or of some by products of their own."""
    model, batch = case(tokens, width, layers)
    analyzer = ca.CurvaturePropagationAnalyzer(
        model, "cross_entropy", method="matrix-free", probes=3, sweep=True
    )
    return lambda: analyzer.analyze_curvature_flow(*batch, layers=chosen)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    return least_processor_seconds(run, repeats)


def memory(tokens: int, width: int, layers: int) -> float:
    """Peak of the dense account in a fresh process, MB."""
    command = [sys.executable, __file__, "--one", str(tokens), str(width), str(layers)]
    # What is freed goes back to the system at once, so that the peak is of matrices in use: the
    # allocator's default keeps freed pieces of a few megabytes and its share grows with the layers.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def peak_mb(run: Callable[[], Any]) -> float:
    gc.collect()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = _high_water()
    run()
    return _high_water() - before


def _high_water() -> float:
    return peak_bytes() / 2**20


def row(what: str, against: str, sizes: Sequence[float], costs: Sequence[float], unit: str,
        predicted: str) -> dict[str, Any]:  # fmt: skip
    exponent = float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])
    found = {
        "what": what,
        "against": against,
        "sizes": ", ".join(f"{s:g}" for s in sizes),
        "measured": ", ".join(f"{c:.3g}" for c in costs) + f" {unit}",
        "exponent": round(exponent, 2),
        "predicted": predicted,
    }
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--accounts", action="store_true", help="only the matrix-free accounts")
    parser.add_argument("--one", type=int, nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.accounts:
        again()
        return
    if options.one:
        dense(8, 16, 1)()  # libraries and kernels are loaded before memory is counted
        print(peak_mb(dense(*options.one)))
        return
    repeats = options.repeats
    rows = []
    sides = [(32, 16), (48, 16), (64, 16)]
    found = [memory(t, w, 1) for t, w in sides]
    numbers = max(2**20 * mb / 4 / (t * w) ** 2 for mb, (t, w) in zip(found, sides, strict=True))
    rows.append(row("dense, memory", "tokens · width", [t * w for t, w in sides], found, "MB",
                    f"2 (at most {ALIVE} n² numbers; {numbers:.0f} seen)"))  # fmt: skip
    layers = [2, 4, 8]
    found = [seconds(dense(16, 16, n), repeats) for n in layers]
    rows.append(row("dense, time", "layers", layers, found, "s", "1"))
    found = [memory(48, 16, n) for n in layers]
    rows.append(row("dense, memory", "layers", layers, found, "MB", "0 (matrices not kept)"))
    tokens = [64, 128, 256]
    found = [1e3 * seconds(product(t, 256, 4), repeats) for t in tokens]
    rows.append(row("one product", "tokens", tokens, found, "ms", "1 (attention's own share: 2)"))
    found = [1e3 * seconds(product(128, 256, n), repeats) for n in layers]
    rows.append(row("one product", "layers behind", layers, found, "ms", "1"))
    widths = [256, 384, 512]
    sizes = [sum(p.numel() for p in case(128, w, 4)[0].parameters()) for w in widths]
    found = [1e3 * seconds(product(128, w, 4), repeats) for w in widths]
    rows.append(row("one product", "parameters", sizes, found, "ms", "1"))
    rows += accounts()
    print(keep("costs", {"rows": rows}))


def accounts() -> list[dict[str, Any]]:
    """Propagation without matrices against the depth: every block, and two of them."""
    depths = [2, 4, 8, 16, 32]
    whole = [seconds(account(32, 64, n), 1) for n in depths]
    some = [seconds(account(32, 64, n, 2), 2) for n in depths]
    return [
        row("matrix-free account", "layers", depths, whole, "s", "1 (one sweep)"),
        row("matrix-free account of two blocks", "layers", depths, some, "s", "1"),
    ]


def again() -> None:
    """Measure only the accounts; the other rows stay as they are kept."""
    path = RESULTS / "costs.json"
    new = accounts()
    names = {r["what"] for r in new}
    before = json.loads(path.read_text(encoding="utf-8"))["rows"]
    print(keep("costs", {"rows": [r for r in before if r["what"] not in names] + new}))


if __name__ == "__main__":
    main()
