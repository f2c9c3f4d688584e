"""Pictures where a model is shared by ranks: the tokens of one process, and what the plan counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.vision.test_seeing_models import seeing
from llmbox.engine.ipc.messages import AddRequest
from support.rank_threads import load_ranks
from support.real_engines import load, run, tokens
from support.vision_models import make_vision_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 512}


def asked(directory: Path) -> list[AddRequest]:
    first = seeing(directory, "a")
    text = AddRequest(request_id="text", prompt_ids=list(range(30, 60)), params=first.params)
    return [first, seeing(directory, "b", (131, 70)), seeing(directory, "c", ask=60), text]


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("qwen3_vl", {"tp": 2}),
        ("qwen3_vl", {"pp": 2}),  # the second deepstack level is added at the end of the first stage
        ("qwen3_vl", {"tp": 2, "pp": 3}),  # and here in the second stage
        ("gemma3", {"tp": 2, "pp": 2}),  # rows of a picture see each other
        ("gemma4", {"pp": 2}),
        ("mistral3", {"tp": 2}),
        ("qwen3_5", {"tp": 2}),
        ("glm4v", {"tp": 2}),
        ("internvl", {"pp": 2}),
        ("llama4", {"pp": 2}),
        ("minicpmv4_6", {"tp": 2}),
        ("exaone4_5", {"pp": 2}),
        ("llava_onevision", {"tp": 2}),
        ("paddleocr_vl", {"pp": 2}),
        ("aya_vision", {"tp": 2}),
        ("kimi_k25", {"pp": 2}),
    ],
)
def test_ranks_give_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cut: dict[str, int]
) -> None:
    make_vision_model(tmp_path, kind)
    engine = load_ranks(tmp_path, monkeypatch, token_budget=24, **cut, **OPTIONS)
    assert engine.info.image_problem == ""
    # The plan counts the tower once: the first rank has it, and no other.
    towers = [share.images._encoder is not None for share in engine.executor.runner.shares]
    assert towers == [True, *[False] * (len(towers) - 1)]
    found = tokens(engine, asked(tmp_path))
    assert found == tokens(load(tmp_path, **OPTIONS), asked(tmp_path))
    again = run(engine, [replace(asked(tmp_path)[0], request_id="again")])["again"]
    assert again[0].cached_tokens > 0
    assert [token for output in again for token in output.token_ids] == found["a"]


def test_a_picture_that_cannot_be_encoded_ends_its_requests_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision_model(tmp_path, "qwen3_vl")
    engine = load_ranks(tmp_path, monkeypatch, tp=2, **OPTIONS)
    tower = engine.executor.runner.images
    encode = tower._encoder.encode

    def fail(_image: Any) -> Any:
        raise MemoryError("no memory for a tile")
        yield

    monkeypatch.setattr(tower._encoder, "encode", fail)
    found = run(engine, asked(tmp_path))
    assert "no memory for a tile" in found["a"][-1].error_message
    assert found["text"][-1].finish_reason == "length"
    monkeypatch.setattr(tower._encoder, "encode", encode)
    assert run(engine, asked(tmp_path)[:1])["a"][-1].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}])
def test_processes_give_the_tokens_of_one(tmp_path: Path, cut: dict[str, int]) -> None:
    make_vision_model(tmp_path, "qwen3_vl")
    one = load(tmp_path, **OPTIONS)
    ranks = load(tmp_path, token_budget=24, **cut, **OPTIONS)
    assert tokens(ranks, asked(tmp_path)) == tokens(one, asked(tmp_path))
    assert ranks.info.vision_bytes == one.info.vision_bytes
