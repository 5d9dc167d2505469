"""``pkg.module:name`` on the command line: the user's own Python, imported as they named it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(text: str) -> bool:
    """Whether the text has the form ``pkg.module:name``."""
    return _REFERENCE.fullmatch(text) is not None


def zoo_name(text: str, known: tuple[str, ...]) -> str | None:
    """The name of something of ours, or None; ``zoo:name`` says so beyond doubt."""
    prefixed = text.startswith("zoo:")
    name = text.removeprefix("zoo:")
    if name not in known:
        if prefixed:
            raise ValueError(f"the zoo has no {name!r}: it has {', '.join(known)}.")
        return None
    if not prefixed and Path(text).exists():
        raise ValueError(f"{text!r} is ours and a path here: write zoo:{text} or ./{text}.")
    return name


def resolve(text: str) -> Any:
    """The object that ``pkg.module:name`` names; modules of the current folder are found too."""
    module_name, _, path = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"cannot import {module_name!r} of {text!r}: {error}.") from error
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise ValueError(f"{module_name!r} has no {path!r} (named by {text!r}).") from None
    return value
