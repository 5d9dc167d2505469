"""Curvature while training: progressive sharpening up to the edge of stability, on a ViT and a GPT.

Plain full-batch gradient descent at a constant rate η. The largest eigenvalue of the Hessian rises
until it reaches 2/η and stays about there, while the loss goes on falling though not at every step.
Draws loss, sharpness, the share of each role in the curvature, and the spectrum at three moments.

    python examples/training_dynamics.py --output dynamics     # about half a minute
    python examples/training_dynamics.py --quick               # a few steps, to see that it runs
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.progress import track
from curvatlas.zoo.training import loss_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
ROLES = ("query", "key", "value", "output", "up", "down")


@dataclass
class Course:
    """What was seen along one run."""

    name: str
    rate: float
    losses: list[float]
    steps: list[int]
    sharpness: list[float]
    share_steps: list[int]
    shares: list[dict[str, float]]
    spectra: list[tuple[int, Any]]


def descend(
    name: str,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    rate: float,
    steps: int,
    measurements: int,
) -> Course:
    """Gradient descent on one batch; each measured eigenvector starts the next search."""
    course = Course(name, rate, [], [], [], [], [], [])
    problem = ca.Problem(model, "cross_entropy", batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    every, looks = max(1, steps // measurements), {0, steps // 3, steps - 1}
    start = None
    for step in track(range(steps), name, total=steps):
        if step % every == 0:
            operator = ca.Hessian(problem)
            top = ca.eigenpairs(
                operator, k=1, which="largest", tol=0.03, max_products=25, start=start,
                data_error=False,
            )  # fmt: skip
            start = top.vectors
            course.steps.append(step)
            course.sharpness.append(top.value)
        if step % (3 * every) == 0:
            course.share_steps.append(step)
            course.shares.append(shares(problem, seed=step))
        if step in looks:
            density = ca.spectral_density(ca.Hessian(problem), max_products=2 * measurements)
            course.spectra.append((step, density))
        optimizer.zero_grad()
        value = loss_of("cross_entropy", model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        course.losses.append(value.item())
    return course


def shares(problem: ca.Problem, *, seed: int, probes: int = 4) -> dict[str, float]:
    """tr H_o[role, role] / tr H_o from ±1 probes: the Gauss-Newton part is never negative."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (problem.size, probes), generator=generator) * 2.0 - 1.0
    each = (signs * (ca.GaussNewton(problem) @ signs.to(problem.parameters))).mean(1)
    found = dict.fromkeys((*ROLES, "other"), 0.0)
    for piece in problem.anatomy.slices:
        key = piece.role if piece.role in ROLES else "other"
        found[key] += float(piece.view(each).sum())
    total = sum(max(v, 0.0) for v in found.values())
    return {role: max(v, 0.0) / total for role, v in found.items()}


def draw(courses: list[Course], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.6 * len(courses)), layout="constrained")
    grid = figure.subplots(len(courses), 4, squeeze=False)
    for (loss, sharp, share, spectrum), course in zip(grid, courses, strict=True):
        loss.semilogy(course.losses, color=COLOURS[0], linewidth=1)
        loss.set(title=f"{course.name}: loss", xlabel="step", ylabel="cross-entropy")
        sharp.plot(course.steps, course.sharpness, "o-", color=COLOURS[0], markersize=3,
                   label="λmax")  # fmt: skip
        edge = 2 / course.rate
        sharp.axhline(edge, color=COLOURS[1], linestyle="--", label=f"2/η = {edge:.3g}")
        sharp.set(title="sharpness", xlabel="step", ylabel="largest eigenvalue of H")
        sharp.set_ylim(0, 3 * edge)
        sharp.legend(frameon=False)
        share.stackplot(
            course.share_steps,
            *([s[role] for s in course.shares] for role in course.shares[0]),
            labels=list(course.shares[0]),
            colors=COLOURS,
        )
        share.set(title="share of tr H_o by role", xlabel="step", ylim=(0, 1))
        share.legend(loc="upper right", fontsize=7, ncols=2)
        for (step, density), colour in zip(course.spectra, COLOURS, strict=False):
            spectrum.semilogy(
                density.grid, density.density.clamp_min(1e-6), color=colour, linewidth=1,
                label=f"step {step}",
            )  # fmt: skip
        spectrum.set(
            title="spectrum of H", xlabel="eigenvalue", ylabel="density", ylim=(1e-5, None)
        )
        spectrum.legend(frameon=False)
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--quick", action="store_true", help="12 steps on few samples")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="curvatlas-dynamics-"))
    folder.mkdir(parents=True, exist_ok=True)
    steps, images, windows = (12, 16, 4) if options.quick else (options.steps, 96, 16)
    measurements = 4 if options.quick else 24

    text = zoo.text(level="character", context=32)
    gpt = zoo.reference_gpt(
        vocabulary=text.classes, context=32, d_model=16, n_layers=1, n_heads=2
    )  # fmt: skip
    courses = [
        descend("ViT, digits", zoo.reference_vit(), tuple(zoo.digits().train.take(images)),
                rate=0.15, steps=steps, measurements=measurements),
        descend("GPT, characters", gpt, tuple(text.train.take(windows)), rate=0.4, steps=steps,
                measurements=measurements),
    ]  # fmt: skip
    path = folder / "training_dynamics.png"
    draw(courses, path)
    for course in courses:
        edge, late = 2 / course.rate, course.sharpness[len(course.sharpness) // 2 :]
        middle = sorted(late)[len(late) // 2]
        print(
            f"{course.name}: λmax {course.sharpness[0]:.3g} at the start, median "
            f"{middle:.3g} in the second half, 2/η = {edge:.3g}; loss {course.losses[0]:.3g} → "
            f"{course.losses[-1]:.3g}"
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
