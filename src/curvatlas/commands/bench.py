"""``curvatlas bench``: what a product costs on this machine, in gradients of the same model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from curvatlas.commands.options import AsJson, Debug, Quiet, Seed, Verbose

Layers = Annotated[int, typer.Option("--layers", min=1, help="Layers of the GPT.")]
Width = Annotated[int, typer.Option("--width", min=4, help="Width of the GPT, in fours.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Rounds; medians are printed.")]
COLUMNS = 8


def bench(
    layers: Layers = 4,
    width: Width = 128,
    rounds: Rounds = 5,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Time products with H, H_o and H_f of a GPT, alone and by eight, in gradients.

    Every product stands between two gradients, so that other work on the machine cancels. The
    comparison with other libraries is in the repository's benchmarks folder (make bench).
    """
    from curvatlas.commands.console import Console

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    if width % 4:
        raise ValueError(f"--width must be a multiple of its 4 heads, got {width}.")
    findings = measure(layers=layers, width=width, rounds=rounds, seed=seed)
    console.answer(findings, _table(findings))


def measure(*, layers: int, width: int, rounds: int, seed: int) -> dict[str, Any]:
    """Medians over rounds of (time of a product) / (columns · time of a gradient)."""
    import torch
    import torch.nn.functional as F

    import curvatlas as ca
    from curvatlas.progress import track
    from curvatlas.zoo.gpt import GPT, GPTConfig

    torch.manual_seed(seed)
    config = GPTConfig(vocabulary=1000, context=64, d_model=width, n_heads=4, n_layers=layers)
    model = GPT(config).eval()
    inputs, targets = torch.randint(0, 1000, (2, 8, 64))
    weights = list(model.parameters())

    def gradient() -> None:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        torch.autograd.grad(loss, weights)

    problem = ca.Problem(model, "cross_entropy", (inputs, targets))
    operators = (ca.Hessian(problem), ca.GaussNewton(problem), ca.FunctionalHessian(problem))
    right = torch.randn(problem.size, COLUMNS)
    ratios: dict[tuple[str, int], list[float]] = {}
    seconds: list[float] = []
    for turn in track(range(rounds + 1), "rounds"):
        for operator in operators:
            for columns in (right[:, 0].contiguous(), right):
                count = 1 if columns.ndim == 1 else COLUMNS
                before = _seconds(gradient)
                taken = _seconds(lambda op=operator, v=columns: op @ v)  # type: ignore[misc]
                unit = (before + _seconds(gradient)) / 2
                if turn:  # the first round builds the graphs
                    kind = (type(operator).__name__, count)
                    ratios.setdefault(kind, []).append(taken / count / unit)
                    seconds.append(unit)
    return {
        "parameters": problem.size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": rounds,
        "gradient_seconds": statistics.median(seconds),
        "products": [
            {"operator": kind, "columns": count, "gradients": statistics.median(found)}
            for (kind, count), found in ratios.items()
        ],
    }


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _table(findings: dict[str, Any]) -> str:
    threads = findings["threads"]
    lines = [
        f"GPT of {findings['parameters']} parameters, 8 × 64 tokens, {threads} thread"
        f"{'s' if threads != 1 else ''}: a gradient takes {findings['gradient_seconds']:.3g} s.",
        "A product with one vector costs, in gradients:",
    ]
    for row in findings["products"]:
        how = "alone" if row["columns"] == 1 else f"of {row['columns']}"
        lines.append(f"  {row['operator']:<18} {how:<6} {row['gradients']:6.2f}")
    return "\n".join(lines)
