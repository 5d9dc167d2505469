"""``curvatlas analyze`` on Hugging Face folders: offline, no code of the folder, no pickles."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface

_TEXT = "the whale and the sea and the ship and the captain of the ship \n" * 40
_QUICK = ["--samples", "3", "--batch-size", "2", "--context", "8", "--dtype", "float64",
          "--eigenvalues", "2", "--skip", "map", "--skip", "density", "--skip", "propagation",
          "--skip", "trace"]  # fmt: skip


def _tokenizer(folder: Path) -> int:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "[MASK]", *sorted(set(_TEXT.split()))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)
    return len(words)


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    size = _tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=16, n_embd=8, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder, safe_serialization=True)
    (tmp_path / "sea.txt").write_text(_TEXT)
    return folder


def _run(
    arguments: list[str], cwd: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, str, str]:  # fmt: skip
    from curvatlas import cli

    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["curvatlas", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    code: Any = stopped.value.code
    return code, captured.out, captured.err


def test_a_causal_model_is_analysed_on_text_with_its_own_tokenizer(
    gpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = _run(
        ["analyze", "tiny", "sea.txt", "--json", *_QUICK], gpt.parent, capsys, monkeypatch
    )
    assert code == 0, err
    results = json.loads(out)["results"]
    assert results["model.subject"]["targets"] == 3 * 7  # eight tokens predict seven
    roles = {role["role"] for role in results["model.subject"]["roles"]}
    assert {"query", "key", "value"} <= roles  # the fused projection is told apart
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt)
    ids = torch.tensor(tokenizer(_TEXT, add_special_tokens=False)["input_ids"][:24]).reshape(3, 8)
    logits = model(ids).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert results["model.subject"]["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_a_masked_model_guesses_masked_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bert"
    size = _tokenizer(folder)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder, safe_serialization=True)
    (tmp_path / "sea.txt").write_text(_TEXT)
    code, out, err = _run(
        ["analyze", "bert", "sea.txt", "--json", *_QUICK], tmp_path, capsys, monkeypatch
    )
    assert code == 0, err
    targets = json.loads(out)["results"]["model.subject"]["targets"]
    assert 3 <= targets < 24  # only the masked ones count


def test_a_model_from_text_to_text_takes_pairs_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t5"
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    (tmp_path / "sea.txt").write_text(_TEXT)
    code, _, err = _run(["analyze", "t5", "sea.txt", *_QUICK], tmp_path, capsys, monkeypatch)
    assert code == 2
    assert "input_ids and labels" in err
    pairs = {"input_ids": torch.randint(3, 20, (3, 6)), "labels": torch.randint(3, 20, (3, 4))}
    np.savez(tmp_path / "pairs.npz", **{name: value.numpy() for name, value in pairs.items()})
    code, out, err = _run(
        ["analyze", "t5", "pairs.npz", "--json", *_QUICK], tmp_path, capsys, monkeypatch
    )
    assert code == 0, err
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).double().eval()
    loss = json.loads(out)["results"]["model.subject"]["loss"]
    assert loss == pytest.approx(float(model(**pairs).loss.detach()), rel=1e-6)


def test_pickled_weights_are_refused(
    gpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt)
    torch.save(model.state_dict(), gpt / "pytorch_model.bin")
    (gpt / "model.safetensors").unlink()
    code, _, err = _run(["analyze", "tiny", "sea.txt", *_QUICK], gpt.parent, capsys, monkeypatch)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "safetensors" in err


def test_code_in_the_folder_is_not_run(
    gpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = gpt.parent / "executed"
    config = json.loads((gpt / "config.json").read_text())
    config["model_type"] = "mystery"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (gpt / "config.json").write_text(json.dumps(config))
    (gpt / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    code, _, err = _run(["analyze", "tiny", "sea.txt", *_QUICK], gpt.parent, capsys, monkeypatch)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not marker.exists()


def test_a_name_that_is_ours_and_a_folder_is_not_guessed(
    gpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt.rename(gpt.parent / "gpt")
    code, _, err = _run(["analyze", "gpt", "sea.txt", *_QUICK], gpt.parent, capsys, monkeypatch)
    assert code == 2
    assert "zoo:gpt or ./gpt" in err


def test_an_unknown_tokenizer_is_refused(
    gpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = _run(
        ["analyze", "tiny", "sea.txt", "--tokenizer", "nowhere", *_QUICK],
        gpt.parent, capsys, monkeypatch,
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert "nowhere" in err
