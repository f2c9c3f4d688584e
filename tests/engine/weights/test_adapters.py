"""Adapters beside PEFT on tiny models: tokens and logits, and that a request's tokens are its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.checkpoint.adapter import AdapterError, read_adapter
from llmbox.engine.core.adapter_slots import AdapterSlots
from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.weights.adapter_weights import AdapterReader
from llmbox.engine.weights.adapters import AdapterLayers
from support.adapters import make_adapter, plain_tensors, write_adapter
from support.lanes import nightly
from support.rank_threads import load_ranks
from support.real_engines import ask, hf_model, hf_tokens, load, run, runner_of, tokens
from support.tiny_models import make_tiny_model

PROMPT = [5, 9, 77, 31, 200, 4, 8, 250, 17]
NEW = 10


def adapted(folder: Path, request: AddRequest) -> AddRequest:
    return replace(request, adapter=str(folder))


def fp32(model: Path, **options: Any) -> Engine:
    return load(model, dtype="float32", **options)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), arch="qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def three(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of several ranks and targets."""
    home = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [
        {"r": 16},
        {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        {"r": 5, "target_modules": ["down_proj", "gate_proj", "o_proj"], "use_rslora": True},
    ]
    for number, kind in enumerate(kinds):
        make_adapter(hf_model(qwen), home / str(number), seed=number, **kind)
    return [home / str(number) for number in range(3)]


CASES: dict[str, dict[str, Any]] = {
    "all linears": {},
    "rsLoRA": {"use_rslora": True, "r": 3},
    "patterns": {
        "rank_pattern": {"q_proj": 3, "model.layers.1.mlp.up_proj": 12},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 40, "down_proj": 2},
    },
    "some layers": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "saved whole": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, False) for name in CASES), ("head", True), ("saved whole", True)]
)
def test_tokens_are_those_of_peft(tmp_path: Path, name: str, tied: bool) -> None:
    model = make_tiny_model(tmp_path / "base", arch="qwen3", tokenizer=False, tie_word_embeddings=tied)
    kind = CASES[name]
    if tied and name == "saved whole":
        kind = {**kind, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": False}
    peft = make_adapter(hf_model(model), tmp_path / "adapter", **kind)
    if tied and name == "saved whole":
        peft.base_model.model.lm_head.weight = torch.nn.Parameter(hf_model(model).lm_head.weight)
    requests = [adapted(tmp_path / "adapter", ask("with", PROMPT, NEW)), ask("without", PROMPT, NEW)]
    found = tokens(fp32(model), requests)
    assert found["with"] == hf_tokens(peft, PROMPT, NEW)
    assert found["without"] == hf_tokens(hf_model(model), PROMPT, NEW)
    assert found["with"] != found["without"]


@pytest.mark.parametrize(
    "arch", ["phi3", "qwen3_next", *map(nightly, ("qwen2_moe", "qwen2", "gemma3_text", "olmo2", "glm4"))]
)
def test_linears_of_other_architectures(tmp_path: Path, arch: str) -> None:
    """Stacked projections, rows in another order, gated attention, recurrent layers, shared experts."""
    model = make_tiny_model(tmp_path / "base", arch=arch, tokenizer=False)
    hf = hf_model(model)
    kind = {"target_modules": ["q_proj", "shared_expert.up_proj"]} if arch.endswith("moe") else {}
    if arch == "qwen3_next":
        kind = {"target_modules": ["q_proj", "k_proj", "o_proj", "out_proj"]}
    peft = make_adapter(hf, tmp_path / "adapter", **kind)
    logits = logits_of(fp32(model), tmp_path / "adapter", PROMPT)
    with torch.inference_mode():
        expected = peft(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def logits_of(engine: Engine, folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Logits of the last row."""
    kept: list[torch.Tensor] = []
    model = runner_of(engine)._model
    original = model.logits

    def keep(*arguments: Any) -> torch.Tensor:
        logits_RV = original(*arguments)
        if arguments[-1] is not None:
            kept.append(logits_RV.clone())
        return logits_RV

    model.logits = keep
    tokens(engine, [adapted(folder, ask("r", prompt, 1))])
    return kept[0][0]


def requests(three: Sequence[Path]) -> list[AddRequest]:
    """Thirty-three with three adapters and without, some with a common beginning, greedy and sampled."""
    made = []
    common = list(range(40, 90))
    for n in range(33):
        prompt = (common if n % 3 else []) + [(n * 37 + k * k * 11) % 300 + 3 for k in range(1 + n * 2 % 29)]
        params = {"temperature": 0.8, "seed": n} if n % 2 else {}
        request = ask(f"r{n}", prompt, 6, **params)
        made.append(request if n % 4 == 3 else adapted(three[n % 4], request))
    return made


@pytest.mark.parametrize(
    "weights",
    [
        {"dtype": "bfloat16", "quant": "int8"},
        nightly({"dtype": "float32"}),
        nightly({"dtype": "bfloat16", "quant": "int4"}),
    ],
)
def test_tokens_are_those_of_the_request_alone(
    qwen: Path, three: list[Path], weights: dict[str, str]
) -> None:
    alone: dict[str, list[int]] = {}
    engine = load(qwen, max_running=1, prefix_cache=False, **weights)
    assert runner_of(engine)._ops.lora.is_int8 == ("quant" in weights)  # A and B have 8 bits too
    for request in requests(three):
        alone |= tokens(engine, [request])
    assert len({tuple(answer) for answer in alone.values()}) > 16
    ways: list[dict[str, Any]] = [
        {"max_running": 33, "token_budget": 512, "threads": 2},
        {"max_running": 8, "token_budget": 16},
        {"max_running": 33, "kv_tokens": 512},
    ]
    for way in ways:
        engine = load(qwen, **weights, **way)
        found = tokens(engine, requests(three))
        assert found == alone, way
        assert tokens(engine, requests(three)) == alone, ("cached", way)
        engine.scheduler.check()
    resumed = [replace(request, output_ids=alone[request.request_id][:3]) for request in requests(three)]
    found = tokens(load(qwen, **weights, max_running=33), resumed)
    assert found == {name: answer[3:] for name, answer in alone.items()}


class CountedSlots(AdapterSlots):
    """Slots that count the adapters that are loaded."""

    loaded = 0

    def take_loads(self) -> list[tuple[int, str]]:
        loads = super().take_loads()
        self.loaded += sum(bool(folder) for _, folder in loads)
        return loads


def test_more_adapters_than_fit_take_turns(qwen: Path, three: list[Path]) -> None:
    expected = tokens(load(qwen, dtype="float32", max_running=33), requests(three))
    engine = fp32(qwen, max_running=33)
    slots = engine.scheduler.kv_cache.adapters = CountedSlots(1, 1 << 30)
    assert tokens(engine, requests(three)) == expected
    (resident,) = engine.stats().adapters
    assert resident in {folder.name for folder in three}
    assert slots.loaded >= 3
    engine.scheduler.check()


def test_a_cached_prefix_is_of_one_adapter(qwen: Path, three: list[Path]) -> None:
    engine = fp32(qwen)
    prompt = list(range(20, 90))

    def cached(request: AddRequest) -> int | None:
        (first, *_) = run(engine, [request])[request.request_id]
        return first.cached_tokens

    assert cached(ask("base", prompt, 1)) == 0
    assert cached(adapted(three[0], ask("a", prompt, 1))) == 0
    assert cached(adapted(three[1], ask("b", prompt, 1))) == 0
    assert cached(adapted(three[0], ask("again", prompt, 1))) == 64
    # Nor of a caller that names one in its salt.
    salted = replace(adapted(three[0], ask("salted", prompt, 1)), cache_namespace="key/salt")
    assert cached(salted) == 0
    for salt in (f"salt\0{three[0].name}", f"{three[0].name}\0key/salt"):
        assert cached(replace(ask(salt, prompt, 1), cache_namespace=f"key/{salt}")) == 0


@pytest.mark.parametrize("options", [{"tp": 2}, nightly({"pp": 2}), nightly({"tp": 2, "pp": 2})])
def test_ranks_have_their_slices(
    qwen: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    some = requests(three)[:9]
    engine = load_ranks(qwen, monkeypatch, dtype="float32", **options)
    engine.scheduler.kv_cache.adapters = AdapterSlots(2, 1 << 30)
    assert tokens(engine, some) == tokens(fp32(qwen), some)


@pytest.mark.parametrize(("options", "broken"), [({"tp": 2}, 1), nightly({"tp": 2, "pp": 2}, 0)])
def test_a_rank_that_alone_cannot_load_fails_the_request(
    qwen: Path,
    three: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, int],
    broken: int,
) -> None:
    """Also one that sends no results; others, and the same adapter once it can be read, are served."""
    engine = load_ranks(qwen, monkeypatch, dtype="float32", **options)
    engine.scheduler.kv_cache.adapters = AdapterSlots(4, 1 << 30)
    layers = engine.executor.runner.shares[broken].runner._model.adapters
    read = layers._read
    asked = [
        adapted(three[0], ask("bad", PROMPT, 4)),
        adapted(three[1], ask("good", PROMPT, 4)),
        ask("base", PROMPT, 4),
    ]
    expected = tokens(fp32(qwen), asked)

    def fail(slot: int, adapter: Any, reader: AdapterReader) -> int:
        if adapter.directory == three[0]:
            raise OSError(5, "Input/output error")
        return read(slot, adapter, reader)

    monkeypatch.setattr(layers, "_read", fail)
    found = run(engine, asked)
    assert "another rank" in (found["bad"][-1].error_message or "")
    for name in ("good", "base"):
        assert [token for output in found[name] for token in output.token_ids] == expected[name]
    monkeypatch.setattr(layers, "_read", read)
    assert tokens(engine, asked) == expected
    engine.scheduler.check()


def test_saved_modules_are_sliced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "base", arch="qwen3", tokenizer=False)
    make_adapter(hf_model(model), tmp_path / "a", modules_to_save=["embed_tokens", "lm_head"])
    asked = [adapted(tmp_path / "a", ask("a", PROMPT, NEW)), ask("base", PROMPT, NEW)]
    engine = load_ranks(model, monkeypatch, dtype="float32", tp=2, pp=2)
    engine.scheduler.kv_cache.adapters = AdapterSlots(2, 1 << 30)
    assert tokens(engine, asked) == tokens(fp32(model), asked)


def test_a_step_without_adapters_is_that_of_a_model_without(
    qwen: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of adapters runs or is recorded until a request has one, nor after it."""
    engine = fp32(qwen)
    runner = runner_of(engine)
    calls: list[str] = []
    for name in ("_add", "_embedding"):
        original = getattr(runner._model.adapters, name)
        monkeypatch.setattr(runner._model.adapters, name, partial(_noted, calls, name, original))
    applied = runner._model.adapters.applied
    monkeypatch.setattr(runner._model.adapters, "applied", partial(_noted, calls, "applied", applied))
    tokens(engine, [ask("r", PROMPT, 4)])
    assert not calls
    tokens(engine, [adapted(three[0], ask("a", PROMPT, 4))])
    assert "applied" in calls
    calls.clear()
    tokens(engine, [ask("again", PROMPT, 4)])
    assert not calls


def _noted(calls: list[str], name: str, original: Callable[..., Any], *arguments: Any) -> Any:
    calls.append(name)
    return original(*arguments)


def test_an_adapter_that_vanished_fails_its_own_requests(
    qwen: Path, three: list[Path], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "gone", plain_tensors())
    engine = fp32(qwen)
    slots = engine.scheduler.kv_cache.adapters
    assert slots is not None
    slots.admit(str(folder), read_adapter(folder).nbytes)
    (folder / "adapter_model.safetensors").unlink()
    alone = tokens(engine, [adapted(three[0], ask("alone", PROMPT, 4))])["alone"]
    found = run(engine, [adapted(folder, ask("gone", PROMPT, 4)), adapted(three[0], ask("good", PROMPT, 4))])
    assert "has no adapter_model.safetensors" in (found["gone"][-1].error_message or "")
    assert [token for output in found["good"] for token in output.token_ids] == alone
    write_adapter(folder, plain_tensors())
    assert run(engine, [adapted(folder, ask("back", PROMPT, 4))])["back"][-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (
            plain_tensors(inputs=32),
            r"adapts a .*.q_proj of 64 x 32, and the model's has 64 x 64",
        ),
        (plain_tensors(outputs=80), r"lora_B.*q_proj of 80 x 64, and the model's has 64 x 64"),
        (plain_tensors(name="model.layers.7.self_attn.q_proj"), r"no linear model.layers.7.self_attn.q_proj"),
        (plain_tensors(name="model.layers.0.self_attn.wq"), r"no linear model.layers.0.self_attn.wq"),
        ({"base_model.model.model.norm.weight": torch.ones(64)}, r"model.norm is saved whole, and only"),
        (
            {"base_model.model.lm_head.weight": torch.ones(322, 64)},
            r"of 322 x 64, and the model's has 320",
        ),
        (
            {"base_model.model.model.embed_tokens.weight": torch.full((320, 64), torch.nan)},
            r"NaN or infinity",
        ),
    ],
)
def test_adapters_of_other_models(
    qwen: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], told: str
) -> None:
    """With the tensor's name; other requests go on."""
    folder = write_adapter(tmp_path / "a", tensors)
    model = runner_of(engine := fp32(qwen))._model
    with pytest.raises(AdapterError, match=told):
        model.adapters.load(0, read_adapter(folder), torch.float32)
    found = run(engine, [adapted(folder, ask("bad", PROMPT, 4)), ask("good", PROMPT, 4)])
    assert found["bad"][-1].finish_reason == "error"
    assert found["good"][-1].finish_reason == "length"


def test_too_large_for_its_memory(qwen: Path, three: list[Path]) -> None:
    engine = fp32(qwen, lora_bytes=1000)
    (refused,) = run(engine, [adapted(three[0], ask("r", PROMPT, 4))])["r"]
    assert refused.error_code == "does_not_fit"
    assert "--lora-memory" in (refused.error_message or "")


def test_memory_is_ready_for_the_next_adapter(
    qwen: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(AdapterLayers, "prepare", lambda _layers, _dtype, nbytes=0: asked.append(nbytes))
    rising = [three[1], three[2], three[0]]
    sizes = [2 * read_adapter(folder).nbytes for folder in rising]
    engine = fp32(qwen, lora_bytes=sum(sizes), plans_adapters=True)
    assert asked == [0]
    for folder in rising:
        run(engine, [adapted(folder, ask("r", PROMPT, 1))])
    assert asked[1:] == sizes[:2]  # no other has room beside all three
    fp32(qwen)
    assert len(asked) == 3  # a model without adapters needs none


def test_the_limit_counts_what_the_dtype_of_the_model_takes(qwen: Path, three: list[Path]) -> None:
    most = int(1.5 * read_adapter(three[0]).nbytes)
    asked = adapted(three[0], ask("r", PROMPT, 4))
    assert run(fp32(qwen, lora_bytes=most), [asked])["r"][-1].error_code == "does_not_fit"
    found = run(load(qwen, dtype="bfloat16", lora_bytes=most), [asked])["r"]
    assert found[-1].finish_reason == "length"
