"""Curvature of every module of any model: of its parameters, and of what it puts out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvatlas.analysis.atlas_blocks import Block
from curvatlas.analysis.atlas_sketch import Sketch
from curvatlas.analysis.propagation_free import orthonormal, probe
from curvatlas.analysis.propagation_local import pull
from curvatlas.analysis.propagation_result import Measure
from curvatlas.operators.parts import CurvatureParts
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import call
from curvatlas.progress import track
from curvatlas.results import Result

_TAIL = 2.2


@dataclass(frozen=True, kw_only=True)
class ModuleCurvature(Result):
    """∂²L/∂θ² of one module's own parameters, ∂²L/∂a² of its output a."""

    module: str  # path; "" is the model itself
    type: str
    size: int  # parameters of its own
    parameters: Measure | None  # None: it has none that vary
    parameter_spectral_interval: tuple[float, float] | None
    activation: Measure | None  # None: its output does not reach the loss
    activation_shape: tuple[int, ...] | None
    gradient_norm: float  # of the parameters: a slope, not a curvature


@dataclass(frozen=True, kw_only=True)
class ModuleWiseCurvature(Result):
    """One entry a module, in the model's order."""

    modules: tuple[ModuleCurvature, ...]
    products: int

    def __getitem__(self, module: str) -> ModuleCurvature:
        for entry in self.modules:
            if entry.module == module:
                return entry
        known = ", ".join(entry.module for entry in self.modules)
        raise KeyError(f"there is no module {module!r}; there are {known}.")

    def __str__(self) -> str:
        lines = [f"{'module':<32} {'‖H‖_F':>10} {'tr H':>10} {'‖S‖_F':>10} {'tr S':>10}"]
        for entry in self.modules:
            cells = [
                f"{number:>10.3g}"
                for measure in (entry.parameters, entry.activation)
                for number in (
                    (measure.norm, measure.trace) if measure else (float("nan"), float("nan"))
                )
            ]
            lines.append(f"{entry.module:<32} {' '.join(cells)}")
        return "\n".join(lines)


def module_wise_curvature(
    model: nn.Module,
    x: Any,
    y: Any,
    *,
    loss: str | Callable[[Any, Any], Tensor] = "cross_entropy",
    probes: int = 8,
    seed: int = 0,
    budget: int | str | None = None,
) -> ModuleWiseCurvature:
    """True second derivatives of every module, with 95 % intervals from ``probes`` products each.

    Every module with parameters of its own is one block of the Hessian; every module that puts out
    a real tensor has the Hessian of the loss with respect to it.
    """
    # One batch is looked into, which lies in this process.
    problem = Problem(model, loss, (x, y), distributed=False)
    blocks = _module_blocks(problem)
    operator = CurvatureParts(problem, budget=budget)
    sketch = Sketch(operator, blocks, seed=seed)
    sketch.probe(range(len(blocks)), probes)
    energy = sketch.energies([[j] for j in range(len(blocks))])
    low, high = energy.interval()
    spectral = energy.spectral_interval()
    values, errors = sketch.traces()
    gradient = problem.gradient()
    of_parameters: dict[str, Any] = {}
    for j, block in enumerate(blocks):
        norms = [float(np.sqrt(max(float(a[0, j, j]), 0.0))) for a in (energy.value, low, high)]
        trace, reach = float(values[0, j]), _TAIL * float(errors[0, j])
        ends = [float(np.sqrt(max(float(a[0, j, j]), 0.0))) for a in spectral]
        measure = Measure(
            norm=norms[0], norm_interval=(norms[1], norms[2]),
            trace=trace, trace_interval=(trace - reach, trace + reach),
        )  # fmt: skip
        slope = float(torch.linalg.norm(gradient[block.indices]))
        of_parameters[block.name] = (measure, (ends[0], ends[1]), slope, block.size)
    of_outputs, products = activation_curvature(problem, probes=probes, seed=seed)
    entries = []
    for path, module in problem.model.named_modules():
        known, output = of_parameters.get(path), of_outputs.get(path)
        if known is None and output is None:
            continue
        entries.append(
            ModuleCurvature(
                module=path,
                type=type(module).__name__,
                size=known[3] if known else 0,
                parameters=known[0] if known else None,
                parameter_spectral_interval=known[1] if known else None,
                activation=output[0] if output else None,
                activation_shape=output[1] if output else None,
                gradient_norm=known[2] if known else 0.0,
            )
        )
    return ModuleWiseCurvature(modules=tuple(entries), products=sketch.products + products)


def _module_blocks(problem: Problem) -> tuple[Block, ...]:
    groups: dict[str, list[Any]] = {}
    for piece in problem.anatomy.slices:
        groups.setdefault(piece.parameter.rpartition(".")[0], []).append(piece)
    return tuple(
        Block(name=path, role=path, layer=path, sublayer=path, slices=tuple(pieces))
        for path, pieces in groups.items()
    )


def activation_curvature(
    problem: Problem, *, probes: int, seed: int
) -> tuple[dict[str, tuple[Measure, tuple[int, ...]]], int]:
    """Hessian of the first batch's loss with respect to every module's (last) output.

    Returns path → (norm and trace with intervals, shape), and the products used.
    """
    caught: dict[str, Tensor] = {}
    handles = []
    for path, module in problem.model.named_modules():

        def keep(_: nn.Module, arguments: Any, result: Any, path: str = path) -> None:
            for leaf in tree_flatten(result)[0]:
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                    caught[path] = leaf
                    return

        handles.append(module.register_forward_hook(keep))
    batch = next(problem.batches())
    generator = torch.Generator(device="cpu").manual_seed(seed)
    found: dict[str, tuple[Measure, tuple[int, ...]]] = {}
    products = 0
    try:
        with problem.evaluating():
            leaves = problem.leaves()
            fixed = {n: p.detach() for n, p in problem.model.named_parameters() if n not in leaves}
            raw = call(problem.model, {**leaves, **fixed}, batch.inputs)
            value = problem.loss.value(problem.read(raw, batch), batch.targets)
            paths = list(caught)
            slopes: Any = torch.autograd.grad(
                value, [caught[p] for p in paths], create_graph=True, allow_unused=True
            )
            for path, slope in track(list(zip(paths, slopes, strict=True)), "modules"):
                tensor = caught[path]
                if slope is None:
                    continue
                basis = orthonormal(tensor.shape, probes, generator, tensor)
                images = pull(slope, [tensor], basis)[0].detach()
                products += len(basis)
                seen = probe(images.unsqueeze(-1), basis.unsqueeze(-1), 1)
                measure = Measure(
                    norm=seen.norm, norm_interval=seen.norm_interval,
                    trace=seen.trace, trace_interval=seen.trace_interval,
                )  # fmt: skip
                found[path] = (measure, tuple(tensor.shape))
    finally:
        for handle in handles:
            handle.remove()
    return found, products
