"""Products run again from a tape are those that the code computes; they allocate only results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import curvatlas as ca
from curvatlas.engines.tangent.linear import Buffers
from curvatlas.engines.tangent.tape import Tape, Tapes, UnrecordableError
from curvatlas.zoo.models import GPT, GPTConfig, ViT, ViTConfig


def _gpt(**options: Any) -> ca.Problem:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=17, context=8, d_model=12, n_heads=2, n_layers=2, **options)
    tokens = torch.randint(0, 17, (3, 9))
    model = GPT(config).double().eval()
    return ca.Problem(model, "cross_entropy", (tokens[:, :-1], tokens[:, 1:]))


def _vit() -> ca.Problem:
    torch.manual_seed(0)
    model = ViT(ViTConfig(d_ff=8, n_layers=2)).double().eval()
    images = torch.rand(4, 8, 8, dtype=torch.float64)
    return ca.Problem(model, "cross_entropy", (images, torch.randint(0, 10, (4,))))


PROBLEMS = {
    "pre-norm": _gpt,
    "post-norm": lambda: _gpt(norm_first=False),
    "rotary, RMS, gated, grouped": lambda: _gpt(
        positions="rope", norm="rms", activation="swiglu", n_kv_heads=1
    ),
    "pooled": _vit,
}


@pytest.mark.parametrize("operator", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian])
@pytest.mark.parametrize("name", PROBLEMS)
def test_later_products_are_those_of_the_first(name: str, operator: Any) -> None:
    problem = PROBLEMS[name]()
    op, exact = operator(problem, engine="tangent"), operator(problem, engine="autograd")
    for count in (1, 3, 1):
        columns = torch.randn(6, problem.size, count, dtype=torch.float64)
        wanted = (exact @ torch.cat(list(columns), 1)).split(count, 1)
        for v, want in zip(columns, wanted, strict=True):
            assert torch.linalg.norm(op @ v - want) <= 1e-11 * torch.linalg.norm(want)
    one = torch.randn(problem.size + 5, dtype=torch.float64)
    assert torch.equal(op @ one[3:-2], op @ one[3:-2].clone())


def test_a_product_with_the_weights_themselves_is_not_mistaken_for_them() -> None:
    problem = _gpt()
    flat = torch.cat([p.detach().reshape(-1) for p in problem.model.parameters()])
    offset = 0
    for parameter in problem.model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    op, exact = ca.Hessian(problem, engine="tangent"), ca.Hessian(problem, engine="autograd")
    for _ in range(4):
        op @ flat
    v = torch.randn_like(flat)
    want = exact @ v
    assert torch.linalg.norm(op @ v - want) <= 1e-11 * torch.linalg.norm(want)


class _Allocations(TorchDispatchMode):
    """Bytes of every result that is no view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(t) for t in _tensors([args, kwargs or {}])}
        fresh = {_memory(t): t for t in _tensors(result) if _memory(t) not in given}
        self.bytes += sum(t.untyped_storage().nbytes() for t in fresh.values())
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for v in items for t in _tensors(v)] if isinstance(value, (dict, list, tuple)) else []


@pytest.mark.parametrize("part", ["total", "outer", "functional"])
def test_a_later_product_allocates_nothing_but_its_result(part: str) -> None:
    problem = _gpt()
    op = {"total": ca.Hessian, "outer": ca.GaussNewton, "functional": ca.FunctionalHessian}[part](
        problem, engine="tangent"
    )
    v = torch.randn(problem.size, dtype=torch.float64)
    for _ in range(4):
        op @ v
    for _ in range(2):
        with _Allocations() as allocations:
            op @ v
        # a few bytes tell whether the weights have changed since
        assert allocations.bytes <= v.numel() * v.element_size() + 256


def test_fewer_columns_after_more_need_no_more_memory() -> None:
    space = Buffers(keep=True)
    like = torch.zeros(1)
    space.take("a", 4, 10, like=like)
    held, generation = space.bytes, space.generation
    space.take("a", 2, 10, like=like)
    assert (space.bytes, space.generation) == (held, generation)


def test_tapes_are_dropped_where_memory_is_replaced() -> None:
    space = Buffers(keep=True)

    def twice(rows: Tensor, out: Tensor) -> None:
        torch.add(rows, rows, out=space.take("sum", *rows.shape, like=rows))
        out.copy_(space.take("sum", *rows.shape, like=rows))

    tapes = Tapes(space)
    for count in (1, 1, 1, 1, 5, 5, 5, 5, 1, 1, 1, 1):
        rows = torch.randn(count, 7)
        out = torch.empty_like(rows)
        tapes.run("twice", twice, rows, out)
        assert torch.equal(out, 2 * rows)


def test_what_a_tape_cannot_repeat_runs_as_it_is() -> None:
    def largest(rows: Tensor, out: Tensor) -> None:
        values, _ = rows.max(1, keepdim=True)  # allocates two results
        out.copy_(values.expand_as(out))

    rows = torch.randn(2, 4)
    with pytest.raises(UnrecordableError):
        Tape(largest, rows, torch.empty_like(rows))
    tapes = Tapes(Buffers(keep=True))
    for _ in range(4):
        rows, out = torch.randn(2, 4), torch.empty(2, 4)
        tapes.run("largest", largest, rows, out)
        assert torch.equal(out, rows.amax(1, keepdim=True).expand(2, 4))


def test_calls_that_allocate_are_repeated_into_their_place() -> None:
    def mixed(rows: Tensor, out: Tensor) -> None:
        joined = torch.cat([rows[:, 2:], rows[:, :2]], 1)
        raised = joined.exp()  # no placed form: copied
        out.copy_(raised * 2.0 + joined.sum(1, keepdim=True))

    first, out = torch.randn(2, 5), torch.empty(2, 5)
    tape = Tape(mixed, first.clone(), out)
    second = torch.randn(2, 5)
    tape.play(second, out)
    want = torch.empty(2, 5)
    mixed(second, want)
    assert torch.equal(out, want)
