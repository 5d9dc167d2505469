"""A model that is a function of its parameters: ``function(parameters, inputs) -> outputs``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from curvatlas.errors import ProblemError


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
