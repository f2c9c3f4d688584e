"""Families whose checkpoints transformers writes: both spellings of config.json, shards, parameters."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.expected_tensors import check_weights
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from llmbox.engine.planning.performance_model import rank_shape
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.quant_formats import QUANTS
from support.families import (
    COMMON,
    FAMILIES,
    YARN,
    make_family,
    make_mistral_that_sees,
    make_qwen_that_sees,
    spell_as_before,
    stack_experts,
)
from support.fp8_checkpoint import round_to_blocks
from support.real_engines import ask, hf_model, hf_tokens, load, tokens

PROMPT = ask("a", range(3, 40), 6)


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_family_is_read_whole(tmp_path: Path, arch: str) -> None:
    model = make_family(tmp_path / "one", arch)
    config = parse_config(model)
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    sharded = make_family(tmp_path / "sharded", arch, shards=3)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    spell_as_before(sharded)
    assert parse_config(sharded) == config
    assert tokens(load(sharded), [PROMPT]) == tokens(load(model), [PROMPT])


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_family_is_quantized_at_load(tmp_path: Path, arch: str, quant: str) -> None:
    engine = load(make_family(tmp_path, arch), quant=quant, dtype="bfloat16")
    alone = tokens(engine, [PROMPT])
    others = [ask(str(i), range(5 + i, 20), 6) for i in range(3)]
    assert tokens(engine, [PROMPT, *others])["a"] == alone["a"], "one request, one answer"


@pytest.mark.parametrize("arch", ["mistral", "ministral3", "mistral4"])
def test_the_language_part_of_a_mistral_3(tmp_path: Path, arch: str) -> None:
    from transformers import Mistral3ForConditionalGeneration

    model = make_mistral_that_sees(tmp_path, arch)
    assert parse_config(model).model_type == arch
    theirs = Mistral3ForConditionalGeneration.from_pretrained(model).eval()
    assert tokens(load(model), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 6)


def test_the_language_part_of_a_qwen_3_5(tmp_path: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    model = make_qwen_that_sees(tmp_path)
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(model).eval()
    assert tokens(load(model), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 6)


def test_experts_of_a_qwen_3_5_in_one_tensor(tmp_path: Path) -> None:
    model = make_family(tmp_path, "qwen3_5_moe_text")
    apart = tokens(load(model), [PROMPT])
    stack_experts(model)
    assert tokens(load(model), [PROMPT]) == apart


@pytest.mark.parametrize("arch", ["seed_oss", "gpt_neox", "nemotron_h", "kimi_linear", "bailing_hybrid"])
def test_a_stored_head_counts_more_than_tie_word_embeddings(tmp_path: Path, arch: str) -> None:
    """As in transformers, which ties none of the last three."""
    model = make_family(tmp_path, arch)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    expected = hf_tokens(hf_model(model), PROMPT.prompt_ids, 6)
    assert tokens(load(model), [PROMPT])["a"] == expected


def test_a_stored_copy_of_the_embedding_is_no_head(tmp_path: Path) -> None:
    model = make_family(tmp_path, "seed_oss", tie_word_embeddings=True)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors")
    assert parse_config(model).tie_word_embeddings


KIMI_ATTENTION = [4, 8, 12, 16, 20, 24, 27]
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5}
KNOWN: list[tuple[str, dict[str, Any], int, float]] = [
    (
        "GptOssForCausalLM",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
        20_914_757_184,
        3.6e9,
    ),
    (
        "DeepseekV3ForCausalLM",
        LATENT
        | {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        671_026_419_200,
        36.6e9,
    ),
    (
        "Qwen2MoeForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        14_315_784_192,
        2.4e9,
    ),
    (
        "NemotronHForCausalLM",
        {
            "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_num_heads": 128,
        },
        8_100_852_736,
        7.56e9,
    ),
    (
        "FalconH1ForCausalLM",
        {
            "vocab_size": 130048,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
        },
        7_585_513_568,
        7.19e9,
    ),
    (
        "KimiLinearForCausalLM",
        {
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_attn_config": {
                "full_attn_layers": KIMI_ATTENTION,
                "kda_layers": [layer for layer in range(1, 28) if layer not in KIMI_ATTENTION],
            },
        },
        49122681728,
        3.1e9,
    ),
    ("Mamba2ForCausalLM", {}, 7_285_403_648, 7.15e9),
    (
        "FalconMambaForCausalLM",
        {
            "vocab_size": 65024,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "intermediate_size": 8192,
            "tie_word_embeddings": False,
        },
        7_272_665_088,
        7.0e9,
    ),
    (
        "BitNetForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 30,
            "num_attention_heads": 20,
            "num_key_value_heads": 5,
            "tie_word_embeddings": True,
        },
        2_412_820_480,
        2.41e9,
    ),
    (
        "OlmoHybridForCausalLM",
        {
            "vocab_size": 100352,
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
        },
        7_430_870_688,
        7.05e9,
    ),
]
"""gpt-oss-20b, DeepSeek-V3, Qwen1.5-MoE-A2.7B, Nemotron-H 8B, Falcon-H1 7B, Kimi-Linear 48B, Mamba-Codestral
7B, Falcon-Mamba 7B, BitNet 2B, OLMo-hybrid 7B: all parameters, and those that one token meets."""


@pytest.mark.parametrize(("name", "sizes", "params", "active"), KNOWN)
def test_sizes_of_known_models(
    tmp_path: Path, name: str, sizes: dict[str, Any], params: int, active: float
) -> None:
    config = {"architectures": [name], "max_position_embeddings": 4096, "dtype": "bfloat16", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = parse_config(tmp_path)
    shape = found.shape()
    assert found.num_parameters == params
    assert shape.active_params == pytest.approx(active, rel=0.01)
    # The closed form, by which ranks are planned, leaves out only some norms and biases.
    assert replace(shape, exact_params=None).params == pytest.approx(params, rel=1e-3)
    assert rank_shape(shape, 2, 1).params == pytest.approx(params / 2, rel=0.02)
    if (
        found.latent is not None and found.recurrent is None
    ):  # keys and values of one latent, whatever the heads
        assert shape.kv_bytes_per_token("bfloat16") == 2 * 2 * 61 * (512 + 64)


def test_a_gpu_stores_latents_once(tmp_path: Path) -> None:
    shape = parse_config(make_family(tmp_path, "deepseek_v3")).shape()
    asked = EngineConfig(model_path="", name="", max_running=1)
    stored = {}
    for device in ("cpu", "cuda"):
        budget = MemoryBudget(device=device, available=8 << 30, native_kernels=device == "cpu")
        stored[device] = estimate(shape, budget, asked).kv_bytes_per_token
    assert stored["cpu"] >= 2 * stored["cuda"] == 2 * 2 * 40 * 4


@pytest.mark.parametrize("arch", ["gpt_oss", "deepseek_v3", "granitemoe"])
def test_a_quantized_folder_answers_as_one_quantized_at_load(tmp_path: Path, arch: str) -> None:
    """Stacked experts and absorbed linears are written one by one."""
    model = make_family(tmp_path / "model", arch)
    quantize(model, tmp_path / "out", QUANTS["int8"], 1, lambda _done, _total: None)
    check_weights("out", parse_config(tmp_path / "out"), list_tensors(tmp_path / "out"))
    assert tokens(load(tmp_path / "out"), [PROMPT]) == tokens(load(model, quant="int8"), [PROMPT])


def test_deepseek_in_blocks_of_fp8(tmp_path: Path) -> None:
    """As DeepSeek publishes it: heads of the linear that expands latents are whole blocks."""
    sizes = dict.fromkeys(
        ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 128
    )
    sizes |= {"num_attention_heads": 2, "intermediate_size": 128, "moe_intermediate_size": 128}
    sizes |= {"qk_rope_head_dim": 64, "head_dim": 64}
    model, same = (make_family(tmp_path / name, "deepseek_v3", **sizes) for name in ("model", "same"))
    wide = load_file(same / "model.safetensors") | round_to_blocks(model)
    check_weights("model", parse_config(model), list_tensors(model))
    save_file({name: tensor.contiguous() for name, tensor in wide.items()}, same / "model.safetensors")
    expected = tokens(load(same, dtype="float32"), [PROMPT])
    assert tokens(load(model, dtype="float32"), [PROMPT]) == expected


@pytest.mark.parametrize(
    ("arch", "rope", "problem"),
    [
        ("olmo3", {"full_attention": YARN | {"truncate": False}}, "truncate False is not supported by layer"),
        ("ministral3", {"rope_type": "default", "llama_4_scaling_beta": 0.5}, "llama_4_scaling_beta 0.5 is"),
    ],
)
def test_rope_parameters_that_would_be_computed_otherwise(
    tmp_path: Path, arch: str, rope: dict[str, Any], problem: str
) -> None:
    raw = {**COMMON, "model_type": arch, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=problem):
        parse_config(tmp_path)
