"""Models that were made for vectors: how they are stored, and what their folders declare."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.errors import EngineError, ModelError
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.encoders.config import (
    PROMPTS_FILE,
    read_pooling,
    read_prompts,
    read_vectors,
)
from llmbox.engine.sampling_params import SamplingParams
from support.encoder_models import change_config, declare_vectors, make_encoder
from support.pooled_models import MODULES, declare, make_pooled_model
from support.real_engines import load, run
from support.tiny_models import make_tiny_model, tiny_config, write_json

ENCODED = AddRequest(
    request_id="a", prompt_ids=[5, 9, 7], params=SamplingParams(max_tokens=0, pooling="embed")
)
REQUEST = AddRequest(
    request_id="a", prompt_ids=[5, 9, 7], params=SamplingParams(max_tokens=0, pooling="last")
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"architectures": ["Qwen3Model"]}, {"architectures": "Qwen3Model"}],
    ids=str,
)
def test_without_head_and_with_short_names(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = load(make_tiny_model(tmp_path / "whole", tokenizer=False))
    part = load(make_pooled_model(tmp_path / "part", tokenizer=False, **changes))
    ((expected,), (seen,)) = (run(engine, [REQUEST])["a"] for engine in (whole, part))
    assert seen.vector == expected.vector
    assert (whole.info.generates, whole.info.pooling) == (True, "mean")
    assert (part.info.generates, part.info.pooling, part.info.hidden_size) == (False, "last", 64)


def test_a_class_without_head_needs_no_declaration(tmp_path: Path) -> None:
    directory = make_pooled_model(tmp_path, architectures=["Qwen3Model"], tokenizer=False)
    (directory / "modules.json").unlink()
    (directory / "1_Pooling" / "config.json").unlink()
    info = load(directory).info
    assert (info.generates, info.pooling) == (False, "last")


def test_without_a_declaration_a_missing_head_is_damage(tmp_path: Path) -> None:
    directory = make_pooled_model(tmp_path, tokenizer=False)
    (directory / "modules.json").unlink()
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(directory)


def test_no_memory_is_reckoned_for_a_head(tmp_path: Path) -> None:
    whole = parse_config(make_tiny_model(tmp_path / "whole", tokenizer=False))
    part = parse_config(make_pooled_model(tmp_path / "part", tokenizer=False))
    assert whole.num_parameters - part.num_parameters == 320 * 64


@pytest.mark.parametrize("changes", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_in_both_directions_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_json(tmp_path / "config.json", tiny_config() | changes)
    with pytest.raises(ModelError, match="both directions"):
        parse_config(tmp_path)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ("lasttoken", "last"),
        ("mean_tokens", "mean"),
        ("mean_sqrt_len_tokens", "mean"),
        ("cls_token", "cls"),
    ],
)
def test_declared_modes(tmp_path: Path, mode: str, pooling: str) -> None:
    found = read_pooling(declare(tmp_path, mode), generates=True)
    assert (found.pooling, found.is_declared, found.problem) == (pooling, True, "")


def test_newer_folders_name_the_mode(tmp_path: Path) -> None:
    declare(
        tmp_path, modules=[*MODULES[:1], MODULES[1] | {"type": "sentence_transformers.base.pooling.Pooling"}]
    )
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    assert read_pooling(tmp_path, generates=True).pooling == "cls"


def test_the_file_alone_declares(tmp_path: Path) -> None:
    declare(tmp_path, "cls_token")
    (tmp_path / "modules.json").unlink()
    assert read_pooling(tmp_path, generates=True).pooling == "cls"


@pytest.mark.parametrize(
    ("modes", "modules", "named"),
    [
        (("max_tokens",), MODULES, "max_tokens"),
        (("mean_tokens", "cls_token"), MODULES, "mean_tokens and pooling_mode_cls_token|cls_token and"),
        ((), MODULES, "no pooling"),
        (("cls_token",), [*MODULES, {"type": "sentence_transformers.models.Dense", "path": "3"}], "Dense"),
        (("cls_token",), MODULES[:1], "one Pooling"),
        (("cls_token",), [MODULES[1] | {"path": "../elsewhere"}], "elsewhere"),
        (("cls_token",), [MODULES[1] | {"path": "2_Other"}], "2_Other/config.json is missing"),
        (("cls_token",), {"modules": 3}, "list of modules"),
        (("cls_token",), [3], "list of modules"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_said(tmp_path: Path, modes: Any, modules: Any, named: str) -> None:
    found = read_pooling(declare(tmp_path, *modes, modules=modules), generates=True)
    assert found.is_declared
    assert any(part in found.problem for part in named.split("|"))
    assert str(tmp_path) not in found.problem


def test_dense_layers_and_prompts(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert")
    declare_vectors(tmp_path, "weightedmean_tokens", dense=((64, 32, "activation.Tanh"),))
    write_json(tmp_path / PROMPTS_FILE, {"prompts": {"query": "q: "}, "default_prompt_name": "query"})
    found = read_vectors(tmp_path, 64)
    assert (found.pooling, found.dense[0].outputs, found.dense[0].activation) == ("weighted", 32, "Tanh")
    assert read_prompts(tmp_path) == ({"query": "q: "}, "query")


DENSE = {"in_features": 64, "out_features": 32}


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("modules.json", [*MODULES[:2], {"type": "models.LSTM", "path": "2"}], "LSTM"),
        ("modules.json", [MODULES[1], MODULES[0]], "in the order Pooling, Transformer"),
        (
            "modules.json",
            [MODULES[0], MODULES[1] | {"path": "7_Pooling"}],
            "7_Pooling/config.json is missing",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "include_prompt": False},
            "include_prompt",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "the weighted mean"),
        ("2_Dense/config.json", {"in_features": 63, "out_features": 32}, "in_features is 63"),
        ("2_Dense/config.json", {"in_features": 64, "out_features": 0}, "out_features"),
        (
            "2_Dense/config.json",
            {"in_features": 64, "out_features": 32, "activation_function": "a.Mish"},
            "Mish",
        ),
        ("2_Dense/config.json", {"in_features": 64, "out_features": 31, "bias": False}, r"shape \[32, 64\]"),
        ("2_Dense/config.json", DENSE, "linear.bias is missing"),
    ],
    ids=str,
)
def test_declarations_that_an_encoder_cannot_follow(
    tmp_path: Path, file: str, content: Any, told: str
) -> None:
    make_encoder(tmp_path, "distilbert")
    declare_vectors(tmp_path, dense=((64, 32, "linear.Identity"),))
    write_json(tmp_path / file, content)
    with pytest.raises(ModelError, match=told):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"hidden_act": "mish"}, "hidden_act"),
        ("bert", {"num_hidden_layers": 4}, "layers.3.*missing"),
        ("bert", {"num_hidden_layers": 2}, "no place in the architecture"),
        ("bert", {"intermediate_size": 95}, r"shape \[96, 64\]"),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, "head.dense.*missing|out_proj"),
        ("bert", {"quantization_config": {"quant_method": "other"}}, "quantization_config"),
        ("bert", {"num_attention_heads": 6}, "do not make up hidden_size"),
        ("bert", {"num_key_value_heads": 2}, "do not make up hidden_size"),
        ("mpnet", {"relative_attention_num_buckets": 1}, "multiple of 4"),
        ("roberta", {"pad_token_id": 200}, "leaves no positions"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("nomic_bert", {"prenorm": True}, "prenorm"),
    ],
    ids=str,
)
def test_encoders_that_would_be_computed_wrongly(
    tmp_path: Path, kind: str, changes: dict[str, Any], told: str
) -> None:
    make_encoder(tmp_path, kind)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=told):
        load(tmp_path)


def test_options_that_need_keys_and_values_are_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert")
    for options in ({"tp": 2}, {"pp": 2}, {"overlap": True}):
        with pytest.raises(EngineError, match="both directions"):
            load(tmp_path, **options)


def test_keys_of_the_first_nomic_files(tmp_path: Path) -> None:
    """As nomic-embed-text-v1.5 is published: other keys, and Python code that is not run."""
    make_encoder(tmp_path, "nomic_bert")
    expected = run(load(tmp_path), [ENCODED])["a"][0].vector
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 320, "n_embd": 64,
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 80, "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": None, "prenorm": False, "qkv_proj_bias": False,
    }  # fmt: skip
    write_json(tmp_path / "config.json", config)
    assert run(load(tmp_path), [ENCODED])["a"][0].vector == expected


def test_int8_weights(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert", hidden_size=128, intermediate_size=256)
    whole, rounded = (
        torch.tensor(array("f", run(load(tmp_path, quant=quant), [ENCODED])["a"][0].vector))
        for quant in ("none", "int8")
    )
    assert not torch.equal(whole, rounded)
    assert torch.nn.functional.cosine_similarity(whole, rounded, dim=0) > 0.99
