"""Whether a run folder is whole: what is wrong in it, what can be repaired, and the repair.

``check`` reads and changes nothing. ``repair`` puts right what can be put right without guessing: a
damaged manifest gives way to the one before it, a damaged result is dropped so that a resume
computes it again, a damaged checkpoint gives way to the state before it or goes, left-overs go.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from curvatlas import files
from curvatlas.files import PARTIAL_SUFFIX, parse_json, previous, write_json
from curvatlas.results import Result, brief
from curvatlas.runs import loading, manifest as manifests
from curvatlas.runs.manifest import FolderLock, Manifest, is_locked
from curvatlas.spectra.checkpoint import missing_entries, parts_on_disk, step_of

CHECKPOINTS = "checkpoints"
_ROUNDS = 10  # of repair: one can bring to light what the next one mends
LARGEST_IN_JSON = 4096  # numbers; of longer tensors the JSON copy has the shape only


@dataclass(frozen=True, kw_only=True)
class RunFault(Result):
    """One thing that is wrong in a run folder."""

    file: str  # below the folder
    fault: str
    remedy: str  # what ``repair`` does about it, or what the user can do
    repairable: bool

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}; {'--repair ' if self.repairable else ''}{self.remedy}"


@dataclass(frozen=True, kw_only=True)
class RunCheck(Result):
    """What ``check`` saw, and what ``repair`` did."""

    run: str
    status: str  # of the run, or "unknown" when no manifest can be read
    results: int  # stored results that are whole
    faults: tuple[RunFault, ...]
    notes: tuple[str, ...]  # worth knowing, nothing wrong
    repaired: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Nothing is wrong."""
        return not self.faults

    def __str__(self) -> str:
        verdict = "whole" if self.whole else f"{len(self.faults)} faults"
        lines = [f"{self.run}: {self.status}, {self.results} results, {verdict}"]
        lines += [f"repaired: {done}" for done in self.repaired]
        lines += [f"wrong: {fault}" for fault in self.faults]
        lines += [f"note: {note}" for note in self.notes]
        return "\n  ".join(lines)


def check(path: str | os.PathLike[str]) -> RunCheck:
    """Look at every file of a run; ValueError when the folder is no run or of a newer version."""
    return _Inspection(Path(path)).report()


def repair(path: str | os.PathLike[str]) -> RunCheck:
    """Put right what ``check`` calls repairable; returns what was done and what is left.

    ValueError when the folder is no run, of a newer version, or being written.
    """
    seen = _Inspection(Path(path))  # a folder that is no run gets no lock file
    lock = FolderLock(seen.folder)
    try:
        done: list[str] = []
        for _ in range(_ROUNDS):
            seen = _Inspection(seen.folder, locked_by_us=True)
            if not seen.repairs:
                break
            done += [f"{f.file}: {f.fault}; {f.remedy}" for f in seen.faults if f.repairable]
            for act in seen.repairs:
                act()
        return replace(seen.report(), repaired=tuple(done))
    finally:
        lock.release()


def left_overs(folder: Path, manifest: Manifest) -> list[tuple[Path, str]]:
    """Files that a killed process left behind and nobody will read, each with what it is."""
    litter = []
    for place in (folder, folder / loading.RESULTS, folder / CHECKPOINTS, folder / "figures"):
        for file in _files_in(place):
            step = file.name.partition(".safetensors")[0]
            if file.name.endswith(PARTIAL_SUFFIX):
                litter.append((file, "half of a file, left by a write that was killed"))
            elif place.name == CHECKPOINTS and step in manifest.steps:
                litter.append((file, "the checkpoint of a step that is done"))
    return litter


def orphans(folder: Path, manifest: Manifest) -> list[tuple[Path, str]]:
    """Results that the manifest does not name: of steps that were cut short, or are done anew."""
    return [
        (file, "a result the manifest does not name")
        for file in _files_in(folder / loading.RESULTS)
        if file.suffix in (".safetensors", ".json")
        and manifests.valid_name(file.stem)
        and file.stem not in manifest.steps
    ]


class _Inspection:
    """One look at a folder: the faults, and the functions that mend those that can be mended."""

    def __init__(self, path: Path, *, locked_by_us: bool = False) -> None:
        self.folder = loading.existing_folder(path)
        self.faults: list[RunFault] = []
        self.repairs: list[Callable[[], None]] = []
        self.notes: list[str] = []
        self.results = 0
        # Before the files: what a running process writes meanwhile is no left-over.
        self.busy = not locked_by_us and is_locked(self.folder)
        self.manifest = self._read_manifest()
        for file, fault in loading.foreign_files(self.folder):
            self._fault(file, f"it {fault}", "remove it if you put it there")
        if self.manifest is None:
            return
        for name in self.manifest.steps:
            self._look_at_result(name, self.manifest)
        litter = [*left_overs(self.folder, self.manifest), *orphans(self.folder, self.manifest)]
        for file, what in litter:
            self._left_over(file, what)
        self._look_at_checkpoints(self.manifest)
        if self.busy:
            self.notes.append("another process is writing this run")
        elif self.manifest.status == "running" and not locked_by_us:
            self.notes.append("the run was killed: the same command goes on with it")

    def report(self) -> RunCheck:
        return RunCheck(
            run=str(self.folder),
            status="unknown" if self.manifest is None else self.manifest.status,
            results=self.results,
            faults=tuple(self.faults),
            notes=tuple(self.notes),
        )

    def _fault(
        self, file: Path, fault: str, remedy: str, act: Callable[[], None] | None = None
    ) -> None:
        where = (
            str(file.relative_to(self.folder)) if file.is_relative_to(self.folder) else str(file)
        )
        self.faults.append(
            RunFault(file=where, fault=fault, remedy=remedy, repairable=act is not None)
        )
        if act is not None:
            self.repairs.append(act)

    def _read_manifest(self) -> Manifest | None:
        """The manifest, or the one before it when it is damaged."""
        path = self.folder / manifests.FILE_NAME
        if not path.exists() and not previous(path).exists():
            raise ValueError(f"{self.folder} is not a run: it has no {manifests.FILE_NAME}.")
        try:
            return loading.read_manifest(self.folder)
        except manifests.NewerSchemaError:
            raise
        except ValueError as error:
            fault = _reason(error, path)
        try:
            older = loading.read_manifest(self.folder, previous(path).name)
        except ValueError:
            self._fault(
                path,
                fault,
                "there is no state before it: start the run in another folder (its results can "
                "still be read one by one with curvatlas.results.load)",
            )
            return None
        self._fault(
            path,
            fault,
            "goes back to the manifest before it",
            lambda: _write_manifest(self.folder, older, status=older.status),
        )
        return older

    def _look_at_result(self, name: str, manifest: Manifest) -> None:
        stem = self.folder / loading.RESULTS / name
        tensors, text = Path(f"{stem}.safetensors"), Path(f"{stem}.json")
        entry = manifest.steps[name]
        damage = _damage(tensors, entry.sha256)
        if damage is not None:
            self._fault(
                tensors,
                damage,
                "drops it, and a resume computes it again",
                lambda: self._drop(name, tensors, text),
            )
            return
        try:
            # Its bytes are those that were written: what cannot be read is no damage.
            result = loading.read_result(self.folder, name, manifest, copy=False)
        except ValueError as error:
            self._fault(tensors, _reason(error, tensors), "use the version that wrote it")
            return
        self.results += 1
        damage = _damage(text, entry.json_sha256)
        if damage is not None:
            self._fault(
                text,
                damage,
                "writes it anew from the result",
                lambda: self._write_copy(name, result, text),
            )

    def _look_at_checkpoints(self, manifest: Manifest) -> None:
        """Those of unfinished steps: each whole, or with a whole state before it."""
        if self.busy:
            return
        for file in _files_in(self.folder / CHECKPOINTS):
            step, dot, rest = file.name.partition(".safetensors")
            if step in manifest.steps or file.name.endswith(PARTIAL_SUFFIX) or not dot:
                continue
            state = file.with_name(f"{step}{dot}")
            if rest.startswith(".step"):
                damage = _checkpoint_damage(file)
                if damage is None and not state.exists() and not previous(state).exists():
                    self._left_over(file, "a part of a checkpoint whose state is gone")
                # A part that is damaged counts as missing where its state is looked at.
                elif damage is not None:
                    self._fault(file, damage, *_way_back(state))
                continue
            damage = _checkpoint_damage(file) or _missing_parts(file, state)
            if damage is None:
                continue
            if rest == "":
                self._fault(file, damage, *_way_back(state))
            else:
                self._fault(file, damage, "removes it", _removes(file))

    def _left_over(self, file: Path, what: str) -> None:
        if not self.busy:
            self._fault(file, f"left over: {what}", "removes it", _removes(file))

    def _drop(self, name: str, *files: Path) -> None:
        manifest = loading.read_manifest(self.folder)
        steps = {step: entry for step, entry in manifest.steps.items() if step != name}
        # The manifest first: killed in between, the folder has left-overs, and names nothing lost.
        status = "interrupted" if manifest.status == "complete" else manifest.status
        _write_manifest(self.folder, replace(manifest, steps=steps), status=status)
        _removes(*files)()

    def _write_copy(self, name: str, result: Result, text: Path) -> None:
        content = write_json(text, brief(result, largest=LARGEST_IN_JSON))
        manifest = loading.read_manifest(self.folder)
        entry = replace(manifest.steps[name], json_sha256=hashlib.sha256(content).hexdigest())
        steps = {**manifest.steps, name: entry}
        _write_manifest(self.folder, replace(manifest, steps=steps), status=manifest.status)


def _write_manifest(folder: Path, manifest: Manifest, *, status: manifests.Status) -> None:
    write_json(folder / manifests.FILE_NAME, manifest.changed(status=status).to_json())


def _removes(*files: Path) -> Callable[[], None]:
    def remove() -> None:
        for file in files:
            file.unlink(missing_ok=True)

    return remove


def _damage(file: Path, digest: str) -> str | None:
    """What is wrong with a file whose SHA-256 is known."""
    try:
        content = files.read(file, follow_links=False)
    except FileNotFoundError:
        return "it is missing"
    except ValueError as error:
        return _reason(error, file)
    return None if hashlib.sha256(content).hexdigest() == digest else "its checksum does not hold"


def _checkpoint_damage(file: Path) -> str | None:
    try:
        content = files.read(file, follow_links=False)
        metadata, tensors = files.parse(content, "it")
        files.verified(metadata, tensors, "it")
    except (ValueError, FileNotFoundError) as error:
        return _reason(error, file)
    return None


def _missing_parts(file: Path, state: Path) -> str | None:
    """What the parts of several processes' checkpoint lack; ``file``: the state or the one before.

    Whole files only: a damaged one has been told already.
    """
    texts = files.parse(files.read(file, follow_links=False), "it")[0]
    if "curvatlas_checkpoint" not in texts:
        return None
    try:
        header = parse_json(texts["curvatlas_checkpoint"], "its header", allow_nan=True)
        step = step_of(header)
        if step is None:
            return None
        undamaged = [
            entries
            for part, at, own in parts_on_disk(state)
            if at == step and _checkpoint_damage(part) is None
            for entries in own
        ]
        lacking = missing_entries(header, undamaged)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"its header is not ours ({error})"
    return None if lacking is None else f"no whole part of step {step} holds {lacking}"


def _way_back(state: Path) -> tuple[str, Callable[[], None]]:
    """What ``repair`` says and does about a checkpoint that nobody can go on with."""
    older = previous(state)
    if older.exists() and not (_checkpoint_damage(older) or _missing_parts(older, state)):
        return "goes back to the state before it", lambda: _go_back(state)
    everything = [state, older, *(part for part, *_ in parts_on_disk(state))]
    return "removes all of this checkpoint, and a resume begins the step again", _removes(
        *everything
    )


def _go_back(state: Path) -> None:
    """Put the state before in place, and remove the parts that are not its own."""
    if not previous(state).exists():
        return  # another fault of the same checkpoint has done so
    os.replace(previous(state), state)
    texts = files.parse(files.read(state, follow_links=False), "it")[0]
    if "curvatlas_checkpoint" not in texts:
        return
    step = step_of(parse_json(texts["curvatlas_checkpoint"], "its header", allow_nan=True))
    _removes(*(part for part, at, *_ in parts_on_disk(state) if at != step))()


def _reason(error: Exception, path: Path) -> str:
    """The reason alone: the report names the file itself."""
    return str(error).replace(str(path), "it").split(": 'curvatlas check")[0].rstrip(".")


def _files_in(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.is_symlink())
