"""Models that were made for vectors: how they are stored, and what their folders declare."""

from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.errors import ModelError
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.pooling import read_pooling
from llmbox.engine.sampling_params import SamplingParams
from support.pooled_models import MODULES, declare, make_pooled_model
from support.real_engines import load, run
from support.tiny_models import make_tiny_model, tiny_config, write_json

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
