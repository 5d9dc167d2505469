"""What a product will cost: operations, bytes and messages, before anything is run.

A product of H, H_o or H_f over N tokens of a Transformer is counted in forward passes ("units"):
a matrix product of the forward pass has two in the gradient's backward pass, four more in H·v on a
kept graph and two in J·v, whichever of its operands are weights and whichever activations.

    operations = units · N · (2 · weights that meet a token + 4 · layers · length · width of heads)
    bytes      = what the kept graph of the N tokens holds, and vectors of P numbers
    messages   = one reduction of the K products' entries, whatever the number of batches

``Machine`` turns these into seconds. benchmarks/cost_model.py fits its rates on small models and
one or two processes, and keeps how far its predictions lie from configurations it has not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from curvatlas.budget import readable

Quantity = Literal["gradient", "H", "H_o", "H_f"]
UNITS: dict[Quantity, int] = {"gradient": 3, "H": 6, "H_o": 4, "H_f": 6}

# Numbers that the kept graph of a gradient holds for a token: in widths, hidden widths and
# heads · length of a layer, and in widths of the whole model. Counted on the zoo's pre-norm GPT and
# on Hugging Face's Llama (gated, RMSNorm, rotary positions);
# tests/studies/test_cost_model.py counts again.
SAVED = {False: (16.0, 4.0, 3.0, 3.0), True: (24.0, 12.0, 3.0, 7.0)}
SAVED_LOGITS = {"gradient": 5.0, "H": 5.0, "H_o": 3.0, "H_f": 3.0}  # in vocabularies
# What a product allocates beside the graph, in graphs, where tensors are large enough to be given
# back at once (benchmarks/cost_model.py); engines/kept.py plans with
# twice as much, the worst.
BESIDE = {"gradient": 0.5, "H": 0.7, "H_o": 0.25, "H_f": 0.7}


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

    def forward_operations(self, tokens: int, length: int) -> float:
        """Multiplications and additions of one forward pass over ``tokens`` tokens."""
        scores = 4 * self.layers * length * self.heads_width  # every pair, masked or not
        return float(tokens) * (2 * self.meeting_weights + scores)

    def saved_numbers(self, tokens: int, length: int, quantity: Quantity = "H") -> float:
        """Numbers that the kept graph of one gradient holds, without the weights."""
        widths, hiddens, scores, ends = SAVED[self.gated]
        layer = widths * self.width + hiddens * self.hidden + scores * self.heads * length
        rest = ends * self.width + SAVED_LOGITS[quantity] * self.vocabulary
        return float(tokens) * (self.layers * layer + rest)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One product: which, over how many tokens, by how many processes."""

    shape: TransformerShape
    quantity: Quantity = "H"
    tokens: int
    length: int
    columns: int = 1
    processes: int = 1
    at_once: int | None = None  # tokens whose graph is held at once; None: all of a process
    checkpointed: bool = False  # activations recomputed: one layer's graph at a time
    itemsize: int = 4

    @property
    def own_tokens(self) -> int:
        """Tokens of the process that has most."""
        return math.ceil(self.tokens / self.length / self.processes) * self.length

    @property
    def operations(self) -> float:
        """Of one process, for all columns."""
        units = UNITS[self.quantity] + (3 if self._rebuilt else 0)
        once = units * self.shape.forward_operations(self.own_tokens, self.length)
        if self.quantity == "H_f":  # the slope of the logits stands still: two units of the head
            once -= 4 * self.own_tokens * 2 * self.shape.width * self.shape.vocabulary
        return self.columns * once

    @property
    def _rebuilt(self) -> bool:
        return self.checkpointed or (self.at_once or self.own_tokens) < self.own_tokens

    @property
    def graph_bytes(self) -> float:
        """Of the graph that is held at once."""
        tokens = min(self.own_tokens, self.at_once or self.own_tokens)
        numbers = self.shape.saved_numbers(tokens, self.length, self.quantity)
        if self.checkpointed:  # inputs of every layer, and the graph of one
            one = replace(self.shape, layers=1)
            numbers = one.saved_numbers(tokens, self.length, self.quantity)
            numbers += 2.0 * tokens * self.shape.layers * self.shape.width
        return self.itemsize * numbers

    @property
    def touched_bytes(self) -> float:
        """Of activations read and written: the graph of all tokens, for every unit and column."""
        numbers = self.shape.saved_numbers(self.own_tokens, self.length, self.quantity)
        return UNITS[self.quantity] * self.columns * self.itemsize * numbers

    @property
    def calls(self) -> float:
        """Layers worked through: each is a fixed number of calls, however small."""
        pieces = math.ceil(self.own_tokens / (self.at_once or self.own_tokens))
        return float(UNITS[self.quantity] * self.columns * self.shape.layers * pieces)

    @property
    def message_bytes(self) -> float:
        """Sent by each process in the one reduction: 2 (n − 1)/n of the products, in a ring."""
        reduced = self.shape.parameters * self.columns * self.itemsize
        return 2 * (self.processes - 1) / self.processes * reduced

    @property
    def messages(self) -> int:
        """Steps of that ring."""
        return 2 * (self.processes - 1)

    @property
    def working_bytes(self) -> float:
        """What a product takes beside the weights: its graph, what it allocates, its vectors."""
        vectors = (2 * self.columns + 1) * self.shape.parameters * self.itemsize
        return (1 + BESIDE[self.quantity]) * self.graph_bytes + vectors

    def memory_bytes(self, *, basis: int = 0, basis_itemsize: int | None = None) -> float:
        """Peak of one process: weights, the work on a product, its share of a Lanczos basis.

        basis: vectors, sharded over the processes;  basis_itemsize: 2 for bfloat16.
        """
        size = self.shape.parameters
        rows = basis * size * (basis_itemsize or self.itemsize) / self.processes
        return size * self.itemsize + self.working_bytes + rows


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one process. What is unknown stays at its default, which costs nothing."""

    operations_per_second: float
    bytes_per_second: float = math.inf  # of activations, in graphs
    seconds_per_call: float = 0.0  # of a layer and unit
    weight_bytes_per_second: float = math.inf  # of the columns and products, P numbers each
    link_bytes_per_second: float = math.inf
    seconds_per_message: float = 0.0
    slowdown: float = 1.0  # of the arithmetic when the processes share memory, against one alone
    memory: float = math.inf  # bytes that one process may use
    name: str = ""

    def seconds(self, task: Task) -> float:
        """Predicted time of one product."""
        slow = self.slowdown if task.processes > 1 else 1.0
        return slow * self.working_seconds(task) + self.reduction_seconds(task)

    def working_seconds(self, task: Task) -> float:
        """Of one process that has the machine to itself."""
        rates = (self.operations_per_second, self.bytes_per_second, self.weight_bytes_per_second)
        *amounts, calls = amounts_of(task)
        moving = sum(a / r for a, r in zip(amounts, rates, strict=True))
        return moving + self.seconds_per_call * calls

    def reduction_seconds(self, task: Task) -> float:
        if task.processes == 1:
            return 0.0
        moving = task.message_bytes / self.link_bytes_per_second
        return moving + task.messages * self.seconds_per_message

    def fits(self, task: Task, *, basis: int = 0, basis_itemsize: int | None = None) -> bool:
        """Whether the peak stays below the memory of a process."""
        return task.memory_bytes(basis=basis, basis_itemsize=basis_itemsize) <= self.memory

    def __str__(self) -> str:
        memory = "" if math.isinf(self.memory) else f", {readable(self.memory)}"
        return f"{self.name or 'machine'}: {self.operations_per_second:.3g} operations/s{memory}"


def amounts_of(task: Task) -> tuple[float, float, float, float]:
    """Operations, bytes of activations, bytes of vectors, layers worked through."""
    weights = float(2 * task.columns * task.shape.parameters * task.itemsize)
    return task.operations, task.touched_bytes, weights, task.calls


# --- shapes that are asked for ------------------------------------------------------------------


def _llama(
    layers: int, width: int, hidden: int, heads: int, *, tied: bool = False
) -> TransformerShape:
    sizes: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "hidden": hidden,
        "heads": heads,
        "tied": tied,
    }
    return TransformerShape(**sizes, key_value_heads=8, vocabulary=128256, gated=True)


LLAMA_1B = _llama(16, 2048, 8192, 32, tied=True)
LLAMA_8B = _llama(32, 4096, 14336, 32)
LLAMA_70B = _llama(80, 8192, 28672, 64)
SMOLLM2_135M = replace(_llama(30, 576, 1536, 9, tied=True), key_value_heads=3, vocabulary=49152)
