"""Every way of computing H·v, H_o·v and H_f·v that is compared: ours, the peers', plain PyTorch.

Each library works on its own copy of the model. A peer that is not installed is left out; a peer
that fails says so on stderr and is left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import curvatlas as ca
from harness.cases import Case
from harness.timing import Contestant

ONE_BY_ONE = "column by column"

Maker = Callable[[Case, Tensor], Iterator[Contestant]]


def contestants(case: Case, columns: Tensor) -> list[Contestant]:
    """All that can run here; columns: (P, K), of which single products take the first."""
    found: list[Contestant] = []
    for module, make in _MAKERS:
        if importlib.util.find_spec(module) is None:
            print(f"  {module} is not installed: left out", file=sys.stderr)
            continue
        for contestant in make(case.clone(), columns):
            try:
                contestant.run()
            except Exception as error:
                name, why = contestant.name, str(error).splitlines()[0] if str(error) else ""
                print(f"  {name} fails: {type(error).__name__}: {why}", file=sys.stderr)
                continue
            found.append(contestant)
    return found


def _ours(case: Case, columns: Tensor) -> Iterator[Contestant]:
    problem = ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))
    kinds = (("H", ca.Hessian), ("H_o", ca.GaussNewton), ("H_f", ca.FunctionalHessian))
    first, count = columns[:, 0].contiguous(), columns.shape[1]
    for quantity, kind in kinds:
        operator = kind(problem)
        name = f"curvatlas {kind.__name__}"
        yield Contestant(name, "curvatlas", quantity, 1, lambda op=operator: op @ first)
        yield Contestant(name, "curvatlas", quantity, count, lambda op=operator: op @ columns)
        yield Contestant(f"{name}, {ONE_BY_ONE}", "curvatlas", quantity, count,
                         lambda op=operator: _one_by_one(op, columns))  # fmt: skip


def _one_by_one(operator: ca.LinearOperator, columns: Tensor) -> Tensor:
    """The same matrix in and out as ``operator @ columns``, one product for each column."""
    return torch.stack([operator @ column for column in columns.unbind(1)], dim=1)


def _plain(case: Case, columns: Tensor) -> Iterator[Contestant]:
    parameters, count = case.parameters, columns.shape[1]
    first = case.split(columns[:, 0].contiguous())
    many = case.split_columns(columns)
    kept = torch.autograd.grad(case.value(), parameters, create_graph=True)

    def from_scratch() -> Tensor:
        slopes = torch.autograd.grad(case.value(), parameters, create_graph=True)
        return _joined(torch.autograd.grad(slopes, parameters, first))

    def on_kept_graph() -> Tensor:
        return _joined(torch.autograd.grad(kept, parameters, first, retain_graph=True))

    def batched() -> Tensor:
        options = {"retain_graph": True, "is_grads_batched": True}
        return _joined_rows(torch.autograd.grad(kept, parameters, many, **options)).T

    yield Contestant("double backward, from scratch", "torch", "H", 1, from_scratch)
    yield Contestant("double backward, kept graph", "torch", "H", 1, on_kept_graph)
    yield Contestant("double backward, kept graph, vmap", "torch", "H", count, batched)


def _functional(case: Case, columns: Tensor) -> Iterator[Contestant]:
    names = [name for name, _ in case.model.named_parameters()]
    values = {name: p.detach() for name, p in case.model.named_parameters()}

    def as_dict(tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(names, tensors, strict=True))

    def value(weights: dict[str, Tensor]) -> Tensor:
        return case.loss(functional_call(case.model, weights, (case.inputs,)))

    def product(tangent: dict[str, Tensor]) -> dict[str, Tensor]:
        return jvp(grad(value), (values,), (tangent,))[1]

    first = as_dict(case.split(columns[:, 0].contiguous()))
    many = as_dict(case.split_columns(columns))
    yield Contestant("torch.func jvp(grad)", "torch", "H", 1,
                     lambda: _joined(list(product(first).values())))  # fmt: skip
    yield Contestant("torch.func vmap(jvp(grad))", "torch", "H", columns.shape[1],
                     lambda: _joined_rows(list(vmap(product)(many).values())).T)  # fmt: skip


class FlatLogits(nn.Module):
    """Logits as (targets, classes), the shape curvlinops' losses take."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs)
        return logits.flatten(0, -2)


def _curvlinops(case: Case, columns: Tensor) -> Iterator[Contestant]:
    import curvlinops

    model, data = FlatLogits(case.model), [(case.inputs, case.targets.flatten())]
    first, count = columns[:, 0].contiguous(), columns.shape[1]
    kinds = (("H", curvlinops.HessianLinearOperator), ("H_o", curvlinops.GGNLinearOperator))
    for quantity, kind in kinds:
        operator = kind(
            model, nn.CrossEntropyLoss(), list(model.parameters()), data, check_deterministic=False
        )
        name = f"curvlinops {kind.__name__}"
        yield Contestant(name, "curvlinops", quantity, 1, lambda op=operator: op @ first)
        yield Contestant(name, "curvlinops", quantity, count, lambda op=operator: op @ columns)


def _eigenthings(case: Case, columns: Tensor) -> Iterator[Contestant]:
    from hessian_eigenthings.operators import GGNOperator, HessianOperator

    data, first = [(case.inputs, case.targets)], columns[:, 0].contiguous()
    hessian = HessianOperator(case.model, data, lambda model, batch: case.loss(model(batch[0])))
    outer = GGNOperator(
        case.model, data, lambda model, batch: model(batch[0]), lambda out, batch: case.loss(out)
    )
    library = "hessian-eigenthings"
    yield Contestant(f"{library} HVP", library, "H", 1, lambda: hessian.matvec(first))
    yield Contestant(f"{library} GGN", library, "H_o", 1, lambda: outer.matvec(first))


def _pyhessian(case: Case, columns: Tensor) -> Iterator[Contestant]:
    import warnings

    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its backward(create_graph=True) warns of a leak
        computer = hessian(
            case.model,
            lambda outputs, _: case.loss(outputs),
            data=(case.inputs, case.targets),
            cuda=False,
        )
    first = case.split(columns[:, 0].contiguous())
    yield Contestant(
        "PyHessian, one batch", "pyhessian", "H", 1,
        lambda: _joined(hessian_vector_product(computer.gradsH, computer.params, first)),
    )  # fmt: skip


_MAKERS: tuple[tuple[str, Maker], ...] = (
    ("curvatlas", _ours),
    ("torch", _plain),
    ("torch", _functional),
    ("curvlinops", _curvlinops),
    ("hessian_eigenthings", _eigenthings),
    ("pyhessian", _pyhessian),
)


def references(case: Case, columns: Tensor) -> dict[str, Tensor]:
    """H, H_o and H_f times columns in float64: reverse over reverse, one column after another."""
    exact = case.clone(torch.float64)
    parameters = exact.parameters
    outputs = exact.model(exact.inputs)
    slopes = torch.autograd.grad(
        exact.loss(outputs), parameters, create_graph=True, retain_graph=True
    )
    u = torch.zeros_like(outputs).requires_grad_(True)
    pulled = torch.autograd.grad(outputs, parameters, u, create_graph=True)
    leaf = outputs.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(exact.loss(leaf), leaf, create_graph=True)
    total, outer = [], []
    for column in columns.double().T:
        v = exact.split(column.contiguous())
        total.append(_joined(torch.autograd.grad(slopes, parameters, v, retain_graph=True)))
        (tangent,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
        (weighted,) = torch.autograd.grad(slope, leaf, tangent, retain_graph=True)
        outer.append(_joined(torch.autograd.grad(outputs, parameters, weighted, retain_graph=True)))
    H, H_o = torch.stack(total, 1), torch.stack(outer, 1)
    return {"H": H, "H_o": H_o, "H_f": H - H_o}


def _joined(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _joined_rows(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([t.flatten(1) for t in tensors], dim=1)
