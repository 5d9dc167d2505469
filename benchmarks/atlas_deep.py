"""The whole picture of a 12-layer, 10 M-parameter GPT: atlas and propagation, in minutes.

python benchmarks/atlas_deep.py [--tokens 64] [--figures DIR] [--by sublayer role]

Processor seconds are of all threads together; the wall's depend on what else the machine does.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import curvatlas as ca
from curvatlas.zoo import GPT, GPTConfig
from harness.results import RESULTS, keep, requirement


def timed(run: Callable[[], Any], product: float) -> tuple[Any, dict[str, float]]:
    """What ``run`` gives, and what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = run()
    cpu = time.process_time() - cpu
    return found, {
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "in_products_of_h": round(cpu / product, 1),
    }


def store(rows: list[dict[str, Any]], parameters: int, tokens: int) -> None:
    """Keep the rows so far, with those of earlier calls that were not measured again."""
    path = RESULTS / "atlas_deep.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    new = {row["what"] for row in rows}
    whole = [row for row in before if row["what"] not in new] + rows
    parts = [row["cpu_seconds"] for row in whole if "sublayer" not in row["what"]]
    keep(
        "atlas_deep",
        {
            "parameters": parameters,
            "tokens": tokens,
            "rows": whole,
            "requirements": [
                requirement(
                    "processor minutes: map by role, and propagation",
                    round(sum(parts) / 60, 1) if len(parts) == 2 else None,
                    20,
                )
            ],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--figures", default=None)
    parser.add_argument("--by", nargs="*", default=["sublayer", "role"])
    parser.add_argument("--skip-propagation", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=1000, context=options.tokens, d_model=256, n_heads=4, n_layers=12)
    model = GPT(config).eval()
    tokens = torch.randint(0, 1000, (1, options.tokens + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    problem = ca.Problem(model, "cross_entropy", batch)
    vector = torch.randn(problem.size)
    operator = ca.Hessian(problem)
    operator @ vector
    start = time.process_time()
    operator @ vector
    product = time.process_time() - start
    operator.release()

    rows: list[dict[str, Any]] = []
    for by in options.by:

        def survey(by: str = by) -> ca.Atlas:
            return ca.atlas(problem, by=by, biases=False, method="sketch", rtol=0.1)

        found, taken = timed(survey, product)
        rows.append(
            {
                "what": f"atlas by {by}",
                "entries": len(found.names),
                "products": found.products,
                "error": round(found.error, 4),
                **taken,
            }
        )
        print(rows[-1], flush=True)
        store(rows, problem.size, options.tokens)
        if options.figures:
            found.save_figures(os.path.join(options.figures, by))
    if options.skip_propagation:
        return
    analyzer = ca.CurvaturePropagationAnalyzer(model, "cross_entropy", probes=4)
    flow, taken = timed(lambda: analyzer.analyze_curvature_flow(*batch), product)
    entries = len(flow.sublayers) + len(flow.activations)
    rows.append({"what": f"propagation, {flow.method}", "entries": entries, **taken})
    print(rows[-1], flush=True)
    store(rows, problem.size, options.tokens)
    if options.figures:
        analyzer.visualize_curvature_flow(os.path.join(options.figures, "flow.png"))


if __name__ == "__main__":
    main()
