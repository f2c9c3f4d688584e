"""Encoders whose repositories bring Python code of their own, which is not run: GTE, jina v2 and v3."""

from dataclasses import replace
from typing import Final

from ..architecture import Architecture
from ..fields import Fields, raw_rope, show
from ..rope import LayerRopes, one_rope
from .config import EncoderConfig
from .encoder import (
    BERT_NAMES,
    GELU,
    POOLED_HEAD,
    count_types,
    encoder_entry,
    gte_encoder,
    jina_v3_encoder,
    positions_after_padding,
    read_activation,
    read_head,
)

MAX_SCALING: Final = 1024.0
_JINA_NAMES: Final = (
    (r"\.mlp\.gated_layers\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.wo\.", ".mlp.down_proj."),
    (r"\.mlp\.layernorm\.", ".post_feedforward_layernorm."),
)


_JINA_V3_NAMES: Final = (
    (r"\.parametrizations\.\w+\.0\.(lora_[AB])$", r".\1"),
    (r"\.parametrizations\.(\w+)\.original$", r".\1"),
)
"""Names of weights and of the LoRA adapters of tasks beside them."""
_WITHOUT_TASKS: Final = ((r"^(.*\.lora_[AB])$", r"adapters.\1"),)
_MOST_TASKS: Final = 64
_LONGEST: Final = 1000


def _refuse_other_gte(fields: Fields) -> None:
    usual = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True}
    fields.refuse_others(
        {**usual, "logn_attention_scale": False, "logn_attention_clip1": False}, "of this encoder"
    )


def ntk_rope(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return one RoPE. Of type `ntk` its base is multiplied by a factor f, and its frequencies are divided by
    f^(2 / head_dim), for texts of all lengths.
    """
    raw = raw_rope(fields)
    if raw.get("rope_type", raw.get("type")) != "ntk":
        return one_rope(fields, head_dim, positions, layers)
    scaling = Fields(raw, f"{fields.where}: rope parameters")
    factor = scaling.number("factor", 1.0)
    if not 1.0 <= factor <= MAX_SCALING or scaling.raw.get("mixed_b") is not None:
        raise scaling.error(
            f"factor {factor} must be from 1 to {MAX_SCALING:.0f}, and mixed_b is not supported"
        )
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0)) * factor
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_scaling": None}
    (rope,), layer_ropes = one_rope(fields.replace(**plain), head_dim, positions, layers)
    divisors = (factor ** (2 / head_dim),) * (head_dim // 2)
    rope = replace(
        rope,
        rope_type="longrope",
        original_context=positions,
        short_factor=divisors,
        long_factor=divisors,
        attention_factor=1.0,
    )
    return (rope,), layer_ropes


def _jina_v2(fields: Fields) -> EncoderConfig:
    gated = {"geglu": "gelu", "reglu": "relu"}
    kind = fields.text("feed_forward_type", "original")
    if kind not in gated:
        raise fields.error(f"feed_forward_type {show(kind)} is not supported, only {', '.join(gated)}")
    return EncoderConfig(
        activation=read_activation(Fields({"hidden_act": gated[kind]}, fields.where)),
        type_rows=count_types(fields),
        has_alibi=True,
        is_gated=True,
        up_bias=False,
        head=read_head(fields),
        renames=(*_JINA_NAMES, *BERT_NAMES, *POOLED_HEAD),
    )


def _refuse_other_jina(fields: Fields) -> None:
    if fields.text("position_embedding_type", "absolute") != "alibi":
        raise fields.error("position_embedding_type is not supported of this encoder, only 'alibi'")


def _jina_v3(fields: Fields) -> EncoderConfig:
    found, tasks = jina_v3_encoder(fields), _tasks(fields)
    rank, alpha = fields.integer("lora_rank", 4, most=_LONGEST), fields.number("lora_alpha", 1.0)
    renames = (*_JINA_V3_NAMES, *found.renames, *(() if tasks else _WITHOUT_TASKS))
    return replace(found, renames=renames, tasks=tasks, task_rank=rank, task_scale=alpha / rank)


def _tasks(fields: Fields) -> tuple[tuple[str, str], ...]:
    """Return the tasks that have adapters, each with its instruction; none where they were not trained."""
    names = fields.raw.get("lora_adaptations") or []
    if not fields.flag("load_trained_adapters", default=True):
        return ()
    given = fields.mapping("task_instructions") or {}
    is_list = isinstance(names, list) and len(names) <= _MOST_TASKS
    texts = [*names, *(given.get(name, "") for name in names if isinstance(name, str))] if is_list else [0]
    if not all(isinstance(each, str) and len(each) <= _LONGEST for each in texts) or len(set(names)) < len(
        names
    ):
        raise fields.error(
            f"lora_adaptations must name at most {_MOST_TASKS} tasks, and task_instructions have a text of "
            "each"
        )
    return tuple((name, given.get(name, "")) for name in names)


def _refuse_other_jina_v3(fields: Fields) -> None:
    fields.refuse_others({"emb_pooler": None}, "of this encoder")
    if fields.text("position_embedding_type", "absolute") != "rotary":
        raise fields.error("position_embedding_type is not supported of this encoder, only 'rotary'")


OWN_CODE_ENCODERS: Final[dict[str, Architecture]] = {
    "NewModel": encoder_entry(
        "new",
        gte_encoder,
        defaults={**GELU, "max_position_embeddings": 8192},
        ropes=ntk_rope,
        refuse=_refuse_other_gte,
        own_code="modeling.NewModel",
    ),
    "JinaBertModel": encoder_entry(
        "jina_bert",
        _jina_v2,
        defaults={**GELU, "max_position_embeddings": 8192},
        refuse=_refuse_other_jina,
        own_code="modeling_bert.JinaBertModel",
    ),
    "XLMRobertaLoRA": encoder_entry(
        "jina_embeddings_v3",
        _jina_v3,
        defaults={**GELU, "max_position_embeddings": 8194, "layer_norm_eps": 1e-5},
        aliases={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"},
        sizes=positions_after_padding,
        ropes=one_rope,
        refuse=_refuse_other_jina_v3,
        own_code="modeling_lora.XLMRobertaLoRA",
    ),
}
"""Encoders by the name of their class without a head."""
