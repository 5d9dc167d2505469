"""What the sections read: the manifest and the results of a run as plain dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from curvatlas.report.markup import Markup, number, tag
from curvatlas.results import brief
from curvatlas.runs.loading import LoadedRun

LARGEST_TENSOR = 200_000  # numbers; eigenvectors of large models stay in the run folder
PARTS = {"total": "H", "outer": "H_o", "functional": "H_f"}
PART_WORDS = {
    "total": "the whole Hessian",
    "outer": "its outer-product (Gauss-Newton) part",
    "functional": "its functional part",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One result: the dictionary of its ``to_dict``, and what its step's name says of it."""

    name: str
    content: dict[str, Any]
    label: str | None = None  # instead of the stage that the name says

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", ""))

    @property
    def part(self) -> str:
        """total, outer or functional; total when the name does not say."""
        return next((word for word in self.name.split(".") if word in PARTS), "total")

    @property
    def stage(self) -> str:
        """The first word of the name when another word follows it: initial, trained, model …"""
        if self.label is not None:
            return self.label
        words = self.name.split(".")
        return words[0] if len(words) > 1 and words[0] not in PARTS else ""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A run as the report sees it."""

    manifest: dict[str, Any]
    entries: tuple[Entry, ...]

    def of_kind(self, *kinds: str) -> list[Entry]:
        """The results of these classes, in the order they were stored."""
        return [entry for entry in self.entries if entry.kind in kinds]

    def of_quantity(self, quantity: str) -> list[Entry]:
        """Estimated numbers of one quantity, such as "trace"."""
        estimates = self.of_kind("Estimate")
        return [entry for entry in estimates if entry.content.get("quantity") == quantity]

    def find(self, kind: str, *, stage: str, part: str) -> dict[str, Any] | None:
        """The content of one result, or None."""
        for entry in self.of_kind(kind):
            if entry.stage == stage and entry.part == part:
                return entry.content
        return None

    def stages(self, *kinds: str) -> list[str]:
        """Stages in which results of these classes exist, in order."""
        return list(dict.fromkeys(entry.stage for entry in self.of_kind(*kinds)))


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    identifier: str
    title: str
    body: Markup


def contents_of(run: LoadedRun) -> Contents:
    """The run as plain dictionaries."""
    entries = (
        Entry(name=name, content=brief(result, largest=LARGEST_TENSOR))
        for name, result in run.results.items()
    )
    return Contents(manifest=asdict(run.manifest), entries=tuple(entries))


def subject_name(contents: Contents) -> str:
    """What the user called the model."""
    entries = contents.of_kind("Subject")
    return str(entries[0].content.get("name")) if entries else "a model"


def stage_words(stage: str) -> str:
    """``initial`` → "at initialisation"; other names as they are."""
    words = {"initial": "at initialisation", "trained": "after training", "model": ""}
    return words.get(stage, stage)


def stage_heading(stage: str) -> Markup | None:
    """The words of a stage as a heading; none where there is only one."""
    words = stage_words(stage)
    return tag("h3", capitalised(words)) if words else None


def capitalised(words: str) -> str:
    """The first letter large, the others as they are."""
    return words[:1].upper() + words[1:]


def as_number(value: Any) -> float | None:
    """A float from JSON (also from its "inf" and "nan"), or None."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    return None


def quantity(content: dict[str, Any], key: str = "value") -> tuple[float | None, Any]:
    """A number and its (low, high) or None; an estimate may stand in the field itself."""
    value = content.get(key)
    if isinstance(value, dict):
        return quantity(value)
    interval = content.get("interval" if key == "value" else f"{key}_interval")
    return as_number(value), as_interval(interval)


def as_interval(value: Any) -> tuple[float, float] | None:
    """(low, high) from a list of two numbers, else None."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    low, high = as_number(value[0]), as_number(value[1])
    return None if low is None or high is None else (low, high)


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    """``12.3 [12.1, 12.5]``; more digits where the interval is narrow."""
    if value is None:
        return "–"
    if interval is None:
        return number(value)
    low, high = interval
    digits = 3
    while digits < 5 and number(low, digits) == number(high, digits):
        digits += 1
    if number(low, digits) == number(high, digits):
        return number(value, digits)  # certain in every digit that is shown
    return f"{number(value, digits)} [{number(low, digits)}, {number(high, digits)}]"


def numbers(values: Any) -> list[float]:
    """A list of JSON numbers as floats; [] when it is not one."""
    if not isinstance(values, list):
        return []
    floats = [as_number(value) for value in values]
    return [value for value in floats if value is not None] if None not in floats else []


def eigenvalues(content: dict[str, Any]) -> Iterator[tuple[float, tuple[float, float]]]:
    """Eigenvalues with their certified intervals."""
    values = numbers(content.get("values"))
    bounds = content.get("interval")
    lows, highs = (numbers(side) for side in bounds) if isinstance(bounds, list) else ([], [])
    for index, value in enumerate(values):
        bounded = index < len(lows) and index < len(highs)
        yield value, (lows[index], highs[index]) if bounded else (value, value)


def matrix(values: Any) -> list[list[float | None]]:
    """A matrix of JSON numbers; what is none is None, and what is no matrix is empty."""
    if not isinstance(values, list):
        return []
    return [[as_number(v) for v in row] if isinstance(row, list) else [] for row in values]


def named_matrix(
    entry: dict[str, Any], end: str = "values"
) -> tuple[list[str], list[list[float | None]]]:
    """The names and the values (or their "low", "high") of a stored map."""
    return [str(name) for name in entry.get("names") or ()], matrix(entry.get(end))
