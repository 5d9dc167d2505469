"""HTML by construction: every text is escaped unless it is already markup.

Names of models and parameters come from files that nobody vouches for. There is one way to make
markup, ``tag``, and it escapes; so a name with a script in it can only ever be shown as text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from typing import Any

_VOID = {"br", "hr", "img", "input", "meta", "link"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


class Markup(str):
    """Text that is already safe HTML."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Any value as escaped text; markup stays as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """``<name attributes>children</name>``; ``class_`` gives class, ``data_x`` gives data-x.

    Attributes that are None or False are left out, True gives the bare attribute.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of an element.")
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = key.rstrip("_").replace("_", "-")
        parts.append(written if value is True else f'{written}="{html.escape(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    if name in _VOID:
        return Markup(opening)
    return Markup(f"{opening}{join(*children)}</{name}>")


def join(*children: object, by: str = "") -> Markup:
    """Children one after the other, escaped; None and nested lists are flattened away."""
    pieces: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, (list, tuple)):
            pieces.append(join(*child))
        else:
            pieces.append(text(child))
    return Markup(by.join(pieces))


def sentence(words: str, *numbers: object) -> Markup:
    """Text in which every ``{}`` stands for the next of ``numbers``, set in bold."""
    first, *rest = words.split("{}", len(numbers))
    bold = [(tag("strong", value), after) for value, after in zip(numbers, rest, strict=True)]
    return tag("span", first, *bold)


def table(head: list[object], rows: list[list[object]], *, caption: object = None) -> Markup:
    """A table whose first column names the row; it scrolls sideways on narrow screens."""
    numeric = [
        all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(head))
    ]
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            [
                tag("td", shown(v), class_="n" if numeric[i + 1] else None)
                for i, v in enumerate(row[1:])
            ],
        )
        for row in rows
    ]
    scrolling = tag(
        "div",
        tag(
            "table",
            tag("caption", caption) if caption is not None else None,
            tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])),
            tag("tbody", body),
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption if isinstance(caption, str) else "table",
    )
    return tag("div", scrolling, class_="table")  # report.js adds its download beside the table


def json_block(identifier: str, value: Any) -> Markup:
    """Data inlined for scripts: no character in it can end the element or start another."""
    content = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        content = content.replace(character, escaped)
    opening = f'<script type="application/json" id="{html.escape(identifier)}">'
    return Markup(f"{opening}{content}</script>")


def shown(value: object) -> object:
    """A number as a person reads it; everything else as it is."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    return value


def number(value: float, digits: int = 3) -> str:
    """``0.0123``, ``1.5×10⁻⁷``: as many digits as asked, no more."""
    if value != value or value in (float("inf"), float("-inf")):
        return {"nan": "not a number", "inf": "∞", "-inf": "−∞"}[str(value)]
    if value == 0 or 1e-3 <= abs(value) < 10**6:
        digital = f"{value:.{digits}g}"
        digital = f"{value:,.0f}" if "e" in digital else digital
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        digital = f"{mantissa}×10{superscript(int(exponent))}"
    return digital.replace("-", "−")


def superscript(exponent: int) -> str:
    """The exponent in raised digits."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def switch(identifier: str, panels: Mapping[str, Markup], *, label: str) -> Markup:
    """One of at most six panels, chosen by radio buttons: by keyboard and without JavaScript too.

    On paper all of them are shown.
    """
    if len(panels) == 1:
        return next(iter(panels.values()))
    if len(panels) > 6:
        raise ValueError(f"a switch has at most six panels, got {len(panels)}.")
    inputs, bodies = [], []
    for index, (name, content) in enumerate(panels.items()):
        button = f"{identifier}-{index}"
        inputs.append(
            tag(
                "input",
                type="radio",
                name=identifier,
                id=button,
                checked=index == 0,
                class_=f"choice k{index}",
            )
        )
        inputs.append(tag("label", name, for_=button))
        bodies.append(
            tag("div", tag("p", name, class_="print-only"), content, class_=f"panel k{index}")
        )
    return tag(
        "div",
        inputs,
        tag("div", bodies, class_="panels"),
        class_="switch",
        role="radiogroup",
        aria_label=label,
    )
