"""AdamW's own edge of stability: λmax(P⁻¹H) of a small ViT rises to its threshold and stays there.

Full-batch AdamW at constant rates, the monitor beside it. Plain sharpness λmax(H) keeps rising and
says nothing about 2/η; the eigenvalue in the optimizer's metric P meets (2 + 2β₁)/((1 − β₁) η).

    python examples/adamw_edge.py --output edge     # about two minutes
    python examples/adamw_edge.py --quick           # a few steps, to see that it runs
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import curvatlas as ca
from curvatlas import zoo

COLOURS = ("#0072B2", "#D55E00", "#009E73")


def descend(rate: float, *, steps: int, samples: int, every: int) -> ca.CurvatureHistory:
    """One run on a fixed batch; the monitor looks every few steps, whatever it costs."""
    model = zoo.reference_vit(seed=0)
    batch = tuple(zoo.digits().train.take(samples))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    monitor = ca.Monitor(
        model, "cross_entropy", batch, every=every, budget=1.0, optimizer=optimizer,
        eigenvalues=1, density_products=4,
    )  # fmt: skip
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        monitor.step()
    return monitor.history


def draw(courses: dict[float, ca.CurvatureHistory], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, own, plain = figure.subplots(1, 3)
    for (rate, history), colour in zip(courses.items(), COLOURS, strict=False):
        steps, name = history.series("step"), f"η = {rate:g}"
        loss.semilogy(steps, history.series("loss"), color=colour, label=name)
        own.plot(steps, history.series("edge_ratio"), color=colour, label=name)
        plain.semilogy(steps, history.series("stability"), color=colour, label=name)
    own.axhline(1, color="black", linestyle="--", linewidth=1)
    plain.axhline(2, color="black", linestyle="--", linewidth=1)
    loss.set(title="loss", xlabel="step")
    own.set(title="λmax(P⁻¹H) over AdamW's threshold", xlabel="step", ylim=(0, 2))
    plain.set(title="λmax(H) · η (plain edge: 2)", xlabel="step")
    own.legend(frameon=False)
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="12 steps on few samples")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="curvatlas-edge-"))
    folder.mkdir(parents=True, exist_ok=True)
    rates = (1e-3,) if options.quick else (5e-4, 1e-3, 2e-3)
    size = {"steps": 12, "samples": 16, "every": 6}
    if not options.quick:
        size = {"steps": 600, "samples": 128, "every": 15}
    courses = {rate: descend(rate, **size) for rate in rates}
    path = folder / "adamw_edge.png"
    draw(courses, path)
    for rate, history in courses.items():
        late = history.series("edge_ratio")[len(history) // 2 :]
        print(
            f"η = {rate:g}: median of λmax(P⁻¹H) over its threshold in the second half "
            f"{statistics.median(late):.2f}, λmax(H)·η {history.snapshots[-1].stability:.2g}"
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
