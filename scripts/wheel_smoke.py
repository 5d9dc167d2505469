"""Build the wheel, install it into an empty folder or environment, and use it from there.

    python scripts/wheel_smoke.py           # beside the packages of this Python (seconds)
    python scripts/wheel_smoke.py --venv    # into a new environment, dependencies from the index

Leaves with 1 and says why when something is missing from the wheel or does not work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")
_MODEL = """
import torch
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def make_data():
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
"""

# Where the package lies, its data, and two commands, by one start of Python: each imports torch.
_VISIT = """
import contextlib, io, json

import curvatlas
from curvatlas import cli, zoo


def answered(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            cli.main(list(words))
        except SystemExit as ended:
            if ended.code:
                raise
    return out.getvalue()


sizes = [zoo.digits().train.size, zoo.text().train.size]
doctor = answered("doctor", "--json")
few = ("--eigenvalues", "1", "--skip", "density", "--skip", "map")
analyze = answered("analyze", "tiny:make_model", "tiny:make_data", *few, "--json", "-o", "run")
print(json.dumps([curvatlas.__file__, sizes, doctor, analyze]))
"""


def build(folder: Path) -> Path:
    """The wheel, built from a copy of the sources so that nothing is left in the repository."""
    tree = folder / "tree"
    for name in _SOURCES:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)
    # The backend of this Python where it is new enough: an environment of its own takes seconds.
    here = int(version("setuptools").split(".")[0]) >= 77 if find_spec("setuptools") else False
    how = ("--no-build-isolation",) if here else ()
    words = ("wheel", "--quiet", "--no-deps", *how, "--wheel-dir", folder, tree)
    _call(sys.executable, "-m", "pip", *words, env=_without_python())
    (wheel,) = folder.glob("curvatlas-*.whl")
    return wheel


def missing(wheel: Path) -> list[str]:
    """Files of the package that are in the repository and not in the wheel."""
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "curvatlas").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    foreign = [n for n in names if not n.startswith("curvatlas/") and ".dist-info/" not in n]
    return sorted(wanted - names) + [f"(not ours: {name})" for name in foreign]


def use(python: Path, folder: Path, *, path: Path | None) -> dict[str, Any]:
    """The commands of a first visit, run from ``folder``; returns what they answered."""
    environment = _without_python() | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    folder.mkdir()
    (folder / "tiny.py").write_text(_MODEL, encoding="utf-8")

    def curvatlas(*arguments: str) -> str:
        return _call(python, "-m", "curvatlas.cli", *arguments, cwd=folder, env=environment)

    file, data, doctor, analyze = json.loads(
        _call(python, "-c", _VISIT, cwd=folder, env=environment)
    )
    answers = {
        "file": file,
        "help": curvatlas("--help"),
        "version": curvatlas("--version").strip(),
        "doctor": json.loads(doctor),
        "analyze": json.loads(analyze),
        "data": data,
    }
    return answers


def wrong(answers: dict[str, Any], folder: Path, installed: Path) -> list[str]:
    """What is not as it should be; empty when the wheel works."""
    checks = {
        f"{answers['file']} is not the installed package": Path(answers["file"]).is_relative_to(
            installed
        ),
        "--help does not list the commands": "analyze" in answers["help"],
        "doctor is not healthy": answers["doctor"]["healthy"],
        "the run is not complete": answers["analyze"]["status"] == "complete",
        "the report has no picture": "<svg" in (folder / "run/report.html").read_text("utf-8"),
        "embedded data are missing": all(int(count) > 100 for count in answers["data"]),
    }
    return [problem for problem, fine in checks.items() if not fine]


def check(*, venv: bool = False) -> list[str]:
    """Everything that is wrong with the wheel."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        wheel = build(scratch)
        problems = [f"{path} is not in the wheel" for path in missing(wheel)]
        if venv:
            installed = scratch / "environment"
            _call(sys.executable, "-m", "venv", installed)
            python = installed / "bin" / "python"
            constraints = ROOT / "constraints.txt"
            _call(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel)
            answers = use(python, scratch / "work", path=None)
        else:
            installed = scratch / "installed"
            _call(
                sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
                installed, wheel,
            )  # fmt: skip
            answers = use(Path(sys.executable), scratch / "work", path=installed)
        return problems + wrong(answers, scratch / "work", installed)


def _without_python() -> dict[str, str]:
    """The environment without what would bring other packages in, as PYTHONPATH does."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _call(*command: object, **options: Any) -> str:
    words = [str(word) for word in command]
    finished = subprocess.run(words, capture_output=True, text=True, **options)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {finished.stderr.strip()[-2000:]}")
    return finished.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", action="store_true", help="a new environment, from the index")
    problems = check(venv=parser.parse_args().venv)
    print("\n".join(problems) or "the wheel is complete and works")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
