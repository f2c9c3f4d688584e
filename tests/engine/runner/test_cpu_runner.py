import ctypes
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.request import Request
from llmbox.engine.core.step import StepPlan
from llmbox.engine.device.device import HostDevice
from llmbox.engine.errors import DeviceError, DoesNotFit, EngineError
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import Progress
from llmbox.engine.runner import cpu_runner
from llmbox.engine.runner.block_memory import ModelCaches
from llmbox.engine.runner.cpu_runner import SCORED_AT_ONCE, CPUModelRunner
from llmbox.engine.runner.input_batch import DecodingInputs, build_batch, decodes
from llmbox.engine.sampling_params import SamplingParams
from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.op_types import KVShape
from support.real_engines import ask, hf_model, load, planned, run, runner_of, tokens
from support.tiny_models import make_tiny_model

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False)


def request(name: str, prompt: list[int], blocks: list[int]) -> Request:
    made = Request(request_id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=9, temperature=0.0))
    made.block_table = blocks
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_generates(model: Path, dtype: str) -> None:
    engine = load(model, dtype=dtype)
    assert engine.info.dtype == dtype
    assert len(tokens(engine, [ask("a", [5, 6, 7], 20), ask("b", range(3, 60), 20)])["b"]) == 20


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_kv_may_have_a_dtype_of_its_own(model: Path, kv_dtype: str) -> None:
    engine = load(model, kv_dtype=kv_dtype)
    assert engine.info.kv_bytes_per_token in {2 * 2 * 2 * width * 2 for width in (16, 32)}, (
        "as the kernels pad it"
    )
    assert len(tokens(engine, [ask("a", [5, 6, 7], 20)])["a"]) == 20


@pytest.mark.parametrize("kernels", ["cpu", "onednn", "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_keys_and_values(model: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, dtype: str) -> None:
    """On all kernels: small, near to what plain ones give, and one request is one answer."""
    monkeypatch.setenv("LLMBOX_KERNELS", kernels)
    engine = load(model, dtype=dtype, kv_dtype="int8")
    assert (engine.info.kv_dtype, engine.info.kv_bytes_per_token) == ("int8", 2 * 2 * 2 * (16 + 4))
    prompt = torch.randint(3, 320, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = hf_model(model)(torch.tensor([prompt])).logits[0].detach().log_softmax(-1)
    outputs = run(engine, [ask("a", prompt, 2, prompt_logprobs=0)])
    entries = next(o.prompt_logprobs for o in outputs["a"] if o.prompt_logprobs is not None)
    for position, entry in enumerate(entries[1:], 1):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(exact[position - 1, prompt[position]]), abs=0.1)
    if dtype == "float32":
        alone = tokens(load(model, dtype=dtype, kv_dtype="int8"), [ask("x", prompt, 20)])["x"]
        crowd = [ask("x", prompt, 20), *(ask(str(n), prompt[n:], 20) for n in range(1, 9))]
        assert tokens(load(model, dtype=dtype, kv_dtype="int8", token_budget=16), crowd)["x"] == alone
        assert tokens(engine, [ask("x", prompt, 20)])["x"] == alone  # from the prefix cache


def test_fp8_keys_and_values_are_refused_on_a_cpu(model: Path) -> None:
    with pytest.raises(DeviceError, match="--kv-dtype int8"):
        load(model, kv_dtype="fp8")


@pytest.mark.parametrize("budget", [4, 11, 4096])
def test_prompt_logprobs_of_every_chunk(model: Path, budget: int) -> None:
    prompt = torch.randint(3, 320, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    exact = hf_model(model)(torch.tensor([prompt])).logits[0].detach().log_softmax(-1)
    engine = load(model, max_running=4, token_budget=budget)
    outputs = run(engine, [ask("a", prompt, 2, prompt_logprobs=3), ask("b", [7, 8, 9], 2)])
    entries = next(o.prompt_logprobs for o in outputs["a"] if o.prompt_logprobs is not None)
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(exact[position - 1, prompt[position]]), abs=1e-3)
        best = exact[position - 1].topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
    assert all(output.prompt_logprobs is None for output in outputs["b"])


def test_blocks_are_copied_before_anything_is_written(model: Path) -> None:
    runner = runner_of(load(model))
    prompt = list(range(3, 23))
    first = request("a", prompt, [4, 9])
    token = runner.execute(StepPlan([planned(first, 0, 20)])).tokens["a"].token_id
    fork = request("b", prompt, [4, 2])
    for one in (first, fork):
        one.token_ids = [*prompt, token]
    together = [planned(first, 20, 1), planned(fork, 20, 1)]
    result = runner.execute(StepPlan(together, copies=[(9, 2)]))
    assert result.tokens["a"] == result.tokens["b"]


def test_a_row_of_nan_fails_alone_and_its_blocks_can_be_used_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")  # its weights are plain tensors
    runner = runner_of(load(model))
    prompt = list(range(3, 23))
    clean = runner.execute(StepPlan([planned(request("x", prompt, [0, 1]), 0, 20)])).tokens["x"]
    table = runner._model.embedding.packed.weight_OI
    good = table[300].clone()
    with torch.inference_mode():
        table[300] = torch.nan
    broken, fine = request("a", [300, *prompt[1:]], [2, 3]), request("b", prompt, [4, 5])
    result = runner.execute(StepPlan([planned(broken, 0, 20), planned(fine, 0, 20)]))
    assert result.tokens == {"b": clean}
    assert "NaN" in result.failed["a"]
    with torch.inference_mode():
        table[300] = good
    for plan_rows in ([(0, 20)], [(0, 18), (18, 1), (19, 1)]):
        heir = request("c", prompt, [3, 2])
        for start, count in plan_rows:
            result = runner.execute(StepPlan([planned(heir, start, count)]))
        assert result.tokens == {"c": clean}


def test_progress_is_told_in_bytes(model: Path) -> None:
    seen: list[Progress] = []
    load_engine(EngineConfig(model_path=str(model), name="m", device="cpu", threads=1), seen.append)
    assert {p.phase for p in seen} == {"weights"}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total == sum(p.total for p in seen[-1:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_device_that_is_not_there(model: Path) -> None:
    with pytest.raises(DeviceError, match="--device cpu"):
        load(model, device="cuda")


def test_a_context_beyond_the_model(model: Path) -> None:
    with pytest.raises(DoesNotFit, match="256"):
        load(model, context=257)


def test_unknown_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "abacus")
    with pytest.raises(EngineError, match="abacus"):
        load(model)


class Populating:
    """The memory of a cache of two layers with 100 blocks, and which of them were given pages."""

    def __init__(self, *, works=True):
        self.works, self.given, self.then = works, [], lambda: None

    def block_tensors(self, _cache):
        return [torch.empty(2, 100, 512, dtype=torch.uint8)]

    def populate_blocks(self, _cache, blocks, stop):
        for layer in (0, 1):
            if stop.value:
                break
            self.given.append((layer, blocks.start, blocks.stop))
            self.then()
            if not self.works:
                return False
        return True

    def whole(self):
        """Return the blocks that have pages in both layers."""
        layers = [
            [n for layer, *ends in self.given if layer == each for n in range(*ends)] for each in (0, 1)
        ]
        assert layers[0] == layers[1], "each layer once"
        return layers[0]


def stub_runner(ops):
    names = {"adapters": None, "dtype": torch.bfloat16, "rank": None}
    model = SimpleNamespace(ops=ops, config=SimpleNamespace(windows=()), **names)
    caches = ModelCaches(ops, "cache")
    return CPUModelRunner(model, None, caches, None, block_size=16, device=torch.device("cpu"))


def prepare(runner):
    """Have blocks populated, and wait for it."""
    assert not runner.prepare(), "nothing is left for the engine's thread"
    if runner._populating is not None:
        runner._populating.join(60)
        assert not runner._populating.is_alive()


@pytest.fixture
def _small_slices(monkeypatch):
    monkeypatch.setattr(cpu_runner, "POPULATED_AHEAD", 10 * 1024)
    monkeypatch.setattr(cpu_runner, "POPULATED_AT_ONCE", 4 * 1024)


@pytest.mark.usefixtures("_small_slices")
def test_blocks_ahead_of_those_in_use_get_pages_in_slices():
    ops = Populating()
    runner = stub_runner(ops)
    prepare(runner)
    assert [last - first for _, first, last in ops.given] == [8, 8, 3, 3], "some of one layer at a time"
    assert ops.whole() == list(range(11))
    prepare(runner)
    assert ops.whole() == list(range(11))
    runner._begun_blocks = 95
    prepare(runner)
    assert ops.whole() == [*range(11), *range(95, 100)]


@pytest.mark.usefixtures("_small_slices")
def test_a_step_stops_the_thread_which_goes_on_when_idle_again():
    ops = Populating()
    runner = stub_runner(ops)

    def begin_step():
        with pytest.raises(AttributeError):  # the model is none
            runner.execute(StepPlan([]))

    ops.then = begin_step
    prepare(runner)
    assert ops.given == [(0, 0, 8)]
    ops.then = lambda: None
    prepare(runner)
    assert ops.given[1:] == [(layer, *ends) for ends in ((0, 8), (8, 11)) for layer in (0, 1)]


@pytest.mark.usefixtures("_small_slices")
def test_a_system_that_cannot_is_asked_once():
    ops = Populating(works=False)
    runner = stub_runner(ops)
    prepare(runner)
    prepare(runner)
    assert len(ops.given) == 1


@pytest.mark.process  # a compiler, where the kernels are not in the cache
def test_a_block_keeps_what_it_holds():
    ops = load_backend("cpu").ops()
    assert ops.populate_blocks is not None
    shape = KVShape(2, 8, 16, 2, 32, torch.bfloat16, torch.bfloat16)
    cache = ops.make_kv_cache(shape, torch.device("cpu"))
    (memory,) = ops.block_tensors(cache)
    memory.fill_(7)
    assert ops.populate_blocks(cache, range(1, 8), ctypes.c_int(0))
    assert ops.populate_blocks(cache, range(1, 8), ctypes.c_int(1)), "to be stopped is no failure"
    assert (memory == 7).all()
    ops.clear_blocks(cache, [1, 6])
    assert [int(memory[:, block].sum() == 0) for block in range(8)] == [0, 1, 0, 0, 0, 0, 1, 0]
    ops.clear_blocks(cache, [])


@pytest.mark.process  # a compiler, where the kernels are not in the cache
@pytest.mark.parametrize("native", [True, False])
def test_a_block_of_all_layers_goes_out_and_comes_back_alone(native):
    ops = load_backend("cpu").ops()
    if not native:
        ops = replace(ops, copy_runs=None)
    cache = ops.make_kv_cache(KVShape(3, 8, 16, 2, 32, torch.bfloat16, torch.bfloat16), torch.device("cpu"))
    (memory,) = ops.block_tensors(cache)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    before, blocks = memory.clone(), ModelCaches(ops, cache).memory(HostDevice())
    data = blocks.make_buffer(blocks.sizes["kv"])
    blocks.save("kv", 5, data)
    assert bytes(data) == bytes(before[:, 5].flatten().tolist())
    assert torch.equal(memory, before)
    blocks.load("kv", 2, data)
    before[:, 2] = before[:, 5]
    assert torch.equal(memory, before)


def decoding(count, end, seed=0):
    """Return rows of one token, whose contexts end at `end` or before."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        length = end if not number else rng.randrange(1, end + 1)
        made = request(str(number), [rng.randrange(320) for _ in range(length)], rng.sample(range(99), 9))
        rows.append(planned(made, length - 1, 1))
    return rows


@pytest.mark.parametrize("end", [1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("count", [1, 5])
def test_kept_inputs_are_those_of_any_step(count: int, end: int) -> None:
    kept = DecodingInputs(count, -(-end // BLOCK), BLOCK)
    for seed in (0, 1):  # the second step writes over the first
        rows = decoding(count, end, seed)
        assert all(map(decodes, rows))
        ours, theirs = kept.fill(rows), build_batch(rows, BLOCK, torch.device("cpu"))
        for name in ("query_starts_N1", "context_lens_N", "block_tables_NB", "positions_T", "slots_T"):
            mine = getattr(ours.ragged, name)
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, getattr(theirs.ragged, name), rtol=0, atol=0)
        assert (ours.ragged.query_lens, ours.ragged.contexts) == ([1] * count, [row.end for row in rows])
        assert ours.ids_T.tolist() == theirs.ids_T.tolist()
        same = ("wanted_R", "rounds", "num_sampled", "prompts", "pooled", "fresh_blocks")
        assert [getattr(ours, each) for each in same] == [getattr(theirs, each) for each in same]


def test_rows_that_do_more_have_no_kept_inputs(model: Path) -> None:
    made = request("a", [1, 2, 3], [0])
    assert decodes(planned(made, 2, 1))
    assert not decodes(planned(made, 1, 2))
    assert not decodes(planned(made, 1, 1)), "the prompt goes on"
    told = replace(made, params=SamplingParams(max_tokens=9, prompt_logprobs=0))
    assert not decodes(planned(told, 2, 1))


DRAWS = ({}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.4}, {"logprobs": 2})


@pytest.mark.parametrize("count", [1, 3, SCORED_AT_ONCE, SCORED_AT_ONCE + 1])
@pytest.mark.parametrize("draws", [DRAWS[:1], DRAWS])
def test_a_step_as_one_list_gives_what_its_parts_give(
    model: Path, count: int, draws: tuple[dict[str, Any], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [ask(str(n), range(3 + n, 20 + n), 12, **draws[n % len(draws)]) for n in range(count)]
    whole, apart = load(model), load(model)
    runner_of(apart).model.times_head = True
    seen = count_lists(whole, monkeypatch)
    assert told(run(whole, asked)) == told(run(apart, asked))
    assert max(seen, default=0) <= SCORED_AT_ONCE
    assert (count in seen) == (count <= SCORED_AT_ONCE)


def told(outputs):
    return {
        name: [(each.token_ids, each.logprobs, each.finish_reason) for each in own]
        for name, own in outputs.items()
    }


def count_lists(engine, monkeypatch):
    """Return a list that gets the rows of each step that is one list of operations."""
    model, seen = runner_of(engine).model, []
    scores = model.scores

    def counted(forward, *, with_best):
        seen.append(len(forward.ids_T))
        return scores(forward, with_best=with_best)

    monkeypatch.setattr(model, "scores", counted)
    return seen


def test_a_greedy_step_wakes_the_threads_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(model)
    library = load_backend("cpu").library
    calls, run_ops = [], library.llmbox_run
    engine.add(ask("a", [5, 6, 7], 20))
    engine.step()
    engine.step()  # records
    monkeypatch.setattr(library, "llmbox_run", lambda *each: (calls.append(each), run_ops(*each)))
    engine.step()
    assert len(calls) == 1
