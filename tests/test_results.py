"""Results survive a round trip, and a file that is not one of ours is refused."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from curvatlas import archive, results
from run_samples import SampleEstimate, estimate


def _write(path: Path, header: dict[str, Any], body: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def _metadata(result: Any) -> dict[str, str]:
    return {"curvatlas": json.dumps({"schema": 1, "result": result})}


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
    save_file({"x": torch.ones(1)}, path, metadata=_metadata(packed))
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
    fields = {
        "value": 1.0, "interval": {"@tuple": [0.0, 2.0]}, "values": {"@tensor": "x"},
        "notes": {"@dict": {}}, "inner": None,
    }  # fmt: skip
    path = tmp_path / "r.safetensors"
    good = _metadata({"@result": "SampleEstimate", "fields": fields})
    save_file({"x": torch.ones(1)}, path, metadata=good)
    assert isinstance(results.load(path), SampleEstimate)
    bad = _metadata({"@result": "SampleEstimate", "fields": {**fields, field: value}})
    save_file({"x": torch.ones(1)}, path, metadata=bad)
    with pytest.raises(ValueError, match=field):
        results.load(path)


def test_a_file_from_before_a_field_was_added_is_read_with_its_default(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    fields = {"value": 1.0, "interval": {"@tuple": [0.0, 2.0]}, "values": {"@tensor": "x"},
              "notes": {"@dict": {}}}  # fmt: skip
    old = _metadata({"@result": "SampleEstimate", "fields": fields})  # "inner" came later
    save_file({"x": torch.ones(1)}, path, metadata=old)
    loaded = results.load(path)
    assert isinstance(loaded, SampleEstimate)
    assert (loaded.value, loaded.inner) == (1.0, None)
    newer = _metadata({"@result": "SampleEstimate", "fields": {**fields, "invented": 1.0}})
    save_file({"x": torch.ones(1)}, path, metadata=newer)
    with pytest.raises(ValueError, match="invented"):
        results.load(path)


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
    archive.import_result_modules()
    found: dict[str, set[str]] = {}
    waiting = [results.Result]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            waiting.append(cls)
            if cls.__module__.startswith("curvatlas."):
                found.setdefault(cls.kind, set()).add(cls.__module__)
    assert {kind: modules for kind, modules in found.items() if len(modules) > 1} == {}
    assert len(found) > 50
