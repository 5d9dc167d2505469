"""MODEL and DATA on the command line: found, put together, ready to be differentiated.

A model is a Python reference, a Hugging Face folder on disk (or a PEFT adapter, or a name of the
local cache) or a name of the zoo; data are a Python reference, a name of the zoo, an array file, a
table of texts, a text file or images on disk.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset, IterableDataset, TensorDataset

from curvatlas import files, parallel, zoo
from curvatlas.budget import available_bytes, readable
from curvatlas.cli.execution import join_group, open_run
from curvatlas.cli.options import BrokenImages, Inputs
from curvatlas.cli.pretrained import cached_folder, load_pretrained
from curvatlas.cli.tables import is_table, labelled_texts, prose, read_table
from curvatlas.errors import UserCodeError, is_wrong_input
from curvatlas.operators.per_sample import sample_operations
from curvatlas.problem import Problem
from curvatlas.problem.losses import Loss, LossLike
from curvatlas.problem.objective import LABEL_NAMES, takes_labels
from curvatlas.runs import Run
from curvatlas.runs.subject import Subject
from curvatlas.scaling import as_dataset, joined_samples
from curvatlas.surveying import fingerprints_of, subject_of
from curvatlas.zoo import Dataset, from_torch, images_on_disk
from curvatlas.zoo.images import is_idx, samples_of

MOST_SAMPLES = 512
_FEWEST_SAMPLES = 8
_FORWARD_OPERATIONS = 2**30 // 3
# options of some kinds of data only: a run on others does not mention them
_OPTIONAL = ("text_column", "label_column", "image_size", "broken")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the user named, ready to be differentiated."""

    problem: Problem
    model_name: str
    data_name: str
    options: dict[str, Any]  # everything that decides the numbers
    objective: LossLike  # what Problem takes as the loss
    batches: Any
    named_model: NamedModel
    held_out: Any = None  # batches of the other part, of data that come split
    basis: str = ""  # how many of the samples, and why
    notes: tuple[str, ...] = ()  # kept with the run

    def open_run(self, command: str, output: Path | None, **more: Any) -> Run:
        """The run folder of this command on these inputs."""
        options = {"command": command, **self.options, **more}
        run = open_run(output, options, **fingerprints_of(self.problem))
        for note in self.notes:
            run.warn(note)
        return run

    def test_data(self, text: str, samples: int) -> Any:
        """Other data for the same model; of our own sets, the samples that were held out."""
        names = ("context", "tokenizer", "loss", "seed", "batch_size", *_OPTIONAL)
        how = {name: self.options.get(name) for name in names}
        found: Any = find_data(text, self.named_model, samples=samples, part="validation", **how)  # type: ignore[arg-type]
        return found.batches

    def subject(self) -> Subject:
        """Model, data, loss and gradient norm; costs one gradient."""
        return subject_of(self.problem, name=self.model_name, data=self.data_name, basis=self.basis)


def _basis(asked: int | None, limit: int, available: int | None) -> str:
    """How many samples are used and why, as a sentence; nothing where they are all there are.

    available: where a reader stops at the limit (images, tokens) it is the limit itself.
    """
    if available is None or available < limit or (available == limit and asked is not None):
        return ""
    whole = f"{limit} of {available:,} samples" if available > limit else f"{limit} samples"
    if asked is not None:
        return f"{whole} were used, as --samples says."
    if limit < MOST_SAMPLES:
        return (
            f"{whole} were used: about as many as keep a survey of this model to a minute on two "
            "cores (--samples takes more or fewer)."
        )
    return f"{whole} were used, the most unless --samples says more."


def prepare(inputs: Inputs, samples: int | None, *, keep_half: bool = False) -> Prepared:
    """Find the model and the data and put them together; processes of torchrun share them.

    samples: None takes 512, or as many as keep a survey's products a matter of minutes. keep_half:
    leave half-precision weights as they are and compute in float32; else they are converted.
    """
    device = join_group(inputs.device)
    count, size = samples or MOST_SAMPLES, inputs.batch_size
    how: Any = {
        "context": inputs.context,
        "tokenizer": inputs.tokenizer,
        "loss": inputs.loss,
        "seed": inputs.seed,
        "text_column": inputs.text_column,
        "label_column": inputs.label_column,
        "image_size": inputs.image_size,
        "broken": None if inputs.broken is BrokenImages.refuse else inputs.broken.value,
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
                keep_half=keep_half,
            )
            if samples is None:
                # On one sample: a large batch would take the memory that a small budget saves.
                one = find_data(inputs.data, model, samples=1, batch_size=1, **how)
                count = affordable_samples(model, one, most=MOST_SAMPLES)
            if samples is None and count < MOST_SAMPLES:
                size = min(size, max(count // 4, 1))  # batches show how much data scatter
            return model, find_data(inputs.data, model, samples=count, batch_size=size, **how)

    model, data = parallel.together(find)
    roles = parse_roles(inputs.role or [])
    problem = Problem(
        model.model,
        data.objective,
        data.batches,
        compute_dtype=model.compute_dtype,
        shard=True,
        roles=roles,
    )
    options = {
        "model": inputs.model,
        "data": inputs.data,
        "weights": None if inputs.weights is None else str(inputs.weights),
        "samples": count,
        "batch_size": size,
        **{key: value for key, value in how.items() if key not in _OPTIONAL or value is not None},
        "context": inputs.context or _CONTEXT,
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
        objective=data.objective,
        batches=data.batches,
        named_model=model,
        held_out=data.held_out,
        basis=_basis(samples, count, data.available),
        notes=(*(f"model: {note}" for note in model.notes), *(f"data: {n}" for n in data.notes)),
    )


def parse_roles(texts: Iterable[str]) -> dict[str, str]:
    """``GLOB=ROLE`` of the command line as the ``roles`` of a Problem."""
    pairs = [text.partition("=") for text in texts]
    for pattern, sign, role in pairs:
        if not (pattern and sign and role):
            raise ValueError(f"--role {pattern}{sign}{role}: write GLOB=ROLE, '*.net.1.weight=up'.")
    return {pattern.strip(): role.strip() for pattern, _, role in pairs}


def affordable_samples(model: NamedModel, data: NamedData, *, most: int) -> int:
    """How many samples take 3.6·10⁸ operations in a forward pass, the same on every machine.

    A product with the Hessian is six of them: a survey of 1200 products then takes 2.6·10¹²
    operations, about a minute on two cores.
    """
    problem = Problem(
        model.model,
        data.objective,
        data.batches,
        compute_dtype=model.compute_dtype,
        distributed=False,
    )
    if not problem.loss.additive:
        return most
    operations = max(sample_operations(problem), 1)
    return max(min(_FORWARD_OPERATIONS // operations, most), _FEWEST_SAMPLES)


# --- names, and the user's own Python ------------------------------------------------------------

_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_REFERENCE = re.compile(rf"({_NAME}|.*\.py):{_NAME}")


def is_reference(text: str) -> bool:
    """Whether the text has the form ``pkg.module:name`` or ``path/to/file.py:name``."""
    return _REFERENCE.fullmatch(text) is not None and not text.startswith("zoo:")


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
    """The object that ``pkg.module:name`` (the current folder's too) or ``file.py:name`` names."""
    module_name, _, path = text.rpartition(":")
    file = Path(module_name) if module_name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"there is no file {module_name} (named by {text!r}).")
    here = str(Path.cwd() if file is None else file.resolve().parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value = importlib.import_module(module_name) if file is None else _module_of(file)
    except ImportError as error:
        raise ValueError(f"cannot import {module_name!r} of {text!r}: {error}.") from error
    except Exception as error:  # whatever the user's module does when it is read
        kind = ValueError if is_wrong_input(error) else UserCodeError
        raise kind(f"reading {text!r} failed: {_told(error)}") from error
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise ValueError(f"{module_name!r} has no {path!r} (named by {text!r}).") from None
    return value


def _module_of(file: Path) -> ModuleType:
    """The module in a file, under its own name unless another module has it."""
    place = str(file.resolve())
    name = file.stem
    if getattr(sys.modules.get(name), "__file__", None) == place:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def made(text: str) -> Any:
    """What the reference names, called if it can be; an error in it says where."""
    value = resolve(text)
    if isinstance(value, nn.Module) or not callable(value):
        return value
    try:
        return value()
    except Exception as error:  # whatever the user's function does
        kind = ValueError if is_wrong_input(error) else UserCodeError
        raise kind(f"{text!r} failed: {_told(error)}") from error


def _told(error: Exception) -> str:
    """An error of the user's code with its place: the innermost frame outside libraries."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SyntaxError):
        return f"{message} ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    own = [f for f in frames if "site-packages" not in f.filename and "<" not in f.filename]
    if not frames:
        return message
    place = (own or frames)[-1]
    return f"{message} ({place.filename}, line {place.lineno}, in {place.name})"


# --- the model -----------------------------------------------------------------------------------

ZOO_MODELS = ("vit", "cifar-vit", "gpt", "benchmark-gpt", "mlp")


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model in evaluation mode with what the user called it."""

    model: nn.Module
    name: str
    folder: Path | None = None  # of a Hugging Face model: where its tokenizer is
    compute_dtype: torch.dtype | None = None  # of a Problem, where weights are in half precision
    notes: tuple[str, ...] = ()  # kept with the run


def find_model(
    text: str,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    weights: Path | None = None,
    keep_half: bool = False,
) -> NamedModel:
    """The model that ``text`` names, converted, moved, in evaluation mode.

    Half precision is nothing to compute in: such weights become float32, or stay as they are with
    ``keep_half``, and ``compute_dtype`` says what to compute in.
    """
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    name = text
    torch.manual_seed(seed)  # a factory that draws weights draws the same ones every time
    ours = zoo_name(text, ZOO_MODELS)
    if ours is not None:
        model = _zoo_model(ours, seed)
    elif is_reference(text):
        model = _from_reference(text)
    elif Path(text).is_dir():
        pretrained = load_pretrained(Path(text))
        model, folder, notes = pretrained.model, pretrained.tokenizer, pretrained.notes
        name = Path(text).resolve().name
    else:
        cached = cached_folder(text)
        if cached is None:
            raise ValueError(
                f"cannot find the model {text!r}: give mine.py:make_model, pkg.module:make_model, "
                "a Hugging Face folder on disk, a name of the local Hugging Face cache (nothing is "
                f"downloaded), or one of {', '.join(ZOO_MODELS)}."
            )
        pretrained = load_pretrained(cached)
        model, folder, notes = pretrained.model, pretrained.tokenizer, pretrained.notes
    if weights is not None:
        _load_weights(model, weights)
    half = sorted({p.dtype for p in model.parameters() if p.dtype in _HALF}, key=str)
    computed = dtype or torch.float32 if half else None
    notes += tuple(_half_note(stored, computed, keep_half) for stored in half if computed)
    model = model.to(device=_device(device)).eval()
    if not half or not keep_half:
        model = model.to(dtype=dtype or computed)
        computed = None
    return NamedModel(model=model, name=name, folder=folder, compute_dtype=computed, notes=notes)


_HALF = (torch.bfloat16, torch.float16)


def _half_note(stored: torch.dtype, computed: torch.dtype, kept: bool) -> str:
    """What half-precision weights mean for the numbers."""
    words = [str(dtype).removeprefix("torch.") for dtype in (stored, computed)]
    how = f"computed with in {words[1]} block by block" if kept else f"converted to {words[1]}"
    return (
        f"its weights are stored in {words[0]} and {how}: the numbers are those of the network "
        f"with these rounded weights (each within {torch.finfo(stored).eps / 2:.2g} of itself of "
        "what was trained), not of the weights before rounding"
    )


def _zoo_model(name: str, seed: int) -> nn.Module:
    makers: dict[str, Callable[..., nn.Module]] = {
        "vit": zoo.reference_vit,
        "cifar-vit": zoo.cifar_vit,
        "gpt": zoo.reference_gpt,
        "benchmark-gpt": zoo.benchmark_gpt,
    }
    if name == "mlp":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return zoo.MLP(zoo.MLPConfig())
    return makers[name](seed=seed)


def model_factory(text: str) -> Callable[..., nn.Module]:
    """The user's function that makes a model of options (width=, depth=)."""
    if not is_reference(text):
        raise ValueError(f"--model {text}: name a function, mine.py:make_model.")
    function = resolve(text)

    def make(**options: Any) -> nn.Module:
        try:
            model = function(**options)
        except Exception as error:  # whatever the user's function does
            kind = ValueError if is_wrong_input(error) else UserCodeError
            raise kind(f"{text!r} failed with {options}: {_told(error)}") from error
        if not isinstance(model, nn.Module):
            raise ValueError(f"{text!r} gives a {type(model).__name__}, expected an nn.Module.")
        return model

    return make


def _from_reference(text: str) -> nn.Module:
    value = made(text)
    if not isinstance(value, nn.Module):
        raise ValueError(f"{text!r} gives a {type(value).__name__}, expected an nn.Module.")
    return value


def find_factory(text: str) -> Callable[..., nn.Module]:
    """size → model, (size, seed) where it takes one: a reference, or a model of ours by width."""
    from curvatlas import zoo

    ours = zoo_name(text, ("vit", "gpt"))
    if ours is not None:
        maker: Callable[..., nn.Module] = zoo.reference_vit if ours == "vit" else zoo.reference_gpt
        return lambda width, seed: maker(d_model=width, seed=seed)
    if not is_reference(text):
        raise ValueError(
            f"cannot make models of several sizes from {text!r}: give mine.py:make_model or "
            "pkg.module:make_model, a function of the size, or vit, gpt."
        )
    factory = resolve(text)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ValueError(
            f"{text!r} is a {type(factory).__name__}: a scaling law needs a function that makes a "
            "model of the size it is called with."
        )

    @functools.wraps(factory)
    def called(*args: Any, **kwargs: Any) -> nn.Module:
        try:
            model: nn.Module = factory(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise  # the call itself: the size is not among the arguments
            raise UserCodeError(f"{text!r} failed: {_told(error)}") from error
        except Exception as error:  # whatever the user's function does
            kind = ValueError if is_wrong_input(error) else UserCodeError
            raise kind(f"{text!r} failed: {_told(error)}") from error
        return model

    return called


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: weights are read from .safetensors files only.")
    if not path.is_file():
        raise ValueError(f"{path} does not exist.")
    return files.parse(files.read(path), str(path))[1]


def _load_weights(model: nn.Module, path: Path) -> None:
    tensors = read_weights(path)
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

ZOO_DATA = ("digits", "fashion-mnist", "mnist", "cifar-10", "cifar-100", "text")
_PAIRS = (("inputs", "targets"), ("x", "y"), ("images", "labels"))


@dataclass(frozen=True, kw_only=True)
class NamedData:
    """Batches for ``Problem`` with what the user called them, and the loss that fits them."""

    batches: Any
    name: str
    loss: str
    notes: tuple[str, ...] = ()  # kept with the run
    held_out: Any = None  # batches of the other part, of data that come split
    available: int | None = None  # samples there are, where that is known

    @functools.cached_property
    def objective(self) -> LossLike:
        """What ``Problem`` takes as the loss."""
        return _referenced_loss(self.loss) if is_reference(self.loss) else self.loss


def find_data(
    text: str,
    model: NamedModel,
    *,
    samples: int,
    batch_size: int,
    context: int | None = None,
    tokenizer: str | None = None,
    loss: str = "auto",
    seed: int = 0,
    text_column: str | None = None,
    label_column: str | None = None,
    image_size: int | None = None,
    broken: Literal["refuse", "skip"] | None = None,
    part: Literal["train", "validation"] = "train",
) -> NamedData:
    """The data that ``text`` names, at most ``samples`` samples of them, in the model's dtype.

    part: of our own data sets and of images on disk.
    """
    path = Path(text)
    ours = zoo_name(text, ZOO_DATA)
    notes: list[str] = []
    if ours is not None:
        raw: Any = (
            zoo.text(context=_context(model, context, notes))
            if ours == "text"
            else _ZOO_IMAGES[ours](samples)
        )
        name = ours
    elif is_reference(text):
        raw, name = _some_samples(made(text), samples), text
    elif is_table(path) and path.exists():
        table = read_table(path)
        if _takes_labels(model):
            labelled = labelled_texts(
                table,
                _tokenizer_of(Path(tokenizer or str(model.folder))),
                getattr(model.model, "config", None),
                text_column=text_column,
                label_column=label_column,
                context=_context(model, context or _longest(model), notes),
                loss=loss,
            )
            raw, name = labelled.batch, labelled.origin
            loss = labelled.loss if loss in ("auto", "mse") else loss
            notes += labelled.notes
        else:
            words, name = prose(table, text_column), f"column {text_column} of {table.name}"
            raw = token_windows(
                words,
                path,
                model,
                context,
                tokenizer=tokenizer,
                samples=samples,
                seed=seed,
                notes=notes,
            )
    elif path.is_dir() or is_idx(path):
        raw = images_on_disk(
            path, size=image_size, broken=broken or "refuse", limit=samples, seed=seed
        )
        name = raw.name
    elif path.is_file():
        raw, name = _from_file(path, model, context, tokenizer, samples, seed, notes), path.name
    else:
        raise ValueError(
            f"cannot find the data {text!r}: give mine.py:make_data, pkg.module:make_data, an "
            ".npz, .safetensors or text file, a table (.csv, .tsv, .jsonl, a folder of datasets), "
            "a folder of images, of CIFAR's binary version or of IDX files, or one of "
            f"{', '.join(ZOO_DATA)}."
        )
    other, available = None, None
    if isinstance(raw, Dataset):
        notes += raw.notes
        if part == "train":
            other = _cut(raw.validation.batch, samples, batch_size)[0]
        raw = (raw.train if part == "train" else raw.validation).batch
    if isinstance(raw, dict) or _is_pair(raw):
        tensors = list(raw.values()) if isinstance(raw, dict) else list(raw)
        raw, count = _cut(raw, samples, batch_size)
        available = len(tensors[0])
        name = f"{count} samples of {name}"
    parameter = next(model.model.parameters(), None)
    if parameter is not None and isinstance(raw, list):
        raw = [_converted(batch, parameter.dtype, parameter.device) for batch in raw]
        other = other and [_converted(b, parameter.dtype, parameter.device) for b in other]
    if loss == "auto":
        loss = "model" if _returns_loss(model.model, raw) else _loss(raw)
    elif loss == "cross_entropy" and isinstance(raw, list):
        raw = [_with_whole_classes(batch) for batch in raw]
        other = other and [_with_whole_classes(batch) for batch in other]
    return NamedData(
        batches=raw,
        name=name,
        loss=loss,
        notes=tuple(notes),
        held_out=other,
        available=available,
    )


@dataclass(frozen=True, kw_only=True)
class SplitData:
    """Training and validation samples with the loss that fits them."""

    dataset: Dataset
    loss: str
    objective: LossLike
    notes: tuple[str, ...] = ()  # kept with the run


def find_split(text: str, model: nn.Module, *, name: str, **how: Any) -> SplitData:
    """All of the data that ``text`` names: our sets as they are split, of others a fifth is held
    out. ``model`` says how many tokens it knows and how long a window may be."""
    named = NamedModel(model=model, name=name)
    everything: Any = {"samples": 2**62, "batch_size": 2**62, **how}
    found = find_data(text, named, **everything)
    dataset = as_dataset(found.batches)
    if zoo_name(text, ZOO_DATA) is not None:
        held = find_data(text, named, part="validation", **everything)
        parts = [joined_samples(part.batches) for part in (found, held)]
        dataset = Dataset(name=text, train=parts[0], validation=parts[1], classes=dataset.classes)
    else:
        dataset = replace(dataset, name=Path(text).name)
    return SplitData(dataset=dataset, loss=found.loss, objective=found.objective, notes=found.notes)


def _takes_labels(model: NamedModel) -> bool:
    """Whether the model is a classifier (or a regression) of sequences."""
    inner = getattr(model.model, "get_base_model", lambda: model.model)()
    return model.folder is not None and "ForSequenceClassification" in type(inner).__name__


_ZOO_IMAGES: dict[str, Callable[[int | None], Dataset]] = {
    "digits": lambda _: zoo.digits(),
    "fashion-mnist": lambda _: zoo.fashion_mnist(),
    "mnist": lambda _: zoo.mnist(),
    "cifar-10": lambda limit: zoo.cifar10(limit=limit),
    "cifar-100": lambda limit: zoo.cifar100(limit=limit),
}


def find_dataset(
    text: str, *, size: int | None = None, broken: Literal["refuse", "skip"], seed: int
) -> Dataset:
    """Training and validation samples with classes, all of them, for studies that train."""
    path = Path(text)
    ours = zoo_name(text, ZOO_DATA)
    if ours == "text":
        raise ValueError("a text has no classes of samples: give images or your own data.")
    if ours is not None:
        return _ZOO_IMAGES[ours](None)
    if is_reference(text):
        raw = made(text)
    elif path.is_dir() or is_idx(path):
        return images_on_disk(path, size=size, broken=broken, seed=seed)
    elif path.suffix in (".npz", ".safetensors") and path.is_file():
        read = _read_npz(path) if path.suffix == ".npz" else files.parse(files.read(path), text)[1]
        raw = _arrays(read, path)
    else:
        raise ValueError(
            f"cannot find the data {text!r}: give mine.py:make_data, an .npz or .safetensors file, "
            f"a folder of images, or one of {', '.join(ZOO_DATA)}."
        )
    if _is_pair(raw):
        raw = TensorDataset(*raw)
    if isinstance(raw, TorchDataset):
        return from_torch(raw, name=text, seed=seed)
    if not isinstance(raw, Dataset):
        raise ValueError(
            f"{text!r} gives a {type(raw).__name__}: a study that trains needs a pair of tensors, "
            "a map-style dataset of torch or a zoo.Dataset."
        )
    return raw


def _some_samples(raw: Any, samples: int) -> Any:
    """The first samples of a map-style dataset of torch as one batch; anything else as it is."""
    if not isinstance(raw, TorchDataset) or isinstance(raw, IterableDataset):
        return raw
    return samples_of(raw, range(min(samples, len(raw)))).batch  # type: ignore[arg-type]


def _from_file(
    path: Path,
    model: NamedModel,
    context: int | None,
    tokenizer: str | None,
    samples: int,
    seed: int,
    notes: list[str],
) -> Any:
    if path.suffix == ".npz":
        return _arrays(_read_npz(path), path)
    if path.suffix == ".safetensors":
        return _arrays(files.parse(files.read(path), str(path))[1], path)
    if path.suffix.lower() in (".pkl", ".pickle", ".pt", ".pth", ".npy", ".joblib"):
        raise ValueError(f"{path} may carry code: give an .npz or .safetensors file instead.")
    if _takes_labels(model):
        raise ValueError(
            f"{model.name} classifies texts and {path} has no labels: give a table (.csv, .tsv, "
            ".jsonl or a folder of datasets) with --text-column and --label-column."
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_TEXT)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is neither .npz, .safetensors nor UTF-8 text: {error}."
        ) from error
    return token_windows(
        text, path, model, context, tokenizer=tokenizer, samples=samples, seed=seed, notes=notes
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


def _referenced_loss(text: str) -> LossLike:
    """The function or module that ``mine.py:loss`` names; a class of modules is made."""
    found = resolve(text)
    if isinstance(found, type) and issubclass(found, (nn.Module, Loss)):
        found = made(text)
    if not isinstance(found, Loss) and not callable(found):
        raise ValueError(
            f"--loss {text} names a {type(found).__name__}: name a function (outputs, targets) -> "
            "mean loss, or a loss module."
        )
    loss: LossLike = found
    return loss


def _returns_loss(model: nn.Module, raw: Any) -> bool:
    """Whether the model, given the targets of the first batch too, returns a loss of its own."""
    batch = raw[0] if isinstance(raw, list) and raw else raw
    if not isinstance(batch, (dict, tuple)) or not takes_labels(model, batch):
        return False
    try:
        Problem(model, "model", [batch], distributed=False)
    except ValueError:
        return False
    return True


def _loss(raw: Any) -> str:
    """Whole-number targets are classes; real ones are regressed."""
    batch = next(iter(raw), None) if isinstance(raw, Iterable) else None
    if isinstance(batch, dict):
        targets = next((batch[name] for name in LABEL_NAMES if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        targets = batch[1]
    else:
        targets = raw[1] if isinstance(raw, tuple) and len(raw) == 2 else None
    if not isinstance(targets, Tensor) or not targets.is_floating_point():
        return "cross_entropy"
    if targets.ndim == 1 and _are_whole(targets) and bool((targets != targets[0]).any()):
        raise ValueError(
            "the targets are whole numbers stored as real ones, classes or values to regress: say "
            "which with --loss cross_entropy or --loss mse."
        )
    return "mse"


def _are_whole(targets: Tensor) -> bool:
    return bool((targets == targets.round()).all() and (targets >= 0).all())


def _with_whole_classes(batch: Any) -> Any:
    """Classes that are stored as real numbers, as the whole ones they are."""
    if isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
        return {**batch, "labels": _with_whole_classes((None, batch["labels"]))[1]}
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        inputs, targets = batch
        if targets.is_floating_point() and targets.ndim == 1 and _are_whole(targets):
            return inputs, targets.long()
    return batch


# --- a text file as windows of tokens ------------------------------------------------------------

_CONTEXT = 64  # tokens a window, unless told
_MOST_TEXT = 64 * 2**20  # bytes read: far more than any curvature estimate uses
# Any of these makes a folder's tokenizer; without one its text is read as bytes.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_MASKED_SHARE = 0.15  # of the tokens a masked language model has to guess, as in BERT


def token_windows(
    text: str,
    path: Path,
    model: NamedModel,
    context: int | None,
    *,
    tokenizer: str | None,
    samples: int,
    seed: int,
    notes: list[str],
) -> Any:
    """(inputs, targets) one token apart, or the mapping a Hugging Face model takes."""
    if getattr(getattr(model.model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{model.name} maps one text to another and {path} holds one: give an .npz or "
            ".safetensors file with input_ids and labels."
        )
    own = model.folder is not None and any(
        (model.folder / name).is_file() for name in _TOKENIZER_FILES
    )
    kind = tokenizer or (str(model.folder) if own else "bytes")
    context = _context(model, context, notes)
    mask: int | None = None
    if kind == "bytes":
        tokens = torch.tensor(list(text.encode("utf-8")), dtype=torch.long)
        vocabulary = getattr(getattr(model.model, "config", None), "vocab_size", 0)
        mask = vocabulary - 1 if vocabulary > 256 else None  # a token that is no byte
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
    inner = getattr(model.model, "get_base_model", lambda: model.model)()
    if type(inner).__name__.endswith("ForMaskedLM"):
        return _masked(windows, mask, seed)
    return {"input_ids": windows, "labels": windows.clone()}


def _windows(path: Path, tokens: Tensor, length: int) -> Tensor:
    if len(tokens) < length:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, a window takes {length}: lower --context."
        )
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a folder on disk."""
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder}: give bytes, characters or a folder on disk.")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise ValueError("a tokenizer needs: pip install 'curvatlas[huggingface]'.") from error
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} has no readable tokenizer: {reason}") from error


def _with_tokenizer(folder: Path, text: str, wanted: int) -> tuple[Tensor, int | None]:
    tokenizer = _tokenizer_of(folder)
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


def _context(model: NamedModel, asked: int | None, notes: list[str]) -> int:
    """Tokens a window: what was asked for, or as many as the model has positions for."""
    longest = _longest(model)
    if asked is not None and asked > longest:
        raise ValueError(f"--context {asked}: {model.name} has {longest} positions, no more.")
    if asked is None and longest < _CONTEXT:
        notes.append(f"windows of {longest} tokens: the model has no more positions")
    return min(asked or _CONTEXT, longest)


_LENGTHS = ("context", "max_position_embeddings", "block_size", "max_seq_len", "context_length")


def _longest_stated(model: NamedModel) -> int:
    config = getattr(model.model, "config", None)
    limits = [getattr(config, key, None) for key in _LENGTHS]
    return min([limit for limit in limits if isinstance(limit, int)], default=10**9)


def _longest(model: NamedModel) -> int:
    """Tokens that the model has positions for."""
    # RoBERTa's tables keep the first rows for padding, and its configuration counts them.
    kept = [
        table.num_embeddings - table.padding_idx - 1
        for name, table in model.model.named_modules()
        if isinstance(table, nn.Embedding) and table.padding_idx and "position" in name
    ]
    return min(_longest_stated(model), *kept, 10**9)


def _check_vocabulary(model: NamedModel, tokens: Tensor, kind: str) -> None:
    config = getattr(model.model, "config", None)
    for key in ("vocabulary", "vocab_size"):
        size = getattr(config, key, None)
        if isinstance(size, int) and len(tokens) and int(tokens.max()) >= size:
            raise ValueError(
                f"the text has token {int(tokens.max())} ({kind}), the model knows {size}: "
                "choose another --tokenizer."
            )
