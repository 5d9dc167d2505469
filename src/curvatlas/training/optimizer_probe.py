"""A closure evaluated a second time without a trace: gradients, random numbers, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Closure = Callable[[], Any]


@contextlib.contextmanager
def gradients_at(optimizer: Optimizer, closure: Closure) -> Iterator[None]:
    """Inside, ``p.grad`` holds the closure's gradient at the present weights; as before after."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None  # a closure that zeroes in place must not touch the gradients kept here
    try:
        with torch.enable_grad():
            closure()
        for p, kept in zip(parameters, before, strict=True):
            if p.grad is None and kept is not None:
                p.grad = torch.zeros_like(kept)
        yield
    finally:
        for p, kept in zip(parameters, before, strict=True):
            p.grad = kept


def repeatable(closure: Closure, model: nn.Module) -> Closure:
    """The same closure, drawing the same random numbers each time; buffers move only once."""
    generators: list[Any] = []
    buffers: list[torch.Tensor] = []

    def repeated() -> Any:
        if not generators:
            generators.append(torch.get_rng_state())
            value = closure()
            buffers.extend(b.clone() for b in model.buffers())
            return value
        with torch.random.fork_rng():
            torch.set_rng_state(generators[0])
            value = closure()
        with torch.no_grad():
            for buffer, kept in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        return value

    return repeated
