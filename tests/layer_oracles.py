"""Layers as their own model calls them, and how far their blocks are from double backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.engines.tangent.adapters import effective_parameters
from curvatlas.engines.tangent.block import LinearisedBlock
from curvatlas.engines.tangent.reading import BlockCall, flat_numbers, read_call, read_module
from curvatlas.problem.evaluation import evaluation
from oracles import flat

_CACHES = ("past_key_values", "layer_past")


@dataclass
class Seen:
    """One layer as its model called it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: BlockCall

    @property
    def x(self) -> Tensor:
        """The layer's input, in its own axes."""
        x: Tensor = (self.args or tuple(self.kwargs.values()))[0]
        return x

    def run(self, x: Tensor) -> Tensor:
        """The layer itself at another input, everything else as the model passed it."""
        kwargs = {name: value for name, value in self.kwargs.items() if name not in _CACHES}
        if self.args:
            out = self.module(x, *self.args[1:], **kwargs)
        else:
            out = self.module(**{**kwargs, next(iter(kwargs)): x})
        return out[0] if isinstance(out, tuple) else out

    def inside(self, outputs: Tensor) -> Tensor:
        """(K, *the module's axes) → (K, n, L, d)."""
        moved = outputs.transpose(1, 2) if self.call.time_major else outputs
        return moved.reshape(-1, *self.call.x.shape)

    def outside(self, tokens: Tensor) -> Tensor:
        """(K, n, L, d) → (K, *the module's axes)."""
        return torch.stack([self.call.as_module(one) for one in tokens])


def seen_layers(model: nn.Module, run: Callable[[], Any], layers: list[nn.Module]) -> list[Seen]:
    """Every layer's call in one forward pass of the model."""
    calls: list[Seen] = []
    specs = {module: read_module(module)[0] for module in layers}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = read_call(module, args, kwargs, spec=specs[module])
        calls.append(Seen(module, args, kwargs, call))

    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in layers]
    try:
        with evaluation(model, stay_double=True), torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


class Layer:
    """The block of a layer, with vectors in the flat order of the layer's own parameters."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.leaves = dict(seen.module.named_parameters())
        self.values = {name: leaf.detach() for name, leaf in self.leaves.items()}
        self.size = sum(leaf.numel() for leaf in self.leaves.values())
        self.effective = effective_parameters(seen.module)
        whole = {name: weight.value(self.values) for name, weight in self.effective.items()}
        spec, pick = read_module(seen.module)
        self.block: LinearisedBlock = seen.call.linearise(spec, pick(whole))
        self.numbers = flat_numbers(whole)
        self.picked = pick(self.numbers)
        covered = torch.cat([part.reshape(-1) for part in self.picked.values()])
        self.width = sum(value.numel() for value in whole.values())
        assert sorted(covered.tolist()) == list(range(self.width)), "every weight, once"
        self.deltas: dict[str, Tensor] = {}

    def record(self, delta: Tensor) -> None:
        """The adjoint δ_Z (n, L, d)."""
        gradients, _ = self.block.gradient(delta)
        self.deltas = {n: v[0] for n, v in self._whole(gradients, 1).items()}

    def product(
        self,
        dots: Mapping[str, Tensor],
        x_dot: Tensor | None,
        curvature: Tensor,
        part: str,
        wanted: Sequence[str],
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Rows of the wanted parameters (K, *shape), and of the input (K, n, L, d)."""
        moved = {n: w.tangent(self.values, dots) for n, w in self.effective.items()}
        count = len(next(iter(dots.values())) if dots else x_dot)  # type: ignore[arg-type]
        vector = torch.zeros(count, self.width, dtype=torch.float64)
        for name, tangent in moved.items():
            if tangent is not None:
                vector[:, self.numbers[name].reshape(-1)] = tangent.reshape(count, -1)
        there = {n for n, t in moved.items() if t is not None}
        tangents = {n: vector[:, p] for n, p in self.picked.items() if self.touched[n] & there}
        rows = {n for n, w in self.effective.items() if not set(wanted).isdisjoint(w.parameters)}
        rates, rate_x = self.block.hvp(
            tangents,
            x_dot,
            curvature=lambda m: m * curvature,
            part=part,  # type: ignore[arg-type]
            wanted=[n for n in self.picked if self.touched[n] & rows],
        )
        assert rate_x is not None
        found: dict[str, Tensor] = {}
        for name, rate in self._whole(rates, count).items():
            delta = None if part == "outer" else self.deltas[name]
            some = self.effective[name].rates(self.values, rate, delta=delta, dots=dots)
            found |= {n: value for n, value in some.items() if n in wanted}
        return found, rate_x

    @functools.cached_property
    def touched(self) -> dict[str, set[str]]:
        """Our weights → the effective weights that they are entries of."""
        owner = torch.zeros(self.width, dtype=torch.long)
        names = list(self.numbers)
        for i, name in enumerate(names):
            owner[self.numbers[name].flatten()] = i
        return {
            n: {names[i] for i in owner[p.flatten()].unique().tolist()}
            for n, p in self.picked.items()
        }

    def _whole(self, parts: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Our weights' rates as those of the effective weights (K, *shape)."""
        vector = torch.zeros(count, self.width, dtype=torch.float64)
        for name, part in parts.items():
            vector[:, self.picked[name].reshape(-1)] = part.reshape(count, -1)
        return {n: vector[:, p] for n, p in self.numbers.items()}


def differences(
    seen: Seen,
    *,
    columns: Sequence[int] = (1, 3),
    moving: Sequence[str] | None = None,
    wanted: Sequence[str] | None = None,
) -> dict[str, float]:
    """Largest relative differences: of the output, and of total, outer and functional products.

    The loss is Σ c sin(z): δ = c cos(z) and Λ = −c sin(z) differ from entry to entry. ``moving``
    and ``wanted`` are the parameters of the columns and rows that are compared, all by default.
    """
    here = Layer(seen)
    x = seen.x.detach().clone().requires_grad_(True)
    leaves = [*here.leaves.values(), x]
    with evaluation(seen.module, stay_double=True):
        z = seen.run(x)
        c = torch.linspace(0.5, 1.5, z.numel(), dtype=z.dtype).view(z.shape)
        options = {"create_graph": True, "allow_unused": True}
        first = flat(torch.autograd.grad((c * z.sin()).sum(), leaves, **options), leaves)
        seed = torch.zeros_like(z, requires_grad=True)
        pulled = flat(torch.autograd.grad(z, leaves, seed, **options), leaves)
    image = z.detach()
    found = {"output": _relative(seen.call.as_module(here.block.output) - image, image)}
    here.record(seen.inside((c * image.cos())[None])[0])
    curvature = seen.inside((-c * image.sin())[None])
    rows = list(here.leaves) if wanted is None else list(wanted)
    columns_of = list(here.leaves) if moving is None else list(moving)
    for count in columns:
        dots = {
            name: torch.randn(count, *leaf.shape, dtype=torch.float64)
            for name, leaf in here.leaves.items()
            if name in columns_of
        }
        x_dot = torch.randn(count, *x.shape, dtype=torch.float64) if moving is None else None
        expected = _oracle(seen, leaves, first, pulled, seed, z, _rows(here, dots, x_dot, count))
        scale = float(torch.linalg.norm(expected["total"]))
        assert scale > 0 or moving is not None
        # The products of some parameters are zero, or rounding: a key's bias moves nothing.
        slope = float(torch.linalg.norm(first.detach()))
        scale = scale if scale > 1e-12 * slope else slope
        for part, want in expected.items():
            inner = None if x_dot is None else seen.inside(x_dot)
            rates, rate_x = here.product(dots, inner, curvature, part, rows)
            got = _rows(here, rates, seen.outside(rate_x), count)
            kept = _rows(here, dict.fromkeys(rows), x.new_ones(count, *x.shape), count)
            error = float(torch.linalg.norm((got - want) * kept)) / scale
            found[part] = max(found.get(part, 0.0), error)
    return found


def _oracle(
    seen: Seen,
    leaves: list[Tensor],
    first: Tensor,
    pulled: Tensor,
    seed: Tensor,
    z: Tensor,
    directions: Tensor,
) -> dict[str, Tensor]:
    """Rows of the three parts by double backward, (K, P + n L d) each."""
    options = {"retain_graph": True, "allow_unused": True}
    c = torch.linspace(0.5, 1.5, z.numel(), dtype=z.dtype).view(z.shape)
    total, outer = [], []
    for row in directions:
        total.append(flat(torch.autograd.grad(first @ row, leaves, **options), leaves))
        (moved,) = torch.autograd.grad(pulled @ row, seed, retain_graph=True)
        rate = -c * z.detach().sin() * moved
        outer.append(flat(torch.autograd.grad(z, leaves, rate, **options), leaves))
    parts = {"total": torch.stack(total), "outer": torch.stack(outer)}
    return parts | {"functional": parts["total"] - parts["outer"]}


def _rows(here: Layer, parts: Mapping[str, Tensor | None], x: Tensor | None, count: int) -> Tensor:
    """Parts by name in the flat order of the layer's parameters and its input; None: all ones."""
    pieces = []
    for name, leaf in here.leaves.items():
        part = parts.get(name, leaf.new_zeros(count, *leaf.shape))
        part = leaf.new_ones(count, *leaf.shape) if part is None else part
        pieces.append(part.detach().reshape(count, -1))
    width = here.seen.x.numel()
    pieces.append(torch.zeros(count, width) if x is None else x.reshape(count, -1))
    return torch.cat([piece.double() for piece in pieces], 1)


def _relative(difference: Tensor, scale: Tensor) -> float:
    return float(difference.abs().max()) / float(scale.abs().max())


def prepared(model: nn.Module) -> nn.Module:
    """Float64, eval, no weight at its special initial value (biases 0, gains 1)."""
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def layers_of_kind(model: nn.Module, *names: str) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in names]
