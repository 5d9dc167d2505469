"""The way data flows: each room of the house knows only the rooms before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

GROUND = (
    "errors", "progress", "display", "precision", "budget", "files", "results", "fits", "parallel",
    "linear_operator",
)  # fmt: skip
# Rooms of one stage may not know each other, but for the ground, which is one.
STAGES: tuple[tuple[str, ...], ...] = (
    GROUND,
    ("layers",),
    ("anatomy",),
    ("problem",),
    ("zoo",),
    ("tape",),
    ("engines",),
    ("operators",),
    ("closed_form",),
    ("spectra",),
    ("figures",),
    ("theory",),
    ("analysis",),
    ("training",),
    ("runs",),
    ("scaling",),
    ("report",),
    ("cost_model",),
    ("planning",),
    ("surveying",),
    ("article",),
    ("studies",),
    ("cli",),
)
# what a run folder must know of the rooms before it: how their checkpoints lie on the disk
_STORED_FORMATS = {
    f"curvatlas.spectra.checkpoint.{name}"
    for name in ("missing_entries", "parts_on_disk", "step_of")
}
ORDER = {room: position for position, stage in enumerate(STAGES) for room in stage}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (SOURCE / "curvatlas").rglob("*.py")
    }


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module or name of ours, line) at any level, but for what only a type checker reads."""
    unread = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "curvatlas")


def room(name: str) -> str:
    """``curvatlas.spectra.trace`` → ``spectra``; "" for the package itself."""
    return [*name.split("."), ""][1]


def fault(importer: str, imported: str) -> str | None:
    """What is wrong with an edge of the import graph, or None."""
    here, there = room(importer), room(imported)
    if here == "":
        return None if there == "" else "the package itself loads its names through the stub"
    if imported == "curvatlas.__version__":
        return None  # a text, there before anything else
    if there not in ORDER:
        return "library code does not import its own front door"
    if here not in ORDER:
        return f"{here} has no stage: give it one in STAGES"
    if ORDER[there] > ORDER[here]:
        return f"{there} comes after {here}"
    if ORDER[there] == ORDER[here] and there != here and here not in GROUND:
        return f"{here} and {there} are side by side"
    if here == "runs" and there not in (*GROUND, "runs") and imported not in _STORED_FORMATS:
        return "storage computes nothing"
    engines = [name.split(".")[2:3] for name in (importer, imported)]
    if here == there == "engines" and sorted(engines) == [["autograd"], ["tangent"]]:
        return "the two engines never import each other"
    return None


def test_each_room_knows_only_the_rooms_before_it() -> None:
    faults = [
        f"{path.relative_to(SOURCE)}:{line} imports {imported}: {wrong}"
        for name, path in sorted(modules().items())
        for imported, line in imports(ast.parse(path.read_text(encoding="utf-8")))
        if (wrong := fault(name, imported)) is not None
    ]
    assert not faults, "\n" + "\n".join(faults)


def test_every_room_has_a_stage_and_every_stage_a_room() -> None:
    rooms = {room(name) for name in modules()} - {""}
    assert rooms == set(ORDER)


@pytest.mark.parametrize(
    ("importer", "imported", "words"),
    [
        ("curvatlas.spectra.trace", "curvatlas.runs.Run", "runs comes after spectra"),
        ("curvatlas.anatomy.slices", "curvatlas.zoo", "zoo comes after anatomy"),
        ("curvatlas.runs.folder", "curvatlas.zoo", "storage computes nothing"),
        ("curvatlas.runs.folder", "curvatlas.spectra.trace.trace", "storage computes nothing"),
        ("curvatlas.spectra.trace", "curvatlas.Hessian", "own front door"),
        ("curvatlas.spectra.trace", "curvatlas", "own front door"),
        (
            "curvatlas.engines.tangent.stack",
            "curvatlas.engines.autograd.compiled.Compile",
            "two engines",
        ),
        ("curvatlas.rooms", "curvatlas.errors", "has no stage"),
        ("curvatlas", "curvatlas.spectra", "through the stub"),
    ],
)
def test_a_wrong_edge_is_named(importer: str, imported: str, words: str) -> None:
    assert words in str(fault(importer, imported))


def test_imports_inside_functions_count_and_those_of_type_checkers_do_not() -> None:
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from curvatlas.cli import main
def late():
    from curvatlas.runs import Run, load
    import curvatlas.zoo
"""
    assert list(imports(ast.parse(text))) == [
        ("curvatlas.runs.Run", 6), ("curvatlas.runs.load", 6), ("curvatlas.zoo", 7),
    ]  # fmt: skip
