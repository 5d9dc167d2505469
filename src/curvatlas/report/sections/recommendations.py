"""Recommendations, each with the measured evidence and its strength; none without evidence.

Any result with a list called ``recommendations`` is shown. A recommendation is a record with an
``advice`` (or ``recommendation``, ``title``), an ``evidence`` and, if known, a ``strength``.
"""

from __future__ import annotations

from typing import Any

from curvatlas.report.contents import Contents, Section, stage_words
from curvatlas.report.markup import Markup, join, tag

_ADVICE = ("advice", "recommendation", "title", "action", "name")


def recommendations(contents: Contents) -> Section | None:
    bodies = []
    for entry in contents.entries:
        found = entry.content.get("recommendations")
        supported = [
            one
            for one in (found if isinstance(found, list) else [])
            if isinstance(one, dict) and one.get("evidence")
        ]
        if supported:
            words = stage_words(entry.stage)
            heading = tag("h3", words[0].upper() + words[1:]) if words else None
            items = [_item(one) for one in supported]
            bodies.append(join(heading, tag("ul", items, class_="findings")))
    if not bodies:
        return None
    return Section(identifier="recommendations", title="Recommendations", body=join(*bodies))


def _item(one: dict[str, Any]) -> Markup:
    advice = next((str(one[key]) for key in _ADVICE if one.get(key)), "")
    advice = advice[:1].upper() + advice[1:]
    strength = f" ({one['strength']} evidence)" if one.get("strength") else ""
    evidence = one["evidence"]
    if isinstance(evidence, list):
        evidence = "; ".join(str(item) for item in evidence)
    return tag("li", tag("strong", advice), strength, tag("br"), f"Evidence: {evidence}")
