"""What `fit` finds wrong between config.json and the weights: the load's own sentence, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.engine.errors import ModelError
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
}


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
