"""Llama 4 and Phi-MoE: published sizes, the language part beside a vision tower, and refused configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.errors import ModelError
from llmbox.engine.model.rotary import attention_scale
from llmbox.engine.model_config.config import ModelConfig, parse_config
from support.families import COMMON, FAMILIES, make_family, randomize
from support.rank_threads import load_ranks
from support.real_engines import ask, hf_tokens, load, tokens

PROMPT = ask("a", range(3, 50), 6)
LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 64,
    "long_factor": [4.0] * 64,
    "short_mscale": 1.1,
    "long_mscale": 1.243163121016122,
}
PHI_3_5_MOE = {
    "architectures": ["PhiMoEForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 131072,
    "rope_theta": 10000.0,
    "rope_scaling": LONGROPE,
    "attention_bias": True,
    "lm_head_bias": True,
    "torch_dtype": "bfloat16",
}
SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "model_type": "llama4_text",
        "attn_temperature_tuning": 4,
        "no_rope_layers": [],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


def written(directory: Path, raw: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(raw))
    return parse_config(directory)


@pytest.mark.parametrize(
    ("raw", "params", "active"),
    [(PHI_3_5_MOE, 41.9e9, 6.6e9), (SCOUT, 107.8e9, 16.1e9)],
    ids=["Phi-3.5-MoE", "Scout"],
)
def test_sizes_of_published_models(tmp_path: Path, raw: dict[str, Any], params: float, active: float) -> None:
    config = written(tmp_path, raw)
    assert config.num_parameters == pytest.approx(params, rel=2e-3)
    assert config.shape().active_params == pytest.approx(active, rel=0.03)


def test_scales_of_longrope_by_length(tmp_path: Path) -> None:
    rope = written(tmp_path, PHI_3_5_MOE).rope
    assert [attention_scale(rope, length) for length in (4096, 4097)] == [1.1, 1.243163121016122]


def test_the_language_part_of_a_llama_4(tmp_path: Path) -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 16}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    text = COMMON | FAMILIES["llama4_text"] | {"model_type": "llama4_text"}
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))
    randomize(model, 0)
    model.save_pretrained(tmp_path)
    theirs = Llama4ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert tokens(load(tmp_path), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 6)


@pytest.mark.parametrize("arch", ["llama4_text", "phimoe"])
def test_ranks_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    model = make_family(tmp_path, arch)
    requests = [PROMPT, ask("b", range(7, 30), 6, temperature=0.9, seed=5)]
    ranks = load_ranks(model, monkeypatch, tp=2, pp=2)
    assert tokens(ranks, requests) == tokens(load(model), requests)


@pytest.mark.parametrize(
    ("base", "fields", "problem"),
    [
        (PHI_3_5_MOE, {"num_experts_per_tok": 3}, "num_experts_per_tok 3 is not supported"),
        (PHI_3_5_MOE, {"router_jitter_noise": 0.0}, "router_jitter_noise 0.0 must be"),
        (
            PHI_3_5_MOE,
            {"rope_scaling": LONGROPE | {"long_mscale": None}},
            "short_mscale and long_mscale must",
        ),
        (PHI_3_5_MOE, {"lm_head_bias": 1}, "lm_head_bias must be true or false"),
        (SCOUT["text_config"], {"no_rope_layers": [2]}, "no_rope_layers must have a 0 or a 1"),
        (SCOUT["text_config"], {"layer_types": ["chunked"]}, "layer_types must name chunked_attention"),
        (SCOUT["text_config"], {"attention_chunk_size": -1}, "attention_chunk_size must be a positive"),
        (SCOUT["text_config"], {"moe_layers": [99]}, "moe_layers must be a list of layers below 48"),
        (SCOUT["text_config"], {"attn_temperature_tuning": "on"}, "attn_temperature_tuning must be"),
        (SCOUT["text_config"], {"attn_scale": -1.0}, "attn_scale -1.0 must be"),
        (SCOUT["text_config"], {"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than"),
    ],
)
def test_bad_configs_are_refused_by_the_key(
    tmp_path: Path, base: dict[str, Any], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        written(tmp_path, {"architectures": ["Llama4ForCausalLM"], **base, **fields})
