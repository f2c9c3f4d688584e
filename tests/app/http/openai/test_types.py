import math

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.gateway.generation import TokenEntry
from llmbox.app.http.openai.request_types import ChatCompletionRequest, CompletionRequest, Message
from llmbox.app.http.openai.response_types import CompletionLogprobs
from llmbox.app.http.openai.sampling import LOWEST, append_completion_entry, chat_logprobs, token_label
from llmbox.app.http.openai.unsupported import refuse_unsupported, unknown_fields
from llmbox.engine.ipc.messages import TokenLogprobs

BYTES = [b"a", b"\xe4", b"\xbd", b"b"]


def test_broken_characters_are_written_as_bytes():
    assert token_label("é".encode()) == "é"
    assert token_label(b"\xe4\xbd") == r"\xe4\xbd"


def test_the_chosen_token_is_among_the_alternatives_and_infinity_is_a_number():
    told = CompletionLogprobs()
    logprobs = TokenLogprobs(token_id=3, logprob=-math.inf, rank=9, top=[(1, -0.1), (2, -0.2), (0, -0.3)])
    append_completion_entry(told, logprobs, 3, 7, BYTES, 2)
    append_completion_entry(told, None, 0, 8, BYTES, 2)
    assert told.top_logprobs == [{r"bytes:\xe4": -0.1, r"bytes:\xbd": -0.2, "b": LOWEST}, None]
    assert told.token_logprobs == [LOWEST, None]
    assert told.text_offset == [7, 8]


def test_tokens_can_be_named_by_their_ids():
    told = CompletionLogprobs()
    logprobs = TokenLogprobs(token_id=3, logprob=-0.5, rank=2, top=[(1, -0.1)])
    append_completion_entry(told, logprobs, 3, 0, BYTES, 1, as_ids=True)
    append_completion_entry(told, None, 2, 1, BYTES, 1, as_ids=True)
    assert told.tokens == ["token_id:3", "token_id:2"]
    assert told.top_logprobs == [{"token_id:1": -0.1, "token_id:3": -0.5}, None]
    entry = TokenEntry(0, b"b", logprobs)
    (token,) = chat_logprobs([entry], BYTES, as_ids=True).content
    assert (token.token, token.bytes) == ("token_id:3", list(b"b"))
    assert [(top.token, top.bytes) for top in token.top_logprobs] == [("token_id:1", [0xE4])]


def test_values_that_ask_for_nothing_pass():
    refuse_unsupported(ChatCompletionRequest(messages=[], functions=[], function_call="none"))
    refuse_unsupported(CompletionRequest(prompt="x", suffix="", echo=True))


@pytest.mark.parametrize(
    ("name", "value"), [("modalities", ["audio"]), ("functions", {}), ("function_call", "auto")]
)
def test_lookalikes_do_not(name, value):
    with pytest.raises(ApiError) as caught:
        refuse_unsupported(ChatCompletionRequest(messages=[], **{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("functions", [{}], "'tools'"),
        ("function_call", "auto", "'tool_choice'"),
        ("verbosity", "low", "Leave it"),
    ],
)
def test_a_refusal_says_what_to_send_instead(name, value, instead):
    with pytest.raises(ApiError) as caught:
        refuse_unsupported(ChatCompletionRequest(messages=[], **{name: value}))
    assert instead in caught.value.message


def test_unknown_fields_are_named_with_their_place():
    assert unknown_fields(Message, {"role": "user", "mood": 1}, "messages[].") == [
        "Unknown field 'messages[].mood' was ignored."
    ]
