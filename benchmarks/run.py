"""List, run and compare the benchmarks.

    python benchmarks/run.py list
    python benchmarks/run.py run [NAME ...] [--quick]
    python benchmarks/run.py compare OLD_FOLDER [NEW_FOLDER]

A benchmark is a file here with a ``main`` that keeps its numbers in results/<name>.json; each runs
in a process of its own, on one thread. ``--quick`` only shows that it runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
TOOLS = {"run", "peers"}
WORSE = 1.1  # a figure this much above the old one is pointed out


def benchmarks() -> dict[str, str]:
    """Name → what it measures, the first line of the file."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem in TOOLS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Name → the kept numbers."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def show_list() -> int:
    kept = results(RESULTS)
    for name, what in benchmarks().items():
        when = kept[name].get("date", "kept") if name in kept else "never kept"
        print(f"{name:16s} {when:12s} {what}")
        for line in _requirements(kept.get(name, {})):
            print(f"{'':16s} {_verdict(line):12s} {line['name']}: {line['measured']}")
    return 0


def run(names: list[str], *, quick: bool) -> int:
    """Run them one after another; a failure is reported and the others go on."""
    known, failed = benchmarks(), []
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}: choose from {', '.join(known)}", file=sys.stderr)
        return 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in names or list(known):
        path = FOLDER / f"{name}.py"
        options = ["--quick"] if quick else []
        if quick and '"--quick"' not in path.read_text(encoding="utf-8"):
            print(f"== {name}: has no quick form, left out")
            continue
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        code = subprocess.run([sys.executable, str(path), *options], env=environment, check=False)
        if code.returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def compare(old: Path, new: Path) -> int:
    """Requirements side by side; 1 when one that was met no longer is."""
    before, after, broken = results(old), results(new), 0
    for name in sorted(before.keys() & after.keys()):
        known = {line["name"]: line for line in _requirements(before[name])}
        for line in _requirements(after[name]):
            earlier = known.get(line["name"])
            if earlier is None or None in (earlier["measured"], line["measured"]):
                continue
            note = ""
            if line["measured"] > WORSE * earlier["measured"]:
                note = "  worse"
            if earlier["met"] and not line["met"]:
                note, broken = "  NO LONGER MET", broken + 1
            print(f"{name:16s} {line['name']}: {earlier['measured']} → {line['measured']}{note}")
    return 1 if broken else 0


def _requirements(result: dict[str, Any]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = result.get("requirements", [])
    return lines


def _verdict(line: dict[str, Any]) -> str:
    return {True: "met", False: "NOT MET", None: "not measured"}[line["met"]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="the benchmarks, and what was last kept")
    running = actions.add_parser("run", help="run some or all")
    running.add_argument("names", nargs="*")
    running.add_argument("--quick", action="store_true")
    comparing = actions.add_parser("compare", help="two folders of results")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path, nargs="?", default=RESULTS)
    options = parser.parse_args(argv)
    if options.action == "list":
        return show_list()
    if options.action == "run":
        return run(options.names, quick=options.quick)
    for folder in (options.old, options.new):
        if not folder.is_dir():
            print(f"no folder {folder}", file=sys.stderr)
            return 2
    return compare(options.old, options.new)


if __name__ == "__main__":
    sys.exit(main())
