"""What a run is about: model, data and loss, trained weights, and the fingerprints of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from curvatlas import files
from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class RoleSize(Result):
    """How many parameters one role has in one layer."""

    layer: int | None  # None outside the stack of blocks
    sublayer: str
    role: str
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Subject(Result):
    """The model and data of a run, with the loss and gradient at which curvature was measured."""

    name: str  # as the user called it
    model: str  # the class
    state: str  # "initial", "trained", or "" when the user's own
    parameters: int
    dtype: str
    device: str
    data: str
    loss_name: str
    batches: int
    targets: float  # valid targets over all batches: what the mean is taken over
    loss: float
    gradient_norm: float
    roles: tuple[RoleSize, ...]
    engine: str = ""  # which one computes products, and why
    basis: str = ""  # how many of the samples were used and why, where not all of them were

    @property
    def value(self) -> float:
        """The loss."""
        return self.loss

    def by_role(self) -> dict[str, int]:
        """Parameters of each role, summed over layers, in the order they first appear."""
        totals: dict[str, int] = {}
        for entry in self.roles:
            totals[entry.role] = totals.get(entry.role, 0) + entry.parameters
        return totals

    def __str__(self) -> str:
        roles = ", ".join(f"{role} {size:,}" for role, size in self.by_role().items())
        state = f" ({self.state})" if self.state else ""
        return (
            f"{self.name}{state}: {self.model} with {self.parameters:,} parameters ({roles}); "
            f"{self.loss_name} {self.loss:.6g} on {self.data}, "
            f"gradient norm {self.gradient_norm:.3g}" + (f"; {self.basis}" if self.basis else "")
        )


@dataclass(frozen=True, kw_only=True)
class TrainedWeights(Result):
    """Parameters and buffers after training, so that a resumed run need not train again."""

    tensors: dict[str, Tensor]
    history: Result

    def load_into(self, model: nn.Module) -> None:
        """Give ``model`` these weights; names and shapes must fit."""
        model.load_state_dict(self.tensors)

    def __str__(self) -> str:
        return str(self.history)


def weights_of(model: nn.Module, history: Result) -> TrainedWeights:
    """A copy of the model's present weights."""
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    return TrainedWeights(tensors=tensors, history=history)


def of_model(model: nn.Module) -> str:
    """SHA-256 of the class, and of name, shape, dtype and bytes of each parameter and buffer.

    Parameters that FSDP2 spreads count as they are whole: all processes gather one after the other.
    """
    digest = hashlib.sha256(type(model).__qualname__.removeprefix("FSDP").encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(name.encode())
        _add(digest, tensor)
    return digest.hexdigest()


def of_data(batches: Iterable[Any]) -> str:
    """SHA-256 of every tensor and plain value of every batch, in order."""
    digest = hashlib.sha256()
    for batch in [batches] if isinstance(batches, (Tensor, Mapping)) else batches:
        _add(digest, batch)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {tuple(value.shape)} {value.dtype}".encode())
        if hasattr(value, "full_tensor"):  # a DTensor
            value = value.full_tensor()
        for part in files.in_memory(value.detach()):
            digest.update(files.raw_bytes(part))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"key {key}".encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"list {len(value)}".encode())
        for item in value:
            _add(digest, item)
    else:
        digest.update(f"{type(value).__name__} {value!r}".encode())
