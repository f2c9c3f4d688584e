"""Disk of the virtual machine: real files, whose writes and reads take virtual time and fail by number."""

import atexit
import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool

from llmbox.app.store.database import open_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from .machine import Machine

FOREVER = 1e9
WRITE_FAULTS = ("full", "io", "torn", "lie", "slow_write", "hang_write")
READ_FAULTS = ("unreadable", "flip", "slow_read", "hang_read")
LOG_FAULTS = ("full", "locked", "damaged", "slow")


class Disk:
    """Faults by the number of the write or read, over all processes."""

    def __init__(self, machine: "Machine", write_faults: dict[int, str], read_faults: dict[int, str]) -> None:
        self._machine = machine
        self._write_faults, self._read_faults = write_faults, read_faults
        self.writes = self.reads = 0

    def end_faults(self) -> None:
        self._write_faults.clear()
        self._read_faults.clear()

    @property
    def os(self) -> Any:
        """The module `os` as `engine/kv_store/block_file.py` uses it."""
        return _DiskModule(self)

    def writev(self, handle: int, buffers: Sequence[Any]) -> int:
        """Write, and fail or lie: `torn` keeps half and says all, `lie` changes a byte."""
        self.writes += 1
        fault = self._write_faults.get(self.writes, "")
        self._wait(fault)
        if fault in {"full", "io"}:
            code = errno.ENOSPC if fault == "full" else errno.EIO
            raise OSError(code, os.strerror(code))
        data = b"".join(bytes(each) for each in buffers)
        kept = bytearray(data[: len(data) // 2] if fault == "torn" else data)
        if fault == "lie":
            kept[self._machine.chance.randrange(len(kept))] ^= 4
        os.write(handle, kept)
        return len(data)

    def readv(self, handle: int, buffers: Sequence[Any]) -> int:
        self.reads += 1
        fault = self._read_faults.get(self.reads, "")
        self._wait(fault)
        if fault == "unreadable":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = os.readv(handle, buffers)
        if fault == "flip":
            last = memoryview(buffers[-1])
            last[self._machine.chance.randrange(len(last))] ^= 1
        return count

    def _wait(self, fault: str) -> None:
        machine, strand = self._machine, self._machine.strand
        if strand is None:
            return
        seconds = machine.latency()
        if fault.startswith("slow"):
            seconds = 0.2 + 4 * machine.chance.random()
        elif fault.startswith("hang"):
            seconds = FOREVER
        strand.suspend(seconds, alone=True)


class _DiskModule:
    """`os`, with this disk's `writev` and `readv`."""

    def __init__(self, disk: Disk) -> None:
        self.writev, self.readv = disk.writev, disk.readv

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def failing_inserts(
    machine: "Machine", faults: dict[int, str], insert: "Callable[..., Any]"
) -> "Callable[..., Any]":
    """Return an insert into the request log, with faults by the number of the call."""
    calls = 0

    def add(engine: Any, entries: Any) -> Any:
        nonlocal calls
        calls += 1
        fault = faults.get(calls, "")
        if machine.strand is not None:
            machine.strand.suspend(30.0 if fault == "slow" else machine.latency(), alone=True)
        reason = {
            "full": "database or disk is full",
            "locked": "database is locked",
            "damaged": "database disk image is malformed",
        }.get(fault)
        if reason is not None:
            raise OperationalError("INSERT", {}, Exception(reason))
        return insert(engine, entries)

    return add


# ---------------------------------------------------------------------- the files of all runs


@cache
def folder() -> Path:
    """Folder of all runs, in memory if possible; the key of output hashes is always the same."""
    memory = Path("/dev/shm")
    found = Path(tempfile.mkdtemp(prefix="llmbox-simulate-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    (found / "output-hash.key").write_bytes(bytes(32))
    return found


@cache
def _empty_database() -> Engine:
    return open_database(folder() / "empty.db")


@cache
def empty_log() -> Path:
    """Request log without a row, of the newest schema. The first call migrates it."""
    path = Path(str(_empty_database().url.database))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    return path


def create_engine(url: str, **options: Any) -> Engine:
    """Create an engine that keeps its file open, and shares compiled statements with those of other runs:
    to open and to compile is most of the cost.
    """
    engine = sqlalchemy.create_engine(url, **options | {"poolclass": StaticPool})
    shared = _empty_database()
    engine.dialect, engine._compiled_cache = shared.dialect, shared._compiled_cache
    return engine


def upgrade(engine: Engine) -> None:
    """Give a new file the newest schema, as all migrations together would."""
    shutil.copyfile(empty_log(), str(engine.url.database))


class LoggedRequest(NamedTuple):
    """Columns of a row of the request log."""

    id: str
    http_status: int
    output_tokens: int
    resumes: int


def read_rows(path: Path) -> list[LoggedRequest]:
    """Read all rows of a request log."""
    with closing(sqlite3.connect(path)) as connection:
        columns = ", ".join(LoggedRequest._fields)
        return [LoggedRequest(*row) for row in connection.execute(f"SELECT {columns} FROM request")]
