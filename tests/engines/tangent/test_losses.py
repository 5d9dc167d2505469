"""Seeds of every loss against autograd at the outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.layers.losses import (
    LinearHeadCrossEntropy,
    OutputLoss,
    PooledCrossEntropy,
    Seeds,
    TokenCrossEntropy,
    TokenSquaredError,
    resolve_loss,
)
from oracles import hessian

torch.manual_seed(3)
W, B = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
Y = torch.randn(2, 3, 5, dtype=torch.float64)
T = torch.tensor([[1, -100, 0], [3, 2, -100]])
C = torch.tensor([1, 3])
POOL = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
CASES: dict[str, tuple[OutputLoss, Tensor, Callable[[Tensor], Tensor]]] = {
    "mse": (TokenSquaredError(), Y, lambda z: (z - Y).pow(2).mean()),
    "tokens": (TokenCrossEntropy(), T, lambda z: F.cross_entropy(z.flatten(0, 1), T.flatten())),
    "head": (
        LinearHeadCrossEntropy(W, B),
        T,
        lambda z: F.cross_entropy((z @ W.T + B).flatten(0, 1), T.flatten()),
    ),
    "mean": (PooledCrossEntropy(W, B), C, lambda z: F.cross_entropy(z.mean(1) @ W.T + B, C)),
    "first": (
        PooledCrossEntropy(W, pooling="first"),
        C,
        lambda z: F.cross_entropy(z[:, 0] @ W.T, C),
    ),
    "last": (
        PooledCrossEntropy(W, pooling="last"),
        C,
        lambda z: F.cross_entropy(z[:, -1] @ W.T, C),
    ),
    "weighted": (
        PooledCrossEntropy(W, token_weights=POOL),
        C,
        lambda z: F.cross_entropy((POOL.unsqueeze(-1) * z).sum(1) @ W.T, C),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_curvature_and_factor_equal_autograd(name: str) -> None:
    loss, target, plain = CASES[name]
    z = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    seeds = loss.seeds(z.detach(), target)
    lam = hessian(plain(z), [z])
    (delta,) = torch.autograd.grad(plain(z), z)
    torch.testing.assert_close(seeds.value, plain(z).detach())
    torch.testing.assert_close(seeds.delta, delta, rtol=1e-12, atol=1e-15)
    v = torch.randn(7, 2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(
        seeds.product(v).reshape(7, -1), v.reshape(7, -1) @ lam, rtol=1e-12, atol=1e-14
    )
    assert seeds.couples_tokens == (seeds.blocks is None)
    if seeds.blocks is not None:
        own = torch.stack([lam.view(6, 5, 6, 5)[i, :, i] for i in range(6)])
        torch.testing.assert_close(seeds.blocks(slice(1, 5)), own[1:5], rtol=1e-12, atol=1e-15)
    else:
        assert seeds.factor is not None
        phi = seeds.factor().flatten(2)
        for sample in range(2):
            block = lam.view(2, 15, 2, 15)[sample, :, sample]
            torch.testing.assert_close(phi[sample].T @ phi[sample], block, rtol=1e-11, atol=1e-15)


def test_a_saturated_softmax_keeps_its_curvature() -> None:
    # Exact: Λ = ε(1−ε) for two classes; plain π(1−π) from π = 1 − ε would give zero.
    seeds = TokenCrossEntropy().seeds(
        torch.tensor([[[60.0, 0.0]]], dtype=torch.float64), torch.tensor([[0]])
    )
    assert seeds.blocks is not None
    direction = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2)
    want = torch.exp(torch.tensor(-60.0, dtype=torch.float64))
    torch.testing.assert_close(seeds.product(direction)[0, 0, 1], want, rtol=1e-10, atol=0)


class Quartic(OutputLoss):
    """Σ (z − y)⁴ / 4: a loss the library does not have."""

    def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
        e = outputs - targets
        return Seeds.from_blocks(
            value=e.pow(4).sum() / 4, delta=e.pow(3), blocks=torch.diag_embed(3 * e.square())
        )


def test_a_new_loss_needs_only_its_seeds() -> None:
    block = TransformerBlockHessian(4, 6, 2).double()
    x, y = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    result = block.compute_block_hessian(x, y, loss=Quartic())
    want = hessian((block(x) - y).pow(4).sum() / 4, list(block.parameters()))
    assert float((result.H - want).norm()) <= 1e-12 * float(want.norm())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.full((2, 3), 9), "outside 0"),
        (torch.full((2, 3), -100), "every target is ignored"),
        (torch.zeros(2, 4, dtype=torch.long), "one class index"),
    ],
)
def test_bad_targets_are_refused(target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenCrossEntropy().seeds(torch.zeros(2, 3, 5), target)


def test_wrong_shapes_dtypes_and_names_are_refused() -> None:
    z = torch.zeros(2, 3, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="outputs' shape"):
        TokenSquaredError().seeds(z, z[:1])
    with pytest.raises(TypeError, match="float32"):
        TokenSquaredError().seeds(z, z.float())
    with pytest.raises(TypeError, match="integer targets"):
        TokenCrossEntropy().seeds(z, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="unknown loss 'hinge'"):
        resolve_loss("hinge")
    with pytest.raises(TypeError, match="OutputLoss"):
        resolve_loss(F.mse_loss)  # type: ignore[arg-type]
