"""A draft head changes no token, whatever it proposes; where it knows what follows, drafts are accepted."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.app.fit.fit import plan_alone
from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.speculation.model_drafting import ModelDrafting
from llmbox.engine.errors import DeviceError, ModelError
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.kv_store import usage
from llmbox.engine.model.draft_heads import Eagle3Head
from llmbox.engine.model_config.config import parse_config
from support.adapters import plain_tensors, write_adapter
from support.draft_heads import add_mtp, ask_always, make_eagle3, make_medusa, make_predictable, make_target
from support.families import make_family
from support.grammars import CHOICE, JSON, constrained, learned
from support.real_engines import ask, load, run

ROWS = 24
KINDS = ["mtp", "mtp of latents", "eagle3", "medusa"]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 2.0, "frequency_penalty": 0.4, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 5, "bad_words": ((21,),), "min_tokens": 9, "prompt_logprobs": 1},
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_running": 3, "token_budget": 25},
    "preempted": {"kv_tokens": 200, "context": 160, "block_size": 4, "prefix_cache": False},
    "int8": {"dtype": "bfloat16", "quant": "int8", "max_running": 2},
}


class Pair:
    """A model, and the options by which its head is loaded."""

    def __init__(self, model: Path, head: Path | None = None) -> None:
        self.model, self.head = model, head

    def load(self, **options: Any) -> Engine:
        draft = {} if self.head is None else {"draft_path": str(self.head)}
        engine = learned(load(self.model, **draft, **options))
        engine.scheduler.drafting._rows = ROWS
        return engine

    def plain(self, **options: Any) -> Engine:
        return learned(load(self.model, speculate="off", **options))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("heads")
    hybrid, latent = (make_family(folder / name, name) for name in ("qwen3_5_text", "glm4_moe_lite"))
    target = make_target(folder / "llama")
    return {
        "mtp": Pair(add_mtp(make_predictable(hybrid), "qwen")),
        "mtp of latents": Pair(add_mtp(make_predictable(latent, 0.3), "deepseek")),
        "eagle3": Pair(target, make_eagle3(folder / "eagle3", target)),
        "medusa": Pair(target, make_medusa(folder / "medusa", target)),
    }


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    ask_always(monkeypatch, 4)


def told(outputs: list[Any]) -> tuple[object, ...]:
    return (
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs or []],
        [entry for output in outputs for entry in output.prompt_logprobs or []],
        outputs[-1].finish_reason,
        outputs[-1].error_code,
    )


def mixed() -> list[AddRequest]:
    rng = random.Random(5)
    shared = [rng.randrange(5, 200) for _ in range(40)]
    requests = [
        ask(f"r{n}", [*shared[: 9 + 4 * n], 7 + n], 30, seed=n, **WAYS[n % len(WAYS)]) for n in range(8)
    ]
    grammars = [
        constrained(f"g{n}", each, seed=n, prompt=range(5, 30)) for n, each in enumerate([JSON, CHOICE])
    ]
    return [*requests, *grammars]


def counts(engine: Engine) -> tuple[int, int]:
    """Draft tokens of the head, and those that were accepted."""
    (method,) = engine.scheduler.drafting.counts.keys() - {"ngram", "suffix", "grammar"}
    found = engine.scheduler.drafting.counts[method]
    return found.draft_tokens, found.accepted_tokens


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("mtp", name) for name in OPTIONS), *((kind, "plain") for kind in KINDS[1:]), ("eagle3", "preempted")],
)
def test_what_a_request_gets_is_the_same(pairs: dict[str, Pair], kind: str, name: str) -> None:
    requests, pair = mixed(), pairs[kind]
    expected = run(pair.plain(**OPTIONS[name]), requests)
    engine = pair.load(**OPTIONS[name])
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine.scheduler.check()
    drafted, accepted = counts(engine)
    assert drafted > accepted > 0, "both ways were taken"
    if name == "preempted":
        assert engine.stats().preemptions > 0


def test_requests_with_adapters_get_the_same(pairs: dict[str, Pair], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", plain_tensors(), lora_alpha=80)
    requests = [
        replace(each, adapter=str(folder)) if number % 2 else each for number, each in enumerate(mixed())
    ]
    expected = run(pairs["eagle3"].plain(), requests)
    engine = pairs["eagle3"].load()
    seen = run(engine, requests)
    assert {name: told(each) for name, each in seen.items()} == {
        name: told(each) for name, each in expected.items()
    }
    assert counts(engine)[1] > 0


def test_a_head_may_read_a_layer_twice(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual three are no three of a model of four layers."""
    widths, enter = set[int](), Eagle3Head.enter

    def note(head: Eagle3Head, features_TF: torch.Tensor) -> torch.Tensor:
        widths.add(features_TF.shape[1])
        return enter(head, features_TF)

    monkeypatch.setattr(Eagle3Head, "enter", note)
    target = pairs["eagle3"].model
    head = make_eagle3(tmp_path / "head", target, eagle_config={})
    request = ask("a", range(5, 40), 24)
    engine = Pair(target, head).load(dtype="float32")
    assert told(run(engine, [request])["a"]) == told(run(Pair(target).plain(dtype="float32"), [request])["a"])
    assert counts(engine)[0] > 0
    assert widths == {3 * 64}


@pytest.mark.parametrize("kind", ["mtp", "medusa"])
def test_a_head_that_knows_saves_steps(pairs: dict[str, Pair], kind: str) -> None:
    engine = pairs[kind].load(dtype="float32")
    (outputs,) = run(engine, [ask("a", range(5, 40), 40)]).values()
    drafted, accepted = counts(engine)
    assert drafted == accepted >= 28
    assert engine.stats().steps + accepted == len(told(outputs)[0]) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prompt_has_the_heads_keys(pairs: dict[str, Pair], kind: str) -> None:
    """A second request computes the end of its prompt alone, and drafts as the first did."""
    engine = pairs[kind].load(dtype="float32", block_size=4)
    engine.scheduler.drafting.remember = lambda _request: None  # n-grams would know the second answer
    request = ask("first", range(5, 65), 24)
    first = run(engine, [request])["first"]
    drafted, accepted = counts(engine)
    again = run(engine, [ask("again", range(5, 65), 24)])["again"]
    assert again[0].cached_tokens == 56
    assert told(again) == told(first)
    assert counts(engine) == (2 * drafted, 2 * accepted)


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_blocks_on_disk_have_the_heads_keys(
    pairs: dict[str, Pair], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in usage.cache_variables(tmp_path / "kv", 1 << 30, 1.0).items():
        monkeypatch.setenv(name, value)
    seen = []
    pair = pairs[kind]
    for make in (pair.load, pair.load, pair.plain):
        engine = make(dtype="float32")
        engine.scheduler.drafting.remember = lambda _request: None
        outputs = run(engine, [ask("a", range(5, 65), 24)])["a"]
        seen.append((told(outputs), counts(engine) if make == pair.load else (0, 0), outputs[0].disk_tokens))
        engine.close()
    first, second, without = seen
    assert second == (*first[:2], 48)
    assert not without[2], "blocks without a head are others"
    assert without[0] == first[0]


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_request_that_another_engine_resumes_goes_on(pairs: dict[str, Pair], kind: str) -> None:
    request = ask("a", range(5, 40), 30, temperature=1.0, seed=3)
    whole = told(run(pairs[kind].plain(), [request])["a"])[0]
    engine = pairs[kind].load(token_budget=33)
    resumed = AddRequest(
        request_id="a", prompt_ids=request.prompt_ids, params=request.params, output_ids=whole[:9]
    )
    assert told(run(engine, [resumed])["a"])[0] == whole[9:]
    assert counts(engine)[0] > 0


def test_a_request_that_is_aborted_leaves_nothing(pairs: dict[str, Pair]) -> None:
    engine = pairs["mtp"].load()
    for name in ("a", "b"):
        engine.add(ask(name, range(5, 40), 30))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0


def test_rows_of_answers_are_computed_together(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts the head runs once a block, not once a token."""
    ask_always(monkeypatch, 0)
    monkeypatch.setattr(ModelDrafting, "explore", lambda _self, _requests: None)
    engine = pairs["mtp"].load(max_running=1)
    head, passes = engine.scheduler.drafting._models[0].proposer.head, list[int]()
    enter = head.enter
    monkeypatch.setattr(head, "enter", lambda features: passes.append(len(features)) or enter(features))
    run(engine, [ask("a", range(5, 21), 49)])
    assert passes == [16, 16, 16, 16]


def test_nothing_is_shown_to_a_head_that_is_not_there(pairs: dict[str, Pair]) -> None:
    for options in ({"speculate": "off"}, {"mtp": "off"}):
        engine = load(pairs["mtp"].model, **options)
        runner = getattr(engine.executor, "runner", None)
        assert runner is None or runner._follower is None
        assert set(engine.scheduler.drafting.counts) == {"ngram", "suffix", "grammar"}


def test_their_memory_is_planned(pairs: dict[str, Pair]) -> None:
    for kind, pair in pairs.items():
        alone = load(pair.model, speculate="off", dtype="float32", kv_tokens=512).info
        both = pair.load(dtype="float32", kv_tokens=512).info
        files = [*(pair.head or pair.model).glob("*.safetensors")]
        tensors = {name: each for file in files for name, each in load_file(file).items()}
        own = sum(
            each.nbytes
            for name, each in tensors.items()
            if pair.head is not None or name.startswith("mtp." if kind == "mtp" else "model.layers.2.")
            if name not in {"d2t", "t2d"} and "embed_tokens" not in name and "shared_head.head" not in name
        )
        assert both.weights_bytes - alone.weights_bytes == pytest.approx(own, rel=0.01), kind
        assert (both.kv_bytes_per_token > alone.kv_bytes_per_token) is (kind != "medusa")


def test_an_mtp_layer_takes_no_memory_that_the_model_needs(pairs: dict[str, Pair]) -> None:
    model = pairs["mtp"].model
    need = load(model, speculate="off", max_running=1, memory_bytes=256 << 20, context=64)
    total = need.info.weights_bytes + need.info.workspace_bytes + need.info.kv_bytes_per_token * 64
    total += need.info.state_bytes
    engine = load(model, max_running=1, memory_bytes=total, context=64)
    assert "the MTP layer drafts no tokens: the model needs its memory" in engine.info.notes
    assert set(engine.scheduler.drafting.counts) == {"ngram", "suffix", "grammar"}


def changed(folder: Path, head: Path, target: Path, change: str) -> Path:
    """Copies of a head with something wrong."""
    folder.mkdir()
    for file in head.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config, file = folder / "config.json", next(folder.glob("*.safetensors"))
    weights = load_file(file)
    fields = json.loads(config.read_text())
    if change == "vocabulary":
        fields["vocab_size"] = 400
    if change == "layers":
        fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 9]
    if change == "hidden":
        fields |= {"hidden_size": 32, "target_hidden_size": 32}
    if change == "d2t":
        del weights["d2t"]
    if change == "empty d2t":  # of a head that proposes all tokens
        fields["draft_vocab_size"] = fields["vocab_size"]
        weights["lm_head.weight"] = torch.zeros(fields["vocab_size"], 64)
        weights["d2t"] = torch.zeros(0, dtype=torch.long)
    if change == "medusa":
        weights |= {
            name: each[:300].contiguous() for name, each in weights.items() if name.endswith(".1.weight")
        }
    config.write_text(json.dumps(fields))
    save_file(weights, file)
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            "vocabulary",
            r"EAGLE-3 head .* was made for a vocabulary of 400 tokens, but .* has 320: choose the",
        ),
        ("layers", r"EAGLE-3 head .* reads layers 2, 4, 9 of its target, but .* has 4: choose the head"),
        ("hidden", r"EAGLE-3 head .* was made for hidden states of 32 numbers, but .* has 64: choose the"),
        ("d2t", r"tensor d2t of the EAGLE-3 head is missing, config.json asks for \[160\]: fetch"),
        ("empty d2t", r"tensor d2t of the EAGLE-3 head has shape \[0\], config.json asks for \[320\]"),
        ("medusa", r"Medusa heads .* was made for a vocabulary of 300 tokens, but .* has 320: choose"),
    ],
)
def test_a_head_of_another_model_is_refused(
    pairs: dict[str, Pair], tmp_path: Path, change: str, reason: str
) -> None:
    pair = pairs["medusa" if change == "medusa" else "eagle3"]
    assert pair.head is not None
    head = changed(tmp_path / "head", pair.head, pair.model, change)
    with pytest.raises(ModelError, match=reason) as refused:
        load(pair.model, draft_path=str(head))
    config = EngineConfig(model_path=str(pair.model), name="", draft_path=str(head))
    _, told_by_fit = plan_alone(parse_config(pair.model), read_machine(), config, None)
    assert told_by_fit == str(refused.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"mtp": "on", "tp": 2},
            "the MTP layer was requested, but the model runs on 2 ranks.*without --draft",
        ),
        ({"mtp": "on", "speculate": "off"}, "the MTP layer cannot be combined with --speculate off"),
    ],
)
def test_where_it_cannot_run_loading_is_refused(
    pairs: dict[str, Pair], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DeviceError, match=reason):
        load(pairs["mtp"].model, **options)


def test_a_plan_says_why_a_layer_that_is_there_is_not_run(pairs: dict[str, Pair]) -> None:
    config = EngineConfig(model_path=str(pairs["mtp"].model), name="", tp=2, memory_bytes=256 << 20)
    plan, reason = plan_alone(parse_config(pairs["mtp"].model), read_machine(), config, None)
    assert plan is not None, reason
    assert any("the MTP layer drafts no tokens: the model runs on 2 ranks" in note for note in plan.notes)


@pytest.mark.parametrize("kind", ["mtp", "mtp of latents"])
def test_parameters_of_an_mtp_layer_are_no_disagreement(pairs: dict[str, Pair], kind: str) -> None:
    assert local_facts(directory(pairs[kind].model)).notes == ()


def test_a_head_alone_says_that_it_needs_a_model(pairs: dict[str, Pair]) -> None:
    assert pairs["eagle3"].head is not None
    with pytest.raises(
        ModelError, match="it needs the model that it drafts for, which is loaded with --draft"
    ):
        load(pairs["eagle3"].head)


def test_a_model_without_an_mtp_layer_says_so(pairs: dict[str, Pair]) -> None:
    with pytest.raises(ModelError, match=r"has no layer for multi-token prediction.*without --draft mtp"):
        load(pairs["eagle3"].model, mtp="on")


def test_a_damaged_mtp_layer_is_left_out_unless_it_is_asked_for(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in pairs["mtp"].model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["mtp.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    engine = load(folder)
    assert set(engine.scheduler.drafting.counts) == {"ngram", "suffix", "grammar"}
    with pytest.raises(ModelError, match=r"tensor 'mtp\.norm\.weight' is missing"):
        load(folder, mtp="on")
