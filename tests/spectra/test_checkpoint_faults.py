"""Damaged checkpoints and full disks: nothing computed is lost, and the message says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import curvatlas as ca
import forked
from curvatlas.results import same
from curvatlas.spectra.checkpoint import parts_on_disk
from spectra.spectrum_operators import SpectrumOperator, spectra


def estimate(op: ca.LinearOperator, file: Path | None = None) -> ca.Eigenpairs:
    return ca.eigenpairs(op, k=8, which="both", tol=1e-10, checkpoint=file)


def interrupted(file: Path, *, at: int) -> None:
    """Stopped in the product of that number, counted from here."""
    with pytest.raises(KeyboardInterrupt):
        estimate(SpectrumOperator(spectra()["hessian_like"], fail_at=at), file)


def test_a_flipped_bit_is_noticed_and_the_state_before_goes_on(tmp_path: Path) -> None:
    file, values = tmp_path / "c.safetensors", spectra()["hessian_like"]
    whole = estimate(SpectrumOperator(values))
    interrupted(file, at=9)
    interrupted(file, at=9)  # eight products further
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 1  # somewhere in the basis
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"checksum.*move c\.safetensors\.previous in its place"):
        estimate(SpectrumOperator(values), file)
    os.replace(f"{file}.previous", file)
    operator = SpectrumOperator(values)
    assert same(estimate(operator, file), whole)
    assert operator.products <= whole.products - 8


def test_a_checkpoint_cut_anywhere_is_refused_and_starting_afresh_works(tmp_path: Path) -> None:
    file, values = tmp_path / "c", spectra()["hessian_like"]
    interrupted(file, at=9)
    content = file.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"not a readable checkpoint.*delete it"):
            estimate(SpectrumOperator(values), file)
    file.unlink()
    operator = SpectrumOperator(values)
    assert estimate(operator, file).products == operator.products  # all of them, from the start


DISK_FULL = """
import ctypes, os, sys, warnings
from pathlib import Path
import torch
import curvatlas as ca
from curvatlas.results import same
from curvatlas.runs import Run
from spectra.spectrum_operators import SpectrumOperator, spectra

place, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "tmpfs":  # 400 kB in a mount namespace of this process, which needs no privilege
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    new_user, new_mounts = 0x10000000, 0x00020000
    refused = not hasattr(libc, "unshare") or libc.unshare(new_user | new_mounts)
    if not refused:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        refused = libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=400k")
    if refused:
        sys.exit("no file system can be mounted here")
values, options = spectra()["hessian_like"], {"k": 8, "which": "both", "tol": 1e-10}
whole = ca.eigenpairs(SpectrumOperator(values), **options)
state = place / "state"
try:
    ca.eigenpairs(SpectrumOperator(values, fail_at=9), checkpoint=state, **options)
except KeyboardInterrupt:
    pass
if kind == "limit":  # the kernel refuses longer files
    import resource
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * state.stat().st_size // 2, hard))
else:
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    (place / "ballast").write_bytes(bytes(max(0, free - state.stat().st_size)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = ca.eigenpairs(SpectrumOperator(values), checkpoint=state, **options)
assert same(found, whole)
messages = [str(w.message) for w in caught]
wanted = ("free some space", "last one written stays valid")
assert any(all(words in m for words in wanted) for m in messages), messages
with Run.create(place / "run", options={}) as run:
    run.step("small", lambda: ca.trace(SpectrumOperator(values), rtol=0.2))
try:
    with Run.create(place / "run", options={}) as run:
        run.step("large", lambda: whole)
    raise SystemExit("the large result was written")
except OSError as error:
    assert "1 earlier results are safe" in str(error) and "make room" in str(error), error
if kind == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
else:
    (place / "ballast").unlink()
again = SpectrumOperator(values)
assert same(ca.eigenpairs(again, checkpoint=state, **options), whole)
assert again.products <= whole.products - 8, again.products
with Run.create(place / "run", options={}) as run:
    run.step("small", lambda: sys.exit("computed twice"))
    assert same(run.step("large", lambda: whole), whole)
assert not list(place.rglob("*.partial"))
print("nothing was lost")
"""


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_a_disk_that_fills_up_loses_nothing(kind: str, tmp_path: Path) -> None:
    """A real refusal of the system: a limit on the size of files, or a file system that is full."""
    script, place = tmp_path / "script.py", tmp_path / "place"
    script.write_text(DISK_FULL)
    place.mkdir()
    done = forked.Forked(script, place, kind, cwd=tmp_path).finished(timeout=120)
    if "no file system can be mounted" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert "nothing was lost" in done.stdout, done.stdout + done.stderr


def test_a_part_that_is_removed_while_parts_are_listed_is_none(tmp_path: Path) -> None:
    # As where the first process removes an old step's part that another process has just listed.
    part = tmp_path / "state.step3.1of2"
    part.symlink_to(tmp_path / "gone")
    assert parts_on_disk(tmp_path / "state") == [(part, 3, ())]
