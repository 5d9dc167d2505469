"""H·v through a stack of blocks: by hand against double backward on a kept graph.

    python benchmarks/stack_products.py [--quick] [--output benchmarks/results/stack_products.json]

Four blocks, d = 128, 512 tokens, one thread. Both sides keep what they need (the graph of the
gradient, or activations and adjoints) and are then asked for products in turn, in one process, so
that the machine's noise falls on both. Memory is measured in a process of its own for each side:
the peak of the resident set above what model, data and vector already took. Agreement of the two
products is part of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.engines.tangent.stack import BlockStack
from curvatlas.layers.structure import BlockSpec
from harness.peak import resident

WIDTH, BLOCKS, TOKENS = 128, 4, 512
CASES = [
    {"samples": samples, "length": TOKENS // samples, "norm_first": norm_first, "dtype": dtype}
    for dtype in ("float64", "float32")
    for samples in (8, 1)
    for norm_first in (False, True)
]


class Setting:
    """Weights, data and a vector for one case."""

    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        dtype = getattr(torch, case["dtype"])
        self.spec = BlockSpec(
            d_model=WIDTH, n_heads=4, d_ff=4 * WIDTH, norm_first=case["norm_first"]
        )
        self.weights = [self._weights(dtype) for _ in range(BLOCKS)]
        shape = (case["samples"], case["length"], WIDTH)
        self.x, self.y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        size = sum(w.numel() for weights in self.weights for w in weights.values())
        self.v = torch.randn(size, dtype=dtype) / size**0.5

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        d, f = WIDTH, 4 * WIDTH
        shapes = {
            **{f"{n}_weight": (d, d) for n in ("query", "key", "value")},
            **{f"{n}_bias": (d,) for n in ("query", "key", "value")},
            "output_weight": (d, d),
            "output_bias": (d,),
            "up_weight": (f, d),
            "up_bias": (f,),
            "down_weight": (d, f),
            "down_bias": (d,),
            **{f"norm{i}_{p}": (d,) for i in (1, 2) for p in ("weight", "bias")},
        }
        draw = {n: torch.randn(s, dtype=dtype) / s[-1] ** 0.5 for n, s in shapes.items()}
        return {
            n: 1 + w if n.startswith("norm") and n.endswith("weight") else w
            for n, w in draw.items()
        }

    def by_hand(self) -> Callable[[], Tensor]:
        blocks = [(self.spec, weights) for weights in self.weights]
        here = BlockStack(blocks).linearise(self.x, self.y)
        return lambda: here.product(self.v)

    def by_autograd(self) -> Callable[[], Tensor]:
        """Fused kernels where PyTorch has twice differentiable ones; the fair opponent."""
        params = [{n: w.clone().requires_grad_(True) for n, w in ws.items()} for ws in self.weights]
        leaves = [w for ws in params for w in ws.values()]
        z = self.x
        for weights in params:
            z = self._block(weights, z)
        loss = (z - self.y).pow(2).mean()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        pieces = torch.split(self.v, [w.numel() for w in leaves])
        vectors = [p.view_as(w) for p, w in zip(pieces, leaves, strict=True)]

        def product() -> Tensor:
            rows = torch.autograd.grad(grads, leaves, vectors, retain_graph=True)
            return torch.cat([row.reshape(-1) for row in rows])

        return product

    def _block(self, w: dict[str, Tensor], x: Tensor) -> Tensor:
        n, length, d = x.shape
        heads = self.spec.n_heads

        def attention(x: Tensor) -> Tensor:
            q, k, v = (
                F.linear(x, w[f"{name}_weight"], w[f"{name}_bias"])
                .view(n, length, heads, -1)
                .transpose(1, 2)
                for name in ("query", "key", "value")
            )
            weights = torch.softmax(q @ k.mT * self.spec.logit_scale, -1)
            mixed = (weights @ v).transpose(1, 2).reshape(n, length, d)
            return F.linear(mixed, w["output_weight"], w["output_bias"])

        def feed_forward(x: Tensor) -> Tensor:
            hidden = F.gelu(F.linear(x, w["up_weight"], w["up_bias"]))
            return F.linear(hidden, w["down_weight"], w["down_bias"])

        def norm(x: Tensor, i: int) -> Tensor:
            return F.layer_norm(x, (d,), w[f"norm{i}_weight"], w[f"norm{i}_bias"], self.spec.eps)

        if self.spec.norm_first:
            x = x + attention(norm(x, 1))
            return x + feed_forward(norm(x, 2))
        x = norm(x + attention(x), 1)
        return norm(x + feed_forward(x), 2)


def time_case(case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Interleaved timings of both sides, and their agreement."""
    setting = Setting(case)
    sides = {"by_hand": setting.by_hand(), "double_backward": setting.by_autograd()}
    results = {name: run() for name, run in sides.items()}
    error = (results["by_hand"] - results["double_backward"]).norm()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}  # processor time of this process
    for _ in range(repeats):
        for name, run in sides.items():
            start, processor = time.perf_counter(), time.process_time()
            run()
            seconds[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - processor)
    ratios = [a / b for a, b in zip(seconds["double_backward"], seconds["by_hand"], strict=True)]
    cpu = {name: statistics.median(t) for name, t in busy.items()}
    return {
        "speedup_processor_time": cpu["double_backward"] / cpu["by_hand"],
        "relative_difference": float(error / results["double_backward"].norm()),
        "median_seconds": {name: statistics.median(t) for name, t in seconds.items()},
        "least_seconds": {name: min(t) for name, t in seconds.items()},
        "speedup_median_of_pairs": statistics.median(ratios),
        "speedup_of_least": min(seconds["double_backward"]) / min(seconds["by_hand"]),
    }


def peak_bytes(case: dict[str, Any], side: str) -> int:
    """Peak resident memory of state and products beyond model, data and vector; own process."""
    command = [sys.executable, __file__, "--measure", side, "--case", json.dumps(case)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(answer.stdout.strip())


def measure(case: dict[str, Any], side: str) -> int:
    # A tiny run first: library code and BLAS buffers that both sides load are nobody's memory.
    tiny = Setting({**case, "samples": 1, "length": 8})
    for run in (tiny.by_hand(), tiny.by_autograd()):
        run()
    del tiny, run
    setting = Setting(case)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # restart the high-water mark
    run = setting.by_hand() if side == "by_hand" else setting.by_autograd()
    for _ in range(3):
        run()
    return resident("VmHWM") - before


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cases, few repeats")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent / "results" / "stack_products.json",
    )
    parser.add_argument("--measure", choices=["by_hand", "double_backward"])
    parser.add_argument("--case", type=json.loads)
    options = parser.parse_args()
    if options.measure:
        print(measure(options.case, options.measure))
        return 0
    rows = []
    for case in CASES[::3] if options.quick else CASES:
        row = {"case": case, **time_case(case, 5 if options.quick else options.repeats)}
        row["peak_bytes"] = {s: peak_bytes(case, s) for s in ("by_hand", "double_backward")}
        peaks = row["peak_bytes"]
        row["memory_ratio"] = peaks["by_hand"] / peaks["double_backward"]
        rows.append(row)
        print(
            f"{case}: {row['speedup_median_of_pairs']:.2f}x (least {row['speedup_of_least']:.2f}x),"
            f" memory {row['memory_ratio']:.2f}, difference {row['relative_difference']:.1e}",
            flush=True,
        )
    report = {
        "what": "one Hessian-vector product, 4 blocks, d 128, 4 heads, GELU, 512 tokens, MSE",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
