"""Products of a GPT of 12 layers on long inputs: memory that grows with the length, not its square.

    python benchmarks/long_context.py [--quick]

One sample of a GPT of 12 layers, width 256 and 8 heads; every length in a process of its own. The
peak is the process's, less what was resident before the operator was made: checks, linearisation
and two products. At 1,024 tokens the product is made twice, with attention by blocks of queries (a
small budget) and without, and compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.peak import peak_bytes, settled
from harness.results import RESULTS, keep, requirement

LENGTHS = (1024, 2048, 4096)
COMPARED, SMALL_BUDGET = 1024, 700_000_000  # tokens; bytes below which attention goes by blocks
LAYERS, WIDTH, HEADS, VOCABULARY = 12, 256, 8, 1000
LIMIT_BYTES = 8e9


def measure(*, length: int, layers: int, compared: bool) -> dict[str, Any]:
    """In this process: one product after another of one sample."""
    import torch

    import curvatlas as ca
    from curvatlas import zoo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = zoo.GPTConfig(
        vocabulary=VOCABULARY, context=length, d_model=WIDTH, n_heads=HEADS, n_layers=layers
    )
    model = zoo.GPT(config).eval()
    tokens = torch.randint(0, VOCABULARY, (1, length + 1))
    problem = ca.Problem(model, "cross_entropy", (tokens[:, :-1], tokens[:, 1:]))
    vector = torch.randn(problem.size)
    before = settled()
    operator = ca.Hessian(problem, budget=SMALL_BUDGET if compared else None)
    first = operator @ vector
    started = time.process_time()
    operator @ vector
    row = {
        "length": length,
        "parameters": problem.size,
        "peak_bytes": peak_bytes() - before,
        "process_bytes": peak_bytes(),
        "seconds": round(time.process_time() - started, 2),
        "engine": str(problem.engine),
        "difference": None,
    }
    if compared:
        whole = ca.Hessian(problem, budget="20GB") @ vector
        row["difference"] = float(f"{float((first - whole).norm() / whole.norm()):.3g}")
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers, short; nothing is kept")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print("RESULT " + json.dumps(measure(**json.loads(options.child))))
        return 0
    layers = 2 if options.quick else LAYERS
    rows = []
    for length in (128, 256) if options.quick else LENGTHS:
        task = {"length": length, "layers": layers, "compared": length == COMPARED}
        command = [sys.executable, __file__, "--child", json.dumps(task)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        line = next(s for s in done.stdout.splitlines() if s.startswith("RESULT "))
        rows.append(json.loads(line.removeprefix("RESULT ")))
        print(rows[-1], flush=True)
    growth = rows[-1]["peak_bytes"] / rows[-2]["peak_bytes"]
    lines = [
        requirement("peak memory of 4,096 tokens, bytes", rows[-1]["process_bytes"], LIMIT_BYTES),
        requirement("memory when the length doubles, times", round(growth, 2), 2.2),
        requirement("by blocks of queries against whole", rows[0]["difference"], 1e-5),
    ]
    if options.results or not options.quick:
        content = {"requirements": lines, "rows": rows}
        print(f"kept in {keep('long_context', content, folder=options.results or RESULTS).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
