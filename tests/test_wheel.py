"""The wheel: complete, and usable where the sources are not."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def smoke() -> Any:
    path = ROOT / "scripts" / "wheel_smoke.py"
    spec = importlib.util.spec_from_file_location("wheel_smoke", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_wheel_is_complete_and_works_from_an_empty_folder(smoke: Any) -> None:
    assert smoke.check() == []


def test_a_wheel_without_its_data_is_noticed(smoke: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "curvatlas-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("curvatlas/__init__.py", "")
        file.writestr("tests/test_x.py", "")
    found = smoke.missing(wheel)
    for name in (
        "curvatlas/py.typed", "curvatlas/report/templates/page.html.j2",
        "curvatlas/report/templates/style.css", "curvatlas/zoo/data/digits.npz",
        "curvatlas/zoo/data/moby_dick.txt.gz", "(not ours: tests/test_x.py)",
    ):  # fmt: skip
        assert name in found
