"""Arguments in our docstrings as the API pages' tables.

A docstring explains an argument as ``name: what it is`` at the start of a line; griffe knows such
lines below the heading ``Args:``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ARGUMENT = re.compile(r"^([a-z_][\w]*(?:, [a-z_][\w]*)*): (.*)$")


def with_arguments(text: str, names: set[str]) -> str:
    """The docstring with the lines about the arguments ``names`` below ``Args:``."""
    rest: list[str] = []
    arguments: list[str] = []
    inside = False
    for line in text.split("\n"):
        found = _ARGUMENT.match(line)
        if found and set(found[1].split(", ")) <= names:
            inside = True
            arguments += [f"    {name}: {found[2]}" for name in found[1].split(", ")]
        elif inside and line.strip() and not found:
            arguments[-1] += " " + line.strip()
        else:
            inside = False
            rest.append(line)
    return "\n".join([*rest, "", "Args:", *arguments]) if arguments else text


class Arguments(griffe.Extension):
    """Rewrites docstrings of functions, and of classes by their ``__init__`` or fields."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            names = {parameter.name for parameter in func.parameters} - {"self", "cls"}
            func.docstring.value = with_arguments(func.docstring.value, names)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        first = cls.members.get("__init__")
        if cls.docstring is not None and isinstance(first, griffe.Function):
            cls.docstring.value = with_arguments(
                cls.docstring.value, {parameter.name for parameter in first.parameters} - {"self"}
            )
