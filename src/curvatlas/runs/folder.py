"""Writing a run folder as the work completes, so that a killed run goes on where it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from curvatlas import __version__, files, parallel
from curvatlas.files import PARTIAL_SUFFIX, parse_json, previous, write_json
from curvatlas.results import Result, brief, parse
from curvatlas.runs import checking, loading, manifest as manifests
from curvatlas.runs.loading import LoadedRun
from curvatlas.runs.manifest import LOCK_NAME, FolderLock, Manifest, StepEntry

R = TypeVar("R", bound=Result)

EFFORT = "effort"  # the entry of the options that a resumed run may change


class RunWriteError(OSError):
    """A result could not be written; ``result`` still holds it, earlier ones are safe on disk."""

    def __init__(self, cause: OSError, message: str, step: str, result: Result) -> None:
        super().__init__(cause.errno, message)
        self.step = step
        self.result = result


class Run:
    """An open run folder. Use as a context manager: the status follows how the block ends.

    >>> with Run.create("runs/one", options={"seed": 0}) as run:      # doctest: +SKIP
    ...     top = run.step("hessian.eigenpairs", lambda: ca.eigenpairs(operator, k=5))
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FolderLock) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        options: Mapping[str, Any],
        model_fingerprint: str = "",
        data_fingerprint: str = "",
        command: Sequence[str] = (),
        resume: bool = True,
    ) -> Run:
        """Open a new folder, or go on with the same run when the folder already holds it.

        What a killed process left behind (half-written files, checkpoints of finished steps) is
        removed. A folder that holds a run with other options, model or data, or anything that is
        not a run, is refused and left as it is.

        ``options["effort"]`` is what may be spent (memory, products, time). It is kept with the
        options but does not decide whether a run is the same: what failed goes on with another. A
        None in it keeps what the folder says. Stored steps that said they spend what has changed
        are computed anew, the others stay; half-done ones begin again unless only the time has
        changed.
        """
        options = _json_options(options)
        fingerprints = {"model": model_fingerprint, "data": data_fingerprint}
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: name a folder for the run.")
        fresh = not folder.is_dir() or not any(folder.iterdir())
        if not fresh and not (folder / manifests.FILE_NAME).exists() and not _only_debris(folder):
            if previous(folder / manifests.FILE_NAME).exists():
                raise ValueError(
                    f"{folder} has lost its {manifests.FILE_NAME}: 'curvatlas check {folder} "
                    "--repair' goes back to the one before it."
                )
            raise ValueError(f"{folder} holds files but no run: name an empty or new folder.")
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        lock = FolderLock(folder)
        try:
            if (folder / manifests.FILE_NAME).exists():
                manifest = _resumable(folder, options, fingerprints, resume)
            else:
                manifest = _new_manifest(options, fingerprints, command)
            run = cls(folder, manifest, lock)
            # The manifest first: killed in between, the folder has litter, and names nothing lost.
            run._write_manifest(status="running", error=None)
            litter = [*checking.left_overs(folder, manifest), *checking.orphans(folder, manifest)]
            for file, _ in litter:
                with suppress(OSError):  # litter is no reason to stop
                    file.unlink(missing_ok=True)
        except BaseException:
            lock.release()
            raise
        return run

    def step(self, name: str, function: Callable[[], R], *, spends: Sequence[str] = ()) -> R:
        """The result called ``name``: read back when the folder has it, else computed and stored.

        spends: the entries of ``options["effort"]`` that decide the result; a run that is resumed
        with others computes it anew.
        ``function`` gives the same result whenever it is called (its seed is part of the options),
        so that a resumed run and an uninterrupted one agree bit for bit.
        """
        manifests.require_name(name)
        if name in self.manifest.steps:
            return cast("R", loading.read_result(self.path, name, self.manifest))
        started = time.perf_counter()
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = function()
        finally:
            self._keep_warnings(name, caught)
        if not isinstance(result, Result):
            raise TypeError(f"step {name!r} gave a {type(result).__name__}, expected a Result.")
        effort = {key: self.effort.get(key) for key in spends}
        self._store(name, result, time.perf_counter() - started, effort)
        return result

    def warn(self, message: str) -> None:
        """Keep a warning in the manifest, once; the report shows it."""
        if message not in self.manifest.warnings:
            self._write_manifest(warnings=(*self.manifest.warnings, message))

    def fail(self, name: str, reason: str) -> None:
        """Keep why a step could not be carried out, until it is."""
        manifests.require_name(name)
        self._write_manifest(failures={**self.manifest.failures, name: reason})

    @property
    def effort(self) -> dict[str, Any]:
        """What may be spent, as far as it was said or planned."""
        return dict(self.manifest.options.get(EFFORT, {}))

    def plan(self, **effort: Any) -> None:
        """Keep what a run plans to spend where nothing was asked: a resumed run spends the same."""
        changed = {**self.effort, **effort}
        if changed != self.effort:
            self._write_manifest(options={**self.manifest.options, EFFORT: changed})

    def loaded(self) -> LoadedRun:
        """The run as it stands in the folder, checked as ``load`` does."""
        return loading.load(self.path)

    def checkpoint_path(self, name: str) -> Path:
        """Where a long step may keep its own intermediate state; removed when the step is done."""
        manifests.require_name(name)
        return self.path / checking.CHECKPOINTS / f"{name}.safetensors"

    def close(self, status: manifests.Status = "complete", error: str | None = None) -> None:
        """Note how the run ended and let go of the folder."""
        if status == "complete" and self.manifest.failures:
            status = "incomplete"
        with suppress(OSError):  # only an empty folder goes
            (self.path / checking.CHECKPOINTS).rmdir()
        try:
            self._write_manifest(status=status, error=error)
        finally:
            self._lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        status: manifests.Status = "failed" if isinstance(error, Exception) else "interrupted"
        with suppress(OSError):  # the first error is the one to see, also when the disk is full
            self.close(status, f"{type(error).__name__}: {error}")

    def _store(self, name: str, result: Result, seconds: float, effort: dict[str, Any]) -> None:
        stem = self.path / loading.RESULTS / name
        try:
            written = result.save(f"{stem}.safetensors")
            digest = hashlib.sha256(files.read(written)).hexdigest()
            text = write_json(Path(f"{stem}.json"), brief(result, largest=checking.LARGEST_IN_JSON))
            entry = StepEntry(
                kind=result.kind,
                sha256=digest,
                json_sha256=hashlib.sha256(text).hexdigest(),
                seconds=round(seconds, 3),
                effort=effort,
            )
            failures = {k: v for k, v in self.manifest.failures.items() if k != name}
            steps = {**self.manifest.steps, name: entry}
            self._write_manifest(steps=steps, failures=failures)
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
            message = (
                f"cannot store {name!r}: {reason}. {len(self.manifest.steps)} earlier results are "
                f"safe in {self.path}; make room and start the same command again to resume."
            )
            raise RunWriteError(error, message, name, result) from error
        checkpoint = self.checkpoint_path(name)
        # Also the state before the last one, and the parts that several processes wrote.
        for file in [checkpoint, *checkpoint.parent.glob(f"{checkpoint.name}.*")]:
            file.unlink(missing_ok=True)

    def _keep_warnings(self, name: str, caught: list[warnings.WarningMessage]) -> None:
        for item in caught:
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
            if not issubclass(item.category, (DeprecationWarning, ImportWarning)):
                with suppress(OSError):
                    self.warn(f"{name}: {item.message}")

    def _write_manifest(self, **changes: Any) -> None:
        manifest = self.manifest.changed(**changes)
        write_json(self.path / manifests.FILE_NAME, manifest.to_json(), keep_previous=True)
        self.manifest = manifest  # only after it is on disk: memory never runs ahead of the folder


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

    def loaded(self) -> LoadedRun:
        """The run in every process, read by the first one."""
        results = {name: self._told(name) for name in self.manifest.steps}
        return LoadedRun(path=self.path, manifest=self.manifest, results=results)

    def _told(self, name: str) -> Result:
        def read() -> tuple[Result, bytes] | None:
            if not self._first:
                return None
            result = loading.read_result(self.path, name, self.manifest)
            file = self.path / loading.RESULTS / f"{name}.safetensors"
            return result, bytes(files.read(file))

        stored = parallel.together(read)
        content = parallel.from_first(b"" if stored is None else stored[1])
        return parse(bytearray(content), name) if stored is None else stored[0]

    def close(self, status: manifests.Status = "complete", error: str | None = None) -> None:
        if self._first:
            super().close(status, error)
        else:
            self.manifest = self.manifest.changed(status=status, error=error)

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


def default_folder(
    options: Mapping[str, Any], *, model_fingerprint: str = "", data_fingerprint: str = ""
) -> Path:
    """``curvatlas-runs/<command>-<digest>``, named after what is computed: the same is resumed."""
    decisive = {key: value for key, value in options.items() if key != EFFORT}
    told = json.dumps([decisive, model_fingerprint, data_fingerprint], sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Path("curvatlas-runs") / f"{options['command']}-{digest[:8]}"


def environment() -> dict[str, str]:
    """What a reader needs to repeat the run: versions and machine, no names of people or paths."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{sys.platform} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
    }


def _json_options(options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(dict(options), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the options of a run must be JSON values: {error}.") from error
    result: dict[str, Any] = parse_json(text, "options")
    return result


def _only_debris(folder: Path) -> bool:
    """Whether a run died before its first manifest: nothing but our lock and temporary files."""
    names = [entry.name for entry in folder.iterdir()]
    return all(name == LOCK_NAME or name.endswith(PARTIAL_SUFFIX) for name in names)


def _new_manifest(
    options: dict[str, Any], fingerprints: dict[str, str], command: Sequence[str]
) -> Manifest:
    return Manifest(
        version=__version__,
        status="running",
        created=manifests.now(),
        updated=manifests.now(),
        command=tuple(command),
        options=options,
        fingerprints=fingerprints,
        environment=environment(),
    )


def _resumable(
    folder: Path, options: dict[str, Any], fingerprints: dict[str, str], resume: bool
) -> Manifest:
    if not resume:
        raise ValueError(f"{folder} already holds a run: name another folder.")
    loading.refuse_foreign_files(folder)
    manifest = loading.read_manifest(folder)
    stored_effort, effort = manifest.options.get(EFFORT, {}), options.pop(EFFORT, {})
    stored_options = {key: value for key, value in manifest.options.items() if key != EFFORT}
    for what, here, there in (
        ("options", options, stored_options),
        ("fingerprints", fingerprints, manifest.fingerprints),
    ):
        if here != there:
            keys = sorted(k for k in {*here, *there} if here.get(k) != there.get(k))
            raise ValueError(
                f"{folder} holds a run with other {what} ({', '.join(keys)} differ): "
                "name another folder, or repeat the run with what its manifest says."
            )
    manifest = _with_effort(folder, manifest, stored_effort, effort)
    if manifest.version != __version__:
        note = f"begun with curvatlas {manifest.version}, resumed with {__version__}"
        manifest = manifest.changed(warnings=(*manifest.warnings, note))
    return manifest


def _with_effort(
    folder: Path, manifest: Manifest, stored: dict[str, Any], asked: dict[str, Any]
) -> Manifest:
    """The manifest with the effort of this command, without the steps that spent another one."""
    effort = {**stored, **{key: value for key, value in asked.items() if value is not None}}
    changed = sorted(key for key in effort if effort[key] != stored.get(key) and key != "time")
    if not effort or effort == stored:
        return manifest
    manifest = manifest.changed(options={**manifest.options, EFFORT: effort})
    if not changed:
        return manifest
    # Their vectors were laid out for another memory, their steps for other products.
    for file in (folder / checking.CHECKPOINTS).glob("*"):
        file.unlink(missing_ok=True)
    steps = {  # those that were computed with this effort, as far as they depend on it
        name: entry
        for name, entry in manifest.steps.items()
        if all(effort.get(key) == value for key, value in entry.effort.items())
    }
    anew = manifest.steps.keys() - steps.keys()
    told = ", ".join(f"{key} {effort[key]} for {stored.get(key)}" for key in changed)
    note = f"resumed with {told}: {len(steps)} results were computed before"
    note += f", {len(anew)} are computed anew" if anew else ""
    warnings = (line for line in manifest.warnings if line.partition(":")[0] not in anew)
    return manifest.changed(steps=steps, warnings=(*warnings, note))
