"""Bad input: each kind provoked, each message naming the cause and the fix."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
import families
from curvatlas.errors import DifferentiationError, NonFiniteError, ProblemError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3), torch.randint(0, 2, (6,))


def use(model: nn.Module, loss: Any, batches: Any, **options: Any) -> Tensor:
    problem = ca.Problem(model, loss, batches, **options)
    result: Tensor = ca.Hessian(problem) @ torch.randn(problem.size, dtype=problem.dtype)
    return result


def test_nan_weights_are_named() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"2\.weight"):
        use(model, "cross_entropy", data())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_data_are_located_by_batch(value: float) -> None:
    good, bad = data(), data()
    bad[0][1, 1] = value
    with pytest.raises(NonFiniteError, match="inputs of batch 1"):
        use(network(), "cross_entropy", [good, bad])


def test_a_loss_that_is_not_finite_is_located_by_batch() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.pow(2).mean() + targets.float().log().mean()

    good = (torch.randn(4, 3), torch.ones(4).long())
    bad = (torch.randn(4, 3), torch.zeros(4).long())
    with pytest.raises(NonFiniteError, match="loss of batch 1"):
        use(network(), loss, [good, bad])
    with pytest.raises(NonFiniteError, match="loss of batch 1"):
        ca.Problem(network(), loss, [good, bad]).value()


def test_wrong_shapes_and_types_say_expected_and_got() -> None:
    x, y = data()
    with pytest.raises(ProblemError, match=r"\(6,\).*got \(5,\)"):
        use(network(), "cross_entropy", (x, y[:5]))
    with pytest.raises(ProblemError, match="integer class targets"):
        use(network(), "cross_entropy", (x, y.float()))
    with pytest.raises(ProblemError, match=r"0\.\.1.*7"):
        use(network(), "cross_entropy", (x, torch.full((6,), 7)))
    with pytest.raises(ProblemError, match=r"\(6, 2\).*got \(6,\)"):
        use(network(), "mse", (x, torch.randn(6)))  # would broadcast without a word
    with pytest.raises(ProblemError, match=r"float64.*float32"):
        use(network(), "cross_entropy", (x.double(), y))
    with pytest.raises(ProblemError, match=r"\(6, 2\) float32"):
        use(network(), "cross_entropy", (x[:, :2], y))


def test_vectors_of_wrong_shape_or_type_are_refused() -> None:
    operator = ca.Hessian(ca.Problem(network(), "cross_entropy", data()))
    with pytest.raises(ValueError, match=r"\(26,\).*got \(25,\)"):
        operator @ torch.randn(25)
    with pytest.raises(TypeError, match=r"float32.*float64"):
        operator @ torch.randn(26, dtype=torch.float64)


def test_no_gradient_path_names_the_parameters() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).detach()

    with pytest.raises(ProblemError, match=r"no gradient path.*inner\.weight"):
        use(Detached(), "cross_entropy", data())


def test_unused_parameters_are_named_and_have_zero_rows() -> None:
    model = network()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: nn.Sequential.forward(nn.Sequential(*list(model)[:3]), x)  # type: ignore[method-assign]
    problem = ca.Problem(model, "cross_entropy", data())
    with pytest.warns(UserWarning, match=r"spare\.bias, spare\.weight"):
        product = ca.Hessian(problem) @ torch.ones(problem.size)
    assert torch.equal(product[-6:], torch.zeros(6))
    assert float(product[:-6].norm()) > 0


def test_everything_frozen_is_refused() -> None:
    model = network().requires_grad_(False)
    with pytest.raises(ProblemError, match="every parameter is frozen"):
        ca.Problem(model, "cross_entropy", data())


def test_active_dropout_is_refused_with_its_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    with pytest.raises(ProblemError, match=r"dropout is active in 1.*model\.eval\(\)"):
        use(model, "cross_entropy", data())
    use(model.eval(), "cross_entropy", data())


def test_dropout_inside_attention_is_refused_too() -> None:
    model, batch, loss = families.make("hf gpt2")
    model.train()
    with pytest.raises(ProblemError, match=r"dropout is active"):
        use(model, loss, batch)


def test_batch_statistics_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    with pytest.raises(ProblemError, match=r"batch statistics in 1.*model\.eval\(\)"):
        use(model, "cross_entropy", data())
    use(model.eval(), "cross_entropy", data())


def test_a_random_loss_is_detected() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.inner(x), 0.5, training=True)

    with pytest.raises(ProblemError, match="loss changes between two evaluations"):
        use(Noisy(), "cross_entropy", data())


def test_a_compiled_model_is_unwrapped_and_said() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match="OptimizedModule"):
        problem = ca.Problem(compiled, "cross_entropy", data())
    assert problem.model is model
    assert problem.parameter_names[0] == "0.weight"


def test_a_data_parallel_model_is_unwrapped_and_said() -> None:
    with pytest.warns(UserWarning, match="DataParallel"):
        problem = ca.Problem(nn.DataParallel(network()), "cross_entropy", data())
    assert problem.parameter_names[0] == "0.weight"


def test_sharded_parameters_are_refused() -> None:
    model = network()
    model[0].weight.placements = ("Shard(0)",)  # what a DTensor shows
    with pytest.raises(ProblemError, match=r"0\.weight.*DTensor.*parallelize_module"):
        ca.Problem(model, "cross_entropy", data())


def test_one_shot_iterators_are_refused_with_the_fix() -> None:
    def batches() -> Iterator[Any]:
        yield data()

    with pytest.raises(ProblemError, match=r"one-shot iterator.*list\(data\)"):
        ca.Problem(network(), "cross_entropy", batches())
    with pytest.raises(ProblemError, match=r"one-shot iterator"):
        ca.Problem(network(), "cross_entropy", iter([data()]))


def test_empty_data_are_refused() -> None:
    with pytest.raises(ProblemError, match="empty"):
        ca.Problem(network(), "cross_entropy", [])
    x, y = data()
    with pytest.raises(ProblemError, match="no valid target"):
        ca.Problem(network(), "cross_entropy", (x, torch.full_like(y, -100)))


def test_a_mapping_without_labels_is_refused() -> None:
    with pytest.raises(ProblemError, match=r"without 'labels'.*input_ids"):
        ca.Problem(network(), "cross_entropy", {"input_ids": torch.ones(2, 3).long()})


def test_half_precision_is_refused_with_the_fix() -> None:
    with pytest.raises(ProblemError, match=r"bfloat16.*model\.float\(\)"):
        use(network().bfloat16(), "cross_entropy", data())


def test_a_wrong_double_backward_is_caught_by_the_symmetry_probe() -> None:
    class Wrong(torch.autograd.Function):
        """x ↦ x³ whose first derivative is right and whose second derivative is not."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(x, scale)
            return x**3 * scale

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, scale = ctx.saved_tensors
            return grad * 3 * x**2 * scale.detach(), (grad * x**3).sum(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Wrong.apply(self.inner(x), self.scale)
            return result

    with pytest.raises(DifferentiationError, match="not symmetric"):
        use(Model(), "cross_entropy", data())


def test_an_operation_without_second_derivative_says_what_to_do() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Once.apply(self.inner(x))
            return result

    with pytest.raises(DifferentiationError, match="no second derivative"):
        use(Model(), "cross_entropy", data())


class _Foreign(torch.autograd.Function):
    """x² whose backward computes outside autograd, as foreign kernels do, when ``cut`` is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cut = cut
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * (grad * x).detach() if ctx.cut else 2 * grad * x, None


class _ForeignModel(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.cut = nn.Linear(3, 4), nn.Linear(4, 2), cut

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(_Foreign.apply(self.inner(x), self.cut))
        return result


def test_a_custom_backward_that_leaves_no_graph_is_caught_by_differences() -> None:
    with pytest.raises(DifferentiationError, match=r"_ForeignBackward|not symmetric"):
        use(_ForeignModel(cut=True), "cross_entropy", data())
    with pytest.raises(DifferentiationError, match=r"_ForeignBackward"):
        use(_ForeignModel(cut=True), "cross_entropy", data(), parameters="inner.*")
    use(_ForeignModel(cut=False), "cross_entropy", data())


def test_fused_attention_kernels_work_without_the_user_doing_anything() -> None:
    model, batch, loss = families.make("torch encoder post-norm")
    with torch.inference_mode():
        inputs = batch[0].clone()
    product = use(model, loss, (inputs, batch[1]))
    assert bool(torch.isfinite(product).all())


def test_autocast_outside_does_not_reach_inside() -> None:
    model, batch = network(), data()
    want = ca.Hessian(ca.Problem(model, "cross_entropy", batch)) @ torch.ones(26)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ca.Hessian(ca.Problem(model, "cross_entropy", batch)) @ torch.ones(26)
    assert torch.equal(got, want)


def test_padded_embedding_rows_stay_zero() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3, padding_idx=0)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).tanh().mean(1))

    torch.manual_seed(0)
    problem = ca.Problem(
        Tagger(), "cross_entropy", (torch.tensor([[0, 1], [2, 0]]), torch.arange(2))
    )
    dense = ca.Hessian(problem).dense()
    assert torch.equal(dense[:3], torch.zeros_like(dense[:3]))
    assert torch.allclose(dense, dense.T, atol=1e-7)


def test_a_quiet_problem_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(network(), "cross_entropy", data())


class _WithEmptyParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.none = nn.Parameter(torch.empty(0))
        self.inner, self.narrow = nn.Linear(3, 2), nn.Linear(3, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.none.sum() + self.narrow(x).sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian, ca.Fisher])
def test_parameters_without_entries_have_no_rows(kind: Any) -> None:
    model, batch = _WithEmptyParameters(), data()
    problem = ca.Problem(model, "cross_entropy", batch)
    assert problem.parameter_names == ("inner.weight", "inner.bias")
    want = kind(ca.Problem(model.inner, "cross_entropy", batch)).dense()
    assert torch.allclose(kind(problem).dense(), want, atol=1e-6)
    assert (kind(problem) @ torch.ones(8, 3)).shape == (8, 3)
    assert problem.gradient().shape == (8,)
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(problem.parameters, whole)


def test_parameters_without_any_entry_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"none have no entries.*nothing to differentiate"):
        ca.Problem(_WithEmptyParameters(), "cross_entropy", data(), parameters="none")


@pytest.mark.parametrize("kind", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian, ca.Fisher])
def test_products_are_the_same_in_inference_mode(kind: Any) -> None:
    batch, vector = data(), torch.randn(26)
    want = kind(ca.Problem(network(), "cross_entropy", batch)) @ vector
    outside = kind(ca.Problem(network(), "cross_entropy", batch))
    with torch.inference_mode():
        inside = kind(ca.Problem(network(), "cross_entropy", batch))
        assert torch.equal(inside @ vector.clone(), want)
        assert torch.equal(outside @ vector.clone(), want)
        assert inside.dense().shape == (26, 26)
    assert torch.equal(outside @ vector, want)
    assert torch.equal(inside @ vector, want)
