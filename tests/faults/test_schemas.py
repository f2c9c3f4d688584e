"""A migration of the request log that is killed, or finds the disk full, anywhere: whole or undone."""

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from llmbox.app.store import database
from llmbox.app.store.database import SIDES, open_database, upgrade
from llmbox.app.store.database_file import newest_schema, schema_of

FIRST = "001"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Log of the first release, with rows."""
    path = tmp_path_factory.mktemp("old") / "a.db"
    engine = create_engine(f"sqlite:///{path}")
    upgrade(engine, FIRST)
    with engine.begin() as connection:
        for name in ("r", "s"):
            connection.execute(
                text(
                    "INSERT INTO request (id, created, model, endpoint, http_status, key, stream,"
                    " finish_reasons, error_code, prompt_tokens, cached_tokens, output_tokens, n, resumes,"
                    f" params, client) VALUES ('{name}', 1, 'm', 'chat', 200, '', 0, 'stop', '', 1, 0, 1,"
                    " 1, 0, '{}', '')"
                )
            )
    engine.dispose()
    return path


def copy(path: Path, target: Path) -> None:
    for end in SIDES:
        if (part := path.with_name(path.name + end)).exists():
            shutil.copy(part, target.with_name(target.name + end))


def state(path: Path) -> tuple[str | None, list[str], dict[str, list[str]]]:
    """Schema, rows and columns as a plain SQLite finds them."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {
            each: [row[1] for row in connection.execute(f"PRAGMA table_info({each})")] for each in tables
        }
        return (
            schema_of(connection),
            [row[0] for row in connection.execute("SELECT id FROM request")],
            columns,
        )


def count_statements(monkeypatch, at_each):
    """Call `at_each(number)` before each statement of the connections that are opened from now on."""
    connect, count = database._on_connect, 0

    def note(_):
        nonlocal count
        count += 1
        at_each(count)

    def trace(connection, record):
        connect(connection, record)
        connection.set_trace_callback(note)

    monkeypatch.setattr(database, "_on_connect", trace)


def test_killed_before_any_statement_it_is_old_or_new_and_opens(tmp_path, old, monkeypatch):
    """What a killed process leaves is what its files have at that moment."""
    path = tmp_path / "a.db"
    copy(old, path)
    left: list[Path] = []

    def keep(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        copy(path, folder / "a.db")
        left.append(folder / "a.db")

    before = state(path)
    count_statements(monkeypatch, keep)
    open_database(path).dispose()
    monkeypatch.undo()
    after = state(path)
    assert (after[0], after[1]) == (newest_schema(), before[1])
    assert len(left) > 30, "the migration has fewer statements than it had"
    found = [state(each) for each in left]
    assert all(each in (before, after) for each in found)
    assert before in found
    for each in left[:: max(1, len(left) // 12)]:
        open_database(each).dispose()
        assert state(each) == after


KILLED = """
import os, signal, sys
from pathlib import Path
from llmbox.app.store import database
connect, count = database._on_connect, 0
def note(_):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
def trace(connection, record):
    connect(connection, record)
    connection.set_trace_callback(note)
database._on_connect = trace
database.open_database(Path(sys.argv[1]))
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [12, 30])
def test_a_killed_process_leaves_the_old_schema(tmp_path, old, number):
    path = tmp_path / "a.db"
    copy(old, path)
    before = state(path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, path, str(number)], env=os.environ, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert state(path) == before
    open_database(path).dispose()
    assert state(path)[:2] == (newest_schema(), before[1])


@pytest.fixture
def file_limit():
    """Set how large a file may become: what a full disk refuses, this refuses too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_any_write_leaves_the_old_schema(tmp_path, old, file_limit):
    """A page at a time: each limit fails at another write."""
    path, page = tmp_path / "a.db", 4096
    before, failed, size = state(old), [], old.stat().st_size
    for limit in range(size, size + 200 * page, page):
        for end in SIDES:
            path.with_name(path.name + end).unlink(missing_ok=True)
        copy(old, path)
        file_limit(limit)
        try:
            open_database(path).dispose()
        except OperationalError as error:
            file_limit(resource.RLIM_INFINITY)
            failed.append(str(error))
            assert state(path) == before, limit
        else:
            file_limit(resource.RLIM_INFINITY)
            break
    else:
        raise AssertionError("it never had room enough")
    assert len(failed) > 5
    assert all("full" in each or "disk I/O" in each for each in failed)
    assert state(path)[:2] == (newest_schema(), before[1])
