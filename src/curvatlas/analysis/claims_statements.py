"""What the sources say, each statement as one number with the threshold it must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from curvatlas.analysis.atlas_result import Atlas
from curvatlas.analysis.comparisons import Spread, spread_of
from curvatlas.results import Result

ATTENTION = ("query", "key", "value", "output")
FEED_FORWARD = ("up", "down")


@dataclass(frozen=True, kw_only=True)
class Claim(Result):
    """One statement of a source and what was measured."""

    name: str
    statement: str
    source: str
    figure: str  # what the number is
    value: Spread
    threshold: float  # the claim says: above it
    verdict: str  # "holds", "fails" or "undecided"
    details: dict[str, Spread]

    def __str__(self) -> str:
        return f"{self.verdict:>9}  {self.statement} [{self.figure}: {self.value}]"


@dataclass(frozen=True, kw_only=True)
class ClaimReport(Result):
    """All claims on one data set."""

    dataset: str
    seeds: int
    accuracy: Spread  # on held-out samples after training
    claims: tuple[Claim, ...]

    def __getitem__(self, name: str) -> Claim:
        for claim in self.claims:
            if claim.name == name:
                return claim
        raise KeyError(f"there is no claim {name!r}; there are {[c.name for c in self.claims]}.")

    def __str__(self) -> str:
        head = f"{self.dataset}, {self.seeds} seeds, accuracy {self.accuracy}"
        return "\n".join([head, *(f"  {claim}" for claim in self.claims)])


def _norms(found: Atlas, part: str = "total") -> dict[str, float]:
    own = found.view("role", part=part)
    return dict(zip(own.names, own.values.diagonal().tolist(), strict=True))


def _entry_sizes(found: Atlas) -> dict[str, float]:
    """Root mean square entry of every role's own block: what the papers' heat maps show."""
    own = found.view("role")
    sizes: dict[str, int] = dict.fromkeys(own.names, 0)
    for name, size in found.sizes.items():
        role = next((r for r in own.names if name == r or name.endswith(f".{r}")), None)
        if role is not None:
            sizes[role] += size
    return {role: norm / sizes[role] for role, norm in _norms(found).items() if sizes[role]}


def claim(
    name: str, statement: str, source: str, figure: str, values: Sequence[float], threshold: float,
    details: dict[str, Spread], *, ratio: bool = True,
) -> Claim:  # fmt: skip
    value = spread_of(values, ratio=ratio)
    low, high = value.interval
    verdict = "holds" if low > threshold else "fails" if high < threshold else "undecided"
    return Claim(
        name=name, statement=statement, source=source, figure=figure, value=value,
        threshold=threshold, verdict=verdict, details=details,
    )  # fmt: skip


def dominance(when: str, atlases: Sequence[Atlas]) -> list[Claim]:
    """Petrov et al.: value- and key-related blocks dominate."""
    roles = [_norms(one) for one in atlases]
    details = {
        role: spread_of((r[role] for r in roles), ratio=True)
        for role in (*ATTENTION, *FEED_FORWARD)
        if role in roles[0]
    }
    source = "Petrov et al., entry heat maps"

    def ratio(top: str, bottom: Sequence[str]) -> list[float]:
        return [r[top] / max(r[b] for b in bottom if b in r) for r in roles]

    return [
        claim(
            f"value dominates at {when}",
            f"the value block is the largest of attention at {when}", source,
            "‖H_VV‖ / largest other attention block",
            ratio("value", [r for r in ATTENTION if r != "value"]), 1.0, details,
        ),
        claim(
            f"key above query at {when}", f"the key block exceeds the query block at {when}",
            source, "‖H_KK‖ / ‖H_QQ‖", ratio("key", ["query"]), 1.0, details,
        ),
        claim(
            f"key above feed-forward at {when}",
            f"the key block exceeds the feed-forward blocks at {when}", source,
            "‖H_KK‖ / largest of up and down", ratio("key", FEED_FORWARD), 1.0, details,
        ),
        claim(
            f"value above feed-forward at {when}",
            f"the value block exceeds the feed-forward blocks at {when}", source,
            "‖H_VV‖ / largest of up and down", ratio("value", FEED_FORWARD), 1.0, details,
        ),
        claim(
            f"value entries above feed-forward at {when}",
            f"entries of the value block exceed those of the feed-forward blocks at {when}",
            source, "root mean square entry of H_VV / largest of up and down",
            [e["value"] / max(e[f] for f in FEED_FORWARD) for e in map(_entry_sizes, atlases)],
            1.0, {},
        ),
    ]  # fmt: skip


def growth_in_training(before: Sequence[Atlas], after: Sequence[Atlas]) -> Claim:
    ratios = [
        b.view("model")["model"] / a.view("model")["model"]
        for a, b in zip(before, after, strict=True)
    ]
    details = {
        role: spread_of(
            (_norms(b)[role] / _norms(a)[role] for a, b in zip(before, after, strict=True)),
            ratio=True,
        )
        for role in (*ATTENTION, *FEED_FORWARD)
    }
    return claim(
        "norm grows in training", "Hessian magnitudes grow with training",
        "Petrov et al., heat maps after training", "‖H after‖_F / ‖H before‖_F", ratios, 1.0,
        details,
    )  # fmt: skip


def heterogeneity(atlases: Sequence[Atlas]) -> list[Claim]:
    """Ormaniec et al.: blocks differ in what makes them up and in size."""
    shares: dict[str, list[float]] = {role: [] for role in ATTENTION}
    for one in atlases:
        outer, functional = _norms(one, "outer"), _norms(one, "functional")
        for role, found in shares.items():
            found.append(outer[role] ** 2 / (outer[role] ** 2 + functional[role] ** 2))
    details = {role: spread_of(values) for role, values in shares.items()}
    spread = [
        max(_norms(one)[r] for r in ("query", "key", "value"))
        / min(_norms(one)[r] for r in ("query", "key", "value"))
        for one in atlases
    ]
    source = "Ormaniec et al., Theorems 3.1 and 3.2"
    return [
        claim(
            "value is Gauss-Newton, query is not",
            "the outer product makes up more of the value block than of the query block", source,
            "difference of ‖H_o‖² / (‖H_o‖² + ‖H_f‖²)",
            [v - q for v, q in zip(shares["value"], shares["query"], strict=True)], 0.0, details,
            ratio=False,
        ),
        claim(
            "blocks are heterogeneous", "query, key and value blocks differ tenfold", source,
            "largest / smallest of ‖H_QQ‖, ‖H_KK‖, ‖H_VV‖", spread, 10.0, details,
        ),
    ]  # fmt: skip


def growth_with_depth(kind: str, slopes: Sequence[float], depths: Sequence[int]) -> Claim:
    return claim(
        f"norm grows with depth, {kind}", f"‖H‖_F grows with the number of {kind} blocks",
        "the article and Ormaniec et al.", f"log-log slope over depths {tuple(depths)}", slopes,
        0.0, {}, ratio=False,
    )  # fmt: skip


def norm_curvature(slopes: Sequence[float]) -> Claim:
    """THEORY 3.2: ‖Ψ(δ)‖ ≤ √2 ‖δ‖ / (√d σ²), so created curvature falls like 1/variance."""
    return claim(
        "norm curvature falls with the variance of a token",
        "what LayerNorm creates per slope falls like 1 / variance of the token",
        "LayerNorm closed form", "−(log-log slope) of ‖created‖/‖δ‖ against the variance",
        [-s for s in slopes], 0.5, {}, ratio=False,
    )  # fmt: skip
