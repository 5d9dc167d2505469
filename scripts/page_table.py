"""Tables of the pages that are written from kept numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

Result = dict[str, Any]
# mark on a page → (kept result, what it says)
Tables = Mapping[str, tuple[str, Callable[[Result], list[str]]]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]


def filled(text: str, tables: Tables, results: Mapping[str, Result], script: str) -> str:
    """A page with every table between its marks."""
    for mark, (name, make) in tables.items():
        start, end = f"<!-- {mark}: scripts/{script} -->", f"<!-- /{mark} -->"
        before, rest = text.split(start)
        lines = [f"Not measured yet: `python benchmarks/{name}.py`."]
        if name in results:
            lines = make(results[name])
        text = "\n".join([before + start, "", *lines, "", end + rest.split(end)[1]])
    return text


def kept(tables: Tables) -> dict[str, Result]:
    """The results that the tables show, as far as they were measured."""
    files = {name: RESULTS / f"{name}.json" for name, _ in tables.values()}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in files.items()
        if path.exists()
    }
