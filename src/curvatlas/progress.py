"""Progress bars that appear only when something takes longer than two seconds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a notebook without widgets gets a bar of text
    from tqdm.auto import tqdm

T = TypeVar("T")

_DELAY_SECONDS = 2.0
_enabled = True


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
        "desc": description,
        "delay": _DELAY_SECONDS,
        "leave": False,
        "disable": not (_enabled and (sys.stderr.isatty() or _in_notebook())),
    }


def track(items: Iterable[T], description: str, *, total: int | None = None) -> Iterator[T]:
    """Iterate over ``items`` with a bar."""
    yield from tqdm(items, total=total, **_options(description))


@contextmanager
def bar(description: str, *, total: int | None = None) -> Iterator[Any]:
    """A bar to be advanced by hand with ``.update(n)``."""
    with tqdm(total=total, **_options(description)) as handle:
        yield handle
