"""Rank 0 waits until every worker has said what it is to say, and no longer once one of them cannot."""

import logging
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import EngineError
from ..process_state import read_state
from .link import Link, RankLost

STOPPED_SECONDS: Final = 5.0
"""Of a worker that somebody stopped (SIGSTOP) while others wait for it."""
_TICK: Final = 1.0
_END_SECONDS: Final = 2.0

log = logging.getLogger("llmbox.engine")


class Refused(EngineError):  # noqa: N818 - named for what happened
    """A worker could not load its part, for a reason that it told."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Worker:
    rank: int
    process: "subprocess.Popen[bytes]"
    link: Link


class RollCall:
    def __init__(self, workers: Sequence[Worker], wanted: str) -> None:
        """`wanted`: the kind of frame that each of them sends once."""
        self._workers = workers
        self._wanted = wanted
        self._missing = {worker.link.fileno(): worker for worker in workers}
        self._answers: dict[int, dict[str, Any]] = {}
        self._poll = select.poll()
        for fd in self._missing:
            self._poll.register(fd, select.POLLIN)

    def hear(self, seconds: float = 0.0) -> None:
        """Whoever speaks within that time. Raises Refused, or RankLost for one that is gone."""
        for fd, _ in self._poll.poll(seconds * 1000):
            worker = self._missing.pop(fd)
            self._poll.unregister(fd)
            self._answers[worker.rank] = self._answer(worker)

    def all(self) -> list[dict[str, Any]]:
        """What they say, in the order of ranks. Raises as `hear` does, and for one that was stopped."""
        stopped_since: float | None = None
        while self._missing:
            self.hear(_TICK)
            stopped = self._stopped()
            if not stopped:
                stopped_since = None
            elif stopped_since is None:
                stopped_since = time.monotonic()
            elif time.monotonic() - stopped_since >= STOPPED_SECONDS:
                raise RankLost(
                    f"rank {', '.join(map(str, stopped))} was stopped before it was {self._wanted}"
                )
        return [self._answers[worker.rank] for worker in self._workers]

    def _stopped(self) -> list[int]:
        """Ranks of those that are missing."""
        states = {worker.rank: read_state(worker.process.pid) for worker in self._missing.values()}
        return [rank for rank, state in states.items() if state is not None and state.is_stopped]

    def _answer(self, worker: Worker) -> dict[str, Any]:
        try:
            frame = worker.link.receive()
        except RankLost:
            raise RankLost(f"rank {worker.rank} {_end_of(worker.process)}") from None
        if frame.kind == "refused":
            raise Refused(frame.body["code"], f"rank {worker.rank}: {frame.body['message']}")
        assert frame.kind == self._wanted
        return frame.body


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its end while loading"
    if code == -signal.SIGKILL:
        return (
            "was killed while loading, by somebody or, where memory ran out, by the kernel: load with less "
            "--memory, a shorter --ctx or rounded weights (--quant int8)"
        )
    return (
        f"was ended by signal {-code} while loading" if code < 0 else f"ended while loading, with code {code}"
    )
