"""Dense block Hessians: the closed form beside every autodiff way, in one process, interleaved.

    python benchmarks/dense_block.py                 # all cases, writes results/dense_block.json
    python benchmarks/dense_block.py --cases small   # P = 2816 only
    python benchmarks/dense_block.py --clock cpu     # CPU seconds: steadier on a shared machine

The block is the one of the papers: GELU, one head, post-norm, no biases, no affine norms, no output
projection, MSE. Contestants take turns; each line is the median of its calls. A contestant whose
cost is linear in the columns may be timed on some of them and scaled; the file says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.engines.tangent.stack import BlockStack

CASES = {
    "small": [(16, 64, 1), (16, 64, 8)],
    "large": [(32, 128, 1), (32, 128, 16)],
}
RESULTS = Path(__file__).parent / "results" / "dense_block.json"
EPS = 1e-5
TURN_SECONDS = 1 / 3


def make(d: int, d_ff: int, samples: int) -> tuple[TransformerBlockHessian, Tensor, Tensor]:
    torch.manual_seed(0)
    block = TransformerBlockHessian(
        d, d_ff, bias=False, affine=False, output_projection=False
    ).double()
    x = torch.randn(samples, d, d, dtype=torch.float64)
    return block, x, torch.randn_like(x)


def functional_loss(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    """The same loss as a function of (W_Q, W_K, W_V, W_1, W_2), norms written by hand."""
    scale = x.shape[-1] ** -0.5

    def norm(t: Tensor) -> Tensor:
        centred = t - t.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)

    def loss(query: Tensor, key: Tensor, value: Tensor, up: Tensor, down: Tensor) -> Tensor:
        logits = (x @ query.T) @ (x @ key.T).mT * scale
        u = norm(x + torch.softmax(logits, -1) @ (x @ value.T))
        z = norm(u + torch.nn.functional.gelu(u @ up.T) @ down.T)
        return (z - y).square().mean()

    return loss


class Autodiff:
    """The dense Hessian by automatic differentiation, some columns at a time."""

    def __init__(self, block: TransformerBlockHessian, x: Tensor, y: Tensor) -> None:
        self.weights = [p.detach().clone() for p in block.parameters()]
        self.sizes = [w.numel() for w in self.weights]
        self.size = sum(self.sizes)
        self.loss = functional_loss(x, y)

    def graph(self) -> tuple[list[Tensor], Tensor]:
        leaves = [w.clone().requires_grad_(True) for w in self.weights]
        first = torch.autograd.grad(self.loss(*leaves), leaves, create_graph=True)
        return leaves, torch.cat([g.reshape(-1) for g in first])

    def batched_double_backward(self, columns: int, chunk: int = 256) -> Tensor:
        leaves, gradient = self.graph()
        out = torch.empty(columns, self.size, dtype=torch.float64)
        for start in range(0, columns, chunk):
            stop = min(start + chunk, columns)
            seeds = torch.zeros(stop - start, self.size, dtype=torch.float64)
            seeds[:, start:stop].fill_diagonal_(1.0)
            rows = torch.autograd.grad(
                gradient, leaves, seeds, is_grads_batched=True, retain_graph=True
            )
            for part, row in zip(out[start:stop].split(self.sizes, 1), rows, strict=True):
                part.copy_(row.reshape(stop - start, -1))
        return out

    def column_loop(self, columns: int) -> Tensor:
        leaves, gradient = self.graph()
        out = torch.empty(columns, self.size, dtype=torch.float64)
        for i in range(columns):
            rows = torch.autograd.grad(gradient[i], leaves, retain_graph=True)
            out[i] = torch.cat([r.reshape(-1) for r in rows])
        return out

    def vmapped_jvp_of_grad(self, columns: int, chunk: int = 128) -> Tensor:
        split = [w.shape for w in self.weights]
        first = torch.func.grad(self.loss, argnums=tuple(range(5)))

        def column(v: Tensor) -> Tensor:
            pieces = [p.view(s) for p, s in zip(v.split(self.sizes), split, strict=True)]
            _, moved = torch.func.jvp(first, tuple(self.weights), tuple(pieces))
            return torch.cat([m.reshape(-1) for m in moved])

        out = torch.empty(columns, self.size, dtype=torch.float64)
        for start in range(0, columns, chunk):
            stop = min(start + chunk, columns)
            seeds = torch.zeros(stop - start, self.size, dtype=torch.float64)
            seeds[:, start:stop].fill_diagonal_(1.0)
            out[start:stop] = torch.func.vmap(column)(seeds)
        return out

    def torch_func_hessian(self, columns: int) -> Tensor:
        flat = torch.cat([w.reshape(-1) for w in self.weights])
        split = [w.shape for w in self.weights]

        def loss(v: Tensor) -> Tensor:
            pieces = [p.view(s) for p, s in zip(v.split(self.sizes), split, strict=True)]
            return self.loss(*pieces)

        return torch.func.hessian(loss)(flat)[:columns]


def curvlinops_columns(
    block: TransformerBlockHessian, x: Tensor, y: Tensor
) -> Callable[[int], Tensor] | None:
    """curvlinops' dense Hessian; None where it is not installed."""
    try:
        from curvlinops import HessianLinearOperator
    except ImportError:
        return None
    parameters = [p for p in block.parameters() if p.requires_grad]
    operator = HessianLinearOperator(
        block, torch.nn.MSELoss(), parameters, [(x, y)], check_deterministic=False
    )

    def dense(columns: int) -> Tensor:
        size = sum(p.numel() for p in parameters)
        eye = torch.zeros(size, columns, dtype=torch.float64)
        eye.fill_diagonal_(1.0)
        return (operator @ eye).T

    return dense


def machine(clock: Callable[[], float]) -> dict[str, Any]:
    """What the numbers were measured on, with its GEMM rate and its rate of writing memory."""
    a, b = torch.randn(2, 768, 768, dtype=torch.float64)
    c, page = torch.empty_like(a), torch.zeros(64 * 2**17, dtype=torch.float64)
    gemm = min(_time(lambda: torch.mm(a, b, out=c), clock) for _ in range(8))
    write = min(_time(lambda: page.zero_(), clock) for _ in range(8))
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gemm_gflops": 2 * 768**3 / gemm / 1e9,
        "write_gbytes": page.numel() * 8 / write / 1e9,
    }


def _time(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def run_case(
    d: int,
    d_ff: int,
    samples: int,
    *,
    rounds: int,
    clock: Callable[[], float],
    facts: dict[str, Any],
) -> dict[str, Any]:
    block, x, y = make(d, d_ff, samples)
    auto = Autodiff(block, x, y)
    size, tokens = auto.size, samples * d
    whole = size < 5000
    out, workspace = torch.zeros(size, size, dtype=torch.float64), Workspace()

    def closed(reuse: bool) -> Tensor:
        if reuse:
            return block.compute_block_hessian(x, y, out=out, workspace=workspace).H
        return block.compute_block_hessian(x, y).H

    # name → (work, columns it computes)
    partial_columns = size if whole and samples == 1 else 512
    contestants: dict[str, tuple[Callable[[], Tensor], int]] = {
        "closed form, buffers reused": (lambda: closed(True), size),
        "closed form, fresh": (lambda: closed(False), size),
        "batched double backward": (
            lambda: auto.batched_double_backward(partial_columns),
            partial_columns,
        ),
        "vmapped jvp of grad": (lambda: auto.vmapped_jvp_of_grad(partial_columns), partial_columns),
        "column loop": (lambda: auto.column_loop(64), 64),
    }
    if whole:
        contestants["torch.func.hessian"] = (lambda: auto.torch_func_hessian(size), size)
    other = curvlinops_columns(block, x, y)
    if other is not None:
        contestants["curvlinops"] = (lambda: other(256), 256)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    reference = auto.batched_double_backward(min(size, 512))
    errors: dict[str, float] = {}
    for round_number in range(rounds):
        for name, (work, columns) in contestants.items():
            # A turn is at least a third of a second: a quick contestant would otherwise be timed
            # on caches and pages that the slow ones left cold.
            turn = 0.0
            while turn < TURN_SECONDS:
                start = clock()
                result = work()
                elapsed = clock() - start
                turn += elapsed
                seconds[name].append(elapsed * size / columns)
            if round_number == 0:
                rows = min(len(result), len(reference))
                difference = torch.linalg.norm(result[:rows] - reference[:rows])
                errors[name] = float(difference / torch.linalg.norm(reference[:rows]))
            del result
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    peers = {n: s for n, s in middle.items() if not n.startswith("closed")}
    best = min(peers, key=lambda n: peers[n])
    roofline = tokens * size**2 / facts["gemm_gflops"] / 1e9
    roofline += size**2 * 8 / facts["write_gbytes"] / 1e9
    reused = middle["closed form, buffers reused"]
    report = {
        "d": d,
        "d_ff": d_ff,
        "samples": samples,
        "tokens": tokens,
        "parameters": size,
        "seconds": middle,
        "scaled_from_columns": {n: c for n, (_, c) in contestants.items() if c < size},
        "relative_errors": errors,
        "best_peer": best,
        "speedup_reused": peers[best] / reused,
        "speedup_fresh": peers[best] / middle["closed form, fresh"],
        "roofline_seconds": roofline,
        "times_roofline": reused / roofline,
        "workspace_bytes": workspace.nbytes,
    }
    _print_case(report)
    return report


def _print_case(report: dict[str, Any]) -> None:
    print(f"\nP = {report['parameters']}, {report['samples']} samples, {report['tokens']} tokens")
    for name, value in sorted(report["seconds"].items(), key=lambda item: item[1]):
        note = " (scaled)" if name in report["scaled_from_columns"] else ""
        print(
            f"  {name:30s} {value * 1e3:10.1f} ms   "
            f"error {report['relative_errors'][name]:.1e}{note}"
        )
    print(
        f"  {report['speedup_reused']:.1f}x the best peer ({report['best_peer']}), buffers reused, "
        f"{report['speedup_fresh']:.1f}x fresh; {report['times_roofline']:.1f} times the roofline"
    )


def peak_memory(d: int, d_ff: int, samples: int) -> dict[str, Any]:
    """Extra peak resident memory of one dense Hessian, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", f"{d},{d_ff},{samples}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _resident() -> int:
    """Resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _memory_child(d: int, d_ff: int, samples: int) -> None:
    """Print the extra peak memory: the resident size sampled every two milliseconds."""
    block, x, y = make(d, d_ff, samples)
    tiny = torch.randn(2, 3, 4, dtype=torch.float64)
    TransformerBlockHessian(4, 8).double().compute_block_hessian(tiny[0], tiny[1])  # load libraries
    before, highest, done = _resident(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            highest[0] = max(highest[0], _resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    matrix = block.compute_block_hessian(x, y).H
    done.set()
    watcher.join()
    extra = max(highest[0], _resident()) - before
    output = matrix.numel() * matrix.element_size()
    print(json.dumps({"output_bytes": output, "extra_bytes": extra, "ratio": extra / output}))


def cheap_quantities(clock: Callable[[], float], *, rounds: int) -> dict[str, Any]:
    """Exact diagonal and one block's product against a full product, d = 128, 256 tokens."""
    d, length = 128, 256
    torch.manual_seed(0)
    block = TransformerBlockHessian(
        d, 4 * d, bias=False, affine=False, output_projection=False
    ).double()
    x = torch.randn(1, length, d, dtype=torch.float64)
    y = torch.randn_like(x)
    stack = BlockStack([(block.spec, block.weights)]).linearise(x, y)
    v = torch.randn(stack.shape[0], dtype=torch.float64)
    found = block.derivatives(x, y)
    product = found.block_product("query_weight", "query_weight")
    w = torch.randn(product.shape[1], dtype=torch.float64)
    several = torch.randn(product.shape[1], 8, dtype=torch.float64)
    wide = torch.randn(stack.shape[0], 8, dtype=torch.float64)
    leaves, gradient = Autodiff(block, x, y).graph()
    work: dict[str, tuple[Callable[[], object], int]] = {
        "product": (lambda: stack.product(v), 5),
        "product_autograd": (
            lambda: torch.autograd.grad(gradient, leaves, v, retain_graph=True),
            5,
        ),
        "diagonal": (lambda: block.derivatives(x, y).diagonal(), 1),
        "query_block": (lambda: product @ w, 50),
        "query_block_8_columns": (lambda: product @ several, 10),
        "product_8_columns": (lambda: stack.product(wide), 1),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, (call, repeats) in work.items():
            start = clock()
            for _ in range(repeats):
                call()
            times[name].append((clock() - start) / repeats)
    middle = {name: statistics.median(values) for name, values in times.items()}
    want = stack.product(torch.nn.functional.pad(w, (0, len(v) - len(w))))[: len(w)]
    unit = torch.zeros_like(v)
    unit[d * d * 4] = 1.0
    entry = float(stack.product(unit)[d * d * 4])
    report = {
        "parameters": len(v),
        "tokens": length,
        "seconds": middle,
        "diagonal_in_products": middle["diagonal"] / middle["product"],
        "query_block_speedup": middle["product"] / middle["query_block"],
        "query_block_speedup_over_autograd": middle["product_autograd"] / middle["query_block"],
        "query_block_speedup_8_columns": (
            middle["product_8_columns"] / middle["query_block_8_columns"]
        ),
        "diagonal_error": abs(float(found.diagonal()[d * d * 4]) - entry) / abs(entry),
        "query_block_error": float(torch.linalg.norm(product @ w - want) / torch.linalg.norm(want)),
    }
    print(
        f"\nP = {len(v)}: exact diagonal = {report['diagonal_in_products']:.1f} products, "
        f"QQ product {report['query_block_speedup']:.1f}x cheaper than a full one, "
        f"{report['query_block_speedup_over_autograd']:.1f}x than double backward on a kept graph "
        f"({report['query_block_speedup_8_columns']:.1f}x with 8 columns)"
    )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cases", choices=["small", "large", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        _memory_child(*(int(part) for part in options.memory_of.split(",")))
        return
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    facts = machine(clock) | {"clock": options.clock}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    chosen = [c for name, cases in CASES.items() if options.cases in (name, "all") for c in cases]
    report: dict[str, Any] = {"machine": facts, "cases": [], "memory": []}
    if options.cases != "all" and options.output.exists():  # keep what this run does not measure
        held = json.loads(options.output.read_text())
        again = {(d, samples) for d, _, samples in chosen}
        for part in ("cases", "memory"):
            report[part] = [c for c in held[part] if (c["d"], c["samples"]) not in again]
    for d, d_ff, samples in chosen:
        large = d > 16
        rounds = max(2, options.rounds // 2) if large else options.rounds
        report["cases"].append(run_case(d, d_ff, samples, rounds=rounds, clock=clock, facts=facts))
        report["memory"].append({"d": d, "samples": samples, **peak_memory(d, d_ff, samples)})
        print(f"  extra peak memory {report['memory'][-1]['ratio']:.2f} x the output")
    report["cheap"] = cheap_quantities(clock, rounds=options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {options.output.name}")


if __name__ == "__main__":
    main()
