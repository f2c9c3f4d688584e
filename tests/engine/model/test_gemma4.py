"""Gemma 4: the language part of published folders, sizes of published models, ranks, and what is refused."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import ModelError, ParallelError
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.planning.estimator import MemoryBudget, MemoryPlan, estimate
from llmbox.engine.planning.performance_model import rank_shape
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.quant_formats import QUANTS
from support.families import COMMON, FAMILIES, make_family, randomize, spell_as_before
from support.rank_threads import load_ranks
from support.real_engines import ask, hf_tokens, load, tokens

PROMPT = ask("a", range(3, 40), 6)
EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def make_published(directory: Path) -> Path:
    """Write a Gemma 4 with its towers, and with the linears that layers with shared keys do not use."""
    import torch
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = tower | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    audio = tower | {"output_proj_dims": 16, "subsampling_conv_channels": [8, 8]}
    config = Gemma4Config(
        text_config=COMMON | FAMILIES["gemma4_text"] | {"model_type": "gemma4_text"},
        vision_config=vision,
        audio_config=audio,
        **{f"{name}_token_id": 319 for name in ("image", "video", "audio")},
    )
    model = Gemma4ForConditionalGeneration(config)
    randomize(model, 0)
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    unused = {"k_proj": (32, 64), "v_proj": (32, 64), "k_norm": (16,)}
    for name, shape in unused.items():
        weights[f"model.language_model.layers.4.self_attn.{name}.weight"] = torch.ones(shape)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_the_language_part(tmp_path: Path) -> None:
    from transformers import Gemma4ForConditionalGeneration

    model = make_published(tmp_path)
    unused = sum(
        prod(entry.shape) for name, entry in list_tensors(model).items() if ".4.self_attn.k_" in name
    )
    counted = sum(prod(entry.shape) for entry in list_tensors(model).values())
    assert parse_config(model).num_parameters == counted - unused - 32 * 64
    theirs = Gemma4ForConditionalGeneration.from_pretrained(model).eval()
    assert tokens(load(model), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 6)


SMALL: dict[str, Any] = {
    "num_attention_heads": 8,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
}
LARGE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}
PUBLISHED: dict[str, tuple[dict[str, Any], float, int]] = {
    "E2B": (
        SMALL
        | {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": [FULL if layer % 5 == 4 else SLIDING for layer in range(35)],
        },
        4.629e9,
        2 * 2 * (12 * 256 + 3 * 512),
    ),
    "E4B": (
        SMALL
        | {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        },
        7.46e9,
        2 * 2 * 2 * (20 * 256 + 4 * 512),
    ),
    "31B": (
        LARGE
        | {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
        30.7e9,
        2 * 2 * (50 * 16 * 256 + 10 * 4 * 512),
    ),
    "26B-A4B": (
        LARGE
        | {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        25.2e9,
        2 * 2 * (25 * 8 * 256 + 5 * 2 * 512),
    ),
}
"""Sizes of the published text parts: fields of config.json, parameters, bytes of KV for a token in
bfloat16."""


def written(directory: Path, **fields: Any) -> ModelConfig:
    raw = {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16", **fields}
    (directory / "config.json").write_text(json.dumps(raw))
    return parse_config(directory)


def planned(config: ModelConfig, **options: Any) -> MemoryPlan:
    budget = MemoryBudget(device="cpu", available=256 << 30, cores=8, native_kernels=True)
    return estimate(config.shape(), budget, EngineConfig(model_path="", name="", max_running=1, **options))


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_published_models(tmp_path: Path, name: str) -> None:
    fields, params, kv_bytes = PUBLISHED[name]
    config = written(tmp_path, **fields)
    shape = config.shape()
    assert config.num_parameters == pytest.approx(params, rel=3e-3)
    assert shape.kv_bytes_per_token("bfloat16") == kv_bytes
    assert rank_shape(shape, 2, 1).params == pytest.approx(params / 2, rel=0.02)
    if name == "26B-A4B":
        assert shape.active_params == pytest.approx(3.8e9, rel=0.02)
    if name == "E2B":  # without the rows of tables that are only looked up
        assert shape.active_params == pytest.approx(2.3e9, rel=0.02)
    if name == "31B":  # sliding layers keep their window, others the whole context
        plan = planned(config)
        assert plan.kv_bytes_per_token == 2 * 2 * 10 * 4 * 512
        assert plan.window_bytes_per_token == 2 * 2 * 50 * 16 * 256
        assert plan.kv_bytes < 24 << 30 < planned(config, chunked_prefill=False).kv_bytes


@pytest.mark.parametrize(
    ("arch", "config", "options"),
    [
        ("gemma4_text", {}, {"tp": 2}),
        ("gemma4_text", EXPERTS, {"tp": 2, "pp": 2}),
        (
            "gemma4_unified_text",
            {"intermediate_size": 128},
            {"tp": 2, "dtype": "bfloat16", "quant": "int8-g32"},
        ),
    ],
)
def test_ranks_give_the_tokens_of_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    config: dict[str, Any],
    options: dict[str, Any],
) -> None:
    model = make_family(tmp_path, arch, **config)
    alone = {key: value for key, value in options.items() if key not in {"tp", "pp"}}
    requests = [PROMPT, ask("b", range(7, 30), 6, temperature=0.9, seed=5)]
    assert tokens(load_ranks(model, monkeypatch, **options), requests) == tokens(
        load(model, **alone), requests
    )


def test_layers_that_need_others_stay_on_one_stage(tmp_path: Path) -> None:
    model = make_family(tmp_path, "gemma4_text")
    with pytest.raises(ParallelError, match=r"--pp 2: layers of this model read keys and values of others"):
        load(model, pp=2)


def test_a_quantized_folder_answers_as_one_quantized_at_load(tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", "gemma4_text", **EXPERTS | {"hidden_size_per_layer_input": 16})
    quantize(model, tmp_path / "out", QUANTS["int8"], 1, lambda _done, _total: None)
    assert tokens(load(tmp_path / "out"), [PROMPT]) == tokens(load(model, quant="int8"), [PROMPT])


def test_numbers_of_layers_may_begin_with_zeros(tmp_path: Path) -> None:
    """As transformers writes them for ten layers and more."""
    types = [SLIDING, FULL] * 6
    model = make_family(tmp_path, "gemma4_text", num_hidden_layers=12, layer_types=types)
    raw = json.loads((model / "config.json").read_text())
    assert min(raw["per_layer_config"]) == "01"
    found = parse_config(model)
    spell_as_before(model)
    assert parse_config(model) == found


ROPE = {"rope_type": "proportional", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"layer_types": ["full"]}, "layer_types must name full_attention or sliding_attention"),
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers 30 must be a whole number below 30 layers"),
        ({"num_kv_shared_layers": 27}, "num_kv_shared_layers 27 leaves no layer of full_attention"),
        ({"num_kv_shared_layers": 1.5}, "num_kv_shared_layers 1.5 must be"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config must give head_dim"),
        ({"per_layer_config": []}, "per_layer_config must be an object"),
        ({"global_head_dim": 128}, "head_dim 256 must be even, and at most the 128 of full attention"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"rope_parameters": {FULL: ROPE | {"partial_rotary_factor": 2.0}}}, "partial_rotary_factor 2.0"),
        ({"rope_parameters": {FULL: ROPE | {"factor": 0.5}}}, "factor 0.5 must be"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "RoPE type 'yarn' is not supported"),
        ({"rope_parameters": ROPE}, "rope_parameters must be those of full_attention"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input must be a positive whole number"),
        ({"use_bidirectional_attention": "all"}, "attention in both directions"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_bad_configs_are_refused_by_the_key(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        written(tmp_path, **fields)
