"""Progress bars that appear only when something takes longer than two seconds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a notebook without widgets gets a bar of text
    from tqdm.auto import tqdm

T = TypeVar("T")

_DELAY_SECONDS = 2.0
_enabled = True
_step = ""  # of a longer piece of work, before the description of every bar
_watch: Callable[[], None] | None = None  # called as bars advance; may raise to stop


def set_progress(enabled: bool) -> None:
    """Switch every progress bar of the package on or off."""
    global _enabled
    _enabled = enabled


def _in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


def _options(description: str) -> dict[str, Any]:
    # A bar in a log file is noise: draw only on a terminal or in a notebook.
    return {
        "desc": f"{_step}: {description}" if _step else description,
        "delay": _DELAY_SECONDS,
        "leave": False,
        "disable": not (_enabled and (sys.stderr.isatty() or _in_notebook())),
    }


def track(items: Iterable[T], description: str, *, total: int | None = None) -> Iterator[T]:
    """Iterate over ``items`` with a bar."""
    for item in tqdm(items, total=total, **_options(description)):
        if _watch is not None:
            _watch()
        yield item


@contextmanager
def bar(description: str, *, total: int | None = None) -> Iterator[Any]:
    """A bar to be advanced by hand with ``.update(n)``."""
    with tqdm(total=total, **_options(description)) as handle:
        yield _Watched(handle)


class _Watched:
    """A bar that looks at the watch whenever it advances."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def update(self, n: float = 1) -> None:
        if _watch is not None:
            _watch()
        self._handle.update(n)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@contextmanager
def within_step(words: str, watch: Callable[[], None] | None = None) -> Iterator[None]:
    """Bars inside begin with ``words``; ``watch`` is called between the items of ``track``."""
    global _step, _watch
    before = _step, _watch
    _step, _watch = words, watch
    try:
        yield
    finally:
        _step, _watch = before
