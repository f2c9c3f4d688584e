"""What a process of the engine still finishes when it ends.

Python does it at its own end (`atexit`). A process that has others to wait for calls `finish` before, and one
whose libraries do not survive Python's end calls `end`.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

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


def end(code: int) -> NoReturn:
    """Of the process, without Python's own end: threads of gloo and NCCL do not survive that, and NCCL would
    wait there for graphs that nobody gives up any more.
    """
    finish()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
