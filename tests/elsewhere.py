"""Which tests hang on the machine: those that train on the spot, and those that count coverage.

Another processor rounds otherwise, and so trains another model. These tests are marked ``machine``
by what they, their helpers and their fixtures call, and ``make test-elsewhere`` runs them under
other instruction sets. Training that no call shows is noticed when it happens, and asks for it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

TESTS = Path(__file__).parent
LIMITS = {"most_misses"}  # what a test asks that counts coverage
_quiet: dict[int, Any] = {}  # what was followed to its ends and neither trains nor counts


def hangs_on_the_machine(item: pytest.Item) -> bool:
    """Whether a test trains or counts coverage, as far as the code of it and its fixtures shows."""
    if not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    parameters = getattr(item, "callspec", None)
    left = [item.function, *(one.func for several in fixtures for one in several)]
    left += parameters.params.values() if parameters else []
    seen: dict[int, Any] = {}
    while left:
        thing = left.pop()
        if id(thing) in seen or id(thing) in _quiet:
            continue
        seen[id(thing)] = thing
        for code, names in _codes(thing):
            called = set(code.co_names)
            if called & LIMITS or ("step" in called and called & {"backward", "zero_grad"}):
                return True
            left += _named(code, names)
        left += vars(thing).values() if inspect.isclass(thing) and _ours(thing) else []
    _quiet.update(seen)
    return False


def _codes(thing: Any) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The code of a function of ours, and of those defined in it, with its globals."""
    if isinstance(thing, (property, functools.cached_property)):
        thing = thing.fget if isinstance(thing, property) else thing.func
    if isinstance(thing, (classmethod, staticmethod, functools.partial)):
        thing = getattr(thing, "func", None) or thing.__func__
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if inspect.isfunction(thing) and _ours(thing):
        codes = [thing.__code__]
        for code in codes:
            yield code, thing.__globals__
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _rooms()


@functools.cache
def _rooms() -> frozenset[str]:
    """Names of the package and of everything in tests/."""
    return frozenset({"curvatlas", *(path.stem for path in TESTS.rglob("*")), "tests"})


def _named(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """What the code takes of its globals: functions, classes, and those it takes of modules."""
    thing: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            thing = names.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(thing, ModuleType):
            ours = thing.__name__.partition(".")[0] in _rooms()
            thing = getattr(thing, step.argval, None) if ours else None
        else:
            thing = None
        if callable(thing):
            yield thing


class Watch:
    """Lets no test without the mark train: it would run on one machine only."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        self.handle = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if self.item is not None and self.item.get_closest_marker("machine") is None:
            warnings.warn(
                f"{self.item.nodeid} trains on the spot: mark it with pytest.mark.machine, so that "
                "make test-elsewhere runs it.",
                stacklevel=2,
            )
            self.item = None  # once a test
