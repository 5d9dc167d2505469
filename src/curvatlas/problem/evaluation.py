"""Calling the model safely: the right kernels, the right mode, the user's model left as it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from curvatlas.errors import NonFiniteError, ProblemError
from curvatlas.precision import COMPUTED
from curvatlas.problem.kernels import (
    TwiceDifferentiable,
    plain_python,
    unwatched,
    warn_of_compiled,
    warn_once,
)
from curvatlas.problem.state import CallState, open_scopes, outside_inference

P = ParamSpec("P")
T = TypeVar("T")


def unwrap(model: Any) -> nn.Module:
    """The bare module inside DDP, DataParallel or torch.compile wrappers; says so."""
    if not isinstance(model, nn.Module):
        raise ProblemError(f"model must be an nn.Module, got {type(model).__name__}.")
    bare: nn.Module = model
    while True:
        kind = type(bare).__name__
        if isinstance(bare, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner, why = bare.module, "double backward through it sees the local shard only"
        elif isinstance(getattr(bare, "_orig_mod", None), nn.Module):
            inner, why = bare._orig_mod, "compiled graphs cannot be differentiated twice"
        elif any(type(m).__name__ == "FullyShardedDataParallel" for m in bare.modules()):
            raise ProblemError(
                "FSDP1-wrapped models cannot be differentiated twice: shard with FSDP2 "
                "(torch.distributed.fsdp.fully_shard), which is accepted, or pass the module."
            )
        elif isinstance(bare, torch.jit.ScriptModule):
            raise ProblemError(
                "a TorchScript module cannot be called with other parameter values, as derivatives "
                "need: pass the module that was scripted or traced."
            )
        else:
            _refuse_lazy(bare)
            warn_of_compiled(bare)
            return bare
        warnings.warn(
            f"unwrapped a {kind}: {why}, so curvatlas works on the module inside.",
            stacklevel=3,
        )
        bare = inner


def _refuse_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ProblemError(
                f"parameter {name!r} has no shape yet (a lazy module): call the model once on a "
                "batch, which gives it one."
            )


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name; those that FSDP2 (fully_shard) spreads are gathered.

    Gathering is collective: every process of the group makes the Problem. The copies are of now;
    after an optimizer step make a new Problem.
    """
    named: dict[str, Tensor] = {
        name: nn.Parameter(outside_inference(p), p.requires_grad) if p.is_inference() else p
        for name, p in model.named_parameters()
    }
    if not _fully_sharded(model):
        return named
    gathered: dict[str, Tensor] = {}
    for name, parameter in named.items():
        whole: Any = parameter
        if _sharded_only(getattr(parameter, "placements", ())):
            whole = nn.Parameter(whole.full_tensor().detach(), parameter.requires_grad)
        gathered[name] = whole
    return gathered


def _sharded_only(placements: Sequence[Any]) -> bool:
    """Whether a DTensor is spread by FSDP, (Shard,), or by HSDP, (Replicate, Shard): no more.

    Tensor parallelism adds an axis behind these, or strides (``_StridedShard``).
    """
    *replicated, last = placements or (None,)
    plain = type(last).__name__ == "Shard" and len(replicated) <= 1
    return plain and all(placement.is_replicate() for placement in replicated)


def _fully_sharded(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 manages, told by name: importing FSDP takes seconds."""
    return [module for module in model.modules() if _is_fully_sharded(module)]


def _is_fully_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


@contextlib.contextmanager
def _without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """No hooks of FSDP2, since full parameters are passed in, and none on gradients.

    What a backward hook records or rescales belongs to the user's training: the loss, and so its
    derivatives, do not depend on it.
    """
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def take(hooks: Any) -> None:
        if hooks:
            kept.append((hooks, hooks.copy()))
            hooks.clear()

    try:
        for module in modules:
            take(module._backward_hooks)
            take(module._backward_pre_hooks)
            if _is_fully_sharded(module):
                take(module._forward_pre_hooks)
                take(module._forward_hooks)
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def refuse_sharded(named: Mapping[str, Tensor]) -> None:
    """Tensor-parallel parameters give wrong products without an error: refuse them."""
    for name, parameter in named.items():
        if hasattr(parameter, "placements"):  # a DTensor
            spread = ", ".join(str(placement) for placement in parameter.placements)
            raise ProblemError(
                f"parameter {name!r} is a DTensor ({spread}) that FSDP2 alone does not manage, "
                "with or without replicas (HSDP): tensor-parallel parameters give wrong second "
                "derivatives (21 % off, without an error). Pass the model before "
                "parallelize_module; fully_shard and DDP models are accepted."
            )
        if parameter.is_meta:
            raise ProblemError(f"parameter {name!r} is on the meta device: load its values first.")


@contextlib.contextmanager
def evaluation(
    model: nn.Module, *, stay_double: bool, compute_dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Everything a twice-differentiable forward needs, restored on the way out.

    Evaluation mode; operations that can be differentiated twice (``TwiceDifferentiable``), also
    where the model chooses others; no encoder fast path, no autocast, no key/value cache, nothing
    compiled or checkpointed; gradients enabled even under ``no_grad``; experts one by one in
    float64, which the grouped kernel does not take. Buffers and attributes that the model changes
    in its forward pass are put back. Nothing of ``compute_dtype``, or of float64 with
    ``stay_double``, is rounded to a narrower dtype on the way; half precision is refused.
    """
    modules = list(model.modules())
    dtypes = {p.dtype for m in modules for p in m._parameters.values() if p is not None}
    if compute_dtype is None and not dtypes.issubset(COMPUTED):
        everything = dict(model.named_parameters())
        check_precision(everything, [n for n, p in everything.items() if p.requires_grad], None)
    training = [module for module in modules if module.training]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    first = next(model.parameters(), None)
    device = "cpu" if first is None else first.device.type
    scope = CallState(model)
    keep = torch.float64 if stay_double else compute_dtype
    mode = TwiceDifferentiable(model, keep=keep, device=device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.autocast(device_type=device, enabled=False))
        stack.enter_context(plain_python(model))
        stack.enter_context(_exact_configurations(model, modules))
        stack.enter_context(mode.scope(model))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        try:
            open_scopes.append(scope)
            for module in training:
                module.training = False
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            open_scopes.remove(scope)
            scope.put_back()
            for module in training:
                module.training = True


@contextlib.contextmanager
def _exact_configurations(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Hugging Face's options that cannot be differentiated twice, switched in every part."""
    parts: list[Any] = [vars(m)["config"] for m in modules if "config" in vars(m)]
    configurations = {id(config): config for config in parts}.values()
    changes: list[tuple[Any, str, Any]] = []  # configuration, attribute, value to put back
    try:
        for config in configurations:
            for attribute, instead in _switched(model, config):
                changes.append((config, attribute, getattr(config, attribute)))
                setattr(config, attribute, instead)
        yield
    finally:
        for config, attribute, value in changes:
            setattr(config, attribute, value)


def _switched(model: nn.Module, config: Any) -> Iterator[tuple[str, Any]]:
    """(attribute, value during the evaluation) of one configuration."""
    if getattr(config, "use_cache", None):
        yield "use_cache", False
    if getattr(config, "_experts_implementation", None) == "grouped_mm" and any(
        parameter.dtype == torch.float64 for parameter in model.parameters()
    ):
        yield "_experts_implementation", "eager"
    # The plain attribute: the property would also set those of sub-configurations.
    attention = getattr(config, "_attn_implementation_internal", None)
    if isinstance(attention, str) and ("flash" in attention or "/" in attention):
        warn_once(
            model,
            "attention",
            f"attn_implementation={attention!r} has no second derivative: curvatlas computes with "
            "eager attention; the model stays as it is.",
        )
        yield "_attn_implementation_internal", "eager"


def call(model: nn.Module, values: Mapping[str, Tensor], inputs: Any) -> Any:
    """The model's output with its parameters replaced by ``values``.

    A model that takes a derivative inside its forward pass (forces, an inner step on its weights)
    has gradients there also where none are asked for.
    """
    if model not in _differentiating:
        try:
            return _called(model, values, inputs)
        except RuntimeError as error:
            if WITHOUT_GRAPH not in str(error):
                raise
        _differentiating.add(model)
    varying = {
        name: value.detach().requires_grad_(True)
        if value.is_floating_point() and not value.requires_grad
        else value
        for name, value in values.items()
    }
    with torch.enable_grad():
        outputs = _called(model, varying, inputs)
    if torch.is_grad_enabled():
        return outputs
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


# Models that have asked for a gradient in their forward pass, and how they do.
_differentiating: weakref.WeakSet[nn.Module] = weakref.WeakSet()
WITHOUT_GRAPH = "not require grad"  # of the error where there is none


def _called(model: nn.Module, values: Mapping[str, Tensor], inputs: Any) -> Any:
    # Keyword tensors such as float images follow the parameters' dtype only if the user says so.
    scope = next((s for s in reversed(open_scopes) if s.model is model), None)
    versions = _versions(values)
    named = list(model.named_modules())  # one walk for all that look through the model
    hooks = _without_hooks(module for _, module in named)
    with hooks, scope.one_call(inputs) if scope else contextlib.nullcontext(inputs) as own:
        outputs = called_with(model, values, *arguments_of(model, own), named=named)
    changed = [n for n, a, b in zip(values, versions, _versions(values), strict=True) if a != b]
    if changed:
        raise changed_in_place(changed[0])
    return outputs


def changed_in_place(name: str) -> ProblemError:
    return ProblemError(
        f"the forward pass changes parameter {name!r} in place, which no derivative sees: do that "
        "outside of forward, or in a parametrization."
    )


@unwatched
def _versions(values: Mapping[str, Tensor]) -> list[int]:
    return [value._version for value in values.values()]


def arguments_of(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of a call of the model with the inputs of a batch."""
    if isinstance(inputs, Mapping) and not _is_one_argument(model, inputs):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def called_with(
    module: nn.Module,
    values: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    named: Sequence[tuple[str, nn.Module]] | None = None,
) -> Any:
    """``module(*args, **kwargs)`` with parameters replaced by name, wherever they are used.

    ``torch.func.functional_call`` leaves a replacement behind in a module that is registered under
    two names (shared layers, soft prompts on a model's own embedding), instead of its parameter.
    named: ``module.named_modules()`` where the caller has them.
    """
    named = list(module.named_modules()) if named is None else named
    if any(isinstance(part, torch.jit.ScriptModule) for _, part in named):
        return torch.func.functional_call(module, dict(values), tuple(args), dict(kwargs))
    with _replaced(named, values):
        return module(*args, **kwargs)


@contextlib.contextmanager
def _replaced(
    named: Sequence[tuple[str, nn.Module]], values: Mapping[str, Tensor]
) -> Iterator[None]:
    """Inside, the modules' parameters are replaced by their first name, wherever they are used."""
    kept = [(part._parameters, dict(part._parameters)) for _, part in named if part._parameters]
    by_parameter: dict[int, Tensor | None] = {}
    for prefix, part in named:
        for own_name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in by_parameter:
                name = f"{prefix}.{own_name}" if prefix else own_name
                by_parameter[id(parameter)] = values.get(name, parameter)
    try:
        for held, own in kept:
            held.update({name: by_parameter.get(id(p), p) for name, p in own.items()})  # type: ignore[misc]
        yield
    finally:
        for held, own in kept:
            held.clear()
            held.update(own)


# A block → its own name of a parameter → the parameter's name in the model.
Places = Mapping[nn.Module, Mapping[str, str]]


def block_places(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    named: Mapping[str, Tensor],
    *,
    without: Container[str] = (),
) -> Places:
    """The parameters that belong to some of the blocks and to nothing outside them."""
    inside = {part for block in blocks for part in block.modules()}
    outside = {
        id(parameter)
        for part in model.modules()
        if part not in inside
        for parameter in part._parameters.values()
    }
    first: dict[int, str] = {}
    for (_, parameter), name in zip(model.named_parameters(), named, strict=True):
        if id(parameter) not in outside and name not in without:
            first[id(parameter)] = name
    return {
        block: {own: first[id(p)] for own, p in block.named_parameters() if id(p) in first}
        for block in blocks
    }


@contextlib.contextmanager
def block_by_block(
    places: Places,
    present: Callable[[Iterable[str]], contextlib.AbstractContextManager[Mapping[str, Tensor]]],
) -> Iterator[None]:
    """Inside, every block runs with the weights that ``present`` gives, for as long as it runs."""

    def run(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = places[block]
        with present(own.values()) as weights:
            values = {name: weights[whole] for name, whole in own.items()}
            with _replaced(list(block.named_modules()), values):
                return forward(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for block in places:
            stack.enter_context(_with_forward(block, functools.partial(run, block, block.forward)))
        yield


@contextlib.contextmanager
def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's forward pass is another one."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _is_one_argument(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Whether a mapping is itself the model's argument, rather than arguments by name.

    It is where forward takes one argument and knows none of the keys: ``forward(self, data)`` for
    {"x": …, "y": …}. A tuple decides it: the inputs ``(mapping,)`` are one argument.
    """
    described = getattr(model, "input_signature", None)
    signature = described() if callable(described) else inspect.signature(model.forward)
    if any(key in signature.parameters for key in inputs):
        return False
    try:
        signature.bind(**inputs)
    except TypeError:
        pass
    else:
        return False
    try:
        signature.bind(inputs)
    except TypeError:
        return False
    return True


def is_own_leaf(parameter: Tensor) -> bool:
    """Whether derivatives may be taken by the parameter itself, instead of by an alias of it.

    Not where it is frozen, or where hooks would change what autograd gives.
    """
    return parameter.requires_grad and parameter.is_leaf and not parameter._backward_hooks


@contextlib.contextmanager
def without_tensor_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, hooks that were put on parameters since ``is_own_leaf`` do not change gradients."""
    hooked = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    kept = [hooks.copy() for hooks in hooked]
    try:
        for hooks in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, own in zip(hooked, kept, strict=True):
            hooks.update(own)


@unwatched
def fresh_leaves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves of the autograd graph that share the weights' memory."""
    return {name: weight.detach().requires_grad_(True) for name, weight in weights.items()}


# --- what is checked before a number is trusted ---------------------------------------------------


_RATES = ("dropout", "attention_dropout", "dropout_p", "attn_dropout", "drop_prob", "layerdrop")


def check_compute_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Refuse arithmetic in half precision, where second derivatives are lost in rounding."""
    if dtype is not None and dtype not in COMPUTED:
        raise ProblemError(
            f"compute_dtype is torch.float32 or torch.float64, got {dtype!r}: curvature is lost in "
            "the rounding of half precision; weights may be stored in it."
        )
    return dtype


def check_precision(
    everything: Mapping[str, Tensor], varying: Sequence[str], compute_dtype: torch.dtype | None
) -> None:
    """Weights that can be computed with: before they are, a processor may not know how at all."""
    real = {name: p for name, p in everything.items() if p.is_floating_point()}
    dtypes = {p.dtype for p in real.values()}
    low = sorted(str(t).removeprefix("torch.") for t in dtypes if t not in COMPUTED)
    tiny = [t for t in low if "float8" in t or "float4" in t]
    if tiny:
        name = next(name for name, p in real.items() if str(p.dtype).endswith(tiny[0]))
        raise ProblemError(
            f"{name!r} is {tiny[0]}, a quantised weight whose scale is kept elsewhere: load the "
            "model dequantised (in bfloat16 or float32), or let only adapters vary."
        )
    if compute_dtype is None and low:
        fixed = {n for n, p in real.items() if p.dtype not in COMPUTED}.isdisjoint(varying)
        raise ProblemError(
            f"{'frozen weights' if fixed else 'parameters'} of {', '.join(low)}: curvature needs "
            "float32 or float64. Pass compute_dtype=torch.float32, which keeps them as they are "
            "and computes in float32, or call model.float()."
        )


def check_weights(
    everything: Mapping[str, Tensor], varying: Sequence[str], compute_dtype: torch.dtype | None
) -> None:
    """Finite values, one dtype of at least float32 to compute in, one device."""
    check_precision(everything, varying, compute_dtype)
    named = {name: everything[name] for name in varying}
    if compute_dtype is None and len({p.dtype for p in named.values()}) > 1:
        examples = {str(p.dtype): name for name, p in named.items()}
        raise ProblemError(
            f"parameters of several dtypes ({examples}): pass compute_dtype=, or call "
            "model.float() or model.double()."
        )
    devices = {p.device for p in named.values()}
    if len(devices) > 1:
        raise ProblemError(
            f"parameters lie on several devices ({', '.join(map(str, devices))}): "
            "move the model to one."
        )
    bad = [name for name, p in named.items() if not bool(torch.isfinite(p.detach()).all())]
    if bad:
        raise NonFiniteError(f"NaN or infinite weights in {_listed(bad)}: reload or retrain them.")


def kinds(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape, dtype and device of every parameter, in words."""
    return {name: f"{tuple(p.shape)} {p.dtype} on {p.device}" for name, p in named.items()}


def check_same_parameters(before: Mapping[str, str], named: Mapping[str, Tensor]) -> None:
    """Replaced parameters are followed; others than before (``kinds``) are another problem."""
    now = kinds(named)
    changed = sorted(before.keys() ^ now.keys())
    if changed:
        raise ProblemError(
            "the model's parameters are not those the Problem was made for: "
            f"{_listed(changed)} came, went or are tied otherwise; make a new Problem."
        )
    for name, kind in now.items():
        if kind != before[name]:
            raise ProblemError(
                f"parameter {name!r} was {before[name]} and is now {kind}: make a new Problem."
            )


def random_modules(model: nn.Module) -> list[str]:
    """Modules whose train-mode randomness is switched on, by name and kind."""
    names = []
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            active = module.p > 0
        else:
            rates = [vars(module).get(rate) for rate in _RATES]
            active = any(isinstance(rate, float) and rate > 0 for rate in rates)
        if active:
            names.append(f"{name or type(module).__name__}")
    return names


def _batch_norms(model: nn.Module) -> list[str]:
    """Batch normalisations that use the statistics of their batch, by name."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]


def check_mode(model: nn.Module) -> None:
    """Refuse dropout and batch statistics that are switched on."""
    dropping = random_modules(model)
    if dropping:
        raise ProblemError(
            f"dropout is active in {_listed(dropping)}, so the loss is random: call model.eval()."
        )
    batch_norms = _batch_norms(model)
    if batch_norms:
        raise ProblemError(
            f"batch normalisation uses batch statistics in {_listed(batch_norms)}, so the loss is "
            "not a sum over samples: call model.eval()."
        )


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode after."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def say_evaluation_mode(model: nn.Module, where: str, *, deeper: int = 0) -> None:
    """Warn, once for every model, that a model in train mode is evaluated without its dropout."""
    warn_once(
        model,
        "evaluation mode",
        f"{type(model).__name__} is in train mode ({where} would make the loss random): it is "
        "evaluated in evaluation mode and put back; call model.eval() to say so yourself.",
        deeper=deeper,
    )


@contextlib.contextmanager
def without_randomness(model: nn.Module) -> Iterator[None]:
    """``in_evaluation_mode``, said once for every model where it makes a difference.

    The numbers are those of the network without its dropout, not of what a training step sees.
    """
    switched = [*random_modules(model), *_batch_norms(model)]
    if switched:
        say_evaluation_mode(model, _listed(switched), deeper=2)  # through the context manager
    with in_evaluation_mode(model):
        yield


def evaluated(function: Callable[P, T]) -> Callable[P, T]:
    """A function of a model, or a method of an object that has one, ``without_randomness``."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        first: Any = args[0] if args else kwargs.get("model")
        model = first if isinstance(first, nn.Module) else getattr(first, "model", None)
        if not isinstance(model, nn.Module):
            return function(*args, **kwargs)  # which says what it expects
        with without_randomness(model):
            return function(*args, **kwargs)

    return called


def check_same_loss(first: float, second: float, *, eps: float) -> None:
    """Two evaluations of one loss must agree."""
    if first != second and not abs(first - second) <= 100 * eps * max(abs(first), abs(second)):
        relative = abs(first - second) / max(abs(first), abs(second))
        raise ProblemError(
            f"the loss changes between two evaluations (relative {relative:.0e}): something in the "
            "model, the loss or the data is random; make it deterministic."
        )


def check_finite_loss(value: float, index: int) -> None:
    """The loss of batch ``index`` must be a number."""
    if not abs(value) < float("inf"):
        raise NonFiniteError(
            f"the loss of batch {index} is {value}: look at that batch's inputs and targets and at "
            "the model's outputs for it."
        )


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


listed = _listed
