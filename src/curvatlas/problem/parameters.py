"""The parameters that vary: how they are picked, where they lie, models as functions of them.

The flat vector holds the parameters in ``named_parameters()`` order, each row-major.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.anatomy import anatomy_of
from curvatlas.errors import ProblemError
from curvatlas.problem.evaluation import listed


class Layout:
    """Where each parameter lies in the flat vector of length ``size``."""

    def __init__(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> None:
        self.names = tuple(names)
        self.shapes = tuple(shapes)
        self.sizes = tuple(math.prod(shape) for shape in shapes)
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        self.starts = tuple(starts[:-1])
        self.size = starts[-1]

    def split(self, columns: Tensor) -> list[Tensor]:
        """(P, K) → one (K, *shape) tensor a parameter, a view where the strides allow it."""
        rows = columns.T if columns.ndim == 2 else columns.unsqueeze(0)  # (K, P)
        pieces = torch.split(rows, list(self.sizes), dim=1)
        return [p.reshape(-1, *s) for p, s in zip(pieces, self.shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor | None], *, like: Tensor) -> Tensor:
        """One tensor a parameter (None: zero) → (P,)."""
        pieces = [
            like.new_zeros(size) if t is None else t.reshape(-1)
            for t, size in zip(tensors, self.sizes, strict=True)
        ]
        return torch.cat(pieces)

    def flat(self, tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> Tensor:
        """One tensor a parameter, in its shape or with a last axis K more → (P,) or (P, K)."""
        by_name = self.by_name(tensors)
        columns: set[int | None] = set()
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = by_name[name]
            if not isinstance(tensor, Tensor):
                raise TypeError(f"parameter {name!r} needs a tensor, got {type(tensor).__name__}.")
            if tensor.shape == shape:
                columns.add(None)
            elif tensor.ndim and tensor.shape[:-1] == shape:
                columns.add(tensor.shape[-1])
            else:
                raise ValueError(
                    f"parameter {name!r} has the shape {tuple(shape)}, or {(*shape, 'K')} for K "
                    f"columns: got a tensor of shape {tuple(tensor.shape)}."
                )
        if len(columns) > 1:
            counts = ", ".join(sorted("none" if k is None else str(k) for k in columns))
            raise ValueError(f"the tensors have different numbers of columns ({counts}).")
        count = columns.pop()
        last = () if count is None else (count,)
        pieces = [
            by_name[name].reshape(size, *last)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(pieces)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """The inverse of ``flat``: (P,) or (P, K) → one tensor a parameter."""
        pieces = torch.split(flat, list(self.sizes))
        return [p.reshape(*s, *p.shape[1:]) for p, s in zip(pieces, self.shapes, strict=True)]

    def by_name(self, tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """One tensor a parameter, by its name; refuse others."""
        if isinstance(tensors, Mapping):
            missing = [name for name in self.names if name not in tensors]
            unknown = [str(name) for name in tensors if name not in self.names]
            if missing or unknown:
                parts = [f"missing {missing[:5]}"] * bool(missing)
                parts += [f"unknown {unknown[:5]}"] * bool(unknown)
                raise ValueError(f"one tensor for each varying parameter: {', '.join(parts)}.")
            return tensors
        if len(tensors) != len(self.names):
            raise ValueError(
                f"one tensor for each of {len(self.names)} varying parameters, got {len(tensors)}."
            )
        return dict(zip(self.names, tensors, strict=True))


# --- which parameters vary: all trainable ones, or those that names and roles pick ----------------


_One = str | re.Pattern[str] | nn.Parameter
Parameters = _One | Sequence[_One]


def choose_parameters(
    model: nn.Module, everything: Mapping[str, Tensor], wanted: Parameters | None
) -> tuple[str, ...]:
    """Names in the order of ``everything``, the model's parameters by name.

    Parameters without entries, such as those of ``nn.Linear(4, 0)``, have no place in the vector.
    """
    names = _chosen(model, everything, wanted)
    filled = tuple(name for name in names if everything[name].numel())
    if not filled:
        raise ProblemError(
            f"{listed(list(names))} have no entries: there is nothing to differentiate by."
        )
    odd = [name for name in filled if not everything[name].is_floating_point()]
    if odd:
        raise ProblemError(
            f"parameter {odd[0]!r} is {str(everything[odd[0]].dtype).removeprefix('torch.')}: "
            "derivatives are by real numbers; hold real and imaginary parts in parameters of their "
            "own and join them by torch.complex, or name the others in parameters=."
        )
    return filled


def _chosen(
    model: nn.Module, everything: Mapping[str, Tensor], wanted: Parameters | None
) -> tuple[str, ...]:
    if wanted is None:
        trainable = tuple(name for name, p in everything.items() if p.requires_grad)
        if not trainable:
            raise ProblemError(
                f"every parameter is frozen ({listed(list(everything))}): "
                "set requires_grad on some, or name them in parameters=."
            )
        return trainable
    chosen: set[str] = set()
    for item in [wanted] if isinstance(wanted, (str, re.Pattern, nn.Parameter)) else wanted:
        if isinstance(item, str):
            chosen |= set(_matching(model, everything, item))
        elif isinstance(item, re.Pattern):
            chosen |= _searched(everything, item)
        elif isinstance(item, Tensor):
            chosen |= {name for name, p in everything.items() if p is item}
        else:
            raise ProblemError(
                "parameters= takes names, globs, roles, re.compile(...) and parameters, got a "
                f"{type(item).__name__}."
            )
    if not chosen:
        raise ProblemError("parameters= selects nothing.")
    return tuple(name for name in everything if name in chosen)


def _matching(model: nn.Module, everything: Mapping[str, Tensor], pattern: str) -> list[str]:
    direct = [name for name in everything if fnmatch.fnmatchcase(name, pattern)]
    if direct:
        return direct
    slices = anatomy_of(model, list(everything)).select(pattern)
    names = list(dict.fromkeys(piece.parameter for piece in slices))
    covered = dict.fromkeys(names, 0)
    for piece in slices:
        covered[piece.parameter] += piece.size
    for name in names:
        if covered[name] != everything[name].numel():
            raise ProblemError(
                f"{pattern!r} is only a part of the fused parameter {name!r}: take the whole "
                "parameter here and the part by H[rows, columns]."
            )
    return names


def _searched(everything: Mapping[str, Tensor], pattern: re.Pattern[str]) -> set[str]:
    names = {name for name in everything if pattern.search(name)}
    if not names:
        raise ProblemError(
            f"no parameter's name contains {pattern.pattern!r}: there are "
            f"{listed(list(everything))}."
        )
    return names


class FunctionModel(nn.Module):
    """The function as a module whose parameters share the memory of the tensors given.

    A name with dots ("layers.0.weight") becomes a parameter of nested modules, so that names stay
    as they are.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        if not parameters:
            raise ProblemError("parameters={} is empty: a function needs a tensor that varies.")
        self._names = tuple(parameters)
        names: dict[int, str] = {}
        for name, tensor in parameters.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ProblemError(f"parameter {name!r} is a {kind}: give a floating tensor.")
            if id(tensor) in names:
                raise ProblemError(
                    f"parameters {names[id(tensor)]!r} and {name!r} are one tensor: give it once, "
                    "and read it twice in the function."
                )
            names[id(tensor)] = name
            self._register(name, tensor)
        self._function = function

    def _register(self, name: str, tensor: Tensor) -> None:
        *path, last = name.split(".")
        module: nn.Module = self
        try:
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(tensor.detach()))
        except (KeyError, AttributeError, TypeError) as error:
            raise ProblemError(
                f"parameter {name!r} needs another name: {error.args[0]}."
            ) from error

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """In the order in which they were given, which nesting would change."""
        for name in self._names:
            path, _, last = name.rpartition(".")
            parameter = self.get_submodule(path)._parameters[last]
            assert parameter is not None
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """function({name: tensor}, *inputs)."""
        return self._function(dict(self.named_parameters()), *inputs, **named)

    def input_signature(self) -> inspect.Signature:
        """What the function takes beside the parameters."""
        signature = inspect.signature(self._function)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __repr__(self) -> str:
        return f"FunctionModel({getattr(self._function, '__name__', repr(self._function))})"


def as_module(model: Any, parameters: Any) -> tuple[Any, Any]:
    """(module, which of its parameters vary) of a module, or of a function with its parameters."""
    if isinstance(model, nn.Module):
        if not isinstance(parameters, Mapping):
            return model, parameters
        return model, [_own(model, name, tensor) for name, tensor in parameters.items()]
    if not callable(model):
        return model, parameters  # refused where modules are unwrapped
    if not isinstance(parameters, Mapping):
        raise ProblemError(
            f"model is a function ({getattr(model, '__name__', type(model).__name__)}): give its "
            "parameters as parameters={name: tensor}; it is called as function(parameters, inputs)."
        )
    return FunctionModel(model, parameters), None


def _own(model: nn.Module, name: str, tensor: Any) -> str:
    """A parameter's name, once the tensor is seen to be the module's own."""
    mine = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if mine is None:
        raise ProblemError(f"{type(model).__name__} has no parameter {name!r}.")
    if not isinstance(tensor, Tensor) or mine.data_ptr() != tensor.data_ptr():
        raise ProblemError(
            f"parameters[{name!r}] is not the module's own tensor: load it into the module first, "
            "or pass a function(parameters, inputs) as the model."
        )
    return name
