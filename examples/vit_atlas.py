"""Where curvature lives in a ViT on digits, before and after training, and how it travels.

    python examples/vit_atlas.py --output vit-atlas          # about half a minute
    python examples/vit_atlas.py --output vit-atlas --full   # the paper's width: minutes

Writes PNGs of the entry heat map, the role maps and the curvature flow; prints the tables. With
--claims the papers' claims are examined and the model is compared with others as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import curvatlas as ca
from curvatlas.figures import draw
from curvatlas.studies.claims import examine_claims
from curvatlas.studies.comparisons import (
    compare_checkpoints,
    compare_input_scale,
    compare_norm_placement,
    compare_softmax,
    compare_training,
    compare_with_mlp,
)
from curvatlas.zoo import digits, reference_vit, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("vit-atlas"))
    parser.add_argument("--full", action="store_true", help="width 16, 64 samples, five seeds")
    parser.add_argument("--claims", action="store_true", help="also the papers' claims (minutes)")
    parser.add_argument("--quick", action="store_true", help="width 4, 4 samples, ten steps")
    options = parser.parse_args()
    width, samples, steps, seeds = (16, 64, 800, range(5)) if options.full else (8, 8, 100, (0, 1))
    if options.quick:
        width, samples, steps, seeds = 4, 4, 10, (0, 1)
    options.output.mkdir(parents=True, exist_ok=True)

    data = digits()
    batch = data.train.take(samples)
    model = reference_vit(seed=0, d_model=width)
    analyzer = ca.CurvaturePropagationAnalyzer(model, "cross_entropy")
    atlases, weights = {}, {}
    for stage, trained in (("initialisation", 0), ("trained", steps)):
        if trained:
            print(train(model, data, steps=trained))
        problem = ca.Problem(model, "cross_entropy", (batch.inputs, batch.targets))
        atlases[stage] = ca.atlas(problem)
        weights[stage] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        print(f"--- {stage}\n{atlases[stage]}")
        flow = analyzer.analyze_curvature_flow(batch.inputs[:4], batch.targets[:4], step=trained)
        print(flow)
        picture = ca.entries(problem).plot()
        picture.savefig(options.output / f"entries-{stage}.png", dpi=140)
    draw(atlases, view="role").savefig(options.output / "roles.png", dpi=140)
    analyzer.visualize_curvature_flow(options.output / "flow.png")
    print(compare_norm_placement(samples=samples, seeds=seeds))
    if options.claims:
        print(examine_claims("digits"))
        print(compare_checkpoints(model, weights, "cross_entropy", tuple(batch)))
        for compare in (compare_input_scale, compare_softmax, compare_with_mlp, compare_training):
            print(compare(samples=samples, seeds=seeds))
    print(f"figures in {options.output}")


if __name__ == "__main__":
    main()
