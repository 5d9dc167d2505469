"""A text file as windows of tokens, with the model's own tokenizer, bytes or characters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvatlas.commands.models import NamedModel

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
