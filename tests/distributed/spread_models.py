"""Models that FSDP2 spreads over two processes, and what is asked of them; started by torch."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import curvatlas as ca
from curvatlas import parallel
from curvatlas.engines.tangent.sharded import _PLANNED, Mode, ShardedLinearisation
from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.problem import sharding
from curvatlas.spectra import checkpoint, vectors
from curvatlas.spectra.summary import flat_directions
from curvatlas.spectra.vectors import VectorSpace
from distributed.workers import join_group, model_and_data

PARTS_OF_H = {"H_o": ca.GaussNewton, "H_f": ca.FunctionalHessian}


class Encoder(nn.Module):
    """Post-norm encoder layers, a mean over tokens, a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x).mean(1))
        return logits


def case(name: str) -> tuple[nn.Module, Any, Any, Any]:
    """(model, its blocks, loss, data): the same in every process."""
    if name == "gpt":
        model, (tokens, targets) = model_and_data()
        few = [2, 3, 5, 4, 6]  # with the masked ones; an uneven number for two processes
        return model, model.blocks, "cross_entropy", (tokens[few], targets[few])
    torch.manual_seed(0)
    if name == "encoder":
        encoder = Encoder().double().eval()
        data = torch.randn(5, 4, 8, dtype=torch.float64), torch.randint(0, 3, (5,))
        return encoder, encoder.encoder.layers, "cross_entropy", data
    ids = torch.randint(0, 13, (5, 6))
    batch = {"input_ids": ids, "labels": ids}
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        llama = LlamaForCausalLM(config).double().eval()
        return llama, llama.model.layers, None, batch
    from transformers import GPT2Config, GPT2LMHeadModel

    tied = GPT2LMHeadModel(
        GPT2Config(vocab_size=13, n_embd=16, n_layer=2, n_head=4, n_positions=16)
    )
    return tied.double().eval(), tied.transformer.h, None, batch


def spread(model: nn.Module, blocks: Any, replicas: int | None = None) -> nn.Module:
    world = dist.get_world_size()
    mesh = None
    if replicas is not None:
        shape = (replicas, world // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def columns(size: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 2, dtype=torch.float64, generator=draw)


def products(hessian: ca.Hessian) -> dict[str, Tensor]:
    """What one process and two are compared in, vectors whole."""
    problem = hessian.problem
    right = columns(problem.size)
    rows, others = problem.parameter_names[2], problem.parameter_names[-1]
    results = {"H": hessian @ right}
    results |= {name: kind(problem) @ right for name, kind in PARTS_OF_H.items()}
    results["value"] = torch.tensor(problem.value(), dtype=torch.float64)
    results["gradient"] = problem.gradient()
    results["view"] = hessian[rows, others] @ right[: problem.layout.sizes[-1], 0]
    parts = CurvatureParts(problem).flat_parts(right)
    results |= {f"part {name}": part.contiguous() for name, part in parts.items()}
    return results


@contextlib.contextmanager
def straight_messages() -> Iterator[None]:
    """Inside, a model's parameters go straight to their places, however small they are."""
    large, sharding._LARGE_MESSAGE = sharding._LARGE_MESSAGE, 0
    try:
        yield
    finally:
        sharding._LARGE_MESSAGE = large


@contextlib.contextmanager
def drawn_in_small_blocks() -> Iterator[None]:
    """Inside, few of the random numbers that all processes have to go through lie in memory."""
    drawn, vectors._DRAWN = vectors._DRAWN, 64
    try:
        yield
    finally:
        vectors._DRAWN = drawn


def linearised(operator: ca.Hessian) -> ShardedLinearisation:
    assert operator._spread is not None
    assert operator._spread._linear is not None
    return operator._spread._linear


def by_budget(problem: ca.Problem, first: ca.Hessian) -> dict[str, Tensor]:
    """Products where a sample at a time fits, and where none does."""
    linear = linearised(first)
    results: dict[str, Tensor] = {}
    with problem.joined(), problem.evaluating():
        units, tangents, inputs = linear._unit_bytes(next(problem.batches()))
    taken = _PLANNED * first.budget - linear._room
    one = (linear._held_ratio + 2) * tangents
    modes: dict[Mode, float] = {"passing": units * inputs + one, "recomputed": 0.0}
    for mode, room in modes.items():
        operator = ca.Hessian(problem, budget=int((taken + room) / _PLANNED))
        results[mode] = operator @ columns(problem.size)
        assert linearised(operator)._mode == mode
        results[f"{mode} again"] = operator @ columns(problem.size)
        if mode == "passing":
            assert len(linearised(operator)._kept) > 1
    return results


def every_model(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """The products of every family; a rank that fails ends both, and its words are shown."""
    join_group(rank, world, port)
    for name in names():
        try:
            torch.save(every_product(name), Path(folder, f"{name} {rank}.pt"))
        except Exception as error:
            raise RuntimeError(f"the products of {name} on rank {rank}") from error
        # Last before the group goes, as it holds no Python object: gloo's thread would wait for the
        # interpreter to let go of one, and the group's end for that thread.
        dist.barrier()
    dist.destroy_process_group()


def every_product(name: str) -> dict[str, Tensor]:
    """The products of one family, by whole vectors, by local ones and by DTensors."""
    replicas = int(name.split()[1]) if " " in name else None
    model, blocks, loss, data = case(name.split()[0])
    problem = ca.Problem(spread(model, blocks, replicas), loss, data, shard=True)
    operator, shards = ca.Hessian(problem), problem.shards
    results = products(operator)
    assert shards is not None
    local = operator.sharded_columns(shards.take(columns(problem.size)).contiguous())
    results["local"] = torch.stack([shards.gathered(c) for c in local.T.contiguous()], 1)
    results["length"] = torch.tensor(local.shape[0])
    results |= by_budget(problem, operator)
    with straight_messages():
        again = ca.Problem(model, loss, data, shard=True)
        results["straight"] = ca.Hessian(again) @ columns(problem.size)
    inputs = data if isinstance(data, dict) else {"": data[0]}
    outputs = model(**inputs) if isinstance(data, dict) else model(inputs[""])
    (outputs.loss if isinstance(data, dict) else outputs.square().mean()).backward()
    slopes = {name: p.grad for name, p in model.named_parameters()}
    image = operator @ slopes
    assert all(hasattr(tensor, "placements") for tensor in image.values())
    for key, tensors in (("slopes", slopes), ("image", image)):
        whole = [tensors[n].full_tensor().reshape(-1) for n in problem.parameter_names]  # type: ignore[union-attr]
        results[key] = torch.cat(whole)
    assert problem.engine.name == "tangent"
    return results


def number(estimate: ca.Estimate) -> Tensor:
    """The value with its interval and its cost."""
    numbers = estimate.value, *estimate.interval, estimate.products
    return torch.tensor(numbers, dtype=torch.float64)


def quadrature(density: ca.SpectralDensity) -> Tensor:
    return torch.cat([density.nodes, density.weights])


def estimates(problem: ca.Problem, folder: Path | None = None) -> dict[str, Tensor]:
    """Every estimator once, cheaply."""
    h, h_o = ca.Hessian(problem), ca.GaussNewton(problem)
    right = columns(problem.size)[:, 0]
    state = None if folder is None else folder / "ends.safetensors"
    pairs = ca.eigenpairs(h, k=2, which="both", tol=1e-4, max_products=120, checkpoint=state)
    density = ca.spectral_density(h, max_products=12)
    flat, tested = flat_directions(h, pairs.norm)
    return {
        # the same steps on any number of processes: equal to rounding, converged or not
        "eigenvalues": pairs.values,
        "participation": (pairs.vectors**4).sum(0),
        "nodes": density.nodes,
        "flat directions": torch.tensor([tested, *", ".join(flat).encode()], dtype=torch.float64),
        "trace": number(ca.trace(h, max_products=8, data_error=False)),
        "frobenius": number(ca.frobenius_norm(h, max_products=8, data_error=False)),
        "spectral": number(ca.spectral_norm(h, max_products=30)),
        "diagonal": ca.diagonal(h, max_products=6).value,
        "trace of H_o": torch.tensor(ca.trace(h_o, data_error=False).value),
        "diagonal of H_o": ca.diagonal(h_o).value,
        "solve": ca.solve(h_o, right, damping=0.5, rtol=1e-4).value,
    }


SIZE = 3000  # of an operator whose products cost nothing


def ranges_of(world: int) -> tuple[tuple[parallel.Range, ...], ...]:
    """Rows of parameters of 700, 37, 2000 and the rest, as FSDP2 gives them to processes."""
    ends = [0, 700, 737, 2737, SIZE]
    cuts = [[a + (b - a) * r // world for r in range(world + 1)] for a, b in pairwise(ends)]
    return tuple(tuple((cut[r], cut[r + 1]) for cut in cuts) for r in range(world))


class Spectrum(LinearOperator):
    """diag(λ) + u uᵀ with a bulk and outliers; spread over the processes where there are several.

    The products are its own and make no whole vector.
    """

    def __init__(self, dtype: torch.dtype, *, psd: bool = False) -> None:
        tags = Tags(symmetric=True, psd=psd)
        super().__init__((SIZE, SIZE), dtype=dtype, tags=tags)
        draw = torch.Generator().manual_seed(7)
        values = torch.rand(SIZE, generator=draw, dtype=torch.float64) - (0.0 if psd else 0.2)
        values[::400] *= 30.0
        one = torch.randn(SIZE, generator=draw, dtype=torch.float64) / SIZE**0.5
        self._shards = None
        if dist.is_initialized():
            ranges = ranges_of(dist.get_world_size())
            self._shards = parallel.Shards(SIZE, dist.get_rank(), ranges)
            values, one = self._shards.take(values), self._shards.take(one)
        self._values, self._one = values.to(dtype), one.to(dtype)

    @property
    def shards(self) -> parallel.Shards | None:
        return self._shards

    def _columns(self, columns: Tensor) -> Tensor:
        if self._shards is not None and len(columns) == SIZE:  # whole: what small operators take
            local = self.sharded_columns(self._shards.take(columns))
            return torch.stack([self._shards.gathered(c) for c in local.T.contiguous()], 1)
        inner = self._one @ columns
        if self._shards is not None:
            self._shards.summed(inner)
        return self._values.unsqueeze(1) * columns + self._one.unsqueeze(1) * inner

    def sharded_columns(self, columns: Tensor) -> Tensor:
        if self.before_product is not None:
            self.before_product()
        self.products += columns.shape[1]
        return self._columns(columns)

    def sharded_matvec(self, part: Tensor, shards: parallel.Shards) -> Tensor:
        return self.sharded_columns(part.unsqueeze(1)).squeeze(1)


def little_memory(op: Spectrum) -> int:
    """Room for twenty vectors as they are held."""
    return 20 * op.dtype.itemsize * (SIZE if op.shards is None else op.shards.largest)


# Estimators whose vectors stay spread. b: this process's entries of right-hand sides.
SPREAD: dict[str, Callable[[Spectrum, Tensor], Tensor]] = {
    "trace": lambda op, b: number(ca.trace(op, rtol=0.02)),
    "trace in little memory": lambda op, b: number(
        ca.trace(op, rtol=0.02, memory=little_memory(op))
    ),
    "density": lambda op, b: quadrature(ca.spectral_density(op, max_products=30)),
    "lean density": lambda op, b: quadrature(
        ca.spectral_density(op, probes=3, steps=8, reorthogonalise=False)
    ),
    "log-determinant": lambda op, b: number(ca.log_determinant(op, damping=0.5, max_products=60)),
    "frobenius": lambda op, b: number(ca.frobenius_norm(op, rtol=0.03)),
    "spectral": lambda op, b: number(ca.spectral_norm(op)),
    "eigenvalues": lambda op, b: ca.eigenpairs(op, k=2, shard=True).values,
}
# Those of them that give this process's entries. Solutions are asked for to rounding: on the way
# there short recurrences magnify that of their sums.
PARTS: dict[str, Callable[[Spectrum, Tensor], Tensor]] = {
    "conjugate gradients": lambda op, b: (
        ca.solve(op, b, damping=5.0, rtol=1e-11, method="cg", shard=True).value
    ),
    "minres": lambda op, b: ca.solve(op, b, damping=9.0, rtol=1e-11, shard=True).value,
    "diagonal": lambda op, b: ca.diagonal(op, max_products=60, shard=True).values,
    "inverse diagonal": lambda op, b: (
        ca.inverse_diagonal(op, damping=50.0, max_products=60, shard=True).values
    ),
}
# Whole vectors in or out, which the recorder has to see.
GATHERED: dict[str, Callable[[Spectrum, Tensor], Tensor]] = {
    "whole eigenvectors": lambda op, b: ca.eigenpairs(op, k=2).vectors.abs(),
    "whole diagonal": lambda op, b: ca.diagonal(op, max_products=60).values,
    "whole solution": lambda op, b: ca.solve(op, right_sides(op), damping=9.0, rtol=1e-11).value,
    "preconditioned": lambda op, b: (
        ca.solve(op, right_sides(op), damping=5.0, rtol=1e-11, preconditioner="nystrom").value
    ),
    "lsmr": lambda op, b: (
        ca.solve(op, right_sides(op), damping=200.0, rtol=1e-11, method="lsmr").value
    ),
    "quadratic form": lambda op, b: number(
        ca.quadratic_form(op, right_sides(op)[:, 0], damping=1.0)
    ),
    "f(A) v": lambda op, b: ca.matrix_function(op, right_sides(op), np.exp, rtol=1e-4).value,
    "newton step": lambda op, b: ca.newton_step(op, right_sides(op)[:, 0], radius=2.0).value,
}
SINGLE = ("trace", "density")  # in float32 too
# Those that need a positive definite operator.
DEFINITE = (
    "log-determinant",
    "conjugate gradients",
    "inverse diagonal",
    "quadratic form",
    "preconditioned",
)


def right_sides(op: Spectrum) -> Tensor:
    return columns(SIZE).to(op.dtype)


# Estimators that write checkpoints, and at which call of the operator they are stopped.
STOPPED: dict[str, tuple[int, Callable[[Spectrum, Path], Tensor]]] = {
    "trace": (5, lambda op, file: number(ca.trace(op, rtol=0.02, checkpoint=file))),
    "frobenius": (6, lambda op, file: number(ca.frobenius_norm(op, rtol=0.03, checkpoint=file))),
    "density": (
        9,
        lambda op, file: quadrature(ca.spectral_density(op, max_products=40, checkpoint=file)),
    ),
    "lean density": (
        9,
        lambda op, file: quadrature(
            ca.spectral_density(op, probes=2, steps=6, reorthogonalise=False, checkpoint=file)
        ),
    ),
    "diagonal": (10, lambda op, file: ca.diagonal(op, max_products=60, checkpoint=file).values),
}


def stopped_once(name: str, folder: Path) -> None:
    """Leave the checkpoint of an estimate that was stopped, every step written."""
    calls, estimate = STOPPED[name]
    left = iter(range(calls))

    def stop() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    op = Spectrum(torch.float64)
    op.before_product = stop
    share, checkpoint.MAX_WRITE_SHARE = checkpoint.MAX_WRITE_SHARE, float("inf")
    try:
        estimate(op, folder / name)
    except KeyboardInterrupt:
        return
    finally:
        checkpoint.MAX_WRITE_SHARE = share
    raise AssertionError(f"{name} was not stopped")


def gone_on(folder: Path) -> dict[str, Tensor]:
    """What every stopped estimate comes to, and the products that it still took."""
    results = {}
    for name, (_, estimate) in STOPPED.items():
        op = Spectrum(torch.float64)
        results[name] = estimate(op, folder / name)
        results[f"products of {name}"] = torch.tensor(op.products)
    return results


class Longest(TorchDispatchMode):
    """The longest axis of any tensor that is made inside."""

    length = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # another shape of the same memory may be longer: that of K columns, one after the other
        if not func.is_view:
            made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            self.length = max([self.length, *(n for tensor in made for n in tensor.shape)])
        return result


def of_spectra() -> dict[str, Tensor]:
    """Every estimator on operators that cost nothing, and how long its longest tensor was."""
    results = {}
    single = {name: estimate for name, estimate in SPREAD.items() if name in SINGLE}
    cases = {torch.float64: {**SPREAD, **PARTS, **GATHERED}, torch.float32: single}
    for dtype, estimators in cases.items():
        for name, estimate in estimators.items():
            op = Spectrum(dtype, psd=name in DEFINITE)
            space = VectorSpace.of(op)
            part = space.take(right_sides(op))
            with Longest() as seen:
                result = estimate(op, part)
            results[f"{name}, {dtype}"] = space.whole(result) if name in PARTS else result
            results[f"longest {name}, {dtype}"] = torch.tensor(seen.length)
    return results


def over_processes() -> dict[str, Tensor]:
    """Of a model that every process holds whole, the results of which each holds a part."""
    model, _, loss, data = case("gpt")
    h_o = ca.GaussNewton(ca.Problem(model, loss, data, shard=True))
    shards = parallel.Shards.of(h_o.shape[0])
    right = shards.take(columns(h_o.shape[0])[:, 0])
    return {
        "solve": shards.gathered(ca.solve(h_o, right, damping=0.5, rtol=1e-4, shard=True).value),
        "diagonal": shards.gathered(ca.diagonal(h_o, max_products=20, shard=True).values),
    }


def every_estimator(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    join_group(rank, world, port)
    model, blocks, loss, data = case("gpt")
    problem = ca.Problem(spread(model, blocks), loss, data, shard=True)
    torch.save(estimates(problem, Path(folder)), Path(folder, f"estimates {rank}.pt"))
    operator = ca.Hessian(problem)
    part = ca.eigenpairs(operator, k=2, which="both", tol=1e-4, max_products=120, shard=True)
    torch.save(part.vectors.contiguous(), Path(folder, f"vectors {rank}.pt"))
    with drawn_in_small_blocks():
        torch.save(of_spectra(), Path(folder, f"spectra {rank}.pt"))
    torch.save(over_processes(), Path(folder, f"over processes {rank}.pt"))
    for name in STOPPED:
        stopped_once(name, Path(folder, "parts"))
    dist.barrier()
    if rank == 0:
        shutil.copytree(Path(folder, "parts"), Path(folder, "resumed"))
    dist.barrier()
    torch.save(gone_on(Path(folder, "resumed")), Path(folder, f"gone on {rank}.pt"))
    dist.destroy_process_group()


def stopped(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    """Eigenpairs of a spread model that are stopped, or all that comes after in another process."""
    join_group(rank, world, port)
    for one in ("stop",) if mode == "stop" else ("go on", "other", "lost"):
        dist.barrier()
        if one == "lost" and rank == 0:
            sorted(Path(folder).glob("state.step*.1of2"))[-1].unlink()
        dist.barrier()
        _stopped(rank, folder, one)
    dist.destroy_process_group()


def _stopped(rank: int, folder: str, mode: str) -> None:
    """mode: stop, go on, go on with other weights, go on without the piece of a rank (lost)."""
    model, blocks, loss, data = case("gpt")
    if mode == "other":
        with torch.no_grad():
            model.head.weight += 1e-3
    problem = ca.Problem(spread(model, blocks), loss, data, shard=True)
    operator = ca.Hessian(problem)
    if mode == "stop":
        left = iter(range(17))

        def stop() -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        operator.before_product = stop
    text = ""
    try:
        found = ca.eigenpairs(
            operator, k=2, which="both", tol=1e-8, max_products=200,
            checkpoint=Path(folder, "state"),
        )  # fmt: skip
        torch.save(found.values, Path(folder, f"{mode} {rank}.pt"))
        text = str(operator.products)
    except (KeyboardInterrupt, RuntimeError, ValueError) as error:
        text = str(error)
    Path(folder, f"{mode} {rank}.txt").write_text(text)


# --- what goes wrong ------------------------------------------------------------------------------


def other_models(rank: int) -> None:
    model, _, loss, data = case("gpt")
    if rank:
        model.blocks = model.blocks[:1]
    ca.Problem(spread(model, model.blocks), loss, data, shard=True)


def other_lengths(rank: int) -> None:
    model, blocks, loss, (tokens, targets) = case("gpt")
    data = (tokens[:, : 6 - rank], targets[:, : 6 - rank])
    ca.Problem(spread(model, blocks), loss, data, shard=True)


def no_memory(rank: int) -> None:
    """Rank 1 runs out of memory in the second block."""
    model, blocks, loss, data = case("gpt")
    problem = ca.Problem(spread(model, blocks), loss, data, shard=True)
    operator = ca.Hessian(problem)
    right = columns(problem.size)[:, 0]
    operator @ right
    if rank == 1:
        chain = linearised(operator)._kept[0]

        def full(*args: Any, **options: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")

        chain.blocks[1].push_checked = full  # type: ignore[method-assign]
    operator @ right


def other_counts(rank: int) -> None:
    model, blocks, loss, data = case("gpt")
    problem = ca.Problem(spread(model, blocks), loss, data, shard=True)
    ca.Hessian(problem) @ columns(problem.size)[:, : rank + 1]


def not_a_number(rank: int) -> None:
    model, blocks, loss, data = case("gpt")
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")  # in rank 0's rows
    problem = ca.Problem(spread(model, blocks), loss, data, shard=True)
    ca.Hessian(problem) @ columns(problem.size)[:, 0]


def dropping(rank: int) -> None:
    model, blocks, loss, data = case("encoder")
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).p = 0.5
    problem = ca.Problem(spread(model, blocks), loss, data, shard=True)
    problem.model.train()
    ca.Hessian(problem) @ columns(problem.size)[:, 0]


class Unknown(nn.Module):
    """Nothing of it is a block that we know."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def unknown_layers(rank: int) -> None:
    """By autograd the same numbers, with a warning; ``engine="tangent"`` refuses."""
    torch.manual_seed(0)
    model = Unknown().double()
    data = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    right = columns(sum(p.numel() for p in model.parameters()))[:, 0]
    want = ca.Hessian(ca.Problem(model, "mse", data, distributed=False)) @ right
    problem = ca.Problem(spread(model, model.layers), "mse", data, shard=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = ca.Hessian(problem) @ right
    assert any("every process gathers all weights" in str(w.message) for w in caught)
    assert float((got - want).norm() / want.norm()) < 1e-12
    shards, operator = problem.shards, ca.Hessian(problem, engine="autograd")
    assert shards is not None
    own = shards.take(want)
    assert float((operator.sharded_matvec(shards.take(right), shards) - own).norm()) < 1e-10
    two = torch.stack([shards.take(right)] * 2, 1)
    assert float((operator.sharded_columns(two) - own.unsqueeze(1)).norm()) < 1e-10
    ca.Hessian(problem, engine="tangent") @ right


def product_not_finite(rank: int) -> None:
    op = Spectrum(torch.float64)
    if rank == 1:
        op._values[0] = torch.nan
    ca.trace(op)


def right_side_not_finite(rank: int) -> None:
    op = Spectrum(torch.float64)
    part = VectorSpace.of(op).take(columns(SIZE)).clone()
    if rank == 1:
        part[0] = torch.nan
    ca.solve(op, part, shard=True)


FAULTS: dict[str, Callable[[int], None]] = {
    fault.__name__: fault
    for fault in (
        other_models,
        other_lengths,
        no_memory,
        other_counts,
        not_a_number,
        dropping,
        unknown_layers,
        product_not_finite,
        right_side_not_finite,
    )
}


def faults(rank: int, world: int, port: int, folder: str, mode: str) -> None:
    join_group(rank, world, port)
    for name, fault in FAULTS.items():
        message = "no error"
        try:
            fault(rank)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        Path(folder, f"{name} {rank}.txt").write_text(message)
        dist.barrier()
    dist.destroy_process_group()


def names() -> Iterator[str]:
    """A family, and behind it in how many replicas its weights lie, where its mesh has two axes."""
    yield from ("gpt", "gpt 2", "llama 1", "gpt2", "encoder")
