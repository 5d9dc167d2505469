"""The first paper's task: sums that are right, carries that run, targets as they are said."""

from __future__ import annotations

import pytest
import torch

from curvatlas import zoo
from curvatlas.zoo.addition import inputs_first, redraw_embeddings


def _number(digits: torch.Tensor) -> torch.Tensor:
    places = 10 ** torch.arange(digits.shape[1] - 1, -1, -1)
    return (digits * places).sum(1)


def test_every_sample_is_a_right_sum_and_its_target_the_answer() -> None:
    for batch in zoo.five_digit_addition(64, seed=3, batches=5):
        tokens = batch.inputs
        x, y, z = _number(tokens[:, :5]), _number(tokens[:, 6:11]), _number(tokens[:, 12:])
        assert torch.equal(x + y, z)
        assert (tokens[:, 5] == 10).all()
        assert (tokens[:, 11] == 11).all()
        assert torch.equal(batch.targets, tokens[:, 12:])


def test_in_one_batch_of_five_more_digits_add_up_to_nine() -> None:
    shares = [
        float((b.inputs[:, :5] + b.inputs[:, 6:11] == 9).double().mean())
        for b in zoo.five_digit_addition(64, seed=0, batches=200)
    ]
    carried = [share for share in shares if share > 0.19]
    assert 0.1 < len(carried) / len(shares) < 0.3
    assert sum(carried) / len(carried) == pytest.approx(0.2 + 0.8 * 0.1, abs=0.03)


def test_one_hot_targets_are_the_tokens_at_the_positions_themselves() -> None:
    (batch,) = zoo.five_digit_addition(8, target="one_hot")
    assert torch.equal(batch.targets.argmax(-1), batch.inputs[:, 11:17])
    with pytest.raises(ValueError, match="next"):
        zoo.five_digit_addition(8, target="last")  # type: ignore[arg-type]


def test_making_the_model_leaves_the_random_state_and_redrawing_scales_the_same_numbers() -> None:
    state = torch.get_rng_state()
    model = zoo.ormaniec_gpt(8, n_layers=2)
    assert torch.equal(state, torch.get_rng_state())
    redraw_embeddings(model, 1.0, seed=5)
    before = model.token_embedding.weight.detach().clone()
    redraw_embeddings(model, 0.1, seed=5)
    torch.testing.assert_close(model.token_embedding.weight.detach(), 0.1 * before)


def test_options_take_norm_softmax_and_residual_away() -> None:
    x = torch.randn(2, 18, 8)
    plain = zoo.ormaniec_gpt(8, attention_residual=False).blocks[0]
    y = plain.attention(x)
    torch.testing.assert_close(plain(x), y + plain.ffn(y))
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in plain.modules())
    norms = zoo.ormaniec_gpt(8, norm=True)
    assert sum(isinstance(m, torch.nn.LayerNorm) for m in norms.modules()) == 3


def test_inputs_first_reads_a_weight_as_the_paper_writes_it() -> None:
    weight = torch.arange(6.0).view(2, 3)
    assert torch.equal(weight.reshape(-1)[inputs_first(weight)], weight.T.reshape(-1))
