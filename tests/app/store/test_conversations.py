"""Conversations of the panel: kept beside the request log's limits, erased with their key."""

import time

import pytest

from llmbox.app.store import RequestLog, RequestRecord, Retention
from llmbox.app.store.conversations import ConversationBody, ConversationMessage, Conversations
from llmbox.app.store.record import RecordFilter
from llmbox.app.store.stored_answers import StoredAnswers


@pytest.fixture
def log(tmp_path):
    log = RequestLog(tmp_path / "requests.db", Retention(max_bytes=100_000, rows_days=36500))
    log.start()
    yield log
    log.close()


def body(text: str) -> ConversationBody:
    message = ConversationMessage(id="m", parent="", role="user", content=text)
    return ConversationBody(title="Title", model="tiny", messages=[message], leaf="m")


async def test_long_conversations_push_no_request_out_of_the_log(log, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.trimming._EVERY_BYTES", 1)
    store = Conversations(log)
    for number in range(8):
        await store.put("", f"conversation-{number}", body("ü" * 100_000))
    for number in range(20):
        values = {"model": "m", "endpoint": "chat", "http_status": 200}
        log.write(RequestRecord(id=f"req-{number}", created=time.time(), **values))
        log.flush()
    assert len(await log.query(RecordFilter(limit=100))) == 20
    assert len(await store.list("")) == 8


async def test_those_of_a_revoked_key_are_erased_to_the_last_byte(log, tmp_path):
    store = Conversations(log)
    await store.put("key_1", "conversation-1", body("mombasa"))
    await store.put("", "conversation-2", body("kilifi"))
    await StoredAnswers(log).erase_owners_but(frozenset({"key_2"}))
    assert await store.list("key_1") == []
    assert [each.id for each in await store.list("")] == ["conversation-2"]
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"mombasa" not in files
    assert b"kilifi" in files
