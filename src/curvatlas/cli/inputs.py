"""MODEL and DATA of a command turned into a problem and the fingerprints of its run."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas import files, parallel
from curvatlas.budget import available_bytes, readable
from curvatlas.cli import models
from curvatlas.cli.execution import join, open_run
from curvatlas.cli.models import NamedModel, find_model, parse_dtype
from curvatlas.runs import Run, subject

# -------------------------------------------------------------------------------------------------
# A text file as windows of tokens, with the model's own tokenizer, bytes or characters.
# -------------------------------------------------------------------------------------------------


_MOST_TEXT = 64 * 2**20  # bytes read: far more than any curvature estimate uses
_MASKED_SHARE = 0.15  # of the tokens a masked language model has to guess, as in BERT


def token_windows(
    path: Path,
    model: NamedModel,
    *,
    context: int,
    tokenizer: str | None,
    samples: int,
    seed: int,
) -> Any:
    """(inputs, targets) one token apart, or the mapping a Hugging Face model takes."""
    if getattr(getattr(model.model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{model.name} maps one text to another and {path} holds one: give an .npz or "
            ".safetensors file with input_ids and labels."
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_TEXT)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is neither .npz, .safetensors nor UTF-8 text: {error}."
        ) from error
    kind = tokenizer or ("bytes" if model.folder is None else str(model.folder))
    context = min(context, _longest(model))
    mask: int | None = None
    if kind == "bytes":
        tokens = torch.tensor(list(text.encode("utf-8")), dtype=torch.long)
    elif kind == "characters":
        symbols = {symbol: index for index, symbol in enumerate(sorted(set(text)))}
        tokens = torch.tensor([symbols[symbol] for symbol in text], dtype=torch.long)
    else:
        tokens, mask = _with_tokenizer(Path(kind), text, (context + 1) * samples)
    _check_vocabulary(model, tokens, kind)
    if model.folder is None:
        windows = _windows(path, tokens, context + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    windows = _windows(path, tokens, context)
    if type(model.model).__name__.endswith("ForMaskedLM"):
        return _masked(windows, mask, seed)
    return {"input_ids": windows, "labels": windows.clone()}


def _windows(path: Path, tokens: Tensor, length: int) -> Tensor:
    if len(tokens) < length:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, a window takes {length}: lower --context."
        )
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _with_tokenizer(folder: Path, text: str, wanted: int) -> tuple[Tensor, int | None]:
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder}: give bytes, characters or a folder on disk.")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except ImportError as error:
        raise ValueError("a tokenizer needs: pip install 'curvatlas[huggingface]'.") from error
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} has no readable tokenizer: {reason}") from error
    # A token is hardly ever longer than 16 characters: more text would be tokenized for nothing.
    numbers = tokenizer(text[: 16 * wanted], add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(numbers, dtype=torch.long), tokenizer.mask_token_id


def _masked(windows: Tensor, mask: int | None, seed: int) -> dict[str, Tensor]:
    if mask is None:
        raise ValueError("a masked language model needs a tokenizer with a mask token.")
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(windows.shape, generator=generator) < _MASKED_SHARE
    hidden[:, 0] |= ~hidden.any(1)  # every window has something to guess
    return {
        "input_ids": windows.masked_fill(hidden, mask),
        "labels": windows.masked_fill(~hidden, -100),
    }


def _longest(model: NamedModel) -> int:
    config = getattr(model.model, "config", None)
    limits = [getattr(config, key, None) for key in ("context", "max_position_embeddings")]
    return min([limit for limit in limits if isinstance(limit, int)], default=10**9)


def _check_vocabulary(model: NamedModel, tokens: Tensor, kind: str) -> None:
    config = getattr(model.model, "config", None)
    for key in ("vocabulary", "vocab_size"):
        size = getattr(config, key, None)
        if isinstance(size, int) and len(tokens) and int(tokens.max()) >= size:
            raise ValueError(
                f"the text has token {int(tokens.max())} ({kind}), the model knows {size}: "
                "choose another --tokenizer."
            )


# -------------------------------------------------------------------------------------------------
# DATA on the command line: a Python reference, a zoo name, an array file or a text file.
# -------------------------------------------------------------------------------------------------


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
    ours = models.zoo_name(text, ZOO)
    if ours is not None:
        raw: Any = _from_zoo(ours, model, context)
        name = ours
    elif models.is_reference(text):
        raw, name = models.resolve(text), text
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
        return _arrays(files.parse(files.read(path), str(path))[1], path)
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


MOST_SAMPLES = 512
_FEWEST_SAMPLES = 8
_FORWARD = 2**31


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the user named, ready to be differentiated."""

    problem: Any
    model_name: str
    data_name: str
    options: dict[str, Any]  # everything that decides the numbers
    notes: tuple[str, ...] = ()  # kept with the run

    def open_run(self, command: str, output: Path | None, **more: Any) -> Run:
        """The run folder of this command on these inputs."""
        batches = ((batch.inputs, batch.targets) for batch in self.problem.all_batches())
        run = open_run(
            command,
            output,
            options={"command": command, **self.options, **more},
            model_fingerprint=subject.of_model(self.problem.model),
            data_fingerprint=subject.of_data(batches),
        )
        for note in self.notes:
            run.warn(f"model: {note}")
        return run


def prepare(
    model: str,
    data: str,
    *,
    loss: str,
    weights: Path | None,
    samples: int | None,
    batch_size: int,
    context: int,
    tokenizer: str | None,
    seed: int,
    dtype: str | None,
    device: str,
) -> Inputs:
    """Find the model and the data and put them together; processes of torchrun share them.

    samples: None takes 512, or as many as keep two thousand products a matter of minutes.
    """
    device = join(device)
    count, size = samples or MOST_SAMPLES, batch_size

    def find() -> tuple[NamedModel, NamedData]:
        nonlocal count, size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries that load models
            named = find_model(
                model, dtype=parse_dtype(dtype), device=device, seed=seed, weights=weights
            )
            how: Any = {"context": context, "tokenizer": tokenizer, "loss": loss, "seed": seed}
            if samples is None:
                # On one sample: a large batch would take the memory that a small budget saves.
                one = find_data(data, named, samples=1, batch_size=1, **how)
                count = affordable_samples(named.model, one, most=MOST_SAMPLES)
            if samples is None and count < MOST_SAMPLES:
                size = min(batch_size, max(count // 4, 1))  # batches show how much data scatter
            found = find_data(data, named, samples=count, batch_size=size, **how)
        return named, found

    named, found = parallel.together(find)
    problem = ca.Problem(named.model, found.loss, found.batches, shard=True)
    options = {
        "model": model, "data": data, "loss": found.loss,
        "weights": None if weights is None else str(weights), "samples": count,
        "batch_size": size, "context": context, "tokenizer": tokenizer, "seed": seed,
        "dtype": str(problem.dtype).removeprefix("torch."), "device": device,
    }  # fmt: skip
    return Inputs(
        problem=problem,
        model_name=named.name,
        data_name=found.name,
        options=options,
        notes=named.notes,
    )


def affordable_samples(model: Any, data: NamedData, *, most: int) -> int:
    """How many samples take 2³¹ operations in a forward pass, a fixed number on every machine.

    A product with the Hessian is six of them: a survey of 2500 products then takes 3·10¹³
    operations, minutes on two cores.
    """
    from torch.utils.flop_counter import FlopCounterMode

    problem = ca.Problem(model, data.loss, data.batches, distributed=False)
    if not problem.loss.additive:
        return most
    sample = next(problem.batches()).part(0, 1, problem.loss.count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        problem.with_batches([sample]).value()
    operations = max(int(counter.get_total_flops()), 1)
    return max(min(_FORWARD // operations, most), _FEWEST_SAMPLES)
