"""What a page is made of, as plain values, and the one place that turns them into HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from curvatlas import __version__
from curvatlas.report.words import shown, told
from curvatlas.results import BY_CONTENT, Result

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.figure import Figure

_LONGEST_NUMBER = 10  # letters of a reading
_ROWS = 12  # of a table that stands open; the others fold away
_FOLDED_ROWS = 120  # of a table in a fold; all of them are in the run folder


@dataclass(frozen=True)
class Verdict:
    """What to do, or what was ruled out."""

    tone: Literal["good", "act", "unsure"]
    says: str
    because: str = ""
    more: tuple[str, ...] = ()  # further things to do, each one line


@dataclass(frozen=True)
class Reading:
    """One number of a card: at which stage, the number, its interval."""

    stage: str
    value: str
    interval: str = ""


@dataclass(frozen=True)
class Card:
    """One finding: a number a stage, how they compare, and one line of what it means."""

    title: str
    readings: tuple[Reading, ...]
    ratio: str = ""
    note: str = ""

    @property
    def wordy(self) -> bool:
        """Names instead of numbers: they stand one below the other."""
        return any(len(one.value) > _LONGEST_NUMBER for one in self.readings)

    def __str__(self) -> str:
        numbers = " → ".join(f"{one.value} {one.interval}".strip() for one in self.readings)
        ratio = f" ({self.ratio})" if self.ratio else ""
        note = f": {self.note}" if self.note else ""
        return f"{self.title} {numbers}{ratio}{note}"


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn when the page is written."""

    title: str
    alt: str  # what it shows, in words
    draw: Callable[[], Figure]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text; the first column names the row."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers in every row."""
        columns = zip(*self.rows, strict=False)
        return tuple(all(cell[:1] in "−–+×÷<≥∞0123456789" for cell in c) for c in columns)


@dataclass(frozen=True)
class Fold:
    """What is there for those who open it."""

    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question: its answer, one picture, at most one table, and what folds away."""

    key: str
    question: str
    answer: str
    picture: Picture | None = None
    table: Table | None = None
    folds: tuple[Fold, ...] = ()

    @property
    def short(self) -> str:
        """In the list of links."""
        return self.key.replace("-", " ").title().replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one kind of result has to say: for the first screen, and below it."""

    verdict: Verdict | None = None
    cards: tuple[Card, ...] = ()
    pictures: tuple[Picture, ...] = ()
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page."""

    title: str
    subject: str  # one sentence: what was analysed
    verdict: Verdict | None
    cards: tuple[Card, ...]
    pictures: tuple[Picture, ...]
    sections: tuple[Section, ...]
    folds: tuple[Fold, ...]
    warnings: tuple[str, ...]
    urgent: bool = False  # the first warning belongs on the first screen

    def every_picture(self) -> list[Picture]:
        """Those of the first screen, of the sections, and what folds away."""
        folds = [fold for section in self.sections for fold in section.folds]
        own = [section.picture for section in self.sections if section.picture is not None]
        folded = [picture for fold in (*folds, *self.folds) for picture in fold.pictures]
        return [*self.pictures, *own, *folded]

    def lines(self) -> list[str]:
        """The verdict and the cards for a terminal: at most eight lines."""
        lines = [self.verdict.says] if self.verdict else []
        if self.verdict and self.verdict.because:
            lines.append(f"  {self.verdict.because}")
        return [*lines, *(f"  {card}" for card in self.cards)][:_TERMINAL]

    def html(self) -> str:
        """The file, self-contained."""
        failures: list[str] = []

        def image(picture: Picture) -> Markup | None:
            try:
                return drawn(picture)
            except BY_CONTENT as error:
                failures.append(f"“{picture.title}” could not be drawn: {_reason(error)}")
                return None

        style = _environment().get_template("style.css").render()
        template = _environment().get_template("page.html.j2")
        return template.render(
            page=self, style=style, drawn=image, version=__version__, failures=failures
        )


def drawn(picture: Picture) -> Markup:
    """The picture as a piece of a page."""
    from curvatlas.report.svg import embed

    return embed(picture.draw(), alt=picture.alt)


_TERMINAL = 8  # lines


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=PackageLoader("curvatlas.report"),
        autoescape=select_autoescape(["html.j2"], default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def attempted(
    makers: Sequence[Callable[[], Account | None]],
) -> tuple[list[Account], list[str]]:
    """What can be told, and why the rest cannot: a stranger's file may hold any numbers."""
    accounts, faults = [], []
    for make in makers:
        try:
            account = make()
        except BY_CONTENT as error:
            faults.append(f"A result has fields that do not belong together: {_reason(error)}")
            continue
        if account is not None:
            accounts.append(account)
    return accounts, faults


# --- tables ---------------------------------------------------------------------------------------


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Table | None:
    """A table of any values; None without rows."""
    if not rows:
        return None
    cells = tuple(tuple(shown(cell) for cell in row) for row in rows)
    return Table(caption=caption, head=tuple(head), rows=cells)


def cut(whole: Table | None) -> tuple[Table | None, tuple[Fold, ...]]:
    """The first rows of a long table, and a fold with the others."""
    if whole is None or len(whole.rows) <= _ROWS + 2:
        return whole, ()
    first = Table(caption=whole.caption, head=whole.head, rows=whole.rows[:_ROWS])
    rest = whole.rows[_ROWS:_FOLDED_ROWS]
    left = len(whole.rows) - _ROWS - len(rest)
    text = (f"{left:,} more rows are in the run folder.",) if left else ()
    more = Table(caption=whole.caption, head=whole.head, rows=rest)
    return first, (Fold(title=f"{len(rest)} more rows", tables=(more,), text=text),)


def rows_of(
    result: Result, only: Mapping[str, str] | None = None, *, caption: str = ""
) -> Table | None:
    """The table of a result, or those columns of it that ``only`` names: heading → column."""
    head, *rows = result.table().written(_FOLDED_ROWS, only=only, tell=told)
    return table(caption, head, rows)
