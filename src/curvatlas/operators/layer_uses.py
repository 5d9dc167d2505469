r"""Where a forward pass uses its parameters linearly: inputs, and the way back to the outputs.

A use is one call of a linear map, a convolution, a look-up or a gain with a varying parameter. It
has positions m (tokens, pixels, samples) with outputs y_m (out,) and

    linear       y_m = W a_m + b       a_m (in,) the input, or the patch under the kernel
    embedding    y_m = Wᵀ a_m          a_m (V,) the unit vector of the row that is read
    gain         y_m = γ ⊙ n_m + β     n_m (d,) the normalised input

so that a slope g_m at y_m gives Σ_m g_m a_mᵀ as the slope of W, Σ_m g_m that of b and β and
Σ_m g_m ⊙ n_m that of γ.

Calls are watched where they reach PyTorch (``F.linear``, ``F.conv2d``, ``F.embedding``, …), not by
module: a tied weight, a module that is called twice and a weight that is handed to ``F.linear`` by
hand are all seen, each call as a use of its own. What is not seen (a parameter that is reshaped
first, a custom kernel) is found by ``unexplained``: the slope of every parameter must be that of
its uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from curvatlas.engines.graphs import pull
from curvatlas.problem import Batch, Problem

Kind = Literal["linear", "embedding", "gain"]
Sizes = tuple[int, ...]  # of a kernel, its stride or dilation, an axis each


@dataclass(frozen=True)
class Use:
    """One call with a varying weight, a varying bias, or both (None: held fixed or not there)."""

    kind: Kind
    weight: str | None
    bias: str | None
    transposed: bool  # the weight is stored (in, out)
    edge: GradientEdge  # of y in the graph
    shape: torch.Size  # of y
    features: tuple[int, ...]  # axes of y, from its end, that make up one y_m
    read: Callable[[], Tensor]  # a_m (*grid, in), n_m (*grid, out) or indices (*grid)
    padding: int | None = None  # index of an embedding that learns nothing
    rows: tuple[int, int] | None = None  # y is only a part of W's rows: the first one, all of them

    @property
    def grid(self) -> tuple[int, ...]:
        """The axes of positions."""
        axes = {axis % len(self.shape) for axis in self.features}
        return tuple(size for axis, size in enumerate(self.shape) if axis not in axes)

    @property
    def width(self) -> int:
        """out, the length of one y_m (of all of W's rows where y is a part)."""
        if self.rows is not None:
            return self.rows[1]
        return torch.Size([self.shape[axis] for axis in self.features]).numel()

    def slopes(self, pulled: Tensor) -> Tensor:
        """(K, *y) → (K, *grid, out), zero where an embedding reads its padding index."""
        count = len(self.features)
        last = pulled.movedim(self.features, tuple(range(-count, 0))).flatten(-count)
        if self.padding is not None:
            last = last * (self.read() != self.padding).unsqueeze(-1)
        if self.rows is None:
            return last
        start, total = self.rows
        return F.pad(last, (start, total - start - last.shape[-1]))


@dataclass(frozen=True)
class _Place:
    """A parameter as it stands in a call: as it is, some of its rows, or its transpose."""

    name: str | None = None
    rows: tuple[int, int] | None = None
    flipped: bool = False


class UseRecorder(TorchFunctionMode):
    """Inside, the uses of ``leaves`` are written down in ``uses``."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.refusal: str | None = None
        self._names = {id(leaf): name for name, leaf in leaves.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # It is a Python function whose calls PyTorch hides from the mode that was asked.
            with self._watching_linear():
                return func(*args, **kwargs)
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        reader = _READERS.get(func)
        if reader is None or not any(map(self._is_of_a_leaf, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        call = reader(*args, **kwargs)
        result = func(*args, **kwargs)
        if call is None or not result.requires_grad:
            return result
        weight, bias = self._place(call.weight, call), self._place(call.bias, call)
        if weight.name is None and bias.name is None:
            return result
        if call.refusal is not None:
            self.refusal = call.refusal.format(name=weight.name or bias.name)
            return result
        together = weight.rows == bias.rows or None in (weight.name, bias.name)
        pairs = [(weight, bias)] if together else [(weight, _Place()), (_Place(), bias)]
        for held_weight, held_bias in pairs:
            self.uses.append(
                Use(
                    kind=call.kind,
                    weight=held_weight.name,
                    bias=held_bias.name,
                    transposed=call.transposed != held_weight.flipped,
                    edge=get_gradient_edge(result),
                    shape=result.shape,
                    features=call.features(result),
                    read=call.read,
                    padding=call.padding,
                    rows=held_bias.rows if held_weight.name is None else held_weight.rows,
                )
            )
        # A copy goes on: the result may be changed in place (ReLU), and its node must stay y's.
        return result.clone()

    def _is_of_a_leaf(self, argument: Any) -> bool:
        if not isinstance(argument, Tensor):
            return False
        return id(argument) in self._names or id(argument._base) in self._names

    def _place(self, tensor: Tensor | None, call: _Call) -> _Place:
        """Which parameter the tensor is, or is some rows or the transpose of."""
        if tensor is None or id(tensor) in self._names:
            return _Place(self._names.get(id(tensor)))
        base = tensor._base
        if base is None or id(base) not in self._names or call.kind != "linear":
            return _Place()
        name, same_start = self._names[id(base)], base.storage_offset() == tensor.storage_offset()
        if base.shape == tensor.shape[::-1] and base.stride() == tensor.stride()[::-1]:
            return _Place(name, flipped=True) if tensor.ndim == 2 and same_start else _Place()
        some_rows = base.shape[1:] == tensor.shape[1:] and base.stride() == tensor.stride()
        if not some_rows or not base.is_contiguous() or call.transposed:
            return _Place()
        start = (tensor.storage_offset() - base.storage_offset()) // base[0].numel()
        return _Place(name, rows=(start, base.shape[0]))

    @contextmanager
    def _watching_linear(self) -> Iterator[None]:
        functional: Any = F
        original = functional.linear

        def linear(*args: Any, **kwargs: Any) -> Any:
            return self._called(original, args, kwargs)

        functional.linear = linear
        try:
            yield
        finally:
            functional.linear = original


@dataclass(frozen=True)
class RecordedPass:
    """A forward pass with its uses; slopes are pulled back from the outputs to every y."""

    batch: Batch
    outputs: Tensor
    leaves: dict[str, Tensor]
    uses: tuple[Use, ...]

    def pulled(self, seeds: Tensor) -> list[Tensor]:
        """Jᵀ seed at the uses: (K, *outputs) → one (K, *grid, out) a use."""
        if not self.uses:
            return []
        pulled = pull([self.outputs], [use.edge for use in self.uses], [seeds])
        return [
            use.slopes(seeds.new_zeros(len(seeds), *use.shape) if slope is None else slope)
            for use, slope in zip(self.uses, pulled, strict=True)
        ]

    def unexplained(self) -> tuple[str, ...]:
        """Parameters that the outputs depend on and no use holds.

        A parameter with uses whose slope is not theirs (it is used in another way as well) is
        refused. One backward pass in a random direction.
        """
        generator = torch.Generator().manual_seed(0)
        seed = torch.randn(
            self.outputs.shape, generator=generator, dtype=torch.float64, device="cpu"
        )
        seeds = seed.to(self.outputs).unsqueeze(0)
        pulled = self.pulled(seeds)
        truth = pull([self.outputs], list(self.leaves.values()), [seeds])
        sums: dict[str, Tensor] = {}
        sizes: dict[str, float] = {}  # of the terms: what rounding is measured by
        for use, slopes in zip(self.uses, pulled, strict=True):
            for name, part, size in _parameter_slopes(use, slopes.squeeze(0), self.leaves):
                sums[name] = sums[name] + part if name in sums else part
                sizes[name] = sizes.get(name, 0.0) + size
        eps = torch.finfo(self.outputs.dtype).eps
        missing = []
        for (name, leaf), slope in zip(self.leaves.items(), truth, strict=True):
            slope = leaf.new_zeros(leaf.shape) if slope is None else slope.squeeze(0)
            if name not in sums:
                if bool((slope != 0).any()):
                    missing.append(name)
            elif not float((slope - sums[name]).norm()) <= 100 * eps * sizes[name]:
                raise ValueError(
                    f"{name} is used in other ways than as a linear layer, a convolution, an "
                    "embedding or a gain (its gradient is not that of these uses): hold it fixed "
                    "with Problem(parameters=...)."
                )
        return tuple(missing)


def record(problem: Problem, batch: Batch) -> RecordedPass:
    """The batch's forward pass with the uses of every varying parameter."""
    leaves = problem.leaves()
    with UseRecorder(leaves) as recorder:
        outputs = problem.outputs(batch, leaves)
    if recorder.refusal is not None:
        raise ValueError(recorder.refusal)
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model must put out one tensor here, got {type(outputs).__name__}.")
    return RecordedPass(batch, outputs, leaves, tuple(recorder.uses))


def _parameter_slopes(
    use: Use, slopes: Tensor, leaves: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, float]]:
    """(name, slope, size of its terms) of a use's parameters from g (*grid, out)."""
    g = slopes.reshape(-1, slopes.shape[-1])
    if use.bias is not None:
        yield use.bias, g.sum(0).view_as(leaves[use.bias]), float(g.norm(dim=1).sum())
    if use.weight is None:
        return
    if use.kind == "embedding":
        indices = use.read().reshape(-1)
        shape = leaves[use.weight].shape
        rows = g.new_zeros(shape.numel() // g.shape[-1], g.shape[-1]).index_add_(0, indices, g)
        yield use.weight, rows.reshape(shape), float(g.norm(dim=1).sum())
        return
    a = use.read()
    a = a.reshape(-1, a.shape[-1])
    if use.kind == "gain":
        part, size = (g * a).sum(0), float((g * a).norm(dim=1).sum())
    else:
        part = a.T @ g if use.transposed else g.T @ a
        size = float((g.norm(dim=1) * a.norm(dim=1)).sum())
    yield use.weight, part.reshape(leaves[use.weight].shape), size


# --- the calls that are understood ---------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    kind: Kind
    weight: Tensor | None
    bias: Tensor | None
    read: Callable[[], Tensor]
    features: Callable[[Tensor], tuple[int, ...]] = lambda result: (-1,)
    transposed: bool = False
    padding: int | None = None
    refusal: str | None = None


def _fixed(tensor: Tensor) -> Callable[[], Tensor]:
    kept = tensor.detach()
    return lambda: kept


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Call:
    return _Call("linear", weight, bias, _fixed(input))


def _matmul(input: Any, mat2: Any = None, *, other: Any = None) -> _Call | None:
    weight = mat2 if other is None else other
    if not isinstance(weight, Tensor) or weight.ndim != 2 or input.ndim < 2:
        return None
    return _Call("linear", weight, None, _fixed(input), transposed=True)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> _Call | None:
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return None
    return _Call("linear", mat2, input, _fixed(mat1), transposed=True)


def _convolution(axes: int) -> Callable[..., _Call]:
    def read_call(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Call:
        def several(value: Any) -> Sizes:
            sizes = (value,) if isinstance(value, int) else tuple(value)
            return sizes * axes if len(sizes) == 1 else sizes

        refusal = None
        if groups != 1:
            refusal = (
                f"{{name}} belongs to a convolution with groups={groups}: its patches do not share "
                "one Kronecker product; hold it fixed with Problem(parameters=...)."
            )
        kernel, steps, spread = tuple(weight.shape[2:]), several(stride), several(dilation)
        image = input.detach()

        def read() -> Tensor:
            return _patches(image, kernel, steps, padding, spread)

        return _Call(
            "linear", weight, bias, read, features=lambda result: (-1 - axes,), refusal=refusal
        )

    return read_call


def _patches(image: Tensor, kernel: Sizes, stride: Sizes, padding: Any, dilation: Sizes) -> Tensor:
    """([B,] C, *pixels) → ([B,] *pixels of the output, C·kernel), ordered like the weight."""
    axes = len(kernel)
    reach = [spread * (size - 1) for spread, size in zip(dilation, kernel, strict=True)]
    sides: list[int] = []  # of F.pad: last axis first
    for axis in reversed(range(axes)):
        if padding == "same":
            sides += [reach[axis] // 2, reach[axis] - reach[axis] // 2]
        elif padding == "valid":
            sides += [0, 0]
        else:
            sides += [padding if isinstance(padding, int) else padding[axis % len(padding)]] * 2
    padded = F.pad(image, sides)
    grid = [(padded.shape[a - axes] - reach[a] - 1) // stride[a] + 1 for a in range(axes)]
    if axes == 1:  # F.unfold takes images alone: a line is one of a single row
        padded = padded.unsqueeze(-2)
        kernel, stride, dilation = ((1, *sizes) for sizes in (kernel, stride, dilation))
    rows = F.unfold(padded, kernel, dilation=dilation, stride=stride).mT
    return rows.reshape(*rows.shape[:-2], *grid, rows.shape[-1])


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> _Call:
    if padding_idx is not None:
        padding_idx %= weight.shape[0]
    return _Call("embedding", weight, None, _fixed(input), transposed=True, padding=padding_idx)


def _rows_of(function: Callable[..., Tensor]) -> Callable[..., _Call | None]:
    """The reader of a function that picks or repeats a parameter's rows, such as ``table[:n]``."""

    def read_call(input: Any, *args: Any, **kwargs: Any) -> _Call | None:
        if not isinstance(input, Tensor) or input.ndim == 0:
            return None
        width = input.shape[-1]
        places = torch.arange(input.numel(), device=input.device).view(input.shape)
        taken = function(places, *args, **kwargs)
        within = torch.arange(width, device=input.device)
        if taken.ndim == 0 or taken.shape[-1] != width or bool((taken % width != within).any()):
            return None  # parts of rows
        return _Call("embedding", input, None, _fixed(taken[..., 0] // width), transposed=True)

    return read_call


def _einsum(equation: Any, *operands: Any) -> _Call | None:
    """``einsum("…h,hnd->…nd", x, W)``: contracted letters of W first, or last."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or equation.count("->") != 1:
        return None
    terms, out = equation.replace(" ", "").split("->")
    names = terms.split(",")
    if "." in equation or any(len(set(name)) != len(name) for name in (*names, out)):
        return None
    if _is_parameter(operands[0]):
        operands, names = operands[::-1], names[::-1]
    (rest, weight), (other, own) = operands, names
    if not _is_parameter(weight) or _is_parameter(rest):
        return None
    contracted = "".join(letter for letter in own if letter in other and letter not in out)
    free = "".join(letter for letter in own if letter in out and letter not in other)
    positions = "".join(letter for letter in out if letter in other)
    matrix = bool(contracted and free) and own in (contracted + free, free + contracted)
    if not matrix or set(other) != {*contracted, *positions}:
        return None
    order = [other.index(letter) for letter in positions + contracted]
    rows = rest.detach().permute(order).flatten(len(positions))
    features = tuple(out.index(letter) - len(out) for letter in free)
    turned = own == contracted + free
    return _Call("linear", weight, None, _fixed(rows), lambda result: features, transposed=turned)


def _normalised(function: Callable[..., Tensor]) -> Callable[..., _Call]:
    """The reader of a norm: n is the same call without gain and shift."""
    signature = inspect.signature(function)

    def read_call(*args: Any, **kwargs: Any) -> _Call:
        bound = signature.bind(*args, **kwargs)
        weight, bias = bound.arguments.get("weight"), bound.arguments.get("bias")
        bound.arguments["weight"] = None
        if "bias" in signature.parameters:
            bound.arguments["bias"] = None
        shape = bound.arguments.get("normalized_shape")
        bound.arguments["input"] = bound.arguments["input"].detach()

        def features(result: Tensor) -> tuple[int, ...]:
            if shape is None:
                return (1 - result.ndim,)  # channels
            return tuple(range(-len(tuple(shape)), 0))

        def read() -> Tensor:
            with torch.no_grad():
                values = function(*bound.args, **bound.kwargs)
            axes = features(values)
            return values.movedim(axes, tuple(range(-len(axes), 0))).flatten(-len(axes))

        return _Call("gain", weight, bias, read, features=features)

    return read_call


def _multiplied(input: Any, other: Any) -> _Call | None:
    gain, rest = _vector_and_rest(input, other)
    return None if gain is None else _Call("gain", gain, None, _fixed(rest))


def _added(input: Any, other: Any, *, alpha: float = 1) -> _Call | None:
    """x + b; x + table, with a row for each position; table + number."""
    shift, rest = _vector_and_rest(input, other)
    if alpha != 1:
        return None
    if shift is not None:
        return _Call("linear", None, shift, _fixed(rest))
    for table, rest in ((input, other), (other, input)):
        if _is_parameter(table) and isinstance(rest, (int, float)) and table.ndim > 0:
            rest = table.detach()  # 1 + γ: every row once
        if not _is_parameter(table) or not isinstance(rest, Tensor) or _is_parameter(rest):
            continue
        last = zip(reversed(table.shape), reversed(rest.shape), strict=False)
        repeated = 0 < table.ndim <= rest.ndim and all(a in (1, b) for a, b in last)
        if repeated and table.shape[-1] == rest.shape[-1]:
            rows = torch.arange(table.numel() // table.shape[-1], device=table.device)
            indices = rows.view(table.shape[:-1]).expand(rest.shape[:-1])
            return _Call("embedding", table, None, _fixed(indices), transposed=True)
    return None


def _is_parameter(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_leaf and tensor.requires_grad


def _vector_and_rest(input: Any, other: Any) -> tuple[Tensor | None, Any]:
    """A parameter (d,) and the tensor (…, d) it meets, in either order."""
    for vector, rest in ((input, other), (other, input)):
        if not _is_parameter(vector) or not isinstance(rest, Tensor) or _is_parameter(rest):
            continue
        if vector.ndim == 1 and rest.ndim >= 1 and rest.shape[-1] == vector.shape[0]:
            return vector, rest
    return None, None


_READERS: dict[Any, Callable[..., _Call | None]] = {
    F.linear: _linear,
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    F.embedding: _embedding,
    F.layer_norm: _normalised(F.layer_norm),
    F.rms_norm: _normalised(F.rms_norm),
    F.group_norm: _normalised(F.group_norm),
    F.batch_norm: _normalised(F.batch_norm),
    F.instance_norm: _normalised(F.instance_norm),
    torch.addmm: _addmm,
    torch.einsum: _einsum,
    torch.mm: _matmul,
    torch.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.matmul: _matmul,
    torch.mul: _multiplied,
    Tensor.mul: _multiplied,
    torch.add: _added,
    Tensor.add: _added,
    Tensor.__getitem__: _rows_of(Tensor.__getitem__),
    Tensor.expand: _rows_of(Tensor.expand),
    Tensor.repeat: _rows_of(Tensor.repeat),
}
