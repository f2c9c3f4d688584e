"""Quota of processor time for one process: a control group's, or where none can be made, stops and starts."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PERIOD_US = 100_000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextmanager
def cpu_quota(pid: int, share: float, *, use_cgroup: bool = True) -> Iterator[str]:
    """Let a process have this share of one core. Yields `cgroup` or `signals`: what limits it."""
    group = _make_group(share) if use_cgroup else None
    if group is not None:
        try:
            (group / "cgroup.procs").write_text(str(pid))
            yield "cgroup"
        finally:
            with suppress(OSError):  # it has ended
                (group.parent / "cgroup.procs").write_text(str(pid))
            group.rmdir()
        return
    ended = threading.Event()
    thread = threading.Thread(target=_stop_and_go, args=(pid, share, ended))
    thread.start()
    try:
        yield "signals"
    finally:
        ended.set()
        thread.join()


def _make_group(share: float) -> Path | None:
    name, quota = f"llmbox-test-{os.getpid()}", int(PERIOD_US * share)
    for root, files in (
        (_V1, {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{quota}"}),
        (_V2, {"cpu.max": f"{quota} {PERIOD_US}"}),
    ):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        if _write(group, files):
            return group
        group.rmdir()
    return None


def _write(group: Path, files: dict[str, str]) -> bool:
    try:
        for file, text in files.items():
            with (group / file).open("r+") as stream:  # never makes the file
                stream.write(text)
    except OSError:
        return False
    return True


def _stop_and_go(pid: int, share: float, ended: threading.Event) -> None:
    period = PERIOD_US / 1e6
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            is_over = ended.wait(period * (1 - share))
            os.kill(pid, signal.SIGCONT)
            if is_over or ended.wait(period * share):
                return
