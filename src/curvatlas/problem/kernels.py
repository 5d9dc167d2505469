"""The operations of a forward pass in a form that can be differentiated twice.

Models choose how they compute inside their own forward pass: a fused attention kernel, compiled
code, low precision, activation checkpoints. What is set around the call is then overridden, and the
second derivative is missing, or wrong without a word. Here the calls themselves are intercepted:
the same mathematics, by operations whose double backward is right.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from curvatlas.errors import DifferentiationError

Operation = Callable[..., Any]
P = ParamSpec("P")
T = TypeVar("T")


class TwiceDifferentiable(TorchFunctionMode):
    """Inside, operations are replaced by ones that can be differentiated twice.

    Attention by plain matrix products, whatever kernel the module asks for; weight normalisation
    written out; no autocast, even where the module opens it itself. With ``keep`` no tensor of that
    dtype is rounded to a narrower one on the way: some libraries compute norms and softmax by
    ``x.to(torch.float32)`` or ``dtype=torch.float32``, which rounds a float64 model to 5e-8 and
    makes its second derivatives asymmetric; and models made for half precision round to it.
    """

    def __init__(self, model: nn.Module, *, keep: torch.dtype | None, device: str) -> None:
        super().__init__()
        self._model = weakref.ref(model)
        self._keep, self._device = keep, device
        self._pauses = 0
        self._replaced = _replacements()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:  # half of all calls in the first product of a GPT
            return func(*args, **(kwargs or {}))
        operation = self._replaced.get(func, func)
        kwargs = kwargs or {}
        rounds = func in _MAY_ROUND or "dtype" in kwargs
        if rounds and self._keep is not None and not self._pauses:
            operation, args, kwargs = _unrounded(operation, args, kwargs, self._keep)
        if torch.is_autocast_enabled(self._device):
            warn_once(
                self._model(),
                "autocast",
                "the model opens torch.autocast in its forward pass: curvature is that of the "
                "model without it, in the precision of its parameters.",
            )
            with torch.autocast(self._device, enabled=False):
                return operation(*args, **kwargs)
        if self._keep is None:
            return operation(*args, **kwargs)
        try:
            return operation(*args, **kwargs)
        except RuntimeError:
            if not _mixes(args, kwargs, self._keep):
                raise
            args, kwargs = _promoted(func, args, kwargs, self._keep)
            return operation(*args, **kwargs)

    @contextlib.contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        """Active, except that position tables are rounded as the model does: they are constants."""

        def pause(*_: Any) -> None:
            self._pauses += 1

        def resume(*_: Any) -> None:
            self._pauses -= 1

        handles = []
        if self._keep is not None:
            for module in model.modules():
                if "Rotary" in type(module).__name__:
                    handles.append(module.register_forward_pre_hook(pause))
                    handles.append(module.register_forward_hook(resume, always_call=True))
        try:
            _active.append(self)
            with self:
                yield
        finally:
            _active.pop()
            for handle in handles:
                handle.remove()


_active: list[TwiceDifferentiable] = []  # the modes of the scopes that are open, innermost last


def same_operations() -> contextlib.AbstractContextManager[Any]:
    """The open scope's operations inside a backward pass, where autograd suspends its mode."""
    return _active[-1] if _active else contextlib.nullcontext()


_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)  # while recording


def unwatched(function: Callable[P, T]) -> Callable[P, T]:
    """A function of ours that calls no model, for which the open scope's mode has nothing to do.

    The mode is asked before every call of torch, reading a shape included: 11,800 times in the
    first product of a GPT of two blocks, and a quarter of its time.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
            return function(*args, **kwargs)

    return called


_HALF = frozenset((torch.bfloat16, torch.float16))
_NARROWER = {torch.float64: _HALF | {torch.float32}, torch.float32: _HALF}
_ROUNDS = {  # methods that round, by the dtype they round to
    torch.Tensor.float: torch.float32,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
}
_CASTS = (torch.Tensor.to, torch.Tensor.type)
_MAY_ROUND = frozenset((*_ROUNDS, *_CASTS))
# What only looks at a tensor: neither autocast nor a narrower dtype can change it.
_READS = frozenset(
    (
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn",
                "_version", "layout", "is_sparse", "is_meta", "itemsize",
            )
        ),
        torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride,
        torch.Tensor.is_floating_point, torch.Tensor.element_size, torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage, torch.Tensor.is_contiguous, torch.Tensor.storage_offset,
    )
)  # fmt: skip


def _unrounded(
    operation: Operation, args: Any, kwargs: dict[str, Any], keep: torch.dtype
) -> tuple[Operation, Any, dict[str, Any]]:
    """A call that would round a tensor of dtype ``keep``, as one that does not."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and first.dtype == keep:
        narrower = _NARROWER[keep]
        if _ROUNDS.get(operation) in narrower:
            return torch.Tensor.to, (first, keep), kwargs
        if kwargs.get("dtype") in narrower:
            return operation, args, {**kwargs, "dtype": keep}
        if operation in _CASTS:
            rounds = [isinstance(a, torch.dtype) and a in narrower for a in args]
            args = tuple(keep if r else a for a, r in zip(args, rounds, strict=True))
    return operation, args, kwargs


def _mixes(args: Any, kwargs: dict[str, Any], keep: torch.dtype) -> bool:
    """Whether tensors of dtype ``keep`` meet narrower ones in a call."""
    leaves = tree_flatten((args, kwargs))[0]
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)}
    return keep in dtypes and not dtypes.isdisjoint(_NARROWER[keep])


def _promoted(
    operation: Operation, args: Any, kwargs: dict[str, Any], keep: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """The arguments of an operation that mixes no dtypes, in one dtype.

    What was not rounded on the way meets constants that the model makes in a narrower dtype: a
    mask, a table of zeros to be filled. They become wider, also the one that is written into; where
    that is seen elsewhere too, what is written is rounded, as the model does.
    """
    name, dtype = getattr(operation, "__name__", ""), keep
    into = args[0] if name == "__setitem__" or (name.endswith("_") and name[-2:] != "__") else None
    if isinstance(into, Tensor) and into.dtype in _NARROWER[keep]:
        if _seen_elsewhere(into):
            dtype = into.dtype
        else:
            into.data = into.detach().to(keep)

    def convert(leaf: Any) -> Any:
        if leaf is into or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.to(dtype)

    converted: tuple[Any, dict[str, Any]] = tree_map(convert, (tuple(args), kwargs))
    return converted


def _seen_elsewhere(tensor: Tensor) -> bool:
    """Whether other tensors share its memory, or a graph has it."""
    if tensor.requires_grad or tensor._base is not None or isinstance(tensor, nn.Parameter):
        return True
    storage = tensor.untyped_storage()
    users = getattr(torch._C, "_storage_Use_Count", lambda _: 3)(storage._cdata)
    return int(users) > 2  # the tensor, and ``storage``


# --- operations ---------------------------------------------------------------------------------


@functools.cache
def _replacements() -> dict[Any, Operation]:
    """Operation → the same one, twice differentiable."""
    attention = torch.ops.aten.scaled_dot_product_attention
    replaced: dict[Any, Operation] = {
        torch._weight_norm: weight_norm,
        torch.nn.functional.hardsigmoid: hard_sigmoid,
        torch.nn.functional.batch_norm: batch_norm,
        torch.nn.functional.instance_norm: instance_norm,
        torch.nn.functional.embedding: embedding,
    }
    fused_loss = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if fused_loss is not None:
        # In chunks, its gradient is made in the forward pass: the second derivative misses Λ.
        def in_one_piece(*args: Any, options: Any = None, **kwargs: Any) -> Any:
            return fused_loss(*args, **kwargs)

        replaced[fused_loss] = in_one_piece
    for func in (
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.functional.multi_head_attention_forward,  # calls the former out of our sight
        attention,
        attention.default,
    ):
        replaced[func] = _by_matrix_products(func)
    flex = _flex_attention_operation()
    if flex is not None:
        replaced[flex] = flex_attention
    return replaced


def _by_matrix_products(attention: Operation) -> Operation:
    """Attention as softmax(Q Kᵀ) V in separate operations: fused kernels have no double backward.

    Set around every call: modules such as those of x-transformers choose a kernel of their own.
    Where no derivative is taken and the logits would be large, torch may use its fused kernel.
    """

    def by_matrix_products(*args: Any, **kwargs: Any) -> Any:
        backends = [SDPBackend.MATH]
        if not torch.is_grad_enabled() and _logit_bytes(args) > _LARGE_LOGITS:
            backends.append(SDPBackend.FLASH_ATTENTION)
        with sdpa_kernel(backends):
            return attention(*args, **kwargs)

    return by_matrix_products


_LARGE_LOGITS = 2**27  # bytes


def _logit_bytes(args: Sequence[Any]) -> int:
    """Of the matrices of queries by keys, where the first two arguments are these."""
    if len(args) < 2 or not all(isinstance(t, Tensor) and t.ndim == 4 for t in args[:2]):
        return 0
    query, key = args[:2]
    return int(math.prod(query.shape[:3]) * key.shape[2] * query.element_size())


@functools.cache
def _flex_attention_operation() -> Any:
    """The operation behind ``torch.nn.attention.flex_attention``, or None before torch 2.5."""
    try:
        importlib.import_module("torch.nn.attention.flex_attention")
        operations = importlib.import_module("torch._higher_order_ops.flex_attention")
    except ImportError:
        return None
    return getattr(operations, "flex_attention", None)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Operation,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: Any,
    score_buffers: Sequence[Tensor] = (),
    mask_buffers: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """softmax(score(Q Kᵀ scale), over the keys that the mask lets through) V.

    query: (B, H, L, d);  key, value: (B or 1, H / groups, S, d)  →  the result (B, H, L, d) with
    log₂ Σ exp and, in later versions, the largest score of every row, as torch's operation gives.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * scale
    places = [torch.arange(size, device=scores.device) for size in scores.shape]
    with _IndexedByTensors():
        seen = _at_every_place(block_mask[-1], 0, len(mask_buffers))(*places, *mask_buffers)
        scores = _at_every_place(score_mod, 1, len(score_buffers))(scores, *places, *score_buffers)
    scores = scores.masked_fill(~seen, -math.inf)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    bits = scores.masked_fill(empty, 0.0).logsumexp(-1) / math.log(2)
    results = [weights @ value, bits.masked_fill(empty.squeeze(-1), -math.inf)]
    if hasattr(sys.modules["torch.nn.attention.flex_attention"], "AuxRequest"):
        results.append(scores.amax(-1) / math.log(2))
    return tuple(results)


def _at_every_place(function: Operation, tensors: int, buffers: int) -> Operation:
    """A function of numbers (values, b, h, i, j, buffers) on whole (B, H, L, S) tensors."""
    for axis in (3, 2, 1, 0):
        places = [0 if place == axis else None for place in range(4)]
        function = torch.vmap(function, in_dims=(*[0] * tensors, *places, *[None] * buffers))
    return function


class _IndexedByTensors(TorchFunctionMode):
    """Inside, ``table[i, j]`` with tensors for numbers is a lookup, also where they are mapped."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            indices = list(index) if isinstance(index, (tuple, list)) else [index]
            if all(isinstance(i, Tensor) or type(i) is int for i in indices):
                on_device = [torch.as_tensor(i, device=table.device) for i in indices]
                return torch.ops.aten.index(table, on_device)
        return func(*args, **(kwargs or {}))


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ‖v‖, the norm over all axes but ``dim`` (-1: over all).

    PyTorch's fused ``torch._weight_norm`` has a wrong second derivative and says nothing (its error
    is watched by a test).
    """
    axes = [axis for axis in range(v.ndim) if dim == -1 or axis != dim % v.ndim]
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The rows of a table, with their gradient as it is.

    Divided by how often a row occurs it is not the loss's, and its double backward is wrong; a
    sparse one has entries only where training looks for them.
    """
    if padding_idx is not None and _padding_rows and weight.is_leaf:
        _padding_rows[-1][id(weight)] = padding_idx
        padding_idx = None
    return torch.nn.functional.embedding(input, weight, padding_idx, max_norm, norm_type)


_padding_rows: list[dict[int, int]] = []  # by table, in the scopes that are open


@contextlib.contextmanager
def following_padding() -> Iterator[dict[int, int]]:
    """Inside, tables give the row of ``padding_idx`` its gradient too, which they hold fixed.

    Gives these rows by the identity of the table, as they are met.
    """
    _padding_rows.append({})
    try:
        yield _padding_rows[-1]
    finally:
        _padding_rows.pop()


def hard_sigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """x / 6 + ½ between −3 and 3, constant outside: PyTorch's has no second derivative."""
    inside = (x > -3) & (x < 3)
    value = torch.where(inside, x / 6 + 0.5, (x >= 3).to(x.dtype))
    return x.copy_(value) if inplace else value


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """γ (x − μ) / √(σ² + ε) + β by channel, over the batch's own μ and σ² if ``training``.

    PyTorch's own backward is wrong by as much as the gradient itself for one sample whose upstream
    gradient lies channels last in memory, as einsum makes them (watched by a test).
    """
    if training and running_mean is not None:  # which is updated on the way
        usual = torch.nn.functional.batch_norm
        return usual(x, running_mean, running_var, weight, bias, True, momentum, eps)
    axes = None if not training else [axis for axis in range(x.ndim) if axis != 1]
    return _normalised(x, axes, running_mean, running_var, weight, bias, eps)


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``batch_norm`` of every sample by itself, which PyTorch computes by the same kernel."""
    if use_input_stats and running_mean is not None:
        usual = torch.nn.functional.instance_norm
        return usual(x, running_mean, running_var, weight, bias, True, momentum, eps)
    axes = list(range(2, x.ndim)) if use_input_stats else None
    return _normalised(x, axes, running_mean, running_var, weight, bias, eps)


def _normalised(
    x: Tensor,
    axes: list[int] | None,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """By the mean and variance over ``axes``, or by those that are given for each channel."""

    def by_channel(values: Tensor) -> Tensor:
        return values.to(x.dtype).view(1, -1, *[1] * (x.ndim - 2))

    if axes is not None:
        centred = x - x.mean(axes, keepdim=True)
        scale = (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    else:
        assert mean is not None
        assert variance is not None
        centred, scale = x - by_channel(mean), (by_channel(variance) + eps).rsqrt()
    if weight is not None:
        scale = scale * by_channel(weight)
    result = centred * scale
    return result if bias is None else result + by_channel(bias)


# --- what is around the operations --------------------------------------------------------------


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, ``torch.compile``d code runs as it was written: it has no double backward.

    Modules and functions alike, by the compiler's own switch; before torch 2.6, which has none,
    only modules.
    """
    set_stance: Any = getattr(torch.compiler, "set_stance", None)
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes seconds
        yield
    elif set_stance is not None:
        with set_stance("force_eager"):
            yield
    else:
        with _original_calls(model):
            yield


def _not_compiled(model: Any = None, **_: Any) -> Any:
    """``torch.compile`` as a call or a decorator that changes nothing."""
    return model if model is not None else _not_compiled


@contextlib.contextmanager
def _original_calls(model: nn.Module) -> Iterator[None]:
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in compiled_modules(model):
            fields = module.__dict__
            if fields.get("_compiled_call_impl") is not None:
                changed.append((fields, "_compiled_call_impl", fields["_compiled_call_impl"]))
                fields["_compiled_call_impl"] = None
            original = module._modules.get("_orig_mod")
            original = original or getattr(fields.get("forward"), _ORIGINAL, None)
            if original is not None:
                changed.append((fields, "forward", fields["forward"]))
                fields["forward"] = original
        yield
    finally:
        for fields, name, value in changed:
            fields[name] = value


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """The modules below ``model`` that ``torch.compile`` or ``module.compile()`` was called on."""
    return [
        module
        for module in model.modules()
        if module.__dict__.get("_compiled_call_impl") is not None
        or "_orig_mod" in module._modules
        or _compiled_forward(module)
    ]


_ORIGINAL = "_torchdynamo_orig_callable"  # where compiled functions keep what was compiled


def _compiled_forward(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made the module's ``forward``, or that of its class."""
    holders = (vars(holder) for holder in (module, *type(module).__mro__))
    forward = next((members["forward"] for members in holders if "forward" in members), None)
    return hasattr(forward, _ORIGINAL)


def warn_of_compiled(model: nn.Module) -> None:
    """Say once that compiled parts run uncompiled."""
    modules = set(compiled_modules(model))
    named = model.named_modules()
    names = [name or type(module).__name__ for name, module in named if module in modules]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warn_once(
            model,
            "compiled",
            f"torch.compile was called on {shown}: compiled graphs cannot be differentiated twice, "
            "so curvatlas runs them uncompiled; the model stays as it is.",
        )


_said: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def warn_once(model: nn.Module | None, subject: str, message: str, *, deeper: int = 0) -> None:
    """Warn of a subject once for every model; deeper: calls between the user's and ours."""
    if model is not None and subject not in _said.setdefault(model, set()):
        _said[model].add(subject)
        warnings.warn(message, stacklevel=4 + deeper)


class Replaced:
    """``owner.name`` does ``instead`` inside our scopes, in their own thread; elsewhere the usual.

    module: where the owner is, replaced only if loaded;  owner: a class in it, or "" for itself.
    """

    def __init__(self, module: str, owner: str, name: str, instead: Operation) -> None:
        self._place, self._name, self._instead = (module, owner), name, instead
        self._lock, self._thread, self._scopes = threading.Lock(), threading.local(), 0
        self._owner: Any = None  # while it is replaced
        self._own_attribute: Any = None  # what stood in the owner itself, None: inherited

    def __enter__(self) -> None:
        self._thread.scopes = getattr(self._thread, "scopes", 0) + 1
        with self._lock:
            self._scopes += 1
            if self._owner is None:
                self._replace()

    def _replace(self) -> None:
        module, owner = self._place
        place: Any = sys.modules.get(module)
        place = getattr(place, owner, None) if owner else place
        usual = getattr(place, self._name, None)
        if usual is None:  # not loaded, or a torch that has it elsewhere
            return

        def chosen(*args: Any, **kwargs: Any) -> Any:
            inside = getattr(self._thread, "scopes", 0) > 0
            return self._instead(*args, **kwargs) if inside else usual(*args, **kwargs)

        self._owner, self._own_attribute = place, vars(place).get(self._name)
        setattr(place, self._name, staticmethod(chosen) if owner else chosen)

    def __exit__(self, *_: object) -> None:
        self._thread.scopes -= 1
        with self._lock:
            self._scopes -= 1
            if self._scopes or self._owner is None:
                return
            if self._own_attribute is None:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._own_attribute)
            self._owner = None


def _called_directly(function: Operation, _preserve_random_state: bool, *args: Any) -> Any:
    return function(*args)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    yield


# Activation checkpoints of the model's own: the reentrant kind has no double backward, the other
# computes its block again in the backward pass, where no mode is active, and would find other
# kernels there. A graph that is kept for products holds the activations with or without them.
_CHECKPOINTS = (
    Replaced("torch.utils.checkpoint", "CheckpointFunction", "apply", _called_directly),
    Replaced(
        "torch.utils.checkpoint", "", "_checkpoint_without_reentrant_generator", _nothing_around
    ),
)
_COMPILE = Replaced("torch", "", "compile", _not_compiled)
# Flex attention refuses inputs that carry gradients where its own kernel has no backward pass, and
# warns that it runs uncompiled.
_FLEX = tuple(
    Replaced("torch.nn.attention.flex_attention", "", name, lambda *_, **__: None)
    for name in ("_validate_device", "_warn_once")
)


@contextlib.contextmanager
def plain_python(model: nn.Module) -> Iterator[None]:
    """Inside, the model's Python code runs as it stands: not compiled, not checkpointed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_uncompiled(model))
        for replaced in (*_CHECKPOINTS, _COMPILE, *_FLEX):
            stack.enter_context(replaced)
        yield


# --- which operation has no second derivative, from PyTorch's own messages ------------------------


_PLAIN = "compute it by plain PyTorch operations instead"
_ATTENTION = "use eager or sdpa attention (attn_implementation='eager' for Hugging Face)"
_RECURRENT = (
    "call curvatlas under `with torch.backends.cudnn.flags(enabled=False):`, which differentiates "
    "the layer by plain operations"
)

# Part of the operation's name → what people call it, and what to do instead.
OPERATIONS: dict[str, tuple[str, str]] = {
    "scaled_dot_product": ("a fused attention kernel", _ATTENTION),
    "flash_att": ("a fused attention kernel", _ATTENTION),
    "flex_attention": ("flex attention", _ATTENTION),
    "memory_efficient": ("a fused attention kernel", _ATTENTION),
    "ctc_loss": (
        "CTC loss",
        "FunctionalHessian, which needs its slope only, is available; for others write the loss as "
        "its forward recursion with torch.logsumexp",
    ),
    "multi_margin_loss": (
        "multi-margin loss",
        "write it as (margin - x[y] + x).clamp(min=0) ** p over the other classes",
    ),
    "multilabel_margin_loss": (
        "multi-label margin loss",
        "write it as (1 - x[y] + x).clamp(min=0) over pairs of classes",
    ),
    "cdist": (
        "torch.cdist",
        "write (x.unsqueeze(-2) - y.unsqueeze(-3)).norm(dim=-1), or pass "
        "compute_mode='use_mm_for_euclid_dist'",
    ),
    "pdist": ("torch.pdist", "write (x.unsqueeze(-2) - x.unsqueeze(-3)).norm(dim=-1)"),
    "embedding_bag": ("nn.EmbeddingBag", "use nn.Embedding and a sum or mean over the bag"),
    "segment_reduce": ("torch.segment_reduce", "use index_add or scatter_add"),
    "sparse_mm_reduce": ("a sparse product with a reduction", "use torch.sparse.mm"),
    "grid_sampler": ("grid_sample", "use a later PyTorch, or interpolate by indexing"),
    "cudnn_rnn": ("a recurrent layer of cuDNN", _RECURRENT),
    "miopen_rnn": ("a recurrent layer of MIOpen", _RECURRENT),
    "mkldnn_rnn": ("a recurrent layer of oneDNN", "use torch.backends.mkldnn.flags(enabled=False)"),
    "roi_align": ("torchvision's roi_align", "crop by grid_sample"),
    "deform_conv2d": ("torchvision's deform_conv2d", _PLAIN),
    "igamma": ("torch.igamma by its first argument", "hold that argument fixed"),
}

_MISSING = (
    r"derivative for '?(?P<name>[\w:.]+)[^']*'? is not implemented",
    r"Trying to backward through (?P<name>[\w:.]+) but no autograd formula",
    r"double backwards? (?:on|for) (?P<name>\w+) (?:is )?not (?:supported|implemented)",
    r"(?P<name>[\w:.]+) (?:doesn't|does not) support double backward",
    r"(?P<name>[\w:.]+) (?:is not|isn't) (?:twice )?differentiable",
)
_COMPILED = "aot_autograd does not currently support double backward"
_ONCE = "marked with @once_differentiable"
_REENTRANT = ("use_reentrant", "Checkpointing is not compatible")


def explanation(message: str) -> str | None:
    """What to say instead of PyTorch's message, or None where it is about something else."""
    if _COMPILED in message:
        return (
            "code compiled by torch.compile has no second derivative, and it ran compiled although "
            "curvatlas asks for eager code: pass the module or function before compiling."
        )
    if "modified by an inplace operation" in message:
        tensor = re.search(r"\[\S+ (\[[\d, ]*\])\], which is output \d+ of (\w+)", message)
        which = f" (of shape {tensor[1]}, by {tensor[2]})" if tensor else ""
        return (
            f"the forward pass changes a value in place{which} that its derivative needs: write "
            "x = x + y instead of x += y, or change a clone."
        )
    if any(mark in message for mark in _REENTRANT):
        return (
            "reentrant activation checkpointing cannot be differentiated twice: use "
            "torch.utils.checkpoint(..., use_reentrant=False) or switch checkpointing off."
        )
    if _ONCE in message:
        return (
            "an autograd.Function marked once_differentiable has no second derivative: "
            f"{_PLAIN}, or write its backward in them and remove the mark."
        )
    for pattern in _MISSING:
        match = re.search(pattern, message)
        if match:
            return missing(match["name"])
    return None


def missing(operation: str) -> str:
    """That ``operation``, by PyTorch's name, has no second derivative, and the way round."""
    if "::" not in operation and hasattr(torch.ops.aten, operation):
        operation = f"aten::{operation}"
    for part, (name, instead) in OPERATIONS.items():
        if part in operation:
            return f"{name} ({operation}) has no second derivative in PyTorch: {instead}."
    if ("::" in operation and not operation.startswith("aten::")) or operation.count(".") >= 2:
        return (
            f"the custom operator {operation} has no second derivative: register one with "
            f"torch.library.register_autograd for it and for its backward, or {_PLAIN}."
        )
    return f"the operation {operation} has no second derivative in PyTorch: {_PLAIN}."


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Errors in derivatives name the operation or the ``autograd.Function``, and the way round."""
    try:
        yield
    except Exception as error:
        if is_told(error):
            raise
        name = failing_function(error)
        instead = explanation(str(error)) if isinstance(error, RuntimeError) else None
        if name is not None and instead is None:
            told = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
            instead = (
                f"{name} of the model fails ({told}): curvature calls the model in evaluation mode "
                f"and differentiates its backward pass; mend it for that, or {_PLAIN}."
            )
        if instead is None:
            raise
        raise DifferentiationError(instead) from error


def is_told(error: BaseException) -> bool:
    """Whether an error is one of ours, which says what is wrong and where, or memory ran out."""
    ours = type(error).__module__.partition(".")[0] == "curvatlas"
    return ours or isinstance(error, MemoryError) or "not enough memory" in str(error)


def failing_function(error: BaseException) -> str | None:
    """The hand-written ``autograd.Function`` in whose forward or backward pass an error arose."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name != "apply" or frame.f_code.co_filename != _FUNCTIONS:
            continue
        held = frame.f_locals
        forward, backward = held.get("cls"), getattr(held.get("self"), "_forward_cls", None)
        kind = backward or forward
        if isinstance(kind, type) and not kind.__module__.startswith(("torch.", "curvatlas.")):
            pass_ = "forward" if backward is None else "backward"
            found = f"the {pass_} pass of the autograd.Function {kind.__qualname__}"
    return found


_FUNCTIONS = torch.autograd.function.__file__
