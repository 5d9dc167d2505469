"""Load a run folder that nobody vouches for (read, check, refuse; never run or write); compare."""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvatlas import files
from curvatlas.display import Table, as_html
from curvatlas.files import PARTIAL_SUFFIX, parse_json, read_bytes
from curvatlas.results import Result, parse
from curvatlas.runs import manifest as manifests
from curvatlas.runs.manifest import Manifest

R = TypeVar("R", bound=Result)

RESULTS = "results"
FINDINGS = "findings.txt"  # what the page says on its first screen
_MANIFEST_LIMIT = 16 * 2**20
_MANIFEST_ITEMS = 200_000  # ten thousand steps and warnings, and all options
_FINDINGS_LIMIT = 64 * 2**10
_FILE_LIMIT = 100_000
# Formats whose readers run code: a run folder never holds one, so its presence is a warning sign.
_CODE_CARRIERS = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".dill", ".npy", ".py"}


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run read from disk: its manifest and its results by step name."""

    path: Path
    manifest: Manifest
    results: dict[str, Result]

    @property
    def status(self) -> str:
        return self.manifest.status

    @property
    def options(self) -> dict[str, Any]:
        return self.manifest.options

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.manifest.warnings

    @property
    def failures(self) -> dict[str, str]:
        """Steps that could not be carried out, and why."""
        return self.manifest.failures

    def __getitem__(self, name: str) -> Result:
        if name not in self.results:
            stored = ", ".join(self.results) or "none"
            raise KeyError(f"{self.path} has no result {name!r}; it has: {stored}.")
        return self.results[name]

    def result(self, name: str, kind: type[R]) -> R:
        """``run[name]`` for a type checker: the result, which has to be a ``kind``."""
        result = self[name]
        if not isinstance(result, kind):
            raise TypeError(f"{name} is a {result.kind}, expected a {kind.kind}.")
        return result

    @property
    def report(self) -> Path:
        """Where the page of the run stands, once it has been written."""
        return self.path / "report.html"

    @property
    def findings(self) -> str:
        """The verdict and the cards of the page as text; empty before it has been written."""
        try:
            content = read_bytes(self.path / FINDINGS, limit=_FINDINGS_LIMIT, follow_links=False)
        except (OSError, ValueError):
            return ""
        text = content.decode("utf-8", errors="replace")
        return "".join(letter for letter in text if letter.isprintable() or letter == "\n")

    def _repr_html_(self) -> str:
        """The findings and the steps, in a notebook."""
        steps = Table.of([{"step": n, "result": r.kind} for n, r in self.results.items()])
        text = self.findings or f"{self.status}, {len(self.results)} results"
        return as_html(str(self.path), text, steps, None)

    def open(self) -> None:
        """Show the page in the user's browser."""
        if not self.report.is_file():
            raise FileNotFoundError(
                f"{self.report} has not been written: 'curvatlas report {self.path}' writes it."
            )
        webbrowser.open(self.report.as_uri())

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.status}, {len(self.results)} results"]
        lines += [f"{name}: {result}" for name, result in self.results.items()]
        lines += [f"{name} failed: {reason}" for name, reason in self.failures.items()]
        return "\n  ".join(lines)


def load(path: str | os.PathLike[str]) -> LoadedRun:
    """Read a run folder; ValueError on anything that is not trusted, with the reason.

    Refused: a missing, damaged, edited or newer manifest; results whose checksum, class, fields or
    declared shapes are wrong; symbolic links, devices and files that could carry code (pickles).
    """
    folder = existing_folder(path)
    manifest = read_manifest(folder)
    refuse_foreign_files(folder)
    results = {name: read_result(folder, name, manifest) for name in manifest.steps}
    return LoadedRun(path=folder, manifest=manifest, results=results)


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """The folder with links to it resolved."""
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: a run is a folder with a {manifests.FILE_NAME}.")
    return folder.resolve()


def read_manifest(folder: Path, name: str = manifests.FILE_NAME) -> Manifest:
    """The checked manifest of the folder."""
    path = folder / name
    try:
        content = read_bytes(path, limit=_MANIFEST_LIMIT, follow_links=False)
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a run: it has no {name}.") from None
    try:
        return manifests.parse(parse_json(content, str(path), items=_MANIFEST_ITEMS), str(path))
    except manifests.NewerSchemaError:
        raise
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}: {_told_by_check(folder)}.") from error


def read_result(folder: Path, name: str, manifest: Manifest, *, copy: bool = True) -> Result:
    """One stored result, its file and the copy in JSON checked against the manifest."""
    entry = manifest.steps[name]
    stem = folder / RESULTS / name
    expected = {".safetensors": entry.sha256}
    if copy:
        expected[".json"] = entry.json_sha256
    contents = {}
    for suffix, digest in expected.items():
        file = Path(f"{stem}{suffix}")
        try:
            contents[suffix] = files.read(file, follow_links=False)
        except FileNotFoundError:
            raise ValueError(
                f"the run names {file}, which is missing: {_told_by_check(folder)}."
            ) from None
        if hashlib.sha256(contents[suffix]).hexdigest() != digest:
            raise ValueError(
                f"{file} does not match the checksum in the manifest: {_told_by_check(folder)}."
            )
    result = parse(contents[".safetensors"], f"{stem}.safetensors")
    if result.kind != entry.kind:
        raise ValueError(f"{stem} holds a {result.kind}, the manifest says {entry.kind}.")
    return result


def _told_by_check(folder: Path) -> str:
    return f"'curvatlas check {folder}' says what can be repaired"


def refuse_foreign_files(folder: Path) -> None:
    """ValueError when the folder holds links, devices, code carriers or strange results."""
    for path, fault in foreign_files(folder):
        raise ValueError(f"{path} {fault}: remove it if you put it there.")


def foreign_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Links, devices, code carriers and strange results, each with what is wrong about it."""
    count = 0
    for directory, subdirectories, file_names in os.walk(folder, followlinks=False):
        count += len(file_names) + len(subdirectories)
        if count > _FILE_LIMIT:
            yield folder, f"holds more than {_FILE_LIMIT} files, as no run of ours does"
            return
        for name in [*subdirectories, *file_names]:
            path = Path(directory, name)
            fault = _foreign(path, in_results=Path(directory) == folder / RESULTS)
            if fault is not None:
                yield path, fault


def _foreign(path: Path, *, in_results: bool) -> str | None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # a temporary file of a run that is being written
        return None
    if stat.S_ISLNK(mode):
        return "is a symbolic link, of which a run folder holds none"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return "is a device, pipe or socket, of which a run folder holds none"
    if path.suffix.lower() in _CODE_CARRIERS:
        return f"may carry code ({path.suffix}), which no file of a run folder does"
    if in_results and not path.name.endswith(PARTIAL_SUFFIX):
        ours = path.suffix in (".safetensors", ".json") and manifests.valid_name(path.stem)
        if not ours or stat.S_ISDIR(mode):
            return "is no result of ours"
    return None


_LONGEST = 64  # entries of a list compared one by one; longer ones are summarised by their norm


@dataclass(frozen=True, kw_only=True)
class Change(Result):
    """One number of one step, in both runs."""

    name: str  # step and field, such as "hessian.trace:value"
    left: float
    right: float
    relative: float  # (right − left) / |left|, infinite when left is zero
    separated: bool | None  # whether the two 95 % intervals are disjoint; None without intervals

    def __str__(self) -> str:
        verdict = {True: "intervals apart", False: "intervals overlap", None: ""}[self.separated]
        return f"{self.name}: {self.left:.6g} → {self.right:.6g} ({self.relative:+.2%}) {verdict}"


@dataclass(frozen=True, kw_only=True)
class RunComparison(Result):
    """What two runs share and where they differ."""

    left: str
    right: str
    same_model: bool
    same_data: bool
    options: dict[str, tuple[Any, Any]]  # those that differ
    only_left: tuple[str, ...]  # steps
    only_right: tuple[str, ...]
    changes: tuple[Change, ...]  # every number in both runs that is not equal
    equal: int  # numbers that are equal

    def __str__(self) -> str:
        lines = [
            f"{self.left} against {self.right}",
            f"model: {'the same' if self.same_model else 'different'}, "
            f"data: {'the same' if self.same_data else 'different'}",
            *(f"option {k}: {a!r} → {b!r}" for k, (a, b) in self.options.items()),
            *(f"only in the first: {name}" for name in self.only_left),
            *(f"only in the second: {name}" for name in self.only_right),
            f"{self.equal} numbers equal, {len(self.changes)} changed",
        ]
        return "\n  ".join([*lines, *map(str, self.changes)])


def compare(
    left: LoadedRun | str | os.PathLike[str], right: LoadedRun | str | os.PathLike[str]
) -> RunComparison:
    """Compare two runs, given as loaded or by their folders."""
    a = left if isinstance(left, LoadedRun) else load(left)
    b = right if isinstance(right, LoadedRun) else load(right)
    changes, equal = [], 0
    for name in a.results:
        if name in b.results and a[name].kind == b[name].kind:
            for change in _changes(name, a[name], b[name]):
                if change is None:
                    equal += 1
                else:
                    changes.append(change)
    one, two = a.manifest.options, b.manifest.options
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    return RunComparison(
        left=str(a.path),
        right=str(b.path),
        same_model=a.manifest.fingerprints.get("model") == b.manifest.fingerprints.get("model"),
        same_data=a.manifest.fingerprints.get("data") == b.manifest.fingerprints.get("data"),
        options={key: (one.get(key), two.get(key)) for key in keys},
        only_left=tuple(name for name in a.results if name not in b.results),
        only_right=tuple(name for name in b.results if name not in a.results),
        changes=tuple(changes),
        equal=equal,
    )


def _changes(name: str, left: Result, right: Result) -> Iterator[Change | None]:
    ours, theirs = dict(_numbers(left, "")), dict(_numbers(right, ""))
    for key, a in ours.items():
        if key not in theirs:
            continue
        b = theirs[key]
        if a == b or (math.isnan(a) and math.isnan(b)):
            yield None
            continue
        yield Change(
            name=f"{name}:{key}",
            left=a,
            right=b,
            relative=(b - a) / abs(a) if a else math.copysign(math.inf, b - a),
            separated=_separated(key, ours, theirs),
        )


def _separated(key: str, left: dict[str, float], right: dict[str, float]) -> bool | None:
    """Whether the intervals that stand beside a ``value`` or ``values[i]`` are disjoint."""
    match = re.fullmatch(r"(.*?)value(s?)(\[\d+\])?", key)
    if match is None:
        return None
    prefix, plural, index = match.groups()
    low, high = (f"{prefix}interval{plural}{index or ''}[{end}]" for end in (0, 1))
    if not all(bound in side for bound in (low, high) for side in (left, right)):
        return None
    return left[high] < right[low] or right[high] < left[low]


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """Every finite number with its place; of long lists and tensors the norm."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        if math.isfinite(value):
            yield where, float(value)
    elif isinstance(value, Tensor):
        # A tensor of millions of numbers never becomes a list of them.
        if value.numel() > _LONGEST and (value.ndim == 1 or len(value) > _LONGEST):
            if value.dtype != torch.bool:
                yield f"‖{where}‖", _norm(value)
        else:
            yield from _numbers(list(value) if value.ndim > 1 else value.tolist(), where)
    elif isinstance(value, (Result, dict)):
        for key in value.keys():  # noqa: SIM118
            yield from _numbers(value[key], f"{where}.{key}" if where else key)
    elif isinstance(value, (list, tuple)):
        inner = [pair for i, item in enumerate(value) for pair in _numbers(item, f"{where}[{i}]")]
        if len(inner) > _LONGEST:
            # not a sum of squares, which overflows
            yield f"‖{where}‖", math.hypot(*(number for _, number in inner))
        else:
            yield from inner


def _norm(tensor: Tensor) -> float:
    numbers = tensor.double()
    numbers = numbers[numbers.isfinite()]
    scale = float(numbers.abs().max()) if numbers.numel() else 0.0
    return scale * float((numbers / scale).norm()) if scale else 0.0
