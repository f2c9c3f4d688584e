import sqlite3
import subprocess
import sys
import time
from types import SimpleNamespace

from llmbox.app.store import RecordFilter, RequestLog, RequestRecord, Retention, trimming, writer
from llmbox.app.store.database import set_aside


def record(number: int, **changes) -> RequestRecord:
    values = dict(id=f"req-{number}", created=1000.0 + number, model="m", endpoint="chat", http_status=200)
    return RequestRecord(**values | changes)


async def test_rows_come_back_newest_first_and_whole(log):
    rows = [record(i, seed=2**63 - 1, ttft_s=0.5, finish_reasons="stop") for i in range(3)]
    for row in rows:
        log.write(row)
    log.flush()
    assert [row for _, row in await log.query(RecordFilter())] == rows[::-1]
    assert await log.get("req-1") == rows[1]
    assert await log.get("nobody") is None


async def test_a_search_finds_what_was_written_a_moment_before(log, monkeypatch):
    monkeypatch.setattr(writer, "_CATCH_UP_S", 60.0)
    for i in range(50):
        log.write(record(i))
        assert (await log.query(RecordFilter(limit=1)))[0][1].id == f"req-{i}"


def test_sqlalchemy_waits_until_somebody_reads_or_the_start_is_over(tmp_path):
    """Importing it keeps the interpreter from the first model's tokenizer and the first answer."""
    code = (
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from llmbox.app.store import RecordFilter, RequestLog, writer\n"
        "writer._OPEN_AFTER_S = writer._OPENS_WITHIN_S = 3600.0\n"
        "log = RequestLog(Path(sys.argv[1]))\n"
        "log.start()\n"
        "time.sleep(0.3)\n"
        "print('sqlalchemy' in sys.modules)\n"
        "print(asyncio.run(log.query(RecordFilter())), 'sqlalchemy' in sys.modules)\n"
        "log.close()\n"
    )
    told = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "r.db")], capture_output=True, text=True, check=True
    )
    assert told.stdout.split("\n") == ["False", "[] True", ""]


def test_only_the_writer_imports_sqlalchemy(tmp_path):
    """Two threads that import it at once may each find half of its modules."""
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from llmbox.app.store import RecordFilter, RequestLog, writer\n"
        "writer._OPENS_WITHIN_S = 0.1\n"
        "RequestLog._open = lambda self: None\n"
        "log = RequestLog(Path(sys.argv[1]))\n"
        "log.start()\n"
        "try:\n"
        "    asyncio.run(log.query(RecordFilter()))\n"
        "except writer.StoreError:\n"
        "    print('sqlalchemy' in sys.modules)\n"
    )
    told = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "r.db")], capture_output=True, text=True, check=True
    )
    assert told.stdout == "False\n"


async def test_filters_and_keyset_pages(log):
    for i in range(10):
        log.write(
            record(i, model="ab"[i % 2], http_status=200 if i < 8 else 429, error_code="" if i < 8 else "q")
        )
    log.flush()
    assert {row.model for _, row in await log.query(RecordFilter(model="a"))} == {"a"}
    assert len(await log.query(RecordFilter(status=429))) == 2
    assert len(await log.query(RecordFilter(errors_only=True))) == 2
    assert len(await log.query(RecordFilter(since=1005.0))) == 5
    first = await log.query(RecordFilter(limit=4))
    second = await log.query(RecordFilter(limit=4, before_seq=first[-1][0]))
    assert [row.id for _, row in first + second] == [f"req-{i}" for i in range(9, 1, -1)]


async def test_purge_erases_the_bytes(log):
    log.write(record(1, client="very-secret-client-name"))
    log.flush()
    assert await log.purge(before=5000.0) == 1
    left = b"".join(p.read_bytes() for p in log.path.parent.iterdir())
    assert b"very-secret-client-name" not in left


def test_rows_survive_a_restart(tmp_path):
    for i in range(2):
        log = RequestLog(tmp_path / "requests.db")
        log.start()
        log.write(record(i))
        log.close(60)
    assert sqlite3.connect(tmp_path / "requests.db").execute("SELECT count(*) FROM request").fetchone() == (
        2,
    )


def test_a_full_queue_drops_and_counts_without_blocking(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.writer._QUEUE_LIMIT", 10)
    log = RequestLog(tmp_path / "requests.db")
    for i in range(25):
        log.write(record(i))
    assert log.dropped == 15
    log.start()
    log.close()


def test_a_locked_file_drops_rows_then_recovers(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.database._BUSY_MS", 50)
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    log.flush()
    other = sqlite3.connect(log.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    log.write(record(1))
    log.flush()
    assert log.dropped == 1
    other.execute("ROLLBACK")
    log.write(record(2))
    log.close()
    assert other.execute("SELECT id FROM request").fetchall() == [("req-2",)]


def test_a_damaged_file_is_moved_aside(tmp_path):
    path = tmp_path / "requests.db"
    path.write_bytes(b"this is not a database" * 100)
    log = RequestLog(path)
    log.start()
    log.write(record(1))
    log.close()
    assert log.dropped == 0
    assert len(list(tmp_path.glob("requests.db.damaged-*"))) == 1


def test_files_damaged_within_a_second_are_all_kept(tmp_path, monkeypatch):
    """The second one took the name, and so the place, of the first."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.5)
    path = tmp_path / "requests.db"
    for text in (b"first", b"second", b"third"):
        path.write_bytes(text)
        path.with_name("requests.db-wal").write_bytes(text)
        set_aside(path)
    kept = sorted(file for file in tmp_path.iterdir() if not file.name.endswith("-wal"))
    assert [file.read_bytes() for file in kept] == [b"first", b"second", b"third"]
    assert all(file.with_name(f"{file.name}-wal").read_bytes() == file.read_bytes() for file in kept)


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "requests.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        connection.execute("INSERT INTO alembic_version VALUES ('999')")
    log = RequestLog(path)
    log.start()
    log.write(record(1))
    log.close()
    assert log.dropped == 1
    assert [row[0] for row in sqlite3.connect(path).execute("SELECT name FROM sqlite_master")] == [
        "alembic_version"
    ]


def test_the_byte_cap_drops_the_oldest(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.trimming._EVERY_BYTES", 40_000)
    log = RequestLog(tmp_path / "requests.db", Retention(max_bytes=100_000, rows_days=36500))
    log.start()
    for start in range(0, 1500, 100):
        for i in range(start, start + 100):
            log.write(record(i, created=time.time(), params="x" * 200))
        log.flush()
    log.close()
    low, high = sqlite3.connect(log.path).execute("SELECT min(seq), max(seq) FROM request").fetchone()
    assert high == 1500
    assert low > 500
    assert log.path.stat().st_size < 400_000


async def test_times_are_kept_with_their_row_and_go_with_it(log):
    log.write(record(1), None, [b"one", b"two"])
    log.write(record(2))
    log.write(record(3, created=9e9), None, [b"late row"])
    assert await log.get_times("req-1") == [b"one", b"two"]
    assert await log.get_times("req-2") == await log.get_times("nobody") == []
    log.write_times(record(2), [b"followed"])
    log.write_times(record(9), [b"of no row"])
    assert await log.get_times("req-2") == [b"followed"]
    await log.purge(8e9)
    assert await log.get_times("req-1") == await log.get_times("req-2") == []
    assert await log.get_times("req-3") == [b"late row"]
    with sqlite3.connect(log.path) as file:
        assert file.execute("SELECT count(*) FROM sequence_times").fetchone() == (1,)
    assert b"followed" not in log.path.read_bytes()


DAY = 86400.0


class Clocks:
    """The wall clock and the monotonic one, both in seconds."""

    def __init__(self, monkeypatch):
        self.wall, self.running = 1.8e9, 50.0
        monkeypatch.setattr(
            trimming, "time", SimpleNamespace(time=lambda: self.wall, monotonic=lambda: self.running)
        )

    def run(self, seconds):
        self.wall += seconds
        self.running += seconds


def test_ages_are_not_counted_by_a_wall_clock_that_jumped_ahead(monkeypatch):
    clocks = Clocks(monkeypatch)
    clock = trimming.RetentionClock()
    clocks.run(60.0)
    assert clock.read(None) == clocks.wall
    right = clocks.wall
    clocks.wall += 365 * DAY
    for _ in range(23):
        clocks.run(3600.0)
        assert clock.read(None) == (right := right + 3600.0)
    clocks.wall -= 365 * DAY  # somebody sets it right
    assert clock.read(None) == clocks.wall == right


def test_a_wall_clock_that_stays_where_it_jumped_to_is_believed_after_a_day(monkeypatch):
    clocks = Clocks(monkeypatch)
    clock = trimming.RetentionClock()
    clocks.wall += 365 * DAY
    assert clock.read(None) < clocks.wall - 361 * DAY
    clocks.run(DAY - 1.0)
    assert clock.read(None) < clocks.wall
    clocks.wall += 10 * DAY  # again: the day begins anew
    assert clock.read(None) < clocks.wall
    clocks.run(2.0)
    assert clock.read(None) < clocks.wall
    clocks.run(DAY)
    assert clock.read(None) == clocks.wall


def test_a_sleep_over_a_weekend_and_a_jump_back_are_believed_at_once(monkeypatch):
    clocks = Clocks(monkeypatch)
    clock = trimming.RetentionClock()
    for jump in (2.7 * DAY, -400 * DAY):
        clocks.wall += jump
        assert clock.read(None) == clocks.wall


def test_starts_catch_up_by_three_days_each(monkeypatch):
    """A daemon that was off for two weeks and runs for an hour at a time."""
    clocks = Clocks(monkeypatch)
    kept = clocks.wall
    clocks.wall += 14 * DAY
    for days in (3, 6, 9):
        clock = trimming.RetentionClock()
        kept = clock.read(kept)
        assert kept == 1.8e9 + days * DAY
        assert clock.read(kept) == kept
    clocks.wall -= 3 * DAY
    assert trimming.RetentionClock().read(kept) == clocks.wall


def test_a_jump_while_no_daemon_runs_erases_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trimming, "_EVERY_BYTES", 1)
    path = tmp_path / "requests.db"
    for jump in (0.0, 365 * DAY):
        clocks = Clocks(monkeypatch)
        clocks.wall = time.time() + jump
        log = RequestLog(path)
        log.start()
        log.write(record(1 if not jump else 2, created=clocks.wall))
        log.flush()
        log.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM request").fetchone() == (2,)
