"""Choice of the cores that the kernels' threads are pinned to."""

import os
from pathlib import Path

_SYS_CPU = Path("/sys/devices/system/cpu")


def pick_cores(threads: int) -> list[int]:
    """Return at most `threads` logical CPUs of this process, on distinct physical cores first."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not usable:
        return list(range(threads))
    first: dict[str, int] = {}
    for cpu in usable:
        first.setdefault(_core_of(cpu), cpu)
    apart = list(first.values())
    return (apart + [cpu for cpu in usable if cpu not in apart])[:threads]


def _core_of(cpu: int) -> str:
    """Return an identifier of the physical core, or the CPU itself if the system does not report it."""
    try:
        return (_SYS_CPU / f"cpu{cpu}" / "topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
