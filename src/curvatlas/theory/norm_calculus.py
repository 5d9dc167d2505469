r"""Norm calculus: bounds on value, first and second derivatives carried through a network.

A ``Majorant`` of a token matrix Y(θ) knows, over groups g of parameters,

    ‖Y‖₂ ≤ size,   ‖y_i‖ ≤ token,   ‖D_g Y[u]‖_F ≤ jac_g‖u‖,   ‖D²_gh Y[u, v]‖_F ≤ hess_gh‖u‖‖v‖,

from norms of inputs and weights only. Composing these rules through attention, norms and
feed-forward bounds the Hessian of any block or stack without one entry of it:

    ‖H_gh‖ ≤ ‖Λ‖ jac_g jac_h + ‖δ‖_F hess_gh,     ‖H‖ ≤ ‖[that matrix]‖₂.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvatlas.blocks.structure import BlockSpec, Weights

# (sup |f'|, sup |f''|); |f(z)| ≤ |z| for all of them
_ACTIVATION_BOUNDS = {
    "relu": (1.0, 0.0),
    "gelu": (1.13, 0.798),
    "gelu_tanh": (1.13, 0.80),
    "silu": (1.10, 0.5),
    "identity": (1.0, 0.0),
}
_SOFTMAX_FIRST, _SOFTMAX_SECOND = 0.5, 1.0
_NORM_SECOND = 2.0 / math.sqrt(3.0)


@dataclass
class Majorant:
    """Bounds of one token matrix Y (N, ·); see the module's text."""

    size: float
    spread: float  # the same after subtracting each sample's mean token
    token: float
    jac: Tensor  # (G,)
    hess: Tensor  # (G, G)

    def __add__(self, other: Majorant) -> Majorant:
        return Majorant(
            self.size + other.size,
            self.spread + other.spread,
            self.token + other.token,
            self.jac + other.jac,
            self.hess + other.hess,
        )


@dataclass
class Calculus:
    """The rules for N tokens in samples of L, over named groups of parameters."""

    tokens: int
    length: int
    groups: list[str]
    chain: dict[str, float] = field(default_factory=dict)

    def constant(self, x: Tensor) -> Majorant:
        """The input (n, L, d): no derivative with respect to parameters."""
        flat = x.reshape(-1, x.shape[-1])
        zero = torch.zeros(len(self.groups), dtype=torch.float64)
        size = float(torch.linalg.matrix_norm(flat, 2))
        centred = (x - x.mean(1, keepdim=True)).reshape(flat.shape)
        spread = float(torch.linalg.matrix_norm(centred, 2))
        token = float(flat.norm(dim=1).max())
        return Majorant(size, spread, token, zero, torch.diag(zero))

    def _unit(self, group: str) -> Tensor:
        unit = torch.zeros(len(self.groups), dtype=torch.float64)
        unit[self.groups.index(group)] = 1.0
        return unit

    def linear(self, x: Majorant, weight: Tensor, bias: Tensor | None, group: str) -> Majorant:
        """Y = X̂Ŵᵀ: dY = dX Wᵀ + X̂ dŴᵀ."""
        norm = float(torch.linalg.matrix_norm(weight, 2))
        whole, token, size = norm, x.token, x.size
        if bias is not None:
            whole = float(torch.linalg.matrix_norm(torch.cat([weight, bias.unsqueeze(1)], 1), 2))
            token, size = math.hypot(token, 1.0), math.hypot(size, math.sqrt(self.tokens))
        unit = self._unit(group)
        mixed = torch.outer(x.jac, unit)
        self.chain[f"norm of {group} ({tuple(weight.shape)})"] = whole
        return Majorant(
            size * whole,
            x.spread * norm,
            token * whole,
            norm * x.jac + size * unit,
            norm * x.hess + mixed + mixed.T,
        )

    def attention(self, q: Majorant, k: Majorant, v: Majorant, spec: BlockSpec) -> Majorant:
        """O = A V with A = softmax(s Q Kᵀ): shifts of K and V within a sample do not matter."""
        ratio = math.sqrt(spec.n_heads / spec.kv_heads)
        root = math.sqrt(self.length)
        s = spec.logit_scale
        q_size, k_size, v_size = q.size, k.spread, v.spread
        if spec.rope_base is not None:  # rotations keep token norms but not the spectral norm
            q_size = math.sqrt(self.tokens) * q.token
            k_size = math.sqrt(self.tokens) * k.token
        if not spec.softmax:
            k_size, v_size = max(k_size, k.size), v.size
        k_jac, k_hess = ratio * k.jac, ratio * k.hess
        v_jac, v_hess = ratio * v.jac, ratio * v.hess
        crossed = torch.outer(q.jac, k_jac)
        t_jac = s * (k_size * q.jac + q_size * k_jac)
        t_hess = s * (k_size * q.hess + crossed + crossed.T + q_size * k_hess)
        if spec.softmax:
            a_size, a_jac = root, _SOFTMAX_FIRST * t_jac
            a_hess = _SOFTMAX_FIRST * t_hess + _SOFTMAX_SECOND * torch.outer(t_jac, t_jac)
            token = math.sqrt(spec.n_heads) * v.token
            size = min(root * v.size * ratio, math.sqrt(self.tokens) * token)
        else:
            a_size, a_jac, a_hess = s * q_size * k_size, t_jac, t_hess
            size = a_size * v.size * ratio
            token = size
        mixed = torch.outer(a_jac, v_jac)
        self.chain["softmax: first, second derivative"] = _SOFTMAX_FIRST
        self.chain["norm of A"] = a_size
        self.chain["1/sqrt(d_k)"] = s
        return Majorant(
            size,
            size,
            token,
            v_size * a_jac + a_size * v_jac,
            v_size * a_hess + mixed + mixed.T + a_size * v_hess,
        )

    def norm(
        self, x: Majorant, weights: Weights, which: str, spec: BlockSpec, sigma: float, group: str
    ) -> Majorant:
        """y = γ ⊙ n(x) + β with σ ≥ sigma at every token; identity for ``norm="none"``."""
        d, n = spec.d_model, self.tokens
        gamma, beta = weights.get(f"{which}_weight"), weights.get(f"{which}_bias")
        largest = 1.0 if gamma is None else float(gamma.abs().max())
        shift = 0.0 if beta is None else float(beta.norm())
        if spec.norm == "none":
            jac, hess, token, column = x.jac, x.hess, x.token, x.size
        else:
            bend = _NORM_SECOND / (math.sqrt(d) * sigma**2)
            jac = x.jac / sigma
            hess = x.hess / sigma + bend * torch.outer(x.jac, x.jac)
            token, column = math.sqrt(d), math.sqrt(n * d)
            self.chain[f"smallest std at {group}"] = sigma
        own = math.hypot(
            column if gamma is not None else 0.0, math.sqrt(n) if beta is not None else 0.0
        )
        new_token = largest * token + shift
        size = math.sqrt(n) * new_token
        spread = min(size, largest * (column if spec.norm == "none" else math.sqrt(n * d)))
        y_jac, y_hess = largest * jac, largest * hess
        if group in self.groups:
            unit = self._unit(group)
            mixed = torch.outer(jac, unit) if gamma is not None else torch.zeros_like(hess)
            y_jac, y_hess = y_jac + own * unit, y_hess + mixed + mixed.T
        return Majorant(size, spread, new_token, y_jac, y_hess)

    def hidden(self, up: Majorant, gate: Majorant | None, activation: str) -> Majorant:
        """g = f(h), or f(h_gate) ⊙ h_up."""
        first, second = _ACTIVATION_BOUNDS[activation]
        self.chain["activation: sup |f'|"] = first
        self.chain["activation: sup |f''|"] = second
        root = math.sqrt(self.tokens)
        if gate is None:
            size = root * up.token
            jac = first * up.jac
            hess = first * up.hess + second * torch.outer(up.jac, up.jac)
            return Majorant(size, size, up.token, jac, hess)
        token = gate.token * up.token
        mixed = first * torch.outer(gate.jac, up.jac)
        return Majorant(
            root * token,
            root * token,
            token,
            first * up.token * gate.jac + gate.token * up.jac,
            up.token * (first * gate.hess + second * torch.outer(gate.jac, gate.jac))
            + mixed
            + mixed.T
            + gate.token * up.hess,
        )


def groups_of(weights: Weights, prefix: str = "") -> list[str]:
    """Groups of a block's parameters: query, key, value, output, up (with gate), down, norms."""
    found: list[str] = []
    for name in weights:
        group = prefix + name.rsplit("_", 1)[0].replace("gate", "up")
        if group not in found:
            found.append(group)
    return found


def through_block(
    calculus: Calculus,
    x: Majorant,
    spec: BlockSpec,
    weights: Weights,
    sigmas: dict[str, float],
    prefix: str = "",
) -> Majorant:
    """One block; ``sigmas`` are the smallest standard deviations in front of norm1 and norm2."""

    def linear(inputs: Majorant, which: str, group: str | None = None) -> Majorant:
        return calculus.linear(
            inputs,
            weights[f"{which}_weight"],
            weights.get(f"{which}_bias"),
            prefix + (group or which),
        )

    def norm(inputs: Majorant, which: str) -> Majorant:
        return calculus.norm(inputs, weights, which, spec, sigmas.get(which, 1.0), prefix + which)

    def attend(inputs: Majorant) -> Majorant:
        mixed = calculus.attention(
            linear(inputs, "query"), linear(inputs, "key"), linear(inputs, "value"), spec
        )
        return linear(mixed, "output") if "output_weight" in weights else mixed

    def feed(inputs: Majorant) -> Majorant:
        gate = linear(inputs, "gate", "up") if spec.gated else None
        return linear(calculus.hidden(linear(inputs, "up"), gate, spec.activation), "down")

    if not spec.residual:
        return attend(x)
    if spec.norm_first:
        u = x + attend(norm(x, "norm1"))
        return u if spec.d_ff is None else u + feed(norm(u, "norm2"))
    y = norm(x + attend(x), "norm1")
    return y if spec.d_ff is None else norm(y + feed(y), "norm2")
