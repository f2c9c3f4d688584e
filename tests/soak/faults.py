"""What the soak does to a daemon. Each takes the box, does its harm, and returns what was done in words."""

import contextlib
import os
import random
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from .box import SoakBox
from .traffic import CutError, ask


def kill_engine(box: SoakBox, chance: random.Random) -> str:
    time.sleep(chance.uniform(0.2, 2))
    os.kill(pid := box.engine_pid(), signal.SIGKILL)
    return f"engine {pid} killed"


def kill_engine_twice(box: SoakBox, chance: random.Random) -> str:
    first = kill_engine(box, chance)
    box.until(lambda: box.restarted_engine_pid() is not None, "an engine after the kill")
    return f"{first}, then {kill_engine(box, chance)}"


def stop_engine(box: SoakBox, chance: random.Random) -> str:
    """Longer than the watchdog waits: it kills the process, so there may be nobody to wake up."""
    pid = box.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds := chance.choice([3, 15]))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return f"engine {pid} stopped for {seconds} s"


def storm(box: SoakBox, chance: random.Random) -> str:
    """Many connections at once, most of which leave at once."""
    address = _address(box)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
    body = b'{"model": "builtin", "prompt": "storm", "max_tokens": 64, "ignore_eos": true, "stream": true}'
    sent = head % f"{address[0]}:{address[1]}".encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with contextlib.ExitStack() as stack:
        for _ in range(number := chance.randrange(50, 150)):
            connection = stack.enter_context(socket.create_connection(address, timeout=60))
            connection.sendall(sent)
    return f"{number} streams begun and left"


def slow_readers(box: SoakBox, chance: random.Random) -> str:
    """Half a request, or an answer that nobody reads."""
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(socket.create_connection(_address(box), timeout=60))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        time.sleep(chance.uniform(5, 20))
    return "40 connections with half a header"


def rubbish(box: SoakBox, chance: random.Random) -> str:
    for _ in range(number := 60):
        with contextlib.suppress(OSError), socket.create_connection(_address(box), timeout=60) as connection:
            begin = chance.choice([b"", b"GET /", b"POST /v1/completions HTTP/1.1\r\n", b"\x16\x03\x01"])
            connection.sendall(begin + chance.randbytes(chance.randrange(1, 4000)))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    return f"{number} connections of random bytes"


def lock_database(box: SoakBox, chance: random.Random) -> str:
    with contextlib.closing(sqlite3.connect(box.paths.request_db, timeout=60)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds := chance.uniform(5, 20))
        connection.rollback()
    return f"request log locked for {seconds:.0f} s"


def cancels(box: SoakBox, chance: random.Random) -> str:
    for _ in range(20):
        with contextlib.suppress(CutError):  # the traffic's own requests are those that must not be cut
            ask(box.url, chance.randrange(len(box.expected)), stream=True, leave_after=chance.randrange(1, 9))
    return "20 streams left at random tokens"


def reload_settings(box: SoakBox, chance: random.Random) -> str:
    """A broken settings file, reloaded: the daemon says so and keeps what it has."""
    box.paths.config_file.write_text("server = [broken\n")
    os.kill(box.daemon_pid(), signal.SIGHUP)
    time.sleep(1)
    box.paths.config_file.unlink()
    os.kill(box.daemon_pid(), signal.SIGHUP)
    return "settings reloaded, broken and mended"


def kill_daemon(box: SoakBox, chance: random.Random) -> str:
    engine, daemon = box.engine_pid(), box.daemon_pid()
    with _excused(box):
        os.kill(daemon, signal.SIGKILL)
        box.until(lambda: not box.is_alive(engine), "the end of the engine with its daemon")
        box.up()
    return f"daemon {daemon} killed, engine {engine} followed, started again"


@contextlib.contextmanager
def _excused(box: SoakBox) -> Iterator[None]:
    """Answers that the daemon takes with it are no fault, until clients have seen their ends."""
    assert box.traffic is not None
    box.traffic.excused = True
    try:
        yield
    finally:
        box.quiet()
        box.traffic.excused = False


def _address(box: SoakBox) -> tuple[str, int]:
    where = urlsplit(box.url)
    assert where.hostname
    assert where.port
    return where.hostname, where.port


FAULTS: list[tuple[Callable[[SoakBox, random.Random], str], str]] = [
    (kill_engine, "died: killed by SIGKILL"),
    (storm, ""),
    (lock_database, ""),
    (stop_engine, ""),
    (rubbish, ""),
    (kill_daemon, "ended without cleaning up"),
    (cancels, ""),
    (kill_engine_twice, "died: killed by SIGKILL"),
    (reload_settings, "configuration not reloaded"),
    (slow_readers, ""),
]
"""Each with a word that the daemon's log must have afterwards."""
