"""Families that have the layers of others, beside transformers. Exactness is tested with those others."""

import json
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.architecture import MISSING
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.model_config.expected_tensors import check_weights
from llmbox.engine.model_config.registry import ARCHITECTURES
from llmbox.engine.model_config.vision.config import NO_TOWER
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.quant_formats import QUANTS
from support.families import (
    COMMON,
    DEEPSEEK,
    DELTA,
    FAMILIES,
    LATENT,
    MOE,
    SIBLINGS,
    SPARSE,
    make_family,
    randomize,
    spell_as_before,
)
from support.real_engines import (
    PROMPT,
    compare,
    hf_model,
    load,
    tokens,
)
from support.tiny_models import make_tiny_model
from support.vision_models import write_published_names


@pytest.mark.parametrize("arch", SIBLINGS)
def test_tokens_of_transformers(tmp_path: Path, arch: str) -> None:
    model = make_family(tmp_path, arch, shards=2)
    config = parse_config(model)
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    compare(model, hf_model(model))
    spell_as_before(model)
    assert parse_config(model) == config


GPT_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_fast", "attention_bias": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False}),
    ("starcoder2", {"hidden_act": "relu", "use_bias": False, "tie_word_embeddings": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("cohere", {"use_qk_norm": True}),
    ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    (
        "cohere2_moe",
        {
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
            "prefix_dense_sliding_window_pattern": 2,
        },
    ),
    ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": None}),
    ("mimo_v2_flash", {"attention_bias": True, "attention_value_scale": None}),
]


@pytest.mark.parametrize(("arch", "fields"), GPT_VARIANTS)
def test_places_of_norms_and_orders_of_projections(tmp_path: Path, arch: str, fields: dict[str, Any]) -> None:
    model = make_family(tmp_path, arch, **fields)
    config = parse_config(model)
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    check_weights(str(model), config, list_tensors(model))
    compare(model, hf_model(model))


def test_a_gpt_2_as_it_was_published(tmp_path: Path) -> None:
    """Its names have no `transformer.`, and masks are stored."""
    model = make_family(tmp_path, "gpt2")
    as_written = tokens(load(model), [PROMPT])
    weights = load_file(model / "model.safetensors")
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 256, 256).bool().tril() for layer in range(2)}
    plain = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(plain | masks, model / "model.safetensors", metadata={"format": "pt"})
    check_weights(str(model), parse_config(model), list_tensors(model))
    assert tokens(load(model), [PROMPT]) == as_written
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"n_positions": 300}))
    with pytest.raises(ModelError, match=r"'wpe.weight' has shape \[256, 64\], config.json asks for"):
        check_weights(str(model), parse_config(model), list_tensors(model))


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "step3p5", "zamba2"])
def test_checkpoints_with_other_names_are_quantized(tmp_path: Path, arch: str) -> None:
    model = make_tiny_model(tmp_path / "wide", arch=arch)
    quantize(model, tmp_path / "narrow", QUANTS["int8"], 1, lambda _done, _total: None)
    assert tokens(load(tmp_path / "narrow"), [PROMPT]) == tokens(load(model, quant="int8"), [PROMPT])


def test_a_mimo_is_a_qwen2_with_a_layer_that_is_not_run(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, arch="qwen2", tokenizer=False)
    same = tokens(load(model), [PROMPT])
    raw = json.loads((model / "config.json").read_text())
    raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    (model / "config.json").write_text(json.dumps(raw))
    weights = load_file(model / "model.safetensors")
    more = {"model.mtp_layers.0.input_proj.weight": torch.ones(64, 128)}
    save_file(weights | more, model / "model.safetensors", metadata={"format": "pt"})
    check_weights(str(model), parse_config(model), list_tensors(model))
    assert tokens(load(model), [PROMPT]) == same


TOWER = {"hidden_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "num_position_embeddings": 16}
MROPE = {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_the_language_part_of_a_qwen_that_sees(tmp_path: Path, arch: str) -> None:
    """Sections of RoPE have one position in texts; older files have no `text_config`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tower = TOWER | {"out_hidden_size": 64, "deepstack_visual_indexes": []} if arch != "qwen2_vl" else TOWER
    tower |= {"hidden_size": 64, "embed_dim": 16} if arch == "qwen2_vl" else {"intermediate_size": 16}
    text = COMMON | MOE | {"rope_parameters": MROPE, "moe_intermediate_size": 24}
    config = AutoConfig.for_model(arch, text_config=text, vision_config=tower, tie_word_embeddings=False)
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    randomize(theirs, 0)
    theirs.save_pretrained(tmp_path)
    if arch == "qwen3_vl_moe":
        transpose_experts(tmp_path)
    compare(tmp_path, theirs)
    if not arch.startswith("qwen3"):
        same, raw = parse_config(tmp_path), json.loads((tmp_path / "config.json").read_text())
        flat = {**raw.pop("text_config"), **raw}
        rope = flat.pop("rope_parameters")
        flat |= {"rope_theta": rope["rope_theta"], "model_type": arch}
        flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        (tmp_path / "config.json").write_text(json.dumps(flat))
        assert parse_config(tmp_path) == same


@pytest.mark.parametrize("ropes", [{}, {"sliding_attention": {"rope_theta": 1e4}}, {"rope_theta": 1e4}])
def test_a_cohere_compass_without_a_rope_for_each_type_is_refused(
    tmp_path: Path, ropes: dict[str, Any]
) -> None:
    model = make_family(tmp_path, "cohere_compass_text")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"rope_parameters": ropes}))
    with pytest.raises(ModelError, match="must have an entry for each type in layer_types"):
        parse_config(model)


GLM_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 16}
GLM_TOWER |= {"patch_size": 4, "image_size": 16}
GLM_ROPE = {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": [1, 1, 2]}
GLM_ROPE |= {"partial_rotary_factor": 0.5}
INTERNVL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
INTERNVL |= {"image_size": [16, 16], "patch_size": [4, 4]}
KIMI_TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
KIMI_TOWER |= {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4}
MUSE_TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MUSE_TOWER |= {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4}
MUSE = {"num_hidden_layers": 5, "sliding_window": 19, "post_norm_eps": 1e-3, "rms_norm_eps": 1e-4}
SIGLIP = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIGLIP |= {"patch_size": 4, "image_size": 16}
PADDLE_ROPE = {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
COHERE2 = FAMILIES["cohere2"] | {"logit_scale": 1.0}  # transformers leaves it out of models that see
SIGLIP_MODEL = SIGLIP | {"model_type": "siglip_vision_model"}
HEARING = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
HEARING |= {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "num_mel_bins": 8}
NESTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm4v": ("glm4v", GLM_TOWER, {"rope_parameters": GLM_ROPE}),
    "glm46v": (
        "glm46v",
        GLM_TOWER | {"model_type": "glm4v_vision"},
        {"model_type": "glm4v_text", "rope_parameters": GLM_ROPE},
    ),
    "glm4v_moe": ("glm4v_moe", GLM_TOWER, DEEPSEEK | {"rope_parameters": GLM_ROPE}),
    "muse_glimmer": ("muse_glimmer", MUSE_TOWER, MUSE),
    "kimi_k25": ("kimi_k25", KIMI_TOWER, LATENT | {"model_type": "deepseek_v3"}),
    "exaone4_5": (
        "exaone4_5",
        GLM_TOWER | {"num_key_value_heads": 1},
        FAMILIES["exaone4"] | {"model_type": "exaone4"},
    ),
    "nemotron_h_omni": (
        "nemotron_h_omni",
        SIGLIP | {"video_temporal_patch_size": 2},
        FAMILIES["nemotron_h"] | {"model_type": "nemotron_h"},
    ),
    "cohere2_vision": ("cohere2_vision", SIGLIP_MODEL, COHERE2 | {"model_type": "cohere2"}),
    "cohere2_vision-moe": (
        "cohere2_vision",
        SIGLIP_MODEL,
        SIBLINGS["cohere2_moe"] | {"model_type": "cohere2_moe", "logit_scale": 1.0},
    ),
    "aya_vision": ("aya_vision", SIGLIP_MODEL, COHERE2 | {"model_type": "cohere2"}),
    "aria": (
        "aria",
        SIGLIP | {"model_type": "idefics3_vision"},
        {"model_type": "aria_text", "moe_num_experts": 4, "intermediate_size": 32},
    ),
    "hyperclovax_vision_v2": (
        "hyperclovax_vision_v2",
        GLM_TOWER | {"fullatt_block_indexes": [0]},
        SIBLINGS["hyperclovax"] | {"model_type": "hyperclovax"},
    ),
    "vipllava": ("vipllava", SIGLIP | {"model_type": "clip_vision_model"}, {"model_type": "llama"}),
    "voxtral": ("voxtral", HEARING, {"model_type": "llama"}),
    "qwen2_audio": ("qwen2_audio", HEARING, {"model_type": "qwen2"}),
    "paddleocr_vl": (
        "paddleocr_vl",
        SIGLIP,
        {"model_type": "paddleocr_vl_text", "use_bias": True, "rope_parameters": PADDLE_ROPE},
    ),
    "minicpmv4_7": ("minicpmv4_7", SIGLIP, DELTA | {"model_type": "qwen3_5_text"}),
    "internvl-qwen2": ("internvl", INTERNVL, {"model_type": "qwen2"}),
    "internvl-qwen3_moe": ("internvl", INTERNVL, MOE | {"model_type": "qwen3_moe"}),
}
"""Kind, tower and `text_config`."""
BLIND = {"muse_glimmer", "minicpmv4_7", "aria"}
"""Those whose tower does not run."""


@pytest.mark.parametrize("name", NESTED)
def test_the_language_part_beside_a_tower(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    kind, tower, text = NESTED[name]
    options = {"audio_config" if tower is HEARING else "vision_config": tower}
    if kind == "kimi_k25":
        options["projection_hidden_size"] = 16
    if kind == "nemotron_h_omni":
        options["vision_hidden_size"] = 16
    if kind == "vipllava":
        options["vision_feature_layer"] = -1
    config = AutoConfig.for_model(kind, text_config=COMMON | text, **options, tie_word_embeddings=False)
    theirs = AutoModelForMultimodalLM.from_config(config).eval()
    randomize(theirs, 0)
    theirs.save_pretrained(tmp_path)
    write_published_names(tmp_path, kind)
    if kind == "nemotron_h_omni":  # as published
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"llm_config": raw.pop("text_config")}))
    found = parse_config(tmp_path)
    check_weights(str(tmp_path), found, list_tensors(tmp_path))
    if tower is HEARING:
        assert found.image_problem == NO_TOWER
    elif name in BLIND:
        assert f"the vision tower of {kind} is not supported" in found.image_problem
    else:
        assert found.vision is not None
        assert found.vision.tower.num_layers == 1
    compare(tmp_path, theirs)
    if name == "hyperclovax_vision_v2":  # as published
        raw = json.loads((tmp_path / "config.json").read_text())
        raw |= {"model_type": "vlm", "vision_config": raw["vision_config"] | {"model_type": "qwen2_5_vl"}}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert parse_config(tmp_path) == found
    if name == "paddleocr_vl":  # as published: flat, and with Python code, which is not run
        raw = json.loads((tmp_path / "config.json").read_text())
        flat = {**raw.pop("text_config"), **raw} | {"model_type": "paddleocr_vl"}
        flat["rope_scaling"] = flat.pop("rope_parameters")
        flat["rope_theta"] = flat["rope_scaling"].pop("rope_theta")
        flat["vision_config"]["model_type"] = "paddleocr_vl"
        code = "modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration"
        flat["auto_map"] = {"AutoModelForCausalLM": code}
        (tmp_path / "config.json").write_text(json.dumps(flat))
        assert parse_config(tmp_path) == found


@pytest.mark.parametrize("tied", [True, False])
def test_ties_of_the_whole_model_count_more_than_those_of_its_text_part(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    tower |= {"patch_size": 4, "image_size": 16, "intermediate_size": 16}
    text = COMMON | {"model_type": "mistral", "tie_word_embeddings": not tied}
    config = AutoConfig.for_model(
        "mistral3", text_config=text, vision_config=tower, tie_word_embeddings=tied, image_token_index=3
    )
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    randomize(theirs, 0)
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["tie_word_embeddings"], raw["text_config"]["tie_word_embeddings"]) == (tied, not tied)
    assert parse_config(tmp_path).tie_word_embeddings is tied
    compare(tmp_path, theirs)


LING_TENSORS = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}


def test_a_ling_is_a_glm_4_under_other_names(tmp_path: Path) -> None:
    """Ling 2.0 brings code of its own, which computes what GLM-4.5 does: its names, keys and stack."""
    model = make_family(tmp_path, "glm4_moe", use_qk_norm=True, attention_bias=False)
    theirs = hf_model(model)
    weights = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        for usual, ling in LING_TENSORS.items():
            name = name.replace(usual, ling)  # noqa: PLW2901
        weights[name] = tensor
    for layer in range(2):
        module = f"model.layers.{layer}"
        qkv = [weights.pop(f"{module}.self_attn.{part}_proj.weight") for part in "qkv"]
        weights[f"{module}.attention.query_key_value.weight"] = torch.cat(qkv)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((model / "config.json").read_text())
    dense = raw.pop("mlp_layer_types", ["dense", "sparse"]).count("dense")
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    raw = {renamed.get(key, key): value for key, value in raw.items() if key != "attention_bias"}
    raw |= {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe"}
    raw |= {"first_k_dense_replace": dense, "use_qkv_bias": False, "use_bias": False}
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"}
    (model / "config.json").write_text(json.dumps(raw))
    config = parse_config(model)
    check_weights("ling", config, list_tensors(model))
    assert config.num_parameters == sum(prod(each.shape) for each in list_tensors(model).values())
    compare(model, theirs)


def transpose_experts(model: Path) -> None:
    """Store experts as they are published, inputs first."""
    weights = load_file(model / "model.safetensors")
    experts = {name: x.transpose(1, 2).contiguous() for name, x in weights.items() if ".experts." in name}
    save_file(weights | experts, model / "model.safetensors", metadata={"format": "pt"})


def written(directory: Path, name: str, **fields: Any) -> ModelConfig:
    raw = COMMON | {"architectures": [name], "dtype": "bfloat16"} | fields
    (directory / "config.json").write_text(json.dumps(raw))
    return parse_config(directory)


NO_MODEL = {"bamba", "cohere_compass_text", "deepseek_v2", "dots1", "glm4_moe", "granitemoehybrid"}
"""Default configs in transformers that describe none: no attention, no experts, an odd part of a head, or no
RoPE where transformers itself needs one.
"""
PARTS_OF_OTHERS = {"gemma3", "gemma3n", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe", "llama4"}


def test_default_configs_of_transformers_are_read(tmp_path: Path) -> None:
    """They have the sizes of a published model, written as its last version writes them."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in ARCHITECTURES}
    assert len(known) > 60
    for kind in sorted(set(known) - NO_MODEL - PARTS_OF_OTHERS):
        raw = json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))
        (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [known[kind]]}))
        assert parse_config(tmp_path).num_layers > 0, kind


def test_a_mimo_v2_as_it_was_published(tmp_path: Path) -> None:
    """Its files name layers by 0 and 1, and have a key for each kind of layer."""
    model = make_family(tmp_path, "mimo_v2_flash", routed_scaling_factor=1.0)
    config, raw = parse_config(model), json.loads((model / "config.json").read_text())
    ropes = raw.pop("rope_parameters")
    raw |= {"rope_theta": ropes["full_attention"]["rope_theta"], "partial_rotary_factor": 0.334}
    raw |= {"swa_rope_theta": ropes["sliding_attention"]["rope_theta"], "swa_num_key_value_heads": 4}
    raw |= {"hybrid_layer_pattern": [int("slid" in kind) for kind in raw.pop("layer_types")]}
    raw |= {"moe_layer_freq": [int(kind == "sparse") for kind in raw.pop("mlp_layer_types")]}
    raw |= {"sliding_window_size": raw.pop("sliding_window") - 1, "routed_scaling_factor": None}
    raw |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling_mimo_v2_flash.MiMoV2FlashForCausalLM"}
    (model / "config.json").write_text(json.dumps(raw))
    assert parse_config(model) == config


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ZayaForCausalLM", "convolutions of queries and keys"),
        ("MistralLarge4ForConditionalGeneration", "latents that layers share"),
        ("AXK2ForCausalLM", "attention gated by latents of queries"),
        ("T5ForConditionalGeneration", "an encoder beside the decoder"),
        ("MllamaForConditionalGeneration", "layers that attend to images"),
        ("XGLMForCausalLM", "sines and cosines of positions"),
        ("OpenAIGPTLMHeadModel", "norms of the residual"),
    ],
)
def test_a_known_architecture_is_refused_with_what_is_missing(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"architecture {name} is not supported: it needs .*{reason}"):
        written(tmp_path, name)


def test_limits_of_gates_change_the_tokens(tmp_path: Path) -> None:
    """Those of experts, and those of the shared expert and dense layers, each by themselves."""
    none = {"swiglu_limits": None, "swiglu_limits_shared": None}
    found = []
    for number, changed in enumerate(({}, {"swiglu_limits": None}, {"swiglu_limits_shared": None}, none)):
        model = make_family(tmp_path / str(number), "step3p5", **changed)
        found.append(tokens(load(model), [PROMPT]))
    assert all(one != other for one, other in combinations(found, 2))


def test_a_step_3_5_as_it_was_published(tmp_path: Path) -> None:
    """The text alone: no tower, and code of the repository that is not run."""
    model = make_family(tmp_path, "step3p5")
    expected = tokens(load(model), [PROMPT])
    raw = json.loads((model / "config.json").read_text())["text_config"]
    raw |= {"architectures": ["Step3p5ForCausalLM"]}
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"}
    (model / "config.json").write_text(json.dumps(raw))
    weights = load_file(model / "model.safetensors")
    mtp = {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}
    text = {name: tensor for name, tensor in weights.items() if not name.startswith("vi")}
    save_file(text | mtp, model / "model.safetensors", metadata={"format": "pt"})
    check_weights(str(model), parse_config(model), list_tensors(model))
    assert tokens(load(model), [PROMPT]) == expected
    gate = "model.layers.1.moe.gate_proj.weight"
    save_file(text | {gate: text[gate][:7]}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"gate_proj.weight' has shape \[7, 32, 64\], config.json asks for"
    ) as at_fit:
        check_weights(str(model), parse_config(model), list_tensors(model))
    with pytest.raises(ModelError) as at_load:
        load(model)
    assert str(at_fit.value) == str(at_load.value)


LAGUNA = MOE | {"shared_expert_intermediate_size": 48}
HUNYUAN = {"num_experts": 4, "moe_topk": [2, 1]}


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32 is not supported"),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported"),
        ("GPTNeoForCausalLM", {"attention_types": [[["glob"], 2]]}, "layer_types must name full_attention"),
        ("GPTNeoForCausalLM", {"attention_types": 3}, "attention_types must be a list of"),
        ("MiniCPM3ForCausalLM", {"scale_depth": 0}, "scale_depth 0 must be larger than 0"),
        (
            "InternVLForConditionalGeneration",
            {"text_config": {"model_type": "baichuan", "hidden_size": 64}},
            "architecture 'baichuan' is not supported",
        ),
        ("Mistral4ForCausalLM", {"qk_nope_head_dim": 96}, "is not a multiple of qk_rope_head_dim 64"),
        ("FalconForCausalLM", {"alibi": True}, "alibi True is not supported"),
        ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights False is not supported"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
        ("PhiForCausalLM", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported, only 'gelu'"),
        ("LagunaForCausalLM", {"gating": "per-row"}, "gating 'per-row' is not supported"),
        ("LagunaForCausalLM", LAGUNA | {"num_attention_heads_per_layer": [3, 4]}, "have 2 multiples of"),
        ("LagunaForCausalLM", {"rope_parameters": {"slow": {}}}, "must have an entry for full_attention"),
        ("MiMoV2FlashForCausalLM", {"swa_head_dim": 8}, "swa_head_dim 8 is not supported, only that of"),
        ("MiMoV2FlashForCausalLM", {"moe_layer_freq": 1}, "moe_layer_freq must have a 0 or a 1"),
        ("Cohere2MoeForCausalLM", {"expert_selection_fn": "top"}, "expert_selection_fn 'top' with"),
        ("Cohere2MoeForCausalLM", {"first_k_dense_replace": 9}, "first_k_dense_replace 9 must be from 0"),
        ("DeepseekV32ForCausalLM", SPARSE | {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("DeepseekV32ForCausalLM", SPARSE | {"index_head_dim": 8}, "index_head_dim 8 must be more than"),
        ("GlmMoeDsaForCausalLM", SPARSE | {"indexer_types": ["shared", "full"]}, "the first one full"),
        (
            "AfmoeForCausalLM",
            {"score_func": "softmax"},
            "score_func 'softmax' is not supported of this arch",
        ),
        ("AfmoeForCausalLM", {"route_norm": False}, "route_norm False is not supported of this arch"),
        ("HyperCLOVAXForCausalLM", {"use_post_norm": False}, "use_post_norm false is not supported"),
        ("Step3p5ForCausalLM", {"swiglu_limits": [7]}, "swiglu_limits must have a number or null for each"),
        ("Step3p5ForCausalLM", {"swiglu_limits_shared": [0, -1]}, "swiglu_limits_shared must have no number"),
        (
            "Step3p5ForCausalLM",
            {"moe_layers_enum": "1,x"},
            "moe_layers_enum must be a list of layers below 2",
        ),
        ("Step3p5ForCausalLM", {"rope_theta": [1e4]}, "rope_theta must have a number for each of 2 layers"),
        ("Step3p5ForCausalLM", {"num_sliding_attention_heads": 7}, "7 heads of some layers are no multiple"),
        (
            "Step3p5ForCausalLM",
            {"attention_other_setting": {"head_dim": 8}},
            "head_dim 8 is not supported in",
        ),
        ("Step3p5ForCausalLM", {"yarn_only_types": ["sliding_attention"]}, r"yarn_only_types \['sliding"),
        ("Step3p5ForCausalLM", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate False is not"),
        (
            "Step3p5ForCausalLM",
            {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar 0.0 must be larger than 0",
        ),
        ("MellumForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name dense or sparse"),
        ("NemotronForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'relu2'"),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [1.0, 0]}, "layer_rope_theta must have 2 numbers"),
        ("GraniteSWAForCausalLM", {"layer_types": ["full"]}, "layer_types must name full_attention"),
        ("HunYuanMoEV1ForCausalLM", HUNYUAN, "moe_topk must be the same for each of 2 layers"),
        (
            "HunYuanMoEV1ForCausalLM",
            {"num_experts": 2, "moe_topk": 3},
            "moe_topk 3 is more than num_experts 2",
        ),
        ("BailingMoeV2ForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ("BailingMoeV2ForCausalLM", {"score_function": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("JambaForCausalLM", {"attn_layer_offset": 8}, "attn_layer_offset 8 must be from 0 to"),
        ("JambaForCausalLM", {"attn_layer_offset": 4}, "no layer has attention"),
        ("JambaForCausalLM", {"expert_layer_offset": -1}, "expert_layer_offset -1 must be from 0 to"),
        ("MambaForCausalLM", {"intermediate_size": 97}, "97 channels of Mamba layers .* must be even"),
        ("MambaForCausalLM", {"time_step_rank": 64}, "mamba_dt_rank 64 and .* less than hidden_size 64"),
        ("MambaForCausalLM", {"time_step_rank": "x"}, "time_step_rank must be a positive whole number"),
        ("OlmoForCausalLM", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported, only 'relu2'"),
        ("Mamba2ForCausalLM", {"num_heads": 7, "head_dim": 16}, "are not expand . hidden_size"),
        ("Mamba2ForCausalLM", {"num_heads": 8, "n_groups": 3}, "multiple of mamba_n_groups 3"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        written(tmp_path, name, **fields)


OTHER_DECODERS = {
    *("beam", "camembert", "data2vec-text", "electra", "ernie", "git", "got_ocr2"),
    *("bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot-small", "megatron-bert", "moshi"),
    *("musicgen", "musicgen_melody", "mvp", "plbart", "reformer", "rembert", "roberta", "roc_bert"),
    *("roberta-prelayernorm", "roformer", "trocr", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("gemma4_assistant", "gemma4_unified_assistant", "moss_transcribe_diarize"),
}
"""Decoders in transformers that are encoders by training, parts of other models, or speak and make music."""


def test_every_decoder_of_transformers_is_supported_or_refused_with_a_reason() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {*ARCHITECTURES, *MISSING}
    left = {
        kind
        for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if kind not in OTHER_DECODERS and not known & {*([names] if isinstance(names, str) else names)}
    }
    assert not left
    assert not MISSING.keys() & ARCHITECTURES.keys()
