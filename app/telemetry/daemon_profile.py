"""Processor time of the daemon's threads, and of the event loop by activity, measured on request."""

import sys
import threading
import time
from collections import Counter, defaultdict
from types import FrameType
from typing import Final

from msgspec import Struct

_INTERVAL_S: Final = 0.01
_LONGEST_S: Final = 600.0
"""Seconds after which sampling ends by itself: the caller may have died."""
_JOIN_S: Final = 1.0
_SAMPLER: Final = "profile-sampler"
_PLACES: Final = (
    ("/selectors.py", ""),
    ("/app/text/", "detokenizer and text"),
    ("/app/http/server/sse.py", "SSE"),
    ("/engine/ipc/", "messages"),
    ("/app/store/", "request log"),
    ("/app/telemetry/", "telemetry"),
    ("/app/gateway/", "gateway"),
    ("/app/http/", "HTTP"),
    ("/h11/", "HTTP"),
    ("/uvicorn/", "HTTP"),
    ("/litestar/", "HTTP"),
)
"""Files of a stack, searched from its innermost frame, and the names under which a sample counts; without a
name the loop sleeps."""


class DaemonTimes(Struct, kw_only=True):
    """Seconds of processor time since `DaemonProfiler.start`."""

    threads: dict[str, float]
    """By thread; `event loop` is the one that serves requests."""
    loop: dict[str, float]
    """Time of the event loop by activity, from samples of its stack."""


class DaemonProfiler:
    """Profile of the daemon, one at a time. Start it in the thread of the event loop."""

    def __init__(self) -> None:
        self._loop = 0
        self._before: dict[int, float] = {}
        self._samples: Counter[str] = Counter()
        self._end = threading.Event()
        self._sampler: threading.Thread | None = None

    def start(self) -> None:
        self.stop()
        self._loop = threading.get_ident()
        self._before = {ident: seconds for ident, _, seconds in self._read_threads()}
        self._samples, self._end = Counter(), threading.Event()
        self._sampler = threading.Thread(
            target=self._sample, args=(self._end, self._samples), name=_SAMPLER, daemon=True
        )
        self._sampler.start()

    def stop(self) -> DaemonTimes:
        sampler, self._sampler = self._sampler, None
        self._end.set()
        if sampler is not None:
            sampler.join(_JOIN_S)
        threads: dict[str, float] = defaultdict(float)
        if sampler is None:
            return DaemonTimes(threads={}, loop={})
        for ident, name, seconds in self._read_threads():
            if (spent := seconds - self._before.get(ident, 0.0)) > 0 and name != _SAMPLER:
                threads[name] += spent
        samples = sum(self._samples.values())
        each = threads["event loop"] / samples if samples else 0.0
        return DaemonTimes(
            threads=dict(threads), loop={name: count * each for name, count in self._samples.most_common()}
        )

    def _read_threads(self) -> list[tuple[int, str, float]]:
        """Read (identifier, name, seconds of processor time) of each thread that lives."""
        found = []
        for thread in threading.enumerate():
            if thread.ident is None:
                continue
            try:
                seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # it has just ended
                continue
            name = (
                "event loop" if thread.ident == self._loop else thread.name.rstrip("0123456789").rstrip("_-")
            )
            found.append((thread.ident, name, seconds))
        return found

    def _sample(self, end: threading.Event, samples: "Counter[str]") -> None:
        until = time.monotonic() + _LONGEST_S
        while not end.wait(_INTERVAL_S) and time.monotonic() < until:
            name = name_of_stack(sys._current_frames().get(self._loop))  # noqa: SLF001 - no other way to see a stack
            if name:
                samples[name] += 1


def name_of_stack(frame: FrameType | None) -> str:
    """Return what a stack is busy with; empty if it sleeps."""
    while frame is not None:
        file = frame.f_code.co_filename
        for place, name in _PLACES:
            if place in file:
                return name
        frame = frame.f_back
    return "other"
