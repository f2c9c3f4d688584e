"""Disk of the virtual machine: real files, whose writes and reads take virtual time and fail by number."""

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import OperationalError

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
