"""Random combinations of model, loss, reduction, batching, budget and operator against an oracle.

    python scripts/sweep.py --cases 500          # products against float64 double backward
    python scripts/sweep.py --labels --cases 200 # the loss of labelled batches against the model's
    python scripts/sweep.py --layers --cases 550 # hand-written layers of every family
    python scripts/sweep.py --models --cases 330 # whole models by every engine

Every case ends as equal, refused (an error that says what to do), warned (another number, said),
WRONG or CRASHED; the last two are printed with what makes them again, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import curvatlas as ca
import oracles
from curvatlas.errors import DifferentiationError, ProblemError

CLASSES = 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}


@dataclass(frozen=True)
class Family:
    """A model, its inputs for n samples, and where samples and classes lie."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    batch_axis: int = 0
    classes_first: bool = False
    places: tuple[int, ...] = ()  # axes of the outputs between samples and classes
    interacts: bool = False  # samples of a batch see each other


class TimeMajor(nn.Module):
    """(L, B, 6) → (B, classes) through torch's encoder layer with its default axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(0))


class Tokens(nn.Module):
    """(B, L, 6) → (B, L, classes)."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            6, 2, 8, dropout=0.0, norm_first=norm_first, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class BatchStatistics(nn.Module):
    """Every sample sees the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden - hidden.mean(0))


def _perceptron(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), norm(8), nn.GELU(), nn.Linear(8, CLASSES))


def _segmentation() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, CLASSES, 1)
    )


def _batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    return model


def _numbers(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, source: torch.randn(n, *shape, generator=source, dtype=torch.float64)


def _time_major(length: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, source: torch.randn(length, n, 6, generator=source, dtype=torch.float64)


FAMILIES: dict[str, Family] = {
    "LayerNorm perceptron": Family(lambda: _perceptron(nn.LayerNorm), _numbers(6)),
    "RMSNorm perceptron": Family(lambda: _perceptron(nn.RMSNorm), _numbers(6)),
    "BatchNorm in evaluation": Family(_batch_norm, _numbers(6)),
    "batch statistics": Family(BatchStatistics, _numbers(6), interacts=True),
    "recurrent": Family(Recurrent, _numbers(3, 6)),
    "tokens, pre-norm": Family(lambda: Tokens(True), _numbers(3, 6), places=(3,)),
    "tokens, post-norm": Family(lambda: Tokens(False), _numbers(5, 6), places=(5,)),
    "as many tokens as classes": Family(
        lambda: Tokens(True), _numbers(CLASSES, 6), places=(CLASSES,)
    ),
    "time-major encoder": Family(TimeMajor, _time_major(5), batch_axis=1),
    "time-major, as long as wide": Family(TimeMajor, _time_major(6), batch_axis=1),
    "segmentation": Family(_segmentation, _numbers(2, 3, 3), classes_first=True, places=(3, 3)),
    "segmentation, as wide as classes": Family(
        _segmentation, _numbers(2, CLASSES, CLASSES), classes_first=True, places=(CLASSES, CLASSES)
    ),
}


# --- losses -------------------------------------------------------------------------------------


def _loss(draw: random.Random, family: Family) -> tuple[str, Any, str]:
    """A name, what is passed to the Problem, and the kind of its targets."""
    weight = torch.tensor([draw.uniform(0.2, 2.0) for _ in range(CLASSES)], dtype=torch.float64)
    reduction = draw.choice(["mean", "sum"])
    kind = draw.choice(["cross_entropy", "CrossEntropyLoss", "soft", "mse", "bce", "other", "call"])
    if kind == "cross_entropy":
        return kind, "cross_entropy", "classes"
    if kind in ("CrossEntropyLoss", "soft"):
        options: dict[str, Any] = {
            "weight": draw.choice([None, weight]),
            "label_smoothing": draw.choice([0.0, 0.1]),
            "reduction": reduction,
        }
        if kind != "soft":
            options["ignore_index"] = draw.choice([-100, 1, CLASSES])
        targets = "probabilities" if kind == "soft" else "classes"
        return f"{kind}({options})", nn.CrossEntropyLoss(**options), targets
    if kind == "mse":
        loss = draw.choice(["mse", nn.MSELoss(reduction=reduction)])
        return f"mse {loss}", loss, "numbers"
    if kind == "bce":
        shape = weight if not family.places else None
        options = {"reduction": reduction, "pos_weight": draw.choice([None, shape])}
        return f"bce({options})", nn.BCEWithLogitsLoss(**options), "probabilities"
    if kind == "other":
        made = draw.choice([nn.HuberLoss, nn.SmoothL1Loss, nn.PoissonNLLLoss, nn.SoftMarginLoss])
        return f"{made.__name__} {reduction}", made(reduction=reduction), "numbers"

    def fourth_power(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(4).mean()

    return "callable", fourth_power, "numbers"


def _targets(kind: str, family: Family, n: int, loss: Any, source: torch.Generator) -> Tensor:
    if kind == "classes":
        classes = torch.randint(0, CLASSES, (n, *family.places), generator=source)
        ignored = getattr(loss, "ignore_index", -100)
        hidden = torch.rand(classes.shape, generator=source) < 0.2
        hidden.view(-1)[0] = False
        return torch.where(hidden, ignored, classes)
    shape = (n, CLASSES, *family.places) if family.classes_first else (n, *family.places, CLASSES)
    if kind == "numbers":
        return torch.randn(shape, generator=source, dtype=torch.float64)
    axis = 1 if family.classes_first else -1
    return torch.rand(shape, generator=source, dtype=torch.float64).softmax(axis)


def _written_out(loss: Any, family: Family) -> Callable[[Tensor, Tensor], Tensor]:
    """The same loss as plain calls of torch, with the layout that torch or the name implies."""
    if loss == "mse":
        return lambda z, y: (z - y).pow(2).mean()
    if loss == "cross_entropy":
        return lambda z, y: F.cross_entropy(z.reshape(-1, CLASSES), y.reshape(-1))
    function = loss
    if isinstance(loss, nn.CrossEntropyLoss) and not family.classes_first and family.places:
        # Torch refuses classes on the last axis unless the shapes fit by chance: then it wins.
        return lambda z, y: loss(z, y) if _torch_reads(z, y) else loss(z.movedim(-1, 1), y)
    return lambda z, y: function(z, y)


def _torch_reads(z: Tensor, y: Tensor) -> bool:
    places = z.shape if y.is_floating_point() else (z.shape[0], *z.shape[2:])
    return tuple(places) == tuple(y.shape)


# --- one case of products -----------------------------------------------------------------------


def _partition(draw: random.Random, total: int) -> list[int]:
    sizes = []
    while total:
        sizes.append(draw.randint(1, total))
        total -= sizes[-1]
    return sizes


def _oracle(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, part: str
) -> Tensor:
    """Dense H, H_o or H_f of all data in one batch, through hand-written norms."""
    plain = oracles.with_hand_written_norms(copy.deepcopy(model).double())
    parameters = list(plain.parameters())
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            outputs = plain(x)
            hessian = oracles.hessian(loss(outputs, y), parameters)
            if part == "total":
                return hessian
            outer = oracles.outer_hessian(outputs, lambda z: loss(z, y), parameters)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return outer if part == "outer" else hessian - outer


def _applied(
    draw: random.Random, problem: ca.Problem, part: str, budget: int | None, truth: Tensor
) -> tuple[str, Tensor, Tensor]:
    """How the operator was used, its numbers, and the oracle's."""
    kinds: dict[str, Any] = {
        "total": ca.Hessian,
        "outer": ca.GaussNewton,
        "functional": ca.FunctionalHessian,
    }
    use = draw.choice(["vector", "columns", "block", "dense", "parts", "trace of samples"])
    kind = kinds[part]
    source = torch.Generator().manual_seed(draw.randint(0, 10**6))
    if use == "parts":
        from curvatlas.operators.curvature import CurvatureParts

        vector = torch.randn(problem.size, 2, generator=source, dtype=torch.float64)
        operator = CurvatureParts(problem, budget=budget)
        ours = operator.flat_parts(vector.to(problem.dtype))[part]
        return use, ours, truth @ vector
    operator = kind(problem, budget=budget)
    if use == "dense":
        return use, operator.dense(), truth
    if use == "block":
        names = draw.sample(list(problem.parameter_names), 2)
        rows, columns = (_places(problem, name) for name in names)
        return f"block {names}", operator[names[0], names[1]].dense(), truth[rows][:, columns]
    if use == "trace of samples" and part == "outer":
        estimate = ca.trace(operator, rtol=1e-6)
        if estimate.exact:  # an estimate has nothing to be equal to: then a product is compared
            return "exact trace", torch.tensor(estimate.value, dtype=torch.float64), truth.trace()
    shape = (problem.size, 3) if use == "columns" else (problem.size,)
    vector = torch.randn(shape, generator=source, dtype=torch.float64)
    return use, operator @ vector.to(problem.dtype), truth @ vector


def _places(problem: ca.Problem, name: str) -> Tensor:
    place = problem.layout.names.index(name)
    start = problem.layout.starts[place]
    return torch.arange(start, start + problem.layout.sizes[place])


def products_case(seed: int) -> tuple[str, str]:
    """(verdict, what was tried) of one random combination."""
    draw = random.Random(seed)
    source = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    name = draw.choice(list(FAMILIES))
    family = FAMILIES[name]
    dtype = draw.choice([torch.float64, torch.float64, torch.float64, torch.float32])
    model = family.make().double().eval()
    n = draw.choice([2, 3, 5, 6])
    label, loss, kind = _loss(draw, family)
    if family.classes_first and loss == "cross_entropy":
        label, loss = "CrossEntropyLoss()", nn.CrossEntropyLoss()
    x = family.inputs(n, source)
    y = _targets(kind, family, n, loss, source)
    sizes = [n] if family.interacts else _partition(draw, n)
    part = draw.choice(["total", "outer", "functional"])
    budget = draw.choice([None, None, 1, 20_000, 200_000])
    axis = draw.choice([None, family.batch_axis])
    tried = f"{name} | {label} | {sizes} | {part} | budget {budget} | {dtype} | axis {axis}"
    try:
        truth = _oracle(model, _written_out(loss, family), x, y, part)
    except RuntimeError:
        truth = None  # torch itself has no reading of these shapes
    model = model.to(dtype)
    x = x.to(dtype)
    y = y.to(dtype) if y.is_floating_point() else y
    batches = list(zip(x.split(sizes, family.batch_axis), y.split(sizes), strict=True))
    data: Any = batches[0] if len(batches) == 1 else batches
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {} if axis is None else {"batch_axis": axis}
            problem = ca.Problem(model, loss, data, **options)
            if truth is None:
                return "WRONG", f"{tried}: {problem.value()} where torch has no value"
            use, ours, wanted = _applied(draw, problem, part, budget, truth)
    except (ProblemError, DifferentiationError) as error:
        return "refused", f"{tried}: {error}"
    except Exception as error:
        return "CRASHED", f"{tried}: {type(error).__name__}: {error}"
    scale = max(float(truth.norm()) if wanted.ndim else abs(float(wanted)), 1e-12)
    error = float((ours.double() - wanted).norm()) / scale
    verdict = "equal" if error <= TOLERANCE[dtype] else "WRONG"
    return verdict, f"{tried} | {use}: {error:.1e}"


# --- one case of labels -------------------------------------------------------------------------


def labels_case(seed: int) -> tuple[str, str]:
    """The Problem's loss of a labelled batch against the model's own, or the formula asked for."""
    from hugging_face_heads import HEADS, head

    draw = random.Random(seed)
    names = [name for name in HEADS if name != "CLIPModel"]
    name = draw.choice(names)
    model, batch = head(name)
    labels = batch.get("labels")
    if labels is not None and labels.ndim == 2 and not labels.is_floating_point():
        hidden = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
        hidden[:, 1] = False
        batch["labels"] = torch.where(hidden, -100, labels)
    if "input_ids" in batch and draw.random() < 0.5 and name != "WhisperForConditionalGeneration":
        mask = torch.ones_like(batch["input_ids"])
        mask[..., draw.randint(3, 6) :] = 0
        batch["attention_mask"] = mask
    form = draw.choice(["mapping", "BatchEncoding", "list", "two batches", "pair", "ModelOutput"])
    loss = draw.choice(["model", "formula", "module"])
    shift = None if loss == "model" else draw.choice([None, None, True, False])
    ignore = draw.choice([-100, 0])
    tried = f"{name} | {form} | {loss} | shift {shift} | ignore {ignore} | {sorted(batch)}"
    own = float(model(**batch).loss.detach())
    options: dict[str, Any] = {} if shift is None else {"shift": shift}
    wanted: Any = loss
    if loss != "model":
        wanted = ca.Problem(model, "model", batch).loss.name.removeprefix("span ")
        if wanted == "model":
            wanted = "cross_entropy"
        if wanted == "cross_entropy" and loss == "module":
            wanted = nn.CrossEntropyLoss(ignore_index=ignore)
    data, truth = _formed(form, batch, model, own)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            value = ca.Problem(model, wanted, data, **options).value()
    except (ProblemError, DifferentiationError) as error:
        return "refused", f"{tried}: {error}"
    except Exception as error:
        return "CRASHED", f"{tried}: {type(error).__name__}: {error}"
    ours = [w for w in said if "curvatlas" in str(w.filename) or "shift" in str(w.message)]
    if math.isclose(value, truth, rel_tol=1e-5, abs_tol=1e-6):
        return "equal", tried
    asked = _asked(batch, model, shift, ignore if loss == "module" else -100)
    if any(math.isclose(value, other, rel_tol=1e-5, abs_tol=1e-6) for other in asked):
        return "warned" if ours else "as asked", tried
    return ("warned" if ours else "WRONG"), f"{tried}: {value:.7g} for {truth:.7g}"


def _formed(form: str, batch: dict[str, Any], model: Any, own: float) -> tuple[Any, float]:
    """The batch in another form, and the model's own loss of it."""
    if form == "BatchEncoding":
        from transformers import BatchEncoding

        return BatchEncoding(batch), own
    if form == "ModelOutput":
        from transformers.utils import ModelOutput

        return ModelOutput(batch), own
    if form == "list":
        return [batch], own
    if form == "two batches":
        return [batch, batch], own
    main = next(iter(batch))
    if form == "pair" and set(batch) == {main, "labels"}:
        return (batch[main], batch["labels"]), own
    return batch, own


def _asked(batch: dict[str, Any], model: Any, shift: bool | None, ignore: int) -> list[float]:
    """Cross-entropies of the logits that a user may have asked for: shifted, straight."""
    labels, values = batch.get("labels"), []
    raw = model(**batch)
    logits = getattr(raw, "logits", None)
    if labels is None or logits is None or labels.is_floating_point():
        return []
    readings = {True: [True], False: [False], None: [False, True]}[shift]
    for shifted in readings:
        if shifted and labels.ndim != 2:
            continue
        z, y = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
        if tuple(z.shape[:-1]) == tuple(y.shape):
            kept = (y != ignore) & (y >= 0)
            values.append(float(F.cross_entropy(z[kept], y[kept]).detach()))
    return values


def layers_case(seed: int) -> tuple[str, str]:
    """A layer as its model calls it, read and differentiated by hand, against double backward."""
    from layer_draws import layer_case

    return _guarded(layer_case, seed)


def models_case(seed: int) -> tuple[str, str]:
    """A whole model, differentiated by hand, against double backward."""
    from layer_draws import model_case

    return _guarded(model_case, seed)


def _guarded(case: Callable[[int], tuple[str, str]], seed: int) -> tuple[str, str]:
    try:
        return case(seed)
    except Exception as error:
        return "CRASHED", f"{type(error).__name__}: {error}"


def verdicts(case: Callable[[int], tuple[str, str]], cases: int, seed: int) -> Iterator[Any]:
    for place in range(cases):
        yield place + seed, *case(place + seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--labels", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    case = labels_case if options.labels else layers_case if options.layers else products_case
    case = models_case if options.models else case
    for seed, verdict, tried in verdicts(case, options.cases, options.seed):
        counts[verdict] += 1
        if verdict.isupper() or options.verbose:
            print(f"{verdict} (--seed {seed} --cases 1): {tried}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int(bool(counts["WRONG"] or counts["CRASHED"]))


if __name__ == "__main__":
    sys.exit(main())
