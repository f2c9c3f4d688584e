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

from .box import BrokenError, SoakBox
from .traffic import CutError, ask


def kill_engine(box: SoakBox, chance: random.Random) -> str:
    time.sleep(chance.uniform(0.2, 2))
    os.kill(pid := box.engine_pid(), signal.SIGKILL)
    return f"engine {pid} killed"


def kill_all_engines(box: SoakBox, chance: random.Random) -> str:
    """Those of adapters and pictures too, at once."""
    time.sleep(chance.uniform(0.2, 2))
    engines = box.engines()
    for pid in engines.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return f"engines of {', '.join(sorted(engines))} killed"


def swap_models(box: SoakBox, chance: random.Random) -> str:
    """A model that needs the room of others is asked between them, then in their midst."""
    assert box.big is not None
    assert box.traffic is not None
    request, expected = box.big
    box.quiet()
    for _ in range(2):
        if box.answer(request) != expected:
            raise BrokenError("a model that was loaded again gives other tokens")
        for other in chance.sample(box.requests, 4):
            if box.answer(other) != box.expected[other.number]:
                raise BrokenError(f"{other.model} gives other tokens after it was loaded again")
        box.seen["loads of a model beside which not all fit"] += 1
    box.traffic.start()
    refused = sum(ask(box.url, request, stream=bool(times % 2)) is None for times in range(4))
    return f"big loaded between others twice, then asked in their midst, {refused} of 4 refused"


def damage_kv_files(box: SoakBox, chance: random.Random) -> str:
    """Change a byte of many blocks on disk, and have a new engine look for them."""
    files = sorted(box.paths.kv_cache.glob("*/*/*"))
    for file in (chosen := chance.sample(files, len(files) // 2)):
        with contextlib.suppress(OSError), file.open("r+b") as stream:  # it may be evicted meanwhile
            size = file.stat().st_size
            stream.seek(chance.randrange(max(1, size)))
            stream.write(chance.randbytes(1))
    return f"{len(chosen)} of {len(files)} blocks on disk damaged, {kill_engine(box, chance)}"


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
            ask(box.url, chance.choice(box.requests), stream=True, leave_after=chance.randrange(1, 9))
    return "20 streams left at random tokens"


def reload_settings(box: SoakBox, chance: random.Random) -> str:
    """A broken settings file, reloaded: the daemon says so and keeps what it has."""
    kept = box.paths.config_file.read_text()
    box.paths.config_file.write_text("server = [broken\n")
    os.kill(box.daemon_pid(), signal.SIGHUP)
    time.sleep(1)
    box.paths.config_file.write_text(kept)
    os.kill(box.daemon_pid(), signal.SIGHUP)
    return "settings reloaded, broken and mended"


def kill_daemon(box: SoakBox, chance: random.Random) -> str:
    engines, daemon = box.engines().values(), box.daemon_pid()
    with _excused(box):
        os.kill(daemon, signal.SIGKILL)
        box.until(lambda: not any(map(box.is_alive, engines)), "the end of the engines with their daemon")
        box.up()
    return f"daemon {daemon} killed, {len(engines)} engines followed, started again"


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
    (swap_models, "is unloaded"),
    (damage_kv_files, "died: killed by SIGKILL"),
    (storm, ""),
    (kill_all_engines, "died: killed by SIGKILL"),
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
