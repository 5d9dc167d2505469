"""Sharded checkpoints: full disks, damaged parts, other numbers of processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import curvatlas as ca
from curvatlas.parallel import Shards
from curvatlas.spectra.checkpoint import ShardedCheckpoint
from distributed import workers
from distributed.test_data_parallel import start

pytestmark = pytest.mark.slow


def read(file: Path, processes: int) -> torch.Tensor:
    """The whole basis, read as each of so many processes would."""
    size = workers.ROWS.shape[1]
    largest = -(-size // processes)
    parts = []
    for rank in range(processes):
        mine = Shards(size, 0, (((rank * largest, min((rank + 1) * largest, size)),),))
        found = ShardedCheckpoint(file, {"of": "test"}, mine).load()
        assert found is not None
        assert found[1] == {"count": found[0]["rows"].shape[0]}
        parts.append(found[0]["rows"])
    return torch.cat(parts, dim=1)


def test_parts_survive_a_full_disk_and_serve_any_number_of_processes(tmp_path: Path) -> None:
    start(workers.sharded_states, tmp_path, "")
    file = tmp_path / "state"
    for rank in (0, 1):  # both know that the third state was not written, whoever failed
        results, *told = (tmp_path / f"told{rank}.txt").read_text().splitlines()
        assert results == "[True, True, False, False]"
        assert len(told) == 1  # the process that failed, in its turn
        assert "free some space" in told[0]
    assert not list(tmp_path.glob("*.partial"))
    for processes in (1, 2, 3):
        assert torch.equal(read(file, processes), workers.ROWS[:3])
    # A flipped bit in one part is noticed by whoever needs it, and the state before goes on.
    damaged = tmp_path / "state.step2.6-11"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    for processes in (1, 2, 3):
        with pytest.raises(ValueError, match=r"checksum.*move state\.previous in its place"):
            read(file, processes)
    damaged.write_bytes(content[:-2])
    with pytest.raises(ValueError, match="missing or damaged"):
        read(file, 1)
    shutil.move(tmp_path / "state.previous", file)
    for processes in (1, 2, 3):
        assert torch.equal(read(file, processes), workers.ROWS[:2])
    (tmp_path / "state.step1.0-6").unlink()
    with pytest.raises(ValueError, match=r"covers 5 of 11 entries.*delete them"):
        read(file, 1)


def test_two_processes_go_on_with_what_one_had_computed(tmp_path: Path) -> None:
    model, data = workers.model_and_data()

    def operator() -> ca.Hessian:
        return ca.Hessian(ca.Problem(model, "cross_entropy", data))

    def stopped(file: Path, *, shard: bool) -> None:
        limited = operator()
        plain = limited._columns

        def columns(given: torch.Tensor) -> torch.Tensor:
            if limited.products > 20:
                raise KeyboardInterrupt
            return plain(given)

        limited._columns = columns  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            ca.eigenpairs(limited, k=3, which="both", tol=1e-6, shard=shard, checkpoint=file)

    for name in ("plain", "seen by 1"):
        stopped(tmp_path / name, shard=False)
    stopped(tmp_path / "sharded", shard=True)
    whole = ca.eigenpairs(operator(), k=3, which="both", tol=1e-6, data_error=False)
    start(workers.resumed_by_two, tmp_path, "")
    for rank in (0, 1):
        assert "different checkpoints" in (tmp_path / f"refused{rank}.txt").read_text()
        for name in ("plain", "sharded"):
            found = torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True)
            scale = float(whole.values.abs().max())
            assert float((found["values"] - whole.values).abs().max()) < 1e-10 * scale, name
            assert 0 < int(found["products"]) <= whole.products - 8, name
