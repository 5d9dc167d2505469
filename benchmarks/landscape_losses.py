"""How the loss settles up to k = 100,000 samples by forward passes, and the paper's ViT at size.

python benchmarks/landscape_losses.py [--k 100000] [--vit-samples 96] [--quick]

Each part runs in a process of its own. The losses: ``ca.landscape_convergence(curvature=False)`` on
a ViT of 10 k parameters. Fashion-MNIST's 70,000 images where it is installed, the rest of the
100,000 the same images moved by one pixel (said in the row); noise of the same shape elsewhere.
The ViT: eight blocks of width 128 with CIFAR-100's shapes, on CIFAR-100 where its binary version is
installed and on noise elsewhere: loss, gradient, one H·v and H_o·v, λmax of H_o, and losses against
k. Products and samples are counted, times are processor seconds of one thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import curvatlas as ca
from curvatlas import zoo
from harness.results import keep, requirement
from landscape import peak_mb, reset_peak


def grey_images(count: int) -> tuple[str, Tensor, Tensor]:
    """``count`` images of 28 × 28 with labels, and where they come from."""
    try:
        data = zoo.fashion_mnist()
    except FileNotFoundError:
        torch.manual_seed(0)
        return "noise", torch.randn(count, 28, 28), torch.randint(0, 10, (count,))
    inputs = torch.cat([data.train.inputs, data.validation.inputs])
    targets = torch.cat([data.train.targets, data.validation.targets])
    moves = [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)]
    copies = -(-count // len(inputs))
    moved = torch.cat([inputs.roll(move, dims=(1, 2)) for move in moves[:copies]])[:count]
    name = f"Fashion-MNIST, {min(count, len(inputs))} images"
    if count > len(inputs):
        name += f" and {count - len(inputs)} of them moved by one pixel"
    return name, moved, targets.repeat(copies)[:count]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = function()
    return result, round(time.process_time() - start, 2)


def losses(count: int) -> dict[str, Any]:
    name, inputs, targets = grey_images(count)
    model = zoo.reference_vit(d_model=26, image_size=28, patch_size=7).eval()
    starts = range(0, count, 1000)
    data = [(inputs[i : i + 1000], targets[i : i + 1000]) for i in starts]
    problem = ca.Problem(model, "cross_entropy", data)
    before = reset_peak()
    found, seconds = timed(lambda: ca.landscape_convergence(problem, curvature=False, orders=20))
    fit, null = found.difference.fit, found.null.fit
    assert fit is not None
    assert null is not None
    return {
        "k": found.samples,
        "data": name,
        "parameters": problem.size,
        "products": found.products,
        "forward_passes_a_sample": 2,
        "cpu_seconds": seconds,
        "memory_added_mb": round(peak_mb() - before),
        "loss_exponent": round(fit.exponent, 4),
        "loss_interval": [round(end, 4) for end in fit.interval],
        "noise_exponent": round(null.exponent, 4),
        "p_of_no_difference": round(found.against_null["p_value"], 3),
        "mean_step_at_the_largest_k": float(f"{float(found.difference.mean[-1]):.3g}"),
    }


def paper_vit(count: int) -> dict[str, Any]:
    try:
        some = zoo.cifar100(limit=count).train
        name, inputs, targets = "CIFAR-100", some.inputs, some.targets
    except FileNotFoundError:
        torch.manual_seed(0)
        name = "noise with CIFAR-100's shapes"
        inputs, targets = torch.randn(count, 3, 32, 32), torch.randint(0, 100, (count,))
    model = zoo.cifar_vit().eval()
    pieces = [(inputs[i : i + 16], targets[i : i + 16]) for i in range(0, count, 16)]
    problem = ca.Problem(model, "cross_entropy", pieces)
    few = ca.Problem(model, "cross_entropy", pieces[0])
    value, forward = timed(few.value)
    gradient, back = timed(few.gradient)
    hessian, outer = ca.Hessian(few), ca.GaussNewton(few)
    image, first = timed(lambda: hessian @ gradient)
    _, product = timed(lambda: hessian @ image)
    top, spectrum = timed(lambda: ca.eigenpairs(outer, k=1, tol=1e-2, max_products=30))
    found, settled = timed(lambda: ca.landscape_convergence(problem, curvature=False, orders=20))
    return {
        "data": name,
        "parameters": problem.size,
        "blocks": model.config.n_layers,
        "width": model.config.d_model,
        "samples_of_products": 16,
        "loss": round(value, 4),
        "loss_cpu_seconds": forward,
        "gradient_cpu_seconds": back,
        "first_product_cpu_seconds": first,
        "product_cpu_seconds": product,
        "largest_eigenvalue_outer": float(f"{top.value:.4g}"),
        "eigenvalue_products": top.products,
        "eigenvalue_cpu_seconds": spectrum,
        "k": found.samples,
        "losses_cpu_seconds": settled,
        "peak_mb": round(peak_mb()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", type=int, default=100_000)
    parser.add_argument("--vit-samples", type=int, default=96)
    parser.add_argument("--quick", action="store_true", help="1,000 and 20 samples, kept nowhere")
    parser.add_argument("--part", choices=("losses", "vit"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    counts = (1000, 20) if options.quick else (options.k, options.vit_samples)
    if options.part is not None:
        row = losses(counts[0]) if options.part == "losses" else paper_vit(counts[1])
        print(json.dumps(row))
        return
    rows = {}
    for part in ("losses", "vit"):
        command = [sys.executable, __file__, "--part", part]
        command += ["--k", str(counts[0]), "--vit-samples", str(counts[1])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows[part] = json.loads(done.stdout.splitlines()[-1])
        print(rows[part], flush=True)
    if options.quick:
        return
    reached = requirement("100,000 over the samples reached", 1e5 / rows["losses"]["k"], 1.0)
    products = requirement("derivatives for the losses", rows["losses"]["products"], 0)
    print(
        keep(
            "landscape_losses",
            {"rows": [rows["losses"]], "vit": [rows["vit"]], "requirements": [reached, products]},
        )
    )


if __name__ == "__main__":
    main()
