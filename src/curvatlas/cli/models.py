"""MODEL on the command line: a Python reference, a Hugging Face folder on disk, or a zoo name."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvatlas import files

# -------------------------------------------------------------------------------------------------
# ``pkg.module:name`` on the command line: the user's own Python, imported as they named it.
# -------------------------------------------------------------------------------------------------


_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(text: str) -> bool:
    """Whether the text has the form ``pkg.module:name``."""
    return _REFERENCE.fullmatch(text) is not None


def zoo_name(text: str, known: tuple[str, ...]) -> str | None:
    """The name of something of ours, or None; ``zoo:name`` says so beyond doubt."""
    prefixed = text.startswith("zoo:")
    name = text.removeprefix("zoo:")
    if name not in known:
        if prefixed:
            raise ValueError(f"the zoo has no {name!r}: it has {', '.join(known)}.")
        return None
    if not prefixed and Path(text).exists():
        raise ValueError(f"{text!r} is ours and a path here: write zoo:{text} or ./{text}.")
    return name


def resolve(text: str) -> Any:
    """The object that ``pkg.module:name`` names; modules of the current folder are found too."""
    module_name, _, path = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"cannot import {module_name!r} of {text!r}: {error}.") from error
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise ValueError(f"{module_name!r} has no {path!r} (named by {text!r}).") from None
    return value


_MOST_NAMES = 6  # of tensors in a message
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a layer in a name
ZOO = ("vit", "gpt", "benchmark-gpt", "mlp")
_HEADS = {  # ending of a Hugging Face architecture → the class that loads it
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model in evaluation mode with what the user called it."""

    model: nn.Module
    name: str
    folder: Path | None = None  # of a Hugging Face model: where its tokenizer is
    notes: tuple[str, ...] = ()  # kept with the run


def find_model(
    text: str,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    weights: Path | None = None,
) -> NamedModel:
    """The model that ``text`` names, converted, moved, in evaluation mode."""
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    torch.manual_seed(seed)  # a factory that draws weights draws the same ones every time
    ours = zoo_name(text, ZOO)
    if ours is not None:
        model = _from_zoo(ours, seed)
    elif is_reference(text):
        model = _from_reference(text)
    elif Path(text).is_dir():
        folder = Path(text)
        model, notes = _from_folder(folder)
    else:
        raise ValueError(
            f"cannot find the model {text!r}: give pkg.module:make_model, a Hugging Face folder "
            f"on disk, or one of {', '.join(ZOO)}."
        )
    if weights is not None:
        _load_weights(model, weights)
    model = model.to(device=_device(device), dtype=dtype).eval()
    name = text if folder is None else folder.name
    return NamedModel(model=model, name=name, folder=folder, notes=notes)


def _from_zoo(name: str, seed: int) -> nn.Module:
    from curvatlas import zoo

    makers = {
        "vit": zoo.reference_vit,
        "gpt": zoo.reference_gpt,
        "benchmark-gpt": zoo.benchmark_gpt,
    }
    if name == "mlp":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return zoo.MLP(zoo.MLPConfig())
    return makers[name](seed=seed)


def _from_reference(text: str) -> nn.Module:
    value = resolve(text)
    if not isinstance(value, nn.Module) and callable(value):
        value = value()
    if not isinstance(value, nn.Module):
        raise ValueError(f"{text!r} gives a {type(value).__name__}, expected an nn.Module.")
    return value


def _from_folder(folder: Path) -> tuple[nn.Module, tuple[str, ...]]:
    """A Hugging Face model from disk: no network, no code of the folder, no pickled weights.

    Returns also what the reader of its numbers should know.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a Hugging Face model: it has no config.json.")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{folder} needs transformers: pip install 'curvatlas[huggingface]'."
        ) from error
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **safe)
        architecture = (config.architectures or [""])[0]
        loader = next((a for end, a in _HEADS.items() if architecture.endswith(end)), None)
        if loader is None:
            raise ValueError(
                f"its architecture {architecture!r} ends in none of {', '.join(_HEADS)}; name a "
                "function that makes the model instead (pkg.module:make_model)"
            )
        # Sizes that do not fit are told below, by name: transformers' own error has no names.
        model, loading = getattr(transformers, loader).from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **safe,
        )
        unused = _refuse_other_tensors(model, loading)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot load {folder} as a Hugging Face model: {reason}") from error
    notes = () if not unused else (f"not used by {type(model).__name__}: {_some(unused)}",)
    for note in notes:
        warnings.warn(f"{folder}: {note}", stacklevel=2)
    return model, notes


def _refuse_other_tensors(model: nn.Module, loading: dict[str, Any]) -> list[str]:
    """ValueError when the folder's tensors are not those of the model: the rest would be random.

    Returns what the folder holds beside them: the parts of other heads, which this one does not
    need. transformers has already taken out tied weights, which are stored once, and what a family
    declares it can do without.
    """
    kind = type(model).__name__
    mismatched = [m if isinstance(m, str) else m[0] for m in loading["mismatched_keys"]]
    if mismatched:
        raise ValueError(
            f"its tensors {_some(mismatched)} have other sizes than its config.json says: "
            "bring back the config.json it was saved with"
        )
    if loading["missing_keys"]:
        raise ValueError(
            f"it lacks {_some(loading['missing_keys'])} of {kind}, which would be random: bring "
            "back the file; if the folder is a base model without this head, train the head and "
            "save the model with it, or name a function that makes the model "
            "(pkg.module:make_model)"
        )
    unexpected = list(loading["unexpected_keys"])
    left_out = [name for name in unexpected if _belongs_to(model, name)]
    if left_out:
        raise ValueError(
            f"it holds {_some(left_out)}, which {kind} as its config.json describes it does not "
            "use: bring back the config.json it was saved with"
        )
    return unexpected


def _belongs_to(model: nn.Module, name: str) -> bool:
    """Whether an unused tensor looks like a part of this very model: one more layer, or a weight
    or bias of a module the model has. A pooler or another head is neither."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    layers = {_LAYER.sub("*", own) for own in model.state_dict()}
    modules = dict(model.named_modules())
    for candidate in (name, f"{prefix}.{name}"):
        parent, _, leaf = candidate.rpartition(".")
        if _LAYER.sub("*", candidate) in layers:
            return True
        if parent in modules and leaf in ("weight", "bias"):
            return True
    return False


def _some(names: Iterable[str]) -> str:
    """All of a few names, the first of many."""
    ordered = sorted(names)
    rest = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _load_weights(model: nn.Module, path: Path) -> None:
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: weights are read from .safetensors files only.")
    if not path.is_file():
        raise ValueError(f"{path} does not exist.")
    _, tensors = files.parse(files.read(path), str(path))
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(
            f"{path} does not fit the model: {' '.join(str(error).split())}"
        ) from error
    # A tied weight has two names and is stored under one of them.
    named = model.state_dict(keep_vars=True)
    present = {id(value) for name, value in named.items() if name in tensors}
    missing = [name for name in missing if id(named.get(name)) not in present]
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit the model: missing {sorted(missing)}, "
            f"unknown {sorted(unexpected)}."
        )


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {text!r} cannot be used here: {reason}.") from error
    return device


def parse_dtype(text: str | None) -> torch.dtype | None:
    """``float32`` or ``float64``; in half precision curvature would be lost in rounding."""
    if text is None:
        return None
    if text not in ("float32", "float64"):
        raise ValueError(f"dtype must be float32 or float64, got {text!r}.")
    dtype: Any = getattr(torch, text)
    assert isinstance(dtype, torch.dtype)
    return dtype
