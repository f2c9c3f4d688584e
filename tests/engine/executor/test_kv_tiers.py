"""Engines over real models: blocks on disk give the same tokens, and only to the model that wrote them."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.core.engine import Engine
from llmbox.engine.kv_store import usage
from support.families import FAMILIES, make_family
from support.real_engines import ask, load, run
from support.tiny_models import make_tiny_model

PROMPT = [3 + i * 7 % 300 for i in range(500)]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": ({}, {}),
    "mistral": ({"sliding_window": 21}, {"token_budget": 64}),
    "lfm2": ({}, {}),
    "granitemoehybrid": ({}, {}),
    "lfm3": ({"sliding_window": 21}, {"token_budget": 64}),
}
"""Config and options: full attention, sliding windows with blocks of their own, recurrent layers, both."""


@pytest.fixture
def disk(tmp_path, monkeypatch):
    folder = tmp_path / "kv"
    for name, value in usage.cache_variables(folder, 1 << 30, 1.0).items():
        monkeypatch.setenv(name, value)
    return folder


def make(directory: Path, arch: str) -> Path:
    config = MODELS[arch][0] | {"max_position_embeddings": 1024}
    if arch in FAMILIES:
        return make_family(directory, arch, **config)
    return make_tiny_model(directory, arch=arch, tokenizer=False, **config)


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt came from disk."""
    outputs = run(engine, [ask("a", prompt, 12, temperature=0.8, seed=3)])["a"]
    return [token for output in outputs for token in output.token_ids], outputs[0].disk_tokens or 0


@pytest.mark.parametrize("arch", MODELS)
def test_another_engine_goes_on_from_disk_with_the_same_tokens(arch, tmp_path, disk):
    model = make(tmp_path / "model", arch)
    options: dict[str, Any] = {"dtype": "float32", **MODELS[arch][1]}
    first = load(model, **options)
    assert bool(first.scheduler.kv_cache.windows) == (arch in {"mistral", "lfm3"})
    expected = answer(first, PROMPT)
    assert expected[1] == 0
    turn = [*PROMPT, *expected[0], 5, 6, 7]
    first.close()
    second, apart = load(model, **options), load(model, prefix_cache=False, **options)
    assert answer(second, PROMPT) == (expected[0], 496)
    third = load(model, **options)
    tokens, found = answer(third, turn)
    assert tokens == answer(apart, turn)[0]
    assert found >= 496
    second.close()
    third.close()


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_keep_their_parts_in_one_file(ranks, tmp_path, disk):
    model = make(tmp_path / "model", "qwen3")
    first = load(model, dtype="float32", **ranks)
    expected = answer(first, PROMPT)[0]
    assert first.scheduler.kv_cache.tiers is not None
    first.close()
    first.executor.close()
    second = load(model, dtype="float32", **ranks)
    assert answer(second, PROMPT) == (expected, 496)
    second.close()
    second.executor.close()
    alone = load(model, dtype="float32")
    assert answer(alone, PROMPT)[1] == 0, "its blocks lie otherwise"
    alone.close()


def test_blocks_of_ranks_with_whole_experts_are_theirs_alone(tmp_path, disk):
    """Another order of sums: not the last bits of ranks with parts of all experts."""
    sizes = {"arch": "mixtral", "max_position_embeddings": 1024}
    model = make_tiny_model(tmp_path / "model", tokenizer=False, **sizes)
    expected = None
    for whole, from_disk in ((True, 0), (False, 0), (True, 496)):
        engine = load(model, dtype="bfloat16", tp=2, expert_parallel=whole)
        tokens, found = answer(engine, PROMPT)
        assert found == from_disk
        expected = expected or tokens
        assert not whole or tokens == expected
        engine.close()
        engine.executor.close()


def test_overlapping_steps_read_and_write_too(tmp_path, disk, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    model = make(tmp_path / "model", "qwen3")
    first = load(model, dtype="float32", overlap=True)
    expected = answer(first, PROMPT)[0]
    first.close()
    second = load(model, dtype="float32", overlap=True)
    assert answer(second, PROMPT) == (expected, 496)
    second.close()


@pytest.mark.parametrize(
    "change", [{"kv_dtype": "int8"}, {"dtype": "bfloat16"}, {"quant": "int8"}, {"block_size": 32}], ids=str
)
def test_blocks_of_another_format_are_not_read(change, tmp_path, disk):
    model = make(tmp_path / "model", "qwen3")
    first = load(model, dtype="float32")
    answer(first, PROMPT)
    first.close()
    other = load(model, **{"dtype": "float32", **change})
    assert answer(other, PROMPT)[1] == 0
    other.close()
    assert len(list(disk.glob("*/about.json"))) == 2


def test_blocks_of_other_weights_are_not_read(tmp_path, disk):
    model = make(tmp_path / "model", "qwen3")
    first = load(model, dtype="float32")
    answer(first, PROMPT)
    first.close()
    make_tiny_model(tmp_path / "model", tokenizer=False, max_position_embeddings=1024, seed=1)
    other = load(model, dtype="float32")
    assert answer(other, PROMPT)[1] == 0
    other.close()


def test_a_folder_that_cannot_be_used_is_left_out_and_told(tmp_path, disk, caplog):
    disk.mkdir(mode=0o700)
    (disk / "format").write_text("99\n")
    engine = load(make(tmp_path / "model", "qwen3"), dtype="float32")
    assert "of a newer llmbox (format 99" in caplog.text
    assert len(answer(engine, PROMPT)[0]) == 12
    engine.close()
    assert [path.name for path in disk.iterdir() if path.is_dir()] == []


def test_what_the_files_tell(tmp_path, disk):
    engine = load(model := make(tmp_path / "model", "qwen3"), dtype="float32")
    answer(engine, PROMPT)
    engine.close()
    (about,) = disk.glob("*/about.json")
    told = json.loads(about.read_text())
    assert told["model"] == str(model)
    assert told["format"] == "float32, KV float32"
    files = [path for path in disk.glob("*/*/*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert disk.stat().st_mode & 0o777 == 0o700
