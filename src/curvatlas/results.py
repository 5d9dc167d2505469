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
import tempfile
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to one ``.safetensors`` file, atomically; returns the path written."""
        tensors: dict[str, Tensor] = {}
        packed = _pack(self, "", tensors)
        header = {"curvatlas": json.dumps({"schema": _SCHEMA, "result": packed})}
        target = Path(path)
        if target.suffix != ".safetensors":
            target = target.with_name(target.name + ".safetensors")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".partial")
        os.close(handle)
        try:
            save_file(tensors, temporary, metadata=header)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
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
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    try:
        content = json.loads(metadata["curvatlas"])
        schema = content["schema"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a curvatlas result: no valid header.") from error
    if schema != _SCHEMA:
        raise ValueError(
            f"{path} has schema {schema!r}, this version reads {_SCHEMA}: upgrade curvatlas."
        )
    try:
        result = _unpack(content["result"], tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is a damaged curvatlas result: {error!r}.") from error
    if not isinstance(result, Result):
        raise ValueError(f"{path} does not hold a result at its top level.")
    return result


def _fields(result: Result) -> dict[str, Any]:
    return {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
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
        return _registry[value["@result"]](
            **{k: _unpack(v, tensors) for k, v in value["fields"].items()}
        )
    if "@tensor" in value:
        return tensors[value["@tensor"]]
    if "@tuple" in value:
        return tuple(_unpack(v, tensors) for v in value["@tuple"])
    return {k: _unpack(v, tensors) for k, v in value["@dict"].items()}


def same(left: Result, right: Result) -> bool:
    """Whether two results are equal field by field, tensors compared bit for bit."""
    if left.kind != right.kind:
        return False
    a, b = {}, {}  # type: dict[str, Tensor], dict[str, Tensor]
    equal_text = json.dumps(_pack(left, "", a)) == json.dumps(_pack(right, "", b))
    return equal_text and all(torch.equal(a[k], b[k]) for k in a)
