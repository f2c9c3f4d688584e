"""What a process of the engine still finishes when it ends.

Python does it at its own end (`atexit`). A process that ends by `os._exit`, or that has others to wait for,
calls `finish` before.
"""

import atexit
from collections.abc import Callable

_unfinished: list[Callable[[], None]] = []


def before_end(task: Callable[[], None]) -> None:
    """`task` bounds its own time: whoever asked the process to end kills it after a while."""
    if not _unfinished:
        atexit.register(finish)
    _unfinished.append(task)


def finish() -> None:
    """All of it, once, the latest first."""
    while _unfinished:
        _unfinished.pop()()
