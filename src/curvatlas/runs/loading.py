"""Loading a run folder that nobody vouches for: read, check, refuse; never run, never write."""

from __future__ import annotations

import hashlib
import os
import stat
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
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: a run is a folder with a {manifests.FILE_NAME}.")
    folder = folder.resolve()
    manifest = read_manifest(folder)
    refuse_foreign_files(folder)
    results = {name: read_result(folder, name, manifest) for name in manifest.steps}
    return LoadedRun(path=folder, manifest=manifest, results=results)


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of the folder."""
    path = folder / manifests.FILE_NAME
    try:
        content = read_bytes(path, limit=_MANIFEST_LIMIT, follow_links=False)
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a run: it has no {manifests.FILE_NAME}.") from None
    return manifests.parse(parse_json(content, str(path)), str(path))


def read_result(folder: Path, name: str, manifest: Manifest) -> Result:
    """One stored result, its two files checked against the manifest."""
    entry = manifest.steps[name]
    stem = folder / RESULTS / name
    try:
        content = archive.read(Path(f"{stem}.safetensors"), follow_links=False)
        readable = archive.read(Path(f"{stem}.json"), follow_links=False)
    except FileNotFoundError as error:
        raise ValueError(f"the run names {error.filename}, which is missing.") from None
    for suffix, data, digest in (
        ("safetensors", content, entry.sha256),
        ("json", readable, entry.json_sha256),
    ):
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"{stem}.{suffix} does not match the checksum in the manifest.")
    result = parse(content, f"{stem}.safetensors")
    if result.kind != entry.kind:
        raise ValueError(f"{stem} holds a {result.kind}, the manifest says {entry.kind}.")
    return result


def refuse_foreign_files(folder: Path) -> None:
    """ValueError when the folder holds links, devices, code carriers or strange results."""
    count = 0
    for directory, subdirectories, files in os.walk(folder, followlinks=False):
        count += len(files) + len(subdirectories)
        if count > _FILE_LIMIT:
            raise ValueError(f"{folder} holds more than {_FILE_LIMIT} files: not a run of ours.")
        for name in [*subdirectories, *files]:
            path = Path(directory, name)
            _refuse(path, in_results=Path(directory) == folder / RESULTS)


def _refuse(path: Path, *, in_results: bool) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # a temporary file of a run that is being written
        return
    if stat.S_ISLNK(mode):
        raise ValueError(f"{path} is a symbolic link: a run folder holds none.")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path} is a device, pipe or socket: a run folder holds none.")
    if path.suffix.lower() in _CODE_CARRIERS:
        raise ValueError(f"{path} may carry code ({path.suffix}): a run folder holds no such file.")
    if in_results and not path.name.endswith(PARTIAL_SUFFIX):
        ours = path.suffix in (".safetensors", ".json") and manifests.valid_name(path.stem)
        if not ours or stat.S_ISDIR(mode):
            raise ValueError(f"{path} is no result of ours: remove it if you put it there.")
