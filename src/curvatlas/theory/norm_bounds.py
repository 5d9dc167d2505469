"""Bounds on the Hessian's norm that a user can call on their own block or stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvatlas.layers.losses import OutputLoss, Seeds, resolve_loss
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec, Weights, require_plain
from curvatlas.results import Result
from curvatlas.theory.attention_bounds import corrected_bound, published_theorem_1
from curvatlas.theory.reference import SingleHead
from curvatlas.theory.token_bound import entry_bounds, exact_norm, stack_token_bound
from curvatlas.zoo.block import feed_forward, forward_pass, normalised

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
    """Bounds of one token matrix Y(θ) (N, ·) over groups g of parameters.

    ‖Y‖₂ ≤ size,   ‖y_i‖ ≤ token,   ‖D_g Y[u]‖_F ≤ jac_g‖u‖,   ‖D²_gh Y[u, v]‖_F ≤ hess_gh‖u‖‖v‖
    """

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
    """The rules for N tokens in samples of L, from norms of inputs and weights only.

    Composed through attention, norms and feed-forward they bound the Hessian of any block or stack:
    ‖H_gh‖ ≤ ‖Λ‖ jac_g jac_h + ‖δ‖_F hess_gh,  ‖H‖ ≤ ‖[that matrix]‖₂ (derivations §13).
    """

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
        augmented, token, size = norm, x.token, x.size
        if bias is not None:
            augmented = float(
                torch.linalg.matrix_norm(torch.cat([weight, bias.unsqueeze(1)], 1), 2)
            )
            token, size = math.hypot(token, 1.0), math.hypot(size, math.sqrt(self.tokens))
        unit = self._unit(group)
        mixed = torch.outer(x.jac, unit)
        self.chain[f"norm of {group} ({tuple(weight.shape)})"] = augmented
        return Majorant(
            size * augmented,
            x.spread * norm,
            token * augmented,
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
        rate = math.hypot(
            column if gamma is not None else 0.0, math.sqrt(n) if beta is not None else 0.0
        )
        new_token = largest * token + shift
        size = math.sqrt(n) * new_token
        spread = min(size, largest * (column if spec.norm == "none" else math.sqrt(n * d)))
        y_jac, y_hess = largest * jac, largest * hess
        if group in self.groups:
            unit = self._unit(group)
            mixed = torch.outer(jac, unit) if gamma is not None else torch.zeros_like(hess)
            y_jac, y_hess = y_jac + rate * unit, y_hess + mixed + mixed.T
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
    groups: list[str] = []
    for name in weights:
        group = prefix + name.rsplit("_", 1)[0].replace("gate", "up")
        if group not in groups:
            groups.append(group)
    return groups


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


_ATTENTION = frozenset({"query", "key", "value", "output"})


@dataclass(frozen=True, kw_only=True)
class CurvatureBounds(Result):
    """Upper bounds on ‖H‖₂ over all parameters, and the norm itself.

    ``printed`` is the sources' formula (Theorem 1 for bare attention, the 5·max rule
    of Theorem 6 otherwise): shown for comparison, ``printed_is_valid`` says whether it is a bound.
    """

    exact: float
    token_structured: float
    data_free: float
    printed: float
    printed_source: str
    printed_is_valid: bool
    chain: dict[str, float]  # input norm, weight norms, L, d_k, … → the data-free bound
    token_names: tuple[str, ...]
    token_matrix: Tensor  # bounds by pairs of parameter groups
    data_free_names: tuple[str, ...]
    data_free_matrix: Tensor

    @property
    def looseness(self) -> dict[str, float]:
        """Each bound divided by the exact norm."""
        values = {
            "token_structured": self.token_structured,
            "data_free": self.data_free,
            "printed": self.printed,
        }
        return {k: v / self.exact if self.exact > 0 else math.inf for k, v in values.items()}

    def _rows(self) -> list[dict[str, Any]]:
        """The exact norm and every bound of it."""
        names = ("exact", "token_structured", "data_free", "printed")
        return [{"bound": name.replace("_", " "), "value": getattr(self, name)} for name in names]

    def __str__(self) -> str:
        loose = self.looseness
        note = "" if self.printed_is_valid else ", NOT a valid bound"
        return "\n".join(
            [
                f"exact            {self.exact:.4g}",
                f"token-structured {self.token_structured:.4g}"
                f"  ({loose['token_structured']:.2f} ×)",
                f"data-free        {self.data_free:.4g}  ({loose['data_free']:.3g} ×)",
                f"printed          {self.printed:.4g}  ({loose['printed']:.3g} ×,"
                f" {self.printed_source}{note})",
                "chain: " + ", ".join(f"{k} = {v:.3g}" for k, v in self.chain.items()),
            ]
        )


def bounds(
    block: Any,
    x: Tensor,
    target: Tensor,
    *,
    loss: str | OutputLoss | None = None,
    mask: Tensor | None = None,
) -> CurvatureBounds:
    """Bounds on the spectral norm of a block's (or stack's) Hessian at inputs x (n, L, d).

    ``block``: ``SelfAttentionHessian``, ``TransformerBlockHessian``, ``BlockStack``, a pair
    (spec, weights) or a list of pairs (a stack). All parameters are covered: weights, biases, γ, β.
    ``loss=None``: the stack's own, else mse, or cross-entropy when the targets are integers.
    With a loss given by name everything is computed in float64, whatever the block's dtype.
    """
    layers = as_layers(block)
    if loss is None:
        loss = getattr(block, "loss", None)  # a stack's own
    if loss is None:
        loss = "mse" if target.is_floating_point() else "cross_entropy"
    if isinstance(loss, str):
        layers = [(spec, {n: w.double() for n, w in weights.items()}) for spec, weights in layers]
        x = x.double()
        target = target.double() if target.is_floating_point() else target
    x = x.detach()
    if x.ndim == 2:
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    _check(layers, x, target)
    resolved = resolve_loss(loss)
    if len(layers) > 1:
        names, matrix, token, exact, seeds = stack_token_bound(layers, x, target, resolved, mask)
    else:
        spec, weights = layers[0]
        seeds = resolved.seeds(forward_pass(spec, weights, x, mask)[0], target)
        entries = entry_bounds(spec, weights, x, seeds, mask=mask)
        names, matrix, token = entries.names, entries.matrix, float(entries.norm())
        exact = exact_norm(layers, x, target, resolved, mask)
    data_names, data_matrix, chain = data_free_matrix(layers, x, seeds, mask)
    data_free = float(torch.linalg.eigvalsh(data_matrix)[-1])
    printed = len(data_names) * float(data_matrix.max())
    source, valid = f"{len(data_names)}·max of group bounds, as in Petrov et al., Theorem 6", True
    head = as_single_head(layers, x, target, loss, mask)
    if head is not None:
        data_free = min(data_free, float(corrected_bound(head)))
        printed = 3.0 * max(float(line) for line in published_theorem_1(head).values())
        source, valid = "Petrov et al., Theorem 1", False
    return CurvatureBounds(
        exact=exact,
        token_structured=token,
        data_free=data_free,
        printed=printed,
        printed_source=source,
        printed_is_valid=valid,
        chain=chain | {"bound": data_free},
        token_names=names,
        token_matrix=matrix,
        data_free_names=tuple(data_names),
        data_free_matrix=data_matrix,
    )


def as_layers(block: Any) -> list[tuple[BlockSpec, dict[str, Tensor]]]:
    """(spec, weights) of every layer; weights in ``WEIGHT_NAMES`` order and detached."""
    if hasattr(block, "specs") and hasattr(block, "readout"):  # a BlockStack
        if block.readout.weights:
            raise ValueError("bounds cover the blocks of a stack: pass it without a readout.")
        pairs: Sequence[tuple[BlockSpec, Weights]] = list(
            zip(block.specs, block.weights, strict=True)
        )
    elif isinstance(block, tuple) and len(block) == 2 and isinstance(block[0], BlockSpec):
        pairs = [block]
    elif isinstance(block, (list, tuple)):
        return [layer for part in block for layer in as_layers(part)]
    elif hasattr(block, "spec") and hasattr(block, "weights"):
        weights = block.weights() if callable(block.weights) else block.weights
        pairs = [(block.spec, weights)]
    else:
        raise TypeError(
            "bounds need a closed-form block, a stack or (spec, weights), "
            f"got {type(block).__name__}."
        )
    for spec, _ in pairs:
        require_plain(spec, "the theory")
    return [
        (spec, {n: weights[n].detach() for n in WEIGHT_NAMES if n in weights})
        for spec, weights in pairs
    ]


def _check(layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor, target: Tensor) -> None:
    width = layers[0][0].d_model
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(
            f"the input must be (n, L, {width}) or (L, {width}), got {tuple(x.shape)}."
        )
    if target.is_floating_point() and target.shape != x.shape:
        raise ValueError(
            f"the target must have the output's shape {tuple(x.shape)}, got {tuple(target.shape)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise ValueError("the input contains NaN or Inf: no derivative is defined there.")


def as_single_head(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: str | OutputLoss,
    mask: Tensor | None,
) -> SingleHead | None:
    """The papers' setting of Theorem 1, when the block is one: else None."""
    spec, weights = layers[0]
    plain = (
        len(layers) == 1
        and not spec.residual
        and set(weights) == {"query_weight", "key_weight", "value_weight"}
        and spec.n_heads == 1
        and spec.softmax
        and not spec.causal
        and spec.scale is None
        and spec.rope_base is None
        and mask is None
        and loss == "mse"
        and x.shape[0] == 1
    )
    if not plain:
        return None
    return SingleHead(
        x[0],
        weights["query_weight"].T,
        weights["key_weight"].T,
        weights["value_weight"].T,
        target[0],
    )


def data_free_matrix(
    layers: Sequence[tuple[BlockSpec, Weights]], x: Tensor, seeds: Seeds, mask: Tensor | None
) -> tuple[list[str], Tensor, dict[str, float]]:
    """Group bounds by norm calculus, with the chain of numbers that leads to them."""
    prefixes = [f"{i}." if len(layers) > 1 else "" for i in range(len(layers))]
    groups = [g for p, (_, w) in zip(prefixes, layers, strict=True) for g in groups_of(w, p)]
    tokens, length = x.shape[0] * x.shape[1], x.shape[1]
    calculus = Calculus(tokens, length, groups)
    calculus.chain |= {
        "input norm": float(torch.linalg.matrix_norm(x.reshape(tokens, -1), 2)),
        "largest token": float(x.norm(dim=-1).max()),
        "L": float(length),
        "d_k": float(layers[0][0].key_size),
    }
    y, z = calculus.constant(x.double()), x
    for prefix, (spec, weights) in zip(prefixes, layers, strict=True):
        y = through_block(
            calculus, y, spec, weights, smallest_deviations(spec, weights, z, mask), prefix
        )
        z = forward_pass(spec, weights, z, mask)[0]
    probe = seeds.blocks(slice(None)) if seeds.blocks is not None else None
    if probe is None:
        raise ValueError(
            "bounds need a loss that does not couple tokens: use mse or token cross-entropy."
        )
    curvature = float(torch.linalg.matrix_norm(probe, 2).max())
    residual = float(seeds.delta.norm())
    calculus.chain |= {
        "loss: norm of second derivative": curvature,
        "loss: gradient norm": residual,
    }
    matrix = curvature * torch.outer(y.jac, y.jac) + residual * y.hess
    return groups, matrix, calculus.chain


def smallest_deviations(
    spec: BlockSpec, weights: Weights, x: Tensor, mask: Tensor | None
) -> dict[str, float]:
    """min over tokens of σ in front of norm1 and norm2 (empty without norms)."""
    if spec.norm == "none" or not spec.residual:
        return {}

    def smallest(tokens: Tensor) -> float:
        return float((1.0 / normalize(tokens, eps=spec.eps, norm=spec.norm)[1]).min())

    half = replace(spec, d_ff=None)
    attention = {n: w for n, w in weights.items() if n.split("_")[0] in _ATTENTION}
    if spec.norm_first:
        front = {n: w for n, w in weights.items() if n.startswith("norm1")}
        u = forward_pass(half, attention | front, x, mask)[0]
        return {"norm1": smallest(x), "norm2": smallest(u)}
    u = forward_pass(replace(half, norm="none"), attention, x, mask)[0]
    y = normalised(spec, weights, u, "norm1")
    smallest_of = {"norm1": smallest(u)}
    if spec.d_ff is not None:
        smallest_of["norm2"] = smallest(y + feed_forward(spec, weights, y))
    return smallest_of
