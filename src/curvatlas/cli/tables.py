"""A table of texts and labels as data: CSV, TSV, JSON lines, or a folder of ``datasets``.

A sequence classifier (or a regression) takes a column of texts and a column of labels, a language
model the texts of one column, one after the other. Which columns is said, or plain from their
names; a table is never read as prose.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = Mapping[str, Any]
_SUFFIXES = {".csv", ".tsv", ".jsonl", ".ndjson"}
_SAVED = ("dataset_info.json", "dataset_dict.json")  # of datasets' save_to_disk
_TEXT_NAMES = ("text", "sentence", "review", "content", "document", "comment", "body")
_LABEL_NAMES = ("label", "labels", "target", "class", "score", "rating", "stars", "y")
_MOST_ROWS = 100_000
_MOST_SHOWN = 8  # columns or labels in a message


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of a file, as far as they are wanted."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def column(self, option: str, name: str | None, usual: Sequence[str], what: str) -> str:
        """The column that the option names, or the only one with a usual name."""
        if name is not None:
            if name not in self.columns:
                raise ValueError(f"{self.name} has no column {name!r}: it has {self._shown()}.")
            return name
        lower = {column.lower(): column for column in self.columns}
        likely = [lower[word] for word in usual if word in lower]
        if len(likely) != 1:
            raise ValueError(
                f"{self.name} is a table with the columns {self._shown()}: say which holds the "
                f"{what} with {option} NAME."
            )
        return likely[0]

    def _shown(self) -> str:
        more = ", …" if len(self.columns) > _MOST_SHOWN else ""
        return ", ".join(self.columns[:_MOST_SHOWN]) + more

    def values(self, column: str) -> list[Any]:
        empty = [i for i, row in enumerate(self.rows) if row.get(column) in (None, "")]
        if empty:
            raise ValueError(f"{self.name}: column {column!r} is empty in row {empty[0] + 1}.")
        return [row[column] for row in self.rows]


def is_table(path: Path) -> bool:
    """Whether the path is a table: by its ending, or a folder that ``datasets`` saved."""
    if path.is_dir():
        return any((path / name).is_file() for name in _SAVED)
    return path.suffix.lower() in _SUFFIXES


def read_table(path: Path, most: int = _MOST_ROWS) -> Table:
    """The first rows of a table; nothing in it is executed."""
    if path.is_dir():
        return _from_datasets(path, most)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() in (".jsonl", ".ndjson"):
                rows = [_object(line, path, n) for n, line in enumerate(file, 1) if line.strip()][
                    :most
                ]
                columns = tuple(dict.fromkeys(key for row in rows for key in row))
            else:
                delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(file)
                reader = csv.DictReader(file, delimiter=delimiter, strict=True)
                rows = list(islice(reader, most))
                columns = tuple(str(name) for name in reader.fieldnames or ())
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a readable table: {error}.") from error
    if not rows:
        raise ValueError(f"{path} has no rows below its header.")
    return Table(name=path.name, columns=columns, rows=tuple(rows))


def _delimiter(file: Any) -> str:
    first = file.readline()
    file.seek(0)
    return max(",;\t", key=first.count)


def _object(line: str, path: Path, number: int) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line {number} is a {type(value).__name__}, expected an object.")
    return value


def _from_datasets(path: Path, most: int) -> Table:
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{path} is a folder of datasets: pip install datasets.") from error
    datasets.disable_progress_bars()
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a readable folder of datasets: {reason}") from error
    name = path.name
    if isinstance(saved, dict):
        split = "train" if "train" in saved else next(iter(saved))
        saved, name = saved[split], f"{name}/{split}"
    rows = tuple(saved.select(range(min(most, len(saved)))))
    return Table(name=name, columns=tuple(saved.column_names), rows=rows)


# --- texts and labels of a classifier ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LabelledTexts:
    """What a sequence classifier takes, how its targets count, and what was read."""

    batch: dict[str, Tensor]
    loss: str  # "cross_entropy", or "model" for a regression
    origin: str  # "columns review and stars of reviews.csv"
    notes: tuple[str, ...]


def labelled_texts(
    table: Table,
    tokenizer: Any,
    config: Any,
    *,
    text_column: str | None,
    label_column: str | None,
    context: int,
    loss: str,
) -> LabelledTexts:
    """Texts as padded tokens with ``labels``: classes, or numbers for a regression.

    context: most tokens of a text; longer ones are cut there, which is said.
    """
    texts_from = table.column("--text-column", text_column, _TEXT_NAMES, "texts")
    labels_from = table.column("--label-column", label_column, _LABEL_NAMES, "labels")
    texts = [str(value) for value in table.values(texts_from)]
    raw = table.values(labels_from)
    count = int(getattr(config, "num_labels", 0) or 0)
    regression = getattr(config, "problem_type", None) == "regression" or count == 1
    if loss in ("cross_entropy", "mse"):
        regression = loss == "mse"
    labels = (
        _numbers(raw, table, labels_from)
        if regression
        else _classes(raw, table, labels_from, config)
    )
    encoded = tokenizer(texts, add_special_tokens=True, verbose=False)["input_ids"]
    cut = sum(len(tokens) > context for tokens in encoded)
    notes = [f"{cut} of {len(texts)} texts are longer than {context} tokens and cut"] if cut else []
    width = max(min(len(tokens), context) for tokens in encoded)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = getattr(config, "pad_token_id", None)
    if pad is None and len({len(tokens[:context]) for tokens in encoded}) > 1:
        raise ValueError(
            "the texts differ in length and the tokenizer has no padding token: set pad_token in "
            "its tokenizer_config.json and pad_token_id in config.json."
        )
    ids = torch.full((len(texts), width), pad or 0, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(encoded):
        kept = tokens[:context]
        ids[row, : len(kept)], mask[row, : len(kept)] = torch.tensor(kept), 1
    return LabelledTexts(
        batch={"input_ids": ids, "attention_mask": mask, "labels": labels},
        loss="model" if regression else "cross_entropy",
        origin=f"{table.name} ({texts_from} → {labels_from})",
        notes=tuple(notes),
    )


def _numbers(raw: Sequence[Any], table: Table, column: str) -> Tensor:
    values = [_parsed(value, float) for value in raw]
    for row, value in enumerate(values):
        if value is None:
            raise ValueError(
                f"{table.name}: {raw[row]!r} in column {column!r}, row {row + 1}, is no number, "
                "and this model regresses."
            )
    return torch.tensor(values, dtype=torch.float64)


def _classes(raw: Sequence[Any], table: Table, column: str, config: Any) -> Tensor:
    """Class numbers: whole numbers as they are, names by the model's ``label2id``."""
    count = int(getattr(config, "num_labels", 0) or 0)
    names = {str(k).lower(): int(v) for k, v in (getattr(config, "label2id", None) or {}).items()}
    classes = []
    for row, value in enumerate(raw):
        number = _parsed(value, float)
        known = names.get(str(value).lower())
        if known is None and (number is None or not number.is_integer()):
            shown = ", ".join(list(names)[:_MOST_SHOWN]) or f"0 to {count - 1}"
            raise ValueError(
                f"{table.name}: the label {value!r} in column {column!r}, row {row + 1}, is none "
                f"of the model's: {shown}. Numbers to regress need --loss mse."
            )
        classes.append(known if known is not None else int(number or 0))
    if count and not all(0 <= c < count for c in classes):
        raise ValueError(
            f"{table.name}: labels in column {column!r} go from {min(classes)} to {max(classes)}, "
            f"the model has {count} classes, 0 to {count - 1}."
        )
    return torch.tensor(classes, dtype=torch.long)


def _parsed(value: Any, kind: Callable[[Any], float]) -> float | None:
    try:
        return kind(value)
    except (TypeError, ValueError):
        return None


def prose(table: Table, text_column: str | None) -> str:
    """The texts of one column, one after the other, for a language model."""
    if text_column is None:
        raise ValueError(
            f"{table.name} is a table with the columns {', '.join(table.columns[:_MOST_SHOWN])}, "
            "and a language model reads prose: say which column holds it with --text-column NAME "
            "(or give a .txt file)."
        )
    column = table.column("--text-column", text_column, (), "texts")
    return "\n".join(str(value) for value in table.values(column))
