"""Chunks joined from parts that are encoded once are those that would be encoded whole."""

from types import SimpleNamespace

import pytest

from llmbox.app.gateway.generation import Delta, TokenUsage
from llmbox.app.http.openai.chat_stream import _ChunkEncoder
from llmbox.app.http.openai.completions import _Writer
from llmbox.app.http.openai.request_types import ChatCompletionRequest, CompletionRequest
from llmbox.app.http.openai.response_types import ChatDelta
from llmbox.app.http.server.sse import encode

HEADER = {"id": "cmpl-1", "created": 7, "model": 'm"\u2028', "system_fingerprint": "fp_1"}
TEXTS = ["a", ' "quoted" \\ ', "\n\u2028\x00é", "🙂", "data: x\n\n"]


def opened():
    return SimpleNamespace(sequences=[None, None], usage=TokenUsage(prompt_tokens=3), created=7)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_chat(usage, text):
    call = SimpleNamespace(
        header=lambda _: HEADER,
        usage_at_end=usage,
        usage_in_chunks=False,
        wants_logprobs=False,
        parsing=SimpleNamespace(needed=False),
        body=ChatCompletionRequest(model="m", messages=[]),
    )
    chunks = _ChunkEncoder(opened(), call)
    assert chunks.has_text_alone
    before, after = chunks.glue[1]
    assert before + encode(text) + after == chunks._full(Delta(1, text, [5]), ChatDelta(content=text))


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_completions(usage, text):
    call = SimpleNamespace(
        header=lambda _: HEADER,
        usage_at_end=usage,
        usage_in_chunks=False,
        body=CompletionRequest(model="m", prompt="p"),
        generation=SimpleNamespace(id="cmpl-1", n=2, prompts=[[1, 2, 3]], model=SimpleNamespace(text=None)),
    )
    writer = _Writer(opened(), call)
    first = Delta(1, "first", [4])
    writer.glue_next(first)
    assert not writer.glue, "the first chunk may have an echo"
    writer.event(first, last=False)
    writer.glue_next(first)
    before, after = writer.glue[1]
    assert before + encode(text) + after == writer.event(Delta(1, text, [5]), last=False)


def test_completions_with_more_than_text_are_encoded_whole():
    call = SimpleNamespace(
        header=lambda _: HEADER,
        usage_at_end=False,
        usage_in_chunks=False,
        body=CompletionRequest(model="m", prompt="p", return_token_ids=True),
        generation=SimpleNamespace(id="cmpl-1", n=2, prompts=[[1]], model=SimpleNamespace(text=None)),
    )
    writer = _Writer(opened(), call)
    first = Delta(0, "first", [4])
    writer.event(first, last=False)
    writer.glue_next(first)
    assert not writer.glue
