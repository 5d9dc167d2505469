"""DATA on the command line: a Python reference, a zoo name, an array file or a text file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas import archive
from curvatlas.budget import available_bytes, readable
from curvatlas.commands import references
from curvatlas.commands.models import NamedModel
from curvatlas.commands.tokens import token_windows

ZOO = ("digits", "fashion-mnist", "mnist", "text")
_PAIRS = (("inputs", "targets"), ("x", "y"), ("images", "labels"))


@dataclass(frozen=True, kw_only=True)
class NamedData:
    """Batches for ``Problem`` with what the user called them, and the loss that fits them."""

    batches: Any
    name: str
    loss: str


def find_data(
    text: str,
    model: NamedModel,
    *,
    samples: int,
    batch_size: int,
    context: int = 64,
    tokenizer: str | None = None,
    loss: str = "auto",
    seed: int = 0,
) -> NamedData:
    """The data that ``text`` names, at most ``samples`` samples of them, in the model's dtype."""
    path = Path(text)
    ours = references.zoo_name(text, ZOO)
    if ours is not None:
        raw: Any = _from_zoo(ours, model, context)
        name = ours
    elif references.is_reference(text):
        raw, name = references.resolve(text), text
        raw = raw() if callable(raw) else raw
    elif path.is_file():
        raw, name = _from_file(path, model, context, tokenizer, samples, seed), path.name
    else:
        raise ValueError(
            f"cannot find the data {text!r}: give pkg.module:make_data, an .npz, .safetensors or "
            f"text file, or one of {', '.join(ZOO)}."
        )
    if isinstance(raw, dict) or _is_pair(raw):
        raw, count = _cut(raw, samples, batch_size)
        name = f"{count} samples of {name}"
    parameter = next(model.model.parameters(), None)
    if parameter is not None and isinstance(raw, list):
        raw = [_converted(batch, parameter.dtype, parameter.device) for batch in raw]
    return NamedData(batches=raw, name=name, loss=_loss(raw) if loss == "auto" else loss)


def _from_zoo(name: str, model: NamedModel, context: int) -> Any:
    from curvatlas import zoo

    if name == "text":
        limit = getattr(getattr(model.model, "config", None), "context", context)
        dataset = zoo.text(context=min(context, limit))
    else:
        makers: dict[str, Callable[[], zoo.Dataset]] = {
            "digits": zoo.digits,
            "fashion-mnist": zoo.fashion_mnist,
            "mnist": zoo.mnist,
        }
        dataset = makers[name]()
    return tuple(dataset.train)


def _from_file(
    path: Path, model: NamedModel, context: int, tokenizer: str | None, samples: int, seed: int
) -> Any:
    if path.suffix == ".npz":
        return _arrays(_read_npz(path), path)
    if path.suffix == ".safetensors":
        return _arrays(archive.parse(archive.read(path), str(path))[1], path)
    if path.suffix.lower() in (".pkl", ".pickle", ".pt", ".pth", ".npy", ".joblib"):
        raise ValueError(f"{path} may carry code: give an .npz or .safetensors file instead.")
    return token_windows(
        path, model, context=context, tokenizer=tokenizer, samples=samples, seed=seed
    )


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as file:
            size = sum(entry.file_size for entry in file.infolist())
        if size > available_bytes():
            raise ValueError(f"{path} unpacks to {readable(size)}: more than the free memory.")
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(np.ascontiguousarray(file[name])) for name in file.files}
    except (zipfile.BadZipFile, OSError, EOFError, TypeError, KeyError, MemoryError) as error:
        raise ValueError(f"{path} is not a readable .npz file: {error}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a readable .npz file of numbers: {error}") from error


def _arrays(tensors: dict[str, Tensor], path: Path) -> Any:
    for inputs, targets in _PAIRS:
        if set(tensors) == {inputs, targets}:
            return tensors[inputs], tensors[targets]
    if "labels" in tensors and len(tensors) > 1:
        return dict(tensors)
    raise ValueError(
        f"{path} holds {sorted(tensors)}: name the arrays inputs and targets, or as the model's "
        "arguments beside labels."
    )


def _is_pair(raw: Any) -> bool:
    return isinstance(raw, tuple) and len(raw) == 2 and all(isinstance(t, Tensor) for t in raw)


def _cut(raw: Any, samples: int, batch_size: int) -> tuple[list[Any], int]:
    tensors = list(raw.values()) if isinstance(raw, dict) else list(raw)
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(lengths) != 1 or not min(lengths):
        raise ValueError(f"the arrays have {sorted(lengths)} samples: they need the same number.")
    count = min(samples, *lengths)

    def part(start: int) -> Any:
        stop = min(start + batch_size, count)
        if isinstance(raw, dict):
            return {name: tensor[start:stop] for name, tensor in raw.items()}
        return tuple(tensor[start:stop] for tensor in raw)

    return [part(start) for start in range(0, count, batch_size)], count


def _converted(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Real numbers in the model's dtype; tokens and labels stay integers; all on its device."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: _converted(item, dtype, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_converted(item, dtype, device) for item in value)
    if isinstance(value, list):
        return [_converted(item, dtype, device) for item in value]
    return value


def _loss(raw: Any) -> str:
    """Whole-number targets are classes; real ones are regressed."""
    batch = next(iter(raw), None) if isinstance(raw, Iterable) else None
    if isinstance(batch, dict):
        targets = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        targets = batch[1]
    else:
        targets = raw[1] if isinstance(raw, tuple) and len(raw) == 2 else None
    if isinstance(targets, Tensor) and targets.is_floating_point():
        return "mse"
    return "cross_entropy"
