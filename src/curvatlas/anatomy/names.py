"""What a parameter's name and module say about its role: one table for all families.

Names are compared in lower case. A leaf is the module that holds ``weight`` and ``bias``
("q_proj"), or the attribute itself for a bare parameter ("cls_token", "in_proj_weight").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# role → leaf names, inside an attention or beside another of them
_PROJECTIONS: dict[str, frozenset[str]] = {
    "query": _words(
        "query queries q q_proj q_lin wq w_q to_q q_attn query_proj linear_q w_query project_q "
        "q_head q_b_proj q_up_proj"
    ),
    "key": _words("key keys k k_proj k_lin wk w_k to_k key_proj linear_k w_key project_k k_head"),
    "value": _words(
        "value values v v_proj v_lin wv w_v to_v value_proj linear_v w_value project_v v_head"
    ),
    "query_down": _words("q_a_proj q_down_proj"),  # queries through a bottleneck
    "key_value_down": _words("kv_a_proj_with_mqa kv_a_proj kv_down_proj"),
    "key_value": _words("kv to_kv kv_proj wkv w_kv kv_b_proj kv_up_proj kv_linear linear_kv"),
    "query_key_value": _words("query_key_value c_attn in_proj att_proj"),
}
_QUERY_KEY_VALUE = re.compile(r"(^|_)w?qkv(_|$)")  # qkv, to_qkv, Wqkv, qkv_proj, …
# roles of one projection each: two different ones side by side make an attention
_SINGLE = ("query", "key", "value")
# leaf names of the output projection, inside an attention
_OUTPUT = _words(
    "output o o_proj out_proj out_lin wo w_o to_out c_proj dense proj out linear_out output_proj "
    "proj_out attn_out attention_out fc_o projection projection_layer post_proj"
)
# role → leaf names, inside a feed-forward part or beside an attention
_FEED_FORWARD: dict[str, frozenset[str]] = {
    "up": _words(
        "up up_proj fc1 linear1 lin1 c_fc dense_h_to_4h fc_in wi wi_1 w_up linear_1 w_in "
        "linear_fc1 proj_up intermediate_dense layer_1 ffn ffw_layer_1 input_linear proj_in"
    ),
    "gate": _words("gate gate_proj wi_0 w_gate proj_up_gate"),
    "down": _words(
        "down down_proj fc2 linear2 lin2 c_proj dense_4h_to_h fc_out wo w_down linear_2 w_out "
        "output linear_fc2 proj_down output_dense layer_2 ffn_output ffw_layer_2 output_linear "
        "proj_out"
    ),
    "gate_up": _words("gate_up_proj w12 gate_up"),
}
# Words that name a feed-forward role whatever stands around them.
_SPEAKING = _words("up gate down up_proj gate_proj down_proj gate_up_proj")
# Words that mean a feed-forward role only inside something called mlp, ffn, …
_VAGUE = _words(
    "c_proj output gate wo fc_out layer_1 layer_2 input_linear output_linear proj_in proj_out "
    "linear_fc1 linear_fc2 proj_up proj_down proj_up_gate intermediate_dense output_dense"
)
# Recurrences over tokens (Mamba, RWKV, gated delta rules) are known by what they keep.
_RECURRENT = _words("a_log dt_bias time_decay rg_lru recurrent_param igate_preact")
_MIXER: dict[str, frozenset[str]] = {
    "mixer_input": _words("in_proj linear_x"),
    "mixer_gate": _words("in_proj_z linear_y"),
    "mixer_output": _words("out_proj o_proj output linear_out"),
    "convolution": _words("conv1d conv_1d"),
    "selection": _words("x_proj"),  # B, C and the time step, from the token
    "time_step": _words("dt_proj dt"),
    "state_decay": _words("a_log a time_decay recurrent_param"),
    "skip": _words("d"),
}

_ATTENTION_WORD = re.compile(r"attn|attention|^sa$|^mha$|^self_att|multihead|multi_head")
_CROSS_WORD = re.compile(r"cross|encdec|enc_dec|encoder_attn|encoder_attention")
_FEED_FORWARD_WORD = re.compile(r"mlp|ffn|ffwd|feed_?forward|^ff$|denserelu|experts|intermediate")
_HEAD = _words(
    "lm_head head heads classifier pre_classifier score embed_out cls qa_outputs pooler "
    "output_projection out_head mc_head v_head to_logits unembed prediction_head fc_out"
)
_HEAD_WORD = re.compile(
    r"(_head|_classifier|_predictor|_predictions)$|^vocab_(transform|projector)$|^(predictions?|pred_layer)$|"
    r"^lm_loss$|^(text|visual|vision|image)_projection$|logit_(scale|bias)$"
)
_LAST_OF_HEAD = ("predictions", "decoder", "out_proj", "head")
_TOP_LEVEL_HEAD = _words("fc decoder unembedding readout output output_layer logits")
_LEARNT_TOKEN = re.compile(r"(^|_)(tokens?|embeds?|embeddings?|emb|newline|latents?)(_|$)")
_LAYER_SCALE = re.compile(r"^(lambda_?\d|gamma_\d|layer_scale_?\d?)$")
_EMBEDDING_WORD = re.compile(r"embed|^wte$|^wpe$|^tok|_emb$|^emb$|^shared$")
_POSITION_WORD = re.compile(r"pos(ition)?s?(_|$|e)|wpe|positional")
_RELATIVE = re.compile(r"relative|rel_pos|rel_embed|distance")
_TYPE_WORD = re.compile(r"token_type|segment|^type")
_PATCH_WORD = re.compile(r"patch|conv_proj|^to_patch")
_NORM_NAME = re.compile(r"norm|^ln|_ln$|^ln_?[0-9f]+$")
_GAMMA = {"weight", "gamma", "scale", "g", "gain", "a_2"}
_BETA = {"bias", "beta", "b", "shift", "b_2"}
# Wrappers that add a component without changing what the parameter is.
_TRANSPARENT = {"base_layer", "default", "original_module", "modules_to_save"}
_WRAPPED = {"linear", "module"}  # q_proj.linear is q_proj


@dataclass(frozen=True)
class Reading:
    """What one parameter is, before its layer is known."""

    sublayer: str
    role: str  # of the weight; "_bias" is already added for biases
    title: str  # last part of the canonical name: "query", "gamma", "token", "weight", …
    certain: bool = True  # False: only meaningful if the model has an attention
    norm: str | None = None  # path of the norm module, for gamma and beta


def read(name: str, modules: dict[str, nn.Module], dimensions: int) -> Reading | None:
    """The reading of a parameter, or None when its name says nothing we know."""
    path, _, attribute = name.rpartition(".")
    parts = [p for p in path.split(".") if p and p not in _TRANSPARENT]
    adapter = next((p for p in parts if p.startswith("lora_")), None)
    if adapter is not None:
        parts = parts[: parts.index(adapter)]
    words = [p.lower() for p in parts]
    attribute = attribute.lower()
    plain = attribute in ("weight", "bias")
    leaf = words[-1] if plain and words else re.sub(r"_(weight|bias)$", "", attribute)
    around = words[:-1] if plain else words
    if leaf in _WRAPPED and around and _is_projection(around[-1]):
        path = path.rpartition(".")[0]
        leaf, around = around[-1], around[:-1]
    if not plain:
        path = name  # a bare parameter stands where a linear map would, in its module
    bias = attribute == "bias" or attribute.endswith("_bias")

    reading = (
        _norm(name, words, attribute, modules, dimensions)
        or _mixer(path, leaf, around, modules)
        or _attention(path, leaf, around, modules)
        or _feed_forward(path, leaf, around, words, modules)
        or _embedding(path, leaf, words, attribute, modules)
        or _head(leaf, words, attribute)
        or _by_place(path, leaf, around, modules)
    )
    if reading is None or reading.norm is not None:
        return reading
    suffix = f"_{adapter.lower()}" if adapter else ""
    if bias:
        suffix += "_bias"
    # "head.bias" is called by its attribute, "blocks.0.query_bias" is not.
    title = reading.title if reading.sublayer == "head" else reading.title + suffix
    return Reading(reading.sublayer, reading.role + suffix, title, reading.certain)


# role → sublayer, for roles that are stated or seen rather than read from a name
_SUBLAYERS = {
    **dict.fromkeys((*_PROJECTIONS, "output", "relative_position"), "attention"),
    **dict.fromkeys((*_FEED_FORWARD, "router"), "ffn"),
    **dict.fromkeys(_MIXER, "mixer"),
    **dict.fromkeys(("gamma", "beta"), "norm"),
    **dict.fromkeys(
        [f"{kind}_embedding" for kind in ("token", "position", "type", "patch")] + ["class_token"],
        "embedding",
    ),
    "head": "head",
}


def declared(role: str, name: str, *, certain: bool = True) -> Reading:
    """The reading of a parameter whose role is stated: "up", or "ffn.mine" for one of your own."""
    sublayer, _, role = role.rpartition(".")
    plain = role.removesuffix("_bias").removeprefix("cross_")
    sublayer = sublayer or _SUBLAYERS.get(plain, "other")
    if not re.fullmatch(r"[A-Za-z_]\w*", role) or sublayer not in {*_SUBLAYERS.values(), "other"}:
        raise ValueError(
            f"{role!r} is no role: write a word such as query, up or gamma, or one of your own "
            f"behind its sublayer (ffn.mine; {', '.join(sorted(set(_SUBLAYERS.values())))})."
        )
    if sublayer == "norm":
        return Reading("norm", role, role, norm=name.rpartition(".")[0])
    attribute = name.rpartition(".")[2]
    bias = attribute == "bias" or attribute.endswith("_bias")
    if sublayer == "head":
        return Reading("head", role + "_bias" * bias, attribute, certain)
    full = role + "_bias" * (bias and not role.endswith("_bias"))
    title = full.replace("_embedding", "") if sublayer == "embedding" else full
    return Reading(sublayer, full, title, certain)


def own_role(name: str, modules: dict[str, nn.Module]) -> str:
    """The role of a parameter that has no reading: what its module is called, or is.

    A name that stands for a part of attention or feed-forward elsewhere is made longer: a learnt
    ``query`` of its own is no query projection.
    """
    path, _, attribute = name.rpartition(".")
    leaf = path.rpartition(".")[2]
    role = attribute
    if attribute in ("weight", "bias"):
        # A numbered linear map in a plain list has no name but its kind.
        role = leaf if leaf and not leaf.isdigit() else type(modules[path]).__name__.lower()
    role = f"{role}_weight" if role in {*_PROJECTIONS, *_FEED_FORWARD, "output", "head"} else role
    return f"{role}_bias" if attribute == "bias" else role


def _is_projection(word: str) -> bool:
    tables = (*_PROJECTIONS.values(), *_FEED_FORWARD.values(), _OUTPUT)
    return any(word in table for table in tables) or bool(_QUERY_KEY_VALUE.search(word))


def _norm(
    name: str, words: list[str], attribute: str, modules: dict[str, nn.Module], dimensions: int
) -> Reading | None:
    path = name.rpartition(".")[0]
    flat = dimensions <= 1 or attribute not in ("weight", "bias")  # (1, d, 1, 1) over images
    if not flat or not words or attribute not in _GAMMA | _BETA:
        return None
    owner = modules[path]
    named = _NORM_NAME.search(words[-1]) and not isinstance(owner, (nn.Linear, nn.Embedding))
    if "norm" not in type(owner).__name__.lower() and not named:
        return None
    role = "gamma" if attribute in _GAMMA else "beta"
    return Reading("norm", role, role, norm=path)


def _mixer(
    path: str, leaf: str, around: list[str], modules: dict[str, nn.Module]
) -> Reading | None:
    """Parts of a recurrence over tokens: none of them is an attention's, whatever it is called."""
    parent = path.rpartition(".")[0]
    kept: set[str] = set()
    for place in (path, parent, parent.rpartition(".")[0])[: len(around) + 1]:
        if place in modules:
            kept.update(name.lower() for name in modules[place]._modules)
            kept.update(name.lower() for name in modules[place]._parameters)
    if not kept & _RECURRENT:
        return None
    role = next((role for role, leaves in _MIXER.items() if leaf in leaves), leaf)
    if role in _SINGLE:
        role = f"mixer_{role}"
    return Reading("mixer", role, role)


def _attention(
    path: str, leaf: str, around: list[str], modules: dict[str, nn.Module]
) -> Reading | None:
    attentive = any(_ATTENTION_WORD.search(word) for word in around)
    attentive = attentive or _is_called(path, modules, "attention")
    parent = modules.get(path.rpartition(".")[0])
    torchs_own = isinstance(parent, nn.MultiheadAttention)
    if not attentive and any(_FEED_FORWARD_WORD.search(word) for word in around):
        return None  # RWKV calls the parts of its feed-forward key and value
    beside = _beside(path, modules)
    prefix = ""
    if any(_CROSS_WORD.search(word) for word in around) or _torch_cross(path, modules):
        prefix = "cross_"
    role = next((role for role, leaves in _PROJECTIONS.items() if leaf in leaves), None)
    if _QUERY_KEY_VALUE.search(leaf):
        role = "query_key_value"
    named = attentive or torchs_own or len(_projections_among(beside)) > 1
    # A value head is no attention's value, and Mamba's in_proj is none at all.
    if role is not None and (named or (role == "query_key_value" and leaf != "in_proj")):
        if role == "query_key_value" and "q_attn" in beside:
            role = "key_value"  # GPT-2's cross-attention keeps its query apart
        if role == "query" and _makes_twice(path, modules, _OUTPUT):
            role = "query_gate"
        return Reading("attention", prefix + role, prefix + role)
    if leaf.isdigit() and around and around[-1] in _OUTPUT:
        leaf, around = around[-1], around[:-1]  # to_out = Sequential(Linear, Dropout)
        beside = _beside(path.rpartition(".")[0], modules)
    elif leaf == "dense" and around and around[-1] == "output":
        leaf, around = "output", around[:-1]  # BERT's attention.output.dense
    inside = bool(around) and bool(_ATTENTION_WORD.search(around[-1]))
    if leaf in _OUTPUT and (inside or torchs_own or _projections_among(beside)):
        return Reading("attention", prefix + "output", prefix + "output")
    if inside and _RELATIVE.search(leaf):
        return Reading("attention", "relative_position", "relative_position")
    return None


def _makes_twice(path: str, modules: dict[str, nn.Module], takers: frozenset[str]) -> bool:
    """Whether a projection makes twice what the one called ``takers`` beside it takes.

    Qwen3-Next's queries bring gates of the heads, ModernBERT's up brings the gate.
    """
    maker, parent = modules.get(path), modules.get(path.rpartition(".")[0])
    return isinstance(maker, nn.Linear) and any(
        isinstance(taker, nn.Linear) and 2 * taker.in_features == maker.out_features
        for name, taker in (parent.named_children() if parent is not None else ())
        if name.lower() in takers
    )


def _projections_among(names: set[str]) -> set[str]:
    """Which of query, key, value and their fused forms stand among the names."""
    roles = {role for role in _PROJECTIONS if names & (_PROJECTIONS[role] - {"in_proj"})}
    if any(_QUERY_KEY_VALUE.search(name) for name in names):
        roles.add("query_key_value")
    return roles - {"query_down", "key_value_down"}


def _is_called(path: str, modules: dict[str, nn.Module], word: str) -> bool:
    """Whether the class of the module around a linear map, or around its list, says so."""
    parent = path.rpartition(".")[0]
    if isinstance(modules.get(parent), (nn.Sequential, nn.ModuleList)):
        parent = parent.rpartition(".")[0]
    return word in type(modules.get(parent)).__name__.lower()


def _torch_cross(path: str, modules: dict[str, nn.Module]) -> bool:
    """``multihead_attn`` means cross-attention in torch's decoder layer, and only there."""
    parent, attention, _ = path.partition("multihead_attn")
    layer = modules.get(parent.removesuffix("."))
    return bool(attention) and isinstance(layer, nn.TransformerDecoderLayer)


def _beside(path: str, modules: dict[str, nn.Module]) -> set[str]:
    """Lower-case names of the modules and bare parameters that share the leaf's parent."""
    parent = modules.get(path.rpartition(".")[0])
    if parent is None:
        return set()
    names = [n for n, _ in parent.named_children()]
    names += [re.sub(r"_(weight|bias)$", "", n) for n, _ in parent.named_parameters(recurse=False)]
    return {n.lower() for n in names}


def _feed_forward(
    path: str, leaf: str, around: list[str], words: list[str], modules: dict[str, nn.Module]
) -> Reading | None:
    beside = _beside(path, modules)
    routing = leaf == "router" or any("router" in word for word in around)
    if routing or (leaf == "gate" and "experts" in beside):
        return Reading("ffn", "router", "router")
    if "receptance" in beside and leaf in ("key", "value"):  # RWKV: relu(key x)², then value
        role = {"key": "up", "value": "down"}[leaf]
        return Reading("ffn", role, role)
    if leaf in ("w1", "w2", "w3"):  # Llama's own names: silu(w1 x) ⊙ w3 x, then w2
        gated = {"w1": "gate", "w2": "down", "w3": "up"}
        role = gated[leaf] if "w3" in beside else {"w1": "up", "w2": "down"}[leaf]
        if "w12" in beside:
            role = "down"
        return Reading("ffn", role, role, certain=False)
    inside = any(_FEED_FORWARD_WORD.search(word) for word in around)
    if not any(word in _HEAD or _HEAD_WORD.search(word) for word in words):
        inside = inside or any(_is_called(path, modules, word) for word in ("feedforward", "mlp"))
    named = leaf in ("dense", "conv1d")  # BERT and older ViT, SqueezeBERT
    if named and around and around[-1] in ("intermediate", "output"):
        role = "up" if around[-1] == "intermediate" else "down"
        return Reading("ffn", role, role, certain=False)
    for role, leaves in _FEED_FORWARD.items():
        if leaf in leaves and (inside or leaf not in _VAGUE):
            if role == "up" and _makes_twice(path, modules, _FEED_FORWARD["down"]):
                role = "gate_up"
            return Reading("ffn", role, role, certain=leaf in _SPEAKING)
    if leaf.isdigit() and inside:  # Sequential(Linear, activation, [dropout,] Linear)
        parent = modules[path.rpartition(".")[0]]
        linear = [n for n, child in parent.named_children() if isinstance(child, nn.Linear)]
        if len(linear) == 2 and leaf in linear:
            role = "up" if leaf == linear[0] else "down"
            return Reading("ffn", role, role, certain=False)
    return None


def _embedding(
    path: str, leaf: str, words: list[str], attribute: str, modules: dict[str, nn.Module]
) -> Reading | None:
    attentive = any(_ATTENTION_WORD.search(word) for word in words)
    if attribute not in ("weight", "bias"):
        if re.search(r"(cls|class)_?(token|embed)|class_embedding", attribute):
            return Reading("embedding", "class_token", "class_token")
        if re.search(r"(mask|dist|reg(ister)?)_?tokens?", attribute):
            return Reading("embedding", attribute, attribute)
        if _POSITION_WORD.search(attribute) and "bias" not in attribute:
            return Reading("embedding", "position_embedding", "position")
        if _LEARNT_TOKEN.search(attribute) and not attentive:
            return Reading("embedding", attribute, attribute)
        return None
    if any(_PATCH_WORD.search(word) for word in words):
        return Reading("embedding", "patch_embedding", "patch")
    owner = modules.get(path)
    table = isinstance(owner, nn.Embedding)
    if not table and not _EMBEDDING_WORD.search(leaf):
        return None
    if leaf == "embed_out":
        return None
    if leaf in ("emb", "embedding") and len(words) > 1:
        leaf = f"{words[-2]}_{leaf}"  # pos_emb.emb
    if _RELATIVE.search(leaf):
        return Reading("embedding", "relative_position", "relative_position")
    if _TYPE_WORD.search(leaf):
        return Reading("embedding", "type_embedding", "type")
    if _POSITION_WORD.search(leaf):
        return Reading("embedding", "position_embedding", "position")
    if isinstance(owner, nn.Linear):  # ALBERT's narrow tables are made wide by a linear map
        return Reading("embedding", "embedding_projection", "projection")
    return Reading("embedding", "token_embedding", "token")


def _head(leaf: str, words: list[str], attribute: str) -> Reading | None:
    first = next(
        (i for i, word in enumerate(words) if word in _HEAD or _HEAD_WORD.search(word)), None
    )
    if len(words) == 1 and words[0] in _TOP_LEVEL_HEAD:
        first = 0
    if first is None:
        bare = attribute not in ("weight", "bias") and _HEAD_WORD.search(leaf)
        if bare and not any(_ATTENTION_WORD.search(word) for word in words):
            return Reading("head", leaf, leaf)  # CLIP's logit_scale; Swin has one an attention
        return None
    # The last matrix is head.weight; what stands before it keeps its own name.
    title = [words[first]] if words[first] in ("pooler", "pre_classifier") else []
    title += [w for w in words[first + 1 :] if w not in _LAST_OF_HEAD]
    role = "head" if attribute in ("weight", "bias") else leaf
    return Reading("head", role, ".".join([*title, attribute]))


def _by_place(
    path: str, leaf: str, around: list[str], modules: dict[str, nn.Module]
) -> Reading | None:
    """A part of an attention or of a feed-forward part that has no common name: its own."""
    kind = type(modules.get(path.rpartition(".")[0])).__name__.lower()
    if _LAYER_SCALE.search(leaf) or "layerscale" in kind:
        # the first scales what attention adds to the stream, the second what the ffn adds
        numbers = re.findall(r"\d", leaf if "layerscale" not in kind else around[-1])
        return Reading("ffn" if numbers[-1:] == ["2"] else "attention", "layer_scale", leaf)
    if leaf == "reduction" and "downsample" in around:
        return Reading("embedding", "patch_merging", "patch_merging")
    if path in modules and _FEED_FORWARD_WORD.search(leaf) and list(modules[path].children()):
        return Reading("ffn", "down", "down")  # a bias added to what JetMoE's experts put out
    if leaf == "linear" and any(
        name.startswith("shared_transf") for name in _beside(path, modules)
    ):
        return Reading("mixer", "mixer_join", "mixer_join")  # Zamba's shared attention joins here
    if leaf == "projection" and "embeddings" in around:
        return Reading("embedding", "embedding_projection", "projection")
    for word in reversed(around):
        if _ATTENTION_WORD.search(word):
            return Reading("attention", leaf, leaf)
        if _FEED_FORWARD_WORD.search(word):
            return Reading("ffn", leaf, leaf, certain=False)
    return None
