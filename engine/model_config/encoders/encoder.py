"""Encoders of the BERT family as data: rules by which config.json is read, and the names of tensors.

`engine/model/encoder.py` builds the layers. Tensors get the names that decoders have: `renames` turn those
of a checkpoint into them.
"""

from collections.abc import Mapping
from typing import Any, Final

from ..architecture import Architecture, EncoderRule, spelled
from ..attention import Windows, layer_types
from ..fields import Fields, show
from ..moe import selected_by
from ..rope import LayerRopes, no_rope, one_rope, parse_rope
from .config import ClassifierConfig, EncoderActivation, EncoderConfig

_ACTIVATIONS: Final[dict[str, EncoderActivation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
}
"""Values of `hidden_act`."""
MAX_LABELS: Final = 1000


# ---------------------------------------------------------------------- names of tensors

BERT_NAMES: Final = (
    (r"^(bert|roberta|xlm_roberta|camembert|distilbert|mpnet|nomic_bert|gte|new|jina_embeddings_v3)\.", ""),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "model.embed_norm."),
    (r"^((encoder|transformer)\.)?layers?\.(\d+)\.", r"model.layers.\3."),
    (r"\.attention\.(?:self\.)?(query|key|value)\.", r".self_attn.\1."),
    (r"\.self_attn\.(q|k|v)(uery|ey|alue)\.", r".self_attn.\1_proj."),
    (r"\.attention\.attn\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention\.([qkv])_lin\.", r".self_attn.\1_proj."),
    (r"\.attention\.(output\.dense|out_lin|o_proj)\.", ".self_attn.o_proj."),
    (r"\.attention\.qkv_proj\.", ".self_attn.qkv_proj."),
    (r"\.(attn|mixer)\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.(attn|mixer)\.out_proj\.", ".self_attn.o_proj."),
    (r"\.(attention\.output\.LayerNorm|attention\.LayerNorm|sa_layer_norm|norm1|attn_ln)\.",
     ".post_attention_layernorm."),
    (r"\.(output\.LayerNorm|output_layer_norm|norm2|mlp_ln|post_mlp_layernorm)\.",
     ".post_feedforward_layernorm."),
    (r"\.(intermediate\.dense|ffn\.lin1|mlp\.fc1|mlp\.fc11)\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.(output\.dense|ffn\.lin2|mlp\.fc2)\.", ".mlp.down_proj."),
    (r"^encoder\.relative_attention_bias\.", "model.relative_bias."),
)  # fmt: skip
POOLED_HEAD: Final = ((r"^pooler\.dense\.", "head.dense."), (r"^classifier\.", "head.out_proj."))
_ROBERTA_HEAD: Final = ((r"^classifier\.", "head."),)
_DISTILBERT_HEAD: Final = ((r"^pre_classifier\.", "head.dense."), (r"^classifier\.", "head.out_proj."))
_MODERN_NAMES: Final = (
    (r"^model\.", ""),
    (r"^embeddings\.tok_embeddings\.", "model.embed_tokens."),
    (r"^embeddings\.norm\.", "model.embed_norm."),
    (r"^layers\.(\d+)\.", r"model.layers.\1."),
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.Wo\.", ".self_attn.o_proj."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.Wo\.", ".mlp.down_proj."),
    (r"^final_norm\.", "model.norm."),
    (r"^classifier\.", "head.out_proj."),
)

# ---------------------------------------------------------------------- rules


def read_activation(fields: Fields, key: str = "hidden_act") -> EncoderActivation:
    name = fields.text(key, "gelu")
    if name not in _ACTIVATIONS:
        raise fields.error(f"{key} {show(name)} is not supported, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_head(fields: Fields, **parts: Any) -> ClassifierConfig | None:
    """Return the head of a `...ForSequenceClassification`; None for other classes."""
    named = fields.raw.get("architectures") or []
    names = [named] if isinstance(named, str) else named
    if not any(isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names):
        return None
    listed = fields.mapping("id2label")
    labels = fields.integer("num_labels", 2, most=MAX_LABELS) if not listed else len(listed)
    if labels > MAX_LABELS:
        raise fields.error(f"{labels} labels are beyond anything known ({MAX_LABELS})")
    return ClassifierConfig(labels=labels, **parts)


def count_types(fields: Fields, default: int = 2) -> int:
    return fields.integer("type_vocab_size", default) if fields.raw.get("type_vocab_size") != 0 else 0


def _bert(fields: Fields) -> EncoderConfig:
    _refuse_other_positions(fields)
    return EncoderConfig(
        activation=read_activation(fields),
        position_rows=fields.integer("max_position_embeddings"),
        type_rows=count_types(fields),
        head=read_head(fields),
        renames=BERT_NAMES + POOLED_HEAD,
    )


def _roberta(fields: Fields) -> EncoderConfig:
    offset = _offset(fields)
    return EncoderConfig(
        activation=read_activation(fields),
        position_rows=fields.integer("max_position_embeddings") + offset,
        position_offset=offset,
        type_rows=count_types(fields),
        head=read_head(fields),
        renames=BERT_NAMES + _ROBERTA_HEAD,
    )


def _refuse_other_positions(fields: Fields) -> None:
    """Refuse those of jina's own code, which may also rotate (jina-reranker-v2 does not)."""
    if (kind := fields.text("position_embedding_type", "absolute")) != "absolute":
        raise fields.error(f"position_embedding_type {show(kind)} is not supported, only 'absolute'")


def _offset(fields: Fields) -> int:
    """Return the row of the first position: those before are of padding."""
    return int(fields.number("pad_token_id", 1)) + 1


def positions_after_padding(fields: Fields) -> Mapping[str, Any]:
    """Return the context, which is shorter than the table of positions."""
    rows, offset = fields.integer("max_position_embeddings"), _offset(fields)
    if not 0 < offset < rows:
        raise fields.error(f"pad_token_id leaves no positions of the {rows} that the table has")
    return {"max_position_embeddings": rows - offset}


def _distilbert(fields: Fields) -> EncoderConfig:
    return EncoderConfig(
        activation=read_activation(fields),
        position_rows=fields.integer("max_position_embeddings"),
        head=read_head(fields, activation="relu"),
        renames=BERT_NAMES + _DISTILBERT_HEAD,
    )


def _mpnet(fields: Fields) -> EncoderConfig:
    offset = _offset(fields)
    buckets = fields.integer("relative_attention_num_buckets", 32, most=1 << 16)
    if buckets < 4 or buckets % 4:
        raise fields.error(f"relative_attention_num_buckets {buckets} must be a multiple of 4")
    return EncoderConfig(
        activation=read_activation(fields),
        position_rows=fields.integer("max_position_embeddings") + offset,
        position_offset=offset,
        relative_buckets=buckets,
        head=read_head(fields),
        renames=BERT_NAMES + _ROBERTA_HEAD,
    )


def _modernbert(fields: Fields) -> EncoderConfig:
    bias = fields.flag("mlp_bias", default=False)
    pooling = fields.text("classifier_pooling", "cls")
    if pooling not in {"cls", "mean"}:
        raise fields.error(f"classifier_pooling {show(pooling)} is not supported, only 'cls' and 'mean'")
    return EncoderConfig(
        activation=read_activation(fields, "hidden_activation"),
        is_pre_norm=True,
        norm_bias=fields.flag("norm_bias", default=False),
        rotates=True,
        is_gated=True,
        up_bias=bias,
        down_bias=bias,
        head=read_head(
            fields,
            activation=read_activation(fields, "classifier_activation"),
            pooling=pooling,
            dense_bias=fields.flag("classifier_bias", default=False),
            has_norm=True,
        ),
        renames=_MODERN_NAMES,
    )


def _nomic(fields: Fields) -> EncoderConfig:
    """Read a NomicBert. Version 2 has an MLP without gates, and experts in every other layer."""
    experts, every = (0, 0), fields.integer("moe_every_n_layers", 0)
    if every and fields.raw.get("num_experts"):
        experts = selected_by("num_experts", top_k="moe_top_k")(fields)
    if experts[0] and every < 2:
        raise fields.error(f"moe_every_n_layers {every} is not supported, only 2 and more")
    return EncoderConfig(
        activation=read_activation(fields),
        type_rows=count_types(fields),
        rotates=True,
        is_gated=fields.text("hidden_act") != "gelu",
        up_bias=fields.flag("mlp_fc1_bias", default=False),
        down_bias=fields.flag("mlp_fc2_bias", default=False),
        experts=experts,
        experts_every=every or 2,
        has_expert_bias=fields.flag("has_expert_bias", default=True),
        head=read_head(fields),
        renames=((r"\.experts\.mlp\.w([12])$", r".experts.w\1.weight"), *BERT_NAMES, *POOLED_HEAD),
    )


def _nomic_sizes(fields: Fields) -> Mapping[str, Any]:
    bias = fields.flag("qkv_proj_bias", default=False)
    return {"rms_norm_eps": fields.number("layer_norm_eps"), "attention_bias": bias}


def _refuse_other_nomic(fields: Fields) -> None:
    """Refuse options of the repository's own code that are computed otherwise."""
    usual = {
        "prenorm": False, "use_rms_norm": False, "parallel_block": False, "rotary_emb_interleaved": False,
        "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, "num_shared_experts": 0,
        "expert_choice_router": False, "moe_normalize_expert_weights": False,
    }  # fmt: skip
    fields.refuse_others(usual, "in a NomicBert")


def gte_encoder(fields: Fields) -> EncoderConfig:
    return EncoderConfig(
        activation=read_activation(fields),
        type_rows=count_types(fields, 1),
        rotates=True,
        is_gated=True,
        up_bias=False,
        head=read_head(fields),
        renames=(*BERT_NAMES, (r"\.mlp\.up_gate_proj\.", ".mlp.up_gate_proj."), *POOLED_HEAD),
    )


def jina_v3_encoder(fields: Fields) -> EncoderConfig:
    return EncoderConfig(
        activation=read_activation(fields),
        type_rows=count_types(fields, 1),
        rotates=True,
        head=read_head(fields),
        renames=BERT_NAMES + _ROBERTA_HEAD,
    )


def _modern_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the layer types of a ModernBERT; by default the first of each three has full attention."""
    if fields.raw.get("layer_types") is None:
        every = fields.integer("global_attn_every_n_layers", 3)
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
        fields = fields.replace(layer_types=kinds)
    return tuple(layer_types(fields, layers))


def _modern_windows(fields: Fields, layers: int) -> Windows:
    width = fields.integer("local_attention", 128)
    return tuple(width if kind == "sliding_attention" else None for kind in _modern_types(fields, layers))


def _modern_ropes(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return two RoPE variants: the first for layers of full attention, the second for sliding windows."""
    by_type = Fields(fields.mapping("rope_parameters") or {}, f"{fields.where}: rope_parameters")
    ropes = []
    for kind, key, usual in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        raw = {"rope_parameters": by_type.mapping(kind), "rope_theta": fields.number(key, usual)}
        ropes.append(parse_rope(Fields(raw, fields.where), head_dim, positions))
    kinds = _modern_types(fields, layers)
    return tuple(ropes), tuple(int(kind == "sliding_attention") for kind in kinds)


def encoder_entry(
    model_type: str, rule: EncoderRule, defaults: Mapping[str, Any], *, bias: bool = True, **others: Any
) -> Architecture:
    usual = {
        "hidden_acts": dict.fromkeys(_ACTIVATIONS, "silu"),
        "ropes": no_rope,
        "attention_bias": True,
        "aliases": {"rms_norm_eps": "layer_norm_eps"},
    }
    return Architecture(
        model_type=model_type,
        encoder=rule,
        defaults={"attention_bias": bias, **defaults},
        **{**usual, **others},
    )


GELU: Final = {"hidden_act": "gelu", "max_position_embeddings": 512, "layer_norm_eps": 1e-12}
_ROBERTA: Final = {**GELU, "pad_token_id": 1}
ENCODERS: Final[dict[str, Architecture]] = {
    "BertModel": encoder_entry("bert", _bert, defaults=GELU),
    "RobertaModel": encoder_entry("roberta", _roberta, _ROBERTA, sizes=positions_after_padding),
    "XLMRobertaModel": encoder_entry(
        "xlm-roberta",
        _roberta,
        _ROBERTA,
        sizes=positions_after_padding,
        refuse=_refuse_other_positions,
        own_code="modeling_xlm_roberta.XLMRobertaForSequenceClassification",
    ),
    "CamembertModel": encoder_entry("camembert", _roberta, _ROBERTA, sizes=positions_after_padding),
    "DistilBertModel": encoder_entry(
        "distilbert",
        _distilbert,
        defaults=GELU,
        aliases=spelled(
            "hidden_size=dim num_attention_heads=n_heads num_hidden_layers=n_layers "
            "intermediate_size=hidden_dim hidden_act=activation rms_norm_eps=layer_norm_eps"
        ),
    ),
    "MPNetModel": encoder_entry("mpnet", _mpnet, _ROBERTA, sizes=positions_after_padding),
    "ModernBertModel": encoder_entry(
        "modernbert",
        _modernbert,
        defaults={"hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-5},
        aliases={"rms_norm_eps": "norm_eps"},
        bias=False,
        ropes=_modern_ropes,
        windows=_modern_windows,
    ),
    "NomicBertModel": encoder_entry(
        "nomic_bert",
        _nomic,
        own_code="modeling_hf_nomic_bert.NomicBertModel",
        defaults={
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-12,
            "rope_theta": 1000.0,
        },
        aliases=spelled(
            "hidden_size=n_embd num_attention_heads=n_head num_hidden_layers=n_layer "
            "intermediate_size=n_inner max_position_embeddings=n_positions hidden_act=activation_function "
            "layer_norm_eps=layer_norm_epsilon rope_theta=rotary_emb_base"
        ),
        sizes=_nomic_sizes,
        bias=False,
        ropes=one_rope,
        refuse=_refuse_other_nomic,
    ),
    "GteModel": encoder_entry(
        "gte",
        gte_encoder,
        defaults={**GELU, "max_position_embeddings": 8192, "rope_theta": 160_000.0},
        ropes=one_rope,
    ),
    "JinaEmbeddingsV3Model": encoder_entry(
        "jina_embeddings_v3",
        jina_v3_encoder,
        defaults={
            "hidden_act": "gelu",
            "max_position_embeddings": 8194,
            "layer_norm_eps": 1e-5,
            "rope_theta": 20_000.0,
        },
        ropes=one_rope,
    ),
}
"""Encoders by the name of their class without a head."""
HEADS: Final = ("ForSequenceClassification", "ForMaskedLM", "Model")
"""Suffixes of class names of one encoder."""


def encoder_name(architecture: str) -> str:
    """Return the class name without a head: `BertModel` for `BertForMaskedLM`."""
    end = next((end for end in HEADS if architecture.endswith(end)), None)
    return architecture if end is None else architecture.removesuffix(end) + "Model"
