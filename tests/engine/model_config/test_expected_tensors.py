"""What `fit` finds wrong between config.json and the weights: the load's own sentence, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.engine.errors import ModelError
from support.encoder_models import ENCODERS, declare_vectors, make_encoder
from support.families import FAMILIES, SIBLINGS
from support.real_engines import load
from support.tiny_models import make_tiny_model
from support.vision_models import MODELS, make_vision_model

WRITTEN_HERE = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "smollm3",
    "olmo2",
    "gemma2",
]


@pytest.mark.parametrize("arch", [*WRITTEN_HERE, *FAMILIES, *SIBLINGS])
def test_models_that_load_are_found_well(tmp_path: Path, arch: str) -> None:
    local_facts(directory(make_tiny_model(tmp_path, arch=arch, tokenizer=False)))


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_see_are_found_well(tmp_path: Path, kind: str) -> None:
    make_vision_model(tmp_path, kind)
    local_facts(directory(tmp_path))


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA, QWEN3 = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["Qwen3ForCausalLM"]}
CLAIMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms that are missing": ("llama", QWEN3, "q_norm.weight' is missing"),
    "norms without a place": (
        "qwen3",
        {"architectures": ["LlamaForCausalLM"]},
        "_norm.weight' and .* no place",
    ),
    "biases that are missing": ("qwen3", {"attention_bias": True}, "q_proj.bias' is missing"),
    "biases without a place": (
        "qwen2",
        {"architectures": ["LlamaForCausalLM"]},
        "_proj.bias' and .* no place",
    ),
    "a wider MLP": ("qwen3", {"intermediate_size": 97}, r"gate_proj.weight' has shape \[96, 64\]"),
    "more layers": ("llama", {"num_hidden_layers": 4}, "layers.2.self_attn.q_proj.weight' is missing"),
    "fewer layers": ("llama", {"num_hidden_layers": 1}, "layers.1.* no place"),
    "more heads of keys": ("llama", {"num_key_value_heads": 4}, "k_proj.weight' has shape"),
    "another vocabulary": ("llama", {"vocab_size": 300}, "embed_tokens.weight' has shape"),
    "another router": ("qwen3_moe", {"num_experts": 9}, "mlp.gate.weight' has shape"),
    "sandwich norms": ("llama", {"architectures": ["Glm4ForCausalLM"]}, "is missing"),
    "experts": (
        "qwen3",
        {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
        "mlp.gate.weight' is missing",
    ),
    "narrower experts": ("mixtral", {"intermediate_size": 95}, r"experts.0.w1.weight' has shape \[96, 64\]"),
    "delta nets of fewer heads": ("qwen3_5_text", {"linear_num_value_heads": 2}, "linear_attn.* has shape"),
    "delta nets in other layers": (
        "qwen3_5_text",
        {"layer_types": ["full_attention"] * 4},
        "layers.0.self_attn.q_proj.weight' is missing",
    ),
    "a longer convolution": ("lfm2", {"conv_L_cache": 4}, r"conv.conv.weight' has shape \[64, 1, 3\]"),
    "a larger state": ("granitemoehybrid", {"mamba_d_state": 16}, "mamba.in_proj.weight' has shape"),
    "Mamba without its norm": ("falcon_h1", {"mamba_rms_norm": False}, "norm.weight' and .* no place"),
    "attention in place of Mamba": ("mamba2", LLAMA, "layers.0.self_attn.q_proj.weight' is missing"),
    "an MLP in place of Mamba": (
        "nemotron_h",
        {"layers_block_type": ["mlp", "moe", "full_attention", "mlp", "linear_attention"]},
        "mixer.up_proj.weight' is missing",
    ),
    "Kimi's latents": ("kimi_linear", {"kv_lora_rank": 24}, "kv_a_proj_with_mqa.weight' has shape"),
    "smaller latents": ("deepseek_v3", {"kv_lora_rank": 24}, "kv_a_proj_with_mqa.weight' has shape"),
    "no latents": ("deepseek_v3", LLAMA, "self_attn.q_proj.weight' is missing"),
    "latents of queries": ("deepseek_v3", {"q_lora_rank": None}, "self_attn.q_proj.weight' is missing"),
    "more experts beside latents": ("glm4_moe_lite", {"n_routed_experts": 16}, "mlp.gate.* has shape"),
    "sinks without a place": ("gpt_oss", {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}, "is missing"),
    "wider embeddings of layers": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 24},
        r"embed_tokens_per_layer.weight' has shape \[320, 96\]",
    ),
    "fewer rows of these": (
        "gemma4_text",
        {"vocab_size_per_layer_input": 300},
        "per_layer.weight' has shape",
    ),
    "layers that share no keys": ("gemma4_text", {"num_kv_shared_layers": 0}, "k_proj.weight' is missing"),
    "MLPs of one size": ("gemma4_text", {"use_double_wide_mlp": False}, "layers.4.mlp.gate_proj.* has shape"),
    "values beside keys": (
        "gemma4_unified_text",
        {"attention_k_eq_v": False},
        "has shape|v_proj.* is missing",
    ),
    "more streams": ("gemma3n_text", {"altup_num_inputs": 4}, "altup_projections.2.weight' is missing"),
    "a smaller LAuReL": ("gemma3n_text", {"laurel_rank": 16}, "laurel.linear_left.weight' has shape"),
    "one wider MLP": (
        "gemma3n_text",
        {"intermediate_size": [96, 96, 96, 96, 64, 96]},
        "layers.1.mlp.gate_proj.weight' has shape",
    ),
    "narrower stacked experts": (
        "llama4_text",
        {"intermediate_size": 31},
        r"experts.gate_up_proj' has shape \[4, 64, 64\], config.json asks for \[4, 64, 62\]",
    ),
    "stacked experts with other biases": ("gpt_oss", {"intermediate_size": 95}, "gate_up_proj' has shape"),
    "stacked experts with outputs first": (
        "granitemoe",
        {"intermediate_size": 95},
        r"input_linear.weight' has shape \[4, 192, 64\]",
    ),
    "an output head with a bias": (
        "phimoe",
        {"lm_head_bias": False},
        "lm_head.bias' has no",
    ),
}
MISSING = {
    "deepseek_v32": "layers.1.self_attn.indexer.k_norm.bias",
    "mimo_v2_flash": "layers.1.self_attn.attention_sink_bias",
    "axk1": "layers.1.post_mlp_layernorm.weight",
    "qwen3_5_text": "linear_attn.dt_bias",
    "qwen3_next": "linear_attn.in_proj_ba.weight",
    "lfm2": "conv.out_proj.weight",
    "bamba": "mamba.A_log",
    "falcon_h1": "mamba.D",
    "nemotron_h": "mixer.conv1d.weight",
    "mamba2": "mixer.norm.weight",
    "olmo_hybrid": "linear_attn.g_proj.weight",
    "kimi_linear": "self_attn.f_b_proj.weight",
    "gpt_oss": "self_attn.sinks",
    "deepseek_v3": "self_attn.kv_a_layernorm.weight",
    "deepseek_v2": "self_attn.kv_b_proj.weight",
    "apertus": "mlp.act_fn.alpha_n",
    "llama4_text": "feed_forward.router.weight",
    "lfm3": "self_attn.gate_proj.weight",
    "gemma4_text": "layer_scalar",
    "gemma3n_text": "altup.correct_output_scale",
}
"""A tensor of what is special of each architecture, by its end."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_config_of_another_model_is_refused_alike_by_fit_and_load(tmp_path: Path, claim: str) -> None:
    arch, changes, problem = CLAIMS[claim]
    model = make_tiny_model(tmp_path, arch=arch, tie_word_embeddings=False, tokenizer=False)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=problem) as at_fit:
        local_facts(directory(model))
    with pytest.raises(ModelError) as at_load:
        load(model)
    assert str(at_fit.value) == str(at_load.value)


def drop(model: Path, end: str) -> str:
    """Remove the first tensor with this end from the only file; return its name."""
    file = model / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith(end))
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("arch", MISSING)
def test_a_missing_tensor_is_named_alike_by_fit_and_load(tmp_path: Path, arch: str) -> None:
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False)
    drop(model, MISSING[arch])
    with pytest.raises(ModelError, match=rf"{re.escape(MISSING[arch])}' is missing") as at_fit:
        local_facts(directory(model))
    with pytest.raises(ModelError) as at_load:
        load(model)
    assert str(at_fit.value) == str(at_load.value)


BESIDE_AN_MLP = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("changes", "end", "problem"),
    [
        ({}, "router.scale", "router.scale' is missing"),
        ({}, "post_feedforward_layernorm_1.weight", "layernorm_1.weight' is missing"),
        ({"moe_intermediate_size": 24}, "", r"experts.gate_up_proj' has shape \[8, 64, 64\]"),
        ({"enable_moe_block": False}, "", "no place"),
    ],
)
def test_experts_beside_an_mlp_are_refused_alike_by_fit_and_load(
    tmp_path: Path, changes: dict[str, Any], end: str, problem: str
) -> None:
    model = make_tiny_model(tmp_path, arch="gemma4_text", tokenizer=False, **BESIDE_AN_MLP)
    local_facts(directory(model))
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if end:
        drop(model, end)
    with pytest.raises(ModelError, match=problem) as at_fit:
        local_facts(directory(model))
    with pytest.raises(ModelError) as at_load:
        load(model)
    assert str(at_fit.value) == str(at_load.value)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_that_load_are_found_well(tmp_path: Path, kind: str) -> None:
    make_encoder(tmp_path, kind)
    declare_vectors(tmp_path)
    local_facts(directory(tmp_path))


OF_ENCODERS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a wider MLP": ("bert", {"intermediate_size": 97}, "", "intermediate.dense.weight' has shape"),
    "more layers": (
        "xlm-roberta",
        {"num_hidden_layers": 4},
        "",
        "layers.3.self_attn.q_proj.weight' is missing",
    ),
    "fewer layers": ("roberta", {"num_hidden_layers": 2}, "", "layers.2.* no place"),
    "fewer positions": ("bert", {"max_position_embeddings": 79}, "", "position_embeddings.weight' has shape"),
    "types of texts": ("mpnet", {}, "relative_attention_bias.weight", "relative_bias.weight' is missing"),
    "a norm": ("modernbert", {}, "layers.1.attn_norm.weight", "layers.1.input_layernorm.weight' is missing"),
    "a gate": ("nomic_bert", {}, "layers.0.mlp.fc12.weight", "gate_proj.weight' is missing"),
    "a bias": ("distilbert", {}, "layer.0.attention.q_lin.bias", "q_proj.bias' is missing"),
    "another class": ("bert", {"architectures": ["MPNetModel"]}, "", "is missing"),
}


@pytest.mark.parametrize("claim", OF_ENCODERS)
def test_a_config_of_another_encoder_is_refused_alike_by_fit_and_load(tmp_path: Path, claim: str) -> None:
    kind, changes, end, problem = OF_ENCODERS[claim]
    make_encoder(tmp_path, kind)
    declare_vectors(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if end:
        drop(tmp_path, end)
    with pytest.raises(ModelError, match=problem) as at_fit:
        local_facts(directory(tmp_path))
    with pytest.raises(ModelError) as at_load:
        load(tmp_path)
    assert str(at_fit.value) == str(at_load.value)
