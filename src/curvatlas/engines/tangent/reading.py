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

``read_call`` reads what a layer is called with inside a model: its input, and masks, rotary
positions and the memory of cross attention in every convention the libraries have.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.engines.tangent.adapters import effective_parameters, is_transposed, plain_linear
from curvatlas.engines.tangent.attention import Rotation
from curvatlas.engines.tangent.block import LinearisedBlock
from curvatlas.engines.tangent.head import Pooling, Readout
from curvatlas.errors import UnmappedModuleError as UnmappedModuleError
from curvatlas.layers.activations import ACTIVATIONS, FAMILY_ACTIVATIONS, activation_derivatives
from curvatlas.layers.checks import weight_shapes
from curvatlas.layers.masks import Keyless
from curvatlas.layers.norms import NORMS, normalize
from curvatlas.layers.structure import (
    WEIGHT_NAMES,
    Activation,
    BlockSpec,
    Norm,
    Weights,
)

Picked = dict[str, Tensor]
Pick = Callable[[Mapping[str, Tensor]], Picked]
_Source = Callable[[Mapping[str, Tensor]], Tensor]
_Split = Callable[[Tensor], Sequence[Tensor]]
_PROJECTIONS = ("query", "key", "value")


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
    offset: float = 0.0  # the gain is offset + weight


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
    memory: Tensor | None = None  # (n, L', m), what cross attention attends to
    memory_mask: Tensor | None = None  # of four axes, like ``mask``
    buckets: Tensor | None = None  # (L, L) rows of the table of learned terms of the logits

    def spec_for(self, spec: BlockSpec) -> BlockSpec:
        """The layer's description without a causal rule that this call does not have."""
        return spec if self.causal else replace(spec, causal=False, window=None)

    def of_samples(self, samples: slice) -> BlockCall:
        """The same call for some of its samples."""
        rotation, count = self.rotation, len(self.x)
        mask, others = (
            mask[samples] if mask is not None and mask.ndim == 4 and len(mask) == count else mask
            for mask in (self.mask, self.memory_mask)
        )
        if rotation is not None:
            rotation = rotation.of_samples(samples)
        return replace(
            self,
            x=self.x[samples],
            mask=mask,
            rotation=rotation,
            memory=None if self.memory is None else self.memory[samples],
            memory_mask=others,
        )

    def linearise(self, spec: BlockSpec, weights: Weights, **options: Any) -> LinearisedBlock:
        """The block of this call; ``options`` are those of ``LinearisedBlock``."""
        return LinearisedBlock(
            self.spec_for(spec),
            weights,
            self.x,
            self.mask,
            rotation=self.rotation,
            keyless=self.keyless,
            memory=self.memory,
            memory_mask=self.memory_mask,
            buckets=self.buckets,
            **options,
        )

    def tokens(self, z: Tensor) -> Tensor:
        """What the module itself takes or gives, as (n, L, d)."""
        if not self.batched:
            return z.unsqueeze(0)
        return z.transpose(0, 1) if self.time_major else z

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
            _refuse_hooks(module)
            effective_parameters(module)  # refuses adapters that are not read
            spec, pick = read(module)
            return spec, _checked(kind.__name__, spec, pick)
    if kind.__module__.startswith("transformers.") and kind.__name__ in _NOT_COVERED:
        raise UnmappedModuleError(
            f"{kind.__name__} {_NOT_COVERED[kind.__name__]}: not in the closed form, use "
            "ca.Hessian(problem)."
        )
    raise UnmappedModuleError(
        f"{kind.__name__} is no layer the closed forms know: they read "
        "nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, the zoo's "
        "blocks, and of Hugging Face "
        f"{', '.join(name for layer in _LAYERS[1:] for name in layer.classes.split())}; use "
        "ca.Hessian(problem) for other modules."
    )


def is_known_layer(module: nn.Module) -> bool:
    """Whether the module is of a kind that ``read_module`` reads or, by its form, refuses."""
    try:
        return any(matches(module) for matches, _ in _READERS)
    except UnmappedModuleError:
        return True  # a subclass that computes something else: reading it says so


def map_norm(module: nn.Module) -> MappedNorm:
    """Read ``nn.LayerNorm``, ``nn.RMSNorm`` or a norm of Hugging Face's models."""
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    name, offset = type(module).__name__, 0.0
    own = type(module).forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and not own:
        shape = tuple(module.normalized_shape)
        if len(shape) != 1:
            raise UnmappedModuleError(
                f"{name} normalises over {len(shape)} axes {shape}: the closed form has one."
            )
        norm: Norm = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        size, eps = shape[0], module.eps
        if eps is None:  # nn.RMSNorm's default: the machine epsilon of what is computed in
            stored = torch.float32 if weight is None else weight.dtype
            eps = torch.finfo(torch.float32 if stored.itemsize < 4 else stored).eps
    elif "Norm" in name and type(module).__module__.startswith("transformers."):
        norm, size, eps, offset = _norm_by_value(module)
    else:
        raise UnmappedModuleError(f"{name} is no norm the closed forms know (LayerNorm, RMSNorm).")
    return MappedNorm(
        norm=norm,
        size=size,
        eps=float(eps),
        weight=None if weight is None else weight.detach(),
        bias=None if bias is None else bias.detach(),
        offset=offset,
    )


def _norm_by_value(module: Any) -> tuple[Norm, int, float, float]:
    """Kind, size, ε and offset of the gains, recognised by the values on a few tokens.

    By value, because a class named LayerNorm may be an RMSNorm (T5), and gains may be 1 + weight
    (Gemma). Small tokens show ε; weights other than the module's own tell the gains apart.
    """
    own = dict(module.named_parameters())
    shape = own["weight"].shape if "weight" in own else tuple(module.normalized_shape)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-5))
    probe = copy.copy(module)
    numbers = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).view(shape)
    probe._parameters = {
        name: nn.Parameter((shift + numbers).cos())
        for name, shift in zip(own, (0.0, 1.0), strict=False)
    }
    x = torch.stack([(numbers.square().sin() + 0.3) * scale for scale in (1.0, 1e-2, 1e-3)])
    with torch.no_grad():
        values = type(module).forward(probe, x)
        for kind in NORMS[:2]:
            n, _ = normalize(x, eps=eps, norm=kind)
            for offset in (0.0, 1.0):
                y = n if "weight" not in own else n * (offset + probe.weight)
                y = y if "bias" not in own else y + probe.bias
                # the library rounds to float32 on the way
                if float((values - y).abs().max()) <= 1e-5 * float(y.abs().max()):
                    return kind, shape[-1], eps, offset
    raise UnmappedModuleError(
        f"{type(module).__name__} computes neither LayerNorm nor RMSNorm of its input."
    )


def shared_norm(one: MappedNorm, two: MappedNorm | None) -> tuple[Norm, float]:
    """Kind and ε of two norms that a ``BlockSpec`` describes once."""
    if two is not None and (one.norm, one.eps) != (two.norm, two.eps):
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
    # Bloom's own backward pass has other constants than its values would have
    bloom = type(function).__name__ == "BloomGelu"
    for name in ("gelu_bloom",) if bloom else (*ACTIVATIONS, *FAMILY_ACTIVATIONS):
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
        rates = [v for n, v in vars(part).items() if "drop" in n and isinstance(v, float)]
        rate = max([*rates, part.p if isinstance(part, nn.Dropout) else 0.0])
        if part.training and rate > 0:
            where = f"{name} " if name else ""
            raise UnmappedModuleError(
                f"dropout of {rate:g} is active in {where}({type(part).__name__}): "
                "call module.eval(), the Hessian of a random loss is not defined."
            )


def take(values: Mapping[str, Tensor], paths: Mapping[str, str]) -> Picked:
    """``{ours}_weight`` and ``{ours}_bias`` of linear layers and norms at their paths."""
    names = {f"{o}_{kind}": f"{t}.{kind}" for o, t in paths.items() for kind in ("weight", "bias")}
    return {ours: values[theirs] for ours, theirs in names.items() if theirs in values}


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
        needed = (*_PROJECTIONS, *(("up", "down") if spec.d_ff is not None else ()))
        if spec.memory_size is not None:
            needed += tuple(f"cross_{name}" for name in (*_PROJECTIONS, "output"))
        if lacking := [name for name in needed if f"{name}_weight" not in picked]:
            raise UnmappedModuleError(f"{kind} has no weight for {', '.join(lacking)}.")
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


# ---- families of layers, one row each ---------------------------------------------------------


_Extras = tuple[list[Tensor], "Rotation | None"]  # masks of four axes, rotary positions


@dataclass(frozen=True)
class _Layer:
    """Where a family of layers keeps its weights, and what else its blocks need.

    A path is a part of the layer, or several to try in turn ("mlp.up_proj|mlp.fc1"); "-" is no
    part. Layers are known by the names of their classes: no library is imported for it.
    """

    classes: str
    # query (with {name} or {letter} for key and value, else fused), output, up, down, both norms
    paths: str
    activation: str
    gate: str = ""  # with the path of ``up``: the gate's rows, then those of ``up``
    qk_norm: str = ""
    after: str = ""  # norms, or gains, behind the two sublayers
    # query (with {name} or {letter}, or with the fused key and value behind it), output and norm
    cross: str = ""
    grouped: bool = False  # fused rows are, for each key, its queries, itself, its value
    norm_first: bool = True
    options: Callable[[Any], dict[str, Any]] = lambda module: {}
    home: str = "transformers."
    own_mask: bool = False  # the module applies its causal rule itself, a mask comes on top
    call: Callable[[Any, BlockSpec, Tensor, dict[str, Any]], _Extras] | None = None
    distance: str = ""  # the table of learned terms of the logits, in one layer for several
    buckets: Callable[[Any, Tensor], Tensor] | None = None  # the table's row of every pair (L, L)

    def matches(self, module: nn.Module) -> bool:
        query = self.paths.split()[0].format(name="query", letter="q")
        return _named(module, self.home, *self.classes.split()) and bool(_found(module, query))

    def read(self, module: Any) -> tuple[BlockSpec, Pick]:
        paths = self._paths(module)
        attention = module.get_submodule(paths["query"].rpartition(".")[0])
        heads = int(_value(attention, _HEAD_COUNTS))
        rows, fused = _sizes(module, paths["query"])[0], paths["query"] == paths["key"]
        size = (_sizes(module, paths["output"])[1] if fused else rows) // heads
        keys = (rows - heads * size) // 2 if fused else _sizes(module, paths["key"])[0]
        shared = keys // size
        options = {"norm_first": self.norm_first, **_norm_options(module, paths, size)}
        if self.home.startswith("transformers."):
            options |= _attention_options(module, attention, size)
        if "cross_query" in paths:
            options |= _cross_options(module, paths, attention, heads)
        spec = BlockSpec(
            d_model=_sizes(module, paths["down"])[0],
            n_heads=heads,
            n_kv_heads=None if shared == heads else shared,
            d_k=size,
            d_v=size,
            d_ff=_sizes(module, paths["down"])[1],
            activation=activation_name(_value(module, self.activation)),
            gated="gate" in paths,
            **options | self.options(module),
        )
        return spec, _picker(module, spec, paths, grouped=self.grouped)

    def _paths(self, module: nn.Module) -> dict[str, str]:
        """Our name → where the module keeps it, for what it has."""
        query, *others = self.paths.split()
        words = {name: query.format(name=name, letter=name[0]) for name in _PROJECTIONS}
        words |= zip(("output", "up", "down", "norm1", "norm2"), others, strict=True)
        words |= zip(("output_norm", "down_norm"), self.after.split(), strict=False)
        for name in ("query", "key"):
            words[f"{name}_norm"] = self.qk_norm.format(name=name, letter=name[0])
        words["gate"] = self.gate
        words["distance"] = self.distance
        query, *others = self.cross.split() or [""]
        if _found(module, query.format(name="query", letter="q")):
            fused = others[:-2]
            for name in _PROJECTIONS:
                word = fused[0] if fused and name != "query" else query
                words[f"cross_{name}"] = word.format(name=name, letter=name[0])
            words |= zip(("cross_output", "cross_norm"), others[-2:], strict=True)
        found = {name: _found(module, word) for name, word in words.items()}
        needed = (*_PROJECTIONS, "up", "down", "norm1", "norm2")
        if lacking := [words[n] for n in needed if found[n] is None and words[n] != "-"]:
            raise UnmappedModuleError(
                f"{type(module).__name__} has no {', '.join(lacking)}: the library keeps its "
                "weights elsewhere than the versions that are read."
            )
        return {
            name: path
            for name, path in found.items()
            if path is not None and not isinstance(_value(module, path), nn.Identity)
        }


_HEAD_COUNTS = "num_heads|n_heads|num_attention_heads|config.num_attention_heads"


def _named(module: nn.Module, home: str, *names: str) -> bool:
    return type(module).__name__ in names and type(module).__module__.startswith(home)


def _found(module: nn.Module, paths: str) -> str | None:
    """The first of "a.b|c" that the module has."""
    for path in paths.split("|"):
        part: object = module
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is not None:
            return path
    return None


def _value(module: nn.Module, paths: str) -> Any:
    """The part at the first of "a.b|c" that the module has."""
    return attrgetter(_found(module, paths) or paths)(module)


def _find(module: nn.Module, path: str) -> nn.Module | None:
    part = _value(module, path) if _found(module, path) else None
    return part if isinstance(part, nn.Module) else None


def _sizes(module: nn.Module, path: str) -> tuple[int, int]:
    """(out, in) of the linear layer at ``path``."""
    linear = plain_linear(module.get_submodule(path))
    rows, columns = linear.weight.shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def _picker(module: nn.Module, spec: BlockSpec, paths: Mapping[str, str], *, grouped: bool) -> Pick:
    """The function that picks the weights at ``paths``; names of one path are rows of one weight.

    Views, and copies only of heads whose rows lie apart and of gains kept head by head.
    """
    together: dict[str, list[str]] = {}
    for name, path in paths.items():
        if not (name == "norm2" and spec.one_norm):
            together.setdefault(path, []).append(name)
    keys = spec.kv_heads * spec.key_size
    splits: dict[tuple[str, ...], _Split] = {
        _PROJECTIONS: lambda value: (
            _of_groups(value, spec)
            if grouped
            else torch.split(value, [spec.n_heads * spec.key_size, keys, keys])
        ),
        ("gate", "up"): lambda value: value.chunk(2),
        ("cross_key", "cross_value"): lambda value: value.chunk(2),
    }
    plan: list[tuple[_Source, tuple[str, ...], _Split]] = []
    for path, names in together.items():
        ours = tuple(sorted(names)) if "gate" in names else tuple(names)
        split = splits.get(ours, lambda value: (value,))
        plan += [
            (parameters, tuple(f"{name}_{kind}" for name in ours), split)
            for kind, parameters in _sources(module, path).items()
        ]

    def pick(values: Mapping[str, Tensor]) -> Picked:
        picked: Picked = {}
        for parameters, names, split in plan:
            picked |= zip(names, split(parameters(values)), strict=True)
        return picked

    return pick


def _sources(module: nn.Module, path: str) -> dict[str, _Source]:
    """ "weight" and "bias" of the part at ``path``, found among parameters by name."""
    part = _value(module, path)
    if isinstance(part, nn.Parameter):
        return {"weight": lambda values: values[path]}
    if type(part) is nn.Embedding:
        return {"weight": lambda values: values[f"{path}.weight"]}
    norms = getattr(part, "norms", None)  # one for each head
    plain = plain_linear(part if norms is None else norms[0])
    named = effective_parameters(part)
    kinds = [kind for kind in ("weight", "bias") if getattr(plain, kind, None) is not None]
    kinds += [kind for kind in ("bias",) if kind in named and kind not in kinds]
    turned = is_transposed(plain)

    def source(kind: str) -> _Source:
        def find(values: Mapping[str, Tensor]) -> Tensor:
            if norms is not None:
                return torch.cat([values[f"{path}.norms.{i}.{kind}"] for i in range(len(norms))])
            value = values[f"{path}.{kind}"]
            if value.ndim == 2 and not isinstance(plain, nn.Linear):
                return value.T if turned else value.flatten()
            return value

        return find

    return {kind: source(kind) for kind in kinds}


def _of_groups(fused: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (group, its queries then its key and value, s) → query, key and value rows."""
    repeats = spec.n_heads // spec.kv_heads
    rows = fused.reshape(spec.kv_heads, repeats + 2, spec.key_size, *fused.shape[1:])
    queries, keys, values = rows[:, :repeats], rows[:, repeats], rows[:, repeats + 1]
    return queries.flatten(0, 2), keys.flatten(0, 1), values.flatten(0, 1)


def _norm_options(module: nn.Module, paths: Mapping[str, str], size: int) -> dict[str, Any]:
    """Kinds, ε and gains of a layer's norms as fields of ``BlockSpec``."""
    parts = {n: _value(module, path) for n, path in paths.items() if "norm" in n}
    norms = {name: _norm_of(part) for name, part in parts.items()}
    first, second = norms.get("norm1"), norms.get("norm2")
    eps = next((norm.eps for norm in (first, second, *norms.values()) if norm is not None), 0.0)
    options: dict[str, Any] = {"norm": "none" if first is None else first.norm, "eps": eps}
    if first is not None and paths.get("norm2") == paths["norm1"]:
        options |= {"parallel": True, "one_norm": True}
    elif second is not None:
        options |= {"norm2": None if second.norm == options["norm"] else second.norm}
        options |= {"eps2": None if second.eps == eps else second.eps}
    if "cross_norm" in norms and first is not None:
        shared_norm(first, norms["cross_norm"])
    for field, one, two in (
        ("output", "output_norm", "down_norm"),
        ("qk", "query_norm", "key_norm"),
    ):
        if one in norms:
            norm, own = shared_norm(norms[one], norms.get(two))
            options |= {f"{field}_norm": norm, f"{field}_eps": None if own == eps else own}
    if "query_norm" in norms:
        gains = getattr(parts["query_norm"], "weight", None)
        apart = hasattr(parts["query_norm"], "norms") or (gains is not None and gains.ndim > 1)
        alone = "head" if norms["query_norm"].size == size else "width"
        options["qk_span"] = "each head" if apart else alone
    offsets = {norm.offset for norm in norms.values() if norm.weight is not None}
    if len(offsets) > 1:
        raise UnmappedModuleError(f"{type(module).__name__} mixes norms with and without offset.")
    return options | {"gain_offset": offsets.pop() if offsets else 0.0}


def _norm_of(part: Any) -> MappedNorm:
    if isinstance(part, nn.Parameter):  # gains alone
        return MappedNorm(norm="none", size=len(part), eps=0.0, weight=part.detach(), bias=None)
    if not hasattr(part, "norms"):
        return map_norm(part)
    norms = [map_norm(norm) for norm in part.norms]
    for norm in norms[1:]:
        shared_norm(norms[0], norm)
    return norms[0]


def _attention_options(module: nn.Module, attention: Any, size: int) -> dict[str, Any]:
    """What Hugging Face's attention says of itself: scale, causality, window, rotary positions."""
    config = getattr(attention, "config", None)
    clip = getattr(attention, "clip_qkv", getattr(config, "clip_qkv", None))
    if clip:
        raise UnmappedModuleError(
            f"{type(module).__name__} clips queries, keys and values at {clip:g}: not in the "
            "closed form."
        )
    causal = bool(getattr(attention, "is_causal", False))
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    window = int(window) if window and getattr(config, "use_sliding_window", True) else None
    scale = float(getattr(attention, "scaling", size**-0.5))
    rotates = getattr(attention, "use_rope", True)
    return {
        "causal": causal,
        "window": window if causal else None,
        "call_mask": window is not None and not causal,
        "scale": None if math.isclose(scale, size**-0.5, rel_tol=1e-12) else scale,
        **(_rope_options(config) if rotates else {}),
    }


def _cross_options(
    module: nn.Module, paths: Mapping[str, str], attention: Any, heads: int
) -> dict[str, Any]:
    """The width of the memory, of cross attention with as many heads and the scale of the other."""
    cross = module.get_submodule(paths["cross_query"].rpartition(".")[0])
    own = (heads, getattr(attention, "scaling", None))
    other = (int(_value(cross, _HEAD_COUNTS)), getattr(cross, "scaling", None))
    if own != other:
        raise UnmappedModuleError(
            f"{type(module).__name__} has cross attention of other heads or scale than its "
            "self-attention: not in the closed form."
        )
    return {"memory_size": _sizes(module, paths["cross_key"])[1]}


def _rope_options(config: Any) -> dict[str, Any]:
    """Rotary positions by their base, or left to the tables of each call."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # before transformers 5
        if not hasattr(config, "rope_theta"):
            return {}
        scaling = getattr(config, "rope_scaling", None) or {}
        partly = getattr(config, "partial_rotary_factor", 1.0)
        parameters = {"rope_theta": config.rope_theta, "partial_rotary_factor": partly, **scaling}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", 1.0) or 1.0
    by_layer = any(isinstance(value, Mapping) for value in parameters.values())
    if kind != "default" or partial != 1.0 or by_layer:
        return {"rope_tables": True}
    return {"rope_base": float(parameters["rope_theta"])}


_NO_ROTATION = {"rope_base": None, "rope_tables": False}


def _zoo_options(attention: Any) -> dict[str, Any]:
    return {
        "causal": bool(attention.causal),
        "softmax": bool(attention.softmax),
        "rope_base": attention.rope_base,
    }


def _zoo_block_options(module: Any) -> dict[str, Any]:
    return {**_zoo_options(module.attention), "norm_first": bool(module.norm_first)}


def _gpt2_options(module: Any) -> dict[str, Any]:
    """Logits with or without a scale, and one that falls with depth."""
    attention, config = module.attn, module.attn.config
    scale = attention.head_dim**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= float(attention.layer_idx + 1)
    return {"causal": True, "scale": scale}


def _gpt_neo_options(module: Any) -> dict[str, Any]:
    """Logits without a scale, every other layer in a window."""
    inner = module.attn.attention
    local = inner.attention_type == "local"
    window = int(inner.config.window_size) if local else None
    return {"causal": True, "window": window, "scale": 1.0, "call_mask": False}


def _falcon_options(module: Any) -> dict[str, Any]:
    """Side by side or one after the other, rotary positions or a bias by distance."""
    config = module.config
    options = {"parallel": bool(config.new_decoder_architecture or config.parallel_attn)}
    if config.new_decoder_architecture and not config.parallel_attn:
        raise UnmappedModuleError(
            "FalconDecoderLayer with new_decoder_architecture=True and parallel_attn=False has no "
            "defined order of sublayers."
        )
    return options | ({"call_mask": True, **_NO_ROTATION} if config.alibi else {})


def _partial_options(module: Any) -> dict[str, Any]:
    """A part of each head turns; an odd part would be broadcast against its tables."""
    size = module.self_attn.rotary_ndims
    if size % 2:
        raise UnmappedModuleError(
            f"{type(module).__name__} turns {size} coordinates of each head, an odd number: its "
            "rotation is not defined."
        )
    return {}


def _gemma_options(module: Any) -> dict[str, Any]:
    """Gemma 2 caps its logits; Gemma 3 keeps the option and does not use it."""
    capped = type(module).__name__ == "Gemma2DecoderLayer"
    return {"softcap": module.self_attn.attn_logit_softcapping if capped else None}


def _cohere_options(module: Any) -> dict[str, Any]:
    """Neighbouring coordinates turn; in Cohere 2 those of layers with a window."""
    still = getattr(module.self_attn, "sliding_window", 1) is None
    return {"rope_interleaved": True, **(_NO_ROTATION if still else {})}


def _bloom_options(module: Any) -> dict[str, Any]:
    for name in ("apply_residual_connection_post_layernorm", "mlp.slow_but_exact"):
        if attrgetter(name)(module):
            raise UnmappedModuleError(f"BloomBlock with {name}=True is not in the closed form.")
    return {"causal": True, "call_mask": True}


def _bert_options(module: Any) -> dict[str, Any]:
    """Bidirectional unless it is a decoder."""
    kind = getattr(module.attention.self, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise UnmappedModuleError(
            f"BERT with {kind} positions adds learned terms to the logits: not in the closed form."
        )
    return {"causal": bool(getattr(module, "is_decoder", False))}


def _bart_options(module: Any) -> dict[str, Any]:
    """Decoder layers of OPT and BioGPT, layers of BART's kin, pre- or post-norm."""
    name = type(module).__name__
    family = name.removesuffix("EncoderLayer").removesuffix("DecoderLayer")
    first = family not in ("Bart", "BlenderbotSmall", "Marian", "Mvp", "PLBart")
    return {
        "norm_first": bool(getattr(module, "do_layer_norm_before", first)),
        "causal": name.endswith("DecoderLayer"),
    }


def _t5_options(module: Any) -> dict[str, Any]:
    """Logits without a scale and with learned terms by distance, of the stack's first layer."""
    attention = module.layer[0].SelfAttention
    return {
        "causal": bool(module.is_decoder),
        "scale": 1.0,
        "distances": int(attention.relative_attention_num_buckets),
    }


def _t5_buckets(module: Any, x: Tensor) -> Tensor:
    """The row of the table for every query and key of x (n, L, d), as the library counts them."""
    attention = module.layer[0].SelfAttention
    positions = torch.arange(x.shape[1], device=x.device)
    distances = positions[None, :] - positions[:, None]
    options = {
        "bidirectional": not attention.is_decoder,
        "num_buckets": attention.relative_attention_num_buckets,
        "max_distance": attention.relative_attention_max_distance,
    }
    if type(module).__name__ == "UMT5Block":  # which asks its own attributes for them
        options = {}
    rows: Tensor = attention._relative_position_bucket(distances, **options)
    return rows


def _refuse_calls(module: nn.Module, spec: BlockSpec) -> None:
    """Raise where a layer alone is not what its model makes of it."""
    lacking = [w for w in spec.special_forms if "call" in w]
    if lacking:
        raise UnmappedModuleError(
            f"{type(module).__name__} {' and '.join(lacking)}: a stack alone has none, use "
            "ca.Hessian(problem)."
        )


def _refuse_special_forms(module: nn.Module, spec: BlockSpec) -> None:
    if spec.special_forms:
        raise UnmappedModuleError(
            f"{type(module).__name__} {' and '.join(spec.special_forms)}: not in the closed form, "
            "use ca.Hessian(problem)."
        )


def _bloom_call(module: Any, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]) -> _Extras:
    """A bias (n·H, 1, L) is added to the logits."""
    alibi = arguments.pop("alibi", None)
    if alibi is None:
        return [], None
    factor = module.self_attention.beta
    return [alibi.detach().reshape(len(x), spec.n_heads, 1, -1) * factor], None


def _falcon_call(module: Any, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]) -> _Extras:
    """The model's mask holds the bias by distance already; eager attention adds it once more."""
    if _implementation(module) == "sdpa":
        arguments.pop("alibi", None)
    return _bloom_call(module, spec, x, arguments)


def _gpt_neo_call(module: Any, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]) -> _Extras:
    """A key outside of the window weighs as much as padding: it counts where nothing else does."""
    mask = arguments.get("attention_mask")
    if mask is not None and mask.ndim == 4:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        _refuse_keyless(module, seen & causal.triu(1 - (spec.window or x.shape[1])))
    return [], None


def _refuse_keyless(module: nn.Module, seen: Tensor) -> None:
    """Raise on a query without a key, where padding is a large number in place of the logit."""
    if not bool(seen.any(-1).all()):
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with a query that sees nothing but padding: its "
            "output is not in the hand-written forms."
        )


def _t5_call(module: Any, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]) -> _Extras:
    """Terms of the logits come from the layer before, or None: both are those of the table.

    A mask is a large negative number in place of the logit.
    """
    arguments.pop("position_bias", None)
    terms = arguments.pop("encoder_decoder_position_bias", None)
    plain = terms is None or bool(((terms == 0) | (terms < torch.finfo(terms.dtype).min / 2)).all())
    if not plain:
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with terms of its cross attention's logits: not in "
            "the hand-written forms."
        )
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = arguments.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            _refuse_keyless(module, seen)
    return [], None


def _mpt_call(module: Any, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]) -> _Extras:
    """A bias (H, ≥ L or 1, ≥ L) for the last positions, and a mask that is True where forbidden."""
    bias, mask = arguments.pop("position_bias", None), arguments.pop("attention_mask", None)
    masks = [] if mask is None else [~mask.bool()]
    for seen in masks:
        _refuse_keyless(module, seen)
    if bias is not None:
        masks.append(bias.detach()[None, :, -x.shape[1] :, -x.shape[1] :])
    return masks, None


def _gptj_call(module: Any, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]) -> _Extras:
    """Sines and cosines (n, L, r/2) of the call's positions, from the table the layer keeps."""
    positions = arguments.pop("position_ids", None)
    if positions is None:
        raise UnmappedModuleError("GPTJBlock is called without position_ids.")
    sines, cosines = module.attn.embed_positions[positions].chunk(2, -1)
    if len(positions) == 1:
        sines, cosines = sines[0], cosines[0]
    return [], Rotation((cosines, sines), interleaved=True)


def _neighbours_call(module: Any, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]) -> _Extras:
    """Tables of half-split pairs whose first half turns neighbouring coordinates."""
    tables = arguments.pop("position_embeddings", None)
    if tables is None:
        return [], None
    cosines, sines = (table.detach()[..., : table.shape[-1] // 2] for table in tables)
    if len(cosines) == 1:
        cosines, sines = cosines[0], sines[0]
    return [], Rotation((cosines, sines), interleaved=True)


def _fed(name: str) -> str:
    """A part of T5's feed-forward sublayer: the third of a decoder's layer, else the second."""
    return "|".join(f"layer.{place}.DenseReluDense.{name}" for place in (2, 1))


def _kin(suffix: str, names: str) -> str:
    return " ".join(name + suffix for name in names.split())


_BERT = "Bert Roberta XLMRoberta Camembert Electra"
_BART = "Bart Blenderbot BlenderbotSmall M2M100 Marian MBart Mvp Pegasus PLBart Whisper"
_VIT = "ViT DeiT ViTMAE ViTMSN DPTViT IJepa Yolos"
_LLAMA = "Llama Mistral Qwen2 Olmo"
_SEPARATE = "self_attn.{letter}_proj self_attn.o_proj"
_GATED = f"{_SEPARATE} mlp.up_proj mlp.down_proj"

_LAYERS = (
    _Layer(
        "Block",
        "attention.{name} attention.output ffn.up ffn.down norm1 norm2",
        "ffn._function",
        gate="ffn.gate",
        home="curvatlas.zoo",
        options=_zoo_block_options,
    ),
    _Layer(
        "GPT2Block",
        "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj ln_1 ln_2",
        "mlp.act",
        cross="crossattention.q_attn crossattention.c_attn crossattention.c_proj ln_cross_attn",
        options=_gpt2_options,
    ),
    _Layer(
        "GPTNeoBlock",
        "attn.attention.{letter}_proj attn.attention.out_proj mlp.c_fc mlp.c_proj ln_1 ln_2",
        "mlp.act",
        own_mask=True,
        options=_gpt_neo_options,
        call=_gpt_neo_call,
    ),
    _Layer(
        "GPTJBlock",
        "attn.{letter}_proj attn.out_proj mlp.fc_in mlp.fc_out ln_1 ln_1",
        "mlp.act",
        options=lambda module: {"rope_tables": True, "rope_interleaved": True},
        call=_gptj_call,
    ),
    _Layer(
        "GPTNeoXLayer",
        "attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h "
        "input_layernorm post_attention_layernorm",
        "mlp.act",
        grouped=True,
        options=lambda module: {"parallel": bool(module.use_parallel_residual)},
    ),
    _Layer(
        "FalconDecoderLayer",
        "self_attention.query_key_value self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h "
        "ln_attn|input_layernorm ln_mlp|post_attention_layernorm|input_layernorm",
        "mlp.act",
        grouped=True,
        options=_falcon_options,
        call=_falcon_call,
    ),
    _Layer(
        "BloomBlock",
        "self_attention.query_key_value self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h "
        "input_layernorm post_attention_layernorm",
        "mlp.gelu_impl",
        grouped=True,
        options=_bloom_options,
        call=_bloom_call,
    ),
    _Layer(
        "MptBlock",
        "attn.Wqkv attn.out_proj ffn.up_proj ffn.down_proj norm_1 norm_2",
        "ffn.act",
        options=lambda module: {
            "causal": True,
            "call_mask": True,
            "scale": float(module.attn.softmax_scale),
        },
        call=_mpt_call,
    ),
    _Layer(
        _kin(
            "Layer", f"{_BERT} BertGeneration Data2VecText Ernie LayoutLM MarkupLM RemBert Splinter"
        ),
        "attention.self.{name} attention.output.dense intermediate.dense output.dense "
        "attention.output.LayerNorm output.LayerNorm",
        "intermediate.intermediate_act_fn",
        norm_first=False,
        cross="crossattention.self.{name} crossattention.output.dense "
        "crossattention.output.LayerNorm",
        options=_bert_options,
    ),
    _Layer(
        "TransformerBlock",
        "attention.{letter}_lin attention.out_lin ffn.lin1 ffn.lin2 "
        "sa_layer_norm output_layer_norm",
        "ffn.activation",
        norm_first=False,
        home="transformers.models.distilbert",
    ),
    _Layer(  # the same weights may serve several depths
        "AlbertLayer",
        "attention.{name} attention.dense ffn ffn_output attention.LayerNorm full_layer_layer_norm",
        "activation",
        norm_first=False,
    ),
    _Layer(
        "ModernBertEncoderLayer",
        "attn.Wqkv attn.Wo mlp.Wi mlp.Wo attn_norm mlp_norm",
        "mlp.act",
        gate="mlp.Wi",
    ),
    _Layer(
        f"{_kin('EncoderLayer', _BART)} {_kin('DecoderLayer', _BART)} OPTDecoderLayer "
        "BioGptDecoderLayer",
        "self_attn.{letter}_proj self_attn.out_proj fc1 fc2 self_attn_layer_norm final_layer_norm",
        "activation_fn",
        cross="encoder_attn.{letter}_proj encoder_attn.out_proj encoder_attn_layer_norm",
        options=_bart_options,
    ),
    _Layer(
        "T5Block MT5Block UMT5Block",
        "layer.0.SelfAttention.{letter} layer.0.SelfAttention.o "
        f"{_fed('wi_1')}|{_fed('wi')} {_fed('wo')} "
        "layer.0.layer_norm layer.2.layer_norm|layer.1.layer_norm",
        _fed("act"),
        gate=_fed("wi_0"),
        cross="layer.1.EncDecAttention.{letter} layer.1.EncDecAttention.o layer.1.layer_norm",
        distance="layer.0.SelfAttention.relative_attention_bias",
        options=_t5_options,
        call=_t5_call,
        buckets=_t5_buckets,
    ),
    _Layer(  # before transformers 5
        _kin("Layer", _VIT),
        "attention.attention.{name} attention.output.dense intermediate.dense output.dense "
        "layernorm_before layernorm_after",
        "intermediate.intermediate_act_fn",
    ),
    _Layer(
        _kin("Layer", _VIT),
        "attention.{letter}_proj attention.o_proj mlp.fc1 mlp.fc2 layernorm_before layernorm_after",
        "mlp.activation_fn",
    ),
    _Layer(
        _kin("Layer", "Dinov2 Dinov2WithRegisters"),
        "attention.{letter}_proj attention.o_proj mlp.fc1|mlp.up_proj mlp.fc2|mlp.down_proj "
        "norm1 norm2",
        "mlp.activation_fn|mlp.act_fn",
        gate="mlp.gate_proj",
        after="layer_scale1.lambda1 layer_scale2.lambda1",
    ),
    _Layer(
        _kin("EncoderLayer", "CLIP Idefics3 MetaClip2 Siglip Siglip2 SmolVLM"),
        "self_attn.{letter}_proj self_attn.out_proj mlp.fc1 mlp.fc2 layer_norm1 layer_norm2",
        "mlp.activation_fn",
    ),
    _Layer(
        _kin(
            "DecoderLayer",
            f"{_LLAMA} Arcee Cwm EuroBert Gemma Jais2 Ministral Nemotron Qwen3 SeedOss SmolLM3",
        ),
        f"{_GATED} input_layernorm post_attention_layernorm",
        "mlp.act_fn",
        gate="mlp.gate_proj",
        qk_norm="self_attn.{letter}_norm",
    ),
    _Layer(
        "GraniteDecoderLayer",
        f"{_GATED} input_layernorm post_attention_layernorm",
        "mlp.act_fn",
        gate="mlp.gate_proj",
        options=lambda module: {"residual_scale": float(module.residual_multiplier)},
    ),
    _Layer(
        _kin("DecoderLayer", "Gemma2 Gemma3"),
        f"{_GATED} input_layernorm pre_feedforward_layernorm",
        "mlp.act_fn",
        gate="mlp.gate_proj",
        qk_norm="self_attn.{letter}_norm",
        after="post_attention_layernorm post_feedforward_layernorm",
        options=_gemma_options,
    ),
    _Layer(
        _kin("DecoderLayer", "Olmo2 Olmo3"),
        f"{_GATED} - -",
        "mlp.act_fn",
        gate="mlp.gate_proj",
        qk_norm="self_attn.{letter}_norm",
        after="post_attention_layernorm post_feedforward_layernorm",
    ),
    _Layer(
        _kin("DecoderLayer", "Ernie4_5 Glm Glm4 Helium"),
        f"{_SEPARATE} mlp.up_proj|mlp.gate_up_proj mlp.down_proj "
        "input_layernorm post_attention_layernorm",
        "mlp.act_fn|mlp.activation_fn",
        gate="mlp.gate_proj|mlp.gate_up_proj",
        after="post_self_attn_layernorm post_mlp_layernorm",
        options=lambda module: {"rope_interleaved": True},
        call=_neighbours_call,
    ),
    _Layer(
        "Phi3DecoderLayer",
        "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj "
        "input_layernorm post_attention_layernorm",
        "mlp.activation_fn",
        gate="mlp.gate_up_proj",
    ),
    _Layer(
        "PhiDecoderLayer",
        "self_attn.{letter}_proj self_attn.dense mlp.fc1 mlp.fc2 input_layernorm input_layernorm",
        "mlp.activation_fn",
        qk_norm="self_attn.{letter}_layernorm",
        options=_partial_options,
    ),
    _Layer(
        "Starcoder2DecoderLayer",
        f"{_SEPARATE} mlp.c_fc mlp.c_proj input_layernorm post_attention_layernorm",
        "mlp.act",
    ),
    _Layer(
        "StableLmDecoderLayer",
        f"{_GATED} input_layernorm post_attention_layernorm|input_layernorm",
        "mlp.act_fn",
        gate="mlp.gate_proj",
        qk_norm="self_attn.{letter}_layernorm",
        options=_partial_options,
    ),
    _Layer(
        _kin("DecoderLayer", "Cohere Cohere2"),
        f"{_GATED} input_layernorm input_layernorm",
        "mlp.act_fn",
        gate="mlp.gate_proj",
        qk_norm="self_attn.{letter}_norm",
        options=_cohere_options,
    ),
)

_RELATIVE = "adds learned terms of the distance to the logits"
_NOT_COVERED = {
    "DebertaV2Layer": _RELATIVE,
    "MixtralDecoderLayer": "sends tokens to experts",
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
_TORCH_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _refuse_other_forwards(module: nn.Module) -> None:
    """Raise when a part of a known layer does not run the forward its library wrote."""
    for name, part in module.named_modules():
        forward = type(part).forward
        homes = {getattr(forward, "__globals__", {}).get("__name__", "")}
        if not isinstance(module, _TORCH_LAYERS):
            homes.add(type(part).__module__)  # of torch's, a subclass may keep the forward
        known = all(home.partition(".")[0] in _LIBRARIES for home in homes)
        if "forward" in vars(part) or not known:
            raise UnmappedModuleError(
                f"{name or 'the layer'} ({type(part).__name__}) in {type(module).__name__} has a "
                "forward that its library did not write: its derivatives are not the layer's."
            )


def _refuse_hooks(module: nn.Module) -> None:
    """Raise on forward hooks that may change what flows; ours and those that only record do not."""
    for name, part in module.named_modules():
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if home.partition(".")[0] not in ("curvatlas", "transformers"):
                raise UnmappedModuleError(
                    f"{name or 'the layer'} ({type(part).__name__}) in {type(module).__name__} has "
                    f"a forward hook of {home}, which may change activations: remove it first."
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
    norm, eps = shared_norm(map_norm(module.norm1), map_norm(module.norm2))
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
        return _pick_attention(values, "self_attn.") | take(values, paths)

    return spec, pick


def _read_decoder_layer(module: Any) -> tuple[BlockSpec, Pick]:
    """``nn.TransformerDecoderLayer``: ``norm2`` is that of its cross attention."""
    for part in (module.self_attn, module.multihead_attn):
        _refuse_attention_extras(part)
    norms = [map_norm(norm) for norm in (module.norm1, module.norm2, module.norm3)]
    norm, eps = shared_norm(norms[0], norms[1])
    shared_norm(norms[0], norms[2])
    spec = BlockSpec(
        d_model=module.self_attn.embed_dim,
        n_heads=module.self_attn.num_heads,
        d_ff=module.linear1.out_features,
        norm=norm,
        eps=eps,
        norm_first=bool(module.norm_first),
        activation=activation_name(module.activation),
        memory_size=module.multihead_attn.embed_dim,
    )
    if module.multihead_attn.num_heads != spec.n_heads:
        raise UnmappedModuleError(
            "TransformerDecoderLayer with other heads in its cross attention is not in the closed "
            "form."
        )

    def pick(values: Mapping[str, Tensor]) -> Picked:
        paths = {"up": "linear1", "down": "linear2", "norm1": "norm1", "norm2": "norm3"}
        cross = _pick_attention(values, "multihead_attn.")
        picked = {f"cross_{name}": value for name, value in cross.items()}
        picked |= take(values, {**paths, "cross_norm": "norm2"})
        return picked | _pick_attention(values, "self_attn.")

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
        n_kv_heads=module.n_kv_heads,
        **_zoo_options(module),
    )
    paths = {name: name for name in (*_PROJECTIONS, "output")}
    return spec, lambda values: take(values, paths)


def _pick_attention(values: Mapping[str, Tensor], prefix: str) -> Picked:
    """[Q; K; V] stacked in ``in_proj``, heads in consecutive rows."""
    fused = values[f"{prefix}in_proj_weight"].chunk(3)
    picked = {f"{name}_weight": part for name, part in zip(_PROJECTIONS, fused, strict=True)}
    bias = values.get(f"{prefix}in_proj_bias")
    if bias is not None:
        parts = zip(_PROJECTIONS, bias.chunk(3), strict=True)
        picked |= {f"{name}_bias": part for name, part in parts}
    return picked | take(values, {"output": f"{prefix}out_proj"})


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


_Reader = tuple[Callable[[nn.Module], bool], Callable[[Any], tuple[BlockSpec, Pick]]]
_READERS: tuple[_Reader, ...] = (
    (lambda module: _same_forward(module, nn.MultiheadAttention), _read_attention),
    (lambda module: _same_forward(module, nn.TransformerEncoderLayer), _read_encoder_layer),
    (lambda module: _same_forward(module, nn.TransformerDecoderLayer), _read_decoder_layer),
    (lambda module: _named(module, "curvatlas.zoo", "Attention"), _read_zoo_attention),
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
    if isinstance(module, nn.TransformerDecoderLayer):
        return _decoder_layer_call(module, spec, arguments)
    name, x = next(iter(arguments.items()))
    del arguments[name]
    _check_input(module, x, spec)
    if _named(module, "curvatlas.zoo", "Block", "Attention"):
        _refuse_arguments(module, arguments)
        return BlockCall(x=x.detach(), causal=spec.causal)
    if type(module).__module__.startswith("transformers."):
        return _library_call(module, spec, x.detach(), arguments)
    raise UnmappedModuleError(f"calls of {type(module).__name__} are not read.")


def memory_argument(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a layer that ``read_module`` reads is given to attend to, as it is; None: nothing."""
    arguments = _bound(module, args, kwargs)
    return next((arguments[name] for name in _MEMORIES if name in arguments), None)


_MEMORIES = ("memory", "encoder_hidden_states")  # of torch, of Hugging Face


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


def _implementation(module: nn.Module) -> str:
    return getattr(_first(module, "config"), "_attn_implementation", None) or "eager"


def _library_call(
    module: nn.Module, spec: BlockSpec, x: Tensor, arguments: dict[str, Any]
) -> BlockCall:
    """A Hugging Face layer: 4-D masks hold causality and windows, None leaves them to the kernel.

    Scaled dot-product attention is then causal where the layer says so, and never in a window;
    eager attention is not even causal.
    """
    layer = next((row for row in _LAYERS if row.matches(module)), None)
    implementation = _implementation(module)
    extras: _Extras = [], None
    if layer is not None and layer.call is not None:
        extras = layer.call(module, spec, x, arguments)
    masks, rotation = extras
    mask = arguments.pop("attention_mask", None)
    tables = arguments.pop("position_embeddings", None)
    causal = arguments.pop("is_causal", None)
    memory, memory_mask = _library_memory(module, spec, x, arguments, causal=causal)
    _refuse_arguments(module, arguments)
    if implementation not in _IMPLEMENTATIONS:
        raise UnmappedModuleError(
            f"{type(module).__name__} attends by {implementation}, whose masks are not read: load "
            "the model with attn_implementation='sdpa' or 'eager'."
        )
    masks = [_four_axes(module, part, spec, x) for part in (*masks, mask) if part is not None]
    if tables is not None and (spec.rope_base is not None or spec.rope_tables):
        rotation = _tables(module, tables, spec)
    if layer is not None and layer.own_mask:
        causal = spec.causal
    elif masks or implementation == "eager":
        causal = False
    else:
        flag = causal if causal is not None else _first(module, "is_causal")
        causal = bool(spec.causal if flag is None else flag)
        wide = spec.window is None or spec.window >= x.shape[1]
        if causal and not (spec.causal and wide):
            masks.append(x.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None])
            causal = False
    return BlockCall(
        x=x,
        mask=_combined(masks, x),
        rotation=rotation,
        causal=causal,
        keyless="zero",
        memory=memory,
        memory_mask=memory_mask,
        buckets=None if layer is None or layer.buckets is None else layer.buckets(module, x),
    )


def _library_memory(
    module: nn.Module,
    spec: BlockSpec,
    x: Tensor,
    arguments: dict[str, Any],
    *,
    causal: bool | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The encoder's output (n, L', m) that a Hugging Face layer attends to, and its mask."""
    if spec.memory_size is None:
        return None, None
    memory = arguments.pop("encoder_hidden_states", None)
    mask = arguments.pop("encoder_attention_mask", None)
    _check_memory(module, memory, spec, x)
    masks = [] if mask is None else [_four_axes(module, mask, spec, x, keys=memory.shape[1])]
    if not masks and _implementation(module) == "sdpa" and x.shape[1] > 1:
        # without a mask the kernel is causal where the attention says so, here too
        parts = [part for name, part in module.named_modules() if _CROSS.fullmatch(name)]
        flags = [getattr(part, "is_causal", True) for part in parts] if causal is None else [causal]
        if any(flags):
            masks.append(
                x.new_ones(x.shape[1], memory.shape[1], dtype=torch.bool).tril()[None, None]
            )
    return memory.detach(), _combined(masks, x)


_CROSS = re.compile(r"encoder_attn|crossattention(\.self)?|layer\.1\.EncDecAttention")


def _check_memory(module: nn.Module, memory: Any, spec: BlockSpec, x: Tensor) -> None:
    if memory is None:
        raise UnmappedModuleError(
            f"{type(module).__name__} is called without an encoder's output: its cross attention "
            "then does not run, which is not in the hand-written forms."
        )
    plain = isinstance(memory, Tensor) and not memory.is_nested and memory.dtype == x.dtype
    if (
        not plain
        or memory.ndim != 3
        or (len(memory), memory.shape[-1]) != (len(x), spec.memory_size)
    ):
        what = tuple(memory.shape) if plain else type(memory).__name__
        raise UnmappedModuleError(
            f"{type(module).__name__} attends to {what}: needed is a tensor of {x.dtype} "
            f"({len(x)}, tokens, {spec.memory_size})."
        )


def _four_axes(
    module: nn.Module, mask: Any, spec: BlockSpec, x: Tensor, *, keys: int | None = None
) -> Tensor:
    full = (x.shape[0], spec.n_heads, x.shape[1], x.shape[1] if keys is None else keys)
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


def _tables(module: nn.Module, tables: Any, spec: BlockSpec) -> Rotation:
    """Cosines and sines (n or 1, L, r) as the model passes them to every layer."""
    if not (isinstance(tables, tuple | list) and len(tables) == 2):
        raise UnmappedModuleError(
            f"{type(module).__name__} is called with position_embeddings of "
            f"{type(tables).__name__}: needed are the two tables (cos, sin)."
        )
    try:
        return Rotation.from_tables(*tables, interleaved=spec.rope_interleaved)
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
    x = _samples_first(x, time_major=time_major)
    _check_input(module, x, spec)
    return BlockCall(
        x=x.detach(),
        mask=_torch_mask(spec, x, x, pairs, padding, hinted=hinted),
        keyless="zero",
        time_major=time_major and batched,
        batched=batched,
    )


def _decoder_layer_call(module: Any, spec: BlockSpec, arguments: dict[str, Any]) -> BlockCall:
    """``nn.TransformerDecoderLayer``: masks of both attentions, as of the encoder's layer."""
    x, time_major = arguments.pop("tgt"), not module.self_attn.batch_first
    batched = isinstance(x, Tensor) and x.ndim == 3
    memory = arguments.pop("memory")
    own = [arguments.pop(f"tgt_{name}", None) for name in ("mask", "key_padding_mask")]
    others = [arguments.pop(f"memory_{name}", None) for name in ("mask", "key_padding_mask")]
    hints = [bool(arguments.pop(f"{name}_is_causal", False)) for name in ("tgt", "memory")]
    _refuse_arguments(module, arguments)
    x, memory = (_samples_first(tokens, time_major=time_major) for tokens in (x, memory))
    _check_input(module, x, spec)
    _check_memory(module, memory, spec, x)
    return BlockCall(
        x=x.detach(),
        mask=_torch_mask(spec, x, x, *own, hinted=hints[0]),
        keyless="zero",
        time_major=time_major and batched,
        batched=batched,
        memory=memory.detach(),
        memory_mask=_torch_mask(spec, x, memory, *others, hinted=hints[1]),
    )


def _samples_first(x: Any, *, time_major: bool) -> Any:
    """What a layer of torch takes, (L, d), (n, L, d) or (L, n, d), as (n, L, d)."""
    if not isinstance(x, Tensor) or x.is_nested:
        return x
    return x.unsqueeze(0) if x.ndim == 2 else x.transpose(0, 1) if time_major else x


def _torch_mask(
    spec: BlockSpec,
    x: Tensor,
    keys: Tensor,
    pairs: Tensor | None,
    padding: Tensor | None,
    *,
    hinted: bool,
) -> Tensor | None:
    """The masks of queries x (n, L, d) and keys (n, L', m), True where forbidden, or added."""
    (n, length), others = x.shape[:2], keys.shape[1]
    masks = []
    if pairs is not None and hinted and padding is None:
        # torch trusts the hint and does not look at the mask
        pairs = x.new_ones(length, others, dtype=torch.bool).triu(1)
    for mask, shapes in (
        (pairs, {2: (1, 1, length, others), 3: (n, spec.n_heads, length, others)}),
        (padding, {1: (1, 1, 1, others), 2: (n, 1, 1, others)}),
    ):
        if mask is not None:
            shaped = mask.detach().reshape(shapes[mask.ndim])
            masks.append(~shaped if shaped.dtype == torch.bool else shaped)
    return _combined(masks, x)


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
    **dict.fromkeys(
        (f"{name}Model" for name in _LLAMA.split()), (_Layout(blocks="layers", norm="norm"),)
    ),
    **dict.fromkeys(
        (f"{name}ForCausalLM" for name in _LLAMA.split()),
        (_Layout(blocks="model.layers", norm="model.norm", head="lm_head"),),
    ),
    **dict.fromkeys((f"{name}Encoder" for name in _BERT.split()), (_Layout(blocks="layer"),)),
    **dict.fromkeys((f"{name}Model" for name in _BERT.split()), (_Layout(blocks="encoder.layer"),)),
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
        _refuse_calls(layer, spec)
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
