"""A choice between panels, made of radio buttons: works by keyboard and without JavaScript."""

from __future__ import annotations

from collections.abc import Mapping

from curvatlas.report.markup import Markup, tag


def switch(identifier: str, panels: Mapping[str, Markup], *, label: str) -> Markup:
    """Shows one panel at a time; on paper all of them. At most six panels."""
    if len(panels) == 1:
        return next(iter(panels.values()))
    if len(panels) > 6:
        raise ValueError(f"a switch has at most six panels, got {len(panels)}.")
    inputs, bodies = [], []
    for index, (name, content) in enumerate(panels.items()):
        button = f"{identifier}-{index}"
        inputs.append(
            tag("input", type="radio", name=identifier, id=button, checked=index == 0,
                class_=f"choice k{index}")
        )  # fmt: skip
        inputs.append(tag("label", name, for_=button))
        bodies.append(
            tag("div", tag("p", name, class_="print-only"), content, class_=f"panel k{index}")
        )
    return tag(
        "div", inputs, tag("div", bodies, class_="panels"),
        class_="switch", role="radiogroup", aria_label=label,
    )  # fmt: skip
