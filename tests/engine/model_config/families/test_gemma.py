import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, ModelError
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.planning.estimator import resolve_dtypes
from support.gemma_models import GEMMA
from support.tiny_models import tensor_shapes, tiny_config

# What is published, as far as it matters: nearly nothing of a Gemma 3 that sees.
SEES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
SECOND = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}


def parse(directory: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config | changes))
    return parse_config(directory)


def refused(directory: Path, arch: str, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        parse(directory, tiny_config(arch), **changes)
    return str(caught.value)


def test_a_published_gemma3_that_sees(tmp_path: Path) -> None:
    config = parse(tmp_path, SEES)
    assert (config.model_type, config.dtype, config.vocab_size) == ("gemma3_text", "bfloat16", 262208)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    assert [(rope.rope_type, rope.theta, rope.factor) for rope in config.ropes] == [
        ("linear", 1e6, 8.0),
        ("default", 1e4, 1.0),
    ]
    assert config.layer_ropes == tuple(int(window is not None) for window in config.windows)
    assert config.context_limit == 131072, "what scaling has made of 16384"
    assert config.scales.embedding == 2560**0.5
    assert config.scales.attention == 1 / 16
    assert (config.scales.attention_cap, config.scales.logits_cap) == (None, None)
    assert config.tie_word_embeddings


def test_only_layers_with_a_window_read_less(tmp_path: Path) -> None:
    shape = parse(tmp_path, SEES).shape()
    assert shape.seen(500) == pytest.approx(500)
    assert shape.seen(100_000) == pytest.approx((29 * 1024 + 5 * 100_000) / 34)


def test_a_published_gemma2(tmp_path: Path) -> None:
    config = parse(tmp_path, SECOND)
    assert config.windows == (4096, None) * 21
    assert (config.scales.attention_cap, config.scales.logits_cap) == (50.0, 30.0)
    assert config.num_parameters == 9_241_705_984
    assert len(config.ropes) == 1
    off = parse(tmp_path, SECOND, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.scales.attention_cap, off.scales.logits_cap) == (None, None)


@pytest.mark.parametrize("arch", GEMMA)
@pytest.mark.parametrize("tied", [False, True])
def test_counts_parameters(tmp_path: Path, arch: str, tied: bool) -> None:
    config = tiny_config(arch, tie_word_embeddings=tied)
    total = sum(map(prod, tensor_shapes(config).values()))
    assert parse(tmp_path, config).num_parameters == total


@pytest.mark.parametrize("arch", GEMMA)
@pytest.mark.parametrize("rope", ["default", "linear"])
def test_reads_what_transformers_writes(tmp_path: Path, arch: str, rope: str) -> None:
    from transformers import AutoConfig

    expected = parse(tmp_path, tiny_config(arch, rope))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert parse_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("arch", "changes", "says"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("gemma3_text", {"attention_bias": True}, "attention_bias"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "must be larger than 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "must be larger than 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "both directions"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, arch: str, changes: dict[str, Any], says: str
) -> None:
    assert says in refused(tmp_path, arch, **changes)


def test_a_model_that_sees_without_a_language_part(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="text_config is missing"):
        parse(tmp_path, SEES, text_config=None)


def test_the_vectors_of_a_gemma_that_looks_both_ways(tmp_path: Path) -> None:
    changes = {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}
    config = parse(tmp_path, tiny_config("gemma3_text"), **changes)
    assert (config.is_bidirectional, config.has_head) == (True, False)
    assert config.shape().kv_bytes_per_token("float32") == 0


@pytest.mark.parametrize("arch", GEMMA)
def test_float16_is_refused_and_never_chosen(tmp_path: Path, arch: str) -> None:
    shape = parse(tmp_path, tiny_config(arch), torch_dtype="float16").shape()
    config = EngineConfig(model_path=str(tmp_path), name="m")
    assert resolve_dtypes(shape, "cuda", config, native_kernels=False) == ("bfloat16", "bfloat16")
    half = EngineConfig(model_path=str(tmp_path), name="m", dtype="float16")
    with pytest.raises(DeviceError, match="--dtype bfloat16"):
        resolve_dtypes(shape, "cuda", half, native_kernels=False)
