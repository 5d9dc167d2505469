"""Two runs side by side: what differs in their setting, and which numbers moved beyond chance."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.results import Result
from curvatlas.runs.loading import LoadedRun, load

_LONGEST = 64  # entries of a list compared one by one; longer ones are summarised by their norm


@dataclass(frozen=True, kw_only=True)
class Change(Result):
    """One number of one step, in both runs."""

    name: str  # step and field, such as "hessian.trace:value"
    left: float
    right: float
    relative: float  # (right − left) / |left|, infinite when left is zero
    separated: bool | None  # whether the two 95 % intervals are disjoint; None without intervals

    def __str__(self) -> str:
        verdict = {True: "intervals apart", False: "intervals overlap", None: ""}[self.separated]
        return f"{self.name}: {self.left:.6g} → {self.right:.6g} ({self.relative:+.2%}) {verdict}"


@dataclass(frozen=True, kw_only=True)
class RunComparison(Result):
    """What two runs share and where they differ."""

    left: str
    right: str
    same_model: bool
    same_data: bool
    options: dict[str, tuple[Any, Any]]  # those that differ
    only_left: tuple[str, ...]  # steps
    only_right: tuple[str, ...]
    changes: tuple[Change, ...]  # every number in both runs that is not equal
    equal: int  # numbers that are equal

    def __str__(self) -> str:
        lines = [
            f"{self.left} against {self.right}",
            f"model: {'the same' if self.same_model else 'different'}, "
            f"data: {'the same' if self.same_data else 'different'}",
            *(f"option {k}: {a!r} → {b!r}" for k, (a, b) in self.options.items()),
            *(f"only in the first: {name}" for name in self.only_left),
            *(f"only in the second: {name}" for name in self.only_right),
            f"{self.equal} numbers equal, {len(self.changes)} changed",
        ]
        return "\n  ".join([*lines, *map(str, self.changes)])


def compare(
    left: LoadedRun | str | os.PathLike[str], right: LoadedRun | str | os.PathLike[str]
) -> RunComparison:
    """Compare two runs, given as loaded or by their folders."""
    a = left if isinstance(left, LoadedRun) else load(left)
    b = right if isinstance(right, LoadedRun) else load(right)
    changes, equal = [], 0
    for name in a.results:
        if name in b.results and a[name].kind == b[name].kind:
            for change in _changes(name, a[name], b[name]):
                if change is None:
                    equal += 1
                else:
                    changes.append(change)
    one, two = a.manifest.options, b.manifest.options
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    return RunComparison(
        left=str(a.path),
        right=str(b.path),
        same_model=a.manifest.fingerprints.get("model") == b.manifest.fingerprints.get("model"),
        same_data=a.manifest.fingerprints.get("data") == b.manifest.fingerprints.get("data"),
        options={key: (one.get(key), two.get(key)) for key in keys},
        only_left=tuple(name for name in a.results if name not in b.results),
        only_right=tuple(name for name in b.results if name not in a.results),
        changes=tuple(changes),
        equal=equal,
    )


def _changes(name: str, left: Result, right: Result) -> Iterator[Change | None]:
    ours, theirs = dict(_numbers(left, "")), dict(_numbers(right, ""))
    for key, a in ours.items():
        if key not in theirs:
            continue
        b = theirs[key]
        if a == b or (math.isnan(a) and math.isnan(b)):
            yield None
            continue
        yield Change(
            name=f"{name}:{key}",
            left=a,
            right=b,
            relative=(b - a) / abs(a) if a else math.copysign(math.inf, b - a),
            separated=_separated(key, ours, theirs),
        )


def _separated(key: str, left: dict[str, float], right: dict[str, float]) -> bool | None:
    """Whether the intervals that stand beside a ``value`` or ``values[i]`` are disjoint."""
    match = re.fullmatch(r"(.*?)value(s?)(\[\d+\])?", key)
    if match is None:
        return None
    prefix, plural, index = match.groups()
    low, high = (f"{prefix}interval{plural}{index or ''}[{end}]" for end in (0, 1))
    if not all(bound in side for bound in (low, high) for side in (left, right)):
        return None
    return left[high] < right[low] or right[high] < left[low]


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Every finite number with its place; of long lists and tensors the norm."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        if math.isfinite(value):
            yield where, float(value)
    elif isinstance(value, Tensor):
        # A tensor of millions of numbers never becomes a list of them.
        if value.numel() > _LONGEST and (value.ndim == 1 or len(value) > _LONGEST):
            if value.dtype != torch.bool:
                yield f"‖{where}‖", _norm(value)
        else:
            yield from _numbers(list(value) if value.ndim > 1 else value.tolist(), where)
    elif isinstance(value, (Result, dict)):
        for key in value.keys():  # noqa: SIM118
            yield from _numbers(value[key], f"{where}.{key}" if where else key)
    elif isinstance(value, (list, tuple)):
        inner = [pair for i, item in enumerate(value) for pair in _numbers(item, f"{where}[{i}]")]
        if len(inner) > _LONGEST:
            # not a sum of squares, which overflows
            yield f"‖{where}‖", math.hypot(*(number for _, number in inner))
        else:
            yield from inner


def _norm(tensor: Tensor) -> float:
    numbers = tensor.double()
    numbers = numbers[numbers.isfinite()]
    scale = float(numbers.abs().max()) if numbers.numel() else 0.0
    return scale * float((numbers / scale).norm()) if scale else 0.0
