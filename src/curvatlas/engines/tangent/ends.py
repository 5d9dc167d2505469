"""What stands before the first block and behind the last, recognised by what it computes.

A sum of lookups and projections, a norm, a pooling and a linear head have hand-written passes. The
modules that ran tell which parameters take part; a form is taken only where its values are those of
the model to rounding. Anything else is left to autograd, which is slower and as exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas.engines.tangent.head import LinearisedReadout, Pooling, Readout
from curvatlas.engines.tangent.reading import MappedNorm, UnmappedModuleError, map_norm
from curvatlas.engines.tangent.stem import Lookup, Projection, Source, Stem, StemNorm
from curvatlas.engines.tangent.tail import ChunkedTail, ReadoutTail
from curvatlas.problem.cross_entropy import CrossEntropy
from curvatlas.problem.kernels import unwatched
from curvatlas.problem.large_heads import HiddenLogits, plain_linear
from curvatlas.problem.losses import Loss

_FEW = 4  # modules before the first block of which some may lead elsewhere
_ROUNDINGS = 2000  # between our values and the model's, relative to the largest of them


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module that is no part of a block."""

    module: nn.Module
    given: Tensor
    result: Tensor


class Names(Protocol):
    """What is asked of a model's reading."""

    @property
    def block_parameters(self) -> frozenset[str]: ...

    def name(self, module: nn.Module, parameter: str) -> str:
        """The first name of a module's own parameter."""
        ...


@unwatched
def same_values(ours: Any, theirs: Any) -> bool:
    """Whether two outputs agree to rounding."""
    if isinstance(ours, HiddenLogits) and isinstance(theirs, HiddenLogits):
        return same_values(ours.hidden, theirs.hidden)
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return _same_trees(ours, theirs)
    if ours.shape != theirs.shape:
        return False
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    ours, theirs = ours.detach(), theirs.detach()
    size = float(theirs.abs().max()) if theirs.numel() else 0.0
    off = float((ours - theirs).abs().max()) if theirs.numel() else 0.0
    return off <= _ROUNDINGS * torch.finfo(theirs.dtype).eps * size


def _same_trees(ours: Any, theirs: Any) -> bool:
    left, left_spec = torch.utils._pytree.tree_flatten(ours)
    right, right_spec = torch.utils._pytree.tree_flatten(theirs)
    pairs = zip(left, right, strict=False)
    return left_spec == right_spec and all(
        same_values(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)
    )


# ---- stems ---------------------------------------------------------------------------------------


def recognised_stem(
    names: Names,
    weights: Mapping[str, Tensor],
    calls: Sequence[ModuleCall],
    x: Tensor,
    *,
    moves: Callable[[nn.Module], bool],
    name: str = "stem",
) -> Stem | None:
    """The stem whose output is x (n, L, d), from the modules that ran before the first block.

    moves: whether what a module is given depends on parameters, which its values do not tell.
    name: the stem's own, where there are several.
    """
    values = {own: weight.detach() for own, weight in weights.items()}
    total, norm = x, None
    for call in calls:
        if norm is None and call.result.shape == x.shape and same_values(call.result, x):
            norm = stem_norm(names, values, call.module, name)
            total = x if norm is None else call.given.detach()
    sources = _sources(names, values, calls, total)
    if sources is None:
        return None
    projected = {
        part for source in sources if isinstance(source, Projection) for part in source.names
    }
    for call in calls:
        own = {names.name(call.module, part) for part, _ in call.module.named_parameters()}
        if not own.isdisjoint(projected) and moves(call.module):
            return None
    stem = Stem(torch.zeros_like(total), sources, norm, name=name)
    return stem if same_values(stem.output, x) else None


def stem_norm(
    names: Names, values: Mapping[str, Tensor], module: nn.Module, name: str
) -> StemNorm | None:
    """A module read as a norm outside the blocks, None: it is none; ``name`` is the prefix."""
    mapped = _read_norm(module)
    if mapped is None:
        return None
    parameters = {f"{name}_{own}": names.name(module, own) for own, _ in module.named_parameters()}
    weights = {ours: values[theirs] for ours, theirs in parameters.items()}
    given = _with_gain(weights, f"{name}_weight", mapped)
    return StemNorm(norm=mapped.norm, eps=mapped.eps, parameters=parameters, weights=given)


def _with_gain(weights: dict[str, Tensor], name: str, norm: MappedNorm) -> dict[str, Tensor]:
    """The weights with the gain as it multiplies; its tangent is that of the weight."""
    if norm.offset and name in weights:
        return weights | {name: weights[name] + norm.offset}
    return weights


def _read_norm(module: nn.Module) -> MappedNorm | None:
    try:
        return map_norm(module)
    except UnmappedModuleError:
        return None


def _sources(
    names: Names, values: Mapping[str, Tensor], calls: Sequence[ModuleCall], x: Tensor
) -> list[Source] | None:
    """Sources whose sum is x; None where none is found."""
    used: list[Source] = []
    for call in calls:
        source = _source(names, values, call, x)
        if source is not None:
            used.append(source)
    return next(filter(None, (_fitting(names, values, some, x) for some in _subsets(used))), None)


def _subsets(used: Sequence[Source]) -> Iterator[Sequence[Source]]:
    """All sources, and where they are few, some of them: modules may serve two stems."""
    fewest = 1 if len(used) <= _FEW else len(used)
    for count in range(len(used), fewest - 1, -1):
        yield from itertools.combinations(used, count)


def _fitting(
    names: Names, values: Mapping[str, Tensor], used: Sequence[Source], x: Tensor
) -> list[Source] | None:
    """These sources and learned rows beside them, if their sum is x."""
    if not used:
        return None
    modules = {name for source in used for name in source.names} | names.block_parameters
    free = {name: value for name, value in values.items() if name not in modules}
    for extra in _learned_rows(free, used, x):
        trial = [*used, *extra]
        gap = x.clone()
        for source in trial:
            value = torch.zeros_like(x)
            source.add_value(value)
            gap -= value
        if float(gap.abs().max()) <= _ROUNDINGS * torch.finfo(x.dtype).eps * float(x.abs().max()):
            return trial
    return _scaled(used, x)


def _source(
    names: Names, values: Mapping[str, Tensor], call: ModuleCall, x: Tensor
) -> Source | None:
    """The part of x that one module's result is, by its kind and shape."""
    module, (n, length, d) = call.module, x.shape
    if isinstance(module, nn.Embedding) and call.result.shape[-1] != d:
        return None  # of another width: ELECTRA and ALBERT project their embeddings
    if type(module).forward is nn.Embedding.forward:
        name = names.name(module, "weight")
        index = call.given.expand(n, length) if call.given.shape in ((n, length),) else call.given
        if index.numel() not in (n * length, length) or index.shape[-1] != length:
            return None
        return Lookup(
            parameter=name,
            table=values[name],
            index=index.reshape(-1),
            padding=module.padding_idx,  # type: ignore[arg-type]
        )
    if isinstance(module, nn.Embedding):
        return _varied_lookup(names, values, call, x)
    patches: Tensor | None = None
    if plain_linear(module) and call.given.ndim == 3 and len(call.given) == n:
        patches = call.given
    elif type(module) is nn.Conv2d and call.given.ndim == 4 and len(call.given) == n:
        patches = _unfolded(module, call.given)
    if patches is None or call.result.numel() != n * patches.shape[1] * d:
        return None
    weight = names.name(module, "weight")
    bias = None if module.bias is None else names.name(module, "bias")
    return Projection(
        weight=weight,
        bias=bias,
        matrix=values[weight].reshape(d, -1),
        shift=None if bias is None else values[bias],
        patches=patches.detach(),
        places=slice(length - patches.shape[1], length),
    )


def _varied_lookup(
    names: Names, values: Mapping[str, Tensor], call: ModuleCall, x: Tensor
) -> Lookup | None:
    """An embedding with a forward of its own, by its values: tokens times a number, or positions.

    BART multiplies its tokens; its positions, whatever they are asked for, count from an offset.
    """
    module, (n, length, d) = call.module, x.shape
    name, result = names.name(module, "weight"), call.result.detach()
    table: Tensor = values[name]
    padding: Any = module.padding_idx
    counted = torch.arange(length, device=x.device) + int(getattr(module, "offset", 0))
    tries = [(counted, None)]
    if call.given.shape == (n, length) and not call.given.is_floating_point():
        tries.insert(0, (call.given.reshape(-1), padding))
    if result.numel() not in (length * d, x.numel()):
        return None
    result = result.reshape(-1, length, d)
    for index, still in tries:
        if int(index.max()) >= len(table) or len(index) > result[..., 0].numel():
            continue
        rows = table[index].view(-1, length, d).expand_as(result)
        scale = float((rows * result).sum() / rows.square().sum())
        if same_values(rows * scale, result):
            return Lookup(parameter=name, table=table, index=index, scale=scale, padding=still)
    return None


def _unfolded(module: nn.Conv2d, images: Tensor) -> Tensor | None:
    """Patches (n, L', c·h·w) of a convolution, None for one that is no plain sum over them."""
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    columns = F.unfold(
        images,
        module.kernel_size,
        dilation=module.dilation,
        padding=module.padding,
        stride=module.stride,
    )
    return columns.mT.contiguous()


def _learned_rows(
    free: Mapping[str, Tensor], used: Sequence[Source], x: Tensor
) -> Iterator[list[Source]]:
    """Lists of further sources to try: nothing, learned positions, a class token, both."""
    _, length, d = x.shape
    yield []
    everywhere = torch.arange(length, device=x.device)
    tables = {
        name: value.reshape(-1, d)
        for name, value in free.items()
        if value.shape[-1:] == (d,) and value.numel() >= length * d
    }
    positions: list[Source] = [
        Lookup(parameter=name, table=table, index=everywhere) for name, table in tables.items()
    ]
    starts = {source.places.start for source in used if isinstance(source, Projection)}
    tokens: list[Source] = []
    if 1 in starts:
        tokens = [
            Lookup(
                parameter=name,
                table=value.reshape(1, d),
                index=everywhere[:1],
                places=slice(0, 1),
            )
            for name, value in free.items()
            if value.numel() == d
        ]
    for position in positions:
        yield [position]
    for token in tokens:
        yield [token]
        for position in positions:
            yield [token, position]


def _scaled(used: Sequence[Source], x: Tensor) -> list[Source] | None:
    """One lookup times a number, as Gemma's: x = c E[index]."""
    if len(used) != 1 or not isinstance(used[0], Lookup):
        return None
    lookup = used[0]
    value = torch.zeros_like(x)
    lookup.add_value(value)
    scale = float((value * x).sum() / value.square().sum())
    scaled = Lookup(
        parameter=lookup.parameter,
        table=lookup.table,
        index=lookup.index,
        padding=lookup.padding,
        scale=scale,
    )
    return [scaled] if same_values(value * scale, x) else None


# ---- tails ---------------------------------------------------------------------------------------


def recognised_tail(
    names: Names,
    weights: Mapping[str, Tensor],
    calls: Sequence[ModuleCall],
    z: Tensor,
    outputs: Any,
    *,
    loss: Loss,
    targets: Any,
    share: float,
) -> ReadoutTail | ChunkedTail | None:
    """Norm, pooling and linear head from z (n, L, d) to the outputs, and the loss behind them."""
    chunked = isinstance(outputs, HiddenLogits)
    result = outputs.hidden if isinstance(outputs, HiddenLogits) else outputs
    if not isinstance(result, Tensor) or result.ndim not in (2, 3):
        return None
    tokens, samples = z.flatten(0, 1), len(z)
    for readout, parameters in _readouts(names, weights, calls, z, result, head=not chunked):
        trial = LinearisedReadout(readout, tokens, samples=samples)
        if trial.output.numel() != result.numel():
            continue
        if not same_values(trial.output.reshape(result.shape), result):
            continue
        if not isinstance(outputs, HiddenLogits):
            return ReadoutTail(
                readout,
                parameters,
                tokens,
                samples=samples,
                shape=result.shape,
                loss=loss,
                targets=targets,
                share=share,
            )
        assert isinstance(loss, CrossEntropy)
        assert outputs.names is not None
        return ChunkedTail(
            readout,
            parameters,
            tokens,
            samples=samples,
            logits=outputs,
            head=outputs.names,
            loss=loss,
            targets=targets,
            share=share,
        )
    return None


def _reads(call: ModuleCall, z: Tensor, result: Tensor) -> bool:
    """Whether a linear layer turns tokens of z's width into the outputs."""
    return call.result.shape == result.shape and call.given.shape[-1] == z.shape[-1]


def _readouts(
    names: Names,
    weights: Mapping[str, Tensor],
    calls: Sequence[ModuleCall],
    z: Tensor,
    result: Tensor,
    *,
    head: bool,
) -> Iterator[tuple[Readout, dict[str, str]]]:
    """Readouts to try, with the names of their parameters in the model."""
    # each with what it gives, or is given
    norms: list[tuple[dict[str, Any], dict[str, str], Tensor]] = [({}, {}, z)]
    heads: list[tuple[dict[str, Any], dict[str, str], Tensor]] = [({}, {}, result)]
    for call in calls:
        mapped = _read_norm(call.module)
        if mapped is not None and mapped.size == z.shape[-1]:
            own = [own for own, _ in call.module.named_parameters()]
            parameters = {f"norm_{o}": names.name(call.module, o) for o in own}
            gains = {ours: weights[name].detach() for ours, name in parameters.items()}
            norm: dict[str, Any] = {
                "norm": mapped.norm,
                "eps": mapped.eps,
                **_with_gain(gains, "norm_weight", mapped),
            }
            norms.insert(0, (norm, parameters, call.result))
        elif head and plain_linear(call.module) and _reads(call, z, result):
            own = ["weight"] if call.module.bias is None else ["weight", "bias"]
            parameters = {f"head_{o}": names.name(call.module, o) for o in own}
            values = {o: weights[parameters[f"head_{o}"]].detach() for o in own}
            heads.insert(0, (values, parameters, call.given))
    pooled = result.ndim == 2
    poolings: list[Pooling | None] = ["first", "mean", "last"] if pooled else [None]
    for head_options, head_names, given in heads:
        for norm, norm_parameters, normed in norms:
            scale = 1.0 if pooled else _number_between(normed, given)
            for pooling in poolings:
                yield (
                    Readout(pooling=pooling, scale=scale, **head_options, **norm),
                    {**norm_parameters, **head_names},
                )


def _number_between(tokens: Tensor, given: Tensor) -> float:
    """The number that one tensor is times the other, 1 where there is none."""
    if tokens.shape != given.shape or torch.equal(tokens, given):
        return 1.0
    scale = float((tokens * given).sum() / tokens.square().sum())
    return scale if same_values(tokens * scale, given) else 1.0
