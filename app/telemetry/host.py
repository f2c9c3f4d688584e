"""Readings of the machine through psutil.

A read blocks for about a millisecond, or as long as a dead network disk: only called through `TimedReader`.
"""

from collections.abc import Mapping
from pathlib import Path
from threading import get_ident

import psutil

from llmbox.engine.hardware.machine import read_memory

from .snapshot import NA, Host, Number, OwnProcess


class HostReader:
    """Host reader. Call `read` from one thread: CPU shares are measured between two calls."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._processes: dict[int, psutil.Process] = {}
        self._cores = psutil.cpu_count() or 1
        self._thread: int | None = None

    def read(self, pids: Mapping[int, str]) -> Host:
        """Read the machine. `pids`: our processes and their roles."""
        self._processes = {pid: process for pid, process in self._processes.items() if pid in pids}
        memory = read_memory()
        disk = psutil.disk_usage(str(self._disk))
        return Host(
            cpu=self._busy(),
            cores=self._cores,
            memory_total=float(memory.total),
            memory_available=float(memory.available),
            disk_total=float(disk.total),
            disk_free=float(disk.free),
            processes=tuple(
                found for pid, role in pids.items() if (found := self._process(pid, role)) is not None
            ),
        )

    def _busy(self) -> Number:
        """CPU share since the last call. psutil keeps its reference per thread, so a thread's first call has
        none.
        """
        share = psutil.cpu_percent(None) / 100
        first, self._thread = self._thread != get_ident(), get_ident()
        return NA if first else share

    def _process(self, pid: int, role: str) -> OwnProcess | None:
        try:
            process = self._processes.get(pid)
            first = process is None
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            with process.oneshot():
                share = process.cpu_percent(None) / 100
                memory = float(process.memory_info().rss)
        except psutil.Error:
            self._processes.pop(pid, None)
            return None
        return OwnProcess(pid=pid, role=role, memory=memory, cpu=NA if first else share)
