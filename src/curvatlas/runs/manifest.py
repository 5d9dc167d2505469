"""The manifest of a run folder: what was run, how far it came, and the checksums of its files.

``manifest.json`` is the only file that names others, and it names them by step, never by path. Its
own ``checksum`` covers everything else in it, so that a flipped bit is noticed; it is no signature,
and every value is checked again as if a stranger had written it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from curvatlas.files import json_checksum

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no flock: there the folder is not locked
    fcntl = None

LOCK_NAME = ".lock"


def is_locked(folder: Path) -> bool:
    """Whether another process is writing the folder; leaves no file behind."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class FolderLock:
    """One writer at a time; held until ``release`` or the death of the process.

    Not filelock: ``is_locked`` must look at a folder without writing into it.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._descriptor: int | None = os.open(folder / LOCK_NAME, flags, 0o666)
        except OSError as error:
            raise ValueError(f"{folder} cannot be written: {error.strerror}.") from error
        if fcntl is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._descriptor)
                raise ValueError(
                    f"{folder} is being written by another process: wait for it or name another."
                ) from error

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


SCHEMA = 2
FILE_NAME = "manifest.json"
# incomplete: carried out to its end, but for steps that failed
Status = Literal["running", "complete", "incomplete", "failed", "interrupted"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMIT = 10_000  # steps, warnings: more than any run has


class NewerSchemaError(ValueError):
    """The run was written by a later version of curvatlas: nothing is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """One stored result: its class, and the checksums of ``results/<name>.safetensors, .json``.

    effort: the entries of the run's effort that the result depends on, as they were for it.
    """

    kind: str
    sha256: str
    json_sha256: str
    seconds: float
    effort: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``manifest.json`` holds; every change gives a new one."""

    version: str
    status: Status
    created: str
    updated: str
    command: tuple[str, ...]
    options: dict[str, Any]
    fingerprints: dict[str, str]
    environment: dict[str, str]
    warnings: tuple[str, ...] = ()
    error: str | None = None
    failures: dict[str, str] = field(default_factory=dict)  # step that failed → why
    steps: dict[str, StepEntry] = field(default_factory=dict)

    def changed(self, **changes: Any) -> Manifest:
        """A copy with these fields replaced and the time of change noted."""
        return replace(self, updated=now(), **changes)

    def to_json(self) -> dict[str, Any]:
        """The content of the file, checksum included."""
        content = {"schema": SCHEMA, **json.loads(json.dumps(asdict(self)))}
        return {**content, "checksum": json_checksum(content)}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def valid_name(name: Any) -> bool:
    """Whether ``name`` can name a step: lower-case words and digits joined by dots, no path."""
    return isinstance(name, str) and len(name) <= 120 and _NAME.fullmatch(name) is not None


def require_name(name: str) -> None:
    """ValueError unless ``name`` can name a step."""
    if not valid_name(name):
        raise ValueError(f"{name!r} cannot name a step: use words joined by dots, lower case.")


def parse(content: Any, where: str) -> Manifest:
    """A checked manifest from JSON of any older schema; ValueError with the reason otherwise."""
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise ValueError(f"{where} is not the manifest of a curvatlas run: no integer schema.")
    schema = content["schema"]
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"{where} has schema {schema}, this version reads up to {SCHEMA}: upgrade curvatlas."
        )
    if schema >= 1 and content.get("checksum") != json_checksum(content):
        raise ValueError(f"{where} does not match its own checksum: it is damaged or was edited.")
    try:
        while content["schema"] != SCHEMA:
            content = MIGRATIONS[content["schema"]](content)
        return _checked(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{where} is not a valid manifest: {reason}.") from error


def _checked(content: dict[str, Any]) -> Manifest:
    declared = set(Manifest.__dataclass_fields__)
    unknown = set(content) - declared - {"schema", "checksum"}
    if unknown:
        raise ValueError(f"unknown entries {sorted(unknown)}")
    steps = _mapping(content["steps"], "steps")
    if not all(valid_name(name) for name in steps):
        bad = next(name for name in steps if not valid_name(name))
        raise ValueError(f"{bad!r} is no name of a step")
    if content["status"] not in get_args(Status):
        raise ValueError(f"status {content['status']!r} is unknown")
    if not isinstance(content["error"], str | None):
        raise ValueError("the error is no text")
    return Manifest(
        version=_text(content["version"]),
        status=content["status"],
        created=_text(content["created"]),
        updated=_text(content["updated"]),
        command=_texts(content["command"]),
        options=_mapping(content["options"], "options"),
        fingerprints=_text_mapping(content["fingerprints"]),
        environment=_text_mapping(content["environment"]),
        warnings=_texts(content["warnings"]),
        error=content["error"],
        failures=_text_mapping(content["failures"]),
        steps={name: _step(entry) for name, entry in steps.items()},
    )


def _step(entry: Any) -> StepEntry:
    step = StepEntry(**entry)
    for digest in (step.sha256, step.json_sha256):
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            raise ValueError("a checksum is no SHA-256")
    if type(step.seconds) not in (int, float) or not step.seconds >= 0:
        raise ValueError("a duration is no number")
    _mapping(step.effort, "the effort of a step")
    return StepEntry(**{**asdict(step), "kind": _text(step.kind)})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) > _LIMIT:
        raise ValueError("a list of texts is none")
    return tuple(_text(value) for value in values)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _LIMIT:
        raise ValueError(f"{name} is no mapping")
    return value


def _text_mapping(value: Any) -> dict[str, str]:
    return {key: _text(item) for key, item in _mapping(value, "a mapping of texts").items()}


def _from_schema_0(content: dict[str, Any]) -> dict[str, Any]:
    """Before the first release: two fingerprint entries, and no warnings, error or environment."""
    rest = {k: v for k, v in content.items() if not k.endswith("_fingerprint")}
    fingerprints = {kind: content[f"{kind}_fingerprint"] for kind in ("model", "data")}
    added: dict[str, Any] = {
        "fingerprints": fingerprints,
        "environment": {},
        "warnings": [],
        "error": None,
    }
    return {**rest, **added, "schema": 1}


def _from_schema_1(content: dict[str, Any]) -> dict[str, Any]:
    """Before a failed step was kept beside the others."""
    return {**content, "failures": {}, "schema": 2}


# schema → function that turns a manifest of that schema into one of the next
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    0: _from_schema_0,
    1: _from_schema_1,
}
