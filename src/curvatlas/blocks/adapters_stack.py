"""Whole models read as stacks: their blocks, final norm and head.

Embeddings stay outside: the stack's input is what enters the first block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvatlas.blocks.adapters import (
    FlatOrder,
    Pick,
    Picked,
    UnmappedModuleError,
    flat_numbers,
    map_norm,
    read_module,
    refuse_dropout,
)
from curvatlas.blocks.adapters_huggingface import BERT, LLAMA
from curvatlas.blocks.products_head import Pooling, Readout
from curvatlas.blocks.structure import BlockSpec


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where a model keeps its blocks, final norm and head."""

    blocks: str
    norm: str | None = None
    head: str | None = None
    pooling: Pooling | None = None


# class name → layouts to try, the current library's first
_LAYOUTS: dict[str, tuple[_Layout, ...]] = {
    "TransformerEncoder": (_Layout(blocks="layers", norm="norm"),),
    "GPT": (_Layout(blocks="blocks", norm="norm", head="head"),),
    "ViT": (_Layout(blocks="blocks", norm="norm", head="head", pooling="first"),),
    **dict.fromkeys(("GPT2Model", "GPTNeoModel"), (_Layout(blocks="h", norm="ln_f"),)),
    **dict.fromkeys(
        ("GPT2LMHeadModel", "GPTNeoForCausalLM"),
        (_Layout(blocks="transformer.h", norm="transformer.ln_f", head="lm_head"),),
    ),
    **dict.fromkeys((f"{name}Model" for name in LLAMA), (_Layout(blocks="layers", norm="norm"),)),
    **dict.fromkeys(
        (f"{name}ForCausalLM" for name in LLAMA),
        (_Layout(blocks="model.layers", norm="model.norm", head="lm_head"),),
    ),
    **dict.fromkeys((f"{name}Encoder" for name in BERT), (_Layout(blocks="layer"),)),
    **dict.fromkeys((f"{name}Model" for name in BERT), (_Layout(blocks="encoder.layer"),)),
    "DistilBertModel": (_Layout(blocks="transformer.layer"),),
    "ViTModel": (
        _Layout(blocks="layers", norm="layernorm"),
        _Layout(blocks="encoder.layer", norm="layernorm"),
    ),
    "ViTForImageClassification": (
        _Layout(blocks="vit.layers", norm="vit.layernorm", head="classifier", pooling="first"),
        _Layout(
            blocks="vit.encoder.layer", norm="vit.layernorm", head="classifier", pooling="first"
        ),
    ),
}
_HOMES = ("torch.nn.", "curvatlas.zoo", "transformers.")


@dataclass(frozen=True, kw_only=True, eq=False)
class MappedStack(FlatOrder):
    """A model read as a stack."""

    blocks: list[tuple[BlockSpec, Picked]]
    readout: Readout


def map_stack(module: nn.Module, *, head: bool = True) -> MappedStack:
    """Read a model as blocks, final norm and head; ``head=False`` leaves the head away."""
    layout = _layout(module)
    refuse_dropout(module)
    parameters = dict(module.named_parameters())
    values = {name: value.detach() for name, value in parameters.items()}
    numbers = flat_numbers(parameters)
    blocks: list[tuple[BlockSpec, Picked]] = []
    pieces: list[Tensor] = []
    for index, layer in enumerate(_children(module, layout.blocks)):
        spec, pick = read_module(layer)
        prefix = f"{layout.blocks}.{index}."
        blocks.append((spec, _within(values, prefix, pick)))
        pieces += _within(numbers, prefix, pick).values()
    options, names = _readout_options(module, layout, parameters, head=head)
    pieces += [numbers[name] for name in names]
    return MappedStack(
        blocks=blocks,
        readout=Readout(**options),  # type: ignore[arg-type]
        positions=torch.cat([piece.reshape(-1) for piece in pieces]),
        module_size=sum(parameter.numel() for parameter in parameters.values()),
    )


def _layout(module: nn.Module) -> _Layout:
    kind = type(module)
    if kind.__module__.startswith(_HOMES):
        for layout in _LAYOUTS.get(kind.__name__, ()):
            if _find(module, layout.blocks) is not None:
                return layout
    raise UnmappedModuleError(
        f"{kind.__name__} is no model the closed forms know as a stack: they read "
        f"{', '.join(_LAYOUTS)}; BlockStack takes a list of (spec, weights) for others."
    )


def _find(module: nn.Module, path: str) -> nn.Module | None:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def _children(module: nn.Module, path: str) -> list[nn.Module]:
    return list(_find(module, path).children())  # type: ignore[union-attr]


def _within(values: Mapping[str, Tensor], prefix: str, pick: Pick) -> Picked:
    inside = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
    return pick(inside)


def _readout_options(
    module: nn.Module, layout: _Layout, parameters: Mapping[str, Tensor], *, head: bool
) -> tuple[dict[str, object], list[str]]:
    """Keywords of ``Readout``, and the parameters' names in its flat order."""
    options: dict[str, object] = {}
    names: list[str] = []
    norm = None if layout.norm is None else _find(module, layout.norm)
    if norm is not None and not isinstance(norm, nn.Identity):
        mapped = map_norm(norm)
        options |= {"norm": mapped.norm, "eps": mapped.eps}
        options |= {"norm_weight": mapped.weight, "norm_bias": mapped.bias}
        names += [f"{layout.norm}.{name}" for name, _ in norm.named_parameters()]
    found = None if layout.head is None or not head else _find(module, layout.head)
    if found is None or isinstance(found, nn.Identity):
        return options, names
    if type(found) is not nn.Linear:
        raise UnmappedModuleError(
            f"the head {layout.head} is a {type(found).__name__}, not nn.Linear: pass head=False."
        )
    options |= {"weight": found.weight.detach(), "pooling": _pooling(module, layout)}
    options["bias"] = None if found.bias is None else found.bias.detach()
    own = [f"{layout.head}.{name}" for name, _ in found.named_parameters()]
    if all(name in parameters for name in own):
        names += own
    else:  # tied: the other use lies in the embedding, outside the stack
        options["frozen_head"] = True
    return options, names


def _pooling(module: nn.Module, layout: _Layout) -> Pooling | None:
    config = getattr(module, "config", None)
    if layout.pooling is not None and getattr(config, "pooling", None) == "mean":
        return "mean"
    return layout.pooling
