"""What one product costs, in gradients of the same model, and whether the answers agree.

    python benchmarks/products.py [--quick] [--cases gpt-1m vit-2.8k gpt-100k layers]

One process, one thread; every call stands between two gradients (harness/timing.py). Differences
are relative to reverse over reverse in float64 with the same weights.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import curvatlas as ca
from harness.cases import CASES, Case, gpt_12_layers
from harness.contestants import ONE_BY_ONE, contestants, references
from harness.results import RESULTS, keep, requirement
from harness.timing import Contestant, clocked, interleave

COLUMNS = 8
LAST_LAYER_ROLES = ("query", "key", "value", "output", "up", "down")


def compare(case: Case, *, rounds: int, wide: int) -> dict[str, Any]:
    """Every contestant on one model: cost in gradients and difference from the reference."""
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(case.size, COLUMNS, generator=generator)
    exact = references(case, columns)
    entrants = contestants(case, columns)
    differences = [_difference(entrant, exact) for entrant in entrants]
    seconds = interleave(case.gradient, entrants, rounds=rounds, wide=wide)
    rows = [
        {**entrant.summary(), "difference": difference}
        for entrant, difference in zip(entrants, differences, strict=True)
    ]
    return {
        "case": case.name,
        "parameters": case.size,
        "inputs": list(case.inputs.shape),
        "gradient_seconds": round(seconds, 5),
        "rows": rows,
        "matrix_products_alone": matrix_products_alone(case, columns, rounds=rounds, wide=wide),
    }


_MATRIX_PRODUCTS = frozenset(("addmm_", "baddbmm_", "mm", "bmm", "matmul"))


def matrix_products_alone(
    case: Case, columns: torch.Tensor, *, rounds: int, wide: int
) -> list[dict[str, Any]]:
    """What the matrix products of our H·v and H_o·v take without anything between them.

    Nothing that makes the same matrix products can be faster. ``per_second``: their operations, of
    which a product of two square matrices of 1024 makes ``square_per_second``.
    """
    model = case.clone()
    problem = ca.Problem(model.model, "cross_entropy", (model.inputs, model.targets))
    entrants, operations = [], []
    for quantity, kind in (("H", ca.Hessian), ("H_o", ca.GaussNewton)):
        for count in (1, COLUMNS):
            operator, some = kind(problem), columns[:, :count]
            for _ in range(3):
                operator @ some  # the second one is written down
            repeat, flops = _repeated(operator, some)
            operations.append(flops)
            entrants.append(Contestant("matrix products alone", "", quantity, count, repeat))
    seconds = interleave(case.gradient, entrants, rounds=rounds, wide=wide)
    square = torch.randn(1024, 1024)
    best = min(clocked(lambda: square @ square)[0] for _ in range(20))
    return [
        {
            **entrant.summary(),
            "per_second": round(
                flops / (entrant.summary()["gradients"] * seconds) / count / 1e9, 1
            ),
            "square_per_second": round(2 * 1024**3 / best / 1e9, 1),
        }
        for entrant, flops in zip(entrants, operations, strict=True)
        for count in (entrant.columns,)
    ]


def _repeated(
    operator: ca.LinearOperator, columns: torch.Tensor
) -> tuple[Callable[[], None], float]:
    """(the matrix products of ``operator @ columns`` again, their operations)."""
    linear = next(iter(operator._full))[1]  # type: ignore[attr-defined]
    tape = next(tape for tape in linear._tapes._tapes.values() if tape is not None)
    vectors = [columns.T.contiguous(), torch.empty(columns.shape[::-1])]
    views = tape.views(*vectors)
    calls = [call for call in tape.calls if call.function.__name__ in _MATRIX_PRODUCTS]

    def repeat() -> None:
        for call in calls:
            call.repeat(views)

    return repeat, sum(_operations(call, views) for call in calls)


def _operations(call: Any, views: Sequence[torch.Tensor]) -> float:
    """2 a b c of a product (a, b) × (b, c), for every one of a batch."""
    given = list(call.args)
    for place, index in call.cut:
        if not isinstance(place, str):
            given[place] = views[index]
    left, right = given[-2:]
    return 2.0 * max(left.numel() * right.shape[-1], right.numel() * left.shape[-2])


def _difference(entrant: Contestant, exact: dict[str, torch.Tensor]) -> float:
    want = exact[entrant.quantity]
    got = entrant.run().double()
    want = want[:, 0] if got.ndim == 1 else want
    return float(f"{float(((got - want).norm() / want.norm()).detach()):.3g}")


def last_layer(case: Case, *, rounds: int) -> dict[str, Any]:
    """Products with one role of the last layer, as shares of the full product.

    "alone": an operator asked for that role only. "after": one that has already made full products
    and works on the graph it kept for them.
    """
    problem = ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))
    generator = torch.Generator().manual_seed(1)
    last = max(piece.layer for piece in problem.anatomy.slices if piece.layer is not None)
    full, entrants = ca.Hessian(problem), []
    vector = torch.randn(case.size, generator=generator)
    for role in LAST_LAYER_ROLES:
        selector = f"blocks.{last}.{role}"
        alone, after = ca.Hessian(problem)[selector], full[selector]
        u = torch.randn(alone.shape[1], generator=generator)
        for view, how in ((alone, "alone"), (after, "after")):
            run = lambda view=view, u=u: view @ u  # noqa: E731
            entrants.append(Contestant(f"{selector} ({how})", "curvatlas", "H", 1, run))
    full @ vector  # the kept graph that the "after" views work on
    interleave(lambda: full @ vector, entrants, rounds=rounds, wide=1)
    rows = []
    for entrant in entrants:
        row = entrant.summary()
        row["of_full"] = row.pop("gradients")
        row["processor_of_full"] = row.pop("processor_gradients")
        rows.append(row)
    return {"case": case.name, "parameters": case.size, "layers": last + 1, "rows": rows}


# Most gradients a column may cost: H·v, H·V, H_o·v, H_o·V.
LIMITS = {
    "GPT 1.06 M": (1.6, 1.45, 1.1, 1.05),
    "GPT 100 k": (1.55, 0.95, 1.15, 0.72),
    "ViT 2.8 k": (1.8, 0.9, 1.4, 0.7),
}
# Of the fastest other way, peers and plain PyTorch, single products repeated included.
SHARE_OF_FASTEST = {"GPT 1.06 M": 0.8, "GPT 100 k": 0.8, "ViT 2.8 k": 1.0}


def contract(cases: list[dict[str, Any]], views: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The lines of the contract these numbers decide."""
    lines = []
    for result in cases:
        ours = [row for row in result["rows"] if row["library"] == "curvatlas"]
        others = [row for row in result["rows"] if row["library"] != "curvatlas"]
        looped = {r["quantity"]: r["gradients"] for r in ours if r["name"].endswith(ONE_BY_ONE)}
        cost = {
            (row["quantity"], row["columns"]): row["gradients"]
            for row in ours
            if not row["name"].endswith(ONE_BY_ONE)
        }
        name = result["case"]
        cells = [(quantity, columns) for quantity in ("H", "H_o") for columns in (1, COLUMNS)]
        for cell, limit in zip(cells, LIMITS.get(name, ()), strict=False):
            what = f"{cell[0]} times {cell[1]} in gradients a column, {name}"
            lines.append(requirement(what, cost[cell], limit))
            rivals = [
                row["gradients"]
                for row in others
                if row["quantity"] == cell[0] and row["columns"] in (1, cell[1])
            ]
            if rivals:
                share = round(cost[cell] / min(rivals), 3)
                what = f"{cell[0]} times {cell[1]} of the fastest other way, {name}"
                lines.append(requirement(what, share, SHARE_OF_FASTEST[name]))
        for quantity in ("H", "H_o", "H_f"):
            share = round(cost[quantity, COLUMNS] / looped[quantity], 3)
            what = f"{quantity}: {COLUMNS} columns against column by column, {name}"
            lines.append(requirement(what, share, 1.0))
    if views is not None:
        worst = max(row["of_full"] for row in views["rows"])
        name = "one role of the last of 12 layers, of a full product"
        lines.append(requirement(name, worst, 0.5))
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[*CASES, "layers"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing is kept")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds, wide = (3, 3) if options.quick else (options.rounds, 3)
    results, views = [], None
    for name in options.cases:
        print(f"products: {name}", file=sys.stderr)
        if name == "layers":
            views = last_layer(gpt_12_layers(), rounds=rounds)
        else:
            results.append(compare(CASES[name](), rounds=rounds, wide=wide))
    lines = contract(results, views)
    content = {"requirements": lines, "cases": results, "last_layer": views}
    _show(results, views, lines)
    if options.results or not options.quick:
        print(f"kept in {keep('products', content, folder=options.results or RESULTS).name}")
    return 0


def _show(
    cases: list[dict[str, Any]], views: dict[str, Any] | None, lines: list[dict[str, Any]]
) -> None:
    for result in cases:
        seconds = result["gradient_seconds"]
        print(f"\n{result['case']}: {result['parameters']} parameters, gradient {seconds:.4f} s")
        for row in result["rows"]:
            low, high = row["quartiles"]
            print(
                f"  {row['name']:36s} {row['quantity']:4s} ×{row['columns']}  "
                f"{row['gradients']:6.2f} ({low:.2f}-{high:.2f}, processor "
                f"{row['processor_gradients']:.2f})   difference {row['difference']:.1e}"
            )
        for row in result["matrix_products_alone"]:
            speed = f"{row['per_second']} of {row['square_per_second']} GFlop/s"
            print(
                f"  {row['name']:36s} {row['quantity']:4s} ×{row['columns']}  "
                f"{row['gradients']:6.2f}, {speed}"
            )
    for row in (views or {"rows": []})["rows"]:
        print(f"  {row['name']:36s} {row['of_full']:.3f} of a full product")
    for line in lines:
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[line["met"]]
        print(f"  {line['name']}: {line['measured']} (at most {line['limit']}): {verdict}")


if __name__ == "__main__":
    sys.exit(main())
