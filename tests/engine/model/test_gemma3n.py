"""Gemma 3n: the language part of published folders, sizes of published models, ranks, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, ModelError, ParallelError
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from llmbox.engine.planning.performance_model import rank_shape
from llmbox.engine.planning.runnable import RunnablePlan, require_runnable
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.support import KernelSite
from support.families import make_family
from support.rank_threads import load_ranks
from support.real_engines import ask, hf_model, hf_tokens, load, tokens

PROMPT = ask("a", range(3, 40), 6)


def test_the_language_part(tmp_path: Path) -> None:
    """A published folder has towers, and keys and values of layers that do not use them."""
    model = make_family(tmp_path, "gemma3n_text")
    theirs = hf_tokens(hf_model(model), PROMPT.prompt_ids, 6)
    inside = load_file(model / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): x for name, x in inside.items()}
    weights |= {f"model.{name}.weight": torch.ones(2, 2) for name in ("vision_tower.a", "embed_audio.b")}
    layer = "model.language_model.layers.4.self_attn"
    weights |= {f"{layer}.{name}_proj.weight": torch.ones(32, 64) for name in "kv"}
    weights[f"{layer}.k_norm.weight"] = torch.ones(16)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((model / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
    }
    (model / "config.json").write_text(json.dumps(whole))
    assert tokens(load(model), [PROMPT])["a"] == theirs


def written(directory: Path, **fields: Any) -> ModelConfig:
    raw = {"architectures": ["Gemma3nForCausalLM"], "dtype": "bfloat16", **fields}
    (directory / "config.json").write_text(json.dumps(raw))
    return parse_config(directory)


E2B = {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10}


@pytest.mark.parametrize(
    ("fields", "params", "active", "owners"),
    [(E2B, 4_435_182_688, 2.42e9, 20), ({}, 6_835_235_568, 4.49e9, 20)],
)
def test_sizes_of_published_models(
    tmp_path: Path, fields: dict[str, Any], params: int, active: float, owners: int
) -> None:
    """E2B and E4B: parameters as transformers counts them, and those that a token is multiplied with."""
    config = written(tmp_path, **fields)
    shape = config.shape()
    assert config.num_parameters == params
    assert shape.active_params == pytest.approx(active, rel=0.02)
    assert shape.kv_bytes_per_token("bfloat16") == 2 * 2 * owners * 2 * 256
    assert rank_shape(shape, 2, 1).params == pytest.approx(params / 2, rel=0.1)  # each has all projections


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "quant": "int8-g32"}])
def test_ranks_give_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = make_family(tmp_path, "gemma3n_text", intermediate_size=128)
    requests = [PROMPT, ask("b", range(7, 30), 6, temperature=0.9, seed=5)]
    alone = tokens(load(model, **options), requests)
    assert tokens(load_ranks(model, monkeypatch, tp=2, **options), requests) == alone
    with pytest.raises(ParallelError, match=r"--pp 2: layers of this model read keys and values of others"):
        load(model, pp=2)


def test_a_quantized_folder_answers_as_one_quantized_at_load(tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", "gemma3n_text")
    quantize(model, tmp_path / "out", QUANTS["int8"], 1, lambda _done, _total: None)
    assert tokens(load(tmp_path / "out"), [PROMPT]) == tokens(load(model, quant="int8"), [PROMPT])


def test_gpus_are_refused(tmp_path: Path) -> None:
    config = written(tmp_path)
    budget = MemoryBudget(device="cpu", available=64 << 30, cores=8, native_kernels=True)
    asked = EngineConfig(model_path="", name="")
    plan = RunnablePlan.of(estimate(config.shape(), budget, asked), config)
    with pytest.raises(DeviceError, match="rows of several streams of this model run on CPUs only"):
        require_runnable(plan, KernelSite(device="cuda"), asked)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"altup_num_inputs": 9}, "altup_num_inputs 9 is not supported, only 2 to 8"),
        ({"altup_num_inputs": 1}, "altup_num_inputs 1 is not supported"),
        ({"altup_active_idx": 4}, "altup_active_idx 4 is none of the 4 streams"),
        ({"altup_active_idx": 0.5}, "altup_active_idx 0.5 is none of the 4 streams"),
        ({"laurel_rank": 0}, "laurel_rank must be a positive whole number"),
        ({"intermediate_size": [64, 64]}, "intermediate_size must be a number, or one for each of 35 layers"),
        ({"intermediate_size": [0] * 35}, "intermediate_size must be a positive whole number"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must have 35 numbers"),
        ({"activation_sparsity_pattern": [1.0] * 35}, "numbers from 0 to below 1"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers 32 leaves no layer of full_attention"),
        ({"layer_types": ["full"]}, "layer_types must name full_attention or sliding_attention"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input must be a positive whole number"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    ],
)
def test_bad_configs_are_refused_by_the_key(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        written(tmp_path, **fields)
