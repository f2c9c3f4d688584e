"""Worker protocol: frames, limits, and the loop over jobs. Imports nothing of llmbox.

Frames on stdin and stdout: 4 bytes of length (little-endian), then JSON.
in:  {...}, one job
out: "ready" once, then an object for each, with "error" where there is no answer

Bytes may follow an object, as many as its `attached` says.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from setproctitle import setproctitle

CPU_SECONDS = 1.0
Answer = Callable[[dict[str, Any]], dict[str, Any]]
ATTACHED = "attached"


def limit_process(memory: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (limit, limit))


def read_frame(stream: BinaryIO) -> Any | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    value = json.loads(stream.read(int.from_bytes(head, "little")))
    if isinstance(value, dict) and ATTACHED in value:
        value[ATTACHED] = stream.read(value[ATTACHED])
    return value


def to_frame(value: Any) -> bytes:
    """Return the frame of a value, whose `attached` are bytes, if it has some."""
    attached = b""
    if isinstance(value, dict) and ATTACHED in value:
        attached = value[ATTACHED]
        value = value | {ATTACHED: len(attached)}
    data = json.dumps(value).encode()
    return len(data).to_bytes(4, "little") + data + attached


def write_frame(stream: BinaryIO, value: Any) -> None:
    stream.write(to_frame(value))
    stream.flush()


def serve(
    stdin: BinaryIO,
    stdout: BinaryIO,
    answer: Answer,
    arm: Callable[[float], Any],
    cpu_seconds: float = CPU_SECONDS,
) -> None:
    """Answer jobs until stdin ends. `arm(seconds)` starts the CPU alarm of one job, whose default action ends
    the process; 0 stops it.
    """
    write_frame(stdout, "ready")
    while (message := read_frame(stdin)) is not None:
        arm(cpu_seconds)
        reply = answer(message)
        arm(0)
        write_frame(stdout, reply)


def run_worker(
    title: str, make_answer: Callable[[], Answer], memory: int, *, cpu_seconds: float = CPU_SECONDS
) -> None:
    """Set the limits and serve jobs. `make_answer` works under the limits too. `memory`: bytes that the
    process may have.
    """
    setproctitle(f"llmbox: {title}")
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit_process(memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a foreground daemon is the daemon's to handle
    arm = partial(signal.setitimer, signal.ITIMER_PROF)
    serve(sys.stdin.buffer, stdout, make_answer(), arm, cpu_seconds)
