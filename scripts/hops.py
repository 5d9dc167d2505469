"""How many functions of ours one product runs through: distinct ones, counted by the profiler.

    python scripts/hops.py            # counts for the first and the second H @ v
    python scripts/hops.py --names    # and the functions themselves

A reader who follows ``H @ v`` through the source opens this many functions. The hand-written
passes of ``engines/tangent`` are the product itself, a push and a pull for every stage, and are
counted apart from the way to them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import curvatlas as ca

PACKAGE = str(Path(ca.__file__).parent)


def functions_of(call: Callable[[], Any]) -> list[str]:
    """Distinct functions and methods of the package that ``call`` enters, in the order of entry.

    Comprehensions and lambdas count as the function they stand in.
    """
    entered: dict[str, None] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            place = Path(code.co_filename).relative_to(PACKAGE)
            entered[f"{place}:{code.co_qualname}"] = None

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(entered)


PASSES = "engines/tangent/"


def counted(engine: str = "auto") -> dict[str, list[str]]:
    """Functions entered by the first and the second product with the Hessian of a small encoder."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(8, 5))
    problem = ca.Problem(model, "mse", (torch.randn(4, 6, 8), torch.randn(4, 6, 5)))
    operator = ca.Hessian(problem, engine=engine)
    vector = torch.ones(operator.shape[1])
    return {name: functions_of(lambda: operator @ vector) for name in ("first", "second")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--names", action="store_true")
    arguments = parser.parse_args()
    for engine in ("autograd", "tangent"):
        for name, functions in counted(engine).items():
            way = [function for function in functions if not function.startswith(PASSES)]
            files = {function.split(":")[0] for function in way}
            passes = len(functions) - len(way)
            print(
                f"{engine}, {name} H @ v: {len(way)} functions in {len(files)} files"
                + (f", and {passes} of the passes themselves" if passes else "")
            )
            if arguments.names:
                print("\n".join(f"    {function}" for function in functions))


if __name__ == "__main__":
    main()
