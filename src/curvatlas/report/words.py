"""How the page and the terminal say numbers, intervals, ratios and stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from curvatlas.results import Interval

PARTS = {"total": "H", "outer": "H_o", "functional": "H_f"}
_STAGES = {"initial": "at initialisation", "trained": "after training", "model": ""}
_HALF = 0.5  # of what is possible: an interval that covers more says nothing


def stage_words(stage: str) -> str:
    """``initial`` → "at initialisation"; other names as they are."""
    return _STAGES.get(stage, stage)


def capitalised(words: str) -> str:
    """The first letter large, the others as they are."""
    return words[:1].upper() + words[1:]


def number(value: float, digits: int = 3) -> str:
    """``0.0123``, ``1.5×10⁻⁷``: as many digits as asked, no more."""
    if not math.isfinite(value):
        return {"nan": "not a number", "inf": "∞", "-inf": "−∞"}[str(value)]
    if value == 0 or 1e-3 <= abs(value) < 10**6:
        text = f"{value:.{digits}g}"
        text = f"{value:,.0f}" if "e" in text else text
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        text = f"{mantissa}×10{raised}"
    return text.replace("-", "−")


def shown(value: object) -> str:
    """A cell of a table as a person reads it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, float):
        return number(value, 4)
    return str(value)


def told(value: object, interval: Interval | None) -> str:
    """A cell of a table with the interval around it."""
    if interval is None or isinstance(value, str):
        return shown(value)
    return with_interval(value, interval) if value is not None else brackets(interval)  # type: ignore[arg-type]


def brackets(interval: Interval | None) -> str:
    """``[12.1, 12.5]``; empty where the interval is that of rounding."""
    if interval is None:
        return ""
    low, high = interval
    digits = 3
    while digits < 4 and number(low, digits) == number(high, digits):
        digits += 1
    same = number(low, digits) == number(high, digits)
    return "" if same else f"[{number(low, digits)}, {number(high, digits)}]"


def with_interval(value: float | None, interval: Interval | None) -> str:
    """``12.3 [12.1, 12.5]``."""
    if value is None:
        return "–"
    return f"{number(value)} {brackets(interval)}".strip()


def percent(share: float) -> str:
    """``24 %``; two digits below ten."""
    return f"{100 * share:.2g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def ratio(before: float | None, after: float | None) -> str:
    """``× 27``, ``÷ 3.1`` or ``+12 %``; empty where a ratio means nothing."""
    if before is None or after is None or before * after <= 0:
        return ""
    factor = after / before
    if not math.isfinite(factor):
        return ""
    if 0.5 < factor < 2:
        return f"{100 * (factor - 1):+.2g} %".replace("-", "−")
    return f"× {number(factor)}" if factor > 1 else f"÷ {number(1 / factor)}"


def wider(*intervals: Interval | None) -> Interval | None:
    """The widest of several intervals around one number."""
    known = [interval for interval in intervals if interval is not None]
    return max(known, key=lambda ends: ends[1] - ends[0]) if known else None


def says_nothing(share: float, interval: Interval | None) -> bool:
    """Whether the interval of a share covers more than half of what is possible."""
    return not math.isfinite(share) or (
        interval is not None and min(interval[1], 1) - max(interval[0], 0) > _HALF
    )


def sign_unknown(value: float, interval: Interval | None) -> bool:
    """Whether a number cannot be told from zero."""
    return not math.isfinite(value) or (interval is not None and interval[0] < 0 < interval[1])


def listed(words: Sequence[str], last: str = "and") -> str:
    """``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
