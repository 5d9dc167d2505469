"""The model is called so that its loss is a function of its parameters, and left as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvatlas as ca
import oracles
from curvatlas.errors import ProblemError

EPS = torch.finfo(torch.float64).eps


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 2, (5,), generator=generator)


class Network(nn.Module):
    """Its hidden states are scaled by what ``scale`` gives, which may change the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.ones(()))
        self.steps, self.cache, self.table = 1, [torch.zeros(1)], {"a": 1}
        self.double()

    def scale(self, hidden: Tensor) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden * self.scale(hidden)))


def by_hand(model: Network, scale: float) -> Tensor:
    inputs, targets = data()
    hidden = torch.tanh((inputs @ model.first.weight.T + model.first.bias) * scale)
    loss = F.cross_entropy(hidden @ model.last.weight.T + model.last.bias, targets)
    return oracles.hessian(loss, list(model.parameters()))


def assert_hessian(model: Network, scale: float) -> None:
    """H is that of the model scaled by ``scale``, and the model is as it was."""
    buffer, values = model.calls, model.calls.clone()
    before = {name: value for name, value in vars(model).items() if name != "_buffers"}
    contents = list(model.cache), dict(model.table)
    found = ca.Hessian(ca.Problem(model, "cross_entropy", data())).dense()
    assert oracles.relative_error(found, by_hand(model, scale)) < 1000 * EPS
    assert model.calls is buffer
    assert torch.equal(model.calls, values)
    after = {name: value for name, value in vars(model).items() if name != "_buffers"}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert (list(model.cache), dict(model.table)) == contents


class InPlace(Network):
    def scale(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.calls


class Replaced(Network):
    def scale(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.calls


class ThroughData(Network):
    def scale(self, hidden: Tensor) -> Tensor:
        self.calls.data.mul_(2)
        return self.calls


@pytest.mark.parametrize("kind", [InPlace, Replaced, ThroughData])
def test_every_call_starts_from_the_same_buffers(kind: type[Network]) -> None:
    assert_hessian(kind(), 2.0)


class Counting(Network):
    def scale(self, hidden: Tensor) -> float:
        self.steps += 1
        self.last_hidden = hidden
        self.cache.append(hidden)
        self.table["b"] = self.steps
        return 1.0


def test_counters_and_caches_are_put_back() -> None:
    assert_hessian(Counting(), 1.0)


def test_a_loss_may_read_what_the_forward_pass_leaves_behind() -> None:
    class Penalised(Network):
        def scale(self, hidden: Tensor) -> float:
            self.penalty = hidden.pow(4).sum()
            self.calls = hidden.pow(2).sum()
            return 1.0

    model, (inputs, targets) = Penalised(), data()
    hidden = inputs @ model.first.weight.T + model.first.bias
    outputs = torch.tanh(hidden) @ model.last.weight.T + model.last.bias
    want = F.cross_entropy(outputs, targets) + hidden.pow(4).sum() * hidden.pow(2).sum()
    problem = ca.Problem(
        model, lambda z, y: F.cross_entropy(z, y) + model.penalty * model.calls, data()
    )
    found = ca.Hessian(problem).dense()
    assert oracles.relative_error(found, oracles.hessian(want, list(model.parameters()))) < 1e-12
    assert not hasattr(model, "penalty")
    assert float(model.calls) == 1.0


def test_every_call_starts_from_the_same_counter() -> None:
    class Scheduled(Network):
        def scale(self, hidden: Tensor) -> float:
            self.steps += 1
            return 1.0 / self.steps

    assert_hessian(Scheduled(), 1 / 2)


def test_the_default_device_and_dtype_are_the_users_own() -> None:
    problem = ca.Problem(Network(), "cross_entropy", data())
    vector = torch.randn(problem.size, dtype=torch.float64)
    estimates: dict[str, Any] = {
        "trace": lambda H: ca.trace(H).value,
        "eigenpairs": lambda H: ca.eigenpairs(H, k=2).values,
        "density": lambda H: ca.spectral_density(H).nodes,
        "diagonal": lambda H: ca.diagonal(H).value,
        "Frobenius": lambda H: ca.frobenius_norm(H).value,
        "solve": lambda H: ca.solve(H, vector, damping=10.0).value,
    }
    plain = ca.Hessian(problem)
    want = {name: torch.as_tensor(f(plain)) for name, f in estimates.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # whatever is not placed explicitly has no values
            operator = ca.Hessian(problem)
            assert torch.equal(operator @ vector, plain @ vector)
            found = {name: f(operator) for name, f in estimates.items()}
    finally:
        torch.set_default_dtype(before)
    for name in estimates:
        assert torch.allclose(torch.as_tensor(found[name]), want[name], rtol=1e-10), name


def test_a_buffer_that_is_written_in_some_calls_only_is_refused() -> None:
    class Late(Network):
        def scale(self, hidden: Tensor) -> float:
            if torch.is_grad_enabled():
                self.calls += 1
            return 1.0

    problem = ca.Problem(Late(), "cross_entropy", data())
    problem.value()
    with pytest.raises(ProblemError, match="buffer 'calls' in some calls and not in others"):
        problem.gradient()


def test_blocks_that_write_into_buffers_are_not_computed_again() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("calls", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.linear(x) * self.calls)

    model = nn.Sequential(Block(), Block()).double()
    problem = ca.Problem(model, "cross_entropy", data(), checkpoint_activations=True)
    with pytest.raises(ProblemError, match=r"buffer '0.calls'.*checkpoint_activations off"):
        problem.gradient()


def test_a_parameter_that_forward_changes_is_named() -> None:
    class Clipped(Network):
        def scale(self, hidden: Tensor) -> float:
            with torch.no_grad():
                self.last.weight.clamp_(-1, 1)
            return 1.0

    with pytest.raises(ProblemError, match=r"changes parameter 'last.weight' in place"):
        ca.Problem(Clipped(), "cross_entropy", data()).gradient()


def test_max_norm_is_exact_within_the_limit_and_refused_beyond_it() -> None:
    class Tagger(nn.Module):
        def __init__(self, limit: float | None) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embed = nn.Embedding(5, 3, max_norm=limit)
            self.head = nn.Linear(3, 2)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).tanh().mean(1))

    tokens = torch.arange(12).view(4, 3) % 5, torch.arange(4) % 2
    free, model = Tagger(None), Tagger(100.0)
    want = ca.Hessian(ca.Problem(free, "cross_entropy", tokens)).dense()
    found = ca.Hessian(ca.Problem(model, "cross_entropy", tokens)).dense()
    assert torch.equal(found, want)
    assert model.embed.max_norm == 100.0
    short = Tagger(0.5)
    before = short.embed.weight.detach().clone()
    with pytest.raises(ProblemError, match=r"embed has max_norm=0.5 and rows of norm up to"):
        ca.Hessian(ca.Problem(short, "cross_entropy", tokens)).dense()
    assert torch.equal(short.embed.weight, before)


def test_modules_registered_under_two_names_keep_their_parameters() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 2)).double()
    model[3].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    inputs, targets = data()
    hidden = F.linear(torch.tanh(F.linear(inputs, shared.weight, shared.bias)), shared.weight)
    outputs = F.linear(hidden + shared.bias, model[3].weight, model[3].bias)
    want = oracles.hessian(F.cross_entropy(outputs, targets), list(model.parameters()))
    before = dict(model.named_parameters(remove_duplicate=False))
    found = ca.Hessian(ca.Problem(model, "cross_entropy", data())).dense()
    assert oracles.relative_error(found, want) < 1000 * EPS
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


# --- inference mode ------------------------------------------------------------------------------


class Shifted(Network):
    """Uses a buffer and a plain tensor in products that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.full((4,), 0.5, dtype=torch.float64)

    def scale(self, hidden: Tensor) -> Tensor:
        return self.calls * self.plain


def test_models_made_in_inference_mode_are_differentiated() -> None:
    with torch.inference_mode():
        made = Shifted()
    plain = made.plain
    found = ca.Hessian(ca.Problem(made, "cross_entropy", data())).dense()
    assert oracles.relative_error(found, by_hand(Shifted(), 0.5)) < 1000 * EPS
    assert made.plain is plain
    assert plain.is_inference()


def test_weights_of_inference_mode_are_followed_when_they_change() -> None:
    with torch.inference_mode():
        model = Shifted()
    problem = ca.Problem(model, "cross_entropy", data())
    before = problem.value()
    with torch.inference_mode():
        model.last.weight.mul_(2)
    assert problem.value() != before
    other = Shifted()
    with torch.no_grad():
        other.last.weight.mul_(2)
    assert problem.value() == ca.Problem(other, "cross_entropy", data()).value()


def test_data_made_in_inference_mode_are_accepted() -> None:
    with torch.inference_mode():
        inputs, targets = data()
        goals = torch.randn(5, 2, dtype=torch.float64)
    for loss, batch in (("cross_entropy", (inputs, targets)), ("mse", (inputs, goals))):
        found = ca.Hessian(ca.Problem(Network(), loss, batch)).dense()
        copied = (inputs.clone(), batch[1].clone())
        want = ca.Hessian(ca.Problem(Network(), loss, copied)).dense()
        assert torch.equal(found, want)


@pytest.mark.parametrize(
    "operator", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian, ca.Fisher, ca.KFAC]
)
def test_everything_may_be_called_inside_inference_mode(operator: Any) -> None:
    vector = torch.randn(26, dtype=torch.float64)
    plain = ca.Problem(Shifted(), "cross_entropy", data())
    want = operator(plain) @ vector
    with torch.inference_mode():
        problem = ca.Problem(Shifted(), "cross_entropy", data())
        inside = operator(problem)
        found = inside @ vector.clone()
        assert problem.value() == plain.value()
        assert torch.equal(problem.gradient(), plain.gradient())
    assert oracles.relative_error(found, want) < 1000 * EPS
    assert oracles.relative_error(inside @ vector, want) < 1000 * EPS


# --- Hugging Face models, and modules around them ------------------------------------------------

VOCABULARY, WIDTH, PROMPT = 13, 8, 3


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": WIDTH}
    layers = {"n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **layers, **options)).double().eval()


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options)).double().eval()


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(2))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[2, 4:], labels[2, 4:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def some_product(model: nn.Module, batch: Any) -> Tensor:
    problem = ca.Problem(model, "cross_entropy", batch)
    generator = torch.Generator().manual_seed(4)
    vector = torch.randn(problem.size, dtype=torch.float64, generator=generator)
    result: Tensor = ca.Hessian(problem) @ vector
    return result


@pytest.mark.huggingface
@pytest.mark.parametrize("kernel", ["flash_attention_2", "some-hub/flash-attn"])
def test_flash_attention_of_hugging_face_is_switched_and_switched_back(kernel: str) -> None:
    model, batch = llama(), tokens()
    want = some_product(llama(attn_implementation="eager"), batch)
    parts = [m for m in model.modules() if hasattr(m, "config")]
    for part in parts:  # the package itself cannot be loaded here
        part.config._attn_implementation_internal = kernel
    with pytest.warns(UserWarning, match=rf"attn_implementation='{kernel}' has no second"):
        found = some_product(model, batch)
    assert oracles.relative_error(found, want) < 1000 * EPS
    assert {part.config._attn_implementation for part in parts} == {kernel}


@pytest.mark.huggingface
def test_flex_attention_of_hugging_face_is_computed_by_matrix_products() -> None:
    want = some_product(llama(attn_implementation="eager"), tokens())
    found = some_product(llama(attn_implementation="flex_attention"), tokens())
    assert oracles.relative_error(found, want) < 1000 * EPS


@pytest.mark.huggingface
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_gradient_checkpointing_of_hugging_face_changes_nothing(
    reentrant: bool, training: bool
) -> None:
    model = llama().train(training)
    want = some_product(llama(), tokens())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert oracles.relative_error(some_product(model, tokens()), want) < 1000 * EPS
    assert model.training is training
    assert model.is_gradient_checkpointing


class SoftPrompt(nn.Module):
    """Learned embeddings before those of the tokens of a frozen model; logits of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.base = gpt2().requires_grad_(False)
        torch.manual_seed(5)
        self.prompt = nn.Parameter(torch.randn(PROMPT, WIDTH, dtype=torch.float64))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        samples = len(input_ids)
        words = self.base.transformer.wte(input_ids)
        embedded = torch.cat([self.prompt.expand(samples, -1, -1), words], 1)
        ones = attention_mask.new_ones(samples, PROMPT)
        seen = torch.cat([ones, attention_mask], 1)
        logits: Tensor = self.base(inputs_embeds=embedded, attention_mask=seen).logits
        return logits[:, PROMPT:]


class OwnPrompt(SoftPrompt):
    """The same with all logits, and a loss of its own as PEFT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = self.base.transformer.wte  # a second name for the model's own

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Any:
        samples = len(input_ids)
        words = self.embedding(input_ids)
        embedded = torch.cat([self.prompt.expand(samples, -1, -1), words], 1)
        seen = torch.cat([attention_mask.new_ones(samples, PROMPT), attention_mask], 1)
        if labels is not None:
            labels = torch.cat([labels.new_full((samples, PROMPT), -100), labels], 1)
        return self.base(inputs_embeds=embedded, attention_mask=seen, labels=labels)


@pytest.mark.huggingface
@pytest.mark.parametrize("loss", ["cross_entropy", "model"])
@pytest.mark.parametrize("operator", [ca.Hessian, ca.GaussNewton])
def test_labels_of_the_tokens_alone_are_read_as_a_prompted_model_reads_them(
    loss: str, operator: Any
) -> None:
    model, batch = OwnPrompt(), tokens()
    problem = ca.Problem(model, loss, batch)
    assert problem.value() == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)
    with sdpa_kernel(SDPBackend.MATH):
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
    labels = F.pad(batch["labels"], (PROMPT, 0), value=-100)[:, 1:]

    def mean_loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z[:, :-1].reshape(-1, VOCABULARY), labels.reshape(-1))

    if operator is ca.Hessian:
        want = oracles.hessian(mean_loss(logits), [model.prompt])
    else:
        want = oracles.outer_hessian(logits, mean_loss, [model.prompt])
    assert oracles.relative_error(operator(problem).dense(), want) < 1000 * EPS
    assert model.base.lm_head.weight is model.base.transformer.wte.weight


class BarePrompt(OwnPrompt):
    """All logits, and no loss of its own."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = super().forward(input_ids, attention_mask).logits
        return logits


@pytest.mark.huggingface
def test_labels_for_all_logits_of_a_prompted_model_are_next_tokens() -> None:
    model, batch = BarePrompt(), tokens()
    labels = F.pad(batch["labels"], (PROMPT, 0), value=-100)
    value = ca.Problem(model, "cross_entropy", {**batch, "labels": labels}).value()
    own = OwnPrompt()(**batch).loss.detach()
    assert value == pytest.approx(float(own), rel=1e-6)
    with pytest.raises(ProblemError, match=r"prompt of 3 before the tokens put 3 times -100"):
        ca.Problem(model, "cross_entropy", batch).value()
    with pytest.raises(ProblemError, match=r"expect targets \(3, 9\), got \(3, 5\)"):
        ca.Problem(model, "cross_entropy", {**batch, "labels": batch["labels"][:, 1:]}).value()


class Prefix(nn.Module):
    """Learned keys and values before those of the tokens, in every layer of a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.base = gpt2().requires_grad_(False)
        torch.manual_seed(6)
        shape = (2, 2, 1, 2, PROMPT, WIDTH // 2)  # layer, key or value, sample, head, place, width
        self.states = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        from transformers import DynamicCache

        samples, cache = len(input_ids), DynamicCache()
        for layer, (key, value) in enumerate(self.states.expand(-1, -1, samples, -1, -1, -1)):
            cache.update(key, value, layer)
        seen = torch.cat([attention_mask.new_ones(samples, PROMPT), attention_mask], 1)
        logits: Tensor = self.base(input_ids, attention_mask=seen, past_key_values=cache).logits
        return logits


class LowRank(nn.Module):
    """A frozen layer with a learned update of low rank."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(0.1 * torch.randn(inputs, 2, dtype=torch.float64))
        self.up = nn.Parameter(0.1 * torch.randn(2, outputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + x @ self.down @ self.up
        return result


class LowRankModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = gpt2().requires_grad_(False)
        torch.manual_seed(7)
        for block in self.base.transformer.h:
            block.attn.c_attn = LowRank(block.attn.c_attn, WIDTH, 3 * WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.base(input_ids, attention_mask=attention_mask).logits
        return logits


@pytest.mark.huggingface
@pytest.mark.parametrize("kind", [SoftPrompt, Prefix, LowRankModel])
def test_what_is_learned_around_a_frozen_model_has_the_right_hessian(kind: Any) -> None:
    model, batch = kind(), tokens()
    with sdpa_kernel(SDPBackend.MATH):
        logits = model(batch["input_ids"], batch["attention_mask"])
    labels = batch["labels"][:, 1:].reshape(-1)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels)
    learned = [p for p in model.parameters() if p.requires_grad]
    problem = ca.Problem(model, "cross_entropy", batch, shift=True)
    assert problem.size == sum(p.numel() for p in learned)
    found = ca.Hessian(problem).dense()
    assert oracles.relative_error(found, oracles.hessian(loss, learned)) < 1000 * EPS


def test_nothing_is_warned_of_where_nothing_is_switched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ca.Hessian(ca.Problem(Network(), "cross_entropy", data())).dense()


def test_lazy_modules_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2)).double()
    with pytest.raises(ProblemError, match=r"parameter '0.weight' has no shape yet"):
        ca.Problem(model, "cross_entropy", data())
    model(data()[0])
    ca.Hessian(ca.Problem(model, "cross_entropy", data())).dense()


def test_backward_hooks_do_not_reach_the_derivatives_and_stay() -> None:
    seen = []

    def halve(module: nn.Module, inner: Any, outer: Any) -> Any:
        seen.append(module)
        return tuple(None if g is None else g / 2 for g in inner)

    model = Network()
    model.last.register_full_backward_hook(halve)
    model.last.register_full_backward_pre_hook(lambda module, outer: seen.append(module))
    found = ca.Hessian(ca.Problem(model, "cross_entropy", data())).dense()
    assert oracles.relative_error(found, by_hand(model, 1.0)) < 1000 * EPS
    assert not seen
    model(data()[0].requires_grad_(True)).sum().backward()
    assert len(seen) == 2
