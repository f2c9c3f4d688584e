"""Supported architectures as data: defaults and rules by which config.json is read.

`engine/model/registry.py` builds the layers. No other module distinguishes architectures.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmbox.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT

from ..errors import UnsupportedArchitecture
from . import attention, moe, rope
from .architecture import MISSING, Architecture, refuse_options, spelled
from .encoders.config import with_head
from .encoders.encoder import ENCODERS, encoder_name
from .encoders.own_code import OWN_CODE_ENCODERS
from .families.deepseek import DEEPSEEKS, MISTRAL4
from .families.gemma import GEMMA_MODELS
from .families.gemma4 import GEMMA3N_MODELS, GEMMA4_MODELS
from .families.gpt import GPT_FAMILIES
from .families.hybrids import HYBRIDS
from .families.mixtures import MIXTURES
from .families.others import OTHER_FAMILIES, cohere_compass_ropes
from .families.siblings import SIBLINGS, granite_scales
from .fields import Fields, show, text_fields, with_text_sizes
from .vision import MISSING_PARTS


def refuse_other_texts(fields: Fields) -> None:
    """Refuse language models of a LLaVA that are not among its `nested` ones; without a name it is Llama."""
    if (name := fields.raw.get("model_type")) not in {None, "llava"}:
        raise fields.error(f"a language model of {show(name)} is not supported, only of llama and mistral")


def refuse_other_minimax(fields: Fields) -> None:
    if set(fields.raw.get("attn_type_list") or [1]) != {1}:
        raise fields.error("attn_type_list names layers of linear attention, which are not supported")
    usual = {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True}
    refuse_options(**usual, scoring_func="sigmoid", shared_intermediate_size=0)(fields)


SLIDING: Mapping[str, Any] = {"sliding_window": 4096}
"""Default for a config.json without the key; null means no sliding window."""

_APERTUS_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_MINISTRAL3_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Defaults of transformers."""

_LLAMA = Architecture(model_type="llama", attention_bias=True, mlp_bias=True)
_MISTRAL = Architecture(model_type="mistral", defaults=SLIDING, windows=attention.one_window)
_COHERE = Architecture(
    model_type="cohere",
    defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    attention_bias=True,
    block="parallel",
    ropes=rope.interleaved_rope,
    scales=attention.cohere_scales,
    qk_norm="layer",
    qk_norm_flag="use_qk_norm",
    aliases={"rms_norm_eps": "layer_norm_eps"},
)
_ERNIE = Architecture(
    model_type="ernie4_5",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    head_dim=128,
    attention_bias=True,
    mlp_bias=True,
    ropes=rope.interleaved_rope,
    aliases={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
)
_GRANITE = Architecture(model_type="granite", attention_bias=True, mlp_bias=True, scales=granite_scales)
_GLM4 = Architecture(
    model_type="glm4",
    defaults={
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "attention_out_bias": False,
        "partial_rotary_factor": 0.5,
    },
    head_dim=128,
    attention_bias=True,
    block="sandwich",
    has_stacked_mlp=True,
    ropes=rope.interleaved_rope,
    names=spelled(
        "post_attention_layernorm=post_self_attn_layernorm "
        "pre_feedforward_layernorm=post_attention_layernorm post_feedforward_layernorm=post_mlp_layernorm"
    ),
)
_MINISTRAL3 = Architecture(
    model_type="ministral3",
    defaults={"rms_norm_eps": 1e-5, "rope_parameters": _MINISTRAL3_ROPE},
    head_dim=128,
    windows=attention.one_window,
)
_PHI3 = Architecture(
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5},
    windows=attention.one_window,
    ropes=rope.phi3_rope,
    has_stacked_projections=True,
    has_stacked_mlp=True,
    own_code="modeling_phi3.Phi3ForCausalLM",
    refuse=refuse_options(lm_head_bias=False),
)
LANGUAGE_PARTS = {
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "MiniCPMOcrForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_7ForConditionalGeneration": "qwen3_5_text",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h",
    "Ovis2ForConditionalGeneration": "qwen2",
    "QianfanOCRForConditionalGeneration": "qwen3",
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "CohereCompassForConditionalGeneration": "cohere_compass_text",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "hyperclovax",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "LlavaNextVideoForConditionalGeneration": "llama",
    "VideoLlama3ForConditionalGeneration": "qwen2",
    "VipLlavaForConditionalGeneration": "llama",
}
"""Models that see or hear whose `text_config` names an architecture that is here, by default this one."""
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2", defaults=SLIDING, qkv_bias=True, windows=attention.windows_of_later_layers
    ),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        defaults=SLIDING,
        head_dim=128,
        attention_bias=True,
        qk_norm="heads",
        windows=attention.windows_of_later_layers,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        model_type="qwen3_moe",
        defaults=SLIDING,
        attention_bias=True,
        qk_norm="heads",
        windows=attention.windows_if_used,
        experts=moe.qwen3_moe_experts,
    ),
    "GptOssForCausalLM": Architecture(
        model_type="gpt_oss",
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        head_dim=64,
        hidden_acts={"silu": "swiglu_oai"},
        attention_bias=True,
        has_sinks=True,
        fits_float16=False,
        sizes=attention.types_where(lambda layer, _layers: layer % 2 == 1),
        windows=attention.windows_by_type,
        experts=moe.gpt_oss_experts,
        refuse=refuse_options(swiglu_alpha=SWIGLU_ALPHA, swiglu_limit=SWIGLU_LIMIT),
    ),
    "CohereForCausalLM": replace(_COHERE, defaults={**_COHERE.defaults, "rope_theta": 5e5}),
    "CohereCompassForCausalLM": replace(
        _COHERE,
        model_type="cohere_compass_text",
        defaults={**_COHERE.defaults, "logit_scale": 1.0, "sliding_window": 4096},
        sizes=attention.types_where(lambda _layer, _layers: True),
        windows=attention.windows_by_type,
        ropes=cohere_compass_ropes,
    ),
    "Cohere2ForCausalLM": replace(
        _COHERE,
        model_type="cohere2",
        defaults={**_COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4},
        sizes=attention.types_by_pattern,
        windows=attention.windows_by_type,
        ropes=rope.interleaved_rope_of_sliding_layers,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        model_type="qwen2_moe",
        defaults={**SLIDING, "attention_bias": True, "attention_out_bias": False},
        attention_bias=True,
        windows=attention.windows_by_type_if_used,
        experts=moe.qwen2_moe_experts,
        aliases={"attention_bias": "qkv_bias"},
    ),
    "MiMoForCausalLM": Architecture(
        model_type="mimo",
        defaults={"attention_bias": True, "attention_out_bias": False},
        attention_bias=True,
        own_code="modeling_mimo.MiMoForCausalLM",
    ),
    "OlmoeForCausalLM": Architecture(
        model_type="olmoe",
        defaults={"rms_norm_eps": 1e-5},
        attention_bias=True,
        qk_norm="width",
        experts=moe.olmoe_experts,
        refuse=refuse_options(clip_qkv=None),
    ),
    "Glm4MoeForCausalLM": Architecture(
        model_type="glm4_moe",
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_out_bias": False,
            "partial_rotary_factor": 0.5,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
        },
        attention_bias=True,
        qk_norm="heads",
        qk_norm_flag="use_qk_norm",
        ropes=rope.partial_rope,
        experts=moe.deepseek_v3_experts,
        mtp="deepseek",
    ),
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        model_type="ernie4_5_moe",
        defaults={**_ERNIE.defaults, "moe_num_shared_experts": 2},
        head_dim=None,
        experts=moe.ernie_experts,
    ),
    "GraniteMoeForCausalLM": replace(_GRANITE, model_type="granitemoe", experts=moe.granite_moe_experts),
    "MiniMaxM2ForCausalLM": Architecture(
        model_type="minimax_m2",
        defaults={"rope_theta": 5e6},
        head_dim=128,
        qk_norm="width",
        ropes=rope.rope_of_rotary_dim,
        experts=moe.minimax_m2_experts,
        own_code="modeling_minimax_m2.MiniMaxM2ForCausalLM",
        refuse=refuse_other_minimax,
    ),
    "MixtralForCausalLM": Architecture(
        model_type="mixtral",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        windows=attention.one_window,
        experts=moe.mixtral_experts,
    ),
    "SmolLM3ForCausalLM": Architecture(
        model_type="smollm3",
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
        attention_bias=True,
        mlp_bias=True,
        windows=attention.windows_by_type_if_used,
        ropes=rope.rope_of_some_layers,
    ),
    "GraniteForCausalLM": _GRANITE,
    "Phi3ForCausalLM": _PHI3,
    "Phi4MultimodalForCausalLM": replace(_PHI3, model_type="phi4_multimodal", own_code=""),
    "Phi4MMForCausalLM": replace(_PHI3, model_type="phi4mm", own_code="modeling_phi4mm.Phi4MMForCausalLM"),
    "Glm4ForCausalLM": _GLM4,
    "GlmForCausalLM": replace(_GLM4, model_type="glm", block="pre_norm", names={}),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL, is_nested=True, nested=(_MISTRAL, _MINISTRAL3, MISTRAL4)
    ),
    "LlavaForConditionalGeneration": replace(
        _LLAMA, is_nested=True, nested=(_MISTRAL, _LLAMA), refuse=refuse_other_texts
    ),
    "VoxtralForConditionalGeneration": replace(
        _LLAMA,
        model_type="voxtral_text",
        is_nested=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e8},
        head_dim=128,
    ),
    "InternVLChatModel": Architecture(
        model_type="internvl_chat",
        is_nested=True,
        text_type="qwen2",
        own_code="modeling_internvl_chat.InternVLChatModel",
    ),
    "SeedOssForCausalLM": Architecture(
        model_type="seed_oss",
        defaults={"attention_bias": True, "attention_out_bias": False},
        head_dim=128,
        attention_bias=True,
        mlp_bias=True,
    ),
    "ApertusForCausalLM": Architecture(
        model_type="apertus",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1.2e7, "rope_parameters": _APERTUS_ROPE},
        hidden_acts={"xielu": "xielu"},
        attention_bias=True,
        qk_norm="heads",
        names=spelled("input_layernorm=attention_layernorm post_attention_layernorm=feedforward_layernorm"),
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Exaone4ForCausalLM": Architecture(
        model_type="exaone4",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        qk_norm="heads",
        block="post_norm",
        sizes=attention.types_by_pattern,
        windows=attention.windows_by_type,
        ropes=rope.rope_of_sliding_layers,
    ),
    **DEEPSEEKS,
    **HYBRIDS,
    **GEMMA_MODELS,
    **ENCODERS,
    **OWN_CODE_ENCODERS,
    **GEMMA3N_MODELS,
    **GEMMA4_MODELS,
    **OTHER_FAMILIES,
    **{name: replace(_LLAMA, is_nested=True, text_type=kind) for name, kind in LANGUAGE_PARTS.items()},
    **SIBLINGS,
    **MIXTURES,
    **GPT_FAMILIES,
}
"""Architectures by the class name in `architectures` of config.json."""


def architecture_of(fields: Fields) -> Architecture:
    return architecture_of_code(fields) if fields.raw.get("auto_map") else named_architecture(fields)


def architecture_of_code(fields: Fields) -> Architecture:
    """Return the architecture of a repository with Python code, which is never run. Raises ModelError if it
    is not a known one.
    """
    code = fields.raw["auto_map"]
    names = list(code.values()) if isinstance(code, dict) else []
    for kind in ARCHITECTURES.values():
        if kind.own_code and any(isinstance(n, str) and n.split("--")[-1] == kind.own_code for n in names):
            return kind
    raise fields.error(
        "this model needs Python code of its own (auto_map), which is never run; use a checkpoint "
        f"of a built-in architecture: {', '.join(ARCHITECTURES)}"
    )


def named_architecture(fields: Fields) -> Architecture:
    names = fields.raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        for known in (with_head(name), encoder_name(name)) if isinstance(name, str) else ():
            if known in ARCHITECTURES:
                return ARCHITECTURES[known]
    model_type = fields.raw.get("model_type")
    for kind in ARCHITECTURES.values():
        if not names and model_type == kind.model_type:
            return kind
    listed = names[:4] if isinstance(names, list) else []
    wanted = ", ".join(show(name).strip("'") for name in listed) or show(model_type)
    missing = MISSING.get(with_head(wanted.replace("ForConditionalGeneration", "ForCausalLM")))
    missing = missing or MISSING_PARTS.get(wanted)
    reason = f": it needs {missing}" if missing else ""
    raise UnsupportedArchitecture(
        f"{fields.where}: architecture {wanted} is not supported{reason}; supported: "
        f"{', '.join(ARCHITECTURES)}"
    )


def language_model(fields: Fields) -> tuple[Architecture, Fields]:
    """Return the architecture of the language model, and its fields; those of `text_config` where it sees."""
    kind = architecture_of(fields)
    if not kind.is_nested:
        return kind, fields
    fields = text_fields(fields)
    named = fields.raw.get("model_type")
    kind = next((inner for inner in kind.nested if inner.model_type == named), kind)
    if kind.text_type:
        named = {"model_type": named or kind.text_type, "architectures": None}
        kind = named_architecture(fields.replace(**named))
    return kind, with_text_sizes(fields, kind.model_type)
