"""How the loss landscape of a ViT and of an MLP of the same size settles as samples are added.

Draws entry heat maps of the ViT's Hessian before and after training, and the loss and Hessian
differences against k with the null control, as PNG files. Fashion-MNIST where it is installed
(``--data fashion-mnist``), digits otherwise.

    python examples/landscape_convergence.py --output landscape          # about half a minute
    python examples/landscape_convergence.py --output landscape --full   # 1,000 samples, heat maps
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import curvatlas as ca
from curvatlas import zoo

SMALL = {"samples": 96, "steps": 150, "width": 8}


def heat_maps(before: torch.Tensor, after: torch.Tensor, anatomy: Any, path: Path) -> None:
    """log10 |H_ij| with a line wherever the role changes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.6), layout="constrained")
    for axes, matrix, title in zip(
        figure.subplots(1, 2), (before, after), ("at initialisation", "after training"), strict=True
    ):
        image = axes.imshow(
            matrix.abs().clamp_min(1e-12).log10(), vmin=-8, vmax=1, interpolation="nearest"
        )
        marks = [piece for piece in anatomy.slices if piece.size >= len(matrix) // 25]
        for piece in marks:
            axes.axhline(piece.start - 0.5, color="white", linewidth=0.4)
            axes.axvline(piece.start - 0.5, color="white", linewidth=0.4)
        axes.set_yticks([p.start + p.size // 2 for p in marks], [p.role for p in marks], fontsize=7)
        axes.set(xlabel="parameter", title=title)
        figure.colorbar(image, ax=axes, label="log10 |H entry| (loss / parameter²)")
    figure.savefig(path, dpi=120)


def dense_hessian(model: nn.Module, data: zoo.Samples) -> torch.Tensor:
    return ca.Hessian(ca.Problem(model, "cross_entropy", tuple(data))).dense()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("digits", "fashion-mnist", "mnist"), default="digits")
    parser.add_argument("--full", action="store_true", help="1,000 samples, width 16, heat maps")
    parser.add_argument("--samples", type=int, help="largest k")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--width", type=int)
    parser.add_argument("--heat-maps", action="store_true", help="dense Hessians, about a minute")
    parser.add_argument("--output", type=Path, default=Path("landscape"))
    options = parser.parse_args()
    sizes = {"samples": 1000, "steps": 800, "width": 16} if options.full else SMALL
    for name, size in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    options.heat_maps |= options.full
    options.output.mkdir(parents=True, exist_ok=True)

    loaders = {"digits": zoo.digits, "fashion-mnist": zoo.fashion_mnist, "mnist": zoo.mnist}
    data = loaders[options.data]()
    pixels = data.train.inputs.shape[-1]
    vit = zoo.reference_vit(
        d_model=options.width, image_size=pixels, patch_size=2 if pixels == 8 else 7
    )
    parameters = sum(p.numel() for p in vit.parameters())
    baseline = zoo.MLPConfig(inputs=pixels * pixels, n_layers=2).of_size(parameters)
    few = data.train.take(64).to(torch.float64)
    before = dense_hessian(vit.double().eval(), few) if options.heat_maps else None

    for name, model in (("vit", vit), ("mlp", zoo.MLP(baseline))):
        print(f"--- {name}: {zoo.train(model.float(), data, steps=options.steps)}")
        model.double().eval()
        samples = data.train.take(options.samples).to(torch.float64)
        problem = ca.Problem(model, "cross_entropy", [tuple(b) for b in samples.batches(256)])
        found = ca.landscape_convergence(problem, spectra=3, spectrum_samples=256)
        print(found)
        found.plot().savefig(options.output / f"{name}.png", dpi=120)
    if before is not None:
        anatomy = ca.Problem(vit, "cross_entropy", tuple(few)).anatomy
        heat_maps(before, dense_hessian(vit, few), anatomy, options.output / "heat_maps.png")
    print(f"figures in {options.output}")


if __name__ == "__main__":
    main()
