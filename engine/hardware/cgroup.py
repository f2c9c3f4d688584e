"""Memory and CPU limits of this process's cgroup, versions 2 and 1.

Any ancestor may set a limit, so all of them are read and the tightest limit applies.
"""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_left(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes left below the tightest memory limit; None without a limit. Droppable page cache
    counts as free.
    """
    answers = [_left_in(group, *names) for group, names in _memory_groups(root, membership)]
    return min((left for left in answers if left is not None), default=None)


def cpu_quota(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the CPU quota in CPUs (version 2 only); None without a quota."""
    answers = []
    for group in _ancestors(root, _path_of(membership, "")):
        quota, _, period = (_read(group / "cpu.max") or "max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            answers.append(int(quota) / int(period))
    return min(answers, default=None)


def _memory_groups(root: Path, membership: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield groups to read, each with its names of the limit, the usage and the droppable-cache statistic."""
    for group in _ancestors(root, _path_of(membership, "")):
        yield group, ("memory.max", "memory.current", "inactive_file")
    for group in _ancestors(root / "memory", _path_of(membership, "memory")):
        yield group, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left_in(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read(group / limit_name), _read(group / usage_name)
    if not (limit and usage and limit.isdecimal() and usage.isdecimal()):  # "max" means no limit
        return None
    lines = (_read(group / "memory.stat") or "").splitlines()
    stats = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    return max(0, int(limit) - int(usage) + int(stats.get(cache_name, 0)))


def _path_of(membership: Path, controller: str) -> str:
    """Return this process's group in the hierarchy of a version 1 controller, or of version 2 for ''."""
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _ancestors(root: Path, path: str) -> Iterator[Path]:
    """Yield the group, its parents, and the root, which is the group itself inside a container."""
    group = root / path.strip("/")
    while group != root and group.is_relative_to(root):
        yield group
        group = group.parent
    yield root


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
