"""Prompts and answers in the log: kept where a row says so, cut, counted, and erased to the last byte."""

import contextlib
import sqlite3
import threading
import time

import pytest

from llmbox.app.store import RecordFilter, RequestLog, RequestRecord, Retention
from llmbox.app.store.record import ContentBudget, ContentDraft, StoreError, cut_texts, make_content

SECRET = "the-secret-of-the-pudding"


def record(number: int = 1, **changes) -> RequestRecord:
    values = dict(id=f"req-{number}", created=1000.0 + number, model="m", endpoint="chat", http_status=200)
    return RequestRecord(**{**values, "content": "kept"} | changes)


def draft(text: str = SECRET, **changes) -> ContentDraft:
    values = dict(
        owner="key_1",
        body=f'{{"prompt": "{text}"}}',
        prompts=lambda: [f"<s>{text}"],
        outputs=[f"about {text}"],
        output_bytes=len(f"about {text}".encode()),
        size=len(text),
    )
    return ContentDraft(**values | changes)


def bytes_of(folder) -> bytes:
    while True:
        with contextlib.suppress(FileNotFoundError):  # SQLite removes files of its own at any moment
            return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def test_content_comes_back_with_its_row(log):
    log.write(record(), draft("grüße"))
    log.write(record(2, content=""))
    log.flush()
    found, content = await log.get_with_content("req-1")
    assert found == record()
    assert (content.owner, content.prompts, content.outputs) == ("key_1", ["<s>grüße"], ["about grüße"])
    assert content.body == '{"prompt": "grüße"}'
    assert content.is_whole
    assert content.cut_parts() == []
    assert await log.get_with_content("req-2") == (record(2, content=""), None)
    assert await log.get_with_content("req-3") is None


async def test_earlier_contents_are_those_of_the_owner_and_the_model(log):
    log.write(record(1), draft("first"))
    log.write(record(2), draft("other key", owner="key_2"))
    log.write(record(3, model="other"), draft("other model"))
    log.write(record(4, content=""))
    log.write(record(5), draft("second"))
    log.write(record(6), draft("asked about"))
    log.write(record(7), draft("later"))
    log.flush()
    found = await log.earlier_contents(record(6))
    assert [(id_, content.prompts) for id_, content in found] == [
        ("req-5", ["<s>second"]),
        ("req-1", ["<s>first"]),
    ]


def test_what_is_longer_than_the_cap_is_cut_and_told():
    content = make_content(draft("ü" * 100), 51)
    assert (content.prompt_bytes, content.prompts) == (203, ["<s>" + "ü" * 24])
    assert content.body_bytes == 214
    assert not content.is_whole
    assert content.cut_parts() == [("request", 50, 214), ("prompt", 51, 203), ("output", 50, 206)]


def test_a_cap_holds_for_all_texts_together():
    assert cut_texts(["abc", "äö", "xyz"], 6) == ["abc", "ä", ""]
    assert cut_texts(["abc"], 0) == [""]


def test_room_is_given_and_given_back():
    room = ContentBudget(10)
    assert room.take(6)
    assert not room.take(5)
    room.give_back(6)
    assert room.take(10)


async def test_purge_erases_every_byte(log):
    log.write(record(), draft())
    log.flush()
    assert SECRET.encode() in bytes_of(log.path.parent)
    assert await log.purge(before=5000.0) == 1
    assert SECRET.encode() not in bytes_of(log.path.parent)


async def test_purge_waits_for_what_is_queued(log):
    for number in range(200):
        log.write(record(number), draft(f"{SECRET} {number} " * 50))
    assert await log.purge(before=5000.0) == 200
    assert SECRET.encode() not in bytes_of(log.path.parent)


async def test_content_alone_can_be_erased(log):
    log.write(record(), draft())
    log.flush()
    assert await log.purge(5000.0, "content") == 1
    assert SECRET.encode() not in bytes_of(log.path.parent)
    assert await log.get_with_content("req-1") == (record(), None)


async def test_purge_spares_what_is_newer(log):
    log.write(record(1), draft())
    log.write(record(2), draft("kept on"))
    log.flush()
    assert await log.purge(before=1002.0) == 1
    assert [row.id for _, row in await log.query(RecordFilter())] == ["req-2"]
    assert (await log.get_with_content("req-2"))[1].outputs == ["about kept on"]


async def test_purge_does_not_claim_what_a_reader_prevents(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.queries.requests._TRIES", 2)
    monkeypatch.setattr("llmbox.app.store.database._BUSY_MS", 50)
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    log.write(record(), draft())
    log.flush()
    other = sqlite3.connect(log.path, isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM content").fetchone()
    with pytest.raises(StoreError, match=r"copies may be left in requests\.db-wal"):
        await log.purge(before=5000.0)
    other.execute("ROLLBACK")
    await log.purge(before=5000.0)
    assert SECRET.encode() not in bytes_of(log.path.parent)
    log.close()


async def test_purge_takes_damaged_files_along(log):
    aside = log.path.with_name("requests.db.damaged-1000-wal")
    aside.write_text(SECRET)
    young = log.path.with_name("requests.db.damaged-9000")
    young.write_text("younger")
    await log.purge(before=5000.0)
    assert not aside.exists()
    assert young.exists()


def test_content_leaves_before_its_row_and_without_traffic(tmp_path, monkeypatch):
    keep = Retention(rows_days=30, content_days=7)
    log = RequestLog(tmp_path / "requests.db", keep)
    log.start()
    log.write(record(created=time.time() - 8 * 86400), draft())
    log.close()
    assert SECRET.encode() in bytes_of(tmp_path)
    monkeypatch.setattr("llmbox.app.store.trimming._FIRST_S", 0.3)
    log = RequestLog(tmp_path / "requests.db", keep)
    log.start()
    deadline = time.monotonic() + 60
    while SECRET.encode() in bytes_of(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    log.close()
    with sqlite3.connect(log.path) as connection:
        assert connection.execute("SELECT id, content FROM request").fetchall() == [("req-1", "kept")]


def test_over_the_byte_cap_contents_go_before_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.trimming._EVERY_BYTES", 100_000)
    log = RequestLog(tmp_path / "requests.db", Retention(max_bytes=300_000))
    log.start()
    for number in range(30):
        log.write(record(number, created=time.time()), draft(f"{number} " * 5000))
        log.flush()
    log.close()
    with sqlite3.connect(log.path) as connection:
        assert connection.execute("SELECT count(*) FROM request").fetchone() == (30,)
        (kept,) = connection.execute("SELECT count(*) FROM content").fetchone()
    assert 1 <= kept < 10
    assert log.path.stat().st_size < 500_000


async def test_a_queue_full_of_content_takes_rows_still(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.writer._QUEUED_CONTENT", 100)
    log = RequestLog(tmp_path / "requests.db")
    for number in range(3):
        log.write(record(number), draft(size=60))
    log.start()
    log.flush()
    states = [row.content for _, row in await log.query(RecordFilter())]
    assert states == ["dropped", "dropped", "kept"]
    log.write(record(9), draft(size=60))
    log.flush()
    assert (await log.get("req-9")).content == "kept", "the room was not given back"
    log.close()


async def test_text_that_cannot_be_made_costs_the_content_alone(log):
    log.write(record(), draft(prompts=lambda: 1 // 0))
    log.flush()
    assert await log.get_with_content("req-1") == (record(content="dropped"), None)


async def test_a_disk_too_full_for_content_keeps_rows(log):
    log.write(record(1), draft())
    log.flush()
    limit_pages(log, 4)
    log.write(record(2), draft("x" * 200_000))
    log.flush()
    assert (await log.get("req-2")).content == "dropped"
    assert log.dropped == 0
    limit_pages(log, 1000)
    log.write(record(3), draft("x" * 200_000))
    log.flush()
    assert (await log.get("req-3")).content == "kept"


def limit_pages(log, more):
    """What a full disk looks like to SQLite."""
    from sqlalchemy import event

    def cap(connection, _):
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + more}")

    for listener in getattr(log, "listeners", []):
        event.remove(log._engine, "connect", listener)
    log.listeners = [cap]
    event.listen(log._engine, "connect", cap)


async def test_a_locked_file_drops_without_blocking_and_without_a_trace(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("llmbox.app.store.database._BUSY_MS", 50)
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    log.flush()
    other = sqlite3.connect(log.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    busy = threading.Event()

    def hold(_) -> None:
        busy.wait(60)

    assert log.submit(hold)
    for number in range(20):
        log.write(record(number), draft())
    assert log.dropped == 0, "writing met the lock itself"
    busy.set()
    with pytest.raises(StoreError, match="locked"):
        await log.query(RecordFilter())
    with pytest.raises(StoreError, match="locked"):
        await log.purge(5000.0)
    log.flush()
    assert log.dropped == 20
    other.execute("ROLLBACK")
    log.write(record(99), draft())
    log.close()
    assert other.execute("SELECT count(*) FROM content").fetchall() == [(1,)]
    assert SECRET not in caplog.text, "the warning quoted what was dropped"


async def test_a_file_damaged_while_it_is_open_is_replaced(log):
    log.write(record(1), draft())
    log.flush()
    await log.purge(0.0)  # empties the write-ahead log
    size = log.path.stat().st_size
    with log.path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * (size - 100))
    log.write(record(2), draft("after"))
    log.flush()
    assert log.dropped == 0
    assert [row.id for _, row in await log.query(RecordFilter())] == ["req-2"]
    assert len(list(log.path.parent.glob("requests.db.damaged-*"))) >= 1
