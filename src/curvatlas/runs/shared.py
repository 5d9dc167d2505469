"""A run that several processes carry out together: the first has the folder, the others follow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from curvatlas import archive, parallel
from curvatlas.results import Result, parse
from curvatlas.runs import loading
from curvatlas.runs import manifest as manifests
from curvatlas.runs.folder import Run
from curvatlas.runs.locking import FolderLock
from curvatlas.runs.manifest import Manifest, StepEntry

R = TypeVar("R", bound=Result)


class SharedRun(Run):
    """``Run`` in every process of a group; only the first one reads and writes the folder.

    All call the same steps in the same order. An error of the first one, a full disk for example,
    stops all of them.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FolderLock | None) -> None:
        self.path, self.manifest = path, manifest
        self._first = lock is not None
        if lock is not None:
            super().__init__(path, manifest, lock)

    @classmethod
    def create(cls, path: str | os.PathLike[str], **options: Any) -> Run:
        """``Run.create``, by the first process of several."""
        if parallel.world_size() == 1:
            return Run.create(path, **options)
        opened = parallel.together(
            lambda: Run.create(path, **options) if parallel.rank() == 0 else None
        )
        if opened is not None:
            told = {"path": str(opened.path), "manifest": opened.manifest.to_json()}
            parallel.from_first(json.dumps(told).encode())
            return cls(opened.path, opened.manifest, opened._lock)
        heard = json.loads(parallel.from_first(b""))
        manifest = manifests.parse(heard["manifest"], "the first process's manifest")
        return cls(Path(heard["path"]), manifest, None)

    def step(self, name: str, function: Callable[[], R], *, spends: Sequence[str] = ()) -> R:
        """The result called ``name``, computed by all together, or told by the first process."""
        if name in self.manifest.steps:
            return cast("R", self._told(name))
        compute = super().step
        return parallel.together(lambda: compute(name, function, spends=spends))

    def _told(self, name: str) -> Result:
        def read() -> tuple[Result, bytes] | None:
            if not self._first:
                return None
            result = loading.read_result(self.path, name, self.manifest)
            file = self.path / loading.RESULTS / f"{name}.safetensors"
            return result, bytes(archive.read(file))

        stored = parallel.together(read)
        content = parallel.from_first(b"" if stored is None else stored[1])
        return parse(bytearray(content), name) if stored is None else stored[0]

    def close(self, status: manifests.Status = "complete", error: str | None = None) -> None:
        if self._first:
            super().close(status, error)

    def _store(self, name: str, result: Result, seconds: float, effort: dict[str, Any]) -> None:
        if self._first:
            super()._store(name, result, seconds, effort)
            return
        entry = StepEntry(kind=result.kind, sha256="", json_sha256="", seconds=seconds)
        self._write_manifest(steps={**self.manifest.steps, name: entry})

    def _write_manifest(self, **changes: Any) -> None:
        if self._first:
            super()._write_manifest(**changes)
        else:
            self.manifest = self.manifest.changed(**changes)
