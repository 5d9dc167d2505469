"""How much memory and how many threads a process may use, and how long."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from curvatlas import budget
from curvatlas.budget import Clock, ResultMemory, TimeUp, one_thread

GB = 10**9


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GB, 50 of them free, without control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "groups").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 62500000 kB\nMemAvailable: 48828125 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/statm").write_text("0 0 0 0 0 0 0\n")
    monkeypatch.setattr(budget, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(budget, "_GROUPS", tmp_path / "groups")
    return tmp_path


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_a_machine_without_limits_gives_what_it_has(machine: Path) -> None:
    assert budget.available_bytes() == 50 * GB
    assert budget.limit_bytes() == 64 * GB


def test_the_default_is_the_same_whatever_is_free(machine: Path) -> None:
    before = budget.default_budget()
    (machine / "proc/meminfo").write_text("MemTotal: 62500000 kB\nMemAvailable: 900000 kB\n")
    assert budget.available_bytes() < GB
    assert budget.default_budget() == before
    assert 8 * GB <= before <= 16 * GB


def test_a_control_group_of_version_2_bounds_both(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/pod/job\n")
    write_group(
        machine / "groups/pod/job", memory__max="max", memory__current="700000000",
        memory__stat="anon 1\ninactive_file 2\n",
    )  # fmt: skip
    write_group(
        machine / "groups/pod", memory__max="2000000000", memory__current="900000000",
        memory__stat="anon 1\ninactive_file 400000000\n",
    )  # fmt: skip
    assert budget.available_bytes() == 2 * GB - 500_000_000
    assert budget.limit_bytes() == 2 * GB
    assert GB // 4 < budget.default_budget() <= GB // 2


def test_a_control_group_of_version_1_bounds_both(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("3:cpuset:/\n4:memory:/of/the/host\n0::/\n")
    write_group(
        machine / "groups/memory", memory__limit_in_bytes="3000000000",
        memory__usage_in_bytes="1000000000", memory__stat="cache 5\ntotal_inactive_file 0\n",
    )  # fmt: skip
    assert budget.available_bytes() == 2 * GB
    assert budget.limit_bytes() == 3 * GB


def test_a_control_group_without_a_limit_bounds_nothing(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("4:memory:/\n")
    write_group(
        machine / "groups/memory", memory__limit_in_bytes="9223372036854771712",
        memory__usage_in_bytes="1000",
    )  # fmt: skip
    assert budget.limit_bytes() == 64 * GB


def test_a_limit_on_address_space_bounds_both() -> None:
    code = """
import resource, torch
from curvatlas import budget
size = budget._mapped()[0]
resource.setrlimit(resource.RLIMIT_AS, (size + 10**9, size + 10**9))
assert 0 < budget.available_bytes() <= 10**9, budget.available_bytes()
assert 0 < budget.limit_bytes() <= 10**9, budget.limit_bytes()
before = budget.default_budget()
held = torch.ones(10**8)
assert budget.available_bytes() <= 7 * 10**8
assert budget.default_budget() == before
try:
    torch.ones(10**9)
except RuntimeError as error:
    assert budget.ran_out(error), error
else:
    raise SystemExit("the limit did not hold")
"""
    if budget._mapped() == (0, 0) or resource.getrlimit(resource.RLIMIT_AS)[0] != -1:
        pytest.skip("address space is neither counted nor free to be limited here")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    assert budget.ran_out(MemoryError())
    assert not budget.ran_out(RuntimeError("shape mismatch"))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_one_thread_inside_and_as_before_outside() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_come_back_after_an_interruption() -> None:
    with pytest.raises(KeyboardInterrupt), one_thread():
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("span", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0), (3, 3)]
)
def test_spans_of_time_are_read(span: str | float, seconds: float) -> None:
    assert Clock(span).seconds == seconds


@pytest.mark.parametrize("span", ["", "soon", "-3s", "0", "nan", 0.0, -1.0, float("nan")])
def test_a_span_that_is_none_is_refused(span: str | float) -> None:
    with pytest.raises(ValueError, match=r"as a time|must be positive"):
        Clock(span)


def test_a_clock_stops_work_when_its_time_is_up_and_never_without_one() -> None:
    Clock(None).check()
    Clock("1h").check()
    with pytest.raises(TimeUp, match="the time budget of 1e-09 s is used up"):
        Clock(1e-9).check()


def test_large_results_are_memory_of_their_own_until_nobody_holds_them() -> None:
    results, rows = ResultMemory(), torch.empty(2, 2**18)
    options = {"dtype": rows.dtype, "device": rows.device}
    first, second = results.empty(rows.shape, **options), results.empty(rows.shape, **options)
    assert first.shape == rows.shape
    assert first.dtype == rows.dtype
    view, addresses = first[1, 5:], {first.data_ptr(), second.data_ptr()}
    first.fill_(1.0)
    second.fill_(2.0)
    assert float(first.sum()) == first.numel()
    del first, second
    third, fourth = (
        results.empty(rows.shape, **options),
        results.empty(rows.shape, **options),
    )  # one is still held by its view
    assert third.data_ptr() in addresses
    assert fourth.data_ptr() not in addresses
    third.fill_(3.0)
    fourth.fill_(4.0)
    assert float(view.sum()) == view.numel()
