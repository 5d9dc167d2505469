"""What noticing every change of the weights costs in a product and in an estimate.

    python benchmarks/guards.py [--quick] [--cases gpt-1m gpt-100k vit-2.8k] [--kinds H H_o]

One thread. The guards of a product (the fingerprint of weights and buffers, that of the loss) are
timed inside the product itself, by processor time, so that their share depends little on what else
the machine does; the median over the rounds with its quartiles, operators in turns. An estimate
with a checkpoint pays for the same guards in all of its products and once for the digest of
weights, loss and data that its checkpoint is known by: both are timed inside it. The probe for the
axis of the samples runs once a Problem and is given in products, each between two of them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import curvatlas as ca
from curvatlas.spectra import checkpoint as checkpoints
from harness.cases import CASES, Case
from harness.results import RESULTS, keep, requirement
from harness.timing import clocked, quartiles

KINDS = {"H": ca.Hessian, "H_o": ca.GaussNewton}
MOST = 0.02  # of a product


GUARDS = ((ca.Problem, "weights_version"), (ca.Problem, "_count_again"))
DIGESTS = ((ca.Problem, "content"), (checkpoints, "content"))
ESTIMATES: dict[str, Callable[..., Any]] = {
    "trace": lambda op, file, most: ca.trace(op, max_products=most, checkpoint=file),
    "eigenpairs": lambda op, file, most: ca.eigenpairs(
        op, k=3, max_products=most, data_error=False, checkpoint=file
    ),
}


@contextmanager
def timed(functions: Sequence[tuple[Any, str]], seconds: list[float]) -> Iterator[None]:
    """Inside, every call of a function (owner, name) adds its time to ``seconds[0]``."""
    originals = [getattr(owner, name) for owner, name in functions]

    def clock(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.process_time()
            try:
                return original(*arguments)
            finally:
                seconds[0] += time.process_time() - start

        return run

    try:
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, clock(original))
        yield
    finally:
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, original)


def measure(case: Case, kinds: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row an operator: what the guards take of its products."""
    problem = ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))
    vector = torch.randn(case.size, generator=torch.Generator().manual_seed(1))
    operators = {kind: KINDS[kind](problem) for kind in kinds}
    shares: dict[str, list[float]] = {kind: [] for kind in kinds}
    guards: dict[str, list[float]] = {kind: [] for kind in kinds}
    seconds = [0.0]
    for operator in operators.values():
        operator @ vector
    with timed(GUARDS, seconds):
        for _ in range(rounds):
            for kind, operator in operators.items():
                seconds[0] = 0.0
                start = time.process_time()
                operator @ vector
                total = time.process_time() - start
                shares[kind].append(seconds[0] / total)
                guards[kind].append(seconds[0])
    tensors = [*case.model.parameters(), *case.model.buffers()]
    rows = []
    for kind in kinds:
        low, middle, high = quartiles(shares[kind])
        rows.append({
            "model": case.name, "parameters": case.size, "tensors": len(tensors), "quantity": kind,
            "share": round(middle, 5), "quartiles": [round(low, 5), round(high, 5)],
            "guard_microseconds": round(1e6 * quartiles(guards[kind])[1], 1), "rounds": rounds,
        })  # fmt: skip
    return rows


def measure_estimate(case: Case, name: str, most: int, rounds: int) -> dict[str, Any]:
    """What the guards of the products and the checkpoint's digest take of an estimate of H."""
    operator = ca.Hessian(ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets)))
    vector = torch.randn(case.size, generator=torch.Generator().manual_seed(1))
    operator @ vector
    guards, digests, shares = [0.0], [0.0], []
    products = 0
    with tempfile.TemporaryDirectory() as folder, timed(GUARDS, guards), timed(DIGESTS, digests):
        for number in range(rounds):
            guards[0] = digests[0] = 0.0
            start = time.process_time()
            found = ESTIMATES[name](operator, Path(folder) / f"{number}", most)
            total = time.process_time() - start
            shares.append(((guards[0] + digests[0]) / total, digests[0] / total, digests[0]))
            products = found.products
    low, middle, high = quartiles([share for share, _, _ in shares])
    return {
        "model": case.name, "parameters": case.size, "estimate": name, "products": products,
        "share": round(middle, 5), "quartiles": [round(low, 5), round(high, 5)],
        "digest_share": round(quartiles([share for _, share, _ in shares])[1], 5),
        "digest_milliseconds": round(1e3 * quartiles([taken for _, _, taken in shares])[1], 2),
        "rounds": rounds,
    }  # fmt: skip


def probe(case: Case, rounds: int) -> dict[str, Any]:
    """What the search for the axis of the samples takes, in products with H."""
    data = (case.inputs, case.targets)
    operator = ca.Hessian(ca.Problem(case.model, "cross_entropy", data))
    vector = torch.randn(case.size, generator=torch.Generator().manual_seed(1))
    operator @ vector
    ratios = []
    for _ in range(rounds):
        problem = ca.Problem(case.model, "cross_entropy", data)
        before = clocked(lambda: operator @ vector)[1]
        taken = clocked(lambda problem=problem: problem.separable)[1]
        after = clocked(lambda: operator @ vector)[1]
        ratios.append(taken / ((before + after) / 2))
    low, middle, high = quartiles(ratios)
    return {
        "model": case.name, "products": round(middle, 2),
        "quartiles": [round(low, 2), round(high, 2)], "rounds": rounds,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=["gpt-1m", "gpt-100k", "vit-2.8k"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--estimates", nargs="*", default=list(ESTIMATES))
    parser.add_argument("--max-products", nargs="*", type=int, default=[20, 100])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="the smallest; nothing is kept")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases = ["vit-2.8k"] if options.quick else options.cases
    rounds = 5 if options.quick else options.rounds
    rows, probes, estimates = [], [], []
    for name in cases:
        for row in measure(CASES[name](), options.kinds, rounds):
            rows.append(row)
            print(row, flush=True)
        probes.append(probe(CASES[name](), max(3, rounds // 6)))
        print(probes[-1], flush=True)
        for estimate, most in itertools.product(options.estimates, options.max_products):
            estimates.append(measure_estimate(CASES[name](), estimate, most, max(3, rounds // 12)))
            print(estimates[-1], flush=True)
    lines = [
        requirement(f"guards of {r['quantity']}·v, of the product, {r['model']}", r["share"], MOST)
        for r in rows
    ] + [
        requirement(
            f"guards and digest of {r['estimate']}, {r['products']} products, {r['model']}",
            r["share"],
            MOST,
        )
        for r in estimates
    ]
    if options.results or not options.quick:
        content = {"requirements": lines, "rows": rows, "estimates": estimates, "probes": probes}
        print(f"kept in {keep('guards', content, folder=options.results or RESULTS).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
