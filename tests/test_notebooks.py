"""The example notebooks run from their first cell to their last, and are stored executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import script_loading

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _kinds(cell: Any) -> list[list[str]]:
    return [sorted(output.get("data", {"text": ""})) for output in cell.outputs]


def test_there_is_a_notebook_for_each_of_the_four_questions() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "first-look",
        "hugging-face",
        "pruning",
        "training",
    ]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One for all: each would spend five seconds on the same imports, and forgets every name."""
    manager = pytest.importorskip("jupyter_client.manager").KernelManager(kernel_name="python3")
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.huggingface
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored_with_it(path: Path, kernel: Any) -> None:
    stored = nbformat.read(path, as_version=4)
    fresh = script_loading.load(ROOT / "scripts" / "notebooks.py").executed(path, kernel)
    for cell, again in zip(_code(stored), _code(fresh), strict=True):
        assert _kinds(cell) == _kinds(again)
    everything = path.read_text(encoding="utf-8")
    assert "text/html" in everything
    assert not any(place in everything for place in ("/home/", "/root/", "/tmp/"))
