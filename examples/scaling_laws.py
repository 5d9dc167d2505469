"""A grid of small GPTs on text: loss and curvature against model and data size, over seeds.

Every finished run is stored: kill it and start it again, it goes on where it was.

    python examples/scaling_laws.py --output scaling          # 2 × 3 models, half a minute
    python examples/scaling_laws.py --output scaling --full   # 4 × 4 models × 3 seeds, minutes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn

import curvatlas as ca
from curvatlas import zoo

FULL = {"widths": [8, 12, 16, 24], "sizes": [100, 240, 580, 1400], "steps": 80, "seeds": 3}
SMALL = {"widths": [4, 8], "sizes": [40, 80, 160], "steps": 20, "seeds": None}

data = zoo.text(level="character", context=32)


def gpt(width: int, seed: int) -> nn.Module:
    return zoo.reference_gpt(
        d_model=width, n_heads=2, n_layers=1, context=32, vocabulary=data.classes, seed=seed
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="4 × 4 models × 3 seeds, minutes")
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--steps", type=int, help="of the widest model; the others take more")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--output", type=Path, default=Path("scaling"))
    options = parser.parse_args()
    for name, size in (FULL if options.full else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, size)

    analyzer = ca.ScalingLawAnalyzer(gpt)
    grid = analyzer.train_grid(
        options.widths,
        options.sizes,
        data=data,
        seeds=options.seeds,
        steps=options.steps,
        lr=1e-2,
        batch_size=16,
        curvature_samples=24 if options.full else 12,
        products=16 if options.full else 12,
        output=options.output,
    )
    print(grid)
    if len(options.sizes) >= 3 and len(options.widths) >= 2:
        print(analyzer.compare_predictions())
    for width in options.widths:
        try:
            print(analyzer.predict_optimal_dataset_size(width))
        except ValueError as refusal:
            print(f"width {width}: {refusal}")
    # beside the run folder, which holds only what the run itself wrote
    figure = options.output.with_name(options.output.name + ".png")
    grid.plot().savefig(figure, dpi=120)
    print(f"figure in {figure}")


if __name__ == "__main__":
    main()
