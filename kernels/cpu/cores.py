"""Which cores the kernels' threads live on."""

import os
from pathlib import Path

_SYS_CPU = Path("/sys/devices/system/cpu")


def pick_cores(threads: int) -> list[int]:
    """At most `threads` logical CPUs this process may use, each on a core of its own as long as there are."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not usable:
        return list(range(threads))
    first: dict[str, int] = {}
    for cpu in usable:
        first.setdefault(_core_of(cpu), cpu)
    apart = list(first.values())
    return (apart + [cpu for cpu in usable if cpu not in apart])[:threads]


def _core_of(cpu: int) -> str:
    """What names the physical core; the CPU itself where the system does not tell."""
    try:
        return (_SYS_CPU / f"cpu{cpu}" / "topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
