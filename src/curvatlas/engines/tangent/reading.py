"""From existing modules to closed forms: who is who, and back to the module's own order.

``map_module(layer)`` reads ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer``, the zoo's
blocks and the layers of many Hugging Face families as a ``BlockSpec`` with weights; the weights are
views of the module's own memory. ``map_norm`` does the same for norms. What the closed
forms do not cover is refused with the reason, never approximated.

Each family is one function that picks our weights out of the module's named parameters. The same
function applied to position numbers gives the permutation between the two flat orders, so fused
projections and transposed ``Conv1D`` weights need no second description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvatlas.engines.tangent.block import weight_shapes
from curvatlas.engines.tangent.feed_forward import ACTIVATIONS, activation_derivatives
from curvatlas.engines.tangent.structure import WEIGHT_NAMES, Activation, BlockSpec, Norm

Picked = dict[str, Tensor]
Pick = Callable[[Mapping[str, Tensor]], Picked]


class UnmappedModuleError(TypeError):
    """A module that the closed forms do not cover; the message says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatOrder:
    """The permutation between a flat vector of ours and the module's ``named_parameters()``."""

    positions: Tensor  # (P,) where each of our entries stands in the module's flat vector
    module_size: int

    def to_module_order(self, vector: Tensor) -> Tensor:
        """Ours (P,) or (P, K) → the module's; parameters outside the mapping get zero."""
        self._check(vector, len(self.positions))
        moved = vector.new_zeros(self.module_size, *vector.shape[1:])
        moved[self.positions.to(vector.device)] = vector
        return moved

    def from_module_order(self, vector: Tensor) -> Tensor:
        """The module's flat vector (size,) or columns (size, K) → ours."""
        self._check(vector, self.module_size)
        return vector[self.positions.to(vector.device)]

    @staticmethod
    def _check(vector: Tensor, size: int) -> None:
        if vector.ndim not in (1, 2) or vector.shape[0] != size:
            raise ValueError(f"expected ({size},) or ({size}, K), got {tuple(vector.shape)}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class MappedBlock(FlatOrder):
    """A module read as a block: its description and its weights (views, no copies)."""

    spec: BlockSpec
    weights: Picked


@dataclass(frozen=True, kw_only=True, eq=False)
class MappedNorm:
    """A module read as a norm over the last axis."""

    norm: Norm
    size: int
    eps: float
    weight: Tensor | None
    bias: Tensor | None


def map_module(module: nn.Module) -> MappedBlock:
    """Read an attention layer or a Transformer block as ``BlockSpec`` and weights."""
    spec, pick = read_module(module)
    parameters = dict(module.named_parameters())
    weights = pick({name: value.detach() for name, value in parameters.items()})
    positions, size = flat_positions(parameters, pick)
    if len(positions) != size:
        covered = torch.zeros(size, dtype=torch.bool)
        covered[positions] = True
        left = [n for n, p in flat_numbers(parameters).items() if not bool(covered[p].all())]
        raise UnmappedModuleError(
            f"{type(module).__name__} has parameters the closed form does not: {', '.join(left)}."
        )
    return MappedBlock(spec=spec, weights=weights, positions=positions, module_size=size)


def read_module(module: nn.Module) -> tuple[BlockSpec, Pick]:
    """The description of a layer, and the function that picks its weights by parameter name."""
    from curvatlas.engines.tangent.families import HUGGING_FACE, TORCH, reason_against

    for matches, read in (*TORCH, *HUGGING_FACE):
        if matches(module):
            refuse_dropout(module)
            spec, pick = read(module)
            return spec, _checked(type(module).__name__, spec, pick)
    known = reason_against(module)
    if known is not None:
        raise UnmappedModuleError(
            f"{type(module).__name__} {known}: not in the closed form, use ca.Hessian(problem)."
        )
    raise UnmappedModuleError(
        f"{type(module).__name__} is no layer the closed forms know: they read "
        "nn.MultiheadAttention, nn.TransformerEncoderLayer, the zoo's blocks, and the layers of "
        "Hugging Face GPT-2, GPT-Neo, OPT, BERT and its kin, ViT, BART and Whisper encoders, "
        "Llama, Mistral, Qwen2, OLMo; use ca.Hessian(problem) for other modules."
    )


def map_norm(module: nn.Module) -> MappedNorm:
    """Read ``nn.LayerNorm``, ``nn.RMSNorm`` or a Llama-style RMSNorm."""
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    name = type(module).__name__
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        shape = tuple(module.normalized_shape)
        if len(shape) != 1:
            raise UnmappedModuleError(
                f"{name} normalises over {len(shape)} axes {shape}: the closed form has one."
            )
        norm: Norm = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        size, eps = shape[0], module.eps
        if eps is None:  # nn.RMSNorm's default: the machine epsilon of its dtype
            eps = torch.finfo(weight.dtype if weight is not None else torch.float32).eps
    elif name in ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm") and weight is not None:
        norm, size, eps = "rms", weight.shape[0], float(module.variance_epsilon)  # type: ignore[arg-type]
    elif name == "OlmoLayerNorm":  # no weights; its epsilon is written into its forward
        norm, size, eps = "layer", int(module.normalized_shape[0]), 1e-5  # type: ignore[index]
    else:
        raise UnmappedModuleError(f"{name} is no norm the closed forms know (LayerNorm, RMSNorm).")
    return MappedNorm(
        norm=norm,
        size=size,
        eps=float(eps),
        weight=None if weight is None else weight.detach(),
        bias=None if bias is None else bias.detach(),
    )


def shared_norm(first: nn.Module, second: nn.Module) -> tuple[Norm, float]:
    """Kind and ε of a block's two norms, which a ``BlockSpec`` holds once."""
    one, two = map_norm(first), map_norm(second)
    if (one.norm, one.eps) != (two.norm, two.eps):
        raise UnmappedModuleError(
            f"the block mixes norms: {one.norm} with eps={one.eps:g} and {two.norm} with "
            f"eps={two.eps:g}; the closed form has one kind and one eps."
        )
    return one.norm, one.eps


def activation_name(function: Callable[[Tensor], Tensor]) -> Activation:
    """The activation that ``function`` computes, recognised by its values on a grid.

    By value, because the same GELU hides behind functions, modules and configuration strings of
    every library; a rounded constant (``gelu_fast``) is a different function and is refused.
    """
    grid = torch.linspace(-12, 12, 2401, dtype=torch.float64)
    with torch.no_grad():
        values = function(grid.clone())
    for name in ACTIVATIONS:
        if values.shape == grid.shape and values.dtype == grid.dtype:
            error = (values - activation_derivatives(name, grid, order=0)[0]).abs().max()
            if float(error) <= 1e-13 * 12:
                return name
    described = getattr(function, "__name__", None) or type(function).__name__
    raise UnmappedModuleError(
        f"the activation {described} is none of {', '.join(ACTIVATIONS)} to rounding."
    )


def refuse_dropout(module: nn.Module) -> None:
    """Raise when the module is in training mode with a dropout that would act."""
    for name, part in module.named_modules():
        rate = getattr(part, "p", 0.0) if isinstance(part, nn.Dropout) else 0.0
        for field in ("dropout", "attention_dropout"):
            value = getattr(part, field, 0.0)
            rate = max(rate, value) if isinstance(value, float) else rate
        if part.training and rate > 0:
            where = f"{name} " if name else ""
            raise UnmappedModuleError(
                f"dropout of {rate:g} is active in {where}({type(part).__name__}): "
                "call module.eval(), the Hessian of a random loss is not defined."
            )


def take(values: Mapping[str, Tensor], ours: str, theirs: str) -> Picked:
    """``{ours}_weight`` and ``{ours}_bias`` from a linear layer or norm of (out, in) layout."""
    names = {f"{ours}_weight": f"{theirs}.weight", f"{ours}_bias": f"{theirs}.bias"}
    return {mine: values[name] for mine, name in names.items() if name in values}


def _checked(kind: str, spec: BlockSpec, pick: Pick) -> Pick:
    """``pick`` in our order, refusing parameters that are missing or of another shape."""
    expected = weight_shapes(spec)

    def checked(values: Mapping[str, Tensor]) -> Picked:
        try:
            picked = pick(values)
        except KeyError as error:
            raise UnmappedModuleError(
                f"{kind} has no parameter {error}: it is parametrised, quantised, adapted or "
                "shared with another layer; undo that first."
            ) from error
        for name, value in picked.items():
            if tuple(value.shape) != expected.get(name):
                raise UnmappedModuleError(
                    f"{kind}: {name} has shape {tuple(value.shape)}, a block of this description "
                    f"needs {expected.get(name)}."
                )
        return {name: picked[name] for name in WEIGHT_NAMES if name in picked}

    return checked


def flat_numbers(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter replaced by the positions of its entries in the flat vector."""
    numbers, start = {}, 0
    for name, parameter in parameters.items():
        count = parameter.numel()
        numbers[name] = torch.arange(start, start + count).view(parameter.shape)
        start += count
    return numbers


def flat_positions(parameters: Mapping[str, Tensor], pick: Pick) -> tuple[Tensor, int]:
    """Where each of the picked entries stands in the parameters' flat vector, and its length."""
    picked = pick(flat_numbers(parameters))
    pieces = [value.reshape(-1) for value in picked.values()]
    size = sum(parameter.numel() for parameter in parameters.values())
    return (torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)), size
