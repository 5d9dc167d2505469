"""Loading a run folder that nobody vouches for: read, check, refuse; never run, never write."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvatlas import archive
from curvatlas.files import PARTIAL_SUFFIX, parse_json, read_bytes
from curvatlas.results import Result, parse
from curvatlas.runs import manifest as manifests
from curvatlas.runs.manifest import Manifest

RESULTS = "results"
_MANIFEST_LIMIT = 16 * 2**20
_MANIFEST_ITEMS = 200_000  # ten thousand steps and warnings, and all options
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

    def __getitem__(self, name: str) -> Result:
        return self.results[name]

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.status}, {len(self.results)} results"]
        return "\n  ".join(
            [*lines, *(f"{name}: {result}" for name, result in self.results.items())]
        )


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
            contents[suffix] = archive.read(file, follow_links=False)
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
    for directory, subdirectories, files in os.walk(folder, followlinks=False):
        count += len(files) + len(subdirectories)
        if count > _FILE_LIMIT:
            yield folder, f"holds more than {_FILE_LIMIT} files, as no run of ours does"
            return
        for name in [*subdirectories, *files]:
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
