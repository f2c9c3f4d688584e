"""Time limit of a test: what hangs fails where it stands, with the stacks of all threads."""

import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_AGAIN = 10.0
"""Seconds until a test that went on nevertheless, in another task or `finally`, is told again."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail what runs in the block for longer. A limit inside another one stops the outer one's clock."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def fail(*_: Any) -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail(f"it took longer than {seconds:g} s; the stacks of all threads are in its output")

    before = signal.signal(signal.SIGALRM, fail)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, again)
