"""Estimates that are stopped at chosen lines and go on from their checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import curvatlas as ca
from curvatlas.results import same
from spectra.spectrum_operators import SpectrumOperator

PACKAGE = str(Path(ca.__file__).parent)
ESTIMATES: dict[str, Callable[..., ca.Result]] = {
    "eigenpairs": lambda op, **o: ca.eigenpairs(op, k=3, which="both", tol=1e-6, **o),
    "restarted": lambda op, **o: ca.eigenpairs(op, k=3, tol=1e-8, memory=24 * 8 * 90, **o),
    "trace": lambda op, **o: ca.trace(op, rtol=0.05, max_products=60, **o),
    "frobenius": lambda op, **o: ca.frobenius_norm(op, rtol=0.05, max_products=60, **o),
    "diagonal": lambda op, **o: ca.diagonal(op, rtol=0.1, max_products=60, **o),
    "density": lambda op, **o: ca.spectral_density(op, probes=2, steps=8, max_products=40, **o),
    "lean density": lambda op, **o: ca.spectral_density(
        op, probes=2, steps=8, max_products=16, reorthogonalise=False, **o
    ),
}


def operator() -> SpectrumOperator:
    generator = torch.Generator().manual_seed(0)
    return SpectrumOperator(torch.randn(90, generator=generator, dtype=torch.float64) ** 3)


class StopAtLine:
    """Raises KeyboardInterrupt when the n-th line of the package is about to run."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.seen += 1
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def traced(function: Callable[[], Any], line: int) -> StopAtLine:
    stop = StopAtLine(line)
    before = sys.gettrace()
    sys.settrace(stop)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return stop


def lost_or_wrong(name: str, lines: list[int], folder: Path) -> list[str]:
    """Stops at these lines whose resumed result is not the uninterrupted one."""
    estimate = ESTIMATES[name]
    whole = estimate(operator())
    problems = []
    for line in lines:
        file = folder / f"{name} {line}"
        traced(lambda file=file: estimate(operator(), checkpoint=file), line)
        left_over = [path.name for path in folder.glob("*.partial")]
        try:
            right = same(estimate(operator(), checkpoint=file), whole)
        except Exception as error:
            problems.append(f"{name}, line {line}: {type(error).__name__}: {error}")
            continue
        if not right or left_over:
            problems.append(f"{name}, line {line}: {'wrong' if not right else left_over}")
    return problems
