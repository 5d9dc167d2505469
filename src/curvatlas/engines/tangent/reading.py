"""Existing modules read as closed forms: who is who, and back to the module's own order.

``map_module(layer)`` reads ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer``, the zoo's
blocks and the layers of many Hugging Face families as a ``BlockSpec`` with weights, views of the
module's own memory. ``map_norm`` does the same for norms, ``map_stack`` for whole models: their
blocks, final norm and head (embeddings stay outside). What the closed forms do not cover is
refused with the reason, never approximated. To add a family, add a row to ``_LAYERS`` and, for
whole models, to ``_LAYOUTS``.

Reading a layer gives a function that picks our weights out of the module's named parameters. The
same function applied to position numbers gives the permutation between the two flat orders, so
fused projections and transposed ``Conv1D`` weights need no second description.

``read_call`` reads what a layer is called with inside a model: its input, and masks and rotary
positions in every convention the libraries have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.engines.tangent.attention import Rotation
from curvatlas.engines.tangent.attention_core import Keyless
from curvatlas.engines.tangent.block import LinearisedBlock, weight_shapes
from curvatlas.engines.tangent.feed_forward import ACTIVATIONS, activation_derivatives
from curvatlas.engines.tangent.head import Pooling, Readout
from curvatlas.engines.tangent.structure import (
    WEIGHT_NAMES,
    Activation,
    BlockSpec,
    Norm,
    Weights,
)

Picked = dict[str, Tensor]
Pick = Callable[[Mapping[str, Tensor]], Picked]
_PROJECTIONS = ("query", "key", "value")


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


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCall:
    """What one call of a layer brings, in the conventions of ``LinearisedBlock``.

    ``causal`` says whether the rule of ``spec.causal`` and ``spec.window`` applies; where the call
    brings a mask that holds it already, or the module applies none, it does not.
    """

    x: Tensor  # (n, L, d)
    mask: Tensor | None = None  # boolean, True = attend, or added to the logits
    rotation: Rotation | None = None
    causal: bool = False
    keyless: Keyless = "refuse"
    time_major: bool = False  # the module itself takes and gives (L, n, d)
    batched: bool = True  # False: the module itself takes and gives (L, d)

    def spec_for(self, spec: BlockSpec) -> BlockSpec:
        """The layer's description without a causal rule that this call does not have."""
        return spec if self.causal else replace(spec, causal=False, window=None)

    def of_samples(self, samples: slice) -> BlockCall:
        """The same call for some of its samples."""
        mask, rotation = self.mask, self.rotation
        if mask is not None and mask.ndim == 4 and len(mask) == len(self.x):
            mask = mask[samples]
        if rotation is not None:
            rotation = rotation.of_samples(samples)
        return replace(self, x=self.x[samples], mask=mask, rotation=rotation)

    def linearise(self, spec: BlockSpec, weights: Weights, **options: Any) -> LinearisedBlock:
        """The block of this call; ``options`` are those of ``LinearisedBlock``."""
        return LinearisedBlock(
            self.spec_for(spec),
            weights,
            self.x,
            self.mask,
            rotation=self.rotation,
            keyless=self.keyless,
            **options,
        )

    def as_module(self, z: Tensor) -> Tensor:
        """An output (n, L, d) in the axes the module itself gives."""
        if not self.batched:
            return z[0]
        return z.transpose(0, 1) if self.time_major else z


def map_module(module: nn.Module) -> MappedBlock:
    """Read an attention layer or a Transformer block as ``BlockSpec`` and weights."""
    spec, pick = read_module(module)
    _refuse_special_forms(module, spec)
    parameters = dict(module.named_parameters())
    weights = pick({name: value.detach() for name, value in parameters.items()})
    numbers = flat_numbers(parameters)
    size = sum(parameter.numel() for parameter in parameters.values())
    pieces = [value.reshape(-1) for value in pick(numbers).values()]
    positions = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)
    if len(positions) != size:
        covered = torch.zeros(size, dtype=torch.bool)
        covered[positions] = True
        left = [n for n, p in numbers.items() if not bool(covered[p].all())]
        raise UnmappedModuleError(
            f"{type(module).__name__} has parameters the closed form does not: {', '.join(left)}."
        )
    return MappedBlock(spec=spec, weights=weights, positions=positions, module_size=size)


def read_module(module: nn.Module) -> tuple[BlockSpec, Pick]:
    """The description of a layer, and the function that picks its weights by parameter name."""
    kind = type(module)
    for matches, read in _READERS:
        if matches(module):
            refuse_dropout(module)
            _refuse_other_forwards(module)
            spec, pick = read(module)
            return spec, _checked(kind.__name__, spec, pick)
    if kind.__module__.startswith("transformers.") and kind.__name__ in _NOT_COVERED:
        raise UnmappedModuleError(
            f"{kind.__name__} {_NOT_COVERED[kind.__name__]}: not in the closed form, use "
            "ca.Hessian(problem)."
        )
    raise UnmappedModuleError(
        f"{kind.__name__} is no layer the closed forms know: they read "
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


# ---- layers that keep one linear layer for each weight ---------------------------------------


@dataclass(frozen=True)
class _Layer:
    """Where a family of layers keeps its weights, and what else its blocks need."""

    classes: tuple[str, ...]  # layers are known by name: no library is imported for it
    paths: str  # query (and key, value: {name}, or {letter}), output, up, down, both norms[, gate]
    heads: str  # attribute with the number of heads
    activation: str
    norm_first: bool = False
    options: Callable[[Any], dict[str, Any]] = lambda module: {}
    home: str = "transformers."
    own_mask: bool = False  # the module applies its causal rule itself, a mask comes on top
    known_by: str = ""  # an attribute that tells this layout from another of the same class

    def matches(self, module: nn.Module) -> bool:
        named = _named(module, self.home, *self.classes)
        return named and (not self.known_by or _find(module, self.known_by) is not None)

    def read(self, module: Any) -> tuple[BlockSpec, Pick]:
        query, *others = self.paths.split()
        paths = {name: query.format(name=name, letter=name[0]) for name in _PROJECTIONS}
        paths |= zip(("output", "up", "down", "norm1", "norm2", "gate"), others, strict=False)
        projection, up, *norms = (
            module.get_submodule(paths[name]) for name in ("query", "up", "norm1", "norm2")
        )
        norm, eps = shared_norm(*norms)
        heads = attrgetter(self.heads)(module)
        options = {"gated": "gate" in paths, "norm_first": self.norm_first, **self.options(module)}
        spec = BlockSpec(
            d_model=projection.in_features,
            n_heads=heads,
            d_k=projection.out_features // heads,
            d_v=projection.out_features // heads,
            d_ff=up.out_features,
            norm=norm,
            eps=eps,
            activation=activation_name(attrgetter(self.activation)(module)),
            **options,
        )
        return spec, lambda values: _take_all(values, paths)


def _named(module: nn.Module, home: str, *names: str) -> bool:
    return type(module).__name__ in names and type(module).__module__.startswith(home)


def _find(module: nn.Module, path: str) -> nn.Module | None:
    part: object = module
    for name in path.split("."):
        part = getattr(part, name, None)
    return part if isinstance(part, nn.Module) else None


def _take_all(values: Mapping[str, Tensor], paths: Mapping[str, str]) -> Picked:
    picked: Picked = {}
    for ours, theirs in paths.items():
        picked |= take(values, ours, theirs)
    return picked


def _zoo_options(attention: Any) -> dict[str, Any]:
    return {
        "n_kv_heads": attention.n_kv_heads,
        "causal": bool(attention.causal),
        "softmax": bool(attention.softmax),
        "rope_base": attention.rope_base,
    }


def _zoo_block_options(module: Any) -> dict[str, Any]:
    return {
        **_zoo_options(module.attention),
        "norm_first": bool(module.norm_first),
        "gated": bool(module.ffn.gated),
    }


def _gpt_neo_options(module: Any) -> dict[str, Any]:
    """Logits without a scale, every other layer in a window."""
    inner = module.attn.attention
    local = inner.attention_type == "local"
    window = int(inner.config.window_size) if local else None
    return {"causal": True, "window": window, "scale": 1.0}


def _bert_options(module: Any) -> dict[str, Any]:
    """Bidirectional unless it is a decoder."""
    _refuse_cross_attention(module)
    kind = getattr(module.attention.self, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise UnmappedModuleError(
            f"BERT with {kind} positions adds learned terms to the logits: not in the closed form."
        )
    return {"causal": bool(getattr(module, "is_decoder", False))}


def _bart_options(module: Any) -> dict[str, Any]:
    """OPT's decoder layers and the encoder layers of BART's kin, pre- or post-norm."""
    name = type(module).__name__
    first = name in ("MBartEncoderLayer", "PegasusEncoderLayer", "WhisperEncoderLayer")
    return {
        "norm_first": bool(getattr(module, "do_layer_norm_before", first)),
        "causal": name == "OPTDecoderLayer",
    }


def _llama_options(module: Any) -> dict[str, Any]:
    """Rotary positions, grouped queries, causal, in a window if the layer or the model says so."""
    attention, config = module.self_attn, module.self_attn.config
    if getattr(config, "clip_qkv", None) is not None:
        raise UnmappedModuleError(
            f"{type(module).__name__} clips queries, keys and values at {config.clip_qkv:g}: not "
            "in the closed form."
        )
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return {
        "n_kv_heads": config.num_key_value_heads,
        "causal": True,
        "window": int(window) if window and getattr(config, "use_sliding_window", True) else None,
        **_rope_options(config),
    }


def _rope_options(config: Any) -> dict[str, Any]:
    """Rotary positions by their base, or left to the tables of each call."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # before transformers 5
        scaling = getattr(config, "rope_scaling", None) or {}
        parameters = {"rope_theta": config.rope_theta, **scaling}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", 1.0) or 1.0
    if kind != "default" or partial != 1.0:
        return {"rope_tables": True}
    return {"rope_base": float(parameters["rope_theta"])}


def _refuse_special_forms(module: nn.Module, spec: BlockSpec) -> None:
    if spec.special_forms:
        raise UnmappedModuleError(
            f"{type(module).__name__} {' and '.join(spec.special_forms)}: not in the closed form, "
            "use ca.Hessian(problem)."
        )


def _refuse_tables(module: nn.Module, spec: BlockSpec) -> None:
    if spec.rope_tables:
        raise UnmappedModuleError(
            f"{type(module).__name__} has rotary positions whose tables come with each call: a "
            "stack alone has none, use ca.Hessian(problem)."
        )


def _refuse_cross_attention(module: Any) -> None:
    if hasattr(module, "crossattention"):
        raise UnmappedModuleError(
            f"{type(module).__name__} has cross attention: the closed form is for self-attention."
        )


_BERT = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")
_BART = ("OPTDecoder", "BartEncoder", "MarianEncoder", "MBartEncoder", "PegasusEncoder")
_VIT = tuple(f"{name}Layer" for name in ("ViT", "DeiT", "ViTMAE", "ViTMSN"))
_LLAMA = ("Llama", "Mistral", "Qwen2", "Olmo")

_LAYERS = (
    _Layer(
        ("Block",),
        "attention.{name} attention.output ffn.up ffn.down norm1 norm2 ffn.gate",
        home="curvatlas.zoo",
        heads="attention.n_heads",
        activation="ffn._function",
        options=_zoo_block_options,
    ),
    _Layer(
        ("GPTNeoBlock",),
        "attn.attention.{letter}_proj attn.attention.out_proj mlp.c_fc mlp.c_proj ln_1 ln_2",
        heads="attn.attention.num_heads",
        activation="mlp.act",
        norm_first=True,
        own_mask=True,
        options=_gpt_neo_options,
    ),
    _Layer(
        tuple(f"{name}Layer" for name in _BERT),
        "attention.self.{name} attention.output.dense intermediate.dense output.dense "
        "attention.output.LayerNorm output.LayerNorm",
        heads="attention.self.num_attention_heads",
        activation="intermediate.intermediate_act_fn",
        options=_bert_options,
    ),
    _Layer(
        ("TransformerBlock",),
        "attention.{letter}_lin attention.out_lin ffn.lin1 ffn.lin2 "
        "sa_layer_norm output_layer_norm",
        home="transformers.models.distilbert",
        heads="attention.n_heads",
        activation="ffn.activation",
    ),
    _Layer(  # the same weights may serve several depths
        ("AlbertLayer",),
        "attention.{name} attention.dense ffn ffn_output attention.LayerNorm full_layer_layer_norm",
        heads="attention.num_attention_heads",
        activation="activation",
    ),
    _Layer(
        tuple(f"{name}Layer" for name in (*_BART, "WhisperEncoder")),
        "self_attn.{letter}_proj self_attn.out_proj fc1 fc2 self_attn_layer_norm final_layer_norm",
        heads="self_attn.num_heads",
        activation="activation_fn",
        options=_bart_options,
    ),
    _Layer(  # before transformers 5
        _VIT,
        "attention.attention.{name} attention.output.dense intermediate.dense output.dense "
        "layernorm_before layernorm_after",
        known_by="attention.attention",
        heads="attention.attention.num_attention_heads",
        activation="intermediate.intermediate_act_fn",
        norm_first=True,
    ),
    _Layer(
        _VIT,
        "attention.{letter}_proj attention.o_proj mlp.fc1 mlp.fc2 layernorm_before layernorm_after",
        heads="attention.num_attention_heads",
        activation="mlp.activation_fn",
        norm_first=True,
    ),
    _Layer(
        tuple(f"{name}DecoderLayer" for name in _LLAMA),
        "self_attn.{letter}_proj self_attn.o_proj mlp.up_proj mlp.down_proj "
        "input_layernorm post_attention_layernorm mlp.gate_proj",
        heads="self_attn.config.num_attention_heads",
        activation="mlp.act_fn",
        norm_first=True,
        options=_llama_options,
    ),
)

_PARALLEL = "runs attention and feed-forward side by side on the same input"
_RELATIVE = "adds learned terms of the distance to the logits"
_NOT_COVERED = {
    "PhiDecoderLayer": _PARALLEL,
    "GPTJBlock": _PARALLEL,
    "GPTNeoXLayer": "rotates a part of each head, mostly with parallel sublayers",
    "FalconDecoderLayer": _PARALLEL,
    "BloomBlock": "adds a bias by distance (ALiBi) to the logits",
    "T5Block": _RELATIVE,
    "DebertaV2Layer": _RELATIVE,
    "GemmaDecoderLayer": "scales its norms by 1 + weight",
    "Gemma2DecoderLayer": "has norms on both sides of every sublayer",
    "Qwen3DecoderLayer": "normalises queries and keys",
    "MixtralDecoderLayer": "sends tokens to experts",
    "Dinov2Layer": "scales its sublayers' outputs by learned gains",
}


# ---- layers with fused projections, and attention alone ---------------------------------------


def _same_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    if not isinstance(module, kind):
        return False
    if type(module).forward is not kind.forward:
        raise UnmappedModuleError(
            f"{type(module).__name__} overrides the forward of {kind.__name__}: "
            "its derivatives are not those of the layer it extends."
        )
    return True


_LIBRARIES = ("torch", "transformers", "curvatlas", "peft")


def _refuse_other_forwards(module: nn.Module) -> None:
    """Raise when a part of a known layer does not run the forward its library wrote."""
    for name, part in module.named_modules():
        forward = type(part).forward
        homes = {getattr(forward, "__globals__", {}).get("__name__", "")}
        if not isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            homes.add(type(part).__module__)  # of torch's, a subclass may keep the forward
        known = all(home.partition(".")[0] in _LIBRARIES for home in homes)
        if "forward" in vars(part) or not known:
            raise UnmappedModuleError(
                f"{name or 'the layer'} ({type(part).__name__}) in {type(module).__name__} has a "
                "forward that its library did not write: its derivatives are not the layer's."
            )


def _read_attention(module: Any) -> tuple[BlockSpec, Pick]:
    """``nn.MultiheadAttention`` as the bare attention layer Z = Att(X)."""
    _refuse_attention_extras(module)
    spec = BlockSpec(
        d_model=module.embed_dim,
        n_heads=module.num_heads,
        norm="none",
        residual=False,
    )
    return spec, lambda values: _pick_attention(values, "")


def _read_encoder_layer(module: Any) -> tuple[BlockSpec, Pick]:
    """``nn.TransformerEncoderLayer``, both norm orders, any activation the closed form knows."""
    _refuse_attention_extras(module.self_attn)
    norm, eps = shared_norm(module.norm1, module.norm2)
    spec = BlockSpec(
        d_model=module.self_attn.embed_dim,
        n_heads=module.self_attn.num_heads,
        d_ff=module.linear1.out_features,
        norm=norm,
        eps=eps,
        norm_first=bool(module.norm_first),
        activation=activation_name(module.activation),
    )

    def pick(values: Mapping[str, Tensor]) -> Picked:
        paths = {"up": "linear1", "down": "linear2", "norm1": "norm1", "norm2": "norm2"}
        return _pick_attention(values, "self_attn.") | _take_all(values, paths)

    return spec, pick


def _read_zoo_attention(module: Any) -> tuple[BlockSpec, Pick]:
    """The zoo's attention as the bare attention layer."""
    spec = BlockSpec(
        d_model=module.query.in_features,
        n_heads=module.n_heads,
        d_k=module.head_size,
        d_v=module.head_size,
        norm="none",
        residual=False,
        **_zoo_options(module),
    )
    paths = {name: name for name in (*_PROJECTIONS, "output")}
    return spec, lambda values: _take_all(values, paths)


def _pick_attention(values: Mapping[str, Tensor], prefix: str) -> Picked:
    """[Q; K; V] stacked in ``in_proj``, heads in consecutive rows."""
    fused = values[f"{prefix}in_proj_weight"].chunk(3)
    picked = {f"{name}_weight": part for name, part in zip(_PROJECTIONS, fused, strict=True)}
    bias = values.get(f"{prefix}in_proj_bias")
    if bias is not None:
        parts = zip(_PROJECTIONS, bias.chunk(3), strict=True)
        picked |= {f"{name}_bias": part for name, part in parts}
    return picked | take(values, "output", f"{prefix}out_proj")


def _refuse_attention_extras(module: Any) -> None:
    if not module._qkv_same_embed_dim:
        raise UnmappedModuleError(
            f"MultiheadAttention with kdim={module.kdim}, vdim={module.vdim} is cross attention: "
            "the closed form is for self-attention."
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise UnmappedModuleError("MultiheadAttention with add_bias_kv attends to an extra token.")
    if module.add_zero_attn:
        raise UnmappedModuleError(
            "MultiheadAttention with add_zero_attn attends to an extra token."
        )


def _read_gpt2(module: Any) -> tuple[BlockSpec, Pick]:
    """``GPT2Block``: pre-norm, causal, fused ``Conv1D`` projections stored (in, out)."""
    _refuse_cross_attention(module)
    attention, config = module.attn, module.attn.config
    norm, eps = shared_norm(module.ln_1, module.ln_2)
    head_size = attention.embed_dim // attention.num_heads
    scale = head_size**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= float(attention.layer_idx + 1)
    spec = BlockSpec(
        d_model=attention.embed_dim,
        n_heads=attention.num_heads,
        d_ff=module.mlp.c_fc.weight.shape[1],
        norm=norm,
        eps=eps,
        norm_first=True,
        activation=activation_name(module.mlp.act),
        causal=True,
        scale=scale,
    )

    def pick(values: Mapping[str, Tensor]) -> Picked:
        picked: Picked = {}
        fused = values["attn.c_attn.weight"].T.chunk(3)
        biases = values["attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip(_PROJECTIONS, fused, biases, strict=True):
            picked |= {f"{name}_weight": weight, f"{name}_bias": bias}
        for ours, theirs in (("output", "attn"), ("down", "mlp")):
            picked[f"{ours}_weight"] = values[f"{theirs}.c_proj.weight"].T
            picked[f"{ours}_bias"] = values[f"{theirs}.c_proj.bias"]
        picked |= {"up_weight": values["mlp.c_fc.weight"].T, "up_bias": values["mlp.c_fc.bias"]}
        return picked | take(values, "norm1", "ln_1") | take(values, "norm2", "ln_2")

    return spec, pick


_Reader = tuple[Callable[[nn.Module], bool], Callable[[Any], tuple[BlockSpec, Pick]]]
_READERS: tuple[_Reader, ...] = (
    (lambda module: _same_forward(module, nn.MultiheadAttention), _read_attention),
    (lambda module: _same_forward(module, nn.TransformerEncoderLayer), _read_encoder_layer),
    (lambda module: _named(module, "curvatlas.zoo", "Attention"), _read_zoo_attention),
    (lambda module: _named(module, "transformers.", "GPT2Block"), _read_gpt2),
    *((layer.matches, layer.read) for layer in _LAYERS),
)


# ---- calls -----------------------------------------------------------------------------------


# arguments that do not change a layer's output
_WITHOUT_EFFECT = frozenset(
    (
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "cache_position",
        "position_ids",
        "num_items_in_batch",
    )
)
_CACHES = frozenset(("past_key_values", "past_key_value", "layer_past"))
_IMPLEMENTATIONS = ("eager", "sdpa")


def read_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    spec: BlockSpec | None = None,
) -> BlockCall:
    """What ``module(*args, **kwargs)`` computes with, for a layer that ``read_module`` reads.

    Call it before the layer runs, in a forward pre-hook: the layer fills a cache of keys and values
    it is given, and a cache that holds any is refused. ``spec`` saves reading the layer again.
    """
    spec = read_module(module)[0] if spec is None else spec
    arguments = _bound(module, args, kwargs)
    if isinstance(module, nn.TransformerEncoderLayer):
        return _encoder_layer_call(module, spec, arguments)
    name, x = next(iter(arguments.items()))
    del arguments[name]
    _check_input(module, x, spec)
    if _named(module, "curvatlas.zoo", "Block", "Attention"):
        _refuse_arguments(module, arguments)
        return BlockCall(x=x.detach(), causal=spec.causal)
    if type(module).__module__.startswith("transformers."):
        return _library_call(module, spec, x.detach(), arguments)
    raise UnmappedModuleError(f"calls of {type(module).__name__} are not read.")


def _bound(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those of ``**kwargs`` among them."""
    signature = inspect.signature(type(module).forward)
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(module, *args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {f"{name}[{i}]": part for i, part in enumerate(value)}
        elif name != "self":
            arguments[name] = value
    return arguments


def _check_input(module: nn.Module, x: Any, spec: BlockSpec) -> None:
    plain = isinstance(x, Tensor) and not x.is_nested and x.is_floating_point()
    if not plain or x.ndim != 3 or x.shape[-1] != spec.d_model:
        what = tuple(x.shape) if plain else type(x).__name__
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with {what}: needed is a floating tensor "
            f"(samples, tokens, {spec.d_model})."
        )


def _refuse_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise on an argument that is there and not known to be without effect."""
    for name, value in arguments.items():
        if value is None or value is False or name in _WITHOUT_EFFECT:
            continue
        if name in _CACHES:
            length = _cached_length(module, value)
            if length:
                raise UnmappedModuleError(
                    f"{type(module).__name__} is called with {name} that hold {length} tokens: "
                    "call the model without a cache, or read the call before the layer runs."
                )
            continue
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with {name} ({type(value).__name__}): its effect "
            "is not in the hand-written forms."
        )


def _cached_length(module: nn.Module, cache: Any) -> int:
    """How many tokens of this layer a cache holds."""
    get_length = getattr(cache, "get_seq_length", None)
    if get_length is None:  # a tuple of keys and values
        return sum(part.shape[-2] for part in cache if isinstance(part, Tensor))
    names = ("layer_idx", "layer_id")
    found = [getattr(part, name, None) for part in module.modules() for name in names]
    index = next((number for number in found if isinstance(number, int)), 0)
    return int(get_length(index))


def _first(module: nn.Module, name: str) -> Any:
    """The attribute ``name`` of the first part that has it, outermost first; None: nobody."""
    parts = (part for part in module.modules() if getattr(part, name, None) is not None)
    return getattr(next(parts, None), name, None)


def _library_call(
    module: nn.Module, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]
) -> BlockCall:
    """A Hugging Face layer: 4-D masks hold causality and windows, None leaves them to the kernel.

    Scaled dot-product attention is then causal where the layer says so, and never in a window;
    eager attention is not even causal.
    """
    mask = arguments.pop("attention_mask", None)
    tables = arguments.pop("position_embeddings", None)
    causal = arguments.pop("is_causal", None)
    _refuse_arguments(module, arguments)
    implementation = getattr(_first(module, "config"), "_attn_implementation", None) or "eager"
    if implementation not in _IMPLEMENTATIONS:
        raise UnmappedModuleError(
            f"{type(module).__name__} attends by {implementation}, whose masks are not read: load "
            "the model with attn_implementation='sdpa' or 'eager'."
        )
    masks = [] if mask is None else [_four_axes(module, mask, spec, x)]
    rotation = None
    if tables is not None and (spec.rope_base is not None or spec.rope_tables):
        rotation = _tables(module, tables)
    own = any(layer.own_mask and layer.matches(module) for layer in _LAYERS)
    if own:
        causal = spec.causal
    elif mask is not None or implementation == "eager":
        causal = False
    else:
        flag = causal if causal is not None else _first(module, "is_causal")
        causal = bool(spec.causal if flag is None else flag)
        wide = spec.window is None or spec.window >= x.shape[1]
        if causal and not (spec.causal and wide):
            masks.append(x.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None])
            causal = False
    return BlockCall(
        x=x, mask=_combined(masks, x), rotation=rotation, causal=causal, keyless="zero"
    )


def _four_axes(module: nn.Module, mask: Any, spec: BlockSpec, x: Tensor) -> Tensor:
    full = (x.shape[0], spec.n_heads, x.shape[1], x.shape[1])
    fits = isinstance(mask, Tensor) and mask.ndim == 4
    if not fits or any(a not in (1, b) for a, b in zip(mask.shape, full, strict=True)):
        what = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with an attention_mask of {what}: needed is one "
            f"that broadcasts to (samples, heads, tokens, tokens) = {full}."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with an attention_mask of {mask.dtype}: needed is "
            "a boolean one (True = attend) or a floating one (added to the logits)."
        )
    kept: Tensor = mask.detach()
    return kept


def _tables(module: nn.Module, tables: Any) -> Rotation:
    """Cosines and sines (n or 1, L, r) as the model passes them to every layer."""
    if not (isinstance(tables, tuple | list) and len(tables) == 2):
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with position_embeddings of "
            f"{type(tables).__name__}: needed are the two tables (cos, sin)."
        )
    try:
        return Rotation.from_tables(tables[0], tables[1])
    except ValueError as error:
        raise UnmappedModuleError(f"{type(module).__name__}: {error}") from error


def _combined(masks: Sequence[Tensor], x: Tensor) -> Tensor | None:
    """Masks of four axes as one: boolean where all are, else added."""
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return reduce(torch.logical_and, masks)
    return reduce(torch.add, (_additive(mask, x.dtype) for mask in masks))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return mask.new_zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


def _encoder_layer_call(module: Any, spec: BlockSpec, arguments: dict[str, Any]) -> BlockCall:
    """``nn.TransformerEncoderLayer``: masks are True where attention is forbidden, or added."""
    x, time_major = arguments.pop("src"), not module.self_attn.batch_first
    batched = isinstance(x, Tensor) and x.ndim == 3
    padding, pairs = arguments.pop("src_key_padding_mask", None), arguments.pop("src_mask", None)
    hinted = bool(arguments.pop("is_causal", False))
    _refuse_arguments(module, arguments)
    if isinstance(x, Tensor) and not x.is_nested:
        x = x.unsqueeze(0) if not batched else x.transpose(0, 1) if time_major else x
    _check_input(module, x, spec)
    n, length, _ = x.shape
    masks = []
    if pairs is not None and hinted and padding is None:
        # torch trusts the hint and does not look at the mask
        pairs = x.new_ones(length, length, dtype=torch.bool).triu(1)
    for mask, shapes in (
        (pairs, {2: (1, 1, length, length), 3: (n, spec.n_heads, length, length)}),
        (padding, {1: (1, 1, 1, length), 2: (n, 1, 1, length)}),
    ):
        if mask is not None:
            shaped = mask.detach().reshape(shapes[mask.ndim])
            masks.append(~shaped if shaped.dtype == torch.bool else shaped)
    return BlockCall(
        x=x.detach(),
        mask=_combined(masks, x),
        keyless="zero",
        time_major=time_major and batched,
        batched=batched,
    )


# ---- whole models ----------------------------------------------------------------------------


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
    **dict.fromkeys((f"{name}Model" for name in _LLAMA), (_Layout(blocks="layers", norm="norm"),)),
    **dict.fromkeys(
        (f"{name}ForCausalLM" for name in _LLAMA),
        (_Layout(blocks="model.layers", norm="model.norm", head="lm_head"),),
    ),
    **dict.fromkeys((f"{name}Encoder" for name in _BERT), (_Layout(blocks="layer"),)),
    **dict.fromkeys((f"{name}Model" for name in _BERT), (_Layout(blocks="encoder.layer"),)),
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
    for index, layer in enumerate(module.get_submodule(layout.blocks).children()):
        spec, pick = read_module(layer)
        _refuse_tables(layer, spec)
        prefix = f"{layout.blocks}.{index}."
        blocks.append((spec, pick(_within(values, prefix))))
        pieces += pick(_within(numbers, prefix)).values()
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


def _within(values: Mapping[str, Tensor], prefix: str) -> Picked:
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


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
    linear = None if layout.head is None or not head else _find(module, layout.head)
    if linear is None or isinstance(linear, nn.Identity):
        return options, names
    if type(linear) is not nn.Linear:
        raise UnmappedModuleError(
            f"the head {layout.head} is a {type(linear).__name__}, not nn.Linear: pass head=False."
        )
    options |= {"weight": linear.weight.detach(), "pooling": _pooling(module, layout)}
    options["bias"] = None if linear.bias is None else linear.bias.detach()
    head_names = [f"{layout.head}.{name}" for name, _ in linear.named_parameters()]
    if all(name in parameters for name in head_names):
        names += head_names
    else:  # tied: the other use lies in the embedding, outside the stack
        options["frozen_head"] = True
    return options, names


def _pooling(module: nn.Module, layout: _Layout) -> Pooling | None:
    config = getattr(module, "config", None)
    if layout.pooling is not None and getattr(config, "pooling", None) == "mean":
        return "mean"
    return layout.pooling
