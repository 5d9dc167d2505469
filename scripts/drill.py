"""The drill: stop, break and damage what curvatlas writes, and see whether anything is lost.

    make drill                               # everything, some minutes
    python scripts/drill.py --part stops --scale 0.05

Each part prints what was tried, survived (the resumed numbers are those of a run that was never
stopped, bit for bit), lost (a clear error where work should have been kept), wrong (other numbers),
crashed (an exception that is not ours) and left (files nobody will use again). Anything but
survivors makes the exit code 1.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import curvatlas as ca
from curvatlas import results, runs
from curvatlas.results import same
from curvatlas.runs import Run
from spectra.spectrum_operators import SpectrumOperator
from spectra.stops import ESTIMATES, operator, traced

# A child that is killed while it draws its bar would keep the lock that forks share; and one that
# is forked while the bars' own thread holds a lock would wait for it.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

ROOT = Path(__file__).resolve().parents[1]
Verdicts = Iterator[tuple[str, str]]  # verdict, what was done


def judged(name: str, file: Path, whole: ca.Result) -> tuple[str, str]:
    """Go on from ``file`` and compare with the run that was never stopped."""
    try:
        resumed = ESTIMATES[name](operator(), checkpoint=file)
    except ValueError as error:
        return "lost", f"{name}: {error}"
    except Exception as error:
        return "crashed", f"{name}: {type(error).__name__}: {error}"
    if not same(resumed, whole):
        return "wrong", name
    left = [path.name for path in file.parent.iterdir() if path.suffix == ".partial"]
    return ("left", f"{name}: {left}") if left else ("survived", name)


def in_child(work: Callable[[], Any], *, kill_after: float | None = None, by: int = 9) -> None:
    """Run ``work`` in a forked process; send it a signal after some seconds."""
    # A signal that comes before the child's own ``try`` would let it go on as a second parent.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    child = os.fork()
    if child == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            torch.set_num_threads(1)  # the parent's threads do not come along
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if kill_after is not None:
        time.sleep(kill_after)
        with_signal = by if os.waitpid(child, os.WNOHANG) == (0, 0) else None
        if with_signal is None:
            return
        os.kill(child, with_signal)
    os.waitpid(child, 0)


def disturbed_operator(before: Callable[[SpectrumOperator], None]) -> SpectrumOperator:
    """The usual operator with something done before every product."""
    op = operator()
    product = op._columns

    def columns(given: torch.Tensor) -> torch.Tensor:
        before(op)
        return product(given)

    op._columns = columns
    return op


def slow() -> SpectrumOperator:
    """Takes a moment for every product, so that a signal can hit it."""
    return disturbed_operator(lambda _: time.sleep(0.0005))


def failing(at: int) -> SpectrumOperator:
    """Runs out of memory in the product of that number."""

    def fail(op: SpectrumOperator) -> None:
        if op.products >= at:
            raise MemoryError("no memory for this product")

    return disturbed_operator(fail)


# --- parts --------------------------------------------------------------------------------------


def stops(scale: float, draw: random.Random) -> Verdicts:
    """KeyboardInterrupt injected at lines of the package, 2,100 at full scale."""
    with fresh_folder() as folder:
        for name, estimate in ESTIMATES.items():
            whole = estimate(operator())
            count = traced(lambda e=estimate: e(operator(), checkpoint=folder / "all"), 10**9).seen
            lines = draw.sample(range(1, count), min(max(1, int(300 * scale)), count - 1))
            for line in lines:
                file = folder / f"{name} {line}"
                traced(lambda e=estimate, f=file: e(operator(), checkpoint=f), line)
                verdict, told = judged(name, file, whole)
                yield verdict, f"{told}, line {line}"
                clear(folder)


def kills(scale: float, draw: random.Random) -> Verdicts:
    """SIGKILL, SIGINT and SIGTERM at random moments, 240 at full scale."""
    with fresh_folder() as folder:
        wholes = {name: estimate(operator()) for name, estimate in ESTIMATES.items()}
        for _ in range(max(1, int(240 * scale))):
            name = draw.choice(list(ESTIMATES))
            by = draw.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
            file = folder / "state"
            after = draw.uniform(0.0, 0.08)
            for _ in range(draw.choice([1, 1, 2])):  # also a stop of what was resumed
                in_child(
                    lambda n=name, f=file: ESTIMATES[n](slow(), checkpoint=f),
                    kill_after=after,
                    by=by,
                )
            verdict, told = judged(name, file, wholes[name])
            yield verdict, f"{told}, {by.name} after {after:.3f} s"
            clear(folder)


_DISK_CALLS = ("replace", "fsync", "link", "unlink", "open", "fdopen", "close")


@contextmanager
def at_disk_call(number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """``act`` before the disk call of that number."""
    originals = {name: getattr(os, name) for name in _DISK_CALLS}
    seen = [0]

    def watching(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen[0] += 1
            if seen[0] == number:
                act()
            return originals[name](*args, **options)

        return call

    for name in _DISK_CALLS:
        setattr(os, name, watching(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _disturbed(kind: str, number: int, work: Callable[[], Any]) -> None:
    """Work in a process that is killed, or finds the disk full, at that disk call."""
    act = _full_disk if kind == "full" else lambda: os._exit(137)

    def disturbed() -> None:
        with warnings.catch_warnings(), at_disk_call(number, act):
            warnings.simplefilter("ignore")
            work()

    in_child(disturbed)


def disk(scale: float, draw: random.Random) -> Verdicts:
    """A kill, or a full disk, at every disk call of estimates and of a run folder."""
    with fresh_folder() as folder:
        for name, estimate in ESTIMATES.items():
            whole = estimate(operator())
            with at_disk_call(0, lambda: None) as seen:
                estimate(operator(), checkpoint=folder / "all")
            numbers = range(1, seen[0] + 1)
            if scale < 1:
                numbers = draw.sample(numbers, max(1, int(len(numbers) * scale)))
            for number in numbers:
                for kind in ("kill", "full"):
                    file = folder / "state"
                    act = (lambda: os._exit(137)) if kind == "kill" else _full_disk

                    def work(
                        e: Any = estimate, f: Path = file, n: int = number, a: Any = act
                    ) -> None:
                        with warnings.catch_warnings(), at_disk_call(n, a):
                            warnings.simplefilter("ignore")
                            e(operator(), checkpoint=f)

                    in_child(work)
                    verdict, told = judged(name, file, whole)
                    yield verdict, f"{told}, {kind} at disk call {number}"
                    clear(folder)
        yield from _run_disk(folder, scale, draw)


def survey_like(path: Path) -> Run:
    """A small run folder with a few steps, some of which resume."""
    with Run.create(path, options={"of": "the drill"}, model_fingerprint="m") as run:
        for name in ("eigenpairs", "trace", "density"):
            run.step(
                f"model.{name}",
                lambda n=name: ESTIMATES[n](
                    operator(), checkpoint=run.checkpoint_path(f"model.{n}")
                ),
            )
    return run


def _run_disk(folder: Path, scale: float, draw: random.Random) -> Verdicts:
    survey_like(folder / "whole")
    whole = runs.load(folder / "whole")
    with at_disk_call(0, lambda: None) as seen:
        survey_like(folder / "counted")
    numbers = range(1, seen[0] + 1)
    if scale < 1:
        numbers = draw.sample(numbers, max(1, int(len(numbers) * scale)))
    for number in numbers:
        for kind in ("kill", "full"):
            path = folder / "run"
            _disturbed(kind, number, lambda p=path: survey_like(p))
            told = f"run folder, {kind} at disk call {number}"
            try:
                survey_like(path)
                loaded = runs.load(path)
            except Exception as error:
                yield "lost", f"{told}: {type(error).__name__}: {error}"
            else:
                equal = all(same(loaded.results[n], r) for n, r in whole.results.items())
                left = sorted(p.name for p in path.rglob("*.partial"))
                verdict = "wrong" if not equal else "left" if left else "survived"
                yield verdict, f"{told} {left}"
            shutil.rmtree(path, ignore_errors=True)


def memory(scale: float, draw: random.Random) -> Verdicts:
    """A failed allocation in a product, 280 at full scale."""
    with fresh_folder() as folder:
        for name, estimate in ESTIMATES.items():
            whole = estimate(operator())
            for _ in range(max(1, int(40 * scale))):
                at, file = draw.randint(1, max(2, whole["products"])), folder / "state"
                with suppress(MemoryError):
                    estimate(failing(at), checkpoint=file)
                verdict, told = judged(name, file, whole)
                yield verdict, f"{told}, out of memory in product {at}"
                clear(folder)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, inserted or swapped."""
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        kind, place = draw.randrange(6), draw.randrange(max(len(data), 1))
        if kind == 0 and data:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data = data[:place]
        elif kind == 2:
            data[place:place] = data[place : place + draw.randrange(1, 64)]
        elif kind == 3:
            data[place:place] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
        elif kind == 4 and data:
            data[place] = draw.choice(b'{}[]",:0123456789eE-')
        elif kind == 5 and len(data) > 8:
            data[:8] = draw.randrange(2**20).to_bytes(8, "little")
        if not data:
            break
    return bytes(data)


def fuzz(scale: float, draw: random.Random) -> Verdicts:
    """Damaged results, checkpoints, manifests and folders, 100,000 at full scale."""
    with fresh_folder() as folder:
        survey_like(folder / "run")
        state = folder / "state"
        ESTIMATES["restarted"](operator(), checkpoint=state)
        stored = {p: p.read_bytes() for p in (folder / "run").rglob("*") if p.is_file()}
        single = [c for p, c in stored.items() if p.suffix == ".safetensors"]
        originals = [results.parse(bytearray(content), "result") for content in single]
        checkpoint = state.read_bytes()
        whole = ESTIMATES["restarted"](operator())
        for place in range(max(3, int(100_000 * scale))):
            kind = ("result", "result", "checkpoint", "folder")[place % 4]
            started = time.monotonic()
            if kind == "result":
                verdict, told = _fuzz_result(single, originals, draw)
            elif kind == "checkpoint":
                verdict, told = _fuzz_checkpoint(state, checkpoint, whole, draw)
            else:
                verdict, told = _fuzz_folder(folder / "run", stored, draw)
            if time.monotonic() - started > 20:
                verdict = "hung"
            yield verdict, f"{kind}: {told}"


def _refused(error: Exception) -> tuple[str, str]:
    ours = isinstance(error, (ValueError, OSError))
    return ("survived" if ours else "crashed"), f"{type(error).__name__}: {error}"


def _fuzz_result(
    single: list[bytes], originals: list[ca.Result], draw: random.Random
) -> tuple[str, str]:
    place = draw.randrange(len(single))
    content = mutated(single[place], draw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = results.parse(bytearray(content), "result")
    except Exception as error:
        return _refused(error)
    return ("survived" if same(read, originals[place]) else "wrong"), "read"


def _fuzz_checkpoint(
    state: Path, content: bytes, whole: ca.Result, draw: random.Random
) -> tuple[str, str]:
    state.write_bytes(mutated(content, draw))
    try:
        read = ESTIMATES["restarted"](operator(), checkpoint=state)
    except Exception as error:
        return _refused(error)
    return ("survived" if same(read, whole) else "wrong"), "resumed"


def _fuzz_folder(path: Path, stored: dict[Path, bytes], draw: random.Random) -> tuple[str, str]:
    victim = draw.choice(list(stored))
    if draw.random() < 0.1:
        victim.unlink()
    else:
        victim.write_bytes(mutated(stored[victim], draw))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs.load(path)
        return "survived", "loaded"
    except Exception as error:
        return _refused(error)
    finally:
        victim.write_bytes(stored[victim])


def writers(scale: float, draw: random.Random) -> Verdicts:
    """Two processes open one run folder: one works, the other is told so."""
    for _ in range(max(1, int(20 * scale))):
        with fresh_folder() as folder:
            path = folder / "run"
            children = []
            for place in range(2):
                child = os.fork()
                if child == 0:
                    code = 0
                    try:
                        survey_like(path)
                    except (OSError, ValueError, RuntimeError):
                        code = 3
                    except BaseException:
                        code = 4
                    os._exit(code)
                children.append(child)
                time.sleep(draw.uniform(0, 0.02) * place)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            survey_like(path)
            complete = len(runs.load(path).results) == 3
            verdict = "crashed" if 4 in codes else "survived" if complete else "lost"
            yield verdict, f"two writers: {codes}"


def ranks(scale: float, draw: random.Random) -> Verdicts:
    """Ranks that die, hang or disagree, each in real processes (the suite's own cases)."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", str(ROOT / "tests" / "distributed")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    for line in done.stdout.splitlines():
        if line.startswith(("PASSED", "FAILED", "ERROR")):
            yield ("survived" if line.startswith("PASSED") else "lost"), line


PARTS: dict[str, Callable[[float, random.Random], Verdicts]] = {
    "stops": stops,
    "kills": kills,
    "disk": disk,
    "memory": memory,
    "fuzz": fuzz,
    "writers": writers,
    "ranks": ranks,
}


@contextmanager
def fresh_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="drill-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=[*PARTS], action="append")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    print(f"{'part':10}{'tried':>8}  verdicts", flush=True)
    for name in options.part or PARTS:
        counts: Counter[str] = Counter()
        for verdict, told in PARTS[name](options.scale, random.Random(options.seed)):
            counts[verdict] += 1
            if verdict != "survived":
                bad += 1
                print(f"  {verdict}: {told}", flush=True)
        shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        print(f"{name:10}{counts.total():>8}  {shown}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
