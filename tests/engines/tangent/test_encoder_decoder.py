"""Encoders and decoders by hand against double backward: two stacks and what lies between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.engines.tangent import model as whole
from curvatlas.engines.tangent.block import LinearisedBlock
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.engines.tangent.sharded import ShardedLinearisation
from model_products import EXACT, LABELS, TOKENS, family, language, linearised, off


class Translator(nn.Module):
    """Torch's encoder and decoder behind one embedding for both kinds of tokens."""

    def __init__(self, *, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(19, 8)
        self.positions = nn.Parameter(torch.randn(1, 20, 8))
        self.stacks = nn.Transformer(
            8, 2, 2, 2, 12, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        )
        self.head = nn.Linear(8, 19)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        given = [self.embedding(t) + self.positions[:, : t.shape[1]] for t in (source, target)]
        if not self.batch_first:
            given = [x.transpose(0, 1) for x in given]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        padding = source == 4
        hidden: Tensor = self.stacks(
            *given,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.head(hidden if self.batch_first else hidden.transpose(0, 1))
        return logits


class Describer(nn.Module):
    """Torch's decoder at a memory that comes in, as it is or through a layer of its own."""

    def __init__(self, *, projected: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8) if projected else nn.Identity()
        self.embedding = nn.Embedding(19, 8)
        layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(8, 19)

    def forward(self, memory: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decoder(self.embedding(tokens), self.projection(memory)))
        return logits


def _shaken(model: nn.Module) -> nn.Module:
    """Away from its start, where attention is nearly even and an encoder hardly counts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def _translator(**options: Any) -> tuple[nn.Module, Any, str]:
    torch.manual_seed(0)
    inputs = (TOKENS, TOKENS[:, 1:6])
    return _shaken(Translator(**options)), [(inputs, TOKENS[:, 2:7])], "cross_entropy"


def _describer(**options: Any) -> tuple[nn.Module, Any, str]:
    torch.manual_seed(0)
    inputs = (torch.randn(3, 4, 8, dtype=torch.float64), TOKENS)
    return _shaken(Describer(**options)), [(inputs, TOKENS.flip(1))], "cross_entropy"


def _two_stacks(kind: str, **options: Any) -> tuple[nn.Module, Any, None]:
    """A family of two layers in each stack; labels of another length than the input."""
    layers = ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
    options = {"decoder_start_token_id": 1, **dict.fromkeys(layers, 2), **options}
    model, _, _ = family(kind, **options)
    return _shaken(model), [language(labels=LABELS[:, :6])], None


def _captions() -> tuple[nn.Module, Any, None]:
    """Two families in one model: images in, GPT-2's tokens out."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    images = transformers.ViTConfig(
        **sizes, intermediate_size=12, image_size=8, patch_size=4, num_channels=1
    )
    text = transformers.GPT2Config(
        **sizes, vocab_size=19, n_positions=16, is_decoder=True, add_cross_attention=True
    )
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, text)
    both.pad_token_id, both.decoder_start_token_id = 0, 1
    batch = {"pixel_values": torch.randn(3, 1, 8, 8, dtype=torch.float64), "labels": TOKENS[:, :5]}
    return _shaken(transformers.VisionEncoderDecoderModel(both)), [batch], None


CASES: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "bart": lambda: _two_stacks("bart"),
    "mbart": lambda: _two_stacks("mbart"),
    "marian": lambda: _two_stacks("marian", decoder_vocab_size=19),
    "pegasus": lambda: _two_stacks("pegasus"),
    "t5": lambda: _two_stacks("t5"),
    "t5, gated and untied": lambda: _two_stacks(
        "t5", is_gated_act=True, dense_act_fn="gelu_new", tie_word_embeddings=False
    ),
    "umt5": lambda: _two_stacks("umt5"),
    "vit and gpt2": _captions,
    "translator": _translator,
    "translator, pre-norm": lambda: _translator(norm_first=True),
    "translator, time first": lambda: _translator(batch_first=False),
    "describer": lambda: _describer(projected=False),
    "describer, projected": lambda: _describer(projected=True),
}


@functools.cache
def _problem(name: str) -> ca.Problem:
    """The problem of a case, which no test changes."""
    model, data, loss = CASES[name]()
    return ca.Problem(model.double().eval(), loss, data)


@pytest.mark.parametrize("part", EXACT)
@pytest.mark.parametrize("name", CASES)
def test_products_of_two_stacks_are_those_of_double_backward(name: str, part: str) -> None:
    problem = _problem(name)
    with problem.evaluating():
        ours = linearised(problem, part)
        assert off(problem, ours, part) < 1e-11
    assert ours.value == pytest.approx(problem.value(), rel=1e-12)


@pytest.mark.parametrize("name", ["bart", "marian", "t5", "translator"])
def test_both_stems_and_the_head_are_written_out_by_hand(name: str) -> None:
    problem = _problem(name)
    with problem.evaluating():
        chain = linearised(problem, "total").chains[0]
    ends = [type(end).__name__ for end in (*chain.stems, chain.tail)]
    assert ends == ["Stem", "Stem", "ReadoutTail"]


@pytest.mark.parametrize("part", EXACT)
@pytest.mark.parametrize("name", ["mbart", "t5", "translator, time first"])
def test_columns_and_rows_of_some_parameters_equal_padded_ones(name: str, part: str) -> None:
    problem = _problem(name)
    names, shapes = problem.parameter_names, problem.layout.shapes
    # two columns for each chosen parameter, zero for all the others
    chosen = names[::3]
    padded = {
        n: torch.zeros(2 * len(chosen), *s, dtype=torch.float64)
        for n, s in zip(names, shapes, strict=True)
    }
    for place, column in enumerate(chosen):
        padded[column][2 * place : 2 * place + 2].normal_()
    with problem.evaluating():
        ours = linearised(problem, part)
        every = [r if r is None else r.clone() for r in ours.product(padded, names)]
        for place, column in enumerate(chosen):
            two = slice(2 * place, 2 * place + 2)
            want = {n: r if r is None else r[two] for n, r in zip(names, every, strict=True)}
            for rows in (names, names[::4], names[-3:]):
                found = ours.product({column: padded[column][two]}, rows)
                got = torch.cat([r.flatten() for r in found if r is not None])
                expected = torch.cat([r.flatten() for n in rows if (r := want[n]) is not None])
                torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


def test_a_batch_in_several_runs_of_samples_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem("bart")  # labels are ignored in different numbers
    monkeypatch.setattr(whole, "ONE_RUN_BYTES", 1)
    monkeypatch.setattr(whole, "RUN_SHARE", 0.0)
    with problem.evaluating():
        ours = linearised(problem, "total")
        assert len(ours.chains) == 2
        assert off(problem, ours, "total") < 1e-12


@pytest.mark.parametrize("part", EXACT)
@pytest.mark.parametrize("name", ["bart", "t5", "translator, pre-norm"])
def test_blocks_that_are_made_anew_give_the_same_and_keep_less(name: str, part: str) -> None:
    problem = _problem(name)
    with problem.evaluating():
        kept, anew = (linearised(problem, part, recompute=again) for again in (False, True))
        assert off(problem, anew, part) < 1e-11
    assert anew.held_bytes < kept.held_bytes


@pytest.mark.parametrize("part", EXACT)
def test_attention_by_blocks_of_queries_and_a_chunked_vocabulary_give_the_same(part: str) -> None:
    problem = _problem("translator")
    with problem.evaluating():
        ours = linearised(problem, part, blocked=True, logit_room=2000)
        assert type(ours.chains[0].tail).__name__ == "ChunkedTail"
        assert off(problem, ours, part) < 1e-11


def test_frozen_parameters_of_either_stack_are_constants() -> None:
    for frozen in ("model.encoder", "model.decoder", "model.shared"):
        model, data, loss = CASES["mbart"]()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        problem = ca.Problem(model.double().eval(), loss, data)
        with problem.evaluating():
            assert off(problem, linearised(problem, "total"), "total") < 1e-11


# which parameters are followed → blocks of the encoder and of the decoder that are held
_VIEWS = {
    "model.decoder.layers.1.": (0, 1),
    "model.decoder.layers.0.": (0, 2),
    "model.decoder.layer_norm": (0, 1),
    "model.encoder.layers.1.": (1, 2),
    "model.encoder.layer_norm": (0, 2),
    "model.shared": (2, 2),
}


@pytest.mark.parametrize("prefix", _VIEWS)
def test_a_view_holds_the_blocks_that_move_with_it(prefix: str) -> None:
    problem = _problem("mbart")
    names = [name for name in problem.parameter_names if name.startswith(prefix)]
    sizes = dict(zip(problem.parameter_names, problem.layout.shapes, strict=True))
    columns = {name: torch.randn(2, *sizes[name], dtype=torch.float64) for name in names}
    with problem.evaluating():
        ours = linearised(problem, "total", names)
        want = EXACT["total"](problem, next(problem.batches()), names).product(columns, names)
        got = ours.product(columns, names)
    chain: Any = ours.chains[0]
    assert (chain.crossing, len(chain.blocks) - chain.crossing) == _VIEWS[prefix]
    for name, ours_row, row in zip(names, got, want, strict=True):
        assert ours_row is not None
        torch.testing.assert_close(ours_row, row, rtol=1e-10, atol=1e-12, msg=name)


def test_rows_of_the_decoder_alone_need_no_way_back_through_the_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = _problem("bart")
    names = problem.parameter_names
    pulled: list[bool] = []
    pull = LinearisedBlock.pull

    def counted(block: LinearisedBlock, *args: Any, **options: Any) -> Any:
        pulled.append(block.spec.memory_size is not None)
        return pull(block, *args, **options)

    with problem.evaluating():
        ours = linearised(problem, "total")
        monkeypatch.setattr(LinearisedBlock, "pull", counted)
        shapes = dict(zip(names, problem.layout.shapes, strict=True))
        columns = {n: torch.randn(1, *shapes[n], dtype=torch.float64) for n in names}
        asked = {"model.decoder.layers.1": [True], "model.encoder.layers.1": [True, True, False]}
        for prefix, blocks in asked.items():
            pulled.clear()
            ours.product(columns, [n for n in names if n.startswith(prefix)])
            assert pulled == blocks


@pytest.mark.parametrize("kind", ["bart", "t5", "translator, time first"])
def test_the_operators_take_the_passes_by_hand(kind: str) -> None:
    model, data, loss = CASES[kind]()
    problem = ca.Problem(model.eval(), loss, data)  # float32
    v = torch.randn(problem.size)
    for operator in (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian):
        got = operator(problem) @ v
        assert problem.engine is not None
        assert problem.engine.name == "tangent"
        want = operator(problem, engine="autograd") @ v
        assert float((got - want).norm() / want.norm()) < 3e-5


class Twisted(Describer):
    """Its second layer attends to another memory, or the memory is no norm of an encoder's."""

    def __init__(self, *, between: bool) -> None:
        super().__init__(projected=True)
        self.between = between
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

    def forward(self, memory: Tensor, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.between:
            memory = self.projection(self.encoder(memory))
        for layer in self.decoder.layers:
            x = layer(x, memory)
            memory = memory if self.between else memory + 1
        logits: Tensor = self.head(x if self.between else self.encoder(x))
        return logits


@pytest.mark.parametrize(
    ("between", "reason"),
    [(True, "something else than what encoder gives"), (False, "does not attend to what")],
)
def test_other_ways_between_the_stacks_are_refused_by_name(between: bool, reason: str) -> None:
    inputs = (torch.randn(3, 4, 8, dtype=torch.float64), TOKENS)
    problem = ca.Problem(
        Twisted(between=between).double().eval(), "cross_entropy", [(inputs, TOKENS.flip(1))]
    )
    with problem.evaluating(), pytest.raises(UnmappedModuleError, match=reason):
        linearised(problem, "total")


def test_a_decoder_called_without_an_encoder_is_refused_with_the_reason() -> None:
    model, data, _ = family("bart", head="CAUSAL_LM")
    problem = ca.Problem(model.double().eval(), None, data)
    vector = torch.zeros(problem.size, dtype=torch.float64)
    with pytest.raises(UnmappedModuleError, match="without an encoder's output"):
        ca.Hessian(problem, engine="tangent") @ vector
    ca.Hessian(problem) @ vector
    assert problem.engine.name == "tape"


@pytest.mark.parametrize(("name", "reason"), [("bart", "a decoder"), ("t5 encoder", "a table")])
def test_two_stacks_of_spread_weights_are_left_to_autograd(name: str, reason: str) -> None:
    model, _, _ = CASES[name.split()[0]]()
    reading = whole.read_model(model.eval() if name == "bart" else model.eval().encoder)
    problem = ca.Problem(nn.Linear(2, 1), "mse", (torch.zeros(1, 2), torch.zeros(1, 1)))
    rooms = {"budget": 2**30, "logit_room": None, "pair_room": 2**30}
    with pytest.raises(UnmappedModuleError, match=reason):
        ShardedLinearisation(problem, (), reading=reading, bends=True, **rooms)
