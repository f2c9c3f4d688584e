"""Stored answers: found by their owner alone, replaced, listed, expired, erased to the last byte."""

import asyncio
import sqlite3
import threading
import time

import pytest
from sqlalchemy import create_engine, text

from llmbox.app.store import RequestLog, RequestRecord, Retention
from llmbox.app.store.database import open_database, upgrade
from llmbox.app.store.record import StoreError
from llmbox.app.store.stored_answers import StoredAnswer, StoredAnswers, StoredFilter, encode_json

SECRET = "the-secret-of-the-pudding"


def answer(id_: str = "r1", **changes) -> StoredAnswer:
    values = dict(
        kind="response",
        owner="key_1",
        id=id_,
        created=time.time(),
        model="m",
        metadata={"topic": "grüße"},
        input=[{"role": "user", "content": SECRET}],
        answer={"id": id_, "text": "ü"},
    )
    return StoredAnswer(**values | changes)


def bytes_of(folder) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def stored(log):
    return StoredAnswers(log)


async def test_what_is_stored_is_there_for_the_next_question(stored):
    for number in range(50):
        put = answer(f"r{number}")
        assert stored.put(put, 100)
        assert await stored.get("response", "key_1", f"r{number}") == put


async def test_only_its_owner_finds_it(stored):
    stored.put(answer(), 100)
    places = [("response", "key_2", "r1"), ("response", "", "r1"), ("chat", "key_1", "r1")]
    for place in places:
        assert await stored.get(*place) is None
        assert await stored.chain(*place, 10) == []
        assert not await stored.delete(*place)
        assert not await stored.update(*place, {"a": "b"})
    for kind, owner, _ in places:
        assert await stored.find(StoredFilter(kind=kind, owner=owner)) == []
        assert await stored.find(StoredFilter(kind=kind, owner=owner, after="r1")) is None
    assert await stored.get("response", "key_1", "r1") is not None


async def test_the_same_id_replaces_its_own_and_nobody_elses(stored):
    stored.put(answer(model="old"), 100)
    stored.put(answer(owner="key_2", model="foreign"), 100)
    stored.put(answer(model="new"), 100)
    assert (await stored.get("response", "key_1", "r1")).model == "new"
    assert (await stored.get("response", "key_2", "r1")).model == "foreign"
    assert [(total.owner, total.answers) for total in await stored.totals()] == [("key_1", 1), ("key_2", 1)]


async def test_a_chain_is_read_oldest_first_up_to_where_it_breaks(stored):
    for number in range(1, 6):
        stored.put(answer(f"r{number}", previous=f"r{number - 1}" if number > 1 else ""), 100)
    assert [each.id for each in await stored.chain("response", "key_1", "r4", 10)] == ["r1", "r2", "r3", "r4"]
    assert [each.id for each in await stored.chain("response", "key_1", "r4", 2)] == ["r3", "r4"]
    await stored.delete("response", "key_1", "r2")
    broken = await stored.chain("response", "key_1", "r4", 10)
    assert ([each.id for each in broken], broken[0].previous) == (["r3", "r4"], "r2")


async def test_a_chain_that_bites_its_tail_ends(stored):
    stored.put(answer("r1", previous="r2"), 100)
    stored.put(answer("r2", previous="r1"), 100)
    assert len(await stored.chain("response", "key_1", "r1", 7)) == 7


async def test_lists_are_filtered_ordered_and_paged(stored):
    for number in range(6):
        metadata = {"parity": "even" if number % 2 == 0 else "odd", 'it\'s "a" key': str(number)}
        stored.put(answer(f"c{number}", kind="chat", model=f"m{number // 3}", metadata=metadata), 100)

    async def ids(**want):
        found = await stored.find(StoredFilter(kind="chat", owner="key_1", **want))
        return [each.id for each in found]

    assert await ids() == ["c0", "c1", "c2", "c3", "c4", "c5"]
    assert await ids(newest_first=True, limit=2) == ["c5", "c4"]
    assert await ids(newest_first=True, after="c4", limit=2) == ["c3", "c2"]
    assert await ids(after="c3") == ["c4", "c5"]
    assert await ids(model="m1") == ["c3", "c4", "c5"]
    assert await ids(metadata={"parity": "odd"}) == ["c1", "c3", "c5"]
    assert await ids(metadata={"parity": "odd", 'it\'s "a" key': "3"}) == ["c3"]
    assert await ids(metadata={"parity": "x' OR '1'='1"}) == []


async def test_metadata_is_replaced_and_counted(stored):
    stored.put(answer(), 100)
    (before,) = await stored.totals()
    assert await stored.update("response", "key_1", "r1", {"topic": "ü" * 100})
    assert (await stored.get("response", "key_1", "r1")).metadata == {"topic": "ü" * 100}
    (after,) = await stored.totals()
    assert after.size - before.size == 200 - len("grüße".encode())


async def test_items_are_added_and_taken_away_without_a_byte_left(stored, log):
    made = answer("c1", kind="conversation", created=time.time() - 1000, input=[{"id": "a"}])
    stored.put(made, 100)
    assert stored.append("conversation", "key_1", "c1", [{"id": "b", "content": SECRET}, {"id": "c"}], 100)
    assert stored.append("conversation", "key_2", "c1", [{"id": "d"}], 100)
    found = await stored.get("conversation", "key_1", "c1")
    assert [item["id"] for item in found.input] == ["a", "b", "c"]
    assert found.created > made.created + 900  # its time begins anew
    assert SECRET.encode() in bytes_of(log.path.parent)
    assert not await stored.remove_item("conversation", "key_2", "c1", "b")
    assert not await stored.remove_item("conversation", "key_1", "c1", "x")
    assert await stored.remove_item("conversation", "key_1", "c1", "b")
    assert [item["id"] for item in (await stored.get("conversation", "key_1", "c1")).input] == ["a", "c"]
    assert SECRET.encode() not in bytes_of(log.path.parent)
    (total,) = await stored.totals()
    assert (
        total.size
        == len(
            encode_json([{"id": "a"}, {"id": "c"}]) + encode_json(made.metadata) + encode_json(made.answer)
        )
        + 3
    )


async def test_delete_leaves_no_byte(stored, log):
    stored.put(answer(), 100)
    log.flush()
    assert SECRET.encode() in bytes_of(log.path.parent)
    assert await stored.delete("response", "key_1", "r1")
    assert SECRET.encode() not in bytes_of(log.path.parent)
    assert not await stored.delete("response", "key_1", "r1")


@pytest.mark.parametrize(("what", "rows"), [("requests", 0), ("content", 1), ("stored", 1)])
async def test_every_purge_takes_stored_answers_along(stored, log, what, rows):
    log.write(RequestRecord(id="a", created=1.0, model="m", endpoint="chat", http_status=200))
    stored.put(answer(created=1.0), 100)
    stored.put(answer("young", input=[]), 100)
    assert await log.purge(5000.0, what) == 2 - rows
    assert SECRET.encode() not in bytes_of(log.path.parent)
    assert (await log.get("a") is not None) == bool(rows)
    assert await stored.get("response", "key_1", "young") is not None


async def test_what_belonged_to_a_key_goes_with_it(stored, log):
    stored.put(answer("mine", owner="key_1"), 100)
    stored.put(answer("other", owner="key_2", input=[]), 100)
    stored.put(answer("keyless", owner="", input=[]), 100)
    assert await stored.erase_owners_but(frozenset({"key_2"})) == 1
    assert SECRET.encode() not in bytes_of(log.path.parent)
    assert sorted(total.owner for total in await stored.totals()) == ["", "key_2"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Retention(), {"old", "mid", "new", "gone key's"}),
        (Retention(stored_days=7), {"mid", "new", "gone key's"}),
        (Retention(stored_bytes=25_000), {"new", "gone key's"}),
        (Retention(rows_days=0.01, content_days=0.01), {"old", "mid", "new", "gone key's"}),
    ],
)
def test_time_space_and_keys_that_are_gone(tmp_path, monkeypatch, keep, left):
    monkeypatch.setattr("llmbox.app.store.trimming._EVERY_BYTES", 1)
    log = RequestLog(tmp_path / "requests.db", keep)
    log.start()
    stored, now = StoredAnswers(log), time.time()
    big = [{"content": "x" * 10_000}]
    stored.put(answer("old", created=now - 8 * 86_400, input=big), 100)
    stored.put(answer("mid", created=now - 6 * 86_400, input=big), 100)
    stored.put(answer("new", input=big), 100)
    stored.put(answer("gone key's", owner="key_9", input=big), 100)
    log.flush()
    stored.put(answer("last", owner="", input=[]), 100)
    log.flush()
    log.close()
    with sqlite3.connect(log.path) as connection:
        kept = {id_ for (id_,) in connection.execute("SELECT id FROM stored")}
    assert kept - {"last"} == left


def test_what_belongs_to_keys_that_are_gone_is_erased_and_not_stored_again(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.trimming._EVERY_BYTES", 1)
    keys = {"key_1", "key_2"}
    log = RequestLog(tmp_path / "requests.db", Retention(owners=lambda: frozenset(keys)))
    log.start()
    stored = StoredAnswers(log)
    stored.put(answer(owner="key_1"), 100)
    stored.put(answer(owner="key_2"), 100)
    log.flush()
    keys.remove("key_1")
    stored.put(answer("late", owner="key_1"), 100)
    stored.put(answer("keyless", owner=""), 100)
    log.flush()
    log.close()
    with sqlite3.connect(log.path) as connection:
        left = connection.execute("SELECT owner FROM stored ORDER BY owner").fetchall()
    assert left == [("",), ("key_2",)]


def test_stored_answers_do_not_squeeze_rows_out(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.trimming._EVERY_BYTES", 1)
    log = RequestLog(tmp_path / "requests.db", Retention(max_bytes=200_000))
    log.start()
    log.write(RequestRecord(id="a", created=time.time(), model="m", endpoint="chat", http_status=200))
    StoredAnswers(log).put(answer(input=["x" * 1_000_000]), 100)
    log.flush()
    StoredAnswers(log).put(answer("r2"), 100)
    log.close()
    with sqlite3.connect(log.path) as connection:
        assert connection.execute("SELECT id FROM request").fetchall() == [("a",)]
        assert connection.execute("SELECT count(*) FROM stored").fetchone() == (2,)


async def test_a_full_queue_refuses_at_once_and_takes_again(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.writer._QUEUED_CONTENT", 100)
    log = RequestLog(tmp_path / "requests.db")
    stored = StoredAnswers(log)
    assert stored.put(answer("r1"), 60)
    assert not stored.put(answer("r2"), 60)
    log.start()
    log.flush()
    assert stored.put(answer("r3"), 60), "the room was not given back"
    assert await stored.get("response", "key_1", "r2") is None
    assert await stored.get("response", "key_1", "r3") is not None
    log.close()


async def test_a_locked_file_loses_it_counted_without_a_trace(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("llmbox.app.store.database._BUSY_MS", 50)
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    log.flush()
    other = sqlite3.connect(log.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    stored = StoredAnswers(log)
    assert stored.put(answer(), 100)
    with pytest.raises(StoreError, match="locked"):
        await stored.get("response", "key_1", "r1")
    assert log.dropped == 1
    other.execute("ROLLBACK")
    assert await stored.get("response", "key_1", "r1") is None
    assert SECRET not in caplog.text
    log.close()


async def test_who_leaves_while_the_disk_is_busy_does_not_end_the_writer(log):
    """Setting the result of a cancelled future raised in the writer thread, and ended it."""
    hold = threading.Event()
    log.submit(lambda _: hold.wait(60))
    asked = asyncio.create_task(log.purge(0.0))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    hold.set()
    assert await StoredAnswers(log).get("response", "key_1", "r1") is None


async def test_who_leaves_as_the_answer_comes_has_left(log, monkeypatch):
    """A batch that expired at that moment went on for ever."""
    monkeypatch.setattr(log, "submit", lambda call, **_: call(None) or True)  # at once
    for turns in range(9):
        asked = asyncio.create_task(log.ask(lambda _: None))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not asked.cancel():  # it was done before
            assert turns > 2
            return
        with pytest.raises(asyncio.CancelledError):
            await asked
    pytest.fail("it never ended")


def test_the_former_schema_with_rows_becomes_todays(tmp_path):
    path = tmp_path / "a.db"
    engine = create_engine(f"sqlite:///{path}")
    upgrade(engine, "004")
    row = "(id, created, model, endpoint, http_status, key, stream, finish_reasons, error_code,"
    row += " prompt_tokens, cached_tokens, output_tokens, n, resumes, params, client)"
    values = "('r', 1, 'm', 'c', 200, '', 0, '', '', 1, 0, 1, 1, 0, '{}', '')"
    content = "(seq, created, owner, body, body_bytes, prompts, prompt_bytes, outputs, output_bytes)"
    with engine.begin() as connection:
        for statement in (
            f"INSERT INTO request {row} VALUES {values}",
            f"INSERT INTO content {content} VALUES (1, 1, 'key_1', '{{}}', 2, '[]', 0, '[\"said\"]', 4)",
            "INSERT INTO mark (time, kind, model, text) VALUES (1, 'load', 'm', 't')",
            "INSERT INTO telemetry (step, time, series) VALUES (1, 1, '{}')",
        ):
            connection.execute(text(statement))
    engine.dispose()
    with open_database(path).connect() as connection:
        counts = [
            connection.execute(text(f"SELECT count(*) FROM {table}")).scalar()
            for table in ("request", "content", "mark", "telemetry", "stored")
        ]
    assert counts == [1, 1, 1, 1, 0]
