"""A fully connected network: the baseline Transformers are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _gelu_tanh(x: Tensor) -> Tensor:  # a named function: models must pickle
    return F.gelu(x, approximate="tanh")


# "identity" gives the linear network of the theory: its Hessian sees the data through Σ_XX alone.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": nn.Identity(),
}


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Sizes and choices; inputs of any shape are flattened to ``inputs`` numbers."""

    inputs: int = 64
    outputs: int = 10
    width: int = 48
    n_layers: int = 2  # hidden layers
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity"] = "gelu"
    bias: bool = True

    def of_size(self, parameters: int) -> MLPConfig:
        """The same network with the width whose parameter count is nearest to ``parameters``."""
        width = 1  # the count grows with the width: walk up until it passes the target
        while replace(self, width=width + 1).parameters <= parameters:
            width += 1
        below, above = replace(self, width=width), replace(self, width=width + 1)
        return min(below, above, key=lambda config: abs(config.parameters - parameters))

    @property
    def parameters(self) -> int:
        sizes = [self.inputs, *[self.width] * self.n_layers, self.outputs]
        return sum((a + self.bias) * b for a, b in pairwise(sizes))


class MLP(nn.Module):
    """Inputs (B, ...) → outputs (B, outputs), through ``n_layers`` hidden layers."""

    def __init__(self, config: MLPConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MLPConfig()
        if config.activation not in _FUNCTIONS:
            known = ", ".join(_FUNCTIONS)
            raise ValueError(f"unknown activation {config.activation!r}: choose from {known}.")
        sizes = [config.inputs, *[config.width] * config.n_layers]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=config.bias) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], config.outputs, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)  # (B, inputs)
        for layer in self.layers:
            x = _FUNCTIONS[self.config.activation](layer(x))  # (B, width)
        outputs: Tensor = self.head(x)  # (B, outputs)
        return outputs
