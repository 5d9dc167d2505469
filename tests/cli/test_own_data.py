"""Your data and your model on the command line: tables, adapters, the cache, files, errors."""

from __future__ import annotations

import csv
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

_REVIEWS = [
    ("the ship is good and the sea is good", "good", 4.5),
    ("the captain is bad", "bad", 1.0),
    ("the whale is good", "good", 4.0),
    ("the sea is bad and the ship is bad", "bad", 1.5),
]
_QUICK = ["--samples", "4", "--batch-size", "2", "--dtype", "float64", "--eigenvalues", "1",
          "--skip", "map", "--skip", "density", "--skip", "propagation",
          "--skip", "trace"]  # fmt: skip


def _tokenizer(folder: Path) -> int:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "[PAD]", *sorted({w for text, *_ in _REVIEWS for w in text.split()})]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)
    return len(words)


def _classifier(folder: Path, **options: Any) -> Path:
    size = _tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=12, pad_token_id=1, **options,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def _gpt(folder: Path) -> Path:
    size = _tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "verdict", "stars"])
        writer.writerows(_REVIEWS)
    return path


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


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda cwd, *words: _run(list(words), cwd, capsys, monkeypatch)


def _own_loss(folder: Path, labels: torch.Tensor) -> float:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [text for text, *_ in _REVIEWS]
    encoded = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    return float(model.double().eval()(**encoded, labels=labels).loss.detach())


def test_a_classifier_is_analysed_on_the_named_columns_of_a_table(
    tmp_path: Path, reviews: Path, run: Any
) -> None:
    folder = _classifier(
        tmp_path / "bert", label2id={"bad": 0, "good": 1}, id2label={0: "bad", 1: "good"}
    )
    code, out, err = run(
        tmp_path, "analyze", "bert", "reviews.csv", "--text-column", "review", "--label-column",
        "verdict", "--json", *_QUICK,
    )  # fmt: skip
    assert code == 0, err
    assert err == ""
    subject = json.loads(out)["results"]["model.subject"]
    assert "review → verdict" in subject["data"]
    expected = _own_loss(folder, torch.tensor([1, 0, 1, 0]))
    assert subject["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_regression_takes_numbers_and_its_own_loss(
    tmp_path: Path, reviews: Path, run: Any
) -> None:
    folder = _classifier(tmp_path / "bert", num_labels=1)
    lines = [json.dumps({"text": t, "score": s}) for t, _, s in _REVIEWS]
    (tmp_path / "reviews.jsonl").write_text("\n".join(lines), encoding="utf-8")
    code, out, err = run(tmp_path, "analyze", "bert", "reviews.jsonl", "--json", *_QUICK)
    assert code == 0, err
    expected = _own_loss(folder, torch.tensor([s for *_, s in _REVIEWS], dtype=torch.float64))
    assert json.loads(out)["results"]["model.subject"]["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_folder_of_datasets_is_a_table(tmp_path: Path, run: Any) -> None:
    datasets = pytest.importorskip("datasets")
    folder = _classifier(tmp_path / "bert")
    rows = {"sentence": [t for t, *_ in _REVIEWS], "label": [1, 0, 1, 0]}
    datasets.disable_progress_bars()
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)})
    saved.save_to_disk(str(tmp_path / "reviews"))
    code, out, err = run(tmp_path, "analyze", "bert", "reviews", "--json", *_QUICK)
    assert code == 0, err
    assert err == ""
    expected = _own_loss(folder, torch.tensor([1, 0, 1, 0]))
    assert json.loads(out)["results"]["model.subject"]["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--label-column", "verdict", "--text-column", "text"], "no column 'text': it has review"),
        (["--text-column", "review"], "say which holds the labels|is none of the model's"),
        (["--text-column", "review", "--label-column", "review"], "none of the model's"),
        (["--text-column", "review", "--label-column", "stars"], "none of the model's.*--loss mse"),
        (
            ["--text-column", "review", "--label-column", "verdict", "--context", "13"],
            "12 positions",
        ),
    ],
)
def test_a_wrong_column_label_or_context_is_one_line(
    words: list[str], told: str, tmp_path: Path, reviews: Path, run: Any
) -> None:
    import re

    _classifier(tmp_path / "bert", label2id={"bad": 0, "good": 1}, id2label={0: "bad", 1: "good"})
    code, _, err = run(tmp_path, "analyze", "bert", "reviews.csv", *words, *_QUICK)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert re.search(told, err), err


def test_a_language_model_asks_which_column_of_a_table_is_prose(
    tmp_path: Path, reviews: Path, run: Any
) -> None:
    _gpt(tmp_path / "tiny")
    code, _, err = run(tmp_path, "analyze", "tiny", "reviews.csv", *_QUICK)
    assert code == 2
    assert "review, verdict, stars" in err
    assert "--text-column" in err
    words = ("--text-column", "review", "--context", "6", "--json")
    code, out, err = run(tmp_path, "analyze", "tiny", "reviews.csv", *words, *_QUICK)
    assert code == 0, err
    assert json.loads(out)["results"]["model.subject"]["targets"] == 4 * 5


def test_a_context_beyond_the_positions_is_refused_and_a_clamp_is_said(
    tmp_path: Path, run: Any
) -> None:
    _gpt(tmp_path / "tiny")
    (tmp_path / "sea.txt").write_text("the sea is good \n" * 40)
    code, _, err = run(tmp_path, "analyze", "tiny", "sea.txt", "--context", "9", *_QUICK)
    assert code == 2
    assert "--context 9: tiny has 8 positions" in err
    code, out, err = run(tmp_path, "analyze", "tiny", "sea.txt", "--json", *_QUICK)
    assert code == 0, err
    assert any("windows of 8 tokens" in text for text in json.loads(out)["warnings"])


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_a_peft_adapter_folder_is_its_base_with_the_adapter_varying(
    task: str, tmp_path: Path, reviews: Path, run: Any
) -> None:
    peft = pytest.importorskip("peft")
    if task == "SEQ_CLS":
        base: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            _classifier(tmp_path / "base")
        )
        words = ["reviews.csv", "--text-column", "review", "--label-column", "verdict"]
        (tmp_path / "reviews.csv").write_text(
            "review,verdict\nthe sea,1\nthe ship,0\nis bad,0\na,1\n"
        )
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(_gpt(tmp_path / "base"))
        (tmp_path / "sea.txt").write_text("the sea is good \n" * 40)
        words = ["sea.txt", "--context", "6"]
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type=task, r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps({**content, "base_model_name_or_path": "base"}))
    code, out, err = run(tmp_path, "analyze", "adapter", *words, "--json", *_QUICK)
    assert code == 0, err
    subject = json.loads(out)["results"]["model.subject"]
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert subject["parameters"] == trainable
    assert any("held fixed" in text for text in json.loads(out)["warnings"])


def test_a_name_of_the_local_cache_is_found_and_nothing_is_downloaded(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from curvatlas.cli import pretrained

    hub = tmp_path / "hub"
    snapshot = hub / "models--org--tiny" / "snapshots" / ("0" * 40)
    _gpt(snapshot)
    refs = hub / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    import huggingface_hub

    whole = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: whole(*a, cache_dir=hub, **k)
    )
    assert pretrained.cached_folder("org/tiny") == snapshot
    (tmp_path / "sea.txt").write_text("the sea is good \n" * 40)
    code, _, err = run(tmp_path, "analyze", "org/tiny", "sea.txt", "--context", "6", *_QUICK)
    assert code == 0, err
    code, _, err = run(tmp_path, "analyze", "org/other", "sea.txt", *_QUICK)
    assert code == 2
    assert "nothing is downloaded" in err


# --- files and functions of the user -------------------------------------------------------------

_MINE = """
import torch
from torch import nn

def helper():
    return {}["missing"]

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

def make_data():
    return torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])

def broken():
    return helper()
"""


def test_a_file_with_a_function_is_understood(tmp_path: Path, run: Any) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine_here.py").write_text(_MINE)
    words = ("sub/mine_here.py:make_model", "sub/mine_here.py:make_data", "--json")
    code, out, err = run(tmp_path, "analyze", *words, *_QUICK)
    assert code == 0, err
    assert json.loads(out)["results"]["model.subject"]["parameters"] == 26
    code, _, err = run(tmp_path, "analyze", "absent.py:make_model", "digits")
    assert (code, "there is no file absent.py" in err) == (2, True)


def test_an_exception_in_the_users_factory_shows_its_place(tmp_path: Path, run: Any) -> None:
    (tmp_path / "mine_broken.py").write_text(_MINE)
    code, out, err = run(tmp_path, "analyze", "mine_broken.py:broken", "digits", "--json")
    assert code == 2
    assert "KeyError: 'missing'" in err
    assert "mine_broken.py, line 6, in helper" in err
    told = json.loads(out)["error"]
    assert told["exit_code"] == 2
    assert "line 6, in helper" in told["message"]


def test_classes_stored_as_real_numbers_suggest_the_loss(tmp_path: Path, run: Any) -> None:
    (tmp_path / "mine_floats.py").write_text(_MINE)
    inputs = np.random.default_rng(0).normal(size=(6, 3))
    np.savez(tmp_path / "data.npz", inputs=inputs, targets=np.array([0.0, 1, 1, 0, 1, 0]))
    words = ("mine_floats.py:make_model", "data.npz")
    code, _, err = run(tmp_path, "analyze", *words, *_QUICK)
    assert code == 2
    assert "--loss cross_entropy or --loss mse" in err
    code, _, err = run(tmp_path, "analyze", *words, "--loss", "cross_entropy", *_QUICK)
    assert code == 0, err


def test_a_role_can_be_stated_on_the_command_line(tmp_path: Path, run: Any) -> None:
    (tmp_path / "mine_roles.py").write_text(_MINE)
    words = ["mine_roles.py:make_model", "mine_roles.py:make_data", "--role", "0.weight=up"]
    code, out, err = run(tmp_path, "analyze", *words, "--json", *_QUICK)
    assert code == 0, err
    roles = {r["role"] for r in json.loads(out)["results"]["model.subject"]["roles"]}
    assert "up" in roles
    code, _, err = run(tmp_path, "analyze", *words[:3], "up", *_QUICK)
    assert code == 2
    assert "write GLOB=ROLE" in err


_LANGUAGE_MODEL = '''
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class Tokens(nn.Module):
    """Gives (logits, loss); without targets the logits of the last position alone."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(block_size=5)
        self.embedding, self.head = nn.Embedding(256, 3), nn.Linear(3, 256)
        self.position = nn.Embedding(5, 3)

    def forward(self, idx, targets=None):
        places = self.position(torch.arange(idx.size(1)))
        h = torch.tanh(self.embedding(idx).cumsum(1) + places)
        if targets is None:
            return self.head(h[:, [-1], :]), None
        logits = self.head(h)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def make_model():
    return Tokens()


def make_named():
    tokens = torch.randint(0, 256, (4, 6))
    return [{"idx": tokens[:, :-1], "targets": tokens[:, 1:]}]


def last_tokens(outputs, targets):
    """Of the outputs as the model gives them: the pair, with the last position's logits."""
    return F.cross_entropy(outputs[0][:, -1], targets[:, -1])


def all_tokens(outputs, targets):
    logits, own = outputs
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_a_tensor(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Halved(nn.Module):
    def forward(self, outputs, targets):
        return last_tokens(outputs, targets) / 2


not_a_loss = 3
'''


@pytest.mark.parametrize("data", ["prose.txt", "mine_gpt.py:make_named"])
@pytest.mark.parametrize("loss", ["auto", "cross_entropy", "model", "mine_gpt.py:all_tokens"])
def test_a_model_that_returns_its_loss_with_its_logits_just_works(
    tmp_path: Path, run: Any, data: str, loss: str
) -> None:
    (tmp_path / "mine_gpt.py").write_text(_LANGUAGE_MODEL)
    (tmp_path / "prose.txt").write_text("the whale is good and the sea is bad. " * 4)
    words = ["mine_gpt.py:make_model", data, "--json", "--loss", loss]
    code, out, err = run(tmp_path, "analyze", *words, *_QUICK)
    assert code == 0, err
    found = json.loads(out)["results"]
    assert "model.outer.eigenpairs" in found
    assert found["model.subject"]["loss"] == pytest.approx(5.6, abs=0.4)  # about log 256


def test_a_loss_of_the_users_own_is_named_by_file(tmp_path: Path, run: Any) -> None:
    (tmp_path / "mine_loss.py").write_text(_LANGUAGE_MODEL)
    (tmp_path / "prose.txt").write_text("the whale is good and the sea is bad. " * 4)
    words = ["mine_loss.py:make_model", "prose.txt", "--json", *_QUICK]
    losses = []
    for name in ("last_tokens", "Halved"):
        code, out, err = run(tmp_path, "analyze", *words, "--loss", f"mine_loss.py:{name}")
        assert code == 0, err
        losses.append(json.loads(out)["results"]["model.subject"]["loss"])
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-9)
    for wrong, said in (
        ("mine_loss.py:not_a_loss", "names a int"),
        ("mine_loss.py:absent", "has no 'absent'"),
        ("hinge", "nor mine.py:loss"),
        ("mine_loss.py:of_a_tensor", "fails on outputs ((2, 1, 256) float64, NoneType) and"),
    ):
        code, _, err = run(tmp_path, "analyze", *words, "--loss", wrong)
        assert code == 2
        assert said in " ".join(err.replace("│", " ").split())
