"""Calling the model safely: the right kernels, the right mode, the user's model left as it was."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from curvatlas.errors import DifferentiationError, ProblemError
from curvatlas.problem.weight_norm import exact_weight_norm

_NO_SECOND_DERIVATIVE = (
    "is not implemented",
    "does not have a derivative",
    "once_differentiable",
    "not differentiable",
    "doesn't support double backward",
    "does not currently support double backward",
)


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
        elif kind == "FullyShardedDataParallel":
            raise ProblemError(
                "FSDP1-wrapped models cannot be differentiated twice: shard with FSDP2 "
                "(torch.distributed.fsdp.fully_shard), which is accepted, or pass the module."
            )
        else:
            return bare
        warnings.warn(
            f"unwrapped a {kind}: {why}, so curvatlas works on the module inside.",
            stacklevel=3,
        )
        bare = inner


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name; those that FSDP2 (fully_shard) spreads are gathered.

    Gathering is collective: every process of the group makes the Problem. The copies are of now;
    after an optimizer step make a new Problem.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    if not _fully_sharded(model):
        return named
    gathered: dict[str, Tensor] = {}
    for name, parameter in named.items():
        whole: Any = parameter
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.ndim == 1:
            whole = nn.Parameter(whole.full_tensor().detach(), parameter.requires_grad)
        gathered[name] = whole
    return gathered


def _fully_sharded(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 manages, told by name: importing FSDP takes seconds."""
    return [m for m in model.modules() if any(k.__name__ == "FSDPModule" for k in type(m).__mro__)]


@contextlib.contextmanager
def _without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Full parameters are passed in: nothing is to be gathered or freed around the calls."""
    modules = _fully_sharded(model)
    kept = [(m, m._forward_pre_hooks.copy(), m._forward_hooks.copy()) for m in modules]
    try:
        for module in modules:
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks.update(before)
            module._forward_hooks.update(after)


def refuse_sharded(named: Mapping[str, Tensor]) -> None:
    """Tensor-parallel parameters give wrong products without an error: refuse them."""
    for name, parameter in named.items():
        if hasattr(parameter, "placements"):  # a DTensor
            raise ProblemError(
                f"parameter {name!r} is a DTensor that FSDP2 does not manage: tensor-parallel "
                "parameters give wrong second derivatives (21 % off, without an error). Pass the "
                "model before parallelize_module; fully_shard and DDP models are accepted."
            )
        if parameter.device.type == "meta":
            raise ProblemError(f"parameter {name!r} is on the meta device: load its values first.")


class _StayDouble(TorchFunctionMode):
    """Inside, no float64 tensor is rounded to float32 on the way.

    Some libraries compute norms and softmax by ``x.to(torch.float32)`` or ``dtype=torch.float32``,
    which rounds a float64 model to 5e-8 and makes its second derivatives asymmetric.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if not self.paused and isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                return first
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            elif func is torch.Tensor.to:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def with_pauses(self, model: nn.Module) -> Iterator[None]:
        """Leave position tables alone: they are constants, and the model's to round."""

        def pause(*_: Any) -> None:
            self.paused += 1

        def resume(*_: Any) -> None:
            self.paused -= 1

        handles = []
        for module in model.modules():
            if "Rotary" in type(module).__name__:
                handles.append(module.register_forward_pre_hook(pause))
                handles.append(module.register_forward_hook(resume, always_call=True))
        try:
            _staying.append(self)
            with self:
                yield
        finally:
            _staying.pop()
            for handle in handles:
                handle.remove()


_staying: list[_StayDouble] = []  # the modes of the scopes that are open, innermost last


def same_precision() -> contextlib.AbstractContextManager[Any]:
    """The open scope's precision inside a backward pass, where autograd suspends its mode."""
    return _staying[-1] if _staying else contextlib.nullcontext()


@contextlib.contextmanager
def evaluation(model: nn.Module, *, stay_double: bool) -> Iterator[None]:
    """Everything a twice-differentiable forward needs, restored on the way out.

    Evaluation mode; math attention (fused kernels have no double backward); no encoder fast path;
    no autocast; no key/value cache; gradients enabled even under ``no_grad``; experts one by one in
    float64, which the grouped kernel does not take; weight normalisation written out.
    """
    training = [module for module in model.modules() if module.training]
    config: Any = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    experts = getattr(config, "_experts_implementation", None)
    grouped = experts == "grouped_mm" and any(p.dtype == torch.float64 for p in model.parameters())
    fast_path = torch.backends.mha.get_fastpath_enabled()
    device = next((p.device.type for p in model.parameters()), "cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.autocast(device_type=device, enabled=False))
        stack.enter_context(exact_weight_norm(model))
        if stay_double:
            stack.enter_context(_StayDouble().with_pauses(model))
        try:
            for module in training:
                module.training = False
            if cached:
                config.use_cache = False
            if grouped:
                config._experts_implementation = "eager"
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            for module in training:
                module.training = True
            if cached:
                config.use_cache = cached
            if grouped:
                config._experts_implementation = experts
            torch.backends.mha.set_fastpath_enabled(fast_path)


def call(model: nn.Module, values: Mapping[str, Tensor], inputs: Any) -> Any:
    """The model's output with its parameters replaced by ``values``."""
    # Keyword tensors such as float images follow the parameters' dtype only if the user says so.
    with _without_sharding_hooks(model):
        if isinstance(inputs, Mapping) and not _is_one_argument(model, inputs):
            return torch.func.functional_call(model, dict(values), (), dict(inputs))
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        return torch.func.functional_call(model, dict(values), arguments)


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


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn PyTorch's messages about missing second derivatives into what to do."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        first = text.strip().splitlines()[0] if text.strip() else repr(error)
        if any(mark in text for mark in _NO_SECOND_DERIVATIVE):
            raise DifferentiationError(
                f"an operation of the model has no second derivative ({first}): use eager or sdpa "
                "attention (attn_implementation='eager' for Hugging Face), not flash or flex."
            ) from error
        if "use_reentrant" in text or "Checkpointing is not compatible" in text:
            raise DifferentiationError(
                "reentrant activation checkpointing cannot be differentiated twice: use "
                "torch.utils.checkpoint(..., use_reentrant=False) or switch checkpointing off."
            ) from error
        raise


def fresh_leaf(parameter: Tensor) -> Tensor:
    """A leaf of the autograd graph that shares the parameter's memory."""
    value = parameter.detach()
    if value.is_inference():
        value = value.clone()
    return value.requires_grad_(True)
