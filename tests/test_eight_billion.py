"""The hand-written passes at the sizes of an 8 B model on CUDA: shapes and devices, no numbers.

``FakeTensorMode`` computes shapes, dtypes and devices of every call and nothing else, on a machine
without the memory and without the device. Comparisons of values cannot be made there (whether a
token is constant, whether a query has a key): they are answered "nothing is wrong". What compares
values throughout, reading a model and holding its passes to double backward, cannot be run so.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from curvatlas.engines.tangent.block import LinearisedBlock
from curvatlas.engines.tangent.linear import Buffers
from curvatlas.layers.checks import weight_shapes
from curvatlas.layers.structure import BlockSpec

LLAMA_3_8B = BlockSpec(
    d_model=4096,
    n_heads=32,
    n_kv_heads=8,
    d_ff=14336,
    activation="silu",
    gated=True,
    norm="rms",
    norm_first=True,
    causal=True,
    rope_base=500_000.0,
)
LAYERS, TOKENS = 32, 2048
_WEIGHTS = "query key value output gate up down norm1 norm2"  # none of them has a bias


class _NothingIsWrong(TorchDispatchMode):
    """Answers every question for a value with no."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            self.questions += 1
            return False
        return func(*args, **(kwargs or {}))


class _Indexing(TorchFunctionMode):
    """Indexing and other methods by operations: below them PyTorch without CUDA asks for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.__setitem__:
            return self.__torch_function__(Tensor.copy_, types, (_indexed(*args[:2]), args[2]))
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "not linked with support" not in str(error):
                raise
        name = {"__invert__": "bitwise_not"}.get(func.__name__, func.__name__)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.aten, name)(*args, **(kwargs or {}))


def _indexed(tensor: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in keys:
        place = keys.index(Ellipsis)
        missing = tensor.ndim - sum(k is not None and k is not Ellipsis for k in keys)
        keys[place : place + 1] = [slice(None)] * missing
    axis = 0
    for k in keys:
        if isinstance(k, int):
            tensor = tensor.select(axis, k)
            continue
        if k is None:
            tensor = tensor.unsqueeze(axis)
        else:
            step = 1 if k.step is None else k.step
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, k.start, k.stop, step)
        axis += 1
    return tensor


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_product_goes_through_the_blocks_of_llama_3_8b_on_cuda() -> None:
    every = weight_shapes(LLAMA_3_8B)
    shapes = {f"{name}_weight": every[f"{name}_weight"] for name in _WEIGHTS.split()}
    # With the embedding and the head, 128,256 × 4,096 each, and the last norm: 8.03 B.
    assert LAYERS * sum(map(math.prod, shapes.values())) == 6_979_584_000
    with FakeTensorMode(), _NothingIsWrong() as guards, _Indexing():
        device = torch.device("cuda", 0)
        x = torch.empty(1, TOKENS, LLAMA_3_8B.d_model, device=device)
        x_dot, space = torch.empty(1, *x.shape, device=device), Buffers(keep=True)
        weights = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}
        dots = {name: torch.empty(1, *shape, device=device) for name, shape in shapes.items()}
        blocks, states = [], []
        for turn in range(2):  # every block is like these two: they take turns in the workspace
            block = LinearisedBlock(LLAMA_3_8B, weights, x, space=space, turn=turn)
            x = block.give_output()
            blocks.append(block)
        linearising = guards.questions
        for block in blocks:
            states.append(block.push(dots, x_dot))
            x_dot = states[-1].output
        assert x_dot.shape == (1, 1, TOKENS, 4096)
        delta, rate = x, x_dot
        for block, state in zip(reversed(blocks), reversed(states), strict=True):
            _, delta = block.gradient(delta, wanted=[])
            rates, back = block.pull(rate, state)
            assert back is not None
            rate = back.view(1, *x.shape)
            assert {name: rate.shape[1:] for name, rate in rates.items()} == {
                name: torch.Size(shape) for name, shape in shapes.items()
            }
            assert all(t.device == device and t.dtype == x.dtype for t in (*rates.values(), back))
        assert rate.shape == (1, 1, TOKENS, 4096)
        assert guards.questions == linearising  # a product itself asks nothing
