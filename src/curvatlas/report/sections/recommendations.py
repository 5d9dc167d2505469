"""Recommendations, each with the measured evidence and its strength; none without evidence.

Any result with a list called ``recommendations`` is shown. A recommendation is a record with an
``advice`` (or ``recommendation``, ``title``), an ``evidence`` and, if known, a ``strength``.
"""

from __future__ import annotations

from typing import Any

from curvatlas.report.contents import Contents, Section
from curvatlas.report.markup import Markup, tag

_ADVICE = ("advice", "recommendation", "title", "action", "name")


def recommendations(contents: Contents) -> Section | None:
    items = []
    for entry in contents.entries:
        found = entry.content.get("recommendations")
        for one in found if isinstance(found, list) else []:
            if isinstance(one, dict) and one.get("evidence"):
                items.append(_item(one))
    if not items:
        return None
    return Section(
        identifier="recommendations",
        title="Recommendations",
        body=tag("ul", items, class_="findings"),
    )


def _item(one: dict[str, Any]) -> Markup:
    advice = next((str(one[key]) for key in _ADVICE if one.get(key)), "")
    strength = f" ({one['strength']})" if one.get("strength") else ""
    evidence = one["evidence"]
    if isinstance(evidence, list):
        evidence = "; ".join(str(item) for item in evidence)
    return tag("li", tag("strong", advice), strength, tag("br"), f"Evidence: {evidence}")
