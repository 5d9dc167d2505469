"""``curvatlas analyze`` on Hugging Face folders: offline, no code of the folder, no pickles."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from curvatlas.cli.inputs import find_model

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


@pytest.mark.parametrize("command", ["analyze", "landscape"])
def test_a_folder_in_half_precision_is_computed_with_in_float32_and_says_what_that_means(
    command: str, gpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = transformers.AutoModelForCausalLM.from_pretrained(gpt).to(torch.bfloat16)
    stored.save_pretrained(gpt)
    quick = ["--samples", "3", "--batch-size", "2", "--context", "8"]
    more = ["--eigenvalues", "2", "--skip", "density", "--products", "12"]
    if command == "landscape":
        more = ["--steps", "2", "--orders", "5", "--spectra", "0"]
    code, out, err = _run(
        [command, "tiny", "sea.txt", "--json", *quick, *more], gpt.parent, capsys, monkeypatch
    )
    assert code == 0, err
    answer = json.loads(out)
    how = "computed with in float32 block by block" if command == "analyze" else "converted"
    assert any(f"stored in bfloat16 and {how}" in said for said in answer["warnings"])
    if command == "landscape":
        return
    subject = answer["results"]["model.subject"]
    assert subject["dtype"] == "float32"
    assert "tangent" in subject["engine"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt)
    ids = torch.tensor(tokenizer(_TEXT, add_special_tokens=False)["input_ids"][:24]).reshape(3, 8)
    logits = stored.float()(ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert subject["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_folder_without_a_tokenizer_reads_bytes(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any
    if kind == "causal":
        config = transformers.GPT2Config(
            vocab_size=256, n_embd=8, n_layer=1, n_head=2, n_positions=16,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            vocab_size=257, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=16,
        )  # fmt: skip
        model = transformers.BertForMaskedLM(config)
    model.save_pretrained(tmp_path / "bare", safe_serialization=True)
    (tmp_path / "sea.txt").write_text(_TEXT)
    code, out, err = _run(
        ["analyze", "bare", "sea.txt", "--json", *_QUICK], tmp_path, capsys, monkeypatch
    )
    assert code == 0, err
    subject = json.loads(out)["results"]["model.subject"]
    if kind == "masked":
        assert 3 <= subject["targets"] < 24
        return
    ids = torch.tensor(list(_TEXT.encode())[:24]).reshape(3, 8)
    logits = model.double().eval()(ids).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert subject["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)


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


_SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def _edit_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("transformer.h.0.attn.c_attn.weight"), "lacks .*h.0.attn.c_attn.weight"),
        (lambda t: t.pop("transformer.h.0.ln_1.bias"), "lacks .*h.0.ln_1.bias"),
        (lambda t: t.pop("transformer.wte.weight"), "lacks .*wte.weight"),  # also the tied head's
        (lambda t: t.clear() or t.update(a=torch.ones(1)), "lacks .* and 11 more"),
        (
            lambda t: t.update({"transformer.h.1.ln_1.bias": torch.ones(8)}),
            "holds transformer.h.1.ln_1.bias, which GPT2LMHeadModel .* does not use",
        ),
        (lambda t: t.update({"lm_head.bias": torch.ones(16)}), "holds lm_head.bias"),
        (
            lambda t: t.update({"transformer.ln_f.weight": torch.ones(9)}),
            "transformer.ln_f.weight have other sizes than its config.json",
        ),
    ],
)
def test_a_folder_whose_tensors_are_not_the_models_is_refused_by_name(
    gpt: Path,
    change: Callable[[dict[str, Any]], Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _edit_tensors(gpt, change)
    code, out, err = _run(["analyze", "tiny", "sea.txt", *_QUICK], gpt.parent, capsys, monkeypatch)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert re.search(words, err), err
    assert sorted(p.name for p in gpt.parent.iterdir()) == ["sea.txt", "tiny"]  # no run was begun


def test_what_another_head_left_in_the_folder_is_noted_and_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bert"
    sizes = {**_SIZES, "vocab_size": _tokenizer(folder)}
    both = transformers.BertForPreTraining(transformers.BertConfig(**sizes))  # two heads
    both.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    stored["architectures"] = ["BertForMaskedLM"]
    (folder / "config.json").write_text(json.dumps(stored))
    (tmp_path / "sea.txt").write_text(_TEXT)
    with pytest.warns(UserWarning, match="not used by BertForMaskedLM: bert.pooler.dense.bias"):
        code, out, err = _run(
            ["analyze", "bert", "sea.txt", "--json", *_QUICK], tmp_path, capsys, monkeypatch
        )
    assert code == 0, err
    (note,) = (w for w in json.loads(out)["warnings"] if w.startswith("model:"))
    assert "cls.seq_relationship.weight" in note
    with pytest.warns(UserWarning, match="not used"):
        loaded = find_model(str(folder)).model
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, both.state_dict()[key]), key


def test_a_head_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**_SIZES)).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"classifier\.bias, classifier\.weight .*train the head"):
        find_model(str(tmp_path))


_BART = {
    "vocab_size": 20,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
}
_SAVED = {  # what transformers stores once or not at all differs from family to family
    "GPT2LMHeadModel": {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "LlamaForCausalLM": {**_SIZES, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "Qwen2ForCausalLM": {**_SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "OPTForCausalLM": {**_SIZES, "ffn_dim": 16, "word_embed_proj_dim": 8},
    "BertForMaskedLM": _SIZES,
    "RobertaForMaskedLM": _SIZES,
    "BertForSequenceClassification": _SIZES,
    "DistilBertForTokenClassification": {"vocab_size": 20, "dim": 8, "n_layers": 1, "n_heads": 2},
    "ViTForImageClassification": {**_SIZES, "image_size": 8, "patch_size": 4},
    "T5ForConditionalGeneration": {"vocab_size": 20, "d_model": 8, "d_ff": 12, "num_layers": 1},
    "BartForConditionalGeneration": _BART,
}


def _saved_model(name: str, folder: Path) -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**_SAVED[name]))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", _SAVED)
def test_a_folder_as_transformers_saved_it_is_loaded_with_its_own_weights(
    name: str, tmp_path: Path
) -> None:
    model = _saved_model(name, tmp_path)
    loaded = find_model(str(tmp_path), seed=5).model
    stored = model.state_dict()
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, stored[key]), key


def test_a_tied_weight_may_be_stored_under_either_name(tmp_path: Path) -> None:
    model = _saved_model("GPT2LMHeadModel", tmp_path)
    _edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("transformer.wte.weight")}))
    loaded: Any = find_model(str(tmp_path)).model
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


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
