"""Stored chat completions through the official client: kept on request, seen by their key alone."""

import pytest

from llmbox.app.security.security import LOCAL, NOBODY, Identity, Session
from support.cli_box import until
from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.stored import SECRET, Place, load_models
from support.tokenizers_zoo import CHATML

openai = DeferredModule("openai")

ANSWERS = {"plain": "one two three", "thinker": "<think>\nhm\n</think>\n\nyes"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("data")) as server:
        load_models(server, tmp_path_factory.mktemp("models"), ANSWERS, CHATML)
        yield server


@pytest.fixture
def place(server):
    return Place(server)


@pytest.fixture
def chats(place):
    return place.client.chat.completions


def ask(chats, text="hello", **fields):
    messages = fields.pop("messages", [{"role": "user", "content": text}])
    return chats.create(**{"model": "plain", "messages": messages, **fields})


def refused(call, status, code, param=None):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert param in {None, caught.value.param}


def test_without_the_word_nothing_is_stored(place, chats):
    for fields in ({}, {"store": False}, {"metadata": {"a": "b"}}):
        answer = ask(chats, SECRET, **fields)
        list(ask(chats, SECRET, stream=True, **fields))
        refused(lambda: chats.retrieve(answer.id), 404, "chat_completion_not_found")  # noqa: B023 - called here
    assert chats.list().data == []
    assert SECRET.encode() not in place.bytes()


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": True}, {"model": "thinker", "n": 2}])
def test_what_comes_back_is_what_was_answered(place, chats, fields):
    answer = ask(chats, SECRET, store=True, metadata={"topic": "x"}, **fields)
    again = chats.retrieve(answer.id)
    assert again.model_dump(exclude={"metadata"}) == answer.model_dump(exclude={"metadata"})
    assert again.metadata == {"topic": "x"}
    assert SECRET.encode() in place.bytes()
    gone = chats.delete(answer.id)
    assert (gone.id, gone.object, gone.deleted) == (answer.id, "chat.completion.deleted", True)
    refused(lambda: chats.retrieve(answer.id), 404, "chat_completion_not_found")
    refused(lambda: chats.delete(answer.id), 404, "chat_completion_not_found")
    assert SECRET.encode() not in place.bytes()


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": True}, {"model": "thinker"}])
def test_a_streamed_one_is_the_same_and_there_once_its_end_was_told(chats, fields):
    whole = ask(chats, store=True, seed=1, **fields)
    for chunk in ask(chats, store=True, seed=1, stream=True, **fields):
        if chunk.choices and chunk.choices[0].finish_reason and len(whole.choices) == 1:
            assert chats.retrieve(chunk.id)
    again = chats.retrieve(chunk.id)
    varying = {"id", "created", "metadata", "usage"}
    assert again.model_dump(exclude=varying) == whole.model_dump(exclude=varying)
    assert again.usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_that_was_cut_off_is_not_stored(place, chats):
    chunks = ask(chats, model="slow", store=True, stream=True, max_tokens=900)
    for chunk in chunks:
        if chunk.choices[0].delta.content:
            break
    chunks.close()
    until(lambda: not place.services.gateway.in_flight())
    refused(lambda: chats.retrieve(chunk.id), 404, "chat_completion_not_found")
    assert chats.list().data == []


def test_lists_are_filtered_ordered_and_paged(place, chats):
    pairs = [{"n": str(n), "odd [key]": "x&y" if n % 2 else "z"} for n in range(5)]
    ids = [ask(chats, store=True, metadata=metadata).id for metadata in pairs]
    thought = ask(chats, model="thinker", store=True).id
    assert [each.id for each in chats.list()] == [*ids, thought]
    assert [each.id for each in chats.list(limit=2)] == [*ids, thought], "pages follow one another"
    assert [each.id for each in chats.list(order="desc", limit=2)] == [*ids, thought][::-1]
    page = chats.list(limit=2)
    assert page.has_more
    assert len(page.data) == 2
    assert [each.id for each in chats.list(after=ids[3])] == [ids[4], thought]
    assert [each.id for each in chats.list(model="thinker")] == [thought]
    assert [each.id for each in chats.list(metadata={"odd [key]": "x&y"})] == [ids[1], ids[3]]
    assert [each.id for each in chats.list(metadata={"odd [key]": "x&y", "n": "3"})] == [ids[3]]
    assert chats.list(metadata={"n": "7"}).data == []
    refused(lambda: chats.list(after="chatcmpl-0"), 404, "chat_completion_not_found", "after")
    for bad in ({"limit": 0}, {"limit": 101}, {"order": "sideways"}):
        refused(lambda: chats.list(**bad), 400, "invalid_value")  # noqa: B023 - called here


def test_metadata_is_replaced(chats):
    answer = ask(chats, store=True, metadata={"a": "1"})
    assert chats.update(answer.id, metadata={"b": "2"}).metadata == {"b": "2"}
    assert chats.retrieve(answer.id).metadata == {"b": "2"}
    assert [each.id for each in chats.list(metadata={"b": "2"})] == [answer.id]
    assert chats.update(answer.id, metadata=None).metadata == {}
    refused(lambda: chats.update("chatcmpl-0", metadata={}), 404, "chat_completion_not_found")
    refused(lambda: chats.update(answer.id, metadata={"k": "v" * 513}), 400, "invalid_value", "metadata")
    refused(lambda: chats.update(answer.id, metadata={"k": 1}), 400, "invalid_type")


def test_the_messages_that_were_answered(chats):
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": parts},
    ]
    answer = ask(chats, messages=messages, store=True)
    told = list(chats.messages.list(answer.id, limit=2))
    assert [message.content for message in told] == ["a", "b", "x", "c\nd"]
    assert [message.id for message in told] == [f"{answer.id}-{n}" for n in range(4)]
    assert [part.text for part in told[3].content_parts] == ["c", "d"]
    assert next(iter(chats.messages.list(answer.id, order="desc", limit=3))).content == "c\nd"
    assert [message.content for message in chats.messages.list(answer.id, after=told[2].id)] == ["c\nd"]


def test_other_keys_and_callers_without_one_find_nothing(place, chats):
    answer = ask(chats, store=True, metadata={"a": "b"})
    _, admin = place.new_key("admin", scopes=("admin",))
    for stranger in (place.other, place.nobody, admin):
        theirs = stranger.chat.completions
        assert theirs.list().data == []
        assert theirs.list(metadata={"a": "b"}).data == []
        for call in (
            lambda: theirs.retrieve(answer.id),  # noqa: B023 - called here
            lambda: theirs.update(answer.id, metadata={}),  # noqa: B023
            lambda: theirs.delete(answer.id),  # noqa: B023
            lambda: list(theirs.messages.list(answer.id)),  # noqa: B023
            lambda: theirs.list(after=answer.id),  # noqa: B023
        ):
            refused(call, 404, "chat_completion_not_found")
    assert chats.retrieve(answer.id).metadata == {"a": "b"}


def test_an_id_that_two_keys_chose_is_two_answers(place, chats):
    mine = ask(chats, "mine", store=True, extra_body={"request_id": "same"})
    theirs = ask(place.other.chat.completions, "theirs", store=True, extra_body={"request_id": "same"})
    assert mine.id == theirs.id
    (message,) = chats.messages.list(mine.id)
    assert message.content == "mine"
    place.other.chat.completions.delete(theirs.id)
    assert chats.retrieve(mine.id).id == mine.id


def test_a_full_queue_is_told(chats, place, monkeypatch):
    monkeypatch.setattr(place.services.request_log._room, "_left", 0)
    assert "could not be stored" in ask(chats, store=True).warnings[0]
    *_, last = ask(chats, store=True, stream=True)
    assert "could not be stored" in last.warnings[0]
    assert chats.list().data == []


def test_whose_a_browser_s_and_the_socket_s_answers_are(place):
    security = place.services.security
    window = Session("", None, 0.0, 0.0, 0.0)
    signed_in = Session("", place.key.digest, 0.0, 0.0, 0.0)
    owners = [
        security.owner_id(each)
        for each in (
            Identity("key", place.key),
            Identity("session", None, signed_in),
            Identity("session", None, window),
            LOCAL,
            NOBODY,
        )
    ]
    assert owners == [place.key.id, place.key.id, "", "", ""]
