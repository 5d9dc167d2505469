r"""What a product takes on devices that are not at hand: operations, bytes and messages, counted.

A product over N tokens by the hand-written engine, with the weights and vectors of P numbers spread
over n devices (``engines/tangent/sharded``). One forward pass is a unit, 2 N W + 4 N L d_h
operations (W: weights that meet a token, d_h: width of all heads, over the layers):

    units      gradient 3, H and H_f 6, H_o 4; more where runs of samples are linearised again in
               every product ("passing": 2, H_o 1) or blocks, up and down ("recomputed": 5, H_o 2)
    memory     3 P/n + 6.5 S + what the mode keeps of the samples + their tangents
    messages   5 P (n − 1)/n a run: weights and columns up and down, rows of the product once

S is the largest station: a block, the embedding or the head. What a machine at hand takes is
measured instead (``curvatlas.planning``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from curvatlas.budget import readable
from curvatlas.engines.tangent.sharded import STATIONS, TRANSIENT

Quantity = Literal["gradient", "H", "H_o", "H_f"]
Mode = Literal["kept", "passing", "recomputed"]
UNITS: dict[Quantity, int] = {"gradient": 3, "H": 6, "H_o": 4, "H_f": 6}
AGAIN: dict[Mode, tuple[int, int]] = {"kept": (0, 0), "passing": (2, 1), "recomputed": (5, 2)}
# What a sample keeps linearised: in sizes of the tangents of one column (3.0 to 3.8 on GPTs and
# Llamas, H_o 2.0 to 2.5), and in vocabularies for its token (tests/test_cost_model.py).
HELD, HELD_OUTER, HELD_LOGITS = 3.5, 2.3, 2.0
WALKS = 5  # vectors of P numbers that a run sends: weights and columns twice, rows once


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes of a Transformer that decide its cost."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None  # None: as many as heads
    head_size: int | None = None  # None: width / heads
    gated: bool = False  # a third matrix in the feed-forward sublayer
    tied: bool = False  # one matrix for embedding and head

    @property
    def heads_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.head_size or self.width // self.heads)

    @property
    def layer_weights(self) -> int:
        """Entries of the matrices of one layer: query, key, value, output, feed-forward."""
        groups = self.key_value_heads or self.heads
        narrow = self.heads_width * groups // self.heads
        attention = self.width * (2 * self.heads_width + 2 * narrow)
        return attention + (3 if self.gated else 2) * self.width * self.hidden

    @property
    def meeting_weights(self) -> int:
        """Weights that every token is multiplied with: an embedding is looked up, a head is not."""
        return self.layers * self.layer_weights + self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All weights, without biases, norms and positions (below one in a hundred)."""
        return self.meeting_weights + (0 if self.tied else self.width * self.vocabulary)

    @property
    def largest_station(self) -> int:
        """Weights that have to be in one place: a layer's, the embedding's or the head's."""
        return max(self.layer_weights, self.width * self.vocabulary)

    def forward_operations(self, tokens: int, length: int) -> float:
        """Multiplications and additions of one forward pass over ``tokens`` tokens."""
        scores = 4 * self.layers * length * self.heads_width  # every pair, masked or not
        return float(tokens) * (2 * self.meeting_weights + scores)

    def tangent_numbers(self, tokens: int) -> float:
        """Numbers of one column's tangents; attention goes by blocks of queries and keeps none."""
        layer = 4 * self.heads_width + 2 * self.width + (2 if self.gated else 1) * self.hidden
        return float(tokens) * self.layers * layer


@dataclass(frozen=True, kw_only=True)
class Task:
    """One product: which, over how many tokens, by how many devices."""

    shape: TransformerShape
    quantity: Quantity = "H"
    tokens: int
    length: int
    devices: int = 1
    mode: Mode = "kept"
    run: int = 1  # samples that go through a device together
    basis: int = 0  # vectors of a Lanczos basis, spread over the devices in bfloat16
    itemsize: int = 4

    @property
    def own_samples(self) -> int:
        """Samples of the device that has most."""
        return math.ceil(self.tokens / self.length / self.devices)

    @property
    def runs(self) -> int:
        """Times that a device walks through the model."""
        return math.ceil(self.own_samples / self.run)

    @property
    def operations(self) -> float:
        """Of one device."""
        units = UNITS[self.quantity] + AGAIN[self.mode][self.quantity == "H_o"]
        return units * self.shape.forward_operations(self.own_samples * self.length, self.length)

    @property
    def sent_bytes(self) -> float:
        """By each device."""
        share = (self.devices - 1) / self.devices
        return WALKS * self.runs * share * self.shape.parameters * self.itemsize

    @property
    def memory_bytes(self) -> float:
        """Peak of one device: weights, column and product, a station, its samples, its basis."""
        shape, size = self.shape, self.itemsize
        spread = (3 * size + 2 * self.basis) * shape.parameters / self.devices
        station = STATIONS * shape.largest_station * size
        return spread + station + self.kept_bytes + self.passing_bytes

    @property
    def kept_bytes(self) -> float:
        """Of the samples, from product to product: all that is linearised, or blocks' inputs."""
        shape, own = self.shape, self.own_samples * self.length
        numbers = HELD_LOGITS * own * shape.vocabulary
        if self.mode == "kept":
            numbers += self._held * shape.tangent_numbers(own)
        else:  # with their adjoints; counted, twice as much
            numbers += 4.0 * own * shape.layers * shape.width
        return numbers * self.itemsize

    @property
    def passing_bytes(self) -> float:
        """Of a run on its way: its tangents, and what is linearised for it."""
        shape, tokens = self.shape, min(self.run, self.own_samples) * self.length
        tangents = shape.tangent_numbers(tokens)
        numbers = {
            "kept": TRANSIENT * tangents,
            "passing": (self._held + TRANSIENT) * tangents,
            # those between the blocks, and of one block all
            "recomputed": 2.0 * tokens * shape.layers * shape.width
            + (self._held + TRANSIENT) * tangents / shape.layers,
        }[self.mode]
        return numbers * self.itemsize

    @property
    def _held(self) -> float:
        return HELD_OUTER if self.quantity == "H_o" else HELD


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one device does in a second, and how much it holds."""

    operations_per_second: float
    memory: float = math.inf  # bytes
    link_bytes_per_second: float = math.inf
    name: str = ""

    def seconds(self, task: Task) -> float:
        """Of one product, as if nothing were sent while something is computed."""
        return self.working_seconds(task) + self.sending_seconds(task)

    def working_seconds(self, task: Task) -> float:
        return task.operations / self.operations_per_second

    def sending_seconds(self, task: Task) -> float:
        return task.sent_bytes / self.link_bytes_per_second

    def fits(self, task: Task) -> bool:
        """Whether the peak stays below the device's memory."""
        return task.memory_bytes <= self.memory

    def best(self, task: Task) -> Task | None:
        """The fastest way of the task that fits: what is kept, and how many samples a run."""
        runs = sorted({min(2**k, task.own_samples) for k in range(task.own_samples.bit_length())})
        modes: tuple[Mode, ...] = ("kept", "passing", "recomputed")
        ways = (replace(task, mode=mode, run=run) for mode in modes for run in runs)
        return min(filter(self.fits, ways), key=self.seconds, default=None)

    def __str__(self) -> str:
        memory = "" if math.isinf(self.memory) else f", {readable(self.memory)}"
        return f"{self.name or 'device'}: {self.operations_per_second:.3g} operations/s{memory}"


# --- shapes that are asked for ------------------------------------------------------------------


def _llama(
    layers: int, width: int, hidden: int, heads: int, *, tied: bool = False
) -> TransformerShape:
    return TransformerShape(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        tied=tied,
        key_value_heads=8,
        vocabulary=128256,
        gated=True,
    )


LLAMA_1B = _llama(16, 2048, 8192, 32, tied=True)
LLAMA_8B = _llama(32, 4096, 14336, 32)
LLAMA_70B = _llama(80, 8192, 28672, 64)
SMOLLM2_135M = replace(_llama(30, 576, 1536, 9, tied=True), key_value_heads=3, vocabulary=49152)
