"""Fork server: an engine process that has imported everything and forks engine processes for the daemon.

A forked process shares the memory of the imports, and starts in milliseconds. It is a child of the daemon,
as if the daemon had started it. `ipc.spawn.ForkServer` is the daemon's side.
"""

import gc
import os
import socket
from pathlib import Path

from setproctitle import setproctitle

from ..hardware.proc import fork_sibling
from ..ipc.engine_channel import DaemonGone
from ..ipc.spawn import PID_BYTES


def num_threads() -> int:
    """Return the number of threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def serve_forks(control: socket.socket) -> socket.socket:
    """Fork a process for each request until the daemon is gone, which raises DaemonGone.

    Returns in the forked processes, with the socket to the daemon. A request is a byte with two file
    descriptors, that socket and standard output; the answer is a pid, or an error number below zero.
    """
    if (threads := num_threads()) > 1:
        raise RuntimeError(f"a process with {threads} threads cannot be forked")
    setproctitle("llmbox: engine fork server")
    gc.collect()
    gc.freeze()  # a collection writes to the objects that it visits, and their pages are shared
    while True:
        request, files, _, _ = socket.recv_fds(control, 1, 2)
        if not request:
            raise DaemonGone
        channel, log = files
        try:
            pid = fork_sibling()
        except OSError as error:
            pid = -(error.errno or 1)
        if not pid:
            control.close()
            os.setsid()
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)
            return socket.socket(fileno=channel)
        os.close(channel)
        os.close(log)
        control.sendall(pid.to_bytes(PID_BYTES, "little", signed=True))
