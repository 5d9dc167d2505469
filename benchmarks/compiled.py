"""What a compiled product costs against the kept graph, what compiling takes, and when it pays.

    python benchmarks/compiled.py [--quick] [--cases gpt-100k gpt-1m] [--kinds H H_o]

One thread; processor time, the least of the rounds, in gradients of the same model. Compiling is
timed by the processor too, the C++ compiler's time included, into an empty cache. Differences are
from double backward in float64 with hand-written norms.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import argparse
import math
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

import curvatlas as ca
from harness.cases import CASES, Case
from harness.contestants import references
from harness.results import RESULTS, keep, requirement
from harness.timing import least_processor_seconds

KINDS = {"H": ca.Hessian, "H_o": ca.GaussNewton}


def processor() -> float:
    """Seconds of this process and of the compilers it started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(case: Case, quantity: str, rounds: int) -> dict[str, Any]:
    problem = ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))
    vector = torch.randn(case.size, generator=torch.Generator().manual_seed(1))
    want = references(case, vector.unsqueeze(1))[quantity][:, 0]
    plain, fast = KINDS[quantity](problem), KINDS[quantity](problem, compile=True)
    plain @ vector
    fast @ vector  # uncompiled; the second product compiles
    once = least_processor_seconds(lambda: plain @ vector, 2)
    start = processor()
    got = fast @ vector
    compiling = processor() - start - 3 * once
    runs = (case.gradient, lambda: plain @ vector, lambda: fast @ vector)
    turns = [[least_processor_seconds(run, 2) for run in runs] for _ in range(rounds)]
    gradient, kept, compiled = (min(column) for column in zip(*turns, strict=True))
    saved = kept - compiled
    return {
        "model": case.name, "quantity": quantity, "kept_gradients": round(kept / gradient, 3),
        "compiled_gradients": round(compiled / gradient, 3),
        "compile_seconds": round(compiling, 1), "saved_milliseconds": round(1e3 * saved, 2),
        "pays_after": math.ceil(compiling / saved) if saved > 0 else None,
        "difference": float(f"{float((got.double() - want).norm() / want.norm()):.2g}"),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=["gpt-100k", "gpt-1m"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="the smallest; nothing is kept")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases = ["vit-2.8k"] if options.quick else options.cases
    rows = []
    try:
        for name in cases:
            for quantity in ["H"] if options.quick else options.kinds:
                rows.append(measure(CASES[name](), quantity, options.rounds))
                print(rows[-1], flush=True)
    finally:
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
    lines = [
        requirement(
            f"compiled {row['quantity']}·v, of the kept graph's time, {row['model']}",
            round(row["compiled_gradients"] / row["kept_gradients"], 3),
            1.0,
        )
        for row in rows
    ]
    if options.results or not options.quick:
        content = {"requirements": lines, "rows": rows}
        print(f"kept in {keep('compiled', content, folder=options.results or RESULTS).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
