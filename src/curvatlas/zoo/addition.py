"""The first paper's task and model: sums of two numbers of five digits, and a small GPT for them.

A sample is ``xxxxx+yyyyy=zzzzzz``: 18 tokens of a vocabulary of 12. Logit i predicts token i + 1:
the six digits of the answer are predicted at the positions 11 to 16, the only ones that count.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvatlas.zoo.datasets import Samples
from curvatlas.zoo.models import GPT, GPTConfig

DIGITS = 5
PLUS, EQUALS = 10, 11
LENGTH, VOCABULARY = 3 * DIGITS + 3, 12
ANSWERS = (2 * DIGITS + 1, LENGTH - 1)  # positions whose logits predict a digit of the answer
_NINES = 0.2  # share of batches in which, and of digits of which, y is 9 − x


def five_digit_addition(
    samples: int = 64,
    *,
    seed: int = 0,
    batches: int = 1,
    target: Literal["next", "one_hot"] = "next",
) -> list[Samples]:
    """Batches of sums: tokens (samples, 18), and what the logits at the answer should be.

    target: "next", the digits (samples, 6) that follow, for cross-entropy; "one_hot", the tokens
    *at* the positions as unit vectors (samples, 6, 12), for the paper's squared error.
    In one batch of five, a fifth of the digits of y are 9 − those of x: then carries run far.
    """
    draw = torch.Generator().manual_seed(seed)
    return [_batch(samples, draw, target) for _ in range(batches)]


def _batch(samples: int, draw: torch.Generator, target: str) -> Samples:
    x, y = (torch.randint(10, (samples, DIGITS), generator=draw) for _ in range(2))
    if float(torch.rand((), generator=draw)) < _NINES:
        nines = torch.rand(samples, DIGITS, generator=draw) < _NINES
        y = torch.where(nines, 9 - x, y)
    tokens = torch.empty(samples, LENGTH, dtype=torch.long)
    tokens[:, :DIGITS], tokens[:, DIGITS] = x, PLUS
    tokens[:, DIGITS + 1 : 2 * DIGITS + 1], tokens[:, 2 * DIGITS + 1] = y, EQUALS
    places = 10 ** torch.arange(DIGITS, -1, -1)  # (6,)
    total = ((x + y) * places[1:]).sum(1, keepdim=True)
    tokens[:, 2 * DIGITS + 2 :] = total // places % 10
    first, last = ANSWERS
    if target == "next":
        return Samples(tokens, tokens[:, first + 1 : last + 1])
    if target == "one_hot":
        units = nn.functional.one_hot(tokens[:, first:last], VOCABULARY)
        return Samples(tokens, units.to(torch.get_default_dtype()))
    raise ValueError(f"target is 'next' or 'one_hot', got {target!r}.")


def ormaniec_gpt(width: int = 128, *, seed: int = 0, norm: bool = False, **options: Any) -> GPT:
    """The model of *What Does It Mean to Be a Transformer?*, for ``five_digit_addition``.

    One head of size ``width``, ReLU, causal, learned positions; biases of the feed-forward part and
    of the head only, all zero; every weight N(0, 0.64 / width), drawn from the seed in the order of
    TransformerLens: with 1234 the figures of entries have the paper's numbers. norm: pre-norm with
    a norm before the head. ``options`` change fields of ``GPTConfig`` (``n_layers``, ``softmax``,
    ``attention_residual``). One layer of width 16 without norms has 3,836 parameters.
    """
    config = GPTConfig(
        **{
            "vocabulary": VOCABULARY,
            "context": LENGTH,
            "n_layers": 1,
            "d_model": width,
            "n_heads": 1,
            "norm": "layer" if norm else "none",
            "activation": "relu",
            "attention_bias": False,
            "head_bias": True,
            "answers": ANSWERS,
            **options,
        }
    )
    with torch.random.fork_rng(devices=[]):
        model = GPT(config)
    draw = torch.Generator().manual_seed(seed)
    weights, deviation = dict(model.named_parameters()), 0.8 / math.sqrt(width)
    with torch.no_grad():
        for name in ("token_embedding.weight", "position_embedding"):
            weights[name].normal_(0, deviation, generator=draw)
        for name in _drawn_in_order(config.n_layers):
            printed = torch.empty(weights[name].shape[::-1])  # W of x W, (in, out)
            weights[name].copy_(printed.normal_(0, deviation, generator=draw).T)
        for name, weight in weights.items():
            if name.endswith("bias"):
                weight.zero_()
    return model


def _drawn_in_order(layers: int) -> list[str]:
    """The weights after the embeddings in the order in which TransformerLens draws them."""
    parts = [f"attention.{role}" for role in ("query", "output", "key", "value")]
    parts += ["ffn.up", "ffn.down"]
    blocks = [f"blocks.{layer}.{part}.weight" for layer in range(layers) for part in parts]
    return [*blocks, "head.weight"]


def redraw_embeddings(model: GPT, deviation: float, *, seed: int) -> None:
    """Token and position embeddings anew from N(0, deviation²), in place."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for table in (model.token_embedding.weight, model.position_embedding):
            table.copy_(deviation * torch.randn(table.shape, generator=draw))


def inputs_first(weight: Tensor) -> Tensor:
    """Entries (out · in,) of a weight of ``nn.Linear`` in the order of x W, W (in, out)."""
    rows, columns = weight.shape
    return torch.arange(rows * columns).view(rows, columns).T.reshape(-1)
