"""What each process of a distributed test runs; started by torch.multiprocessing."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import curvatlas as ca
from curvatlas.zoo.models import GPT, GPTConfig


def model_and_data() -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=11, context=6, d_model=8, n_heads=2, n_layers=2)
    tokens, targets = torch.randint(0, 11, (2, 7, 6))
    targets[2, 1:] = -100
    targets[5] = -100
    return GPT(config).double().eval(), (tokens, targets)


def join_group(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as in forked.py
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Longer than any rank computes alone; one that waits for a rank that has failed ends by itself.
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))


def products(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Save this rank's products; mode 'own' gives uneven shards, 'shared' lets shard=True cut."""
    join_group(rank, world, port)
    model, (tokens, targets) = model_and_data()
    if mode == "own":
        cut = slice(0, 5) if rank == 0 else slice(5, 7)
        problem = ca.Problem(model, "cross_entropy", (tokens[cut], targets[cut]))
    else:
        problem = ca.Problem(model, "cross_entropy", (tokens, targets), shard=True)
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(problem.size, 3, dtype=torch.float64, generator=generator)
    results = {
        "gradient": problem.gradient(),
        "value": torch.tensor(problem.value()),
        **{
            kind.__name__: kind(problem) @ columns
            for kind in (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian, ca.Fisher)
        },
    }
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def survey(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Survey a model whose data the two processes share unevenly."""
    join_group(rank, world, port)
    model, (tokens, targets) = model_and_data()
    cut = slice(0, 5) if rank == 0 else slice(5, 7)
    problem = ca.Problem(model, "cross_entropy", (tokens[cut], targets[cut]))
    ca.survey(problem, output=Path(folder) / "run", **SURVEYED)
    dist.destroy_process_group()


SURVEYED: Any = {"skip": ["trace", "map", "density", "advice"], "eigenvalues": 1}


def failing(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Rank 1's weights turn NaN: every rank must stop, each with a message."""
    join_group(rank, world, port)
    model, (tokens, targets) = model_and_data()
    problem = ca.Problem(model, "cross_entropy", (tokens, targets), shard=True)
    if rank == 1:
        with torch.no_grad():
            model.head.weight[0, 0] = float("nan")
    try:
        ca.Hessian(problem) @ torch.zeros(problem.size, dtype=torch.float64)
        message = "no error"
    except (RuntimeError, ValueError) as error:
        message = str(error)
    (Path(folder) / f"rank{rank}.txt").write_text(message)
    dist.destroy_process_group()


def wrapped_models(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Go through all ways to wrap or shard a model: its products, or why it is refused."""
    join_group(rank, world, port)
    # Accelerate looks for these, and stays in the process: it comes last.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    for name in (*WRAPPED, *REFUSED, "accelerate"):
        file = Path(folder) / f"{name} {rank}"
        try:
            torch.save(_products_of(_wrapped(name, rank, world)), f"{file}.pt")
        except ValueError as error:
            Path(f"{file}.txt").write_text(str(error))
    dist.destroy_process_group()


WRAPPED = ("ddp", "fsdp", "hsdp 1 2", "hsdp 2 1")
REFUSED = ("tensor parallel", "fsdp and tensor parallel", "fsdp1 inside", "other replicas")


def _wrapped(name: str, rank: int, world: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, _ = model_and_data()
    if name == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if name == "accelerate":
        from accelerate import Accelerator

        prepared: torch.nn.Module = Accelerator(cpu=True).prepare(model)
        assert type(prepared).__name__ == "DistributedDataParallel"
        return prepared
    if name == "fsdp1 inside":
        model.head = FullyShardedDataParallel(model.head, device_id=torch.device("cpu"))
        return model
    if name == "tensor parallel":
        parallelize_module(model, init_device_mesh("cpu", (world,)), {"head": ColwiseParallel()})
        return model
    if name == "fsdp and tensor parallel":
        both = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, both["tensor"], {"head": ColwiseParallel()})
        return fully_shard(model, mesh=both["data"])
    if name == "other replicas":
        with torch.no_grad():
            model.head.weight[0, 0] += rank
    replicas = {"fsdp": None, "hsdp 1 2": 1}.get(name, 2)
    shape = (world,) if replicas is None else (replicas, world // replicas)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _products_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    _, (tokens, targets) = model_and_data()
    problem = ca.Problem(model, "cross_entropy", (tokens, targets), shard=True)
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(problem.size, 2, dtype=torch.float64, generator=generator)
    products = {
        "gradient": problem.gradient(),
        "H": ca.Hessian(problem) @ columns,
        "H_o": ca.GaussNewton(problem) @ columns,
    }
    # the model still trains as before
    model(tokens).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    return products


def sharded_eigenpairs(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Eigenpairs with the basis sharded; mode 'stop' is interrupted, 'resume' goes on."""
    join_group(rank, world, port)
    model, data = model_and_data()
    problem = ca.Problem(model, "cross_entropy", data, shard=True)
    operator = ca.Hessian(problem)
    if mode == "stop":
        plain, count = operator._columns, 0

        def failing_later(columns: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            if count > 17:
                raise KeyboardInterrupt
            return plain(columns)

        operator._columns = failing_later  # type: ignore[method-assign]
    try:
        found = ca.eigenpairs(
            operator, k=3, which="both", tol=1e-9, shard=True, checkpoint=Path(folder) / "state"
        )
    except KeyboardInterrupt:
        dist.destroy_process_group()
        return
    part = {"values": found.values, "vectors": found.vectors.contiguous()}
    part["products"] = torch.tensor(operator.products)
    torch.save(part, Path(folder) / f"part{rank}.pt")
    dist.destroy_process_group()


def slow_eigenpairs(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Replicated eigenpairs with a checkpoint and slow products, to be killed from outside."""
    import time

    join_group(rank, world, port)
    model, data = model_and_data()
    operator = ca.Hessian(ca.Problem(model, "cross_entropy", data, shard=True))
    plain = operator._columns

    def slowly(columns: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return plain(columns)

    operator._columns = slowly  # type: ignore[method-assign]
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()  # whoever sees a state on disk finds both numbers
    try:
        ca.eigenpairs(operator, k=3, tol=1e-9, checkpoint=Path(folder) / "state")
    except RuntimeError as error:
        (Path(folder) / f"error{rank}.txt").write_text(str(error))
        os._exit(3)


ROWS = torch.arange(44.0).view(4, 11)  # the whole of what two processes share in the next test


def sharded_states(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Write two states of a sharded basis, then fail twice to write a third: a real EFBIG."""
    import resource
    import warnings

    from curvatlas.parallel import Shards
    from curvatlas.spectra.checkpoint import ShardedCheckpoint

    join_group(rank, world, port)
    mine = Shards.of(ROWS.shape[1])
    file = ShardedCheckpoint(Path(folder) / "state", {"of": "test"}, mine)
    told = []

    def save(count: int, *, limited: int | None = None) -> bool:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        if limited == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        rows = ROWS[:count, mine.start : mine.stop].contiguous()
        # The first process's file is long, each part short: the limit hits either one.
        rest = torch.zeros(1000 if limited == 0 else 1)
        wide = rows if limited != 1 else rows.repeat(100, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            written = file.save({"rows": wide, "rest": rest}, {"count": count})
        told.extend(str(w.message) for w in caught)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return written

    results = [save(2), save(3), save(4, limited=1), save(4, limited=0)]
    (Path(folder) / f"told{rank}.txt").write_text("\n".join([str(results), *told]))
    dist.destroy_process_group()


def resumed_by_two(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Go on with what one process had computed; refuse a file that only one process sees."""
    join_group(rank, world, port)
    model, data = model_and_data()
    problem = ca.Problem(model, "cross_entropy", data, shard=True)
    operator = ca.Hessian(problem)
    try:
        ca.eigenpairs(
            operator, k=3, which="both", tol=1e-6, checkpoint=Path(folder) / f"seen by {rank}"
        )
    except ValueError as error:
        (Path(folder) / f"refused{rank}.txt").write_text(str(error))
    for name in ("plain", "sharded"):
        before = operator.products
        found = ca.eigenpairs(
            operator, k=3, which="both", tol=1e-6, shard=name == "sharded", data_error=False,
            checkpoint=Path(folder) / name,
        )  # fmt: skip
        part = {"values": found.values, "products": torch.tensor(operator.products - before)}
        torch.save(part, Path(folder) / f"{name}{rank}.pt")
    dist.destroy_process_group()
