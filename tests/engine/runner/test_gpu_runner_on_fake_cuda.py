"""All that a GPU's load and steps go through, from the loader to the replay of graphs, over a stand-in for
CUDA: memory that is counted, copies that are late, graphs that record, kernels in Triton's interpreter.
"""

import logging
from array import array
from dataclasses import replace

import pytest

from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.kv_store import usage
from llmbox.engine.runner import cuda_graphs
from llmbox.engine.runner.cuda_graphs import WANTED
from llmbox.engine.sampling_params import SamplingParams
from support.encoder_models import make_encoder
from support.fake_cuda import Card, fake_cuda
from support.kv_tiers import write_out
from support.real_engines import ask, load, run
from support.tiny_models import make_tiny_model

STEP_LAUNCHES = 4
"""Of a decoding step without changes: the copy of its inputs, two graphs, the copy of what was drawn."""
SIZES = {"dtype": "float32", "max_running": 2, "token_budget": 16, "context": 40, "speculate": "off"}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    return make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, vocab_size=99)


def requests():
    return [
        ask("greedy", range(5, 24), 3),
        ask("drawn", [7, 8, 9], 3, temperature=0.9, top_p=0.8, seed=3, logprobs=2, prompt_logprobs=2),
        ask(
            "ruled", [7, 8], 2, temperature=1.2, top_k=7, seed=9, repetition_penalty=1.5, bad_words=((5, 6),)
        ),
    ]


def drawn(outputs):
    return [token for output in outputs for token in output.token_ids]


def chances(outputs):
    return [each.logprob for output in outputs for each in output.logprobs]


@pytest.mark.parametrize(("kind", "end"), [("modernbert", "ForSequenceClassification"), ("mpnet", "Model")])
def test_encoders(tmp_path, monkeypatch, kind, end):
    """Texts within reach and beyond, rerankers, and attention with a bias, which torch computes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    make_encoder(tmp_path, kind, end)
    pooling = "embed" if end == "Model" else "classify"
    params = SamplingParams(max_tokens=0, pooling=pooling)
    texts = [
        AddRequest(request_id=str(count), prompt_ids=[3 + 7 * i for i in range(count)], params=params)
        for count in (1, 5, 33)
    ]
    options = {"dtype": "float32", "token_budget": 16}
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = run(load(tmp_path, **options), texts)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    with fake_cuda(Card(multiprocessors=2)):
        engine = load(tmp_path, device="cuda", memory_bytes=None, **options)
        assert (engine.info.device, engine.info.backend) == ("cuda", "triton")
        found = run(engine, texts)
    for name, (output,) in found.items():
        assert array("f", output.vector) == pytest.approx(array("f", expected[name][0].vector), abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")  # numpy's, of rows that only fill up
def test_a_model_is_loaded_measured_captured_and_served(model, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = run(load(model, **SIZES), requests())
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(model, device="cuda", **SIZES, memory_bytes=None)
        assert engine.info.backend == "triton"
        assert cuda.card.graphs == 4, "two for each number of rows"
        assert not engine.prepare()
        waited, events = len(cuda.queue.waits), cuda.queue.event_waits
        seen = run(engine, requests())
        assert cuda.queue.waits[waited:] == []
        assert cuda.queue.event_waits - events == engine.stats().steps
        launches = cuda.queue.launches
        assert not engine.prepare()
        assert (cuda.queue.launches, cuda.queue.under_way) == (launches, [])
    for name, outputs in expected.items():
        assert drawn(seen[name]) == drawn(outputs)
    assert "memory measured" in caplog.text
    assert "CUDA graphs are off" not in caplog.text


@pytest.mark.slow
def test_a_gpu_serves_without_overlap(model, monkeypatch):
    """The runner of CPUs then computes there: its inputs must not stay on the host."""
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = run(load(model, **SIZES), requests())
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    with fake_cuda(Card(multiprocessors=2)):
        engine = load(model, device="cuda", overlap=False, **SIZES, kv_tokens=160, memory_bytes=None)
        seen = run(engine, requests())
    for name, outputs in expected.items():
        assert drawn(seen[name]) == drawn(outputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_a_graph_is_captured_between_steps_and_nothing_waits(model, monkeypatch):
    """Before, a step is padded to the larger graph; after, it is two graphs and a copy each way."""
    monkeypatch.setattr(cuda_graphs, "EARLY", ())
    wanted = ask("drawn", [7, 8, 9], WANTED + 8, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=3)
    ruled = ask("ruled", [7, 8, 9], 4, temperature=0.9, repetition_penalty=1.5, seed=3)
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = run(load(model, **SIZES), [wanted, ruled])
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(model, device="cuda", **SIZES, memory_bytes=None)
        assert cuda.card.graphs == 2
        waited = len(cuda.queue.waits)
        seen, steps = run(engine, [wanted]), []
        assert cuda.card.graphs == 4
        seen |= run(engine, [ruled])
        engine.add(replace(wanted, request_id="again"))
        while engine.has_work:
            before = cuda.queue.launches
            seen.setdefault("again", []).extend(engine.step().outputs)
            steps.append(cuda.queue.launches - before)
        assert cuda.queue.waits[waited:] == []
        assert min(steps[2:-1]) == STEP_LAUNCHES, steps
    assert drawn(seen["drawn"]) == drawn(seen["again"]) == drawn(expected["drawn"])
    assert drawn(seen["ruled"]) == drawn(expected["ruled"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("kept", ["host", "disk", "both"])
def test_blocks_that_the_device_evicts_come_back(model, tmp_path, monkeypatch, kept):
    """Through pinned memory, over copies that run as late as they may."""
    sizes = {**SIZES, "kv_tokens": 48, "cuda_graphs": False}
    if kept != "host":
        variables = usage.cache_variables(tmp_path / "kv", 1 << 30, 1.0)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    host = 0 if kept == "disk" else 1 << 20
    firsts = {"a": 5, "b": 41, "c": 5}
    prompts = [ask(name, range(first, first + 35), 3, logprobs=2) for name, first in firsts.items()]
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    with monkeypatch.context() as without:
        without.delenv(usage.FOLDER_VARIABLE, raising=False)
        expected = drawn(run(load(model, prefix_cache=False, **SIZES), prompts[:1])["a"])
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(model, device="cuda", memory_bytes=None, kv_host_bytes=host, **sizes)
        waited = len(cuda.queue.waits)
        seen = {}
        for prompt in prompts:
            seen |= run(engine, [prompt])
            while engine.prepare():
                pass
            write_out(engine.scheduler.kv_cache.tiers)
        engine.close()
        assert cuda.queue.waits[waited:] == [], "nothing waits for the whole device"
    assert drawn(seen["a"]) == drawn(seen["c"]) == expected
    assert chances(seen["c"]) == pytest.approx(chances(seen["a"]), abs=1e-5)
    first = seen["c"][0]
    assert first.cached_tokens == 32
    if kept == "disk":
        assert first.disk_tokens > 0
    else:
        assert first.host_tokens > 0
        assert engine.stats().host_loaded_bytes > 0
