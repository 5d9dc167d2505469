"""Results survive a round trip, and a file that is not one of ours is refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import pickle
import random
import struct
import types
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from curvatlas import files, results
from curvatlas.results import Number
from run_samples import SampleEstimate, estimate


def _file(header: dict[str, Any], body: bytes) -> bytearray:
    text = json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text)) + text + body)


def _write(path: Path, header: dict[str, Any], body: bytes) -> Path:
    path.write_bytes(_file(header, body))
    return path


def _metadata(result: Any, *, schema: int = 2) -> dict[str, str]:
    return {"curvatlas": json.dumps({"schema": schema, "result": result})}


def _forge(path: Path, result: Any, tensors: dict[str, torch.Tensor]) -> None:
    """A file as an attacker would write it, who also knows how the checksum is made."""
    files.write(path, tensors, _metadata(result))


def _sample(**changes: Any) -> dict[str, Any]:
    fields = {
        "value": 1.0,
        "interval": {"@tuple": [0.0, 2.0]},
        "values": {"@tensor": "x"},
        "notes": {"@dict": {}},
        "inner": None,
    }
    return {"@result": "SampleEstimate", "fields": {**fields, **changes}}


def test_a_result_comes_back_bit_for_bit(tmp_path: Path) -> None:
    result = estimate(3, nested=True)
    assert results.same(results.load(result.save(tmp_path / "r")), result)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_every_dtype_and_special_value_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, 3.0]).to(dtype)
    if dtype.is_floating_point:
        values = torch.cat([values, torch.tensor([float("nan"), float("inf"), -0.0]).to(dtype)])
    result = SampleEstimate(
        value=float("nan"), interval=(float("-inf"), 1.0), values=values, notes={}
    )
    back = results.load(result.save(tmp_path / "r"))
    assert results.same(back, result)
    assert not results.same(
        back, SampleEstimate(value=1.0, interval=(0.0, 1.0), values=values, notes={})
    )


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (2, 0, 3), (1,)])
def test_empty_and_scalar_tensors_come_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    result = SampleEstimate(value=1, interval=(0, 1), values=torch.ones(shape), notes={})
    back = results.load(result.save(tmp_path / "r"))
    assert isinstance(back, SampleEstimate)
    assert back.values.shape == shape


def test_scalars_of_numpy_are_stored_as_numbers(tmp_path: Path) -> None:
    numbers = {
        "near": np.float64(1) < np.float64(2),
        "count": np.int64(3),
        "share": np.float32(0.5),
    }
    result = dataclasses.replace(estimate(), notes=numbers)
    loaded = results.load(result.save(tmp_path / "numbers"))
    assert isinstance(loaded, SampleEstimate)
    assert loaded.notes == {"near": True, "count": 3, "share": 0.5}
    assert [type(value) for value in loaded.notes.values()] == [bool, int, float]
    assert json.loads(json.dumps(result.to_dict()))["notes"] == loaded.notes


def test_the_folder_of_a_run_is_told_from_a_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder; curvatlas\.runs\.load"):
        results.load(tmp_path)


def test_loaded_tensors_do_not_change_with_the_file(tmp_path: Path) -> None:
    path = estimate(1).save(tmp_path / "r")
    back = results.load(path)
    path.write_bytes(b"")
    assert results.same(back, estimate(1))


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    path = tmp_path / "r.safetensors"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="safetensors"):
        results.load(path)
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="safetensors"):
        results.load(path)
    assert not (tmp_path / "executed").exists()


def _tensor(shape: list[Any], offsets: list[Any], dtype: str = "F64") -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("entry", "size"),
    [
        (_tensor([2**40], [0, 2**43]), 8),  # more than the file
        (_tensor([2**40], [0, 8]), 8),  # more than its offsets
        (_tensor([2**62, 4], [0, 0]), 0),  # overflows 64 bits to zero
        (_tensor([2**40, 0], [0, 0]), 0),  # no element, a million million rows
        (_tensor([-1, -1], [0, 8]), 8),
        (_tensor([1.0], [0, 8]), 8),
        (_tensor([1], [8, 16]), 16),  # leaves a hole
        (_tensor([1], [0, 8]), 16),  # leaves bytes undeclared
        (_tensor([1], [0, 8], "PICKLE"), 8),
        (_tensor([1], [0, 8, 16]), 8),
        ({"x": {"dtype": "F64", "shape": [1]}}, 8),
        ({"x": [1]}, 8),
        ({**_tensor([1], [0, 8]), "y": _tensor([1], [0, 8])["x"]}, 8),  # overlap
    ],
)
def test_shapes_that_the_bytes_do_not_hold_are_refused(
    tmp_path: Path, entry: dict[str, Any], size: int
) -> None:
    path = _write(tmp_path / "r.safetensors", entry, bytes(size))
    with pytest.raises(ValueError, match=r"declares a tensor|nobody declared"):
        results.load(path)


@pytest.mark.parametrize("length", [0, 7, 8, 2**63, 2**64 - 1, 10**9])
def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "r.safetensors"
    path.write_bytes(struct.pack("<Q", length)[: max(length, 8) if length == 7 else 8])
    with pytest.raises(ValueError, match="header"):
        results.load(path)


@pytest.mark.parametrize(
    "packed",
    [
        {"@result": "NoSuchKind", "fields": {}},
        {"@result": "__import__", "fields": {}},
        {"@result": ["SampleEstimate"], "fields": {}},
        {"@result": "SampleEstimate", "fields": {"value": 1}},
        {"@result": "SampleEstimate"},
        {"@tensor": "/missing"},
        {"@dict": {"a": 1}},
        [1, 2],
        None,
        "text",
    ],
)
def test_unknown_kinds_and_wrong_fields_are_refused(tmp_path: Path, packed: Any) -> None:
    path = tmp_path / "r.safetensors"
    _forge(path, packed, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match=r"r\.safetensors"):
        results.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("value", "big"),
        ("value", True),
        ("interval", {"@tuple": [1.0]}),
        ("interval", {"@tuple": [1.0, "x"]}),
        ("values", [1.0]),
        ("notes", 3),
        ("inner", {"@tuple": []}),
    ],
)
def test_fields_of_the_wrong_type_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "r.safetensors"
    _forge(path, _sample(), {"x": torch.ones(1)})
    assert isinstance(results.load(path), SampleEstimate)
    _forge(path, _sample(**{field: value}), {"x": torch.ones(1)})
    with pytest.raises(ValueError, match=field):
        results.load(path)


def test_a_file_from_before_a_field_was_added_is_read_with_its_default(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    old = _sample()
    del old["fields"]["inner"]  # it came later
    _forge(path, old, {"x": torch.ones(1)})
    loaded = results.load(path)
    assert isinstance(loaded, SampleEstimate)
    assert (loaded.value, loaded.inner) == (1.0, None)
    _forge(path, _sample(invented=1.0), {"x": torch.ones(1)})
    with pytest.raises(ValueError, match="invented"):
        results.load(path)


# --- checksums ------------------------------------------------------------------------------------


def test_a_file_of_schema_1_has_no_checksum_and_is_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    save_file({"x": torch.ones(1)}, path, metadata=_metadata(_sample(), schema=1))
    with pytest.warns(UserWarning, match="carries no checksum"):
        loaded = results.load(path)
    loaded.save(path)
    assert results.same(results.load(path), loaded)


def test_a_file_whose_checksum_was_removed_or_does_not_belong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    save_file({"x": torch.ones(1)}, path, metadata=_metadata(_sample()))
    with pytest.raises(ValueError, match="carries no checksum"):
        results.load(path)
    files.write(path, {"x": torch.ones(1)}, _metadata(_sample(), schema=1))
    with pytest.raises(ValueError, match="checksum it should not have"):
        results.load(path)
    metadata, tensors = files.parse(files.read(estimate(1).save(path)), "r")
    save_file({k: v.clone() for k, v in tensors.items()}, path, metadata=metadata)
    assert results.same(results.load(path), estimate(1))  # other bytes, the same content
    changed = {**tensors, "/values": tensors["/values"] + 1}
    save_file(changed, path, metadata=metadata)
    with pytest.raises(ValueError, match="does not match its checksum"):
        results.load(path)


def test_every_flipped_bit_is_refused_or_harmless(tmp_path: Path) -> None:
    """Every byte of the file, with every bit of it flipped in turn."""
    result = estimate(3)
    path = result.save(tmp_path / "r")
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        try:
            assert results.same(results.parse(damaged, "r"), result)
        except ValueError:
            refused += 1
    assert refused > 0.9 * len(content)


def test_tensors_of_one_name_do_not_hide_each_other(tmp_path: Path) -> None:
    notes = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    result = SampleEstimate(value=1.0, interval=(0.0, 1.0), values=torch.ones(1), notes=notes)
    back = results.load(result.save(tmp_path / "r"))
    assert isinstance(back, SampleEstimate)
    assert torch.equal(back.notes["a/b"], torch.zeros(2))
    assert torch.equal(back.notes["a"]["b"], torch.ones(2))


@pytest.mark.parametrize(
    "notes",
    [
        {1: "a", "1": "b"},
        {"half a pair": "\ud800"},
        {"deep": functools.reduce(lambda inner, _: [inner], range(200), [])},
        {"long": 10**70},
        {"complex": torch.ones(1, dtype=torch.complex128)},
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, notes: dict[Any, Any]) -> None:
    result = SampleEstimate(value=1.0, interval=(0.0, 1.0), values=torch.ones(1), notes=notes)
    with pytest.raises((ValueError, TypeError)):
        result.save(tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_the_previous_file_stays_when_asked_for(tmp_path: Path) -> None:
    path = estimate(1).save(tmp_path / "r", keep_previous=True)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    estimate(2).save(path, keep_previous=True)
    estimate(3).save(path, keep_previous=True)
    assert results.same(results.load(path), estimate(3))
    assert results.same(results.load(tmp_path / "r.safetensors.previous"), estimate(2))
    assert len(list(tmp_path.iterdir())) == 2


# --- a small file makes no large one of the memory ------------------------------------------------


def test_a_tensor_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    for notes in ({"@tensor": "x"}, [{"@tensor": "y"}] * 2):
        packed = _sample(notes={"@dict": {"n": notes}})
        _forge(path, packed, {"x": torch.ones(1), "y": torch.ones(1)})
        with pytest.raises(ValueError, match="named twice"):
            results.load(path)
    _forge(path, _sample(), {"x": torch.ones(1), "y": torch.ones(1)})
    with pytest.raises(ValueError, match="nothing names 'y'"):
        results.load(path)


def test_many_empty_tensors_do_not_become_millions_of_lists(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    names = [f"t{i}" for i in range(300)]
    packed = _sample(notes={"@dict": {name: {"@tensor": name} for name in names}})
    tensors = {name: torch.ones(10_000, 0) for name in names}
    _forge(path, packed, {"x": torch.ones(1), **tensors})
    with pytest.raises(ValueError, match="huge shape"):
        results.load(path)
    empty = SampleEstimate(
        value=1.0, interval=(0.0, 1.0), values=torch.ones(10_000, 0), notes={"n": torch.ones(0, 9)}
    )
    shown = results.brief(empty, largest=4096)
    assert shown["values"] == {"shape": [10_000, 0], "dtype": "float32"}
    assert shown["notes"] == {"n": []}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 101 + "]" * 101, "nested"),
        ("[" * 10**6, "nested"),
        ('{"a":' * 10**5, "nested"),
        ("[" + "0," * 2_000_000 + "0]", "more than 2,000,000 values"),
        ("[" + "[]," * 1_999_999 + "[]]", "more than 2,000,000 values"),
        ('{"a": 1, "a": 2}', "twice"),
        ("1" * 65, "digits"),
        ("-" + "9" * 10**6, "digits"),
        ("NaN", "no number"),
        ("[-Infinity]", "no number"),
        (r'"\ud800"', "no valid text"),
        (r'"a \udc00\ud800"', "no valid text"),
        ("\ud800", "JSON"),
        (b'"\xff"', "no valid text"),
        (b"", "JSON"),
        ('"' + "\\" * 10**6, "JSON"),
        ("\ufeff1", "JSON"),
        ("1 2", "JSON"),
        ("[1,]", "JSON"),
        ("]" * 10**6 + "[" * 10**6, "JSON"),
    ],
)
def test_json_that_is_not_ours_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^here is .*{reason}"):
        files.parse_json(text, "here")


def test_json_of_ours_is_read_whatever_its_strings_hold() -> None:
    value = {
        "brackets [[[{{{,,,": ["[" * 500, '"' * 7, "\\" * 9, '\\"[', "a\nb", "é😀"],
        "numbers": [0, -1, 10**63, 1.5, 1e300, True, None],
        "nested": functools.reduce(lambda inner, _: [inner], range(90), {"end": []}),
    }
    assert files.parse_json(json.dumps(value), "here") == value
    assert files.parse_json(json.dumps(value, ensure_ascii=False).encode(), "here") == value
    assert math.isnan(files.parse_json("NaN", "here", allow_nan=True))


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    save_file({}, path, metadata={"curvatlas": json.dumps({"schema": 99, "result": None})})
    with pytest.raises(ValueError, match=r"schema 99.*upgrade"):
        results.load(path)


def test_a_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    deep = '{"schema": 1, "result": ' + "[" * 100_000 + "]" * 100_000 + "}"
    save_file({}, path, metadata={"curvatlas": deep})
    with pytest.raises(ValueError, match="nested"):
        results.load(path)


def test_a_failed_save_leaves_the_old_file_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = estimate(1).save(tmp_path / "r")

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        estimate(2).save(path)
    monkeypatch.undo()
    assert results.same(results.load(path), estimate(1))
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]


def test_a_result_reads_like_a_mapping_too() -> None:
    result = estimate(1)
    assert dict(result) == {key: getattr(result, key) for key in result.keys()}  # noqa: SIM118
    assert "value" in result
    with pytest.raises(KeyError, match="has no 'nothing'"):
        result["nothing"]


def test_no_two_results_share_a_name() -> None:
    """A file names its class: with two of one name it would be read as the one imported last."""
    results.import_result_modules()
    found: dict[str, set[str]] = {}
    waiting = [results.Result]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            waiting.append(cls)
            if cls.__module__.startswith("curvatlas."):
                found.setdefault(cls.kind, set()).add(cls.__module__)
    assert {kind: modules for kind, modules in found.items() if len(modules) > 1} == {}
    assert len(found) > 50


# What a forger may put where something else is expected.
_HOSTILE: list[Any] = [
    None,
    True,
    -1,
    2**63,
    1e308,
    "",
    "x",
    "@result",
    [],
    [[]],
    {},
    {"": {}},
    {"@dict": {}},
    {"@dict": [1]},
    {"@tuple": []},
    {"@tuple": 5},
    {"@tuple": {"a": 1}},
    {"@tensor": "/values"},
    {"@tensor": []},
    {"@tensor": None},
    {"@result": []},
    {"@result": "SampleEstimate"},
    {"@result": "SampleEstimate", "fields": []},
    {"@result": "Result", "fields": {}},
]


def _places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """(parent, key) of everything in a JSON value."""
    if parent is not None:
        yield parent, key
    if isinstance(value, (dict, list)):
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield from _places(value[inner], value, inner)


@pytest.mark.parametrize("seed", range(8))
def test_a_forged_structure_is_refused_or_read_and_nothing_else(seed: int) -> None:
    """Header and tensor table changed at random, the checksum right: only ValueError comes out."""
    rng = random.Random(seed)
    tensors: dict[str, torch.Tensor] = {}
    packed = results._pack(estimate(3, nested=True), "", tensors)
    body = b"".join(files.raw_bytes(tensor) for tensor in tensors.values())
    table: dict[str, Any] = {
        name: {"dtype": "F64", "shape": [3, 4], "data_offsets": [96 * i, 96 * (i + 1)]}
        for i, name in enumerate(tensors)
    }
    outcomes: set[str] = set()
    for _ in range(150):
        parts = copy.deepcopy([{"schema": 2, "result": packed}, table])
        parent, key = rng.choice(list(_places(parts)))
        parent[key] = copy.deepcopy(rng.choice(_HOSTILE))
        texts = {"curvatlas": json.dumps(parts[0])}
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            read = files.parse(_file({"__metadata__": texts, **parts[1]}, body), "f")[1]
            texts[files.CHECKSUM] = files.checksum(texts, read)
        header = {"__metadata__": texts, **(parts[1] if isinstance(parts[1], dict) else {"x": 1})}
        try:
            results.parse(_file(header, body), "f")
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def _every_result() -> list[type[results.Result]]:
    results.import_result_modules()
    kinds = [cls for cls in results._registry.values() if cls.__module__.startswith("curvatlas.")]
    return sorted(kinds, key=lambda cls: cls.kind)


# What a forger writes where numbers, tensors and collections are expected: right in type.
_ODD: dict[str, dict[str, Any]] = {
    "nothing": {"number": 0, "tensor": torch.zeros(0), "length": 0, "some": None},
    "not a number": {"number": math.nan, "tensor": torch.full((2,), math.nan), "length": 1},
    "infinite": {"number": -math.inf, "tensor": torch.tensor(math.inf), "length": 2},
    "other axes": {"number": -1, "tensor": torch.zeros(2, 0, 3), "length": 3},
}


def _odd(hint: Any, odd: dict[str, Any]) -> Any:
    """A value of the annotated type, as odd as it can be."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in inner and "some" in odd:
            return None
        return _odd(inner[0], odd)
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(_odd(one, odd) for one in inner)
    if origin in (tuple, list):
        return origin(_odd(inner[0], odd) for _ in range(odd["length"]))
    if origin is dict:
        return {f"key {i}": _odd(inner[1], odd) for i in range(odd["length"])}
    if hint is Any or hint is type(None):
        return None
    if origin is typing.Literal:
        return inner[0]
    if hint is torch.Tensor:
        return odd["tensor"].clone()
    if hint is float:
        return odd["number"]
    if hint is int:
        return int(odd["number"]) if math.isfinite(odd["number"]) else -(10**30)
    if hint is bool:
        return True
    if isinstance(hint, type) and issubclass(hint, results.Result):
        chosen = hint if dataclasses.is_dataclass(hint) else results._registry["RunFault"]
        hints = typing.get_type_hints(chosen)
        fields = {f.name: _odd(hints[f.name], odd) for f in dataclasses.fields(chosen) if f.init}
        return chosen(**fields)
    return "" if hint is str else None


@pytest.mark.parametrize("odd", _ODD)
def test_every_forged_result_prints(odd: str, tmp_path: Path) -> None:
    """Signed, each field of its type, and no estimate: str() answers and never raises."""
    kinds, told = _every_result(), 0
    for cls in kinds:
        made = _odd(cls, _ODD[odd])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = results.load(made.save(tmp_path / cls.kind))
            text = str(loaded)
        assert loaded.kind == cls.kind
        told += "fields that do not belong together" in text
        assert "belong together" not in text or "\n" not in text
    assert len(kinds) > 50
    assert told < len(kinds)  # most print what they hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithTerms(results.Result):
    name: str
    terms: dict[str, float]


@pytest.mark.parametrize("value", [None, "2.5", [1.0], True])
def test_a_mapping_of_something_else_than_numbers_is_refused(value: Any) -> None:
    fields = {"name": "x", "terms": {"a": 1.0, "b": value}}
    assert results.wrongly_typed(_WithTerms, fields) == "terms"
    assert results.wrongly_typed(_WithTerms, {**fields, "terms": {"a": 1.0}}) is None


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Number(483.5, 11.6, 955.4), "480 ± 470"),
        (Number(8.724, -6.2, 23.7), "9 ± 15"),
        (Number(226.098, 215.1, 237.1), "226 ± 11"),
        (Number(226.098, 215.1, 237.1, data=(201.0, 251.0)), "226 ± 11, data ± 25"),
        (Number(-185.848, -193.9, -177.7), "-185.8 ± 8.1"),
        (Number(34.2615481, 34.2615481 - 3e-9, 34.2615481 + 3e-9), "34.2615 ± 3e-09"),
        (Number(12.0, 11.0, 40.0), "12 [11, 40]"),
        (Number(10.83794, 10.83793, 10.83795, exact=True), "10.8379 (exact)"),
        (Number(0.128, 0.128, 0.128), "0.128 (exact)"),
        (Number(3.0, 3.0, math.inf), "≥ 3"),
        (Number(5.0, -math.inf, math.inf), "5 [-inf, inf]"),
        (Number(math.nan, math.nan, math.nan), "unknown"),
        (Number(1e-9, 0.9e-9, 1.1e-9), "1e-09 ± 1e-10"),
        (Number(123456.0, 120000.0, 127000.0), "123500 ± 3500"),
    ],
)
def test_a_number_prints_with_its_error(number: Number, text: str) -> None:
    assert str(number) == text


def test_shares_print_in_percent_with_their_error() -> None:
    assert f"{Number(0.497, 0.031, 0.963):%}" == "50% ± 47%"
    assert f"{Number(0.128, 0.128, 0.128):%}" == "12.8% (exact)"
    with pytest.raises(ValueError, match="prints as such or as '%'"):
        format(Number(1.0, 0.0, 2.0), ".3f")


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-1e5, 1e5, allow_subnormal=False),
    st.floats(1e-6, 1e4),
    st.floats(0.0, 1.0),
)
def test_what_a_number_prints_is_the_number_within_a_tenth_of_its_error(
    value: float, half: float, lean: float
) -> None:
    number = Number(value, value - half * (1 + lean), value + half * (1 - lean / 2))
    shown = float(str(number).replace("[", "").split()[0])
    assert abs(shown - value) <= 0.1 * number.error + 1e-5 * abs(value)
