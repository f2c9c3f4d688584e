"""Prompts and answers: kept for keys that allow it, for nobody else; replayed; erased. The engine is fake."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.inspect.detail import as_curl, as_python, find_logged
from llmbox.app.inspect.replay import ReplayResult, replay
from llmbox.app.security.keys import ApiKey, KeySpec
from llmbox.app.security.security import LOCAL, Identity, Session
from support.cli_box import until
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import Server, serving
from support.tokenizers_zoo import byte_level, drawn_ids, write_text_files

openai = DeferredModule("openai")

QUIET, SAID = "zanzibar-quiet", "mombasa-said"


class Place:
    """A server with an empty log and two keys, of which one lets content be kept."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.services = server.services
        server.call(self.services.request_log.purge(time.time() + 1))
        for key in self.services.security.keys.list():
            self.services.security.keys.remove(key.name)
        self.quiet_key, self.quiet = self._client("quiet")
        self.key, self.client = self._client("open", log_content=True)

    def _client(self, name: str, **fields: Any) -> "tuple[ApiKey, openai.OpenAI]":
        key, secret = self.services.security.keys.add(KeySpec(name=name, **fields))
        return key, self.server.client().with_options(api_key=secret)

    def ask(self, client: "openai.OpenAI", text: str, **options: Any) -> Any:
        extra = {"ignore_eos": True, **options.pop("extra_body", {})}
        values = {"model": "tiny", "max_tokens": 12, "extra_body": extra, **options}
        return client.chat.completions.create(messages=[{"role": "user", "content": text}], **values)

    def find(self, request_id: str, reader: Identity = LOCAL) -> Any:
        self.services.request_log.flush()
        return self.server.call(find_logged(self.services, reader, request_id))

    def replay(self, request_id: str, reader: Identity = LOCAL) -> ReplayResult:
        self.services.request_log.flush()
        return self.server.call(replay(self.services, reader, request_id))

    def bytes(self) -> bytes:
        self.services.request_log.flush()
        return b"".join(file.read_bytes() for file in self.folder.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, tokenizer = tmp_path_factory.mktemp("content"), byte_level()
    model = write_model(write_text_files(folder / "model", tokenizer), **drawn_ids(tokenizer))
    with serving(folder / "data") as server:
        server.load(model, "tiny")
        yield server


@pytest.fixture
def place(server: Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    services = server.services
    monkeypatch.setattr(services, "settings", services.settings)
    monkeypatch.setattr(services.request_log, "content_bytes", services.request_log.content_bytes)
    return Place(server, services.paths.data_dir)


def test_without_the_key_s_word_nothing_reaches_the_disk(place: Place):
    for stream in (False, True):
        answer = place.ask(place.quiet, QUIET, stream=stream)
        if stream:
            list(answer)
    place.ask(place.server.client(), QUIET)
    said = place.ask(place.client, SAID)
    with pytest.raises(openai.BadRequestError):
        place.ask(place.quiet, QUIET, max_tokens=10**6)
    everything = place.bytes()
    assert SAID.encode() in everything
    assert QUIET.encode() not in everything
    record, content, foreign = place.find(said.id)
    assert (record.content, content is None, foreign) == ("kept", False, False)


def test_what_is_kept_is_what_was_sent_rendered_and_said(place: Place):
    answer = place.ask(place.client, SAID, n=2, seed=7)
    _, content, _ = place.find(answer.id)
    assert content.owner == place.key.id
    assert content.outputs == [choice.message.content for choice in answer.choices]
    (prompt,) = content.prompts
    assert SAID in prompt
    assert prompt != SAID, "the template's own tokens belong to the rendered prompt"
    assert f'"content":"{SAID}"' in content.body.replace(": ", ":")
    assert content.is_whole


def test_a_stop_string_and_a_client_that_leaves(place: Place):
    whole = place.ask(place.client, SAID, seed=3, max_tokens=40).choices[0].message.content
    stopped = place.ask(place.client, SAID, seed=3, max_tokens=40, stop=[whole[5:8]])
    _, content, _ = place.find(stopped.id)
    assert content.outputs == [stopped.choices[0].message.content]
    stream = place.ask(place.client, SAID, seed=3, max_tokens=3000, stream=True)
    first = begun(stream)
    stream.close()
    assert until_logged(place, first.id).http_status == 499
    _, content, _ = place.find(first.id)
    assert content.outputs[0] != ""


def test_a_message_of_anthropics_api_is_kept_and_replayed_as_a_chat(place: Place):
    body = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": SAID}]}
    told = place.client.post("/messages", body=body, cast_to=object)
    record, content, _ = place.find(told["id"])
    assert record.endpoint == "/v1/messages"
    assert SAID in content.body
    assert content.outputs == [told["content"][0]["text"]]
    again = place.replay(told["id"])
    assert (again.equal, again.outputs) == (True, content.outputs)


def test_texts_of_embeddings_are_kept_and_vectors_are_not_replayed(place: Place):
    answer = place.client.embeddings.with_raw_response.create(model="tiny", input=[SAID, "other"])
    id_ = "embd-" + answer.headers["x-request-id"].removeprefix("req_")
    record, content, _ = place.find(id_)
    assert (record.endpoint, record.content, content.prompts) == ("/v1/embeddings", "kept", [SAID, "other"])
    with pytest.raises(ApiError) as refused:
        place.replay(id_)
    assert refused.value.code == "not_replayable"
    curl, python = as_curl("http://box", record, content), as_python("http://box", record, content)
    assert "http://box/v1/embeddings" in curl
    assert "client.embeddings.create(" in python
    assert SAID in python
    assert "seed" not in curl + python


def begun(stream: Any) -> Any:
    """Read until some of the answer is there."""
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if len(text) > 5:
            return chunk
    raise AssertionError("the stream ended")


def until_logged(place: Place, request_id: str) -> Any:
    for _ in range(3000):
        try:
            return place.find(request_id)[0]
        except ApiError:
            time.sleep(0.02)
    raise AssertionError("no row")


def test_no_other_key_reads_it(place: Place):
    answer = place.ask(place.client, SAID)
    admin = place.services.security.keys.add(KeySpec(name="admin", scopes=("admin",)))[0]
    window = Session("", None, 0.0, 0.0, 0.0)
    readers = {
        "owner": Identity("key", place.key),
        "local": LOCAL,
        "link": Identity("session", None, window),
        "own window": Identity("session", None, replace(window, key_digest=place.key.digest)),
        "admin": Identity("key", admin),
        "admin's window": Identity("session", None, replace(window, key_digest=admin.digest)),
        "revoked": Identity("session", None, replace(window, key_digest="gone")),
    }
    seen = {name: place.find(answer.id, reader)[1] is not None for name, reader in readers.items()}
    assert [name for name, sees in seen.items() if sees] == ["owner", "local", "link", "own window"]
    assert place.find(answer.id, readers["admin"])[2], "it must say that there is something"
    with pytest.raises(ApiError, match="belong to another API key"):
        place.replay(answer.id, readers["admin"])


def test_a_key_of_the_same_name_is_not_the_same_key(place: Place):
    answer = place.ask(place.client, SAID)
    place.services.security.revoke("open")
    again = place.services.security.keys.add(KeySpec(name="open", scopes=("admin",), log_content=True))[0]
    assert place.find(answer.id, Identity("key", again))[1:] == (None, True)


def test_callers_without_a_key_are_kept_where_the_setting_says_so(place: Place):
    settings = place.services.settings
    place.services.settings = replace(settings, requests=replace(settings.requests, log_content=True))
    answer = place.ask(place.server.client(), SAID)
    place.ask(place.quiet, QUIET)
    assert place.find(answer.id)[1].owner == ""
    assert QUIET.encode() not in place.bytes(), "a key's word counts more than the setting"


def test_purge_leaves_no_byte(place: Place):
    place.ask(place.client, SAID)
    assert SAID.encode() in place.bytes()
    assert place.server.call(place.services.request_log.purge(time.time() + 1)) == 1
    assert SAID.encode() not in place.bytes()


def test_a_locked_log_never_delays_an_answer(place: Place):
    place.ask(place.client, "warm")
    place.services.request_log.flush()
    other = sqlite3.connect(place.services.request_log.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    def answers_at_once() -> bool:
        started = time.monotonic()
        for _ in range(3):
            place.ask(place.client, SAID)
        return time.monotonic() - started < 4.0

    until(answers_at_once)  # one wait for the lock takes 5 s, a busy machine as long
    other.execute("ROLLBACK")


def test_a_replay_gives_the_same_tokens(place: Place):
    answers = [
        place.ask(place.client, SAID),
        place.ask(place.client, SAID, n=3, temperature=1.5),
        place.ask(place.client, SAID, stop=["zzz"], extra_body={"request_id": "mine"}),
        place.client.completions.create(model="tiny", prompt=[SAID, "b"], max_tokens=5),
    ]
    stream = list(place.ask(place.client, SAID, stream=True, stream_options={"include_usage": True}))
    for request_id in [*(answer.id for answer in answers), stream[0].id]:
        replayed = place.replay(request_id)
        assert replayed.equal is True, replayed.verdict
        assert replayed.outputs == replayed.kept
        assert replayed.id != request_id
        again = place.find(replayed.id)[0]
        assert (again.client, again.content) == ("replay", "")


def test_a_replay_says_where_the_answer_differs(place: Place):
    answer = place.ask(place.client, SAID)
    place.find(answer.id)
    with sqlite3.connect(place.services.request_log.path) as connection:
        connection.execute("UPDATE request SET seed = seed + 1, fingerprint = 'fp_old'")
    replayed = place.replay(answer.id)
    assert replayed.equal is False
    assert "settings have changed" in replayed.verdict
    place_of = replayed.first_difference
    then, now = replayed.kept[0], replayed.outputs[0]
    assert place_of is not None
    assert then[:place_of] == now[:place_of]
    assert then[place_of : place_of + 1] != now[place_of : place_of + 1]


def test_an_answer_that_was_cut_off_is_compared_up_to_there(place: Place):
    stream = place.ask(place.client, SAID, max_tokens=3000, stream=True)
    first = begun(stream)
    stream.close()
    record = until_logged(place, first.id)
    replayed = place.replay(first.id)
    assert replayed.equal is True, replayed.verdict
    assert replayed.output_tokens == record.output_tokens
    assert "before it ended" in replayed.verdict


def test_without_content_there_is_no_replay(place: Place):
    answer = place.ask(place.quiet, QUIET)
    with pytest.raises(ApiError, match="The key quiet does not let") as refused:
        place.replay(answer.id)
    assert refused.value.status == 409
    with pytest.raises(ApiError) as unknown:
        place.replay("chatcmpl-nobody")
    assert unknown.value.status == 404


def test_content_that_was_cut_is_shown_but_not_replayed(place: Place):
    place.services.request_log.content_bytes = 1000
    answer = place.ask(place.client, SAID * 200)
    _, content, _ = place.find(answer.id)
    assert len(content.prompts[0]) == 1000
    with pytest.raises(ApiError, match=r"Of the request 1,000 of \S+ bytes were kept"):
        place.replay(answer.id)


def test_two_replays_at_once(place: Place):
    answer = place.ask(place.client, SAID)
    place.find(answer.id)

    async def both() -> Any:
        return await asyncio.gather(*(replay(place.services, LOCAL, answer.id) for _ in range(2)))

    assert [each.equal for each in place.server.call(both())] == [True, True]


def test_an_answer_that_was_cut_for_the_log_is_compared_as_far_as_it_is_kept(place: Place):
    place.services.request_log.content_bytes = 1000
    answer = place.ask(place.client, SAID, max_tokens=1500)
    assert place.find(answer.id)[1].was_cut("output")
    replayed = place.replay(answer.id)
    assert replayed.equal is True
    with sqlite3.connect(place.services.request_log.path) as connection:
        connection.execute("UPDATE request SET output_hash = substr(output_hash, 1, 9) || 'another'")
    replayed = place.replay(answer.id)
    assert (replayed.equal, replayed.first_difference) == (False, None)
