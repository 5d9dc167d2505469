"""Fingerprints: whether two runs saw the same weights and the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def of_model(model: nn.Module) -> str:
    """SHA-256 of the class, and of name, shape, dtype and bytes of each parameter and buffer."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
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
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
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
