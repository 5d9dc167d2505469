"""Tiny Hugging Face models of every kind of head, each with a batch that carries labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from torch import nn

VOCABULARY, LENGTH, BATCH = 24, 7, 3
Case = tuple[nn.Module, dict[str, Any]]


def _numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape or (BATCH, LENGTH), generator=_numbers(seed))


def _labelled(seed: int = 1, *, masked: bool = False) -> dict[str, Any]:
    ids = tokens(0)
    labels = tokens(seed) if masked else ids.clone()
    labels[0, 2] = labels[1, 5:] = -100
    return {"input_ids": ids, "labels": labels}


_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
}
_CAUSAL = {**_BERT, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1}
_CAUSAL = {**{k: v for k, v in _CAUSAL.items() if k != "type_vocab_size"}, "eos_token_id": 2}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VIT = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}


def _bert(**more: Any) -> Any:
    return t.BertConfig(**_BERT, **more)


def _images() -> torch.Tensor:
    return torch.randn(BATCH, 3, 8, 8, generator=_numbers(2))


def _classes(count: int = 3) -> torch.Tensor:
    return torch.randint(0, count, (BATCH,), generator=_numbers(3))


def _question() -> dict[str, Any]:
    return {
        "input_ids": tokens(),
        "start_positions": torch.tensor([1, 0, LENGTH]),  # the last lies outside: ignored
        "end_positions": torch.tensor([4, 2, LENGTH]),
    }


def _bert_pretraining() -> Case:
    batch = _labelled(masked=True)
    return t.BertForPreTraining(_bert()), {**batch, "next_sentence_label": _classes(2)}


def _prophetnet() -> Case:
    config = t.ProphetNetConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        encoder_ffn_dim=12,
        num_encoder_layers=1,
        num_encoder_attention_heads=2,
        decoder_ffn_dim=12,
        num_decoder_layers=1,
        num_decoder_attention_heads=2,
        max_position_embeddings=32,
        ngram=2,
        num_buckets=4,
        relative_max_distance=8,
        dropout=0.0,
        pad_token_id=0,
        decoder_start_token_id=2,
    )
    return t.ProphetNetForConditionalGeneration(config), _labelled()


def _whisper() -> Case:
    config = t.WhisperConfig(
        **_SEQ2SEQ, num_mel_bins=4, max_source_positions=8, max_target_positions=16
    )
    model = t.WhisperForConditionalGeneration(config)
    features = torch.randn(BATCH, 4, 16, generator=_numbers(4))
    return model, {"input_features": features, "labels": _labelled()["labels"]}


def _clip() -> Case:
    text = {**_BERT, "projection_dim": 6}
    text.pop("type_vocab_size")
    config = t.CLIPConfig(
        text_config={**text, "eos_token_id": 2},
        vision_config={**_VIT, "projection_dim": 6},
        projection_dim=6,
    )
    batch = {"input_ids": tokens(), "pixel_values": _images(), "return_loss": True}
    return t.CLIPModel(config), batch


def _masked_images() -> Case:
    config = t.ViTConfig(**_VIT, encoder_stride=4)
    hidden = torch.zeros(BATCH, 4, dtype=torch.bool)
    hidden[:, 1] = True
    return t.ViTForMaskedImageModeling(config), {
        "pixel_values": _images(),
        "bool_masked_pos": hidden,
    }


def _segformer() -> Case:
    config = t.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 8],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=3,
    )
    labels = torch.randint(0, 3, (BATCH, 8, 8), generator=_numbers(5))
    return t.SegformerForSemanticSegmentation(config), {"pixel_values": _images(), "labels": labels}


def _multiple_choice() -> Case:
    batch = {"input_ids": tokens(0, BATCH, 4, LENGTH), "labels": _classes(4)}
    return t.BertForMultipleChoice(_bert()), batch


HEADS: dict[str, Callable[[], Case]] = {
    "GPT2LMHeadModel": lambda: (t.GPT2LMHeadModel(t.GPT2Config(**_GPT2)), _labelled()),
    "LlamaForCausalLM": lambda: (t.LlamaForCausalLM(t.LlamaConfig(**_CAUSAL)), _labelled()),
    "Qwen2ForCausalLM": lambda: (t.Qwen2ForCausalLM(t.Qwen2Config(**_CAUSAL)), _labelled()),
    "GPTNeoXForCausalLM": lambda: (t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**_CAUSAL)), _labelled()),
    "OPTForCausalLM": lambda: (
        t.OPTForCausalLM(t.OPTConfig(**_CAUSAL, ffn_dim=12, word_embed_proj_dim=8)),
        _labelled(),
    ),
    "BertLMHeadModel": lambda: (t.BertLMHeadModel(_bert(is_decoder=True)), _labelled()),
    "MixtralForCausalLM": lambda: (
        t.MixtralForCausalLM(
            t.MixtralConfig(**_CAUSAL, num_local_experts=3, output_router_logits=True)
        ),
        _labelled(),
    ),
    "XLNetLMHeadModel": lambda: (
        t.XLNetLMHeadModel(
            t.XLNetConfig(vocab_size=VOCABULARY, d_model=8, n_layer=1, n_head=2, d_inner=12)
        ),
        _labelled(),
    ),
    "XLMWithLMHeadModel": lambda: (
        t.XLMWithLMHeadModel(
            t.XLMConfig(vocab_size=VOCABULARY, emb_dim=8, n_layers=1, n_heads=2, n_langs=1)
        ),
        _labelled(),
    ),
    "BertForMaskedLM": lambda: (t.BertForMaskedLM(_bert()), _labelled()),
    "RobertaForMaskedLM": lambda: (
        t.RobertaForMaskedLM(t.RobertaConfig(**_BERT)),
        _labelled(masked=True),
    ),
    "DistilBertForMaskedLM": lambda: (
        t.DistilBertForMaskedLM(
            t.DistilBertConfig(vocab_size=VOCABULARY, dim=8, n_layers=1, n_heads=2, hidden_dim=12)
        ),
        _labelled(),
    ),
    "ElectraForMaskedLM": lambda: (
        t.ElectraForMaskedLM(t.ElectraConfig(**_BERT, embedding_size=8)),
        _labelled(),
    ),
    "AlbertForMaskedLM": lambda: (
        t.AlbertForMaskedLM(t.AlbertConfig(**_BERT, embedding_size=8)),
        _labelled(),
    ),
    "BertForPreTraining": _bert_pretraining,
    "BertForSequenceClassification": lambda: (
        t.BertForSequenceClassification(_bert(num_labels=3)),
        {"input_ids": tokens(), "labels": _classes()},
    ),
    "BertForSequenceClassification, several labels": lambda: (
        t.BertForSequenceClassification(
            _bert(num_labels=3, problem_type="multi_label_classification")
        ),
        {"input_ids": tokens(), "labels": torch.eye(3)[_classes()]},
    ),
    "BertForSequenceClassification, regression": lambda: (
        t.BertForSequenceClassification(_bert(num_labels=1)),
        {"input_ids": tokens(), "labels": torch.tensor([0.3, -1.0, 2.0])},
    ),
    "BertForSequenceClassification, several numbers": lambda: (
        t.BertForSequenceClassification(_bert(num_labels=2, problem_type="regression")),
        {"input_ids": tokens(), "labels": torch.randn(BATCH, 2, generator=_numbers(6))},
    ),
    "GPT2ForSequenceClassification": lambda: (
        t.GPT2ForSequenceClassification(t.GPT2Config(**_GPT2, num_labels=3)),
        {"input_ids": tokens(), "labels": _classes()},
    ),
    "BertForTokenClassification": lambda: (
        t.BertForTokenClassification(_bert(num_labels=VOCABULARY)),
        _labelled(),
    ),
    "BertForNextSentencePrediction": lambda: (
        t.BertForNextSentencePrediction(_bert()),
        {"input_ids": tokens(), "labels": _classes(2)},
    ),
    "BertForQuestionAnswering": lambda: (t.BertForQuestionAnswering(_bert()), _question()),
    "ElectraForQuestionAnswering": lambda: (
        t.ElectraForQuestionAnswering(t.ElectraConfig(**_BERT, embedding_size=8)),
        _question(),
    ),
    "BertForMultipleChoice": _multiple_choice,
    "T5ForConditionalGeneration": lambda: (
        t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=VOCABULARY,
                d_model=8,
                d_kv=4,
                d_ff=12,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        _labelled(),
    ),
    "BartForConditionalGeneration": lambda: (
        t.BartForConditionalGeneration(t.BartConfig(**_SEQ2SEQ)),
        _labelled(),
    ),
    "PegasusForConditionalGeneration": lambda: (
        t.PegasusForConditionalGeneration(t.PegasusConfig(**_SEQ2SEQ)),
        _labelled(),
    ),
    "MarianMTModel": lambda: (
        t.MarianMTModel(t.MarianConfig(**_SEQ2SEQ, decoder_vocab_size=VOCABULARY)),
        _labelled(),
    ),
    "M2M100ForConditionalGeneration": lambda: (
        t.M2M100ForConditionalGeneration(t.M2M100Config(**_SEQ2SEQ)),
        _labelled(),
    ),
    "BlenderbotForConditionalGeneration": lambda: (
        t.BlenderbotForConditionalGeneration(t.BlenderbotConfig(**_SEQ2SEQ)),
        _labelled(),
    ),
    "ProphetNetForConditionalGeneration": _prophetnet,
    "WhisperForConditionalGeneration": _whisper,
    "ViTForImageClassification": lambda: (
        t.ViTForImageClassification(t.ViTConfig(**_VIT)),
        {"pixel_values": _images(), "labels": _classes()},
    ),
    "DeiTForImageClassification": lambda: (
        t.DeiTForImageClassification(t.DeiTConfig(**_VIT)),
        {"pixel_values": _images(), "labels": _classes()},
    ),
    "ViTForMaskedImageModeling": _masked_images,
    "SegformerForSemanticSegmentation": _segformer,
    "CLIPModel": _clip,
}


def head(name: str) -> Case:
    """The model in evaluation mode with weights far from zero, and its batch."""
    torch.manual_seed(0)
    model, batch = HEADS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            # Initial weights of 0.02 would give the same loss for every reading of the labels.
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=_numbers(7)))
    return model.eval(), batch
