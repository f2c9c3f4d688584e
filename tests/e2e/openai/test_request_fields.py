"""Fields beyond OpenAI's that vLLM's clients send, and time limits: whole answers and streams agree."""

import time

import httpx
import pytest
from tokenizers import AddedToken

from support.cli_box import PATIENCE
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files

openai = DeferredModule("openai")

HELLO = [{"role": "user", "content": "hello"}]
STORY = "the quick brown fox. Then the dog. END of it"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in FIM])
    script = tokenizer.encode(STORY, add_special_tokens=False).ids
    end = tokenizer.token_to_id("<|fim_suffix|>")
    for name, options in {
        "story": {"script": script},
        "filler": {"script": [*script[:3], end, *script]},
        "held": {"script": script, "hold_at": 3},
        "stuck": {"script": script, "hold_at": 0},
    }.items():
        write_model(
            write_text_files(root / name, tokenizer, CHATML), **drawn_ids(tokenizer), context=256, **options
        )
    with serving(tmp_path_factory.mktemp("data")) as server:
        for name in ("story", "filler", "held", "stuck"):
            server.load(root / name, name)
        server.tokenizer = tokenizer
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client(timeout=PATIENCE) as client:
        yield client


def chat_text(client, stream: bool, **fields) -> tuple[str, str]:
    fields = {"model": "story", "messages": HELLO, **fields}
    if not stream:
        choice = client.chat.completions.create(**fields).choices[0]
        return choice.message.content, choice.finish_reason
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    return "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason


def plain_text(client, stream: bool, **fields) -> tuple[str, str]:
    fields = {"model": "story", "prompt": "x", "max_tokens": 99, **fields}
    if not stream:
        choice = client.completions.create(**fields).choices[0]
        return choice.text, choice.finish_reason
    choices = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    return "".join(c.text for c in choices), choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat_text, plain_text])
def test_the_stop_string_can_be_part_of_the_answer(client, ask, stream):
    before = STORY[: STORY.index("END")]
    assert ask(client, stream, stop=["END"]) == (before, "stop")
    extra = {"include_stop_str_in_output": True}
    assert ask(client, stream, stop=["END"], extra_body=extra) == (before + "END", "stop")


@pytest.mark.parametrize("ask", [chat_text, plain_text])
def test_so_can_the_stop_token(client, server, ask):
    ids = server.tokenizer.encode(STORY, add_special_tokens=False).ids
    extra = {"stop_token_ids": [ids[4]], "ignore_eos": True}
    short, long = server.tokenizer.decode(ids[:4]), server.tokenizer.decode(ids[:5])
    assert ask(client, False, extra_body=extra) == (short, "stop")
    assert ask(client, True, extra_body={**extra, "include_stop_str_in_output": True}) == (long, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_gap_is_filled_up_to_its_end(client, stream):
    """The engine's script goes on behind the token that ends a gap."""
    filled, reason = plain_text(client, stream, model="filler", prompt="def f", suffix="return")
    assert (filled, reason) == (plain_text(client, stream, max_tokens=3)[0], "stop")
    ids = client.completions.create(
        model="filler", prompt="a", suffix="b", extra_body={"return_token_ids": True}
    )
    assert len(ids.choices[0].prompt_token_ids) == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"prompt": [1, 2]}, "prompt"), ({"prompt": ["a", [1]]}, "prompt")],
)
def test_what_a_gap_cannot_have(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "filler", "prompt": "a", "suffix": "b", **fields})
    assert refused.value.param == param


def test_prompts_can_be_cut_at_the_beginning(client):
    def ask(prompt, most, **fields):
        extra = {"truncate_prompt_tokens": most, "return_token_ids": True}
        return client.completions.create(model="story", prompt=prompt, extra_body=extra, **fields)

    answer = ask([5, 6, 7, 8], 2, max_tokens=1)
    assert answer.choices[0].prompt_token_ids == [7, 8]
    assert answer.usage.prompt_tokens == 2
    assert "lost 2 tokens" in answer.warnings[0]
    whole = ask([5, 6, 7, 8], 4, max_tokens=1)
    assert not hasattr(whole, "warnings")
    assert ask([5] * 300, -1, max_tokens=56).usage.prompt_tokens == 200
    assert ask([5] * 300, -1, max_tokens=None).usage.prompt_tokens == 255
    two = ask([[5, 6, 7], [8]], 1, max_tokens=1)
    assert [choice.prompt_token_ids for choice in two.choices] == [[7], [8]]
    extra = {"truncate_prompt_tokens": 3}
    chatted = client.chat.completions.create(
        model="story", messages=HELLO, max_tokens=1, extra_body={**extra, "return_token_ids": True}
    )
    assert len(chatted.prompt_token_ids) == chatted.usage.prompt_tokens == 3
    vectors = client.embeddings.create(model="story", input=[[5, 6, 7, 8], [9]], extra_body=extra)
    assert vectors.usage.prompt_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answer_can_begin_with_the_message_that_it_goes_on_with(client, stream):
    begun = [*HELLO, {"role": "assistant", "content": "Once, "}]
    goes_on = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    plain = chat_text(client, stream, messages=begun, extra_body={**goes_on, "echo": False})[0]
    assert chat_text(client, stream, messages=begun, extra_body=goes_on)[0] == "Once, " + plain
    assert chat_text(client, stream, extra_body={"echo": True})[0] == plain  # the last message is a user's


def test_tokens_by_their_ids(client, server):
    ids = server.tokenizer.encode(STORY, add_special_tokens=False).ids[:2]
    named = [f"token_id:{id_}" for id_ in ids]
    extra = {"return_tokens_as_token_ids": True}
    options = {"model": "story", "max_tokens": 2, "extra_body": extra}
    chatted = {**options, "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**chatted).choices[0].logprobs.content
    assert [token.token for token in whole] == named
    assert all(top.token.startswith("token_id:") for token in whole for top in token.top_logprobs)
    chunks = client.chat.completions.create(**chatted, stream=True)
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for told in logprobs if told for token in told.content] == whole
    plain = client.completions.create(**options, prompt=[7], logprobs=1, echo=True).choices[0].logprobs
    assert plain.tokens == ["token_id:7", *named]
    assert all(name.startswith("token_id:") for top in plain.top_logprobs[1:] for name in top)


def test_prompt_logprobs_come_with_a_stream_too(client):
    extra = {"prompt_logprobs": 1}
    chatted = {"model": "story", "messages": HELLO, "max_tokens": 3, "seed": 1, "extra_body": extra}
    whole = client.chat.completions.create(**chatted)
    chunks = list(client.chat.completions.create(**chatted, stream=True, n=2))
    (told,) = [chunk.prompt_logprobs for chunk in chunks if getattr(chunk, "prompt_logprobs", None)]
    assert told == whole.prompt_logprobs
    assert told[0] is None
    plain = {"model": "story", "prompt": "hello", "max_tokens": 3, "seed": 1, "extra_body": extra}
    streamed = [chunk.choices[0] for chunk in client.completions.create(**plain, stream=True)]
    (told,) = [choice.prompt_logprobs for choice in streamed if getattr(choice, "prompt_logprobs", None)]
    assert told == client.completions.create(**plain).choices[0].prompt_logprobs


def open_count(server) -> int:
    async def count() -> int:
        return server.services.gateway.open_count

    return server.call(count())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat_text, plain_text])
def test_an_answer_ends_at_its_time_limit_with_what_there_is(client, server, ask, stream):
    """The engine stands still after three tokens."""
    shown, reason = ask(client, stream, model="held", extra_body={"timeout": 0.5})
    assert shown == plain_text(client, False, max_tokens=3)[0]
    assert reason == "length"
    assert open_count(server) == 0


def test_a_time_limit_that_ended_an_answer_is_told(client):
    answer = client.chat.completions.create(
        model="held", messages=HELLO, n=2, seed=1, extra_body={"timeout": 0.5}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.warnings == ["The answer was ended by the time limit of this request."]


@pytest.mark.parametrize(
    ("field", "code"), [("timeout", "request_timeout"), ("first_token_timeout", "first_token_timeout")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_without_a_token_it_is_an_error(client, server, field, code, stream):
    fields = {"model": "stuck", "messages": HELLO, "stream": stream, "extra_body": {field: 0.2}}
    with pytest.raises(openai.APIError) as refused:
        list(client.chat.completions.create(**fields))
    assert refused.value.code == code
    if not stream:
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"]
    assert open_count(server) == 0


def test_a_first_token_in_time_leaves_the_answer_its_time(client):
    extra = {"first_token_timeout": 60, "timeout": 60}
    assert chat_text(client, True, extra_body=extra) == (STORY, "stop")


def test_the_servers_own_limit_holds_where_a_request_asks_for_more(tmp_path):
    tokenizer = byte_level()
    files = write_text_files(tmp_path / "stuck", tokenizer, CHATML)
    write_model(files, **drawn_ids(tokenizer), hold_at=0)
    with serving(tmp_path / "data", first_token_timeout=0.2) as server:
        server.load(tmp_path / "stuck", "stuck")
        for extra in ({}, {"first_token_timeout": 80_000.0}):
            began = time.monotonic()
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "x", **extra}, timeout=PATIENCE
            )
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "first_token_timeout"
            assert time.monotonic() - began >= 0.2
