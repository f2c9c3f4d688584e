"""Stand-ins for a file that are none: FIFOs, sockets, devices, folders. A guard against hanging."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PATIENCE: Final = 60.0


def make_odd(path: Path, kind: str) -> None:
    """Put something of this kind at `path`, in place of what is there."""
    path.unlink(missing_ok=True)
    match kind:
        case "a FIFO":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")
        case "a socket":
            here = Path.cwd()
            with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
                server.bind(path.name)  # a long path is no address
            assert Path.cwd() == here


KINDS: Final = ("a FIFO", "a directory", "a device", "a socket")


@contextlib.contextmanager
def no_hanging() -> Iterator[None]:
    """Raises TimeoutError inside the block where it takes too long. Only in the main thread."""

    def give_up(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
