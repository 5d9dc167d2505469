"""Which engine computes: chosen by understanding the model, held to double backward, said."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.engines.tangent.feed_forward import FeedForwardStage
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.errors import DifferentiationError, OutOfMemory
from curvatlas.operators import curvature, engine as choosing

TOKENS = torch.randint(0, 17, (5, 9), generator=torch.Generator().manual_seed(0))
BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])
OPERATORS = [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian]


def _gpt(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    sizes = {"vocabulary": 17, "context": 12, "d_model": 16, "n_heads": 2}
    return zoo.reference_gpt(**{**sizes, **options}).to(dtype).eval()


def _problem(model: nn.Module | None = None, data: Any = BATCH, **options: Any) -> ca.Problem:
    return ca.Problem(_gpt() if model is None else model, "cross_entropy", data, **options)


def _both(problem: ca.Problem, operator: Any, columns: Tensor, **options: Any) -> float:
    """Relative difference of the two engines."""
    got = operator(problem, engine="tangent", **options) @ columns
    want = operator(problem, engine="autograd", **options) @ columns
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("operator", OPERATORS)
def test_both_engines_give_the_same_over_uneven_batches_and_budgets(operator: Any) -> None:
    targets = BATCH[1].clone()
    targets[0, 3:] = -100
    data = [(BATCH[0][:2], targets[:2]), (BATCH[0][2:], targets[2:])]
    problem = _problem(data=data)
    columns = torch.randn(problem.size, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the budget is too small for one sample
        for budget in (None, "300kB"):
            assert _both(problem, operator, columns, budget=budget) < 1e-11


@pytest.mark.parametrize("operator", OPERATORS)
def test_some_parameters_may_vary(operator: Any) -> None:
    model = _gpt(tied=True)
    model.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
    problem = _problem(model)
    assert _both(problem, operator, torch.randn(problem.size, dtype=torch.float64)) < 1e-11
    chosen = _problem(parameters=["blocks.1.*", "head.weight"])
    assert _both(chosen, operator, torch.randn(chosen.size, 2, dtype=torch.float64)) < 1e-11


@pytest.mark.parametrize(
    ("rows", "columns"),
    [("blocks.0.query", "blocks.1.value"), ("head", "head"), ("embedding", "blocks.0.up")],
)
def test_views_of_roles_are_the_same(rows: str, columns: str) -> None:
    problem = _problem()
    views = [ca.Hessian(problem, engine=e)[rows, columns] for e in ("tangent", "autograd")]  # type: ignore[arg-type]
    vectors = torch.randn(views[0].shape[1], 2, dtype=torch.float64)
    torch.testing.assert_close(views[0] @ vectors, views[1] @ vectors, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_an_operator_and_its_batches_are_probed_once_at_the_same_weights(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []
    probe = curvature.probe_batch

    def counted(problem: ca.Problem) -> Any:
        probed.append(problem)
        return probe(problem)

    monkeypatch.setattr(curvature, "probe_batch", counted)
    problem = _problem(data=[(BATCH[0][:2], BATCH[1][:2]), (BATCH[0][2:], BATCH[1][2:])])
    operator = ca.Hessian(problem, engine=engine)
    vector = torch.randn(problem.size, dtype=torch.float64)
    product = operator @ vector
    operator.release()
    assert torch.equal(operator @ vector, product)
    together = sum(share * (part @ vector) for share, part in operator.per_batch())
    torch.testing.assert_close(together, product, rtol=1e-12, atol=1e-14)
    assert len(probed) == 1
    with torch.no_grad():
        next(problem.model.parameters()).mul_(1.5)
    fresh = ca.Hessian(problem, engine=engine) @ vector
    assert torch.equal(operator @ vector, fresh)
    assert len(probed) == 3
    operator.release()
    problem.model.train()
    problem.model.blocks[0].register_module("more", nn.Dropout(0.5))  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="dropout is active in"):
        operator @ vector


def test_float32_agrees_to_rounding_and_the_choice_is_said() -> None:
    problem = _problem(_gpt(torch.float32))
    assert problem.engine.name == "undecided"
    got = ca.Hessian(problem) @ torch.ones(problem.size)
    assert problem.engine.name == "tangent"
    assert "2 blocks (Block)" in str(problem.engine)
    want = ca.Hessian(_problem(), engine="autograd") @ torch.ones(problem.size, dtype=torch.float64)
    assert float((got - want).norm() / want.norm()) < 2e-6


def test_a_model_without_known_layers_is_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    problem = ca.Problem(model, "mse", (torch.randn(6, 4).double(), torch.randn(6, 3).double()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ca.Hessian(problem) @ torch.ones(problem.size, dtype=torch.float64)
    assert str(problem.engine).startswith("tape: 7 operations; a product of one sample agrees")
    with pytest.raises(UnmappedModuleError, match="Sequential has no layer"):
        ca.Hessian(problem, engine="tangent") @ torch.ones(problem.size, dtype=torch.float64)


class Louder(nn.TransformerEncoderLayer):
    """Looks like torch's layer and computes something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_a_subclass_that_computes_something_else_is_recorded() -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    model = Louder(8, 2, 12, batch_first=True, dropout=0.0).double().eval()
    problem = ca.Problem(model, "mse", (x, x))
    v = torch.randn(problem.size, dtype=torch.float64)
    got = ca.Hessian(problem) @ v
    assert problem.engine.name == "tape"
    torch.testing.assert_close(got, ca.Hessian(problem, engine="autograd") @ v)
    with pytest.raises(UnmappedModuleError, match="Louder overrides"):
        ca.Hessian(problem, engine="tangent") @ v


def test_a_hook_that_changes_activations_never_gives_a_wrong_product() -> None:
    model = _gpt()
    model.blocks[0].ffn.register_forward_hook(lambda _, args, out: out * 1.5)  # type: ignore[index, union-attr]
    problem = _problem(model)
    v = torch.randn(problem.size, dtype=torch.float64)
    got = ca.Hessian(problem) @ v
    torch.testing.assert_close(got, ca.Hessian(problem, engine="autograd") @ v)


def test_a_product_that_is_wrong_is_noticed_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = choosing.TangentLinearisation
    right = whole._fill

    def wrong(self: Any, columns: Any, into: Any) -> None:
        right(self, columns, into)
        for rows in into.values():
            next(iter(rows.values())).mul_(1.001)

    monkeypatch.setattr(whole, "_fill", wrong)
    problem = _problem()
    v = torch.randn(problem.size, dtype=torch.float64)
    operator = ca.Hessian(problem)
    with pytest.warns(UserWarning, match="differ from double backward"):
        got = operator @ v
    assert problem.engine.name == "autograd"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator @ v
    torch.testing.assert_close(got, ca.Hessian(problem, engine="autograd") @ v)
    with pytest.raises(DifferentiationError, match="engine='autograd'"):
        ca.Hessian(problem, engine="tangent") @ v


def test_a_tail_whose_values_alone_look_plain_is_left_to_autograd_alone() -> None:
    class Moody(nn.Module):
        """A gain that is one: no value shows it; and another formula for long inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt = _gpt()
            self.extra = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.gpt(tokens)
            return logits * self.extra if tokens.shape[1] < 8 else logits + self.extra * 3

    model = Moody()
    data = [(BATCH[0][:, :5], BATCH[1][:, :5]), BATCH]
    problem = _problem(model, data)
    v = torch.randn(problem.size, dtype=torch.float64)
    want = ca.Hessian(problem, engine="autograd") @ v
    torch.testing.assert_close(ca.Hessian(problem) @ v, want, rtol=1e-10, atol=1e-12)
    assert problem.engine.name == "tangent"


@pytest.mark.huggingface
def test_a_call_that_is_not_read_is_recorded() -> None:
    """GPT-Neo attends to padding where a row has nothing else: no hand-written form has that."""
    from huggingface_models import tiny_model

    mask = torch.tensor([[0, 0, 1, 1]])
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": mask}
    problem = ca.Problem(
        tiny_model("gpt_neo").double().eval(),
        None,
        [batch | {"labels": torch.tensor([[-100, -100, 5, 6]])}],
    )
    v = torch.randn(problem.size, dtype=torch.float64)
    got = ca.Hessian(problem) @ v
    assert problem.engine.name == "tape"
    torch.testing.assert_close(got, ca.Hessian(problem, engine="autograd") @ v)


def test_changed_weights_are_followed() -> None:
    problem = _problem()
    operator, v = ca.Hessian(problem), torch.randn(problem.size, dtype=torch.float64)
    before = operator @ v
    with torch.no_grad():
        problem.model.blocks[0].attention.query.weight.mul_(1.5)  # type: ignore[index, union-attr]
    after = operator @ v
    assert not torch.allclose(before, after)
    fresh = ca.Hessian(_problem(copy.deepcopy(problem.model)), engine="autograd") @ v
    torch.testing.assert_close(after, fresh, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
def test_long_samples_go_by_blocks_of_queries_and_are_checked_by_their_first_tokens(
    operator: Any,
) -> None:
    tokens = torch.randint(0, 17, (2, 97), generator=torch.Generator().manual_seed(2))
    problem = _problem(_gpt(context=96), (tokens[:, :-1], tokens[:, 1:]))
    columns = torch.randn(problem.size, 2, dtype=torch.float64)
    want = operator(problem, engine="autograd") @ columns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the budget is too small for one sample
        lean = operator(problem, engine="tangent", budget="1MB")
        got = lean @ columns
    assert "(1/4 of its tokens)" in str(problem.engine)
    assert all(chain.blocked for _, graph in lean._full for chain in graph.chains)  # type: ignore[union-attr, attr-defined]
    assert float((got - want).norm() / want.norm()) < 1e-11
    whole = operator(problem, engine="tangent")
    assert float((whole @ columns - want).norm() / want.norm()) < 1e-11
    assert "tokens" not in str(problem.engine)
    assert not any(chain.blocked for _, graph in whole._full for chain in graph.chains)  # type: ignore[union-attr, attr-defined]


def test_a_sample_that_cannot_be_shortened_is_checked_whole() -> None:
    class Fixed(nn.Module):
        """Takes inputs of one length only."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = _gpt(context=64)

        def forward(self, tokens: Tensor) -> Tensor:
            if tokens.shape[1] != 64:
                raise ValueError("64 tokens, please.")
            return self.inner(tokens)

    tokens = torch.randint(0, 17, (2, 65), generator=torch.Generator().manual_seed(2))
    problem = _problem(Fixed(), (tokens[:, :-1], tokens[:, 1:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ca.Hessian(problem, engine="tangent", budget="400kB") @ torch.ones(
            problem.size, dtype=torch.float64
        )
    want = ca.Hessian(problem, engine="autograd") @ torch.ones(problem.size, dtype=torch.float64)
    assert float((got - want).norm() / want.norm()) < 1e-11


@pytest.mark.parametrize("lean", [False, True])
def test_memory_that_runs_out_is_told_by_block_and_option(
    lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _problem(checkpoint_activations=lean)
    operator = ca.Hessian(problem)
    columns = torch.ones(problem.size, dtype=torch.float64)
    operator @ columns
    operator._full._graphs = []  # type: ignore[union-attr]

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 GB")

    monkeypatch.setattr(FeedForwardStage, "push", full)
    helps = r"budget=.*several processes" if lean else r"budget=.*checkpoint_activations=True"
    with pytest.raises(OutOfMemory, match=rf"memory ran out in blocks\.0 on .*{helps}"):
        operator @ columns


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="got 'fast'"):
        ca.Hessian(_problem(), engine="fast")  # type: ignore[arg-type]


@pytest.mark.huggingface
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_embeddings_narrower_than_the_blocks_are_read_with_any_number_of_samples(
    samples: int,
) -> None:
    """Two samples of embeddings half as wide hold as many numbers as one sample of the stem."""
    from huggingface_models import tiny_model

    sizes = {"embedding_size": 4, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 17}
    model = tiny_model("electra", head="SEQUENCE_CLASSIFICATION", **sizes).double()
    tokens = torch.randint(1, 17, (samples, 5), generator=torch.Generator().manual_seed(samples))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    problem = ca.Problem(model, "cross_entropy", (batch, torch.arange(samples) % 2))
    assert _both(problem, ca.Hessian, torch.randn(problem.size, dtype=torch.float64)) < 1e-11


def test_a_model_whose_reading_fails_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("shape '[-1, 4, 8]' is invalid for input of size 16")

    problem = _problem()
    vector = torch.randn(problem.size, dtype=torch.float64)
    want = ca.Hessian(problem) @ vector
    monkeypatch.setattr("curvatlas.engines.tangent.model.recognised_stem", fails)
    again = _problem()
    assert float((ca.Hessian(again) @ vector - want).norm() / want.norm()) < 1e-11
    assert again.engine is not None
    assert again.engine.name == "tape"
    with pytest.raises(UnmappedModuleError, match="reading the model failed"):
        ca.Hessian(_problem(), engine="tangent") @ vector


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_view_of_parameters_that_the_loss_does_not_reach_is_zero(operator: Any) -> None:
    class Unread(nn.Module):
        """A pooler beside the outputs, as BERT's is for a loss of its hidden states."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.pooler = _gpt(), nn.Linear(17, 3).double()

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.model(tokens)
            self.pooler(logits[:, 0])
            return logits

    problem = _problem(Unread())
    with pytest.warns(UserWarning, match="no gradient path from the loss to pooler.bias, pooler"):
        block = operator(problem)["pooler.weight"].dense()
    assert block.shape == (51, 51)
    assert not block.any()
    with pytest.raises(ValueError, match="no gradient path from the loss to any of pooler"):
        operator(_problem(Unread(), parameters=["pooler.*"])) @ torch.zeros(54, dtype=torch.float64)


@pytest.mark.huggingface
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_loss_that_reads_tokens_which_see_no_key_is_told(kernel: str, ignored: bool) -> None:
    """Then, and only then, autograd's gradient is no derivative of the loss."""
    from huggingface_models import tiny_model

    model = tiny_model("llama", attn=kernel).double()
    tokens = torch.randint(3, 17, (3, 6), generator=torch.Generator().manual_seed(0))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[1, :2] = 0
    if ignored:
        labels[1, :3] = -100
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    problem = ca.Problem(model, None, batch)
    vector = torch.randn(
        problem.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ca.Hessian(problem) @ vector
    told = any("attention sees no key" in str(warning.message) for warning in said)
    slope = float(problem.gradient() @ vector)
    values = []
    for sign in (1.0, -1.0):
        moved = copy.deepcopy(model)
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()) + sign * 1e-6 * vector,
            moved.parameters(),
        )
        values.append(ca.Problem(moved, None, batch).value())
    wrong = abs((values[0] - values[1]) / 2e-6 - slope) > 1e-5 * abs(slope)
    assert told == wrong == (kernel == "eager" and not ignored)
