"""Theorem verdicts: what holds, what holds corrected, what is false as printed."""

from __future__ import annotations

from typing import Any

from curvatlas.report.contents import Contents, Section
from curvatlas.report.markup import join, table, tag


def verdicts(contents: Contents) -> Section | None:
    found: list[dict[str, Any]] = []
    for entry in contents.of_kind("Verification"):
        found += [one for one in entry.content.get("entries") or [] if isinstance(one, dict)]
    if not found:
        return None
    counts: dict[str, int] = {}
    for one in found:
        counts[str(one.get("verdict"))] = counts.get(str(one.get("verdict")), 0) + 1
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    otherwise = [one for one in found if one.get("verdict") != one.get("recorded")]
    alarm = None
    if otherwise:
        names = ", ".join(str(one.get("name")) for one in otherwise)
        alarm = tag("p", f"Not as recorded on this machine: {names}.", class_="caution")
    rows = [_row(one) for one in found]
    return Section(
        identifier="verdicts",
        title="Theorems and claims",
        body=join(
            tag("p", f"{len(found)} statements tested on this machine: {summary}."),
            alarm,
            table(["statement", "verdict", "measured", "source"], rows),
        ),
    )


def _row(one: dict[str, Any]) -> list[object]:
    statement = join(tag("span", one.get("title")), tag("br"), tag("code", one.get("formula")))
    marked = tag("strong", one.get("verdict"))
    return [statement, marked, str(one.get("figure")), str(one.get("source"))]
