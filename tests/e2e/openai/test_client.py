"""The official client against the daemon's HTTP side, with an engine whose tokens are known."""

import asyncio

import pytest

from llmbox.app.gateway.generation import choice_seed
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.sampling_params import SamplingParams
from support.cli_box import PATIENCE, until
from support.deferred_module import DeferredModule
from support.fake_engine import FakeOptions, expected_tokens, write_model
from support.openai_server import Server, serving
from support.tokenizers_zoo import byte_level, drawn_ids, llama2, write_text_files

openai = DeferredModule("openai")

CONTEXT = 512
PROMPT = [{"role": "user", "content": "hello world"}]
TEXT = "the quick 你好 😀\n\nUser: fox<|im_end|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    script = tokenizer.encode(TEXT.removesuffix("<|im_end|>"), add_special_tokens=False).ids
    for name, options in {
        "random": {},
        "scripted": {"script": script},
        "slow": {"step_delay": 0.03, "hold_at": 350},
    }.items():
        write_model(
            write_text_files(root / name, tokenizer), **drawn_ids(tokenizer), context=CONTEXT, **options
        )
    other = llama2()
    write_model(write_text_files(root / "spm", other), **drawn_ids(other), context=CONTEXT)
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory, models):
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load(models / "random", "org/random", alias="short")
        for name in ("scripted", "slow", "spm"):
            server.load(models / name, name)
        yield server


@pytest.fixture(scope="module")
def text(models):
    return load_model_text(models / "random")


def expected(text, prompt_ids, max_tokens, seed, **options) -> tuple[list[int], str]:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=text.eos_token_ids)
    drawn = FakeOptions(**drawn_ids(byte_level()), context=CONTEXT, **options)
    ids = expected_tokens(prompt_ids, params, drawn)
    return ids, text.decode([i for i in ids if i not in text.eos_token_ids])


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "org/random", "messages": PROMPT, "max_tokens": 8, **options}
    )


def stream_text(chunks) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def live(server: Server) -> list:
    async def ask():
        return server.services.gateway.in_flight()

    return server.call(ask())


# --------------------------------------------------------------------------- shapes


def test_a_chat_answer_has_openais_keys(client):
    answer = client.chat.completions.with_raw_response.create(
        model="org/random", messages=PROMPT, max_tokens=4, seed=1, stop=["zzzz"]
    )
    body = answer.http_response.json()
    assert body.keys() == {
        "id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint",
    }  # fmt: skip
    choice = body["choices"][0]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() == {"role", "content", "refusal", "annotations"}
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert body["usage"].keys() == {
        "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details",
        "completion_tokens_details",
    }  # fmt: skip
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert body["id"].removeprefix("chatcmpl-") == answer.headers["x-request-id"].removeprefix("req_")
    assert answer.headers["openai-processing-ms"].isdigit()


def test_text_and_usage_are_those_of_the_engine(client, text):
    answer = chat(client, seed=7, max_tokens=20)
    prompt = text.encode("<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n")
    ids, spoken = expected(text, prompt, 20, 7)
    assert answer.choices[0].message.content == spoken
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == len(prompt) + len(ids)


def test_chunks_have_openais_shape(client):
    with client.chat.completions.with_streaming_response.create(
        model="org/random", messages=PROMPT, max_tokens=6, seed=3, stream=True,
        stream_options={"include_usage": True},
    ) as response:  # fmt: skip
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    import json

    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        assert chunk["choices"][0].keys() == {"index", "delta", "logprobs", "finish_reason"}
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("length") == 1
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6


def test_usage_is_absent_from_chunks_unless_asked_for(client):
    assert all("usage" not in c.model_fields_set for c in chat(client, stream=True))


def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    endless = {"ignore_eos": True}
    chunks = list(chat(client, stream=True, stream_options=options, extra_body=endless))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


# --------------------------------------------------------------------------- streamed = whole


@pytest.mark.parametrize("model", ["org/random", "spm"])
@pytest.mark.parametrize("seed", range(6))
def test_streamed_text_is_the_whole_text(client, model, seed):
    whole = chat(client, model=model, seed=seed, max_tokens=120)
    streamed = chat(client, model=model, seed=seed, max_tokens=120, stream=True)
    assert stream_text(streamed) == whole.choices[0].message.content


def test_characters_are_never_cut(client):
    pieces = [
        c.choices[0].delta.content or "" for c in chat(client, model="scripted", max_tokens=100, stream=True)
    ]
    assert "".join(pieces) == TEXT.removesuffix("<|im_end|>")
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_end_token_is_counted_and_not_shown(client, text):
    answer = chat(client, model="scripted", max_tokens=100)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == TEXT.removesuffix("<|im_end|>")
    script = text.encode(TEXT.removesuffix("<|im_end|>"), add_special_tokens=False)
    assert answer.usage.completion_tokens == len(script) + 1


# --------------------------------------------------------------------------- stop


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("\n\nUser:", "the quick 你好 😀"),
        (["fox", "ick 你"], "the qu"),
        (["好"], "the quick 你"),
        (["quick", "the quick"], ""),
        (["nowhere"], TEXT.removesuffix("<|im_end|>")),
    ],
)
def test_stop_strings_end_the_text_before_them(client, stop, shown, stream):
    answer = chat(client, model="scripted", max_tokens=100, stop=stop, stream=stream)
    if stream:
        chunks = list(answer)
        assert stream_text(chunks) == shown
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].message.content == shown
        assert answer.choices[0].finish_reason == "stop"


def test_a_stop_string_ends_the_engines_work(server, client):
    chat(client, model="scripted", max_tokens=400, stop="quick", extra_body={"ignore_eos": True})
    supervisor = server.services.engines.get("scripted").supervisor
    until(lambda: supervisor.stats.running == 0 and supervisor.open_requests == 0)


def test_stop_strings_wait_for_min_tokens(client, text):
    early = len(text.encode("the quick", add_special_tokens=False))
    answer = chat(
        client, model="scripted", max_tokens=100, stop=["quick", "fox"], extra_body={"min_tokens": early}
    )
    assert answer.choices[0].message.content == "the quick 你好 😀\n\nUser: "


def test_stop_token_ids_end_and_ignore_eos_does_not(client, text):
    script = text.encode(TEXT.removesuffix("<|im_end|>"), add_special_tokens=False)
    place = next(i for i, id_ in enumerate(script) if i > 3 and script.index(id_) == i)
    answer = chat(client, model="scripted", max_tokens=100, extra_body={"stop_token_ids": [script[place]]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text.decode(script[:place])
    endless = chat(client, model="scripted", max_tokens=100, extra_body={"ignore_eos": True})
    assert endless.choices[0].finish_reason == "length"
    assert endless.usage.completion_tokens == 100


# --------------------------------------------------------------------------- n, seed


def test_choices_have_seeds_of_their_own_that_can_be_replayed(client):
    answer = chat(client, n=3, seed=11, max_tokens=12)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    texts = [c.message.content for c in answer.choices]
    assert len(set(texts)) == 3
    for index, expected_text in enumerate(texts):
        again = chat(client, seed=choice_seed(11, index), max_tokens=12)
        assert again.choices[0].message.content == expected_text
    assert answer.usage.completion_tokens == 36


def test_a_drawn_seed_is_returned_and_gives_the_same_answer(client):
    first = chat(client)
    assert isinstance(first.seed, int)
    assert chat(client, seed=first.seed).choices[0].message.content == first.choices[0].message.content
    chunks = list(chat(client, stream=True))
    assert chunks[-1].seed == chunks[-1].model_extra["seed"]
    assert chat(client, seed=chunks[-1].seed).choices[0].message.content == stream_text(chunks)


def test_streams_of_several_choices_each_begin_and_end_once(client):
    chunks = list(chat(client, n=3, seed=5, stream=True, max_tokens=10))
    whole = chat(client, n=3, seed=5, max_tokens=10)
    for index in range(3):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert [c.finish_reason for c in mine].count(None) == len(mine) - 1
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content


# --------------------------------------------------------------------------- logprobs


def test_chat_logprobs_have_the_bytes_of_the_text(client):
    answer = chat(client, model="scripted", max_tokens=100, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode() == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert answer.choices[0].logprobs.refusal is None


def test_logprobs_end_with_the_token_in_which_a_stop_string_begins(client):
    answer = chat(client, model="scripted", max_tokens=100, logprobs=True, stop=["User:"])
    content, shown = answer.choices[0].logprobs.content, answer.choices[0].message.content
    assert bytes(b for token in content for b in token.bytes).decode() == shown
    assert all(token.top_logprobs == [] for token in content)


def test_streamed_logprobs_are_those_of_the_whole_answer(client):
    options = {"model": "scripted", "max_tokens": 100, "logprobs": True, "top_logprobs": 1}
    chunks = [chunk.choices[0] for chunk in chat(client, **options, stream=True)]
    streamed = [token for choice in chunks if choice.logprobs for token in choice.logprobs.content]
    assert streamed == chat(client, **options).choices[0].logprobs.content
    assert all(choice.logprobs for choice in chunks if choice.delta.content)


def test_completion_logprobs_and_offsets(client):
    answer = client.completions.create(model="scripted", prompt="x", max_tokens=6, logprobs=2, seed=0)
    told = answer.choices[0].logprobs
    assert (
        len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 6
    )
    assert told.text_offset[0] == 0
    assert all(token in top for token, top in zip(told.tokens, told.top_logprobs, strict=True))


def test_echo_with_logprobs_starts_with_null(client, text):
    prompt = "hello world"
    answer = client.completions.create(
        model="org/random", prompt=prompt, max_tokens=3, logprobs=1, echo=True, seed=0
    )
    choice, ids = answer.choices[0], text.encode(prompt)
    assert choice.text.startswith(prompt)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(ids) + answer.usage.completion_tokens
    assert "".join(choice.logprobs.tokens[: len(ids)]) == prompt
    streamed = client.completions.create(
        model="org/random", prompt=prompt, max_tokens=3, logprobs=1, echo=True, seed=0, stream=True
    )
    chunks = list(streamed)
    assert "".join(c.choices[0].text for c in chunks) == choice.text
    assert [o for c in chunks for o in c.choices[0].logprobs.text_offset] == choice.logprobs.text_offset


def test_a_prompt_can_be_scored_alone(client, text):
    answer = client.completions.create(
        model="org/random", prompt="hello world", max_tokens=0, logprobs=0, echo=True, seed=0
    )
    assert answer.choices[0].text == "hello world"
    assert len(answer.choices[0].logprobs.tokens) == len(text.encode("hello world"))
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].finish_reason == "length"


def test_prompt_logprobs_and_token_ids_in_vllms_shape(client, text):
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    answer = client.completions.create(
        model="org/random", prompt="hello", max_tokens=3, seed=1, extra_body=extra
    )
    choice, ids = answer.choices[0], text.encode("hello")
    assert choice.prompt_token_ids == ids
    assert len(choice.token_ids) == 3
    assert choice.prompt_logprobs[0] is None
    assert all(str(i) in entry for i, entry in zip(ids[1:], choice.prompt_logprobs[1:], strict=True))
    chatted = chat(client, extra_body=extra, seed=1)
    assert len(chatted.prompt_logprobs) == len(chatted.prompt_token_ids) == chatted.usage.prompt_tokens
    chunks = list(chat(client, extra_body={"return_token_ids": True}, seed=1, stream=True))
    assert chunks[0].prompt_token_ids == chatted.prompt_token_ids
    streamed = [i for c in chunks for i in getattr(c.choices[0], "token_ids", None) or []]
    assert streamed == chatted.choices[0].token_ids


# --------------------------------------------------------------------------- prompts


def test_prompts_of_every_kind(client, text):
    ids = text.encode("hello world")
    one = client.completions.create(model="org/random", prompt="hello world", max_tokens=5, seed=2)
    for prompt in ["hello world"], ids, [ids]:
        same = client.completions.create(model="org/random", prompt=prompt, max_tokens=5, seed=2)
        assert same.choices[0].text == one.choices[0].text
        assert same.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_come_prompt_major(client, stream):
    alone = [
        [c.text for c in client.completions.create(model="spm", prompt=p, n=2, max_tokens=5, seed=9).choices]
        for p in ("one", "two two", "three")
    ]
    answer = client.completions.create(
        model="spm", prompt=["one", "two two", "three"], n=2, max_tokens=5, seed=9, stream=stream
    )
    texts = [""] * 6
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [t for pair in alone for t in pair]


def test_content_parts_developer_and_names(client):
    plain = chat(client, seed=1, messages=[{"role": "system", "content": "a\nb"}, *PROMPT])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    other = chat(client, seed=1, messages=[{"role": "developer", "content": parts, "name": "x"}, *PROMPT])
    assert other.choices[0].message.content == plain.choices[0].message.content
    assert other.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_final_message_can_be_continued(client, text):
    messages = [*PROMPT, {"role": "assistant", "content": "The answer is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(client, messages=messages, extra_body=extra, seed=4)
    prompt = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\nThe answer is"
    assert answer.choices[0].message.content == expected(text, text.encode(prompt), 8, 4)[1]


def test_absent_max_tokens_is_what_the_context_leaves(client):
    answer = client.completions.create(
        model="org/random", prompt=[5] * (CONTEXT - 4), seed=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4


# --------------------------------------------------------------------------- models, tokenize


def test_models_are_listed_with_their_context(client):
    listed = {model.id: model for model in client.models.list()}
    assert listed.keys() == {"org/random", "short", "scripted", "slow", "spm"}
    assert listed["org/random"].context_window == CONTEXT
    assert client.models.retrieve("org/random").id == "org/random"
    assert chat(client, model="short").model == "short"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/absent")
    assert caught.value.code == "model_not_found"


def test_tokenize_and_detokenize(server, text):
    import httpx

    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        body = http.post(
            "/tokenize", json={"model": "spm", "prompt": "the", "return_token_strs": True}
        ).json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert body["max_model_len"] == CONTEXT
        body = http.post("/tokenize", json={"model": "org/random", "messages": PROMPT}).json()
        back = http.post("/detokenize", json={"model": "org/random", "tokens": body["tokens"]}).json()
        assert back == {"prompt": "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"}
        refused = http.post("/detokenize", json={"model": "org/random", "tokens": [10**6]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
        refused = http.post("/tokenize", json={"model": "org/random"})
        assert refused.status_code == 400


# --------------------------------------------------------------------------- the life of a request


def test_unknown_fields_are_listed_as_warnings(client):
    answer = chat(client, extra_body={"frobnicate": 1, "messages": [{**PROMPT[0], "mood": "good"}]})
    assert any("'frobnicate'" in w for w in answer.warnings)
    assert any("mood" in w for w in answer.warnings)
    chunks = list(chat(client, stream=True, extra_body={"frobnicate": 1}))
    assert [c for c in chunks if "warnings" in (c.model_extra or {})] == chunks[-1:]


def test_a_client_that_leaves_ends_the_work(server):
    async def leave(stream: bool):
        async with server.async_client() as client:
            job = asyncio.create_task(
                client.chat.completions.create(
                    model="slow",
                    messages=PROMPT,
                    max_tokens=400,
                    stream=stream,
                    extra_body={"ignore_eos": True},
                )
            )
            await asyncio.to_thread(until, lambda: job.done() or live(server))
            assert stream or not job.done()
            if stream:
                await (await job).close()
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    supervisor = server.services.engines.get("slow").supervisor
    for stream in (True, False):
        asyncio.run(leave(stream))
        until(lambda: not live(server) and supervisor.open_requests == 0)
    until(lambda: supervisor.stats.running == 0)


def test_requests_in_flight_can_be_seen_and_cancelled(server, client):
    stream = chat(client, model="slow", stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    seen = iter(stream)
    for _ in range(3):
        chunk = next(seen)
    (request,) = live(server)
    assert request.id == chunk.id
    assert (request.model, request.state, request.n) == ("slow", "decode", 1)
    assert request.output_tokens >= 1

    async def cancel():
        return server.services.gateway.cancel(chunk.id)

    assert server.call(cancel())
    with pytest.raises(openai.APIError) as caught:
        list(seen)
    assert caught.value.code == "request_cancelled"
    until(lambda: not live(server))


def test_finished_refused_and_abandoned_requests_are_logged(server, client):
    done = chat(client, seed=5)
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, temperature=3)
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, stop=[""])
    log = server.services.request_log
    log.flush(60)
    record = server.call(log.get(done.id))
    assert (record.http_status, record.model, record.seed) == (200, "org/random", 5)
    assert record.output_tokens == done.usage.completion_tokens
    assert record.ttft_s is not None
    assert "hello" not in record.params
    record = server.call(log.get(refused.value.request_id))
    assert (record.http_status, record.error_code) == (400, "invalid_value")
    metrics = server.services.metrics.render().decode()
    labels = 'finished_reason="length",model_name="org/random",tier="standard"'
    assert f"vllm:request_success_total{{{labels}}}" in metrics


def test_an_open_request_id_cannot_be_taken_twice(client):
    stream = chat(
        client,
        model="slow",
        stream=True,
        max_tokens=200,
        extra_body={"request_id": "mine", "ignore_eos": True},
    )
    assert next(iter(stream)).id == "chatcmpl-mine"
    with pytest.raises(openai.ConflictError) as caught:
        chat(client, extra_body={"request_id": "mine"})
    assert caught.value.code == "request_id_in_use"
    stream.close()


def test_the_fingerprint_is_stable_and_of_the_model(client):
    a, b = chat(client), chat(client)
    assert a.system_fingerprint == b.system_fingerprint
    assert chat(client, model="slow", max_tokens=1).system_fingerprint != a.system_fingerprint
