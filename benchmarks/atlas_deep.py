"""The whole picture of a 12-layer, 10 M-parameter GPT: atlas and propagation, in minutes.

python benchmarks/atlas_deep.py [--tokens 64] [--figures DIR] [--by sublayer role]

Times are of the processor, so that a busy machine does not spoil them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

import argparse
import time

import torch

import curvatlas as ca
from curvatlas.zoo import GPT, GPTConfig
from harness.results import keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--figures", default=None)
    parser.add_argument("--by", nargs="+", default=["sublayer", "role"])
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

    rows = []
    for by in options.by:
        start = time.process_time()
        found = ca.atlas(problem, by=by, biases=False, method="sketch", rtol=0.1)
        rows.append(
            {
                "what": f"atlas by {by}",
                "blocks": len(found.names),
                "products": found.products,
                "error": round(found.error, 4),
                "cpu_seconds": round(time.process_time() - start, 1),
                "in_products_of_h": round((time.process_time() - start) / product, 1),
            }
        )
        print(rows[-1], flush=True)
        if options.figures:
            found.save_figures(os.path.join(options.figures, by))
    start = time.process_time()
    analyzer = ca.CurvaturePropagationAnalyzer(model, "cross_entropy", probes=4)
    flow = analyzer.analyze_curvature_flow(*batch)
    rows.append(
        {
            "what": f"propagation, {flow.method}",
            "entries": len(flow.sublayers) + len(flow.activations),
            "cpu_seconds": round(time.process_time() - start, 1),
            "in_products_of_h": round((time.process_time() - start) / product, 1),
        }
    )
    print(rows[-1], flush=True)
    if options.figures:
        analyzer.visualize_curvature_flow(os.path.join(options.figures, "flow.png"))
    print(keep("atlas_deep", {"parameters": problem.size, "tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
