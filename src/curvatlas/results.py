"""Frozen results that save, load and print themselves.

A result is a frozen keyword-only dataclass that derives from ``Result``. Its fields are JSON values
(numbers, strings, booleans, None, tuples, lists, mappings with string keys), tensors, or other
results. One ``.safetensors`` file holds it all: tensors as tensors, everything else as JSON in the
file's header, and a checksum of both. Loading reads numbers and text; it never runs code.

Schema 2 requires the checksum. Files of schema 1 have none: they are read, with a warning unless
the manifest of a run vouches for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import pkgutil
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from curvatlas import display, files
from curvatlas.files import parse_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

R = TypeVar("R", bound="Result")
Interval = tuple[float, float]  # low and high, at 95 % unless said otherwise
P = ParamSpec("P")
T = TypeVar("T")

_SCHEMA = 2
_HEADER = "curvatlas"  # entry of the metadata that holds everything but the tensors
# What a function raises on values of the right type that it was not written for.
BY_CONTENT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_LONGEST_REASON = 120  # letters of an error inside a line
_registry: dict[str, type[Result]] = {}
# Packages whose modules define results; a module that needs an absent extra is passed over.
_RESULT_PACKAGES = (
    "analysis",
    "article",
    "closed_form",
    "operators",
    "planning",
    "runs",
    "scaling",
    "spectra",
    "studies",
    "theory",
    "training",
    "zoo",
)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number with its error, as every line of ours prints it.

    ``483 ± 472``; ``12 [11, 40]`` where the interval is lopsided; ``10.8379 (exact)`` where there
    is no error but rounding; ``≥ 3`` where nothing limits it from above. ``f"{number:%}"`` prints
    shares. data: the interval over samples of the data, where it was measured.
    """

    value: float
    low: float
    high: float
    data: Interval | None = None
    exact: bool = False  # a closed form, or the matrix itself

    @property
    def error(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return self._text("")

    def __format__(self, how: str) -> str:
        if how not in ("", "%"):
            raise ValueError(f"a Number prints as such or as '%', not as {how!r}.")
        return self._text(how)

    def _text(self, unit: str) -> str:
        scale = 100.0 if unit else 1.0
        value, low, high = (scale * end for end in (self.value, self.low, self.high))
        data = ""
        if self.data is not None:
            data = f", data ± {_digits(scale * (self.data[1] - self.data[0]) / 2, 2)}{unit}"
        half = (high - low) / 2
        if math.isnan(value):
            return "unknown"
        if self.exact or half == 0:
            return f"{_digits(value, _MOST_DIGITS)}{unit} (exact){data}"
        if not math.isfinite(half):
            if low == value:
                return f"≥ {_digits(value, 3)}{unit}{data}"
            ends = (_digits(end, 3) + unit for end in (low, high))
            return f"{_digits(value, 3)}{unit} [{', '.join(ends)}]{data}"
        decimals = 1 - math.floor(math.log10(float(f"{half:.2g}")))  # two digits of the error
        if abs((high - value) - (value - low)) > _LOPSIDED * half:
            middle, *ends_ = (_rounded(end, decimals) + unit for end in (value, low, high))
            return f"{middle} [{', '.join(ends_)}]{data}"
        return f"{_rounded(value, decimals)}{unit} ± {_digits(half, 2)}{unit}{data}"


_LOPSIDED = 0.3  # of the half-width: from where on both ends are told
_MOST_DIGITS = 6  # of a value; what is known better than that shows in its error


def _digits(number: float, count: int) -> str:
    """So many significant digits, without an exponent where none is needed: 470, not 4.7e+02."""
    text = f"{number:.{count}g}"
    return f"{float(text):.0f}" if "e+" in text and abs(number) < 1e6 else text


def _rounded(number: float, decimals: int) -> str:
    """So many decimals, but no more than six digits."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    place = math.floor(math.log10(abs(number)))
    decimals = min(decimals, _MOST_DIGITS - 1 - place)
    if decimals > 0 and place >= -4:
        return f"{number:.{decimals}f}"
    return _digits(number, max(1, place + 1 + decimals))


class Result:
    """Base of every result: registers the class so that ``load`` finds it by name."""

    kind: ClassVar[str] = "Result"
    # Properties that ``result[name]`` and ``dict(result)`` know beside the fields.
    also: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = cls.__name__
        _registry[cls.__name__] = cls
        if "__str__" in vars(cls):
            setattr(cls, "__str__", _always_printed(vars(cls)["__str__"]))  # noqa: B010
        if "__repr__" not in vars(cls):  # a dataclass would write every number of every tensor
            setattr(cls, "__repr__", Result.__repr__)  # noqa: B010

    def to_dict(self) -> dict[str, Any]:
        """The whole result as JSON-ready values; tensors become nested lists."""
        return {
            "kind": self.kind,
            **{k: _plain(v) for k, v in {**_fields(self), **self._derived()}.items()},
        }

    def _derived(self) -> dict[str, Any]:
        """What follows from the fields and pages and programs read beside them."""
        return {}

    def keys(self) -> tuple[str, ...]:
        """Names of the fields, so that ``dict(result)`` and ``result[name]`` work too."""
        return (*_fields(self), *self.also)

    def __getitem__(self, key: Any) -> Any:
        """The field ``key``: a result reads like a mapping as well."""
        if key in self.keys():
            return getattr(self, key)
        raise KeyError(f"{self.kind} has no {key!r}: it has {', '.join(self.keys())}.")

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def get(self, key: str, default: Any = None) -> Any:
        """The field ``key``, or ``default`` where there is none."""
        return self[key] if key in self.keys() else default

    def __repr__(self) -> str:
        """The first lines of what ``print`` shows."""
        if type(self).__str__ is not object.__str__:
            return display.shortened(str(self))
        fields = (f"{name}={display.in_a_word(v)}" for name, v in _fields(self).items())
        return display.shortened(f"{self.kind}({', '.join(fields)})")

    def _repr_html_(self) -> str:
        """What a notebook shows: the short text, a small table and the picture."""
        picture: Figure | str | None = None
        if display.drawing_of(type(self)) is not None:
            try:
                picture = self.plot()
            except BY_CONTENT as error:
                picture = f"there is no picture of it: {error}"
        return display.as_html(self.kind, repr(self), self.table(), picture)

    def plot(self, *choice: Any, ax: Any = None, **options: Any) -> Figure:
        """The picture of this result: returned, shown by a notebook, never shown unasked.

        ax: axes of yours to draw on; several panels take their place. The other options are those
        of the picture (``Atlas``: view, quantity, part; closed forms: part; ``CurvatureFlow``:
        quantity). ``curvatlas.figures.draw`` draws several results of one kind into one picture.
        """
        draw = display.drawing_of(type(self))
        if draw is None:
            raise TypeError(f"{self.kind} has no picture: print it, or take .to_dataframe().")
        with display.drawing_on(ax):
            figure = draw(self, *choice, **options)
        return figure if ax is None else ax.figure

    def table(self) -> display.Table:
        """The numbers: a row an entry (eigenvalue, snapshot, block, …), or one row of them all."""
        return display.Table.of(self._rows())

    def to_dataframe(self) -> Any:
        """The table as a ``pandas.DataFrame``."""
        return self.table().to_dataframe()

    def _rows(self) -> list[dict[str, Any]]:
        """Rows of the table: parts that are results, columns of numbers, or one row."""
        fields = _fields(self)
        parts = [
            value
            for value in fields.values()
            if isinstance(value, (tuple, list)) and value and isinstance(value[0], Result)
        ]
        if parts:
            return [display.scalars_of(_fields(part)) for part in max(parts, key=len)]
        columns = display.columns_of(fields)
        if columns:
            return [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
        return self._one_row()

    def _one_row(self) -> list[dict[str, Any]]:
        return [display.scalars_of(_fields(self))]

    def save(self, path: str | os.PathLike[str], *, keep_previous: bool = False) -> Path:
        """Write the result to one ``.safetensors`` file, atomically; returns the path written.

        keep_previous: the file that stood there stays as ``<name>.previous``. A result that could
        not be read back is refused before anything is written.
        """
        tensors, text = pack(self)
        target = Path(path)
        if target.suffix != ".safetensors":
            target = target.with_name(target.name + ".safetensors")
        files.write(target, tensors, {_HEADER: text}, keep_previous=keep_previous)
        return target

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read a result of this class (or of a subclass) back from ``save``."""
        result = load(path)
        if not isinstance(result, cls):
            raise TypeError(f"{path} holds a {result.kind}, expected a {cls.kind}.")
        return result


class Rows:
    """What makes a result the sequence of its ``rows`` too: a mapping a batch, step, module, …"""

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        """A field by name, or a row by number."""
        return super().__getitem__(key) if isinstance(key, str) else self.rows[key]  # type: ignore[misc]


def block_rows(matrix: Tensor, names: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A row a pair of blocks of a square matrix: Frobenius norm and largest entry."""
    rows, lengths = [], list(sizes)
    for row, block in zip(names, torch.split(matrix.detach().abs(), lengths), strict=True):
        for column, part in zip(names, torch.split(block, lengths, dim=1), strict=True):
            numbers = {"norm": float(part.norm()), "largest": float(part.max())}
            rows.append({"row": row, "column": column, **numbers})
    return rows


def also_named(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The function with a second keyword for some arguments: the article's word → ours.

    ``@also_named(dataloader="data")``: a call as the article prints it, ``f(dataloader=…)``, is
    ``f(data=…)``.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            for other, name in names.items():
                if other in kwargs:
                    if name in kwargs:
                        raise TypeError(
                            f"{function.__name__} takes {name} or {other}, which mean the same."
                        )
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return called

    return decorated


def load(path: str | os.PathLike[str]) -> Result:
    """Read any saved result; raises ValueError on a file that is damaged or not one of ours."""
    if Path(path).is_dir():
        raise ValueError(
            f"{path} is a folder; curvatlas.runs.load(folder) reads a run, load a single result."
        )
    result, schema = _parse(files.read(Path(path)), str(path))
    if schema < _SCHEMA:
        warnings.warn(
            f"{path} was written by an earlier version and carries no checksum: damage would not "
            "be noticed. Save it again to give it one.",
            stacklevel=2,
        )
    return result


def parse(content: bytearray, where: str) -> Result:
    """The result in the bytes of a ``.safetensors`` file; ``where`` names it in errors."""
    return _parse(content, where)[0]


def _parse(content: bytearray, where: str) -> tuple[Result, int]:
    """The result and the schema of its file."""
    metadata, tensors = files.parse(content, where)
    signed = files.CHECKSUM in metadata
    if signed:
        metadata = files.verified(metadata, tensors, where)
    if _HEADER not in metadata:
        raise ValueError(f"{where} is not a curvatlas result: no valid header.")
    result, schema = _read_header(metadata[_HEADER], tensors, where)
    if signed != (schema >= 2):
        state = "has a checksum it should not have" if signed else "carries no checksum"
        raise ValueError(f"{where} {state}: it was edited or is not ours.")
    return result, schema


def _read_header(text: str, tensors: dict[str, Tensor], where: str) -> tuple[Result, int]:
    header = parse_json(text, f"the header of {where}", allow_nan=True)
    if not isinstance(header, dict) or set(header) != {"schema", "result"}:
        raise ValueError(f"{where} is not a curvatlas result: no valid header.")
    schema = header["schema"]
    if type(schema) is not int or not 1 <= schema <= _SCHEMA:
        raise ValueError(
            f"{where} has schema {schema!r}, this version reads up to {_SCHEMA}: upgrade curvatlas."
        )
    unused = dict(tensors)
    try:
        result = _unpack(header["result"], unused)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is a damaged curvatlas result: {error}.") from error
    if not isinstance(result, Result):
        raise ValueError(f"{where} does not hold a result at its top level.")
    if unused:
        raise ValueError(f"{where} is a damaged curvatlas result: nothing names {min(unused)!r}.")
    return result, schema


def pack(result: Result) -> tuple[dict[str, Tensor], str]:
    """A result as tensors and a text that ``unpack`` reads; refused if it could not be."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps({"schema": _SCHEMA, "result": _pack(result, "", tensors)})
    _read_header(text, tensors, f"this {result.kind}")
    return tensors, text


def unpack(tensors: dict[str, Tensor], text: str, where: str) -> Result:
    """The inverse of ``pack``."""
    return _read_header(text, tensors, where)[0]


def _always_printed(text_of: Callable[[Any], str]) -> Callable[[Any], str]:
    """``__str__`` that says so where the fields do not belong together, instead of raising.

    A file can be signed and its fields of the right types, and yet no estimate ever has an empty
    list of eigenvalues or NaN for a number of samples.
    """

    @functools.wraps(text_of)
    def printed(result: Result) -> str:
        try:
            return text_of(result)
        except BY_CONTENT as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            return (
                f"{result.kind} with fields that do not belong together "
                f"({type(error).__name__}: {reason}): compute it again, or read it by .to_dict()."
            )

    return printed


def _fields(result: Result) -> dict[str, Any]:
    return {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}  # type: ignore[arg-type]


def brief(result: Result, *, largest: int) -> dict[str, Any]:
    """``to_dict`` with tensors of more than ``largest`` numbers replaced by their shape."""
    content = {**_fields(result), **result._derived()}
    return {"kind": result.kind, **{k: _plain(v, largest) for k, v in content.items()}}


def _plain(value: Any, largest: int | None = None) -> Any:
    if isinstance(value, Result):
        return value.to_dict() if largest is None else brief(value, largest=largest)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        # also an empty tensor of shape (n, 0) becomes n lists
        length = max(accumulate(value.shape, mul), default=1)
        if largest is not None and length > largest:
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
    if isinstance(value, np.generic):
        value = value.item()  # what a comparison of NumPy's numbers gives is no bool
    if isinstance(value, Result):
        fields = {k: _pack(v, f"{where}/{k}", tensors) for k, v in _fields(value).items()}
        return {"@result": value.kind, "fields": fields}
    if isinstance(value, Tensor):
        while where in tensors:  # {"a/b": …, "a": {"b": …}} come to the same place
            where += "'"
        tensors[where] = value.detach().cpu().contiguous()
        return {"@tensor": where}
    if isinstance(value, tuple):
        return {"@tuple": [_pack(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, dict):
        if len({str(k) for k in value}) != len(value):
            raise TypeError(f"{where}: keys of a mapping are texts, two of these read the same.")
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
    if "@tensor" in value:  # once each: a small file cannot name a large tensor a million times
        if value["@tensor"] not in tensors:
            raise ValueError(f"tensor {value['@tensor']!r} is missing or named twice")
        return tensors.pop(value["@tensor"])
    if "@tuple" in value:
        return tuple(_unpack(v, tensors) for v in value["@tuple"])
    return {k: _unpack(v, tensors) for k, v in value["@dict"].items()}


def _class_of(kind: Any) -> type[Result]:
    """The registered class; our own modules are imported first when the name is not yet known."""
    if isinstance(kind, str) and kind not in _registry:
        import_result_modules()
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
    wrong = wrongly_typed(cls, fields)
    if wrong is not None:
        raise ValueError(f"field {wrong!r} of its {cls.kind} has the wrong type")


def import_result_modules() -> None:
    """Import every module of the package that may define results (our own code only)."""
    for package_name in _RESULT_PACKAGES:
        with contextlib.suppress(ImportError):
            package = importlib.import_module(f"curvatlas.{package_name}")
            paths = getattr(package, "__path__", [])  # none of a single module
            for module in pkgutil.walk_packages(paths, f"{package.__name__}."):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)


def wrongly_typed(cls: type, fields: dict[str, Any]) -> str | None:
    """The first field whose value does not fit its annotation; None when all do.

    Annotations that cannot be resolved at run time are not checked.
    """
    hints = _hints(cls)
    for name, value in fields.items():
        if name in hints and not _fits(value, hints[name]):
            return name
    return None


@functools.cache  # a file may hold thousands of results of one class
def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        return {}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is typing.Literal:
        return value in arguments
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (tuple, list):  # either may stand for the other: JSON knows only one of them
        if not isinstance(value, (tuple, list)):
            return False
        if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, arguments[1]) for v in value.values())
    if isinstance(origin, type):
        return isinstance(value, origin)
    return isinstance(value, hint) if isinstance(hint, type) else True


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
