"""The request log's file locked, full, damaged or in the way, under a daemon: serving never stops.

Rows that cannot be written are counted; when the cause is gone rows come again, without a restart.
"""

import json
import os
import resource
import sqlite3
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from support.cli_box import PATIENCE, Box, box, until

__all__ = ["box"]


def ask(box: Box) -> int:
    running = box.running
    assert running is not None
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{running.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def rows(box: Box) -> int:
    return len(box.api("requests?limit=1000")["requests"])


def dropped(box: Box) -> int:
    return int(box.api("stats")["log_rows_dropped"])


def assert_rows_come_again(box: Box) -> None:
    """Also `status` no longer says that they are lost."""
    before = rows(box)

    def more() -> bool:
        ask(box)
        return rows(box) > before

    until(more)
    assert "Requests are not logged" not in box.run("status").out


def in_the_way(path: Path) -> Callable[[], None]:
    path.mkdir()
    return path.rmdir


def no_database(path: Path) -> Callable[[], None]:
    path.write_bytes(b"this is no database at all" * 400)
    return lambda: None


def written_by_a_later_version(path: Path) -> Callable[[], None]:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT NOT NULL)")
        connection.execute("INSERT INTO alembic_version VALUES ('m999_from_the_future')")
    return path.unlink


@pytest.mark.parametrize("harm", [in_the_way, no_database, written_by_a_later_version])
def test_a_file_that_cannot_be_used_at_the_start(box: Box, harm: Callable[[Path], Callable[[], None]]):
    path = box.paths.request_db
    path.parent.mkdir(parents=True)
    mend = harm(path)
    box.serve(box.model())
    assert ask(box) == 2
    assert box.is_ready()
    assert box.run("ps", "-q").out == "tiny\n"
    is_lost = harm is not no_database  # which is moved aside
    for words in (["requests"], ["requests", "-q"], ["requests", "--json"]):
        assert box.run(*words).code == (1 if is_lost else 0)
    assert ("Requests are not logged: " in box.run("status").out) == is_lost
    mend()
    assert_rows_come_again(box)


def test_locked_by_another_process(box: Box, monkeypatch: pytest.MonkeyPatch):
    box.serve(box.model())
    ask(box)
    until(lambda: rows(box) == 1)
    with closing(sqlite3.connect(box.paths.request_db, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(3):
            assert ask(box) == 2
        until(lambda: dropped(box) > 0)
        assert box.is_ready()
        assert box.run("key", "add", "laptop").code == 0
        other.execute("ROLLBACK")
    assert_rows_come_again(box)


def test_damaged_while_it_is_open(box: Box):
    box.serve(box.model())
    ask(box)
    until(lambda: rows(box) == 1)
    path = box.paths.request_db
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
    for _ in range(5):
        assert ask(box) == 2
    assert box.is_ready()
    assert_rows_come_again(box)
    assert box.run("down").code == 0
    box.serve(box.model())
    assert_rows_come_again(box)
    assert box.run("db", "check").code == 0


def test_a_disk_that_is_full(box: Box):
    """A limit on the size of files stands in for it: it can be lifted again from outside."""
    child = box.serve(box.model())
    ask(box)
    until(lambda: rows(box) == 1)
    sizes = [part.stat().st_size for part in box.paths.state_dir.iterdir() if part.is_file()]
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (min(sizes), resource.RLIM_INFINITY))
    for _ in range(3):
        assert ask(box) == 2
    until(lambda: dropped(box) > 0)
    assert box.is_ready()
    assert box.run("stats", "--json").code == 0
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert_rows_come_again(box)
