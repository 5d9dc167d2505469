"""Frozen results that save, load and print themselves.

A result is a frozen keyword-only dataclass that derives from ``Result``. Its fields are JSON values
(numbers, strings, booleans, None, tuples, lists, mappings with string keys), tensors, or other
results. One ``.safetensors`` file holds it all: tensors as tensors, everything else as JSON in the
file's header. Loading reads numbers and text; it never runs code.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from curvatlas import archive
from curvatlas.files import parse_json, replacing

R = TypeVar("R", bound="Result")

_SCHEMA = 1
_registry: dict[str, type[Result]] = {}


class Result:
    """Base of every result: registers the class so that ``load`` finds it by name."""

    kind: ClassVar[str] = "Result"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = cls.__name__
        _registry[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        """The whole result as JSON-ready values; tensors become nested lists."""
        return {"kind": self.kind, **{k: _plain(v) for k, v in _fields(self).items()}}

    def keys(self) -> tuple[str, ...]:
        """Names of the fields, so that ``dict(result)`` and ``result[name]`` work too."""
        return tuple(_fields(self))

    def __getitem__(self, key: str) -> Any:
        """The field ``key``: a result reads like a mapping as well."""
        if key in self.keys():
            return getattr(self, key)
        raise KeyError(f"{self.kind} has no {key!r}: it has {', '.join(self.keys())}.")

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to one ``.safetensors`` file, atomically; returns the path written."""
        tensors: dict[str, Tensor] = {}
        packed = _pack(self, "", tensors)
        header = {"curvatlas": json.dumps({"schema": _SCHEMA, "result": packed})}
        target = Path(path)
        if target.suffix != ".safetensors":
            target = target.with_name(target.name + ".safetensors")
        with replacing(target) as temporary:
            save_file(tensors, temporary, metadata=header)
        return target

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read a result of this class (or of a subclass) back from ``save``."""
        result = load(path)
        if not isinstance(result, cls):
            raise TypeError(f"{path} holds a {result.kind}, expected a {cls.kind}.")
        return result


def load(path: str | os.PathLike[str]) -> Result:
    """Read any saved result; raises ValueError on a file that is not one of ours."""
    return parse(archive.read(Path(path)), str(path))


def parse(content: bytearray, where: str) -> Result:
    """The result in the bytes of a ``.safetensors`` file; ``where`` names it in errors."""
    metadata, tensors = archive.parse(content, where)
    try:
        header = parse_json(metadata["curvatlas"], f"the header of {where}")
        schema = header["schema"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a curvatlas result: no valid header.") from error
    if schema != _SCHEMA:
        raise ValueError(
            f"{where} has schema {schema!r}, this version reads {_SCHEMA}: upgrade curvatlas."
        )
    try:
        result = _unpack(header["result"], tensors)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is a damaged curvatlas result: {error}.") from error
    if not isinstance(result, Result):
        raise ValueError(f"{where} does not hold a result at its top level.")
    return result


def _fields(result: Result) -> dict[str, Any]:
    return {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}  # type: ignore[arg-type]


def brief(result: Result, *, largest: int) -> dict[str, Any]:
    """``to_dict`` with tensors of more than ``largest`` numbers replaced by their shape."""
    return {"kind": result.kind, **{k: _plain(v, largest) for k, v in _fields(result).items()}}


def _plain(value: Any, largest: int | None = None) -> Any:
    if isinstance(value, Result):
        return value.to_dict() if largest is None else brief(value, largest=largest)
    if isinstance(value, Tensor):
        if largest is not None and value.numel() > largest:
            return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(k): _plain(v, largest) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, largest) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no inf or nan; a string is honest and loads everywhere
    return value


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Result):
        fields = {k: _pack(v, f"{where}/{k}", tensors) for k, v in _fields(value).items()}
        return {"@result": value.kind, "fields": fields}
    if isinstance(value, Tensor):
        tensors[where] = value.detach().cpu().contiguous().clone()
        return {"@tensor": where}
    if isinstance(value, tuple):
        return {"@tuple": [_pack(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return {"@dict": {str(k): _pack(v, f"{where}/{k}", tensors) for k, v in value.items()}}
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    raise TypeError(f"{where}: a result cannot hold a {type(value).__name__}.")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "@result" in value:
        cls = _class_of(value["@result"])
        fields = {k: _unpack(v, tensors) for k, v in value["fields"].items()}
        _check_fields(cls, fields)
        return cls(**fields)
    if "@tensor" in value:
        return tensors[value["@tensor"]]
    if "@tuple" in value:
        return tuple(_unpack(v, tensors) for v in value["@tuple"])
    return {k: _unpack(v, tensors) for k, v in value["@dict"].items()}


def _class_of(kind: Any) -> type[Result]:
    """The registered class; our own modules are imported first when the name is not yet known."""
    if isinstance(kind, str) and kind not in _registry:
        archive.import_result_modules()
    if not isinstance(kind, str) or kind not in _registry:
        raise ValueError(f"it holds a {kind!r}, which this version of curvatlas does not know")
    return _registry[kind]


def _check_fields(cls: type[Result], fields: dict[str, Any]) -> None:
    declared = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    # A file of an earlier version lacks what was added since: that has a default then.
    absent = {
        name
        for name, field in declared.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    } - set(fields)
    different = ", ".join(sorted((set(fields) - set(declared)) | absent))
    if different:
        raise ValueError(f"the fields of its {cls.kind} are not ours: {different}")
    wrong = archive.wrongly_typed(cls, fields)
    if wrong is not None:
        raise ValueError(f"field {wrong!r} of its {cls.kind} has the wrong type")


def same(left: Result, right: Result) -> bool:
    """Whether two results are equal field by field, tensors compared bit for bit."""
    if left.kind != right.kind:
        return False
    a, b = {}, {}  # type: dict[str, Tensor], dict[str, Tensor]
    equal_text = json.dumps(_pack(left, "", a)) == json.dumps(_pack(right, "", b))
    return equal_text and all(_same_bits(a[k], b[k]) for k in a)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # as bytes: a NaN equals itself, and 0.0 differs from -0.0
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
