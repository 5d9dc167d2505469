"""MODEL and DATA on the command line: found, put together, ready to be differentiated.

A model is a Python reference, a Hugging Face folder on disk or a name of the zoo; data are a Python
reference, a name of the zoo, an array file or a text file.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvatlas import files, parallel
from curvatlas.budget import available_bytes, readable
from curvatlas.cli.execution import join_group, open_run
from curvatlas.cli.options import Inputs
from curvatlas.problem import Problem
from curvatlas.runs import Run
from curvatlas.runs.subject import Subject
from curvatlas.surveying import fingerprints_of, subject_of

MOST_SAMPLES = 512
_FEWEST_SAMPLES = 8
_FORWARD_OPERATIONS = 2**30


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the user named, ready to be differentiated."""

    problem: Problem
    model_name: str
    data_name: str
    options: dict[str, Any]  # everything that decides the numbers
    notes: tuple[str, ...] = ()  # kept with the run

    def open_run(self, command: str, output: Path | None, **more: Any) -> Run:
        """The run folder of this command on these inputs."""
        options = {"command": command, **self.options, **more}
        run = open_run(output, options, **fingerprints_of(self.problem))
        for note in self.notes:
            run.warn(f"model: {note}")
        return run

    def subject(self) -> Subject:
        """Model, data, loss and gradient norm; costs one gradient."""
        return subject_of(self.problem, name=self.model_name, data=self.data_name)


def prepare(inputs: Inputs, samples: int | None) -> Prepared:
    """Find the model and the data and put them together; processes of torchrun share them.

    samples: None takes 512, or as many as keep a survey's products a matter of minutes.
    """
    device = join_group(inputs.device)
    count, size = samples or MOST_SAMPLES, inputs.batch_size
    how: Any = {
        "context": inputs.context,
        "tokenizer": inputs.tokenizer,
        "loss": inputs.loss.value,
        "seed": inputs.seed,
    }

    def find() -> tuple[NamedModel, NamedData]:
        nonlocal count, size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries that load models
            model = find_model(
                inputs.model,
                dtype=parse_dtype(inputs.dtype),
                device=device,
                seed=inputs.seed,
                weights=inputs.weights,
            )
            if samples is None:
                # On one sample: a large batch would take the memory that a small budget saves.
                one = find_data(inputs.data, model, samples=1, batch_size=1, **how)
                count = affordable_samples(model.model, one, most=MOST_SAMPLES)
            if samples is None and count < MOST_SAMPLES:
                size = min(size, max(count // 4, 1))  # batches show how much data scatter
            return model, find_data(inputs.data, model, samples=count, batch_size=size, **how)

    model, data = parallel.together(find)
    roles = parse_roles(inputs.role or [])
    problem = Problem(model.model, data.loss, data.batches, shard=True, roles=roles)
    options = {
        "model": inputs.model,
        "data": inputs.data,
        "weights": None if inputs.weights is None else str(inputs.weights),
        "samples": count,
        "batch_size": size,
        **how,
        "loss": data.loss,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": device,
        **({"roles": roles} if roles else {}),
    }
    return Prepared(
        problem=problem,
        model_name=model.name,
        data_name=data.name,
        options=options,
        notes=model.notes,
    )


def parse_roles(texts: Iterable[str]) -> dict[str, str]:
    """``GLOB=ROLE`` of the command line as the ``roles`` of a Problem."""
    pairs = [text.partition("=") for text in texts]
    for pattern, sign, role in pairs:
        if not (pattern and sign and role):
            raise ValueError(f"--role {pattern}{sign}{role}: write GLOB=ROLE, '*.net.1.weight=up'.")
    return {pattern.strip(): role.strip() for pattern, _, role in pairs}


def affordable_samples(model: Any, data: NamedData, *, most: int) -> int:
    """How many samples take 2³⁰ operations in a forward pass, a fixed number on every machine.

    A product with the Hessian is six of them: a survey of 1200 products then takes 8·10¹²
    operations, two or three minutes on two cores.
    """
    from torch.utils.flop_counter import FlopCounterMode

    problem = Problem(model, data.loss, data.batches, distributed=False)
    if not problem.loss.additive:
        return most
    sample = next(problem.batches()).part(0, 1, problem.loss.count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        problem.with_batches([sample]).value()
    operations = max(int(counter.get_total_flops()), 1)
    return max(min(_FORWARD_OPERATIONS // operations, most), _FEWEST_SAMPLES)


# --- names, and the user's own Python ------------------------------------------------------------

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(text: str) -> bool:
    """Whether the text has the form ``pkg.module:name``."""
    return _REFERENCE.fullmatch(text) is not None


def zoo_name(text: str, names: tuple[str, ...]) -> str | None:
    """The name of something of ours, or None; ``zoo:name`` says so beyond doubt."""
    prefixed = text.startswith("zoo:")
    name = text.removeprefix("zoo:")
    if name not in names:
        if prefixed:
            raise ValueError(f"the zoo has no {name!r}: it has {', '.join(names)}.")
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


# --- the model -----------------------------------------------------------------------------------

_MOST_NAMES = 6  # of tensors in a message
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a layer in a name
ZOO_MODELS = ("vit", "gpt", "benchmark-gpt", "mlp")
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
    ours = zoo_name(text, ZOO_MODELS)
    if ours is not None:
        model = _zoo_model(ours, seed)
    elif is_reference(text):
        model = _from_reference(text)
    elif Path(text).is_dir():
        folder = Path(text)
        model, notes = _from_folder(folder)
    else:
        raise ValueError(
            f"cannot find the model {text!r}: give pkg.module:make_model, a Hugging Face folder "
            f"on disk, or one of {', '.join(ZOO_MODELS)}."
        )
    if weights is not None:
        _load_weights(model, weights)
    model = model.to(device=_device(device), dtype=dtype).eval()
    name = text if folder is None else folder.name
    return NamedModel(model=model, name=name, folder=folder, notes=notes)


def _zoo_model(name: str, seed: int) -> nn.Module:
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


# --- the data ------------------------------------------------------------------------------------

ZOO_DATA = ("digits", "fashion-mnist", "mnist", "text")
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
    ours = zoo_name(text, ZOO_DATA)
    if ours is not None:
        raw: Any = _zoo_data(ours, model, context)
        name = ours
    elif is_reference(text):
        raw, name = resolve(text), text
        raw = raw() if callable(raw) else raw
    elif path.is_file():
        raw, name = _from_file(path, model, context, tokenizer, samples, seed), path.name
    else:
        raise ValueError(
            f"cannot find the data {text!r}: give pkg.module:make_data, an .npz, .safetensors or "
            f"text file, or one of {', '.join(ZOO_DATA)}."
        )
    if isinstance(raw, dict) or _is_pair(raw):
        raw, count = _cut(raw, samples, batch_size)
        name = f"{count} samples of {name}"
    parameter = next(model.model.parameters(), None)
    if parameter is not None and isinstance(raw, list):
        raw = [_converted(batch, parameter.dtype, parameter.device) for batch in raw]
    return NamedData(batches=raw, name=name, loss=_loss(raw) if loss == "auto" else loss)


def _zoo_data(name: str, model: NamedModel, context: int) -> Any:
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


# --- a text file as windows of tokens ------------------------------------------------------------

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
