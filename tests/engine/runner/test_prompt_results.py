"""Vectors of texts: those of transformers, and the same bits however the work is split."""

from array import array

import pytest
import torch

from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams
from support.device_ranks import device_ranks
from support.late_device import device_engine
from support.real_engines import ask, load, run, runner_of
from support.tiny_models import make_tiny_model

POOLINGS = ("last", "mean", "cls")
PROMPTS = {
    "one": [7],
    "block": list(range(3, 19)),
    "long": [3 + 7 * i % 300 for i in range(90)],
    "prefix": [3 + 7 * i % 300 for i in range(64)] + [11, 12],
}


def wanted(pooling, prompts=PROMPTS):
    return [
        AddRequest(
            request_id=f"{name}-{pooling}",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=0, pooling=pooling),
        )
        for name, prompt in prompts.items()
    ]


ALL = [request for pooling in POOLINGS for request in wanted(pooling)]


def vectors(engine, requests):
    result = {}
    for name, outputs in run(engine, requests).items():
        if name.partition("-")[2] in POOLINGS:
            (output,) = outputs
            assert (output.finish_reason, output.token_ids) == ("stop", []), output
            result[name] = output.vector
    return result


def alone(directory, **options):
    """One after the other, without a prefix of each other."""
    engine = load(directory, prefix_cache=False, **options)
    return {name: vector for request in ALL for name, vector in vectors(engine, [request]).items()}


def assert_near(seen, expected):
    """Plain torch may sum a row in another order in another batch."""
    assert seen.keys() == expected.keys()
    for name, vector in seen.items():
        ours, theirs = (torch.tensor(array("f", each)) for each in (vector, expected[name]))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_vectors_are_those_of_transformers(tmp_path, arch):
    from transformers import AutoModel

    directory = make_tiny_model(tmp_path, arch=arch, tokenizer=False)
    theirs = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    ours = vectors(load(directory), ALL)
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            states_TE = theirs(torch.tensor([prompt])).last_hidden_state[0]
        expected = {"last": states_TE[-1], "mean": states_TE.mean(0), "cls": states_TE[0]}
        for pooling in POOLINGS:
            seen = torch.tensor(array("f", ours[f"{name}-{pooling}"]))
            torch.testing.assert_close(seen, expected[pooling], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_running": 3, "token_budget": 9},
        {"max_running": 12, "kv_tokens": 112, "context": 96},
        {"prefix_cache": False, "chunked_prefill": False, "token_budget": 9, "max_running": 4},
        {"batching": "static", "kv_tokens": 400, "context": 96},
    ],
    ids=["together", "chunks", "short of blocks", "no chunks", "static"],
)
def test_same_bits_alone_and_among_others(model, dtype, options):
    expected = alone(model, dtype=dtype)
    others = [ask(f"other {n}", range(n, n + 20), 6, temperature=0.7, seed=n) for n in range(3)]
    engine = load(model, dtype=dtype, **options)
    assert vectors(engine, [*others, *ALL]) == expected
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0


def test_a_preempted_request_is_summed_from_its_beginning(model):
    request = next(r for r in ALL if r.request_id == "long-mean")
    engine = load(model, token_budget=16, max_running=4)
    engine.add(request)
    engine.step()
    engine.step()
    engine.scheduler.active.preempt(engine.scheduler._requests[request.request_id])
    outputs = [output for _ in range(10) for output in engine.step().outputs]
    assert [output.vector for output in outputs] == [alone(model)[request.request_id]]


def test_generation_is_not_disturbed(model):
    asks = [ask(f"other {n}", range(n, n + 20), 6, temperature=0.7, seed=n) for n in range(3)]
    expected = run(load(model), asks)
    seen = run(load(model), [*ALL, *asks])
    for request in asks:
        name = request.request_id
        assert [o.token_ids for o in seen[name]] == [o.token_ids for o in expected[name]]


def test_only_the_last_row_may_follow_a_cached_prefix(model):
    engine = load(model)
    first = vectors(engine, ALL)
    outputs = run(engine, ALL)
    for request in ALL:
        (output,) = outputs[request.request_id]
        assert output.vector == first[request.request_id]
        if request.params.pooling == "last":
            assert output.cached_tokens == (len(request.prompt_ids) - 1) // 16 * 16
        else:
            assert (output.cached_tokens, output.prefix_end) == (0, "pooling")


def test_a_prompt_may_fill_the_context_and_no_more(model):
    engine = load(model, context=64)
    fits, not_ = wanted("last", {"fits": [5] * 64, "not": [5] * 65})
    outputs = run(engine, [fits, not_])
    assert outputs["fits-last"][0].vector is not None
    assert outputs["not-last"][0].error_code == "does_not_fit"
    assert "65" in outputs["not-last"][0].error_message


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -1e30])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_states_that_are_no_numbers_fail_that_request_alone(model, monkeypatch, pooling, number):
    engine = load(model, prefix_cache=False)
    decoder = runner_of(engine)._model
    hidden = decoder.hidden

    def with_one_wrong(forward, rows_R):
        states_RE = hidden(forward, rows_R).clone()
        states_RE[-1, 3] = number
        return states_RE

    monkeypatch.setattr(decoder, "hidden", with_one_wrong)
    good, bad = wanted(pooling, {"good": [5, 6], "bad": [9, 9]})
    outputs = run(engine, [good, bad])
    assert outputs[f"good-{pooling}"][0].vector is not None
    assert outputs[f"bad-{pooling}"][0].finish_reason == "error"
    assert "1 of the model's states are no numbers" in outputs[f"bad-{pooling}"][0].error_message


@pytest.mark.parametrize("options", [{}, {"max_running": 3, "token_budget": 9}], ids=["plain", "chunks"])
def test_a_device_that_is_late(model, monkeypatch, options):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    others = [ask(f"other {n}", range(n, n + 20), 6, temperature=0.7, seed=n) for n in range(3)]
    assert_near(vectors(device_engine(model, **options), [*others, *ALL]), alone(model))


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_devices_that_share_a_model(model, monkeypatch, cut):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    others = [ask(f"other {n}", range(n, n + 20), 6) for n in range(3)]
    expected = alone(model)
    with device_ranks(model, **cut, max_running=4, token_budget=16) as (engine, _):
        seen = vectors(engine, [*others, *ALL])
    assert_near(seen, expected)
