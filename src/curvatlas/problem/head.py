"""The last linear layer of a model with a large vocabulary, and the model without it.

Only a layer whose result *is* what the model returns (the same tensor, nothing after it) and that
runs once is taken for the head: then hidden states and the head's weights determine the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.budget import parse_bytes
from curvatlas.problem.chunked import HiddenLogits

_CHUNKS = 2**26  # bytes for the buffers of a chunk, unless the budget is tight
_SHARE = 16  # of a budget, at most one part in so many goes to chunks of logits


@dataclass(frozen=True)
class Head:
    """A linear layer with its parameters' names (None: no bias)."""

    module: nn.Linear
    weight: str
    bias: str | None


def logit_room(budget: int | str | None) -> int:
    """Bytes for parts of the logits under a memory budget."""
    return _CHUNKS if budget is None else max(min(_CHUNKS, parse_bytes(budget) // _SHARE), 1)


def largest_logits(model: nn.Module, targets: Any, itemsize: int) -> int:
    """The most bytes the logits of these targets can take: widest linear layer × targets."""
    if not isinstance(targets, Tensor):
        return 0
    widest = max((m.out_features for m in model.modules() if isinstance(m, nn.Linear)), default=0)
    return int(targets.numel()) * widest * itemsize


class HeadSearch:
    """A model's head, looked for once, when logits are large."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looked = False
        self._found: Head | None = None

    def beyond(
        self,
        size: int,
        targets: Any,
        named: Mapping[str, Tensor],
        small_call: Callable[[], Callable[[], Any]],
    ) -> Head | None:
        """The head if its logits of these targets take more than ``size`` bytes.

        named: the model's parameters;  small_call: prepares a call of the model on one sample.
        """
        itemsize = next(iter(named.values())).dtype.itemsize
        if largest_logits(self._model, targets, itemsize) <= size:
            return None
        if not self._looked:
            with torch.no_grad():
                self._found = find_head(self._model, named, small_call())
            self._looked = True
        found = self._found
        if found is None or targets.numel() * found.module.out_features * itemsize <= size:
            return None
        return found


def factored_logits(
    head: Head, hidden: Tensor, named: Mapping[str, Tensor], leaves: Mapping[str, Tensor], room: int
) -> HiddenLogits:
    """Logits as hidden states and the head's weights; those not in ``leaves`` stay fixed."""

    def value(name: str) -> Tensor:
        return leaves[name] if name in leaves else named[name].detach()

    bias = None if head.bias is None else value(head.bias)
    return HiddenLogits(hidden, value(head.weight), bias, room)


def find_head(model: nn.Module, named: Mapping[str, Tensor], run: Callable[[], Any]) -> Head | None:
    """The linear layer whose result ``run`` returns untouched, or None."""
    seen: dict[nn.Module, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda module, _inputs, result: seen.setdefault(module, []).append(result)
        )
        for module in model.modules()
        if plain_linear(module)
    ]
    try:
        returned = run()
    finally:
        for handle in handles:
            handle.remove()
    for module, results in seen.items():
        if len(results) == 1 and results[0] is returned and isinstance(module, nn.Linear):
            weight = _name_of(module.weight, named)
            bias = None if module.bias is None else _name_of(module.bias, named)
            if weight is None or (module.bias is not None and bias is None):
                return None
            return Head(module, weight, bias)
    return None


def _name_of(parameter: Tensor, named: Mapping[str, Tensor]) -> str | None:
    return next((name for name, p in named.items() if p is parameter), None)


@contextlib.contextmanager
def without(head: Head) -> Iterator[None]:
    """Inside, the head passes its input through: the model returns hidden states."""
    module: Any = head.module
    own = module.__dict__.get("forward")
    module.forward = _pass_through
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _pass_through(hidden: Tensor) -> Tensor:
    return hidden


def plain_linear(module: nn.Module) -> bool:
    """Whether the layer's product is the usual one: no hooks, no overridden forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and not hooked
    )
