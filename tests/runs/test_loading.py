"""Run folders that nobody vouches for: damaged, foreign, newer, malicious."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from curvatlas import runs
from curvatlas.files import json_checksum
from curvatlas.results import same
from curvatlas.runs import manifest as manifests
from run_samples import estimate, write_run


def _edit(run: Path, change: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> None:
    """Change the manifest as an attacker would, who also knows how the checksum is made."""
    path = run / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    if sign:
        content["checksum"] = json_checksum(content)
    path.write_text(json.dumps(content))


def _snapshot(folder: Path) -> dict[Path, Any]:
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_an_edited_manifest_is_noticed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    _edit(run, lambda m: m["options"].update(seed=7), sign=False)
    with pytest.raises(ValueError, match="checksum"):
        runs.load(run)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(schema=3), "schema 3.*upgrade"),
        (lambda m: m.update(schema="1"), "integer schema"),
        (lambda m: m.update(schema=True), "integer schema"),
        (lambda m: m.update(schema=-1), "not a valid manifest"),
        (lambda m: m.pop("schema"), "integer schema"),
        (lambda m: m.pop("steps"), "steps"),
        (lambda m: m.update(extra=1), "unknown entries"),
        (lambda m: m.update(status="hacked"), "status"),
        (lambda m: m.update(warnings=[{"a": 1}]), "no text"),
        (lambda m: m.update(command="rm -rf"), "list of texts"),
        (lambda m: m.update(error=4), "error"),
        (lambda m: m.update(options=[1]), "options"),
        (lambda m: m.update(fingerprints={"model": 3}), "no text"),
        (lambda m: m.update(steps=[1]), "steps"),
        (lambda m: m["steps"].update({"../../etc/passwd": m["steps"]["hessian.trace"]}), "no name"),
        (lambda m: m["steps"].update({"/etc/passwd": m["steps"]["hessian.trace"]}), "no name"),
        (lambda m: m["steps"].update(missing=m["steps"]["hessian.trace"]), "missing"),
        (lambda m: m["steps"]["hessian.trace"].update(file="../x"), "file"),
        (lambda m: m["steps"]["hessian.trace"].update(sha256="0" * 64), "checksum"),
        (lambda m: m["steps"]["hessian.trace"].update(json_sha256="0" * 64), "checksum"),
        (lambda m: m["steps"]["hessian.trace"].update(sha256="x"), "SHA-256"),
        (lambda m: m["steps"]["hessian.trace"].update(kind="Other"), "Other"),
        (lambda m: m["steps"]["hessian.trace"].update(seconds="soon"), "duration"),
    ],
)
def test_a_manifest_with_a_wrong_entry_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    run = write_run(tmp_path / "run")
    _edit(run, change)
    with pytest.raises(ValueError, match=reason):
        runs.load(run)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**5])
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run")
    (run / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        runs.load(run)


def test_repeated_keys_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    text = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(text.replace("{", '{"status": "failed",', 1))
    with pytest.raises(ValueError, match="twice"):
        runs.load(run)


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        runs.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no manifest"):
        runs.load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="not a folder"):
        runs.load(tmp_path / "file")


@pytest.mark.parametrize("name", ["manifest.json", "results/hessian.trace.safetensors", "extra"])
def test_symbolic_links_are_refused(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    outside = tmp_path / "outside"
    if (run / name).exists():
        (run / name).rename(outside)  # the same content: only the link is wrong
    else:
        outside.mkdir()
    (run / name).symlink_to(outside)
    with pytest.raises(ValueError, match="symbolic link"):
        runs.load(run)


def test_a_linked_results_folder_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "results").rename(tmp_path / "elsewhere")
    (run / "results").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="symbolic link"):
        runs.load(run)


def test_a_link_to_the_whole_run_is_fine(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(write_run(tmp_path / "run"))
    assert runs.load(tmp_path / "latest").status == "complete"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["manifest.json", "results/hessian.trace.safetensors"])
def test_a_pipe_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=r"pipe|regular"):
        runs.load(run)


@pytest.mark.parametrize("name", ["model.pt", "results/evil.pkl", "figures/x.pickle", "a.py"])
def test_files_that_can_carry_code_are_refused(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="code"):
        runs.load(run)
    assert not marker.exists()


def test_a_pickle_in_the_place_of_a_result_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    target = run / "results/hessian.trace.safetensors"
    torch.save(estimate(0).values, target)
    _sign_result(run, target)
    with pytest.raises(ValueError, match="safetensors"):
        runs.load(run)


def _sign_result(run: Path, target: Path) -> None:
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    _edit(run, lambda m: m["steps"]["hessian.trace"].update(sha256=digest))


def test_a_huge_declared_shape_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    target = run / "results/hessian.trace.safetensors"
    content = target.read_bytes()
    # same length, so that only the shape lies
    target.write_bytes(content.replace(b'"shape":[3,4]', b'"shape":[999]', 1))
    _sign_result(run, target)
    with pytest.raises(ValueError, match="declares a tensor"):
        runs.load(run)


def test_an_unknown_file_among_the_results_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "results" / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="no result of ours"):
        runs.load(run)


def test_notes_reports_and_leftovers_of_a_killed_write_do_not_matter(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "notes.txt").write_text("hello")
    (run / "report.html").write_text("<p>")
    (run / "results" / ".a.json.xyz.partial").write_text("half")
    estimate(5).save(run / "results" / "orphan")  # stored, but killed before the manifest
    assert list(runs.load(run).results) == ["hessian.trace", "hessian.eigenpairs"]


def test_a_manifest_of_schema_0_is_read_and_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    def to_schema_0(content: dict[str, Any]) -> None:
        for key in ("environment", "warnings", "error", "failures", "checksum"):
            del content[key]
        fingerprints = content.pop("fingerprints")
        content["model_fingerprint"] = fingerprints["model"]
        content["data_fingerprint"] = fingerprints["data"]
        content["schema"] = 0

    _edit(run, to_schema_0, sign=False)
    loaded = runs.load(run)
    assert loaded.manifest.fingerprints == {"model": "m", "data": "d"}
    assert loaded.warnings == ()
    assert same(loaded["hessian.trace"], estimate(0))
    write_run(run)
    assert json.loads((run / "manifest.json").read_text())["schema"] == 2


def test_migrations_are_chained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(manifests, "SCHEMA", 4)
    steps = {
        2: lambda m: {**m, "schema": 3, "status": "interrupted"},
        3: lambda m: {**m, "schema": 4, "warnings": [m["status"]]},
    }
    monkeypatch.setattr(manifests, "MIGRATIONS", steps)
    assert runs.load(run).warnings == ("interrupted",)


# Every file of a run is damaged in random ways; what is read back is equal, or refused.


def _damage(content: bytes, seed: int, kind: str) -> bytes:
    rng = random.Random(seed)
    position = rng.randrange(len(content) + 1)
    if kind == "truncate":
        return content[:position]
    if kind == "insert":
        return content[:position] + rng.randbytes(rng.randrange(1, 40)) + content[position:]
    if kind == "delete":
        return content[:position] + content[position + rng.randrange(1, 40) :]
    if kind == "digits":  # keeps most of the structure: numbers and sizes lie
        return bytes(
            rng.choice(b"0123456789") if chr(c).isdigit() and rng.random() < 0.02 else c
            for c in content
        )
    flipped = bytearray(content)
    for _ in range(rng.randrange(1, 6)):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    target=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["flip", "truncate", "insert", "delete", "digits"]),
    forged=st.booleans(),
)
def test_damage_is_refused_or_harmless(
    tmp_path: Path, target: int, seed: int, kind: str, forged: bool
) -> None:
    run = tmp_path / "run"
    if not run.exists():
        write_run(run)
    original = runs.load(run)
    files = [run / "manifest.json", *sorted((run / "results").iterdir())]
    path = files[target]
    content = path.read_bytes()
    manifest = (run / "manifest.json").read_bytes()
    path.write_bytes(_damage(content, seed, kind))
    if forged and path.name.startswith("hessian.trace.safe"):
        _sign_result(run, path)  # the checksum is right: only the reader stands in the way
    before = _snapshot(tmp_path)
    try:
        loaded = runs.load(run)
        if not forged:
            assert loaded.manifest == original.manifest
            assert all(same(loaded[name], original[name]) for name in original.results)
    except ValueError:
        pass
    finally:
        assert _snapshot(tmp_path) == before
        path.write_bytes(content)
        (run / "manifest.json").write_bytes(manifest)


def test_a_result_is_read_by_name_and_by_name_and_class(tmp_path: Path) -> None:
    run = runs.load(write_run(tmp_path / "run"))
    (name, trace) = next(iter(run.results.items()))
    assert run[name] is run.result(name, type(trace)) is trace
    with pytest.raises(TypeError, match=f"{name} is a {trace.kind}, expected a RunCheck"):
        run.result(name, runs.RunCheck)
    with pytest.raises(KeyError, match=f"no result 'nothing'; it has: .*{name}"):
        run["nothing"]
