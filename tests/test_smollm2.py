"""The study of SmolLM2 on a tiny model of its kind: it ends, goes on, and becomes a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from script_loading import ROOT, load

transformers = pytest.importorskip("transformers")


def tiny(count: int, length: int) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=12, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    return model, torch.randint(0, 23, (count,)).view(-1, length)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    example = load(ROOT / "examples" / "smollm2.py")
    monkeypatch.setattr(example, "load_model_and_text", tiny)
    options = ["--output", str(tmp_path / "run"), "--tokens", "24", "--length", "8"]
    monkeypatch.setattr(sys, "argv", ["smollm2.py", *options, "--budget", "1GB", "--threads", "1"])
    return example


def test_an_interrupted_study_goes_on_and_ends_as_a_page(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(study.ca, "spectral_density", stop)
        with pytest.raises(KeyboardInterrupt):
            study.main()
    early = {path.name for path in (tmp_path / "run" / "results").iterdir()}
    assert "model.total.trace.json" in early
    study.main()
    assert not (tmp_path / "run" / "vectors").exists()
    assert (tmp_path / "run" / "report.html").exists()
    found = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    trace = found["model.total.trace"]  # of a random model: known to 10 %, or said not to be
    reach = (trace["interval"][1] - trace["interval"][0]) / 2
    assert trace["converged"] == (reach <= 0.1 * abs(trace["value"]))
    text = load(ROOT / "scripts" / "smollm2_page.py").render(found, None)
    assert "| **whole model** |" in text
    assert "## Attention sinks" in text


def test_the_kept_page_is_that_of_the_kept_numbers() -> None:
    script = load(ROOT / "scripts" / "smollm2_page.py")
    found = json.loads(script.SOURCE.read_text(encoding="utf-8"))
    cost = json.loads(script.COST.read_text(encoding="utf-8"))
    expected = script.render(found, cost)
    assert script.PAGE.read_text(encoding="utf-8") == expected, (
        "run: python scripts/smollm2_page.py"
    )
