"""Hugging Face models on disk: a folder, a name of the local cache, a PEFT adapter.

Nothing is downloaded, no code of a folder runs, and no pickled weights are read.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvatlas import files

_MOST_NAMES = 6  # of tensors in a message
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a layer in a name
_HEADS = {  # ending of a Hugging Face architecture → the class that loads it
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}
ADAPTER = "adapter_config.json"
_TASKS = {  # task of a PEFT adapter → the class that loads its base
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
}
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model from disk, the folder of its tokenizer, and what is to be said of it."""

    model: nn.Module
    tokenizer: Path
    notes: tuple[str, ...] = ()


def cached_folder(name: str) -> Path | None:
    """The folder of a model in the local Hugging Face cache (``gpt2``, ``org/name``), if any."""
    if not _REPOSITORY.fullmatch(name):
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _quiet_transformers(what: object) -> Any:
    """transformers without network, bars and chatter."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{what} needs transformers: pip install 'curvatlas[huggingface]'."
        ) from error
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def _with_adapter(folder: Path) -> Pretrained:
    """A PEFT adapter on its base: the parameters that vary are the adapter's."""
    try:
        settings = files.parse_json((folder / ADAPTER).read_text("utf-8"), str(folder / ADAPTER))
        base, task = settings["base_model_name_or_path"], settings.get("task_type")
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / ADAPTER} names no base_model_name_or_path.") from error
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"{folder} is a PEFT adapter: pip install peft.") from error
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{folder} has no adapter_model.safetensors: save the adapter as such.")
    place = Path(str(base))
    if not place.is_dir():
        place = folder / str(base) if (folder / str(base)).is_dir() else place
    found = place if place.is_dir() else cached_folder(str(base))
    if found is None:
        raise ValueError(
            f"the adapter {folder} stands on {base!r}, which is neither a folder here nor in the "
            "local Hugging Face cache: bring it there, or correct base_model_name_or_path."
        )
    _, tensors = files.parse(files.read(weights), str(weights))
    heads = [t for n, t in tensors.items() if re.search(r"(classifier|score)(\.\w+)*\.weight$", n)]
    labels = {"num_labels": len(heads[-1])} if task == "SEQ_CLS" and heads else {}
    model, notes = _from_folder(
        found, loader=_TASKS.get(str(task)), bare_head=task in ("SEQ_CLS", "TOKEN_CLS"), **labels
    )
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot load the adapter {folder} on {found}: {reason}") from error
    own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    note = f"the adapter's parameters vary, those of its base {base} are held fixed"
    return Pretrained(model=adapted, tokenizer=folder if own else found, notes=(*notes, note))


def load_pretrained(folder: Path) -> Pretrained:
    """A Hugging Face model or a PEFT adapter from disk: no network, no code, no pickled weights."""
    if (folder / ADAPTER).is_file():
        return _with_adapter(folder)
    model, notes = _from_folder(folder)
    return Pretrained(model=model, tokenizer=folder, notes=notes)


def _from_folder(
    folder: Path, *, loader: str | None = None, bare_head: bool = False, **settings: Any
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, and what the reader of its numbers should know.

    loader: the class that loads it (default: by its architecture). bare_head: its head may be
    random, an adapter brings its own. settings: of the configuration.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a Hugging Face model: it has no config.json.")
    transformers = _quiet_transformers(folder)
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **safe, **settings)
        loader = loader or _loader_of(config)
        # Sizes that do not fit are told below, by name: transformers' own error has no names.
        model, loading = getattr(transformers, loader).from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **safe,
        )
        if bare_head:
            loading["missing_keys"] = []
        unused = _refuse_other_tensors(model, loading)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot load {folder} as a Hugging Face model: {reason}") from error
    notes = () if not unused else (f"not used by {type(model).__name__}: {_some(unused)}",)
    for note in notes:
        warnings.warn(f"{folder}: {note}", stacklevel=2)
    return model, notes


def _loader_of(config: Any) -> str:
    """The class that makes the model of a configuration."""
    architecture = (config.architectures or [""])[0]
    for end, loader in _HEADS.items():
        if architecture.endswith(end):
            return loader
    raise ValueError(
        f"its architecture {architecture!r} ends in none of {', '.join(_HEADS)}; name a "
        "function that makes the model instead (pkg.module:make_model)"
    )


# What configurations call the number of layers, and lists with an entry for each of them.
_DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
_BY_LAYER = ("layer_types", "mlp_layer_types", "attention_layers", "no_rope_layers")


def unloaded_model(folder: Path, *, layers: int | None = None) -> nn.Module:
    """The model that a folder's config.json describes, without its weights.

    layers: so many of each stack, with weights drawn at random; None: all, on the meta device.
    """
    transformers = _quiet_transformers(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        maker = getattr(transformers, _loader_of(config))
        for name in _DEPTHS if layers is not None else ():
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, min(getattr(config, name), layers))
        for name in _BY_LAYER if layers is not None else ():
            if isinstance(getattr(config, name, None), list):
                setattr(config, name, getattr(config, name)[:layers])
        dtype = getattr(config, "dtype", None) or torch.float32
        with torch.device("meta" if layers is None else "cpu"):
            model: nn.Module = maker.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read {folder}/config.json: {reason}") from error
    return model.eval()


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
    layers = {_LAYER.sub("*", key) for key in model.state_dict()}
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
