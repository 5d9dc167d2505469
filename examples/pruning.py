"""Which weights can go: Optimal Brain Damage and Surgeon against magnitude, on a trained ViT.

Validation loss after removing 50 to 90 % of the attention and feed-forward weights, no retraining.
Optimal Brain Damage takes the exact diagonal of the Gauss-Newton matrix, once for all sparsities.
``benchmarks/pruning.py`` does the same for three seeds and for a GPT, with estimated diagonals too.

    python examples/pruning.py --output pruning
    python examples/pruning.py --quick              # fewer steps and samples, to see that it runs
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

import curvatlas as ca
from curvatlas import zoo

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
WAYS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "OBD, exact diagonal": {"method": "obd", "exact_diagonal": True},
    "OBS, blocks of 128": {"method": "obs"},
}
LOOKS = {
    "magnitude": ("#999999", "s:"),
    "OBD, exact diagonal": ("#D55E00", "v-"),
    "OBS, blocks of 128": ("#0072B2", "o-"),
}


def measure(
    model: nn.Module,
    data: zoo.Dataset,
    *,
    samples: int,
    gradients: int,
    sparsities: tuple[float, ...],
) -> dict[str, list[float]]:
    """Validation loss by way and sparsity; ``gradients`` of sampled targets for the surgeon."""
    batch = tuple(data.train.take(samples))
    found: dict[str, list[float]] = {}
    for name, options in WAYS.items():
        found[name] = []
        curvature = None
        for sparsity in sparsities:
            pruning = ca.prune(
                model,
                "cross_entropy",
                batch,
                sparsity=sparsity,
                curvature=curvature,
                samples=gradients,
                **options,
            )
            curvature = pruning.curvature or None
            pruned = copy.deepcopy(model)
            pruning.apply(pruned)
            found[name].append(zoo.evaluate(pruned, data.validation)[0])
        print(f"{name:26s} " + "  ".join(f"{loss:7.4f}" for loss in found[name]), flush=True)
    return found


def draw(losses: dict[str, list[float]], before: float, path: Path, sparsities: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in losses.items():
        colour, style = LOOKS[name]
        axes.semilogy([100 * s for s in sparsities], values, style, color=colour, label=name)
    axes.axhline(before, color="black", linewidth=0.8, label="unpruned")
    axes.set(xlabel="weights removed, %", ylabel="validation loss",
             title="ViT on digits, pruned without retraining")  # fmt: skip
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--samples", type=int, default=512, help="samples of the curvature")
    parser.add_argument("--quick", action="store_true", help="30 steps, 16 samples, two sparsities")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="curvatlas-pruning-"))
    folder.mkdir(parents=True, exist_ok=True)
    steps, samples = (30, 16) if options.quick else (options.steps, options.samples)
    sparsities = (0.5, 0.9) if options.quick else SPARSITIES

    width = {"d_model": 4} if options.quick else {}
    data, model = zoo.digits(), zoo.reference_vit(**width)
    print(f"trained: {zoo.train(model, data, steps=steps, lr=1.6e-2)}")
    model.eval()
    before = zoo.evaluate(model, data.validation)[0]
    print(f"{'validation loss at':26s} " + "  ".join(f"{s:7.0%}" for s in sparsities))
    gradients = 32 if options.quick else 512
    losses = measure(model, data, samples=samples, gradients=gradients, sparsities=sparsities)
    path = folder / "pruning.png"
    draw(losses, before, path, sparsities)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
