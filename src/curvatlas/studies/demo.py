"""The article's demo: train a small token Transformer and look at its Hessian on the way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvatlas.analysis.analyzer import TransformerHessianAnalyzer
from curvatlas.training.optimizer import CurvatureAwareOptimizer

_TOKENS, _LENGTH, _SAMPLES = 50, 32, 8


class TokenTransformer(nn.Module):
    """Embedding, learned positions, ``nn.TransformerEncoder`` with its dropout, a linear head."""

    def __init__(self, *, tokens: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) integers → logits (B, L, tokens)."""
        logits: Tensor = self.head(
            self.encoder(self.embedding(tokens) + self.positions[:, : tokens.shape[1]])
        )
        return logits


def demo_hessian_analysis(
    *, steps: int = 50, every: int = 10, seed: int = 0
) -> tuple[TransformerHessianAnalyzer, CurvatureAwareOptimizer]:
    """Train on one random batch for ``steps`` steps, with the Hessian analysed now and then.

    The model stays in train mode, dropout included, and each step adapts its rate to the curvature
    along it; every ``every`` steps ``analyze_full_hessian`` looks at the network in evaluation
    mode. Prints a line a look and returns (analyzer, optimizer): ``analyzer.history`` has the
    Hessian's norms, condition numbers and eigenvalues over the steps.
    """
    if steps < 1 or every < 1:
        raise ValueError(f"steps and every are at least 1, got {steps} and {every}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TokenTransformer(tokens=_TOKENS, length=_LENGTH, width=16, heads=2, layers=2)
        x, y = torch.randint(0, _TOKENS, (2, _SAMPLES, _LENGTH)).unbind()
        analyzer = TransformerHessianAnalyzer(model, seed=seed)
        optimizer = CurvatureAwareOptimizer(model, base_lr=1e-3)
        for step in range(steps):
            if step % every == 0:
                found = analyzer.analyze_full_hessian([(x, y)], n_batches=1, k=2)
                print(
                    f"step {step}: ‖H‖ {found.mean_hessian_norm:.4g}, "
                    f"λmax {found.top_eigenvalue:.4g}, λmax/mean|λ| {found.condition_number:.4g}"
                )
            done = optimizer.step_with_curvature_adaptation(x, y)
        print(f"step {steps}: loss {done:.4f}, rate {done.learning_rate:.3g}")
    return analyzer, optimizer
