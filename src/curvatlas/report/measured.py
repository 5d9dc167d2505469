"""The headline numbers of one stage, each with both of its errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from curvatlas.analysis.atlas.result import Atlas
from curvatlas.report.reading import Stage
from curvatlas.report.words import says_nothing, sign_unknown, wider, with_interval
from curvatlas.results import Interval, Result
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.eigen_result import Eigenpairs


@dataclass(frozen=True, kw_only=True)
class Measured(Result):
    """One number of one state; None where it was not measured."""

    value: float | None
    interval: Interval | None  # 95 %, of the measurement; None: exact
    data_interval: Interval | None = None  # 95 %, of the sampling of the data

    @property
    def widest(self) -> Interval | None:
        """The larger of both errors."""
        return wider(self.interval, self.data_interval)

    def __str__(self) -> str:
        return with_interval(self.value, self.widest)


_NOTHING = Measured(value=None, interval=None)


def largest(stage: Stage, part: str = "total") -> Measured:
    """λmax."""
    return _end(stage.first(Eigenpairs, part), last=False)


def smallest(stage: Stage) -> Measured:
    """λmin, where that end was searched."""
    return _end(stage.ends, last=True)


def _end(pairs: Eigenpairs | None, *, last: bool) -> Measured:
    if pairs is None or pairs.which not in ("both", "smallest" if last else "largest"):
        return _NOTHING
    values = pairs.values.double()
    place = int(values.argmin() if last else values.argmax())

    def at(ends: tuple[object, object] | None) -> Interval | None:
        return None if ends is None else (float(ends[0][place]), float(ends[1][place]))  # type: ignore[index]

    return Measured(
        value=float(values[place]),
        interval=at(pairs.interval),
        data_interval=at(pairs.data_interval),
    )


def trace(part: str) -> Callable[[Stage], Measured]:
    """Of H, H_o or H_f."""

    def read(stage: Stage) -> Measured:
        estimate = stage.trace(part)
        if estimate is None:
            return _NOTHING
        return Measured(
            value=estimate.value,
            interval=None if estimate.exact else estimate.interval,
            data_interval=estimate.data_interval,
        )

    return read


def norm(part: str) -> Callable[[Stage], Measured]:
    """Frobenius norm of the whole matrix, from the map."""

    def read(stage: Stage) -> Measured:
        key = f"model/frobenius/{part}"
        if stage.atlas is None or key not in stage.atlas.maps:
            return _NOTHING
        chosen = stage.atlas.maps[key]
        ends = [float(side[0, 0]) for side in (chosen.values, chosen.low, chosen.high)]
        return Measured(value=ends[0], interval=(ends[1], ends[2]))

    return read


def missed_share(stage: Stage) -> Measured:
    """‖H_f‖ / ‖H‖: how much of H Gauss-Newton leaves out."""
    whole, missed = norm("total")(stage), norm("functional")(stage)
    if not whole.value or missed.value is None:
        return _NOTHING
    (low, high), (least, most) = whole.interval or (0.0, 0.0), missed.interval or (0.0, 0.0)
    interval = (least / high, most / low) if low > 0 and high > 0 else None
    return Measured(value=missed.value / whole.value, interval=interval)


def outer_sharpness(stage: Stage) -> Measured:
    """λmax(H_o) / λmax(H): how much of the sharpest direction Gauss-Newton sees."""
    top, outer = largest(stage).value, largest(stage, "outer").value
    known = top is not None and outer is not None and top > 0
    return Measured(value=outer / top, interval=None) if known else _NOTHING  # type: ignore[operator]


def _diagonal(stage: Stage) -> Measured:
    share = {} if stage.atlas is None else stage.atlas.diagonal_share
    if "block/total" not in share:
        return _NOTHING
    value, low, high = share["block/total"]
    return Measured(value=value, interval=(low, high))


def _subject(key: str) -> Callable[[Stage], Measured]:
    def read(stage: Stage) -> Measured:
        subject = stage.subject
        return _NOTHING if subject is None else Measured(value=subject[key], interval=None)

    return read


def _density(key: str) -> Callable[[Stage], Measured]:
    def read(stage: Stage) -> Measured:
        density = stage.first(SpectralDensity)
        if density is None:
            return _NOTHING
        return Measured(value=density[key], interval=density[f"{key}_interval"])

    return read


def growth(stage: Stage) -> Measured:
    """Curvature at the embedding over that at the last activation."""
    flow = stage.flow
    if flow is None or len(flow.activations) < 2 or not math.isfinite(flow.amplification):
        return _NOTHING
    return Measured(value=flow.amplification, interval=flow.amplification_interval)


MISSED = "‖H_f‖ / ‖H‖, what Gauss-Newton leaves out"
HEADLINES: dict[str, Callable[[Stage], Measured]] = {
    "loss": _subject("loss"),
    "gradient norm": _subject("gradient_norm"),
    "λmax of H, the sharpest direction": largest,
    "λmin of H, the most negative": smallest,
    "tr H": trace("total"),
    "tr H_o": trace("outer"),
    "tr H_f": trace("functional"),
    "‖H‖_F": norm("total"),
    MISSED: missed_share,
    "share of ‖H‖² on diagonal blocks": _diagonal,
    "share of negative eigenvalues": _density("negative_mass"),
    "effective rank of H": _density("effective_rank"),
    "curvature at the embedding over that at the last activation": growth,
}
_SHARES = ("share of ‖H‖² on diagonal blocks", "share of negative eigenvalues")


def informative(name: str, measured: Measured) -> bool:
    """Whether a headline says anything: an interval over half of what is possible does not."""
    if measured.value is None:
        return False
    if name in _SHARES:
        return not says_nothing(measured.value, measured.interval)
    return not sign_unknown(measured.value, measured.interval)


def within_roles(atlas: Atlas) -> dict[str, Measured]:
    """The blocks of H on the diagonal, by role."""
    chosen = atlas.maps.get("role/frobenius/total")
    if chosen is None:
        return {}
    sides = [side.double().diagonal().tolist() for side in (chosen.values, chosen.low, chosen.high)]
    return {
        name: Measured(value=value, interval=(low, high))
        for name, value, low, high in zip(chosen.names, *sides, strict=True)
    }
