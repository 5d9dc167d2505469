"""What a package needs around its code: one version, true links, files that parse."""

from __future__ import annotations

from pathlib import Path

import pytest

import curvatlas

yaml = pytest.importorskip("yaml", reason="pyyaml comes with mkdocs")

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{curvatlas.__version__}"' in project
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == curvatlas.__version__
    recipe = (ROOT / "recipe" / "meta.yaml").read_text(encoding="utf-8")
    assert f'version = "{curvatlas.__version__}"' in recipe
    assert f"curvatlas-{curvatlas.__version__}-py3" in README


def test_every_supported_python_is_declared_and_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    for version in workflow["jobs"]["test"]["strategy"]["matrix"]["python"]:
        assert f"Python :: {version}" in project


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_workflows_and_templates_are_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "LICENSE"])
def test_the_files_that_users_look_for_are_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 200
