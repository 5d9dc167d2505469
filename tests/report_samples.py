"""A run with something for every section of the report, of any size, with any names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from curvatlas import runs
from curvatlas.analysis.atlas.result import Atlas, AtlasMap
from curvatlas.runs.subject import RoleSize, Subject, TrainedWeights
from curvatlas.spectra.density_result import SpectralDensity, exact_density
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.estimate import Estimate
from curvatlas.theory.statements import Verification
from curvatlas.zoo.training import TrainingHistory

ROLES = ("query", "key", "value", "output", "up", "down", "gamma", "beta")
MORE_ROLES = (*ROLES, "gate", "norm2.gamma", "norm2.beta", "router")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def subject(name: str, state: str, layers: int, *, role: str | None = None) -> Subject:
    roles = [RoleSize(layer=None, sublayer="embedding", role=role or "token", parameters=4096)]
    for layer in range(layers):
        roles += [RoleSize(layer=layer, sublayer="x", role=r, parameters=1024) for r in ROLES]
    return Subject(
        name=name, model="GPT", state=state, parameters=sum(r.parameters for r in roles),
        dtype="float64", device="cpu", data="128 windows of text", loss_name="cross_entropy",
        batches=2, targets=8192.0, loss=2.3 if state == "initial" else 0.2, gradient_norm=0.1,
        roles=tuple(roles),
    )  # fmt: skip


def eigenpairs(seed: int, *, both: bool) -> Eigenpairs:
    top = (
        torch.rand(5, generator=_generator(seed), dtype=torch.float64).sort(descending=True)[0] * 50
    )
    values = torch.cat([top, -top.flip(0) / 40]) if both else top
    residuals = torch.full_like(values, 1e-3)
    return Eigenpairs(
        values=values, vectors=torch.zeros(7, len(values), dtype=torch.float64),
        residuals=residuals, interval=(values - residuals, values + residuals),
        which="both" if both else "largest", k=5, tol=1e-4, norm=float(top[0]),
        missed_probability=0.01, products=50, converged=True, exact=False,
    )  # fmt: skip


def trace(value: float) -> Estimate:
    return Estimate(
        quantity="trace", value=value, interval=(value - 1, value + 1), products=40,
        converged=True, exact=False, method="sampled",
    )  # fmt: skip


def density(seed: int) -> SpectralDensity:
    bulk = torch.randn(300, generator=_generator(seed), dtype=torch.float64) * 0.1
    outliers = torch.tensor([5.0, 12.0, 40.0], dtype=torch.float64)
    return exact_density(torch.cat([bulk, outliers]).sort()[0], 300, psd=False)


def _map(quantity: str, part: str, view: str, names: tuple[str, ...], seed: int) -> AtlasMap:
    count = len(names)
    shape = (count,) if quantity == "trace" else (count, count)
    values: Tensor = torch.rand(shape, generator=_generator(seed), dtype=torch.float64) ** 4 * 30
    if values.ndim == 2:
        values = (values + values.T) / 2
    return AtlasMap(
        quantity=quantity, part=part, view=view, names=names, values=values, low=values * 0.9,
        high=values * 1.1,
    )  # fmt: skip


def atlas(layers: int, seed: int, *, role: str | None = None, roles_of: int = 8) -> Atlas:
    own = MORE_ROLES[:roles_of]
    roles = (role or "token", *own)
    blocks = (roles[0], *(f"blocks.{layer}.{r}" for layer in range(layers) for r in own))
    views = {"block": blocks, "role": roles, "layer": ("–", *(str(i) for i in range(layers)))}
    maps, shares = {}, {}
    for view, names in views.items():
        for index, part in enumerate(("total", "outer", "functional")):
            for quantity in ("frobenius", "spectral", "trace"):
                key = f"{view}/{quantity}/{part}"
                maps[key] = _map(quantity, part, view, names, seed + index)
            shares[f"{view}/{part}"] = (0.6, 0.55, 0.65)
    return Atlas(
        maps=maps, sizes=dict.fromkeys(blocks, 1024), diagonal_share=shares, method="sketch",
        products=400, converged=True, rtol=0.05, error=0.05,
    )  # fmt: skip


def verification(*names: str) -> Verification:
    """The first statement holds, the others come out otherwise than recorded."""
    entries = tuple(
        {"name": name, "topic": "softmax", "source": "a paper, Theorem 1", "agrees": index == 0,
         "title": f"About {name}", "formula": "‖H‖ ≤ 3 max(C_o + C_f)", "recorded": "holds",
         "verdict": "holds" if index == 0 else "false as printed", "figure": "ratio 0.8"}
        for index, name in enumerate(names)
    )  # fmt: skip
    return Verification(entries=entries, full=False, seed=0, seconds=1.0)


def write_sample_run(
    path: Path,
    *,
    layers: int = 2,
    name: str = "small GPT",
    role: str | None = None,
    roles: int = 8,
) -> Path:
    """A complete run; ``name`` and ``role`` may be as hostile as one likes."""
    losses = tuple(2.3 * 0.99**step for step in range(300))
    with runs.Run.create(path, options={"seed": 0}, command=["curvatlas", "demo"]) as run:
        for index, stage in enumerate(("initial", "trained")):
            run.step(f"{stage}.subject", lambda s=stage: subject(name, s, layers, role=role))
            for place, part in enumerate(("total", "outer", "functional")):
                seed = 10 * index + place
                both = part != "outer"
                run.step(f"{stage}.{part}.eigenpairs", lambda s=seed, b=both: eigenpairs(s, both=b))
                run.step(f"{stage}.{part}.trace", lambda s=seed: trace(50.0 - 10 * s))
                run.step(f"{stage}.{part}.density", lambda s=seed: density(s))
            run.step(
                f"{stage}.atlas", lambda i=index: atlas(layers, 5 * i, role=role, roles_of=roles)
            )
        history = TrainingHistory(
            steps=300, losses=losses, validation_loss=0.25, validation_accuracy=0.9
        )
        run.step("training", lambda: TrainedWeights(tensors={"w": torch.ones(2)}, history=history))
        run.step("statements", lambda: verification(name, "claim"))
        run.warn(f"{name}: the key bias is exactly flat")
    return path
