"""Random layers of every family that is read, inside small models of random configuration."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.engines.tangent.reading import UnmappedModuleError, read_module
from curvatlas.errors import DifferentiationError
from curvatlas.zoo.models import GPT, GPTConfig, ViT, ViTConfig
from layer_oracles import Seen, differences, prepared, seen_layers

TOKENS = 13
_ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "quick_gelu", "relu2", "gelu_pytorch_tanh")
_KINDS = ("sliding_attention", "full_attention")


class Draw(random.Random):
    """Random choices in the words of configurations."""

    def coin(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def rope(self, *, partial: bool = False) -> dict[str, Any]:
        options: dict[str, Any] = {"rope_type": "default", "rope_theta": self.choice([1e2, 1e4])}
        if not partial and self.coin(0.3):
            options |= {"rope_type": self.choice(["linear", "yarn"]), "factor": 3.0}
        return options | ({"partial_rotary_factor": 0.5} if partial else {})


@dataclass
class Sizes:
    """Sizes that fit each other."""

    heads: int
    shared: int
    head: int
    hidden: int
    activation: str
    length: int
    samples: int

    @classmethod
    def drawn(cls, draw: Draw) -> Sizes:
        heads = draw.choice([1, 2, 3, 4])
        return cls(
            heads=heads,
            shared=draw.choice([g for g in range(1, heads + 1) if heads % g == 0]),
            head=draw.choice([4, 8]),
            hidden=draw.randint(3, 14),
            activation=draw.choice(_ACTIVATIONS),
            length=draw.randint(2, 7),
            samples=draw.randint(1, 3),
        )

    @property
    def width(self) -> int:
        return self.heads * self.head

    def usual(self, **others: Any) -> dict[str, Any]:
        return {
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_hidden_layers": 2,
            "intermediate_size": self.hidden,
            "hidden_act": self.activation,
            "vocab_size": TOKENS,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            **others,
        }

    def grouped(self, draw: Draw, **others: Any) -> dict[str, Any]:
        options = self.usual(num_key_value_heads=self.shared, rope_parameters=draw.rope())
        return options | {"attention_bias": draw.coin(), **others}

    def windowed(self, draw: Draw, **others: Any) -> dict[str, Any]:
        kinds = {"layer_types": [draw.choice(_KINDS), draw.choice(_KINDS)]}
        return self.grouped(draw, sliding_window=draw.randint(1, 4), **kinds, **others)


Options = Callable[[Draw, Sizes], dict[str, Any]]


def _gemma3(draw: Draw, s: Sizes) -> dict[str, Any]:
    options = s.windowed(draw, head_dim=s.head + 2, query_pre_attn_scalar=draw.randint(1, 9))
    rope = {kind: {"rope_type": "default", "rope_theta": 1e3} for kind in _KINDS}
    return options | {"hidden_activation": s.activation, "rope_parameters": rope}


def _falcon(draw: Draw, s: Sizes) -> dict[str, Any]:
    new, queries = draw.coin(), draw.coin()
    return s.usual(
        ffn_hidden_size=s.hidden,
        activation=s.activation,
        new_decoder_architecture=new,
        multi_query=queries,
        parallel_attn=new or draw.coin(),
        num_kv_heads=s.shared if new else s.heads,
        num_ln_in_parallel_attn=draw.choice([1, 2]) if new else None,
        alibi=draw.coin(),
        bias=draw.coin(),
    )


def _modern_bert(draw: Draw, s: Sizes) -> dict[str, Any]:
    rope = {kind: {"rope_type": "default", "rope_theta": 1e3} for kind in _KINDS}
    biases = {f"{name}_bias": draw.coin() for name in ("norm", "mlp", "attention")}
    kinds = [draw.choice(_KINDS), draw.choice(_KINDS)]
    own = {"hidden_activation": s.activation, "local_attention": 2 * draw.randint(1, 3)}
    return s.usual(layer_types=kinds, rope_parameters=rope, **own, **biases)


def _bart(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": 60,
        "d_model": s.width,
        "max_position_embeddings": 32,
        "activation_function": s.activation,
        **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": s.heads for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": s.hidden for part in ("encoder", "decoder")},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }


def _t5(draw: Draw, s: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": TOKENS,
        "d_model": draw.choice([4, 6, 8]),
        "d_kv": draw.choice([2, 4]),
        "num_heads": s.heads,
        "d_ff": s.hidden,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "feed_forward_proj": draw.choice(["relu", "gated-gelu", "gated-silu"]),
        "relative_attention_num_buckets": draw.choice([4, 8, 32]),
        "relative_attention_max_distance": draw.choice([5, 128]),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def _few(s: Sizes, **names: str) -> dict[str, Any]:
    """Sizes under a family's own names."""
    values = {"width": s.width, "heads": s.heads, "layers": 2, "hidden": s.hidden}
    values |= {"activation": s.activation, "vocabulary": TOKENS}
    return {"vocab_size": TOKENS} | {theirs: values[ours] for ours, theirs in names.items()}


_GPT = {"width": "n_embd", "heads": "n_head", "layers": "n_layer", "hidden": "n_inner"}
_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}

LANGUAGE: dict[str, Options] = {
    "GPT2": lambda draw, s: {
        **_few(s, **_GPT, activation="activation_function"),
        "scale_attn_weights": draw.coin(),
        "scale_attn_by_inverse_layer_idx": draw.coin(),
        **_PAD,
    },
    "GPTNeo": lambda draw, s: {
        **_few(s, width="hidden_size", heads="num_heads", layers="num_layers"),
        "intermediate_size": s.hidden,
        "activation_function": s.activation,
        "attention_types": [[["global", "local"], 1]],
        "window_size": draw.randint(1, 4),
        "max_position_embeddings": 32,
        **_PAD,
    },
    "GPTJ": lambda draw, s: {
        **_few(s, **_GPT, activation="activation_function"),
        "rotary_dim": draw.choice([2, 4]),
        **_PAD,
    },
    "GPTNeoX": lambda draw, s: s.usual(
        use_parallel_residual=draw.coin(),
        attention_bias=draw.coin(),
        rope_parameters=draw.rope(partial=draw.coin()),
    ),
    "Falcon": _falcon,
    "Bloom": lambda draw, s: s.usual(n_layer=2, n_head=s.heads),
    "Mpt": lambda draw, s: {
        **_few(s, width="d_model", heads="n_heads", layers="n_layers"),
        "max_seq_len": 16,
        **_PAD,
    },
    "OPT": lambda draw, s: s.usual(
        ffn_dim=s.hidden,
        activation_function=s.activation,
        word_embed_proj_dim=s.width,
        do_layer_norm_before=draw.coin(),
        enable_bias=draw.coin(),
        layer_norm_elementwise_affine=draw.coin(0.7),
    ),
    "Llama": lambda draw, s: s.grouped(draw, mlp_bias=draw.coin()),
    "Mistral": lambda draw, s: s.grouped(
        draw, sliding_window=draw.choice([None, 2, 3]), head_dim=s.head + 2
    ),
    "Qwen2": lambda draw, s: s.windowed(draw, use_sliding_window=True),
    "Qwen3": lambda draw, s: s.windowed(draw, head_dim=s.head + 2, use_sliding_window=True),
    "SmolLM3": lambda draw, s: s.grouped(draw, no_rope_layers=[int(draw.coin()), 1]),
    "Olmo": lambda draw, s: s.grouped(draw),
    "Olmo2": lambda draw, s: s.grouped(draw),
    "Olmo3": lambda draw, s: s.windowed(draw),
    "Ministral": lambda draw, s: s.windowed(draw, head_dim=s.head),
    "Nemotron": lambda draw, s: s.grouped(draw, head_dim=s.head, mlp_bias=draw.coin()),
    "Arcee": lambda draw, s: s.grouped(draw, mlp_bias=draw.coin()),
    "Helium": lambda draw, s: s.grouped(draw, head_dim=s.head, mlp_bias=draw.coin()),
    "Ernie4_5": lambda draw, s: s.grouped(draw, use_bias=draw.coin(), head_dim=s.head),
    "Glm": lambda draw, s: s.grouped(draw, head_dim=s.head + 4),
    "Glm4": lambda draw, s: s.grouped(draw, head_dim=s.head),
    "BioGpt": lambda draw, s: s.usual(),
    "Granite": lambda draw, s: s.grouped(
        draw, attention_multiplier=0.3, residual_multiplier=0.7, mlp_bias=draw.coin()
    ),
    "Gemma": lambda draw, s: s.grouped(draw, head_dim=s.head + 2, hidden_activation=s.activation),
    "Gemma2": lambda draw, s: s.windowed(
        draw,
        head_dim=s.head + 2,
        hidden_activation=s.activation,
        query_pre_attn_scalar=draw.randint(1, 9),
        attn_logit_softcapping=draw.choice([None, 1.0, 5.0]),
    ),
    "Gemma3Text": _gemma3,
    "Phi": lambda draw, s: s.grouped(
        draw, rope_parameters=draw.rope(partial=True), qk_layernorm=draw.coin()
    ),
    "Phi3": lambda draw, s: s.grouped(
        draw,
        rope_parameters=draw.rope(partial=True)
        | {"partial_rotary_factor": draw.choice([0.5, 1.0])},
        sliding_window=draw.choice([None, 3]),
        original_max_position_embeddings=32,
    ),
    "Starcoder2": lambda draw, s: s.grouped(draw, use_bias=draw.coin(), sliding_window=None),
    "StableLm": lambda draw, s: s.grouped(
        draw,
        rope_parameters=draw.rope(partial=True),
        use_parallel_residual=draw.coin(),
        qk_layernorm=draw.coin(),
        use_qkv_bias=draw.coin(),
    ),
    "Cohere": lambda draw, s: s.grouped(draw, use_qk_norm=draw.coin()),
    "Cohere2": lambda draw, s: s.windowed(draw),
    "Bert": lambda draw, s: s.usual(is_decoder=draw.coin(0.3)),
    "Roberta": lambda draw, s: s.usual(),
    "Electra": lambda draw, s: s.usual(embedding_size=4),
    "DistilBert": lambda draw, s: {
        **_few(s, width="dim", heads="n_heads", layers="n_layers", hidden="hidden_dim"),
        "activation": draw.choice(["gelu", "relu"]),
    },
    "Albert": lambda draw, s: s.usual(embedding_size=4, inner_group_num=draw.choice([1, 2])),
    "ModernBert": _modern_bert,
    "Bart": _bart,
    "MBart": _bart,
    "Marian": _bart,
    "Pegasus": _bart,
    "T5": _t5,
    "CLIPText": lambda draw, s: s.usual(),
    "SiglipText": lambda draw, s: s.usual(),
}
VISION: dict[str, Options] = {
    "ViT": lambda draw, s: s.usual(qkv_bias=draw.coin()),
    "DeiT": lambda draw, s: s.usual(qkv_bias=draw.coin()),
    "Dinov2": lambda draw, s: s.usual(
        qkv_bias=draw.coin(), mlp_ratio=1, use_swiglu_ffn=draw.coin(), layerscale_value=0.5
    ),
    "CLIPVision": lambda draw, s: s.usual(),
    "SiglipVision": lambda draw, s: s.usual(),
    "MetaClip2Vision": lambda draw, s: s.usual(),
}
OTHERS = ("torch encoder", "torch translator", "zoo GPT", "zoo ViT")
FAMILIES = (*LANGUAGE, *VISION, *OTHERS)


@dataclass
class Case:
    """A model, a call of it, and the layers to look at."""

    model: nn.Module
    inputs: Any  # a mapping of keywords, or the one argument
    what: str

    def run(self) -> Any:
        if isinstance(self.inputs, dict):
            return self.model(**self.inputs)
        return self.model(self.inputs)

    def layers(self) -> list[nn.Module]:
        found = []
        for module in self.model.modules():
            try:
                spec, _ = read_module(module)
            except UnmappedModuleError:
                continue
            # alone, a layer does not have the table of learned terms that another one keeps
            if spec.distances is None or any(isinstance(m, nn.Embedding) for m in module.modules()):
                found.append(module)
        return [m for m in found if not isinstance(m, nn.MultiheadAttention)]


def drawn_case(draw: Draw, family: str, *, head: str = "Model") -> Case:
    """A model of the family with random options and a random batch.

    head: what the model's class ends in; where the family has none such, the bare model.
    """
    sizes = Sizes.drawn(draw)
    if family in OTHERS:
        return _other(draw, family, sizes)
    import transformers

    vision = family in VISION
    options = (VISION if vision else LANGUAGE)[family](draw, sizes)
    if vision:
        options |= {"image_size": 4, "patch_size": 2, "num_channels": 1}
    body = getattr(transformers, f"{family.removesuffix('Text')}TextModel", None)
    body = body if family.endswith("Text") and body else getattr(transformers, f"{family}Model")
    if head != "Model":  # a text model's own body is no "CLIPModel"
        body = getattr(transformers, f"{family.removesuffix('Text')}{head}", body)
    config = getattr(transformers, f"{family}Config")(**options)
    config._attn_implementation = draw.choice(["eager", "sdpa"]) if body._supports_sdpa else "eager"
    model = body(config)
    stacks = LANGUAGE.get(family) in (_bart, _t5)
    alone = stacks and draw.coin()  # the encoder without its decoder
    model = model.encoder if alone else model
    adapted = draw.coin(0.3) and _with_lora(draw, model)
    if vision:
        batch = {"pixel_values": torch.randn(sizes.samples, 1, 4, 4, dtype=torch.float64)}
    else:
        batch = _tokens(draw, sizes)
    if stacks and not alone:
        shape = (sizes.samples, draw.randint(1, 6))
        batch["decoder_input_ids"] = torch.randint(2, TOKENS, shape)
    padding = batch["attention_mask"].tolist() if "attention_mask" in batch else None
    what = f"{family} {options} {config._attn_implementation} padding {padding} LoRA {adapted}"
    return Case(prepared(model), batch, what)


def _tokens(draw: Draw, sizes: Sizes) -> dict[str, Tensor]:
    n, length = sizes.samples, sizes.length
    batch = {"input_ids": torch.randint(2, TOKENS, (n, length))}
    side = draw.choice(["none", "right", "right", "left"])
    if side != "none":
        mask = torch.ones(n, length, dtype=torch.long)
        for row in mask:
            cut = draw.randint(1, length)
            row[cut:] = 0
        batch["attention_mask"] = mask if side == "right" else mask.flip(1)
    return batch


def _with_lora(draw: Draw, model: nn.Module) -> list[str]:
    """Adapters on some linear layers of the blocks; False without peft."""
    try:
        import peft
    except ImportError:
        return []
    linear = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D", "FalconLinear")
        and any(part.isdigit() for part in name.split("."))
    ]
    targets = draw.sample(sorted(set(linear)), draw.randint(1, len(set(linear))))
    config = peft.LoraConfig(
        r=draw.randint(1, 3), lora_alpha=2, target_modules=targets, lora_bias=draw.coin()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return targets


def _translator(draw: Draw, s: Sizes) -> Case:
    """Torch's encoder and decoder at inputs of two lengths."""
    options = {
        "norm_first": draw.coin(),
        "batch_first": draw.coin(),
        "bias": draw.coin(),
        "activation": draw.choice(["relu", "gelu"]),
    }
    model = nn.Transformer(s.width, s.heads, 2, 2, s.hidden, **options)
    length = draw.randint(1, 6)
    inputs: dict[str, Tensor] = {
        "src": torch.randn(s.samples, s.length, s.width, dtype=torch.float64),
        "tgt": torch.randn(s.samples, length, s.width, dtype=torch.float64),
    }
    if not options["batch_first"]:
        inputs = {name: x.transpose(0, 1) for name, x in inputs.items()}
    if draw.coin():
        inputs["tgt_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
    rest = _tokens(draw, s).get("attention_mask")
    if rest is not None:
        inputs |= dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), rest == 0)
    return Case(prepared(model), inputs, f"torch translator {options} {s} {length} {rest}")


def _other(draw: Draw, family: str, s: Sizes) -> Case:
    if family == "torch translator":
        return _translator(draw, s)
    if family == "torch encoder":
        options = {
            "norm_first": draw.coin(),
            "batch_first": draw.coin(),
            "bias": draw.coin(),
            "activation": draw.choice(["relu", "gelu"]),
        }
        layer = nn.TransformerEncoderLayer(s.width, s.heads, s.hidden, **options)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        x = torch.randn(s.samples, s.length, s.width, dtype=torch.float64)
        x = x if options["batch_first"] else x.transpose(0, 1)
        masks: dict[str, Tensor] = {}
        if draw.coin():
            masks["mask"] = torch.ones(s.length, s.length, dtype=torch.bool).triu(1)
        if draw.coin():
            rest = _tokens(draw, s).get("attention_mask")
            masks |= {} if rest is None else {"src_key_padding_mask": rest == 0}
        return Case(prepared(model), {"src": x, **masks}, f"{family} {options} {s} {masks}")
    options = {
        "d_model": s.width,
        "n_heads": s.heads,
        "n_kv_heads": s.shared,
        "d_ff": s.hidden,
        "norm": draw.choice(["layer", "rms"]),
        "norm_first": draw.coin(),
        "activation": draw.choice(["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]),
        "bias": draw.coin(),
        "softmax": draw.coin(0.8),
    }
    if family == "zoo GPT":
        options["positions"] = draw.choice(["learned", "rope", "none"])
        model = GPT(GPTConfig(vocabulary=TOKENS, context=8, n_layers=2, **options))
        batch = torch.randint(0, TOKENS, (s.samples, s.length))
    else:
        model = ViT(ViTConfig(image_size=4, n_layers=2, **options))
        batch = torch.randn(s.samples, 4, 4, dtype=torch.float64)
    return Case(prepared(model), batch, f"{family} {options} {s}")


def layer_case(seed: int) -> tuple[str, str]:
    """One layer of a random model against double backward; verdict and what was tried."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = drawn_case(draw, family)
    layers = case.layers()
    if not layers:
        return "WRONG", f"{case.what}: no layer is read"
    try:
        calls = seen_layers(case.model, case.run, layers)
    except UnmappedModuleError as error:
        return "refused", f"{case.what}: {error}"
    seen: Seen = draw.choice(calls)
    names = [name for name, _ in seen.module.named_parameters()]
    view: dict[str, Any] = {}
    if draw.coin(0.3):
        view = {
            part: draw.sample(names, draw.randint(1, len(names))) for part in ("moving", "wanted")
        }
    errors = differences(seen, columns=[draw.choice([1, 2, 3])], **view)
    worst = max(errors, key=lambda part: errors[part])
    verdict = "equal" if errors[worst] <= 1e-11 else "WRONG"
    return verdict, f"{errors[worst]:.1e} in {worst}: {case.what} {view or 'whole'}"


_HEADS = ("Model", "ForCausalLM", "ForMaskedLM", "ForSequenceClassification")


def model_case(seed: int) -> tuple[str, str]:
    """Products of a random whole model by both engines; verdict and what was tried.

    Where the hand-written engine refuses the model, that is the verdict.
    """
    draw = Draw(seed)
    torch.manual_seed(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = "ForImageClassification" if family in VISION else draw.choice(_HEADS)
        if family.endswith("Text") or LANGUAGE.get(family) in (_bart, _t5):
            head = "Model"
        case = drawn_case(draw, family, head=head)
        problem = _problem(draw, case)
        operator = draw.choice([ca.Hessian, ca.GaussNewton, ca.FunctionalHessian])
        columns = torch.randn(problem.size, draw.randint(1, 3), dtype=torch.float64)
        tried = f"{operator.__name__} of {type(case.model).__name__} {case.what}"
        try:
            scale = float((ca.Hessian(problem, engine="autograd") @ columns).norm())
        except DifferentiationError as error:
            # Rows that see no key, read by the loss: Bloom's checks notice that autograd's gradient
            # of softmax(s + the least number) is none of what was computed.
            return "refused", f"{error} {tried}"
        names = draw.sample(list(problem.parameter_names), min(4, len(problem.parameter_names)))
        products = []
        try:
            for engine in ("autograd", "tape", "tangent"):
                matrix = operator(problem, engine=engine)  # type: ignore[arg-type]
                view = matrix[_indices(problem, names[:2]), _indices(problem, names[2:] or names)]
                part = columns[: view.shape[1]] / columns[: view.shape[1]].norm()
                products.append((matrix @ columns, view @ part))
        except UnmappedModuleError as error:
            if "reading the model failed" in str(error):
                raise
            return "refused", f"{error} {tried}"
    exact, *others = products
    error = max(
        float((a - b).norm()) / scale for ours in others for a, b in zip(ours, exact, strict=True)
    )
    return "equal" if error <= 1e-11 else "WRONG", f"{error:.1e} {problem.engine} {tried}"


def _indices(problem: ca.Problem, names: list[str]) -> Tensor:
    places = zip(problem.layout.names, problem.layout.starts, problem.layout.sizes, strict=True)
    return torch.cat([torch.arange(start, start + size) for n, start, size in places if n in names])


def _problem(draw: Draw, case: Case) -> ca.Problem:
    """Squared error of hidden states, cross-entropy of logits, some targets ignored."""
    with torch.no_grad():
        result = case.run()
    if not isinstance(result, Tensor):
        result = result["logits"] if "logits" in result else result["last_hidden_state"]
    if result.ndim == 3 and draw.coin():
        targets, loss = torch.randint(0, result.shape[-1], result.shape[:-1]), "cross_entropy"
        targets[0, : draw.randint(0, result.shape[1] - 1)] = -100
    elif result.ndim == 2 and draw.coin():
        targets, loss = torch.randint(0, result.shape[-1], result.shape[:1]), "cross_entropy"
    else:
        targets, loss = torch.randn_like(result), "mse"
    return ca.Problem(case.model, loss, [(case.inputs, targets)])
