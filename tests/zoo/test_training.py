"""The training loop learns, repeats itself, and leaves things as it found them."""

from __future__ import annotations

import pytest
import torch

from curvatlas import zoo


def test_the_reference_vit_learns_the_digits_to_ninety_percent():
    model, data = zoo.reference_vit(), zoo.digits()
    untrained = zoo.evaluate(model, data.validation)
    history = zoo.train(model, data)
    assert untrained[1] < 0.3
    assert history.validation_accuracy > 0.9
    assert history.validation_loss < untrained[0]
    assert (history.validation_loss, history.validation_accuracy) == zoo.evaluate(
        model, data.validation, batch_size=256
    )


def test_the_same_call_gives_the_same_weights():
    runs = []
    for seed in (0, 0, 1):
        model = zoo.reference_gpt()
        history = zoo.train(model, zoo.text(), steps=5, batch_size=8, seed=seed)
        runs.append((history.losses, model.head.weight.detach().clone()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


def test_a_linear_regression_reaches_the_least_squares_solution():
    torch.manual_seed(0)
    x, noise = torch.randn(64, 3, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.1 * noise
    model = torch.nn.Linear(3, 1, bias=False).double().eval()
    steps = []
    zoo.train(
        model, (x, y), steps=400, lr=0.1, batch_size=64, loss="mse", weight_decay=0.0,
        on_step=lambda step, loss: steps.append((step, loss)),
    )  # fmt: skip
    exact = torch.linalg.lstsq(x, y).solution
    torch.testing.assert_close(model.weight.detach().T, exact, rtol=1e-4, atol=1e-4)
    assert [s for s, _ in steps] == list(range(400))
    assert steps[-1][1] < steps[0][1]
    assert not model.training
    assert model.weight.grad is None


def test_evaluation_weights_each_valid_target_once():
    model = torch.nn.Embedding(5, 5)
    tokens = torch.arange(5).repeat(4, 1)
    targets = tokens.clone()
    targets[0, :4], targets[1, 1] = -100, -100  # uneven padding over batches of one row
    mean = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    value, _ = zoo.evaluate(model, (tokens, targets), batch_size=1)
    assert value == pytest.approx(mean.item(), rel=1e-6)


def test_wrong_use_says_what_is_wrong():
    data = zoo.digits()
    with pytest.raises(ValueError, match="at least 1"):
        zoo.train(zoo.reference_vit(), data, steps=0)
    with pytest.raises(ValueError, match="'cross_entropy', 'mse'"):
        zoo.train(zoo.reference_vit(), data, loss="hinge")
    with pytest.raises(FloatingPointError, match="lower lr"):
        zoo.train(zoo.reference_vit(), data, steps=20, lr=1e30)
