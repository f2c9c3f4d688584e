"""Stand-ins for a file that are none: FIFOs, sockets, devices, folders. A guard against hanging."""

import contextlib
import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from support.time_limit import time_limit

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


def no_hanging() -> AbstractContextManager[None]:
    """Fail what takes too long in the block."""
    return time_limit(PATIENCE)
