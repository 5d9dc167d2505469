"""Models and data that the command-line tests name as ``cli_models:…``."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return Tiny()


class Tied(nn.Module):
    """One matrix under two names, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x))
        return out


def make_tied_model() -> nn.Module:
    return Tied()


class OneBlock(nn.Module):
    """The smallest Transformer: one block of width 4 between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embedding(tokens)))
        return out


def make_block_model() -> nn.Module:
    torch.manual_seed(1)
    return OneBlock()


def make_tokens() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (6, 4), generator=generator)
    return [(tokens[:4, :-1], tokens[:4, 1:]), (tokens[4:, :-1], tokens[4:, 1:])]


def make_hostile_model() -> nn.Module:
    """A model whose class and parameter names are HTML."""
    model = make_model()
    type_name = "<script>document.title='pwned'</script>"
    model.__class__ = type(type_name, (Tiny,), {})
    hostile = nn.Parameter(torch.ones(2))
    model.register_parameter('"><img src=x onerror=alert(1)>', hostile)
    forward = model.forward
    model.forward = lambda x: forward(x) * hostile  # type: ignore[method-assign]
    return model


def make_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator)
    return [(inputs[:8], torch.arange(8) % 2), (inputs[8:], torch.arange(4) % 2)]


def make_slow_model() -> nn.Module:
    return SlowTiny()


SLOW = "slow"  # a file of the current folder


class SlowTiny(Tiny):
    """Takes its time as long as there is a file ``SLOW``, so that a test can interrupt it."""

    def forward(self, x: Tensor) -> Tensor:
        if os.path.exists(SLOW):
            time.sleep(0.05)
        return super().forward(x)


def make_wide_model() -> nn.Module:
    """A quarter of a million parameters with little to compute."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1000, 250), nn.Tanh(), nn.Linear(250, 20))


def make_wide_samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.logspace(0.5, -1, 16)[:, None]  # eigenvalues apart from each other
    inputs = lengths * torch.randn(16, 1000, generator=generator)
    return inputs, torch.randint(0, 20, (16,), generator=generator)


not_a_model = 3


def broken() -> nn.Module:
    raise RuntimeError("this factory always fails")
