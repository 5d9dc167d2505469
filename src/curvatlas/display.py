"""How results show themselves: pictures, inline or on the user's own axes, tables, data frames.

matplotlib and pandas are imported when a picture or a data frame is asked for.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_PANDAS = "a data frame needs pandas: pip install 'curvatlas[notebooks]'."
_LINES, _LETTERS = 8, 160  # of a result's text that a notebook shows
_ROWS = 14  # of the small table
_FEW = 4  # numbers of a list that are written out
_INLINE_DPI = 80
_axes: ContextVar[Any] = ContextVar("axes", default=None)  # where the picture in hand goes


# --- pictures ------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, never tied to a window; a notebook shows it without any magic.

    Inside ``drawing_on(ax)`` it stands for the place of these axes in the user's figure.
    """
    axes = _axes.get()
    if axes is not None:
        return _PlaceOfAxes(axes)  # type: ignore[return-value]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    # matplotlib itself does this only for figures of pyplot, after %matplotlib inline
    figure._repr_png_ = functools.partial(as_png, figure)  # type: ignore[attr-defined]
    return figure


def as_png(figure: Figure, dpi: float = _INLINE_DPI) -> bytes:
    """The bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


@contextmanager
def drawing_on(ax: Any) -> Iterator[None]:
    """Within it ``new_figure`` gives the place of these axes (None: a figure of its own)."""
    token = _axes.set(ax)
    try:
        yield
    finally:
        _axes.reset(token)


def drawing_of(kind: type) -> Callable[..., Figure] | None:
    """The drawing function of a class of results or of what it derives from; None: no picture."""
    drawings = importlib.import_module("curvatlas.figures").DRAWINGS
    return next((drawings[c.__name__] for c in kind.__mro__ if c.__name__ in drawings), None)


class _PlaceOfAxes:
    """What axes stand in: one panel is drawn on them, several take their place."""

    def __init__(self, ax: Any) -> None:
        self._ax = ax
        self._part: Any = None

    def add_subplot(self) -> Any:
        return self._ax

    def subplots(self, rows: int = 1, columns: int = 1, **options: Any) -> Any:
        if rows == columns == 1:
            return self._ax if options.get("squeeze", True) else np.array([[self._ax]])
        place = self._ax.get_subplotspec()
        if place is None:
            raise ValueError(
                "this picture has several panels: pass an ax that plt.subplots() made, or none."
            )
        self._ax.set_axis_off()
        self._part = self._ax.figure.add_subfigure(place)
        return self._part.subplots(rows, columns, **options)

    def suptitle(self, text: str, **options: Any) -> Any:
        if self._part is None:
            return self._ax.set_title(text, **options)
        return self._part.suptitle(text, **options)

    def set_layout_engine(self, *_: Any, **__: Any) -> None:
        """The layout is the user's."""

    @property
    def axes(self) -> list[Any]:
        return [self._ax] if self._part is None else list(self._part.axes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ax.figure if self._part is None else self._part, name)


# --- text and tables -----------------------------------------------------------------------------


def shortened(text: str) -> str:
    """The first lines, each of bearable length, and how much is left out."""
    lines = [
        line if len(line) <= _LETTERS else line[: _LETTERS - 1] + "…" for line in text.split("\n")
    ]
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = [f"… {len(lines) - _LINES + 1} more lines: print() shows them"]
    return "\n".join(lines)


def in_a_word(value: Any) -> str:
    """A field's value on one short line."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Tensor):
        if value.numel() <= _FEW and value.ndim <= 1:
            return in_a_word(value.tolist())
        return f"tensor {' × '.join(map(str, value.shape))}"
    if isinstance(value, Mapping):
        if len(value) <= _FEW and all(isinstance(v, (int, float, str)) for v in value.values()):
            return ", ".join(f"{key}: {in_a_word(v)}" for key, v in value.items())
        return f"{len(value)} entries: {', '.join(map(str, list(value)[:_FEW]))}" + (
            ", …" if len(value) > _FEW else ""
        )
    if isinstance(value, (list, tuple)):
        if len(value) <= _FEW and all(isinstance(v, (int, float, str)) for v in value):
            return f"[{', '.join(map(in_a_word, value))}]"
        return f"{len(value)} entries"
    text = str(value).partition("\n")[0]
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"


def number_and_interval(value: Any, interval: Any) -> str:
    """``2.5 [2, 3]``; an interval around no number stands alone."""
    told = [] if value is None and interval is not None else [in_a_word(value)]
    return " ".join([*told, *([in_a_word(list(interval))] if interval is not None else [])])


@dataclasses.dataclass(frozen=True)
class Table:
    """Named columns, row by row: what terminal, notebook, page and data frame show of a result."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Table:
        """Of mappings, whose keys are the columns; what one of them lacks is None."""
        columns = tuple(dict.fromkeys(key for record in records for key in record))
        return cls(columns, tuple(tuple(r.get(c) for c in columns) for r in records))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        """One column."""
        return [row[self.columns.index(column)] for row in self.rows]

    def written(
        self,
        most: int = _ROWS,
        *,
        only: Mapping[str, str] | None = None,
        tell: Callable[[Any, Any], str] = number_and_interval,
    ) -> list[list[str]]:
        """The heading and at most so many rows as texts: an interval beside its number, a single
        row from top to bottom.

        only: heading → column, of the columns that are shown.  tell: a value and its interval or
        None, as text.
        """
        begins = self._intervals()
        ends = {f"{begin}{end}" for begin in begins.values() for end in ("low", "high")}
        left = dict.fromkeys(name for name in (*self.columns, *begins) if name not in ends)
        shown = only or {name.replace("_", " "): name for name in left}

        def cell(record: Mapping[str, Any], name: str) -> str:
            begin = begins.get(name)
            low, high = (record.get(f"{begin}{end}") for end in ("low", "high"))
            return tell(record.get(name), None if low is None or high is None else (low, high))

        records = (dict(zip(self.columns, row, strict=True)) for row in self.rows[:most])
        rows = [[cell(record, name) for name in shown.values()] for record in records]
        if len(self.rows) == 1:
            return [["", "value"], *map(list, list(zip(shown, rows[0], strict=True))[:most])]
        return [list(shown), *rows]

    def _intervals(self) -> dict[str, str]:
        """Column → what the names of its interval's ends begin with; a name of its own for an
        interval around no number."""
        begins = {}
        for begin in (name.removesuffix("low") for name in self.columns if name.endswith("low")):
            if f"{begin}high" in self.columns:
                name = begin.removesuffix("_").removesuffix("_interval")
                around = (name, f"{begin}mean", f"{begin}value")
                begins[next((c for c in around if c in self.columns), name)] = begin
        return begins

    def __str__(self) -> str:
        """Aligned columns, all rows."""
        lines = self.written(max(len(self.rows), len(self.columns)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join(aligned)

    def to_dataframe(self) -> Any:
        """The rows as a ``pandas.DataFrame``."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(_NO_PANDAS) from error
        return pandas.DataFrame.from_records(self.rows, columns=self.columns)


def as_html(title: str, text: str, table: Table, picture: Figure | str | None) -> str:
    """A small table with a picture, or with the reason that there is none."""
    left = " style='text-align:left'"
    heading, *body = [[html.escape(cell) for cell in row] for row in table.written()]
    first = "th" if heading[0] == "" else "td"
    rows = "".join(f"<th{left}>{cell}</th>" for cell in heading)
    for row in body:
        cells = "".join(f"<td{left}>{cell}</td>" for cell in row[1:])
        rows += f"</tr><tr><{first}{left}>{row[0]}</{first}>{cells}"
    more = max(len(table.rows), len(table.columns) if len(table.rows) == 1 else 0) - len(body)
    image = f"<p><small>{more} more: .table()</small></p>" if more > 0 else ""
    if isinstance(picture, str):
        image += f"<p><small>{html.escape(picture)}</small></p>"
    elif picture is not None:
        data = base64.b64encode(as_png(picture)).decode()
        image += f"<img alt='{html.escape(title)}' src='data:image/png;base64,{data}'/>"
    summary = html.escape(text).replace("\n", "<br>")
    return (
        f"<div><p><b>{html.escape(title)}</b><br><code>{summary}</code></p>"
        f"<table><tr>{rows}</tr></table>{image}</div>"
    )


# --- rows of a table ------------------------------------------------------------------------------


def is_interval(value: Any) -> bool:
    """Whether a value is a pair (low, high) of numbers, or of tensors of one length."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    if all(isinstance(end, Tensor) and end.ndim == 1 for end in value):
        return len(value[0]) == len(value[1])
    return all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in value)


def columns_of(fields: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Fields that are lists of numbers or texts, as columns: those of the most common length.

    Where two lengths are as common the longer wins.
    """
    columns: dict[str, list[Any]] = {}
    for name, value in fields.items():
        if is_interval(value):
            if isinstance(value[0], Tensor):
                for end, side in zip(("low", "high"), value, strict=True):
                    columns[end if name == "interval" else f"{name}_{end}"] = side.tolist()
        elif isinstance(value, Tensor) and value.ndim == 1:
            columns[name] = value.tolist()
        elif isinstance(value, (list, tuple)) and all(
            isinstance(v, (int, float, str)) or v is None for v in value
        ):
            columns[name] = list(value)
    lengths = [len(column) for column in columns.values() if len(column) > 1]
    if not lengths:
        return {}
    if all(isinstance(value, str) for column in columns.values() for value in column):
        return {}  # names alone
    best = max(set(lengths), key=lambda length: (lengths.count(length), length))
    return {name: column for name, column in columns.items() if len(column) == best}


def scalars_of(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers, texts and intervals of a result (and of the results in it) as one row."""
    row: dict[str, Any] = {}
    for name, value in fields.items():
        key = prefix + name
        if is_interval(value) and not isinstance(value[0], Tensor):
            start = prefix if name == "interval" else f"{key}_"
            row[f"{start}low"], row[f"{start}high"] = value
        elif isinstance(value, (int, float, str)) or value is None:
            row[key] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            row[key] = value.item()
        elif dataclasses.is_dataclass(value):
            fields_inside = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            inner = scalars_of(fields_inside, f"{key}_")
            row |= {k.removesuffix("_value"): v for k, v in inner.items()}
        elif isinstance(value, Mapping):
            row |= scalars_of(value, f"{key}_")
    return row
