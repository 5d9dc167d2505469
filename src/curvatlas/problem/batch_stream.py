"""From a user's data to checked batches: labels shifted, targets counted, this process's share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas import parallel
from curvatlas.problem.batches import HOLD_BYTES, Batch, checked, size_in_bytes, split_batch
from curvatlas.problem.losses import Loss


@dataclass(frozen=True)
class FirstPass:
    """What one look at all data tells."""

    held: list[Batch] | None  # None: too large to hold
    total: float  # valid targets
    seen: bool  # whether there was any batch
    largest_samples: int  # of any batch


@dataclass(frozen=True)
class BatchStream:
    """The batches of ``data``, made anew at every pass."""

    data: Iterable[Any]
    loss: Loss
    device: torch.device
    model: nn.Module
    shift: bool | None  # whether labels are next-token labels; None: told from model and data
    sharded: bool  # every process sees the same data and takes its own share

    def __iter__(self) -> Iterator[Batch]:
        for index, raw in enumerate(self.data):
            if self.sharded and not self.loss.additive and not _is_mine(index):
                continue
            inputs, targets = split_batch(raw, index, shift=self._is_next_token)
            inputs = checked(inputs, what="inputs", device=self.device, index=index)
            targets = checked(targets, what="targets", device=self.device, index=index)
            inputs = self._with_decoder_inputs(inputs, targets)
            batch = Batch(
                inputs=inputs, targets=targets, count=self.loss.count(targets), index=index
            )
            if self.sharded and self.loss.additive:
                first, last = _my_share(batch.samples)
                if first == last:
                    continue
                batch = batch.part(first, last, self.loss.count)
            yield batch

    def first_pass(self) -> FirstPass:
        """Check and count; hold the batches when they are small enough."""
        held: list[Batch] | None = []
        total, bytes_so_far, seen, largest = 0.0, 0, False, 1
        for batch in self:
            seen = True
            total += batch.count
            largest = max(largest, batch.samples)
            bytes_so_far += size_in_bytes(batch)
            if held is not None:
                held.append(batch)
                if bytes_so_far > HOLD_BYTES:
                    held = None
        return FirstPass(held, total, seen, largest)

    def _is_next_token(self, inputs: Mapping[str, Any], labels: Any) -> bool:
        if self.shift is not None:
            return self.shift
        if not isinstance(labels, Tensor) or labels.ndim != 2:
            return False
        if self._decoder_inputs() is not None:
            return False  # its decoder reads the labels one place later
        kind = type(self.model).__name__
        if "CausalLM" in kind or "LMHeadModel" in kind:
            return True
        tokens = inputs.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.shape != labels.shape:
            return False
        valid = labels != -100
        # Labels that repeat the inputs can only mean the next token; masked-LM labels cover few.
        return bool(valid.any()) and bool((tokens == labels)[valid].all())

    def _with_decoder_inputs(self, inputs: Any, labels: Any) -> Any:
        """What the decoder of a sequence-to-sequence model reads, from its labels, unless given.

        With ``labels`` such models make it themselves; here they never see them. Some would read
        the encoder's tokens instead, without a word.
        """
        make = self._decoder_inputs()
        if make is None or not isinstance(inputs, Mapping) or not isinstance(labels, Tensor):
            return inputs
        if labels.ndim != 2 or any(name.startswith("decoder_input") for name in inputs):
            return inputs
        return {**inputs, "decoder_input_ids": make(labels)}

    def _decoder_inputs(self) -> Callable[[Tensor], Tensor] | None:
        config = getattr(self.model, "config", None)
        if not getattr(config, "is_encoder_decoder", False):
            return None
        return getattr(self.model, "prepare_decoder_input_ids_from_labels", None)


def _is_mine(index: int) -> bool:
    return index % parallel.world_size() == parallel.rank()


def _my_share(samples: int) -> tuple[int, int]:
    world, rank = parallel.world_size(), parallel.rank()
    return samples * rank // world, samples * (rank + 1) // world
