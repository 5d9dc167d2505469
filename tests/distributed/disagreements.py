"""What two ranks do that hold, see or ask for something else; started by torch.multiprocessing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.analysis.atlas.layerwise import outer_role_traces
from curvatlas.analysis.landscape.taylor import Descent
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.operators.per_sample import (
    count_samples,
    exact_outer_diagonal,
    pieces,
    sampled_gradients,
    subset,
)
from curvatlas.problem import problem as problem_module
from curvatlas.spectra import eigenpairs as eigenpairs_module
from distributed.workers import join_group, model_and_data

SAMPLES, INPUTS, OUTPUTS = 6, 3, 4


class Classifier(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(layers))
        self.head = nn.Linear(INPUTS, OUTPUTS)
        self.register_buffer("scale", torch.ones(INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        out: Tensor = self.head(x)
        return out


def classifier(layers: int = 1) -> Classifier:
    torch.manual_seed(0)
    return Classifier(layers).double().eval()


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, INPUTS, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(0, OUTPUTS, (SAMPLES,), generator=draw)


def loader(seed: int) -> Any:
    """Batches of two, in an order of its own in every pass."""
    draw = torch.Generator().manual_seed(seed)
    dataset = torch.utils.data.TensorDataset(*data())
    return torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True, generator=draw)


class ShuffledLater:
    """The same batches everywhere in the first pass, then in an order of this rank's."""

    def __init__(self, rank: int) -> None:
        self.rank, self.passes = rank, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = list(range(SAMPLES))
        self.passes += 1
        if self.passes > 1:
            order = order[self.rank :] + order[: self.rank]
        inputs, targets = data()
        return iter([(inputs[i : i + 1], targets[i : i + 1]) for i in order])


def every_case(rank: int, world: int, port: int, folder: str) -> None:
    """Go through all cases; store what this rank was told in each of them."""
    join_group(rank, world, port)
    told: dict[str, str] = {}

    def case(name: str, action: Callable[[], object]) -> None:
        try:
            action()
            told[name] = ""
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            told[name] = str(error)

    of_problems(rank, case)
    of_streams(rank, case)
    of_products(rank, case)
    of_estimators(rank, case, Path(folder))
    of_memory(rank, case)
    of_analyses(rank, case)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


Case = Callable[[str, Callable[[], object]], None]


def of_problems(rank: int, case: Case) -> None:
    """What is compared when a Problem is made."""

    def problem(loss: Any = "cross_entropy", model: Any = None, **options: Any) -> ca.Problem:
        return ca.Problem(model or classifier(), loss, data(), **{"shard": True, **options})

    case("the same everywhere", problem)
    model = classifier()
    if rank == 1:
        with torch.no_grad():
            model.head.weight[0, :2] *= -1
    case("two signs of one weight", lambda: problem(model=model))
    case("own data without shard", lambda: ca.Problem(
        classifier(), "cross_entropy", [t[rank::2] for t in data()]))  # fmt: skip
    buffered = classifier()
    buffered.scale[0] += rank
    case("a buffer", lambda: problem(model=buffered))
    case("label smoothing", lambda: problem(nn.CrossEntropyLoss(label_smoothing=0.1 * rank)))
    weights = torch.ones(OUTPUTS, dtype=torch.float64)
    weights[0] += rank
    case("class weights", lambda: problem(nn.CrossEntropyLoss(weight=weights)))
    factor, device, here = 1.0 + rank, f"cuda:{rank}", rank

    def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
        return factor * F.cross_entropy(outputs, targets)

    def placed(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0 * len(device) * here

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) ** 2

    case("a number in a closure", lambda: problem(scaled))
    case("ranks and devices in a closure", lambda: problem(placed))
    case("another function", lambda: problem([placed, squared][rank]))
    case("parameters that vary", lambda: problem(parameters=["head.*", "head.weight"][rank]))
    precise = classifier()
    case("dtype", lambda: ca.Problem(
        precise.float() if rank else precise, "cross_entropy",
        [t.float() if rank and t.is_floating_point() else t for t in data()]))  # fmt: skip
    case("number of layers", lambda: problem(model=classifier(layers=1 + rank)))
    case("shard on one rank", lambda: problem(shard=rank == 0))
    broken = data()
    if rank == 1:
        broken[0][0, 0] = float("nan")
    case("no data on one rank", lambda: ca.Problem(
        classifier(), "cross_entropy", None if rank else data()))  # fmt: skip
    case("an unknown parameter on one rank", lambda: problem(parameters=["*", "nothing"][rank]))
    case("an unknown loss on one rank", lambda: problem(["cross_entropy", "nothing"][rank]))
    case("NaN in the data of one rank", lambda: ca.Problem(classifier(), "cross_entropy", broken))


def of_streams(rank: int, case: Case) -> None:
    """What is compared of shared data, held or read again in every pass."""

    def problem(batches: Any) -> ca.Problem:
        return ca.Problem(classifier(), "cross_entropy", batches, shard=True)

    case("a shuffling loader", lambda: problem(loader(seed=rank)))
    case("a loader shuffled alike", lambda: problem(loader(seed=0)).gradient())
    inputs, targets = data()
    case("one batch less", lambda: problem(
        [(inputs[i : i + 1], targets[i : i + 1]) for i in range(SAMPLES - rank)]))  # fmt: skip
    held, problem_module.HOLD_BYTES = problem_module.HOLD_BYTES, 0
    case("a stream shuffled later", lambda: problem(ShuffledLater(rank)).gradient())
    problem_module.HOLD_BYTES = held


def of_products(rank: int, case: Case) -> None:
    """What is compared in every sum."""
    model = classifier()
    problem = ca.Problem(model, "cross_entropy", data(), shard=True)
    operator = ca.Hessian(problem)
    vector = torch.ones(problem.size, dtype=torch.float64)
    before = operator @ vector
    with torch.no_grad():
        model.head.weight[0, 0] += rank
    case("weights changed later", lambda: operator @ vector)
    case("a gradient at other weights", problem.gradient)

    def changed_back() -> None:
        with torch.no_grad():
            model.head.weight[0, 0] -= rank
        assert torch.equal(operator @ vector, before)

    def changed_alike() -> None:
        with torch.no_grad():
            model.head.weight[0, 0] += 1
        assert not torch.equal(operator @ vector, before)

    case("weights changed back", changed_back)
    case("weights changed alike", changed_alike)
    case("another vector", lambda: operator @ torch.randn(
        problem.size, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    ))  # fmt: skip
    ones = torch.ones(problem.size, 4, dtype=torch.float64)
    case("a column more", lambda: operator @ ones[:, : 1 + rank])
    case("a column less", lambda: operator @ ones[:, : 3 - rank])
    case("no columns", lambda: operator @ ones[:, : 1 - rank])
    case("a column more of a view", lambda: operator["head.*"] @ ones[:16, : 2 + rank])
    case(
        "a column more of two parts",
        lambda: CurvatureParts(problem).flat_parts(ones[:, : 1 + rank]),
    )

    def of_many() -> None:
        columns = torch.randn(
            problem.size, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        alone = torch.stack([operator @ column for column in columns.T], 1)
        assert torch.allclose(operator @ columns, alone, rtol=1e-12, atol=1e-12)

    case("as many columns", of_many)
    unit = torch.zeros(problem.size, dtype=torch.float64)
    unit[rank] = 1.0
    case("another unit vector", lambda: operator @ unit)


def of_estimators(rank: int, case: Case, folder: Path) -> None:
    """What is compared before an estimate begins."""
    problem = ca.Problem(classifier(2), "cross_entropy", data(), shard=True)
    op, outer = ca.Hessian(problem), ca.GaussNewton(problem)
    vector = torch.ones(problem.size, dtype=torch.float64)
    vector[0] += rank
    case("k", lambda: ca.eigenpairs(op, k=2 + rank))
    case("k below one", lambda: ca.eigenpairs(op, k=2 * (1 - rank)))
    case("seed", lambda: ca.trace(op, seed=rank))
    case("seed of a sum of operators", lambda: ca.trace(2 * op + outer, seed=rank))
    case("tolerance", lambda: ca.frobenius_norm(op, rtol=0.1 + 0.1 * rank))
    case("start vector", lambda: ca.eigenpairs(op, start=vector))
    case("right-hand side", lambda: ca.solve(op, vector, damping=1.0))
    file = folder / "state"
    case("a checkpoint on one rank", lambda: ca.spectral_density(
        op, max_products=20, checkpoint=file if rank else None))  # fmt: skip
    (folder / "other").symlink_to(folder) if rank else None
    case("paths of one checkpoint", lambda: ca.spectral_density(
        op, max_products=20, checkpoint=(folder / "other" if rank else folder) / "state"
    ))  # fmt: skip
    case("estimator", lambda: ca.diagonal(op) if rank else ca.trace(op))
    case("operator", lambda: ca.trace(outer if rank else op))
    case("a step's gradient", lambda: ca.newton_step(op, vector, radius=0.1))


def of_memory(rank: int, case: Case) -> None:
    """Ranks with room for another number of vectors restart together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    pairs = (data()[0], data()[0].square().sum(1, keepdim=True))
    problem = ca.Problem(model, "mse", pairs, shard=True)
    assert problem.size == 81  # odd: uneven shards
    op, plain = ca.Hessian(problem), eigenpairs_module.default_budget
    row = problem.size * 8
    eigenpairs_module.default_budget = lambda device=None: (10 + 3 * rank) * row  # type: ignore[assignment]
    options: dict[str, Any] = {"k": 2, "tol": 1e-6, "data_error": False}
    results: list[Any] = []
    case("room of another size", lambda: results.append(ca.eigenpairs(op, **options)))
    case(
        "room of another size, sharded",
        lambda: results.append(ca.eigenpairs(op, shard=True, **options)),
    )
    eigenpairs_module.default_budget = plain
    half = (problem.size + 1) // 2 * 8
    case(
        "memory for a row of the shorter shard only",
        lambda: ca.eigenpairs(op, shard=True, memory=13 * half - 8, **options),
    )
    case(
        "memory for uneven shards",
        lambda: results.append(ca.eigenpairs(op, shard=True, memory=20 * half - 8, **options)),
    )

    def equal() -> None:
        alone = ca.Hessian(ca.Problem(model, "mse", pairs, distributed=False))
        want = torch.linalg.eigvalsh(alone.dense()).flip(0)[:2]
        assert len(results) == 3
        for found in results:
            assert found.converged
            assert torch.allclose(found.values, want, rtol=1e-5)

    case("eigenvalues of uneven rooms", equal)


def of_analyses(rank: int, case: Case) -> None:
    """What one process cannot know is refused; alone, each of them runs."""
    model, (tokens, targets) = model_and_data()
    own = (tokens[rank::2], targets[rank::2])
    problem = ca.Problem(model, "cross_entropy", own)
    analyzer = ca.TransformerHessianAnalyzer(model)
    refused: dict[str, Callable[[], object]] = {
        "layer-wise curvature": lambda: analyzer.analyze_layer_wise_curvature(*own),
        "full Hessian": lambda: analyzer.analyze_full_hessian([own]),
        "attention curvature": lambda: ca.analyze_attention_curvature(model, own),
        "trajectory": lambda: ca.ConvergenceDiagnostics(model).analyze_convergence_trajectory(
            own, n_steps=2
        ),
        "descent": lambda: Descent(problem),
        "role traces": lambda: outer_role_traces(problem, probes=1),
        "number of samples": lambda: count_samples(problem),
        "pieces": lambda: list(pieces(problem, 1)),
        "subset": lambda: subset(problem, torch.arange(2)),
        "landscape": lambda: ca.landscape_convergence(problem),
        "sampled gradients": lambda: sampled_gradients(problem, samples=2),
        "closed form": lambda: ca.atlas(problem, method="closed form"),
    }
    for name, action in refused.items():
        case(name, action)

    def no_outer_diagonal() -> None:
        assert exact_outer_diagonal(problem) is None

    case("outer diagonal", no_outer_diagonal)
    case(
        "layer-wise curvature of this process's data",
        lambda: ca.TransformerHessianAnalyzer(
            model, distributed=False
        ).analyze_layer_wise_curvature(*own, rtol=0.5),
    )
    case("module-wise curvature", lambda: ca.module_wise_curvature(model, *own, probes=2))
