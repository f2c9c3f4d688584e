"""The official client against the real engine on a tiny model: numbers are those of transformers."""

import math
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from llmbox.app.inspect.detail import detail_of
from llmbox.app.security.keys import KeySpec
from llmbox.app.security.security import LOCAL
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.ipc.spawn import Launch
from support.cli_box import until
from support.openai_server import serving
from support.real_engines import hf_model, hf_tokens
from support.tiny_models import make_tiny_model

PROMPT = "the quick brown fox jumps"
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(tmp_path_factory, directory):
    with serving(tmp_path_factory.mktemp("data"), Launch()) as server:
        server.load(directory, "tiny", device="cpu", threads=1, memory_bytes=256 << 20)
        yield server


@pytest.fixture(scope="module")
def text(directory):
    return load_model_text(directory)


@pytest.fixture(scope="module")
def reference(directory):
    torch.set_num_threads(1)
    return hf_model(directory)


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 24, **options})


def test_greedy_tokens_are_those_of_transformers(client, text, reference):
    answer = complete(client, temperature=0, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert answer.choices[0].token_ids == hf_tokens(reference, text.encode(PROMPT), 24)


def test_logprobs_are_those_of_transformers(client, text, reference):
    answer = complete(
        client, max_tokens=4, logprobs=2, echo=True, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    ids = text.encode(PROMPT) + answer.choices[0].token_ids
    with torch.inference_mode():
        table = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), -1)
    told = answer.choices[0].logprobs.token_logprobs
    assert told[0] is None
    for position, value in enumerate(told[1:], 1):
        assert math.isclose(value, table[position - 1, ids[position]].item(), abs_tol=1e-3)
    assert len(told) == len(ids)


@pytest.mark.parametrize("seed", range(3))
def test_streamed_text_is_the_whole_text_and_batch_independent(client, seed):
    options = {"seed": seed, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    whole = complete(client, **options).choices[0].text
    streamed = "".join(c.choices[0].text for c in complete(client, **options, stream=True))
    several = complete(client, prompt=[PROMPT, "other", PROMPT], **options).choices
    assert streamed == whole
    assert [several[0].text, several[2].text] == [whole, whole]


def test_choices_share_the_prompt_and_differ(client):
    answer = complete(client, n=4, seed=1)
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage.prompt_tokens == complete(client, seed=1).usage.prompt_tokens


def test_a_repeated_prompt_is_cached_and_the_answer_the_same(client):
    prompt = list(range(3, 100))
    first = complete(client, prompt, **GREEDY)
    second = complete(client, prompt, **GREEDY)
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    assert second.choices[0].text == first.choices[0].text


def test_constraints_reach_the_sampler(client, text):
    word = text.encode(" fox", add_special_tokens=False)
    extra = {"allowed_token_ids": word, "ignore_eos": True, "return_token_ids": True}
    assert set(complete(client, extra_body=extra).choices[0].token_ids) <= set(word)
    forced = complete(client, logit_bias={"40": 100}, temperature=0, extra_body={"return_token_ids": True})
    assert set(forced.choices[0].token_ids) == {40}
    banned = complete(client, logit_bias={"40": 100}, extra_body=extra | {"allowed_token_ids": [41, 42]})
    assert set(banned.choices[0].token_ids) <= {41, 42}


def test_a_stream_goes_on_after_the_engine_was_killed(server, client):
    options = {"seed": 3, "max_tokens": 150, "extra_body": {"ignore_eos": True}}
    undisturbed = complete(client, **options).choices[0].text
    stream = complete(client, **options, stream=True)
    pieces = []
    supervisor = server.services.engines.get("tiny").supervisor
    for i, chunk in enumerate(stream):
        if i == 5:
            os.kill(supervisor.pid, signal.SIGKILL)
        pieces.append(chunk.choices[0].text)
    assert "".join(pieces) == undisturbed


def test_many_clients_at_once_get_what_each_would_get_alone(client):
    alone = {seed: complete(client, seed=seed, max_tokens=12).choices[0].text for seed in range(8)}
    together: dict[int, str] = {}

    def ask(seed: int) -> None:
        chunks = complete(client, seed=seed, max_tokens=12, stream=True)
        together[seed] = "".join(c.choices[0].text for c in chunks)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert together == alone


def test_nothing_is_left_open(server):
    supervisor = server.services.engines.get("tiny").supervisor
    until(lambda: not supervisor.stats.blocks_used and supervisor.open_requests == 0)


def test_the_log_tells_why_the_prefix_cache_had_no_more(server, client):
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    prompts = [words, words, words[:50] + "and then quite another way to go on", "no"]
    ids = [complete(client, prompt, max_tokens=2, extra_body={"ignore_eos": True}).id for prompt in prompts]
    log = server.services.request_log
    log.flush()
    records = [server.call(log.get(each)) for each in ids]
    assert [record.prefix_end for record in records] == ["new", "complete", "diverged", "short"]
    assert records[1].cached_tokens == records[1].looked_up_tokens > 0
    assert 0 < records[2].cached_tokens < records[2].looked_up_tokens
    assert records[3].looked_up_tokens == 0


def test_where_prompts_are_kept_the_first_text_that_differs_is_told(server):
    keys = server.services.security.keys
    secret = keys.add(KeySpec(name="kept", log_content=True))[1]
    words = "the clock says {} and the quick brown fox jumps over the lazy dog once more today"
    try:
        with server.client().with_options(api_key=secret) as client:
            ids = [complete(client, words.format(time), max_tokens=2).id for time in ("nine", "noon")]
    finally:
        keys.remove("kept")
    server.services.request_log.flush()
    control = SimpleNamespace(services=server.services, running=SimpleNamespace(url=server.url))
    first, second = [server.call(detail_of(control, LOCAL, each)).prefix_note for each in ids]
    assert "differs from" not in first
    assert f'differs from request {ids[0]} first after "the clock says n": here "oon and the' in second
    assert 'there "ine and the' in second
