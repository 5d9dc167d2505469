"""The whole picture of a 12-layer, 10 M-parameter GPT: atlas and propagation, in minutes.

python benchmarks/atlas_deep.py [--tokens 64] [--figures DIR] [--by sublayer role]
python benchmarks/atlas_deep.py --depths     # only how the propagation grows with the layers

Processor seconds are of all threads together; the wall's depend on what else the machine does.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import curvatlas as ca
from curvatlas.zoo import GPT, GPTConfig
from harness.results import RESULTS, keep, requirement

GROWTH = "exponent of one sweep in the layers"


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
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    keep(
        "atlas_deep",
        {
            **{name: kept[name] for name in ("depths",) if name in kept},
            "parameters": parameters,
            "tokens": tokens,
            "rows": whole,
            "requirements": [
                requirement(
                    "processor minutes: map by role, and propagation",
                    round(sum(parts) / 60, 1) if len(parts) == 2 else None,
                    20,
                ),
                *(r for r in kept.get("requirements", []) if r["name"] == GROWTH),
            ],
        },
    )


def depths(layers: tuple[int, ...] = (2, 4, 8, 16, 32)) -> None:
    """The matrix-free account of all sublayers by one sweep, and by products at every one.

    Intervals are half widths relative to the norm of the Hessian there, the median of all entries.
    """
    rows: list[dict[str, Any]] = []
    for sweep, name in ((True, "one sweep"), (False, "products at every entry")):
        seconds = []
        for count in layers:
            torch.manual_seed(0)
            config = GPTConfig(vocabulary=64, context=32, d_model=64, n_heads=4, n_layers=count)
            model, drawn = GPT(config).eval(), torch.randint(0, 64, (1, 33))
            analyzer = ca.CurvaturePropagationAnalyzer(
                model, "cross_entropy", method="matrix-free", sweep=sweep
            )
            taken = []
            for _ in range(2 if count < 16 else 1):
                start = time.process_time()
                flow = analyzer.analyze_curvature_flow(drawn[:, :-1], drawn[:, 1:])
                taken.append(time.process_time() - start)
            seconds.append(min(taken))
            found = [entry for entry in (*flow.sublayers, *flow.activations) if entry.norm > 0]
            totals = [(entry.measures["total"], entry.norm) for entry in found]
            norms = [(m.norm_interval[1] - m.norm_interval[0]) / 2 / n for m, n in totals]
            traces = [(m.trace_interval[1] - m.trace_interval[0]) / 2 / n for m, n in totals]
            rows.append(
                {
                    "what": f"propagation, {name}",
                    "layers": count,
                    "cpu_seconds": round(seconds[-1], 2),
                    "interval_of_norm": round(statistics.median(norms), 3),
                    "interval_of_trace": round(statistics.median(traces), 3),
                }
            )
            print(rows[-1], flush=True)
        exponent = statistics.linear_regression(
            [math.log(n) for n in layers], [math.log(s) for s in seconds]
        ).slope
        rows.append({"what": f"propagation, {name}", "exponent_in_layers": round(exponent, 2)})
        print(rows[-1], flush=True)
    path = RESULTS / "atlas_deep.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    swept = next(r["exponent_in_layers"] for r in rows if "exponent_in_layers" in r)
    others = [r for r in kept["requirements"] if r["name"] != GROWTH]
    rest = {k: v for k, v in kept.items() if k not in ("benchmark", "date", "machine")}
    lines = [*others, requirement(GROWTH, swept, 1.2)]
    keep("atlas_deep", {**rest, "depths": rows, "requirements": lines})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--figures", default=None)
    parser.add_argument("--by", nargs="*", default=["sublayer", "role"])
    parser.add_argument("--skip-propagation", action="store_true")
    parser.add_argument("--depths", action="store_true", help="growth with the layers only")
    options = parser.parse_args()
    if options.depths:
        depths()
        return
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
            os.makedirs(options.figures, exist_ok=True)
            found.plot().savefig(os.path.join(options.figures, f"{by}.png"))
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
