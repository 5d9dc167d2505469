from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
import families
from curvatlas.operators.per_sample import exact_outer_diagonal

Batches = list[tuple[Tensor, Tensor]]
Curvature = Callable[[Tensor, Tensor], Tensor]  # outputs, targets → (targets, C, C)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- models that show their layers' inputs and outputs ------------------------------------------


class Shown(nn.Module):
    """Notes a_m (samples, positions, in) and y, with the way from y to (…, positions, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]] = {}

    def note(
        self, name: str, a: Tensor, y: Tensor, rows: Callable[[Tensor], Tensor] = lambda y: y
    ) -> Tensor:
        if y.requires_grad:
            self.seen.setdefault(name, []).append((a.detach(), y, rows))
        return y

    def through(self, name: str, x: Tensor) -> Tensor:
        """A layer of linear kind on (samples, positions, in)."""
        y = self.note(name, x, self.get_submodule(name)(x))
        return y + 0  # what follows may work in place


class Tokens(Shown):
    """Attention between tokens, a target for each token."""

    def __init__(self) -> None:
        super().__init__()
        conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
        torch.manual_seed(1)
        self.embedding = nn.Embedding(6, 4, padding_idx=0)
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.value = nn.Linear(4, 4, bias=False)
        self.up, self.down = nn.Linear(4, 5), conv1d(4, 5)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)
        nn.init.normal_(self.down.weight)
        nn.init.normal_(self.norm.weight)
        self.double().eval()

    def forward(self, tokens: Tensor) -> Tensor:
        units = F.one_hot(tokens, 6).double() * (tokens != 0).unsqueeze(-1)
        x = self.note("embedding", units, self.embedding(tokens))
        scores = self.through("query", x) @ self.through("key", x).mT
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf)
        x = x + scores.softmax(-1) @ self.through("value", x)
        x = x + self.through("down", torch.relu_(self.through("up", x)))
        n = F.layer_norm(x, (4,))
        return self.through("head", self.note("norm", n, self.norm(x)))


class Pixels(Shown):
    """Convolutions and a mean over what they give, a target for each image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(1, 2))
        self.second = nn.Conv2d(3, 4, 2, padding="same", padding_mode="circular", bias=False)
        self.head = nn.Linear(4, 3)
        self.double().eval()

    def forward(self, images: Tensor) -> Tensor:
        def rows(y: Tensor) -> Tensor:
            return y.flatten(-2).mT

        patches = F.unfold(images, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(1, 2)).mT
        x = self.note("first", patches, self.first(images), rows).tanh()
        patches = F.unfold(F.pad(x, (0, 1, 0, 1), mode="circular"), 2).mT
        x = self.note("second", patches, self.second(x), rows).tanh()
        pooled = x.mean((2, 3))
        return self.note("head", pooled.unsqueeze(1), self.head(pooled), lambda y: y.unsqueeze(-2))


class Recurrent(Shown):
    """One layer, called three times on tokens that meet in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.step = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.through("step", x.cumsum(1)).tanh()
        return x[..., :3]


# --- the definition, output by output -----------------------------------------------------------


def softmax_curvature(outputs: Tensor, targets: Tensor) -> Tensor:
    """diag π − π πᵀ of every target, zero where it is ignored."""
    pi = outputs.softmax(-1).reshape(-1, outputs.shape[-1])
    valid = (targets.reshape(-1) != -100).double()
    return (pi.diag_embed() - pi[:, :, None] * pi[:, None, :]) * valid[:, None, None]


def observed_slopes(outputs: Tensor, targets: Tensor) -> Tensor:
    """r rᵀ with r = π − q of every target, zero where it is ignored."""
    flat = targets.reshape(-1)
    pi = outputs.softmax(-1).reshape(-1, outputs.shape[-1])
    r = (pi - F.one_hot(flat.clamp_min(0), pi.shape[-1])) * (flat != -100).unsqueeze(-1)
    return r[:, :, None] * r[:, None, :]


def by_hand(
    model: Shown,
    name: str,
    batches: Batches,
    curvature: Curvature,
    total: float,
    approximation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """A (in [+ 1])², G (out²) and the exact block ((out · in)²) of one layer."""
    layer = model.get_submodule(name)
    transposed = isinstance(layer, nn.Embedding) or type(layer).__name__ == "Conv1D"
    parameters = [p for p in layer.parameters() if p.requires_grad]
    inputs, outer, exact = [], torch.tensor(0.0), torch.tensor(0.0)
    for x, targets in batches:
        model.seen.clear()
        z = model(x)
        calls = model.seen[name]
        a = torch.cat([a for a, _, _ in calls], 1)  # (N, M, in)
        if any(n == "bias" and p.requires_grad for n, p in layer.named_parameters()):
            a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
            if not layer.weight.requires_grad:
                a = a[..., -1:]
        inputs.append(a if approximation == "expand" else a.mean(1, keepdim=True))
        flat = z.reshape(-1, z.shape[-1])
        for outputs, lam in zip(flat, curvature(z.detach(), targets) / total, strict=True):
            slopes, gradients = [], []
            for output in outputs:
                pulled = torch.autograd.grad(
                    output,
                    [*(y for _, y, _ in calls), *parameters],
                    retain_graph=True,
                    materialize_grads=True,
                )
                ys = [rows(g) for g, (_, _, rows) in zip(pulled, calls, strict=False)]
                slopes.append(torch.cat(ys, -2).flatten(0, -2))  # (positions, out)
                parts = [p.flatten(1) if p.ndim > 1 else p[:, None] for p in pulled[len(ys) :]]
                parts[0] = parts[0].T if transposed and parts[0].shape[1] > 1 else parts[0]
                gradients.append(torch.cat(parts, 1).flatten())
            g, d = torch.stack(slopes), torch.stack(gradients)
            if isinstance(layer, nn.Embedding):
                g = g * (a.flatten(0, 1).sum(1) > 0).unsqueeze(-1)
            if approximation == "reduce":
                g = g.sum(1, keepdim=True)
            outer = outer + torch.einsum("cmo,cd,dmp->op", g, lam, g)
            exact = exact + d.T @ lam @ d
    rows = torch.cat([a.flatten(0, 1) for a in inputs])
    if isinstance(layer, nn.Embedding):
        rows = rows[rows.sum(1) > 0]  # the padding index is left out
    return rows.T @ rows / len(rows), outer, exact


def matrix_by_hand(kind: type[ca.KFAC], a: Tensor, g: Tensor, exact: Tensor) -> Tensor:
    if kind is ca.KFAC:
        return torch.kron(g, a)
    diagonal = bool((a == a.diag().diag()).all())
    u_a = torch.eye(len(a), dtype=torch.float64) if diagonal else torch.linalg.eigh(a)[1]
    u = torch.kron(torch.linalg.eigh(g)[1].contiguous(), u_a.contiguous())
    return u @ (u.T @ exact @ u).diagonal().diag() @ u.T


def block_of(op: ca.KFAC, name: str) -> Tensor:
    """The block's part of the dense matrix, in the order of [W b]."""
    block = next(block for block in op.blocks if block.name == name)
    places = torch.arange(op.shape[0]).unsqueeze(1).double()
    at = block.gather(places).long().flatten()
    return op.dense()[at][:, at]


def token_batches() -> Batches:
    torch.manual_seed(4)
    batches = []
    for n, length in ((3, 4), (2, 3)):
        targets = torch.randint(0, 3, (n, length))
        targets[0, 1] = -100
        batches.append((torch.randint(0, 6, (n, length)), targets))
    return batches


def pixel_batches() -> Batches:
    torch.manual_seed(5)
    return [(randn(n, 2, 5, 5), torch.randint(0, 3, (n,))) for n in (11, 14)]


def recurrent_batches() -> Batches:
    torch.manual_seed(6)
    return [(randn(n, 3, 4), torch.randint(0, 3, (n, 3))) for n in (4, 3)]


CASES: dict[str, tuple[Callable[[], Shown], Callable[[], Batches]]] = {
    **dict.fromkeys(["embedding", "query", "value", "up", "down", "head"], (Tokens, token_batches)),
    "first": (Pixels, pixel_batches),
    "second": (Pixels, pixel_batches),
    "step": (Recurrent, recurrent_batches),
}


@pytest.mark.parametrize("curvature", [softmax_curvature, observed_slopes])
@pytest.mark.parametrize(
    ("layer", "approximation"),
    [(name, "expand") for name in CASES]
    + [(name, "reduce") for name in ("query", "down", "first", "step")],
)
def test_blocks_are_those_of_the_written_definition(
    layer: str, approximation: Any, curvature: Curvature
) -> None:
    make_model, make_batches = CASES[layer]
    model, batches = make_model(), make_batches()
    problem = ca.Problem(model, "cross_entropy", batches)
    output: Any = "exact" if curvature is softmax_curvature else "empirical"
    total = sum(float((t != -100).sum()) for _, t in batches)
    parts = by_hand(model, layer, batches, curvature, total, approximation)
    for kind in (ca.KFAC, ca.EKFAC):
        op = kind(problem, approximation=approximation, kind=output)
        expected = matrix_by_hand(kind, *parts)
        assert op.uncovered == ()
        assert float(expected.norm()) > 0
        error = float((block_of(op, layer) - expected).norm())
        assert error <= 1e-10 * float(expected.norm()), kind.__name__


@pytest.mark.parametrize(
    ("weight", "bias"), [(True, False), (False, True)], ids=["frozen bias", "frozen weight"]
)
@pytest.mark.parametrize("layer", ["query", "down"])
@pytest.mark.parametrize("kind", [ca.KFAC, ca.EKFAC])
def test_a_frozen_weight_or_bias_leaves_the_other(
    kind: type[ca.KFAC], layer: str, weight: bool, bias: bool
) -> None:
    model, batches = Tokens(), token_batches()
    module: Any = model.get_submodule(layer)
    module.weight.requires_grad_(weight)
    module.bias.requires_grad_(bias)
    op = kind(ca.Problem(model, "cross_entropy", batches))
    total = sum(float((t != -100).sum()) for _, t in batches)
    expected = matrix_by_hand(
        kind, *by_hand(model, layer, batches, softmax_curvature, total, "expand")
    )
    actual = block_of(op, layer if weight else f"{layer}.bias")
    assert float((actual - expected).norm()) <= 1e-10 * float(expected.norm())


@pytest.mark.parametrize("norms", ["exact", "diagonal"])
def test_gain_and_shift_of_a_norm_have_their_exact_block_or_its_diagonal(norms: Any) -> None:
    problem = ca.Problem(Tokens(), "cross_entropy", token_batches())
    op = ca.KFAC(problem, norms=norms)
    block = next(block for block in op.blocks if block.name == "norm")
    assert block.weight is not None
    assert block.bias is not None
    at = [*range(*block.weight.indices(problem.size)), *range(*block.bias.indices(problem.size))]
    exact = ca.GaussNewton(problem).dense()[at][:, at]
    if norms == "diagonal":
        exact = exact.diagonal().diag()
    assert float((op.dense()[at][:, at] - exact).norm()) <= 1e-12 * float(exact.norm())


# --- what the definition implies ----------------------------------------------------------------


def test_a_linear_layer_with_a_target_for_each_token_is_exact_with_expand() -> None:
    torch.manual_seed(0)
    problem = ca.Problem(nn.Linear(4, 3).double(), "mse", (randn(5, 6, 4), randn(5, 6, 3)))
    exact = ca.GaussNewton(problem).dense()
    for kind in (ca.KFAC, ca.EKFAC):
        op = kind(problem)
        assert op.exact_trace() == pytest.approx(float(exact.trace()), rel=1e-12)
        assert float((op.dense() - exact).norm()) <= 1e-12 * float(exact.norm())


class MeanFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean(1)


def test_a_linear_layer_whose_tokens_are_averaged_is_exact_with_reduce() -> None:
    torch.manual_seed(0)
    problem = ca.Problem(
        MeanFirst().double(), "mse", [(randn(n, 6, 4), randn(n, 3)) for n in (5, 2)]
    )
    exact = ca.GaussNewton(problem).dense()
    for kind in (ca.KFAC, ca.EKFAC):
        reduced = kind(problem, approximation="reduce").dense()
        assert float((reduced - exact).norm()) <= 1e-12 * float(exact.norm())
    assert float((ca.KFAC(problem).dense() - exact).norm()) > 0.1 * float(exact.norm())


@pytest.mark.huggingface
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_ekfac_covers_every_family_and_has_the_trace_of_gauss_newton(family: str) -> None:
    model, batch, loss = families.make(family)
    problem = ca.Problem(model, loss, batch)
    op = ca.EKFAC(problem)
    assert op.uncovered == ()
    found = exact_outer_diagonal(problem)
    assert found is not None
    assert op.exact_trace() == pytest.approx(float(found[0].sum()), rel=1e-11)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("output", ["mc", "empirical"])
def test_ekfac_has_the_trace_of_the_fisher_matrix_with_the_same_draws(
    output: Any, approximation: Any
) -> None:
    problem = ca.Problem(Tokens(), "cross_entropy", token_batches())
    options: dict[str, Any] = {"kind": output, "samples": 3, "seed": 7}
    op = ca.EKFAC(problem, approximation=approximation, **options)
    exact = float(ca.Fisher(problem, **options).dense().trace())
    assert op.exact_trace() == pytest.approx(exact, rel=1e-12)


def test_relabelling_classes_changes_nothing() -> None:
    traces = []
    for order in ([0, 1, 2], [2, 0, 1]):
        model, batches = Tokens(), token_batches()
        with torch.no_grad():
            model.head.weight.copy_(model.head.weight[order])
            model.head.bias.copy_(model.head.bias[order])
        place = torch.tensor([*torch.tensor(order).argsort(), -100])
        moved = [(x, place[t.where(t >= 0, 3)]) for x, t in batches]
        problem = ca.Problem(model, "cross_entropy", moved)
        traces.append([kind(problem).exact_trace() for kind in (ca.KFAC, ca.EKFAC)])
    assert traces[0] == pytest.approx(traces[1], rel=1e-12)


LOSSES: dict[str, tuple[Any, Callable[[], Tensor]]] = {
    "class weights": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)),
        lambda: torch.randint(0, 3, (4, 3)),
    ),
    "label smoothing": (
        nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1),
        lambda: torch.randint(0, 3, (4, 3)),
    ),
    "soft targets": (nn.CrossEntropyLoss(), lambda: randn(4, 3, 3).softmax(1)),
    "mse": ("mse", lambda: randn(4, 3, 3)),
    "sum": (nn.MSELoss(reduction="sum"), lambda: randn(4, 3, 3)),
    "binary cross-entropy": (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)),
        lambda: torch.rand(4, 3, 3, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("output", ["exact", "mc", "empirical"])
def test_every_loss_gives_the_trace_of_its_fisher_matrix(loss: str, output: Any) -> None:
    torch.manual_seed(8)
    function, targets = LOSSES[loss]
    batches = [(randn(4, 3, 4), targets()) for _ in range(2)]
    problem = ca.Problem(Recurrent(), function, batches)
    op = ca.EKFAC(problem, kind=output, samples=2)
    exact = float(ca.Fisher(problem, kind=output, samples=2).dense().trace())
    assert exact > 0
    assert op.exact_trace() == pytest.approx(exact, rel=1e-12)


def test_uneven_batches_equal_the_concatenated_batch() -> None:
    torch.manual_seed(9)
    x, targets = randn(7, 3, 4), torch.randint(0, 3, (7, 3))
    targets[1:4, :2] = -100
    apart = ca.Problem(Recurrent(), "cross_entropy", [(x[:5], targets[:5]), (x[5:], targets[5:])])
    together = ca.Problem(Recurrent(), "cross_entropy", (x, targets))
    for kind in (ca.KFAC, ca.EKFAC):
        expected = kind(together).dense()
        error = float((kind(apart).dense() - expected).norm())
        assert error <= 1e-12 * float(expected.norm())


@pytest.mark.parametrize("per", ["target", "sample"])
def test_the_mean_over_many_draws_is_the_exact_matrix(per: Any) -> None:
    problem = ca.Problem(Recurrent(), "cross_entropy", recurrent_batches())
    exact = ca.KFAC(problem).dense()
    few, many = (
        float((ca.KFAC(problem, kind="mc", samples=n, per=per).dense() - exact).norm())
        for n in (4, 900)
    )
    assert many <= 0.06 * float(exact.norm())
    assert many < 0.2 * few
    again = ca.KFAC(problem, kind="mc", samples=4, per=per).dense()
    other = ca.KFAC(problem, kind="mc", samples=4, per=per, seed=1).dense()
    assert float((again - exact).norm()) == few
    assert float((other - exact).norm()) != few


def test_the_empirical_matrix_of_samples_is_that_of_their_whole_gradients() -> None:
    (x, targets), _ = recurrent_batches()
    model = Recurrent()
    problem = ca.Problem(model, "cross_entropy", (x, targets))
    trace = ca.EKFAC(problem, kind="empirical", per="sample").exact_trace()
    expected = 0.0
    for sample, target in zip(x, targets, strict=True):
        loss = F.cross_entropy(model(sample[None])[0], target, reduction="sum")
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        expected += sum(float(slope.pow(2).sum()) for slope in slopes) / targets.numel()
    assert trace == pytest.approx(expected, rel=1e-12)


# --- weights with several uses ------------------------------------------------------------------


class Tied(nn.Module):
    """Two linear layers with one weight and a bias each, and a head tied to the embedding."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.embedding = nn.Embedding(5, 4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.functional = functional
        if not functional:
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.two(self.one(x.cumsum(1)).tanh()).tanh()
        return F.linear(x, self.embedding.weight) if self.functional else self.head(x)


@pytest.mark.parametrize("functional", [False, True])
def test_tied_weights_count_both_uses(functional: bool) -> None:
    torch.manual_seed(11)
    tokens = torch.randint(0, 5, (4, 3))
    problem = ca.Problem(Tied(functional=functional), "cross_entropy", (tokens, tokens))
    exact = ca.GaussNewton(problem).dense()
    op = ca.EKFAC(problem)
    assert set(op.covered) == {"embedding", "one", "one.bias", "two.bias"}
    assert op.uncovered == ()
    for block in op.blocks:
        for place in (block.weight, block.bias):
            if place is not None:
                own = float(op.exact_diagonal()[place].sum())
                assert own == pytest.approx(float(exact.diagonal()[place].sum()), rel=1e-12)


def test_kfac_of_a_tied_head_is_the_diagonal_of_the_sum_of_both_products() -> None:
    torch.manual_seed(12)
    tokens = torch.randint(0, 5, (4, 3))
    tied = ca.Problem(Tied(functional=True), "cross_entropy", (tokens, tokens))

    class Untied(Tied):
        def __init__(self) -> None:
            super().__init__(functional=True)
            self.other = nn.Parameter(self.embedding.weight.detach().clone())

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            return F.linear(self.two(self.one(x.cumsum(1)).tanh()).tanh(), self.other)

    apart = ca.KFAC(ca.Problem(Untied(), "cross_entropy", (tokens, tokens)))
    both = []
    for name in ("embedding", "other"):
        block = next(block for block in apart.blocks if block.name == name)
        assert block.weight is not None
        at = range(*block.weight.indices(apart.shape[0]))
        both.append(apart.dense()[at][:, at])  # rows of W first in both
    total = both[0] + both[1]
    op = ca.KFAC(tied)
    block = next(block for block in op.blocks if block.name == "embedding")
    assert isinstance(block.left, Tensor)
    assert isinstance(block.right, Tensor)
    u = torch.kron(block.left.contiguous(), block.right.contiguous())
    expected = u @ (u.T @ total @ u).diagonal().diag() @ u.T
    assert float((block_of(op, "embedding") - expected).norm()) <= 1e-12 * float(total.norm())


# --- the operator -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ca.KFAC, ca.EKFAC])
def test_inverse_trace_norm_determinant_and_diagonal_are_those_of_the_matrix(
    kind: type[ca.KFAC],
) -> None:
    model = Tokens()
    model.extra = nn.Parameter(randn(2))  # no layer: zero rows
    op = kind(ca.Problem(model, "cross_entropy", token_batches()))
    matrix = op.dense()
    assert torch.allclose(matrix, matrix.T, atol=1e-12)
    damped = matrix + 0.1 * torch.eye(len(matrix), dtype=torch.float64)
    inverse = op.inverse(0.1).dense()
    identity = torch.eye(len(matrix), dtype=torch.float64)
    assert torch.allclose(inverse @ damped, identity, atol=1e-9)
    assert op.exact_log_determinant(0.1) == pytest.approx(float(damped.logdet()), rel=1e-10)
    for exact in (op, op.inverse(0.1)):
        dense = exact.dense()
        assert exact.exact_trace() == pytest.approx(float(dense.trace()), rel=1e-10)
        assert exact.exact_frobenius_norm() == pytest.approx(float(dense.norm()), rel=1e-10)
        assert torch.allclose(exact.exact_diagonal(), dense.diagonal(), atol=1e-10)
    assert ca.trace(op).exact
    assert ca.trace(op).value == pytest.approx(float(matrix.trace()), rel=1e-10)
    assert ca.frobenius_norm(op).value == pytest.approx(float(matrix.norm()), rel=1e-10)
    assert torch.allclose(ca.diagonal(op).values, matrix.diagonal(), atol=1e-12)


def test_layers_and_lists_of_tensors_are_taken_as_by_the_other_operators() -> None:
    problem = ca.Problem(Tokens(), "cross_entropy", token_batches())
    op = ca.KFAC(problem)
    tensors = [randn(*shape) for shape in problem.layout.shapes]
    flat = op @ torch.cat([t.reshape(-1) for t in tensors])
    assert torch.equal(torch.cat([t.reshape(-1) for t in op @ tensors]), flat)
    at = problem.anatomy.select("value.weight")[0].indices
    assert torch.allclose(op["value.weight"].dense(), op.dense()[at][:, at], atol=1e-15)


def test_ekfac_is_nearer_to_the_exact_blocks_than_kfac() -> None:
    problem = ca.Problem(Tokens(), "cross_entropy", token_batches())
    exact = ca.GaussNewton(problem).dense()
    plain, corrected = ca.KFAC(problem), ca.EKFAC(problem)
    mask = (ca.KFAC(problem, kind="empirical").dense() != 0).double()  # inside the blocks
    errors = [float(((op.dense() - exact) * mask).norm()) for op in (plain, corrected)]
    assert errors[1] < errors[0]


def test_many_classes_need_sampled_or_observed_targets() -> None:
    torch.manual_seed(13)
    data = (randn(3, 2, 4), torch.randint(0, 600, (3, 2)))
    problem = ca.Problem(nn.Linear(4, 600).double(), "cross_entropy", data)
    with pytest.raises(ValueError, match=r"600 outputs a target are too many.*kind='mc'"):
        ca.KFAC(problem)
    for output in ("mc", "empirical"):
        op = ca.EKFAC(problem, kind=output)  # type: ignore[arg-type]
        exact = ca.Fisher(problem, kind=output)  # type: ignore[arg-type]
        assert op.exact_trace() == pytest.approx(float(exact.dense().trace()), rel=1e-10)


def test_wrong_options_are_refused_in_a_line() -> None:
    problem = ca.Problem(nn.Linear(4, 3).double(), "mse", (randn(5, 4), randn(5, 3)))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"approximation": "shared"}, "approximation is one of expand, reduce, got 'shared'"),
        ({"kind": "type-2"}, "kind is one of exact, mc, empirical"),
        ({"per": "token"}, "per is one of target, sample"),
        ({"norms": "none"}, "norms is one of exact, diagonal"),
        ({"kind": "mc", "samples": 0}, "samples must be at least 1"),
        ({"per": "sample"}, "cross terms with arbitrary signs"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            ca.KFAC(problem, **options)
    for damping in (0.0, -1.0):
        with pytest.raises(ValueError, match="damping"):
            ca.KFAC(problem).inverse(damping)
        with pytest.raises(ValueError, match="damping"):
            ca.KFAC(problem).exact_log_determinant(damping)


def test_what_cannot_be_summed_or_held_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = (randn(5, 4), randn(5, 3))
    problem = ca.Problem(nn.Linear(4, 3).double(), "mse", data)
    checkpointed = ca.Problem(problem.model, "mse", data, checkpoint_activations=True)
    with pytest.raises(ValueError, match="without checkpoint_activations"):
        ca.KFAC(checkpointed)
    with monkeypatch.context() as patch:
        patch.setattr("curvatlas.operators.kfac.available_bytes", lambda: 1000)
        with pytest.raises(ValueError, match=r"factors of '' \(5 inputs, 3 outputs\) take 1.09 kB"):
            ca.KFAC(problem)
    problem.distributed = True
    monkeypatch.setattr("curvatlas.parallel.world_size", lambda: 2)
    with pytest.raises(ValueError, match="EKFAC does not sum over processes"):
        ca.EKFAC(problem)


class Odd(nn.Module):
    """A parameter that is no layer's, beside a linear layer."""

    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3) if linear else nn.Identity()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.exp()


def test_parameters_of_no_layer_are_named_and_have_zero_rows() -> None:
    data = (randn(5, 4), randn(5, 3))
    with pytest.warns(UserWarning, match="KFAC knows no layer for scale: their rows are zero"):
        op = ca.KFAC(ca.Problem(Odd(linear=True).double(), "mse", data))
    assert op.uncovered == ("scale",)
    place = op.problem.parameter_names.index("scale")
    assert place == 0
    assert float(op.dense()[0].abs().max()) == 0.0
    with pytest.raises(ValueError, match=r"nn\.Linear"):
        ca.KFAC(ca.Problem(Odd(linear=False).double(), "mse", (randn(5, 3), randn(5, 3))))


def test_a_loss_that_is_linear_in_the_outputs_has_no_exact_matrix() -> None:
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1)).double()
    problem = ca.Problem(model, nn.NLLLoss(), (randn(5, 4), torch.randint(0, 3, (5,))))
    with pytest.raises(ValueError, match="nll is linear in the outputs"):
        ca.KFAC(problem)
    logits = ca.Problem(model[0], "cross_entropy", next(iter(problem.data)))
    expected = ca.EKFAC(logits, kind="empirical").exact_trace()
    assert ca.EKFAC(problem, kind="empirical").exact_trace() == pytest.approx(expected, rel=1e-12)


def test_a_loss_without_a_known_curvature_has_an_empirical_matrix_only() -> None:
    def cubic(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().pow(3).mean()

    problem = ca.Problem(nn.Linear(4, 3).double(), cubic, (randn(5, 4), randn(5, 3)))
    with pytest.raises(ValueError, match=r"convex in the outputs.*kind='empirical'"):
        ca.KFAC(problem)
    with pytest.raises(ValueError, match="needs a likelihood"):
        ca.KFAC(problem, kind="mc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = ca.EKFAC(problem, kind="empirical").exact_trace()
    exact = float(ca.Fisher(problem, kind="empirical").dense().trace())
    assert trace == pytest.approx(exact, rel=1e-12)
