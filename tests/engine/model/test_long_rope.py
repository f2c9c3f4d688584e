"""LongRoPE: short factors up to the original context, long ones beyond it, whatever the work is cut into."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.errors import ModelError
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model.rotary import Rotary
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import estimate
from llmbox.engine.planning.memory_plan import MemoryBudget
from support.families import make_family
from support.late_device import FakeCapture, device_engine
from support.rank_threads import load_ranks
from support.real_engines import ask, draft_at_no_price, hf_model, load, run, tokens
from support.tiny_models import ORIGINAL_CONTEXT, ROPE_VARIANTS, make_tiny_model, tiny_config, write_json

LENGTHS = [5, 20, ORIGINAL_CONTEXT - 1, ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1, 50]
MANY = 24
"""Tokens of each answer: that of the second prompt grows beyond the original context, that of the first does
not."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("phi3"), arch="phi3", rope="longrope", seed=3)


@pytest.fixture(scope="module")
def asks() -> list[AddRequest]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]
    return [ask(str(number), prompt, MANY) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(model: Path, asks: list[AddRequest]) -> dict[str, list[int]]:
    """What transformers generates, which computes its cache again at the original context."""
    return generated(model, asks)


@torch.inference_mode()
def generated(directory: Path, asks: Sequence[AddRequest], **options: Any) -> dict[str, list[int]]:
    theirs, found = hf_model(directory), {}
    for request in asks:
        ids = torch.tensor([request.prompt_ids])
        answer = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MANY,
            min_new_tokens=MANY,
            do_sample=False,
            eos_token_id=None,
            **options,
        )
        found[request.request_id] = answer[0, ids.shape[1] :].tolist()
    return found


def test_the_factors_change_the_answers(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Otherwise the tests below could not fail."""
    config = json.loads((model / "config.json").read_text())
    rope = config["rope_scaling"]
    for name in ("short_factor", "long_factor"):
        other = tmp_path / name
        other.mkdir()
        (other / "model.safetensors").symlink_to(model / "model.safetensors")
        scaling = {**rope, "short_factor": rope[name], "long_factor": rope[name]}
        write_json(other / "config.json", config | {"rope_scaling": scaling})
        same = {key for key, answer in tokens(load(other), asks).items() if answer == expected[key]}
        assert same == ({"0"} if name == "short_factor" else {"4", "5"})


WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_running": 1},
    "batch": {},
    "chunks": {"max_running": 4, "token_budget": 7},
    "no cache": {"prefix_cache": False},
    "static": {"batching": "static", "max_running": 3},
    "preempted": {"kv_tokens": 112, "context": 80, "block_size": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]], way: str
) -> None:
    engine = load(model, **WAYS[way])
    assert tokens(engine, asks) == expected
    again = [replace(request, request_id=f"again {request.request_id}") for request in asks]
    assert list(tokens(engine, again).values()) == list(expected.values())
    assert way != "preempted" or engine.stats().preemptions > 0
    engine.scheduler.check()


@pytest.mark.parametrize("delivered", [1, 11, 12, 13, 14, 20])
def test_a_resumed_request_goes_on_exactly(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]], delivered: int
) -> None:
    """Twelve tokens fill the original context, so that the next one is the first of the long factors."""
    request, answer = asks[1], expected["1"]
    resumed = replace(request, output_ids=answer[:delivered])
    assert tokens(load(model), [resumed])["1"] == answer[delivered:]


def test_choices_share_a_prompt_on_both_sides(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]]
) -> None:
    """The second choice comes when the first one has grown beyond the original context."""
    engine = load(model, prefix_cache=False)
    engine.add(asks[1])
    for _ in range(16):
        engine.step()
    assert next(iter(engine.scheduler.running)).is_long
    engine.add(replace(asks[1], request_id="fork", fork_of="1"))
    found: dict[str, list[int]] = {"1": [], "fork": []}
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id] += output.token_ids
    assert found["fork"] == expected["1"]
    assert expected["1"][16:] == found["1"]


def test_a_second_turn_finds_what_the_first_computed_after_the_change(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]]
) -> None:
    engine = load(model)
    tokens(engine, asks[1:2])
    turn = ask("turn", [*asks[1].prompt_ids, *expected["1"], 7, 8, 9], 4)
    (first, *_) = run(engine, [turn])["turn"]
    assert first.cached_tokens == 32


def test_drafts_end_at_the_change(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    draft_at_no_price(monkeypatch)
    for options in (
        {},
        {"draft_path": str(model)},
    ):  # from n-grams, and from the model as its own draft model
        engine = load(model, **options)
        engine.scheduler.drafting._rows = 24
        tokens(engine, asks)
        again = [replace(request, request_id=f"again {request.request_id}") for request in asks]
        assert list(tokens(engine, again).values()) == list(expected.values())
        assert engine.stats().accepted_tokens > 20


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_that_are_launched_ahead(
    model: Path,
    asks: list[AddRequest],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    for options in (WAYS["batch"], WAYS["chunks"], WAYS["preempted"]):
        engine = device_engine(model, capture=FakeCapture() if graphs else None, **options)
        while graphs and engine.executor.prepare():
            pass
        assert tokens(engine, asks) == expected
        engine.scheduler.check()


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_where_steps_are_launched_ahead(
    model: Path,
    asks: list[AddRequest],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
) -> None:
    """A draft's row has the factors of its own position: none is verified beyond the border."""
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    draft_at_no_price(monkeypatch)
    engine = device_engine(model, capture=FakeCapture() if graphs else None, speculate="on")
    while graphs and engine.executor.prepare():
        pass
    assert tokens(engine, asks) == expected
    again = [replace(request, request_id=f"again {request.request_id}") for request in asks]
    assert list(tokens(engine, again).values()) == list(expected.values())
    assert engine.stats().accepted_tokens > 20, "what the first answers had is proposed to the second ones"
    engine.scheduler.check()


def test_ranks(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(load_ranks(model, monkeypatch, tp=2, pp=2), asks) == expected


def test_prompt_logprobs_have_the_factors_of_the_whole_prompt(model: Path, asks: list[AddRequest]) -> None:
    request = asks[5]
    params = replace(request.params, prompt_logprobs=0, max_tokens=1)
    engine = load(model, max_running=3, token_budget=9)
    (output,) = run(engine, [replace(request, params=params)])["5"]
    ids = torch.tensor([request.prompt_ids])
    with torch.inference_mode():
        logprobs = hf_model(model)(ids).logits[0].log_softmax(-1)
    exact = [float(logprobs[place, token]) for place, token in enumerate(request.prompt_ids[1:])]
    found = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    assert found == pytest.approx(exact, abs=1e-4)


def test_any_architecture(tmp_path: Path, asks: list[AddRequest]) -> None:
    """Beside transformers without its cache, where it does not compute the cache again."""
    directory = make_tiny_model(tmp_path, arch="llama", rope="longrope", tokenizer=False)
    assert tokens(load(directory), asks) == generated(directory, asks, use_cache=False)


def test_scales_of_phi_moe_by_length(tmp_path: Path, asks: list[AddRequest]) -> None:
    """transformers takes its short factors for all lengths; the scales of cos and sin it changes."""
    factors = [1.0 + 0.1 * number for number in range(8)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "short_mscale": 0.8,
        "long_mscale": 1.6,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
    directory = make_family(tmp_path, "phimoe", rope_parameters=rope, sliding_window=None)
    assert parse_config(directory).short_context == ORIGINAL_CONTEXT
    assert tokens(load(directory), asks) == generated(directory, asks, use_cache=False)


def test_rows_of_one_step_have_their_own_factors(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", tiny_config("llama", "longrope"))
    rotary = Rotary(parse_config(tmp_path), 256, CPU)
    positions_T = torch.tensor([3, 31, 3, 40])
    both = rotary.rows(positions_T, torch.tensor([False, False, True, True]))
    short, long = rotary.rows(positions_T, False), rotary.rows(positions_T, True)
    for mixed, of_short, of_long in zip(both, short, long, strict=True):
        assert torch.equal(mixed, torch.cat((of_short[:, :2], of_long[:, 2:]), 1))
    assert not torch.equal(short[0], long[0])


def test_fit_says_that_long_answers_are_computed_again(model: Path) -> None:
    shape = parse_config(model).shape()
    memory = MemoryBudget(device="cpu", available=1 << 30)
    configs = [EngineConfig(model_path=str(model), name="tiny", context=context) for context in (32, 33)]
    notes = [estimate(shape, memory, config).notes for config in configs]
    assert "more than 32 tokens have LongRoPE's long factors" in " ".join(notes[1])
    assert "LongRoPE" not in " ".join(notes[0])


def test_one_set_of_factors_never_changes(tmp_path: Path) -> None:
    same = {**(ROPE_VARIANTS["longrope"] or {}), "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
    write_json(tmp_path / "config.json", tiny_config("llama", rope_scaling=same))
    assert parse_config(tmp_path).short_context == 0


def test_other_contexts_change_no_token(
    model: Path, asks: list[AddRequest], expected: dict[str, list[int]]
) -> None:
    """Whatever context is served: the rule is about the text alone."""
    assert tokens(load(model, context=29), asks[:1]) == {"0": expected["0"]}
    engine = load(model, context=44)
    assert tokens(engine, asks[1:2]) == {"1": expected["1"]}


def test_small_pool(model: Path, asks: list[AddRequest], expected: dict[str, list[int]]) -> None:
    """With blocks for one request, which has to leave and come back."""
    engine = load(model)
    config = replace(engine.scheduler.config, context=64, watermark=0.0, premium_share=0.0)
    engine.scheduler = Scheduler(config, BlockPool(4, 16))
    assert tokens(engine, asks[:4]) == {name: expected[name] for name in "0123"}


def test_different_original_contexts_are_refused(tmp_path: Path) -> None:
    ropes = {
        kind: {
            **(ROPE_VARIANTS["longrope"] or {}),
            "rope_theta": 1e4,
            "original_max_position_embeddings": limit,
        }
        for kind, limit in (("full_attention", 32), ("sliding_attention", 48))
    }
    write_json(tmp_path / "config.json", tiny_config("olmo3", rope_parameters=ropes, rope_scaling=None))
    with pytest.raises(ModelError, match="original_max_position_embeddings must be the same"):
        parse_config(tmp_path)
