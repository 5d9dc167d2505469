"""Directions the loss does not see, and Lie identities of its symmetries (derivations §17)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvatlas.closed_form.modules import TransformerBlockHessian
from oracles import gradient

TOLERANCE = 1e-12


class Setting:
    """A block with its Hessian and gradient, vectors as named pieces."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(11)
        self.block = TransformerBlockHessian(6, 5, 2, d_k=4, d_v=2, **options).double()  # type: ignore[arg-type]
        with torch.no_grad():
            for p in self.block.parameters():
                p.add_(torch.randn_like(p) * 0.4)
        x, y = torch.randn(2, 2, 4, 6, dtype=torch.float64).unbind()
        self.H = self.block.compute_block_hessian(x, y).H
        self.weights = {n: p.detach() for n, p in self.block.named_parameters()}
        loss = (self.block(x) - y).pow(2).mean()
        flat = gradient(loss, list(self.block.parameters()))
        self.gradient = self.split(flat)

    def split(self, v: Tensor) -> dict[str, Tensor]:
        pieces = v.split([w.numel() for w in self.weights.values()])
        return {n: p.view_as(self.weights[n]) for n, p in zip(self.weights, pieces, strict=True)}

    def flat(self, pieces: dict[str, Tensor]) -> Tensor:
        return torch.cat(
            [pieces.get(n, torch.zeros_like(w)).reshape(-1) for n, w in self.weights.items()]
        )

    def check(self, direction: dict[str, Tensor], image: dict[str, Tensor]) -> None:
        xi, want = self.flat(direction), self.flat(image)
        error = float((self.H @ xi - want).norm())
        assert error <= TOLERANCE * float(self.H.norm() * xi.norm())


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"causal": True}])
def test_key_bias_directions_are_annihilated(options: dict[str, object]) -> None:
    setting = Setting(**options)
    setting.check({"key_bias": torch.randn(8, dtype=torch.float64)}, {})


def test_shifts_removed_by_the_layer_norms_are_annihilated() -> None:
    setting = Setting()
    ones = torch.ones(6, 1, dtype=torch.float64)
    a = torch.randn(1, 5, dtype=torch.float64)
    setting.check({"down_weight": ones * a, "down_bias": ones[:, 0] * 0.7}, {})
    c = torch.randn(1, 4, dtype=torch.float64)
    setting.check({"output_weight": ones * c, "output_bias": ones[:, 0] * 1.3}, {})


def test_rms_norm_does_see_the_shift() -> None:
    setting = Setting(norm="rms")
    shift = {"down_weight": torch.ones(6, 5, dtype=torch.float64)}
    assert float((setting.H @ setting.flat(shift)).norm()) > 1e-3 * float(setting.H.norm())


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("norm_first", [False, True])
def test_query_key_rotation_obeys_its_lie_identity(head: int, norm_first: bool) -> None:
    setting = Setting(norm_first=norm_first)
    w, g = setting.weights, setting.gradient
    S = torch.randn(4, 4, dtype=torch.float64)
    rows = slice(4 * head, 4 * head + 4)

    def place(name: str, value: Tensor) -> Tensor:
        full = torch.zeros_like(w[name])
        full[rows] = value
        return full

    # q → Sᵀq, k → −S k leaves qᵀk as it is to first order: H ξ = −Gᵀ ∇.
    direction, image = {}, {}
    for kind in ("weight", "bias"):
        q, k = f"query_{kind}", f"key_{kind}"
        direction[q], direction[k] = place(q, S.T @ w[q][rows]), place(k, -S @ w[k][rows])
        image[q], image[k] = place(q, -S @ g[q][rows]), place(k, S.T @ g[k][rows])
    setting.check(direction, image)


@pytest.mark.parametrize("head", [0, 1])
def test_value_output_rescaling_obeys_its_lie_identity(head: int) -> None:
    setting = Setting()
    w, g = setting.weights, setting.gradient
    S = torch.randn(2, 2, dtype=torch.float64)
    part = slice(2 * head, 2 * head + 2)
    direction = {n: torch.zeros_like(w[n]) for n in ("value_weight", "value_bias", "output_weight")}
    image = {n: torch.zeros_like(w[n]) for n in direction}
    for name in ("value_weight", "value_bias"):
        direction[name][part] = S @ w[name][part]
        image[name][part] = -S.T @ g[name][part]
    direction["output_weight"][:, part] = -w["output_weight"][:, part] @ S
    image["output_weight"][:, part] = g["output_weight"][:, part] @ S.T
    setting.check(direction, image)


@pytest.mark.parametrize("norm_first", [False, True])
def test_relu_rescaling_obeys_its_lie_identity(norm_first: bool) -> None:
    setting = Setting(activation="relu", norm_first=norm_first)
    w, g = setting.weights, setting.gradient
    scale = torch.randn(5, dtype=torch.float64)
    direction = {
        "up_weight": scale[:, None] * w["up_weight"],
        "up_bias": scale * w["up_bias"],
        "down_weight": -w["down_weight"] * scale,
    }
    image = {
        "up_weight": -scale[:, None] * g["up_weight"],
        "up_bias": -scale * g["up_bias"],
        "down_weight": g["down_weight"] * scale,
    }
    setting.check(direction, image)
