"""The engine process: `python -P -m llmbox.engine.process --fd N`, started by `client.py`.

It talks through one inherited socket: `Start` comes in, `Progress`… and `Ready` or `LoadFailed` go out, then
the loop of `serve`. It lives exactly as long as its daemon wants it: a closed socket ends it between two
steps, and the kernel kills it when the daemon's thread that started it ends, even in the middle of one.
An exception in a step ends the process: the daemon starts another and hands it the open requests.
"""

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from setproctitle import setproctitle

from .channel import Channel, DaemonGone
from .config import EngineConfig
from .errors import EngineError
from .messages import (
    AbortRequest,
    AddRequest,
    EngineStats,
    LoadFailed,
    ModelInfo,
    Ping,
    Pong,
    Progress,
    Ready,
    RequestOutput,
    Shutdown,
    Start,
    StepOutputs,
    ToEngine,
)

EXIT_OK: Final = 0
EXIT_LOAD_FAILED: Final = 3
EXIT_CRASHED: Final = 70  # EX_SOFTWARE

# Of two processes of ours the kernel should take the engine: the daemon can start it again.
_OOM_SCORE_ADJ: Final = "500"
_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("llmbox.engine")


class Engine(Protocol):
    """What this process drives: `core.Engine`, or a fake one in tests."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, message: AddRequest) -> RequestOutput | None: ...
    def abort(self, request_id: str) -> RequestOutput | None: ...
    def step(self) -> StepOutputs: ...
    def stats(self) -> EngineStats: ...


Load = Callable[[EngineConfig, Callable[[Progress], None]], Engine]


def main(argv: Sequence[str] | None = None, load: Load | None = None) -> int:
    parser = argparse.ArgumentParser(prog="llmbox engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the daemon")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    options = parser.parse_args(argv)
    _log_to_stderr()
    _bind_to_parent(options.parent)
    try:
        return _run(_adopt(options.fd), load or _load_engine)
    except DaemonGone:
        return EXIT_OK
    except Exception:
        log.exception("the engine stops after an error")
        return EXIT_CRASHED


def serve(engine: Engine, channel: Channel) -> None:
    """Read, step, send, until `Shutdown` or EOF. Sleeps in the kernel whenever there is nothing to do."""
    while True:
        outputs: list[RequestOutput] = []
        idle = channel.congested or not engine.has_work
        for message in channel.receive(block=idle):
            if isinstance(message, Shutdown):
                return
            answer = _handle(engine, channel, message)
            if answer is not None:
                outputs.append(answer)
        if engine.has_work and not channel.congested:
            step = engine.step()
            channel.send(StepOutputs(outputs=outputs + step.outputs, stats=step.stats))
        elif outputs:
            channel.send(StepOutputs(outputs=outputs, stats=engine.stats()))


def _handle(engine: Engine, channel: Channel, message: ToEngine) -> RequestOutput | None:
    match message:
        case AddRequest():
            return engine.add(message)
        case AbortRequest():
            return engine.abort(message.request_id)
        case Ping():
            channel.send(Pong(nonce=message.nonce, stats=engine.stats()))
        case _:
            raise ValueError(f"{type(message).__name__} out of turn")
    return None


def _run(channel: Channel, load: Load) -> int:
    first = _first_message(channel)
    if not isinstance(first, Start):
        return EXIT_OK
    setproctitle(f"llmbox: engine {first.config.name}")
    started = time.monotonic()
    try:
        engine = load(first.config, channel.send)
    except EngineError as error:
        log.error("%s", error)  # noqa: TRY400 - the message is the whole story
        channel.send(LoadFailed(code=error.code, message=str(error)))
        channel.drain(5.0)
        return EXIT_LOAD_FAILED
    # What loading left behind lives as long as the process: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    log.info("%s is ready after %.1f s", first.config.name, time.monotonic() - started)
    channel.send(Ready(info=engine.info))
    serve(engine, channel)
    channel.drain(1.0)
    return EXIT_OK


def _first_message(channel: Channel) -> ToEngine:
    """`Start` comes alone: the daemon sends the next message after `Ready`."""
    messages = channel.receive(block=True)
    assert len(messages) == 1
    return messages[0]


def _load_engine(config: EngineConfig, progress: Callable[[Progress], None]) -> Engine:
    from .loader import load_engine  # noqa: PLC0415 - imports torch, and a fake engine must not

    return load_engine(config, progress)


def _adopt(fd: int) -> Channel:
    os.set_inheritable(fd, False)
    return Channel(socket.socket(fileno=fd))


def _bind_to_parent(parent: int) -> None:
    os.umask(0o077)
    # Ctrl-C and systemd's SIGTERM reach the whole group; the daemon drains and tells us when to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ, encoding="ascii")
        except OSError as error:
            log.debug("oom_score_adj stays as it is: %s", error)
    if os.getppid() != parent:  # it died before prctl could watch it
        raise SystemExit(EXIT_OK)


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


if __name__ == "__main__":
    sys.exit(main())
