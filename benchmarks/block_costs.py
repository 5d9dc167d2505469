"""Operations and bytes of a block's closed forms, counted, against what the formulas predict.

    python benchmarks/block_costs.py [--quick]

The block of the papers (GELU, one head, post-norm, no biases, no affine norms, MSE, float64), as
tokens N, width d and hidden size F grow one at a time. Counted: 2·m·k·n for every matrix product
that ran, and the bytes every operation wrote (views write none). Predicted, with P_a the size of
weight a and L the tokens of one sample:

    moments    2N L (2d² + 2d·d_k + d_k²)
    tail       2N (8d³ + 3d²F + dF²)
    assembly   2N Σ_{a≤b} t_ab P_a P_b,  t = 2 where a pair has two terms, else 1
    dense      moments + tail + assembly;   bytes: 24 P² plus 8N(10d² + 8dF + 2F²) per-token tensors
    product    12 N P + 26 N L d;           bytes: 8N(60d + 20F + 12L)
    diagonal   2N (2L d(d + d_k) + 7d³ + 3d²F);   bytes: 8N(60d² + 10dF)

An entry of the dense Hessian is written three times: in a tile, and in either triangle (half each)
or in a folded bracket. Symmetry makes the products fewer than the assembly's formula by up to 40 %.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.engines.tangent.stack import BlockStack
from harness.results import keep

BASE = {"samples": 4, "length": 16, "d": 16, "d_ff": 64}
SWEEPS: dict[str, list[int]] = {
    "samples": [1, 2, 4, 8, 16],
    "d": [8, 16, 24, 32],
    "d_ff": [32, 64, 128, 256],
}
# name → places of the two matrices among the arguments
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2),
             "baddbmm_": (1, 2)}  # fmt: skip


class Count(TorchDispatchMode):
    """Operations of all matrix products, and bytes written, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.bytes = 0, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        places = _PRODUCTS.get(func._schema.name.removeprefix("aten::"))
        if places is not None:
            left, right = (args[place] for place in places)
            self.flops += 2 * left.numel() * right.shape[-1]
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in _returns(func)):
            written = result if isinstance(result, (tuple, list)) else [result]
            self.bytes += sum(t.nbytes for t in written if isinstance(t, Tensor))
        return result


def _returns(func: Any) -> list[Any]:
    return list(func._schema.returns)


def predicted(samples: int, length: int, d: int, d_ff: int) -> dict[str, tuple[float, float]]:
    """Object → (operations, bytes written)."""
    n, key = samples * length, d
    sizes = {"query": d * key, "key": d * key, "value": d * d, "up": d * d_ff, "down": d * d_ff}
    size = sum(sizes.values())
    moments = 2 * n * length * (2 * d**2 + 2 * d * key + key**2)
    tail = 2 * n * (8 * d**3 + 3 * d**2 * d_ff + d * d_ff**2)
    two_terms = {("query", "value"), ("key", "value")} | {
        (a, b) for a in ("query", "key", "value") for b in ("up", "down")
    }
    names = list(sizes)
    assembly = 2 * n * sum(
        (2 if (a, b) in two_terms else 1) * sizes[a] * sizes[b]
        for i, a in enumerate(names)
        for b in names[i:]
    )  # fmt: skip
    tensors = 8 * n * (10 * d**2 + 8 * d * d_ff + 2 * d_ff**2)
    return {
        "dense": (moments + tail + assembly, 24 * size**2 + tensors),
        "product": (
            12 * n * size + 26 * n * length * d,
            8 * n * (60 * d + 20 * d_ff + 12 * length),
        ),
        "diagonal": (
            2 * n * (2 * length * d * (d + key) + 7 * d**3 + 3 * d**2 * d_ff),
            8 * n * (60 * d**2 + 10 * d * d_ff),
        ),
    }


def measure(case: dict[str, int], *, rounds: int) -> list[dict[str, Any]]:
    """One row for each object at one size."""
    torch.manual_seed(0)
    d, d_ff = case["d"], case["d_ff"]
    block = TransformerBlockHessian(
        d, d_ff, bias=False, affine=False, output_projection=False
    ).double()
    x = torch.randn(case["samples"], case["length"], d, dtype=torch.float64)
    y = torch.randn_like(x)
    stack = BlockStack([(block.spec, block.weights)]).linearise(x, y)
    size = stack.shape[0]
    v = torch.randn(size, dtype=torch.float64)
    work: dict[str, Callable[[], object]] = {
        "dense": lambda: block.compute_block_hessian(x, y).H,
        "product": lambda: stack.product(v),
        "diagonal": lambda: block.derivatives(x, y).diagonal(),
    }
    rows = []
    for name, (flops, written) in predicted(**case).items():
        work[name]()
        with Count() as count:
            work[name]()
        seconds = statistics.median(_seconds(work[name]) for _ in range(rounds))
        rows.append(
            {
                "object": name,
                "tokens": case["samples"] * case["length"],
                "d": d,
                "d_ff": d_ff,
                "parameters": size,
                "Mflop": round(count.flops / 1e6, 3),
                "predicted Mflop": round(flops / 1e6, 3),
                "flop ratio": round(count.flops / flops, 3),
                "MB written": round(count.bytes / 1e6, 3),
                "predicted MB": round(written / 1e6, 3),
                "byte ratio": round(count.bytes / written, 3),
                "milliseconds": round(1e3 * seconds, 3),
                "Gflop/s": round(count.flops / seconds / 1e9, 2),
            }
        )
    return rows


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exponents between the ends of each sweep: counted against predicted."""
    found = []
    for axis in SWEEPS:
        field = "tokens" if axis == "samples" else axis
        for name in ("dense", "product", "diagonal"):
            chosen = [r for r in rows if r["sweep"] == axis and r["object"] == name]
            first, last = chosen[0], chosen[-1]
            ratio = math.log(last[field] / first[field])
            counted, formula = (
                round(math.log(last[key] / first[key]) / ratio, 2)
                for key in ("Mflop", "predicted Mflop")
            )
            found.append(
                {
                    "object": name,
                    "grows with": field,
                    "from": first[field],
                    "to": last[field],
                    "exponent": counted,
                    "predicted exponent": formula,
                }
            )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing is kept")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for axis, values in SWEEPS.items():
        for value in values:
            for row in measure({**BASE, axis: value}, rounds=1 if options.quick else 7):
                rows.append({"sweep": axis, **row})
                print("  ".join(f"{key} {entry}" for key, entry in rows[-1].items()))
    exponents = growth(rows)
    for row in exponents:
        print("  ".join(f"{key} {entry}" for key, entry in row.items()))
    if not options.quick:
        print(f"kept in {keep('block_costs', {'growth': exponents, 'rows': rows}).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
