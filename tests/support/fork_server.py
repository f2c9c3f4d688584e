"""Processes of `fake_cli.py` without its imports: a server that has imported them forks one for each call.

A forked process has a pid, file descriptors, environment, signals and exit status of its own. It lacks what
an interpreter reads as it starts (`needs_interpreter`): such calls are started as usual.
"""

import atexit
import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llmbox.engine.hardware import proc
from llmbox.engine.ipc import spawn

START_S = 120.0
"""Longest wait for the server to import and to fork, on a machine that others fill."""
_AT_START = ("PYTHON", "LC_", "LANG", "TZ", "LD_", "MALLOC_")
_ENVIRON = {name: value for name, value in os.environ.items() if name.startswith(_AT_START)}
_MESSAGE_BYTES = 1 << 20


def needs_interpreter(environ: Mapping[str, str]) -> bool:
    """Tell whether a variable differs that an interpreter or a library reads only as it starts."""
    return {name: value for name, value in environ.items() if name.startswith(_AT_START)} != _ENVIRON


PIPE_BYTES = 1 << 20
"""Room for what a long-lived daemon logs: a full pipe would stop its event loop."""


class ForkedProcess:
    """A process of the server's, with the methods of `subprocess.Popen` that tests use. Text, in pipes."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], stdin: int) -> None:
        """`stdin`: a file descriptor, which stays open here."""
        self.args = arguments
        self.returncode: int | None = None
        out, err, status = os.pipe(), os.pipe(), os.pipe()
        for written, _ in (out, err):  # a daemon's log is read when it has ended
            fcntl.fcntl(written, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            given = [stdin, out[1], err[1], status[1]]
            call = {"arguments": list(arguments), "environ": dict(environ), "folder": str(Path.cwd())}
            with _lock:
                socket.send_fds(_server(os.getpid()), [json.dumps(call).encode()], given)
        finally:
            for each in (out[1], err[1], status[1]):
                os.close(each)
        self.stdout: TextIO = os.fdopen(out[0], "r")
        self.stderr: TextIO = os.fdopen(err[0], "r")
        self._status: BinaryIO = os.fdopen(status[0], "rb", buffering=0)
        self.pid = int(self._word(START_S))

    def _word(self, seconds: float | None) -> str:
        """Return the next line of the server about this process; empty if none comes in time."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._status, selectors.EVENT_READ)
            if not ready.select(seconds):
                return ""
        line = b""
        while not line.endswith(b"\n"):
            more = self._status.read(1)
            if not more:
                raise RuntimeError("the fork server ended")
            line += more
        return line.decode().strip()

    def poll(self) -> int | None:
        if self.returncode is None and (word := self._word(0.0)):
            self._end(word)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            word = self._word(timeout)
            if not word:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._end(word)
        assert self.returncode is not None
        return self.returncode

    def _end(self, word: str) -> None:
        self.returncode = int(word)
        self._status.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends, and wait."""
        end = None if timeout is None else time.monotonic() + timeout
        texts = ["", ""]

        def read(number: int, stream: TextIO) -> None:
            with contextlib.suppress(ValueError):  # closed by an earlier call
                texts[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        self.stdout.close()
        self.stderr.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_lock = threading.Lock()


@cache
def _server(_pid: int) -> socket.socket:
    """Start the server of this process and return its socket. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **_ENVIRON},
        )
    atexit.register(process.wait, START_S)
    atexit.register(ours.close)
    return ours


class _ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._statuses: dict[int, int] = {}
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._own = (control.fileno(), self._woken, wake)

    def serve(self) -> None:
        """Fork until the other side of the socket is closed."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._control, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is not self._control:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._woken, 4096)
                        self._reap()
                    elif not self._take():
                        return

    def _reap(self) -> None:
        while self._statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            to = self._statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(to, b"%d\n" % os.waitstatus_to_exitcode(status))
            os.close(to)

    def _take(self) -> bool:
        message, given, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 4)
        if not message:
            return False
        pid = os.fork()
        if not pid:
            self._become(json.loads(message), given)
        for each in given[:3]:
            os.close(each)
        self._statuses[pid] = given[3]
        os.write(given[3], b"%d\n" % pid)
        return True

    def _become(self, call: dict[str, Any], given: list[int]) -> None:
        """Turn this fork into the process. Never returns."""
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, each in enumerate(given[:3]):
                os.dup2(each, number)
            for each in (*given, *self._own, *self._statuses.values()):
                os.close(each)
            os.chdir(call["folder"])
            os.environ.clear()
            os.environ.update(call["environ"])
            code = _run(call["arguments"])
        except BaseException:  # noqa: BLE001 - nothing of the server may go on in a fork
            traceback.print_exc()
        finally:
            os._exit(code)


class ForkedDaemon(spawn.ForkedProcess):
    """A program that this process forked, with what `up` uses of `subprocess.Popen`."""

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkingSubprocess:
    """In place of the module `subprocess` where `up` starts a daemon: it forks one, which has the imports."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, program: list[str]) -> None:
        """`program`: how a command of these begins."""
        self._program = program

    def Popen(self, command: list[str], *, stdout: int, cwd: str, **options: Any) -> Any:  # noqa: N802
        length = len(self._program)
        if command[:length] != self._program or proc.num_threads() > 1:
            return subprocess.Popen(command, stdout=stdout, cwd=cwd, **options)

        def become() -> int:
            with Path(os.devnull).open() as nothing:
                for number, file in enumerate((nothing.fileno(), stdout, stdout)):
                    os.dup2(file, number)
            os.close(stdout)
            os.setsid()
            os.chdir(cwd)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return _run(command[length:])

        return ForkedDaemon(proc.fork_child(become, (stdout,)))


def _run(arguments: list[str]) -> int:
    """Run the command as its own interpreter would, to the end of its threads and its exit functions."""
    from support import fake_cli

    fake_cli.starter.subprocess = ForkingSubprocess(fake_cli.COMMAND)
    sys.argv = [fake_cli.__file__, *arguments]
    code = 0
    try:
        fake_cli.run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except Exception:  # noqa: BLE001 - what ends an interpreter with a traceback
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


if __name__ == "__main__":
    from setproctitle import getproctitle

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the suite: the socket's end tells
    from support import fake_cli

    getproctitle()  # finds where titles stand, which it cannot once the environment is another
    fake_cli.import_all()
    _ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
