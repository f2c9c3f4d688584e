"""A draft model changes no token, whatever it proposes; its KV cache follows the target's blocks."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmbox.engine.core.engine import Engine
from llmbox.engine.core.speculation.model_drafting import ModelDrafting
from llmbox.engine.errors import DeviceError, ModelError
from llmbox.engine.hardware.proc import finish
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.runnable import require_draft_for
from llmbox.engine.sampling_params import ThinkingParams
from support.grammars import CHOICE, JSON, REGEX, THOUGHT, constrained, learned
from support.real_engines import ask, draft_at_no_price, load, run
from support.tiny_models import make_tiny_model

ROWS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    return near_model(tmp_path_factory.mktemp("near"))


def near_model(folder):
    """Make the target with changed weights: it agrees now and then. Its tables lack a few padded rows."""
    directory = make_tiny_model(folder)
    weights = load_file(directory / "model.safetensors")
    for number, (name, each) in enumerate(sorted(weights.items())):
        if each.dim() == 2 and "embed" not in name:
            each[:: 7 + number % 3] *= 0.7
        if each.dim() == 2 and ("embed" in name or "lm_head" in name):
            weights[name] = each[:-8].contiguous()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 8}))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    draft_at_no_price(monkeypatch)
    # As many as there is room for: what pays is not what these tests are about.
    monkeypatch.setattr(ModelDrafting, "choose", choose_five)


def choose_five(_self, requests, _chances, lengths, prices):
    most = min(5, (len(prices) - 1) // len(requests))
    asked = [
        0 if found > 1 else min(limit, most) for (_, limit), found in zip(requests, lengths, strict=True)
    ]
    return asked, 2.0


def engine_with(model, draft=None, **options: Any) -> Engine:
    speculate = "off" if draft is None else "auto"
    engine = learned(load(model, speculate=speculate, draft_path=draft and str(draft), **options))
    if draft is not None:
        engine.scheduler.drafting._rows = ROWS
    return engine


def told(outputs) -> tuple[object, ...]:
    return (
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs or []],
        outputs[-1].finish_reason,
        outputs[-1].error_code,
    )


THOUGHTS = ThinkingParams(begins="inside", closer_ids=(THOUGHT,), end_ids=(THOUGHT,), budget=6)

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "frequency_penalty": 0.4, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "bad_words": ((21,),), "min_tokens": 9},
]


def mixed() -> list:
    rng = random.Random(5)
    shared = [rng.randrange(5, 200) for _ in range(40)]
    requests = [
        ask(f"r{n}", [*shared[: 9 + 4 * n], 7 + n], 30, seed=n, **WAYS[n % len(WAYS)]) for n in range(8)
    ]
    grammars = [
        constrained(f"g{n}", each, seed=n, prompt=range(5, 30)) for n, each in enumerate([JSON, CHOICE])
    ]
    return [*requests, *grammars]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_running": 3, "token_budget": 25},
    "preempted": {"kv_tokens": 200, "context": 160, "block_size": 4},
    "no cache": {"prefix_cache": False},
    "int8": {"dtype": "bfloat16", "quant": "int8", "max_running": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("drafting", ["itself", "near"])
def test_what_a_request_gets_is_the_same(model, near, name, drafting):
    requests = mixed()
    expected = run(engine_with(model, **OPTIONS[name]), requests)
    engine = engine_with(model, model if drafting == "itself" else near, **OPTIONS[name])
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine.scheduler.check()
    stats = engine.stats()
    counts = stats.draft_methods["draft_model"]
    assert stats.draft_tokens >= counts.draft_tokens >= counts.accepted_tokens > 0
    if drafting == "near":
        assert counts.draft_tokens > counts.accepted_tokens, "both ways were taken"
    if name == "preempted":
        assert stats.preemptions > 0


def test_a_model_that_drafts_for_itself_is_always_right(model):
    """Greedy and sampled: drafts have the noise of their positions, and the KV cache has no holes."""
    engine = engine_with(model, model, dtype="float32", max_running=2)
    requests = [ask(f"r{n}", range(5 + n, 30), 40, seed=n, temperature=[0.0, 1.0][n % 2]) for n in range(4)]
    for request in requests:
        run(engine, [request])
    stats = engine.stats()
    counts = stats.draft_methods["draft_model"]
    assert counts.draft_tokens == counts.accepted_tokens > 60


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=["shards", "stages"])
@pytest.mark.slow
def test_on_several_ranks_the_first_one_drafts(model, near, ranks):
    """For requests of several steps that are under way, and with the masks of grammars. Its memory is planned
    once, not for each rank.
    """
    options, requests = {"kv_tokens": 512, "max_running": 4, **ranks}, mixed()
    plain = engine_with(model, **options)
    expected = run(plain, requests)
    engine = without_lookups(engine_with(model, near, **options))
    seen = run(engine, requests)
    finish()
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine.scheduler.check()
    counts = engine.stats().draft_methods["draft_model"]
    assert counts.draft_tokens > counts.accepted_tokens > 0
    alone, both = (engine_with(model, each, kv_tokens=512).info for each in (None, near))
    own = both.weights_bytes - alone.weights_bytes
    assert 0 <= engine.info.weights_bytes - plain.info.weights_bytes - own < 2
    assert len(engine.info.worker_pids) == 1


def without_lookups(engine):
    engine.scheduler.drafting._take_lookups = lambda *_others: None
    return engine


@pytest.mark.parametrize("limits", [{}, {"repetition_penalty": 1.3}, {"thinking": THOUGHTS}])
def test_a_grammars_mask_holds_for_drafts(model, limits):
    """After each draft by itself, up to the end of the answer; so a model that is its own draft is right."""
    engine = without_lookups(engine_with(model, model, dtype="float32", max_running=2))
    requests = [constrained(f"r{n}", [JSON, REGEX][n % 2], seed=n, **limits) for n in range(6)]
    expected, seen = run(engine_with(model, dtype="float32", max_running=2), requests), run(engine, requests)
    assert {name: told(each) for name, each in seen.items()} == {n: told(o) for n, o in expected.items()}
    counts = engine.stats().draft_methods["draft_model"]
    assert counts.draft_tokens == counts.accepted_tokens > 40


def test_the_draft_of_a_cached_prompt_computes_only_the_rest(model):
    engine = engine_with(model, model, block_size=4)
    draft_model = engine.scheduler.drafting._models[0].proposer
    rows = []
    runner = draft_model.executor.runner
    execute = runner.execute

    def counting(plan):
        rows.append(plan.num_tokens)
        return execute(plan)

    runner.execute = counting
    run(engine, [ask("first", range(5, 65), 8, logit_bias={9: 50.0})])
    assert max(rows) >= 59
    rows.clear()
    run(engine, [ask("second", [*range(5, 65), 70], 8, logit_bias={9: 50.0})])
    assert max(rows) <= 8, "the prompt's blocks have draft KV"
    rows.clear()
    run(engine, [ask("other", range(80, 140), 8, logit_bias={9: 50.0})])
    assert max(rows) >= 59


def test_a_long_prompt_is_caught_up_over_several_steps(model, monkeypatch):
    monkeypatch.setattr("llmbox.engine.runner.draft_model.DRAFT_MODEL_ROWS", 16)
    engine = engine_with(model, model)
    requests = [ask(f"r{n}", range(5, 105), 24, seed=n, temperature=1.0) for n in range(2)]
    expected = run(engine_with(model), requests)
    seen = run(engine, requests)
    assert {name: told(each) for name, each in seen.items()} == {n: told(o) for n, o in expected.items()}
    assert engine.stats().draft_methods["draft_model"].accepted_tokens > 0


def test_its_memory_is_planned(model):
    alone, both = (engine_with(model, draft, kv_tokens=512).info for draft in (None, model))
    assert both.weights_bytes == 2 * alone.weights_bytes
    assert both.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    assert both.workspace_bytes > alone.workspace_bytes


def test_a_draft_without_a_token_proposes_none(model, near):
    engine = engine_with(model, near)
    runner = engine.scheduler.drafting._models[0].proposer.executor.runner
    logits = runner._model.logits
    runner._model.logits = lambda hidden, *_: logits(hidden) * float("nan")
    requests = [ask("a", range(5, 30), 20)]
    assert told(run(engine, requests)["a"]) == told(run(engine_with(model), requests)["a"])
    assert "draft_model" not in engine.stats().draft_methods


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculate": "off"}, "a draft model cannot be combined with --speculate off"),
    ],
)
def test_where_it_cannot_run_loading_is_refused(model, options, reason):
    with pytest.raises(DeviceError, match=reason):
        load(model, draft_path=str(model), **options)


def test_another_vocabulary_is_refused(model, tmp_path):
    other = make_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"has another vocabulary than .* smaller size of the same model"):
        load(model, draft_path=str(other))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recurrent": object()}, "has recurrent layers"),
        ({"latent": object()}, "has latent attention"),
        ({"is_bidirectional": True}, "models of embeddings"),
    ],
)
def test_layers_that_a_draft_must_not_have_are_refused(model, changes, reason):
    config = parse_config(model)
    with pytest.raises(ModelError, match=reason):
        require_draft_for(config, model, replace(config, **changes), model)
    require_draft_for(config, model, config, model)


def test_a_missing_draft_is_refused(model, tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(model, draft_path=str(tmp_path / "nothing"))
