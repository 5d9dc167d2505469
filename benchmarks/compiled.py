"""What a compiled product costs against the kept graph, what compiling takes, and when it pays.

Beside it the hand-written passes, and the same passes compiled, which the library does not offer.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import curvatlas as ca
from curvatlas.engines.autograd.compiled import constants_as_inputs
from harness.cases import CASES, Case
from harness.contestants import references
from harness.results import RESULTS, keep, requirement
from harness.timing import least_processor_seconds

KINDS = {"H": ca.Hessian, "H_o": ca.GaussNewton}


def processor() -> float:
    """Seconds of this process and of the compilers it started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def by_hand_compiled(operator: Any, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The hand-written product of ``operator`` with ``vector`` as one graph of inductor's kernels.

    Recorded call by call, with fresh results in place of the workspace, freed of what is written in
    place, and compiled with all that is kept at the point as inputs.
    """
    from torch._inductor.compile_fx import compile_fx

    linear = next(iter(operator._full))[1]
    pieces = list(linear._views(vector.unsqueeze(0)).values())
    names = operator.problem.layout.names

    def product(*columns: torch.Tensor) -> list[torch.Tensor]:
        into = {n: torch.empty_like(c) for n, c in zip(names, columns, strict=True)}
        linear._fill(dict(zip(names, columns, strict=True)), {linear.part: into})
        return list(into.values())

    with torch.no_grad(), mock.patch.object(linear._space, "keep", False):
        recorded = make_fx(product)(*pieces)
    given = [*constants_as_inputs(recorded), *pieces]
    flat = torch.empty_like(vector)
    with torch.no_grad():
        functional = make_fx(functionalize(recorded))(*given)
        functional.graph.eliminate_dead_code()
        functional.recompile()
        run = compile_fx(functional, given)

    def compiled() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([piece.flatten() for piece in run(*given)], out=flat)

    compiled()
    return compiled


def measure(case: Case, quantity: str, rounds: int) -> dict[str, Any]:
    problem = ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))
    vector = torch.randn(case.size, generator=torch.Generator().manual_seed(1))
    want = references(case, vector.unsqueeze(1))[quantity][:, 0]
    kind = KINDS[quantity]
    plain, by_hand = kind(problem, engine="autograd"), kind(problem, engine="tangent")
    fast = kind(problem, engine="autograd", compile=True)
    for operator in (plain, by_hand, by_hand, by_hand, fast):
        operator @ vector  # of ``fast`` the first runs uncompiled; the second compiles
    once = least_processor_seconds(lambda: plain @ vector, 2)
    start = processor()
    got = fast @ vector
    compiling = processor() - start - 3 * once
    start = processor()
    hand = by_hand_compiled(by_hand, vector)
    compiling_by_hand = processor() - start
    runs = (
        case.gradient,
        lambda: plain @ vector,
        lambda: fast @ vector,
        lambda: by_hand @ vector,
        hand,
    )
    turns = [[least_processor_seconds(run, 2) for run in runs] for _ in range(rounds)]
    least = [min(column) for column in zip(*turns, strict=True)]
    kept, compiled, tape, hand_compiled = (round(time / least[0], 3) for time in least[1:])
    saved = least[1] - least[2]
    return {
        "model": case.name,
        "quantity": quantity,
        "kept_gradients": kept,
        "compiled_gradients": compiled,
        "compile_seconds": round(compiling, 1),
        "saved_milliseconds": round(1e3 * saved, 2),
        "pays_after": math.ceil(compiling / saved) if saved > 0 else None,
        "difference": difference(got, want),
        "by_hand_gradients": tape,
        "by_hand_compiled_gradients": hand_compiled,
        "by_hand_compile_seconds": round(compiling_by_hand, 1),
        "by_hand_compiled_difference": difference(hand(), want),
    }


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, to two digits."""
    return float(f"{float((got.double() - want).norm() / want.norm()):.2g}")


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
