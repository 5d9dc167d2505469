"""A grid of small ViTs: loss and curvature against model and data size.

Every finished run is stored: kill it and start it again, it goes on where it was.

    python examples/scaling_laws.py --output scaling          # 2 × 3 models, half a minute
    python examples/scaling_laws.py --output scaling --full   # 4 × 4 models, about ten minutes
"""

from __future__ import annotations

import argparse
from pathlib import Path

import curvatlas as ca
from curvatlas import zoo

FULL = {"widths": [4, 8, 12, 16], "sizes": [100, 240, 580, 1400], "steps": 600}
SMALL = {"widths": [4, 8], "sizes": [60, 120, 240], "steps": 60}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="4 × 4 models, about ten minutes")
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--output", type=Path, default=Path("scaling"))
    options = parser.parse_args()
    for name, size in (FULL if options.full else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, size)

    analyzer = ca.ScalingLawAnalyzer(lambda width: zoo.reference_vit(d_model=width))
    grid = analyzer.analyze_scaling_with_size(
        options.widths, options.sizes, steps=options.steps, output=options.output,
        **({} if options.full else {"curvature_samples": 48, "products": 24}),
    )  # fmt: skip
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
