"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from markupsafe import Markup

from curvatlas.report import layout
from elsewhere import Watch, hangs_on_the_machine

gc.disable()  # while modules are imported and tests collected: none of it is garbage


_watch = Watch()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests whose verdict hangs on the machine: what ``make test-elsewhere`` runs."""
    if hangs_on_the_machine(item):
        item.add_marker("machine")


def pytest_runtest_setup(item: pytest.Item) -> None:
    _watch.item = item


def pytest_collection_finish() -> None:
    """What stands after the imports stays: the collector need not walk through it again.

    Beside half a million objects of imported packages and collected tests, walks were a fifth of
    the processor time of short tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are drawn only where a test looks at the pictures (``draws``): about three seconds."""
    if "draws" not in request.keywords:
        monkeypatch.setattr(layout, "drawn", lambda picture: Markup("<svg></svg>"))


@pytest.fixture(scope="session", autouse=True)
def unflushed() -> Iterator[None]:
    """Files are written without waiting for the disk.

    What reached it is seen after the fall of a machine, and no test makes one fall; a killed
    process loses nothing. Tests of a full or failing disk put an ``fsync`` of their own here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def short_ascents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of every ascent, for tests of other things, or of how two of them compare.

    Whether one ends at a maximum, half of its cost, is not looked at.
    """
    import curvatlas as ca
    from curvatlas.analysis.landscape import ascent

    monkeypatch.setattr(ascent, "_margin", lambda *_: (0.0, 0))
    monkeypatch.setattr(ascent, "_FIRST_LOOK", 2)
    monkeypatch.setitem(ca.sharpness_by_ascent.__kwdefaults__, "steps", 2)
