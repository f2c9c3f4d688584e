"""Entry point of the engine process: `python -P -m llmbox.engine.process.engine_main --fd N`.

The daemon starts it and talks to it through one inherited socket. Protocol: the engine sends `Progress` if
kernels have to be compiled and receives `Start`; it sends `Progress` while loading, then `Ready` or
`LoadFailed`; then `serve` runs. The process ends with its daemon: a closed socket ends it between two steps,
and the kernel kills it when the daemon's thread that started it ends, even during a step. An exception in a
step ends the process: the daemon starts another one and resubmits the open requests.

With `--forks` it is a fork server (`serve_forks`; `ipc.spawn.ForkServer` is the daemon's side): it imports
everything and forks processes that share the memory of the imports. Each is a child of the daemon, for which
the rest holds as if the daemon had started it.
"""

import argparse
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from setproctitle import setproctitle

from ..checkpoint.safetensors import TensorEntry
from ..config import EngineConfig
from ..errors import EngineError
from ..hardware.gpus import name_gpus
from ..hardware.machine import read_machine
from ..hardware.proc import bind_to_parent, exit_process, fork_sibling, log_to_stderr, num_threads
from ..ipc.channel import Channel, DaemonGone, FrameTooLarge
from ..ipc.handover_messages import Prefill, TakenSlots
from ..ipc.messages import (
    AbortRequest,
    AddRequest,
    AskBlocks,
    KeepImages,
    LoadFailed,
    Ping,
    Pong,
    Ready,
    RequestOutput,
    Shutdown,
    Start,
    StepOutputs,
    ToDaemon,
    ToEngine,
    Vocabulary,
)
from ..ipc.profile_messages import AskProfile, AskRows, WeightRows
from ..ipc.spawn import PID_BYTES
from ..light_torch import import_torch_or_restart
from .step_profile import StepProfiler

if TYPE_CHECKING:
    from ..core.engine import Engine

EXIT_OK: Final = 0
EXIT_LOAD_FAILED: Final = 3
EXIT_CRASHED: Final = 70  # EX_SOFTWARE

log = logging.getLogger("llmbox.engine")


Load = Callable[[EngineConfig, Callable[[ToDaemon], None]], "Engine"]


def main(argv: Sequence[str] | None = None, load: Load | None = None) -> int:
    parser = argparse.ArgumentParser(prog="llmbox engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the daemon")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    parser.add_argument("--forks", action="store_true", help="fork an engine for each request on the socket")
    options = parser.parse_args(argv)
    log_to_stderr()
    bind_to_parent(options.parent)
    gc.disable()  # until the imports are done: their objects stay for good
    try:
        if load is None:
            _import_torch()
        os.set_inheritable(options.fd, False)  # not before: torch may have to be imported in a second try
        connection = socket.socket(fileno=options.fd)
        if options.forks:
            connection = serve_forks(connection, prepare_forks if load is None else lambda: True)
            bind_to_parent(options.parent)
        channel = Channel(connection)
        return _run(channel, load or _import_engine(channel))
    except DaemonGone:
        return EXIT_OK
    except Exception:
        log.exception("the engine stops after an error")
        return EXIT_CRASHED


def serve_forks(control: socket.socket, prepare: Callable[[], bool]) -> socket.socket:
    """Fork a process for each request until the daemon is gone, which raises DaemonGone.

    Returns in the forked processes, with the socket to the daemon. A request is a byte with two file
    descriptors, that socket and standard output; the answer is a pid, or an error number below zero.
    `prepare` is called before the first request, and behind each until it returns True.
    """
    is_prepared = prepare()
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
        is_prepared = is_prepared or prepare()


def prepare_forks() -> bool:
    """Do once what every engine on this machine does alike: its imports, the kernels, digests of the code.

    False while there are no kernels to open: the first engine compiles them and says so to the daemon.
    """
    from llmbox.kernels.dispatch import native_built  # noqa: PLC0415 - a fake engine must do without torch

    from ..executor.build import open_kernels  # noqa: PLC0415
    from ..executor.kv_tiers import code_digest  # noqa: PLC0415

    with contextlib.suppress(ImportError):  # without a cache of packed weights it is not needed
        import_module("xxhash")
    read_machine()  # imports psutil
    code_digest()
    if not native_built():
        return False
    open_kernels(lambda _: None)
    return True


def serve(engine: "Engine", channel: Channel) -> None:
    """Run the engine loop (receive messages, step, send outputs) until `Shutdown` or EOF.

    Blocks in the kernel whenever there is nothing to do.
    """
    preparing = True
    reported = (0, 0, 0)
    inbox = Inbox(engine, channel)
    while True:
        has_work = engine.has_work
        if preparing and not has_work:
            preparing = engine.prepare()
        idle = channel.congested or not (has_work or preparing)
        outputs = inbox.receive(block=idle)
        if outputs is None:
            engine.close()
            return
        if engine.has_work and not channel.congested:
            step = engine.step()
            preparing = True
            news = (step.stats.steps, step.stats.running, step.stats.waiting)
            if outputs or step.outputs or step.times or news != reported:  # else it waited for a disk
                send(channel, StepOutputs(outputs=outputs + step.outputs, stats=step.stats, times=step.times))
                reported = news
        elif outputs:
            channel.send(StepOutputs(outputs=outputs, stats=engine.stats(), times=engine.take_times()))


def send(channel: Channel, step: StepOutputs) -> None:
    """Send the outputs of a step: in one message, or one each where log-probabilities of several prompts make
    it too large. One alone has room (`check_request`).
    """
    try:
        channel.send(step)
    except FrameTooLarge:
        channel.send(replace(step, outputs=[]))
        for output in step.outputs:
            channel.send(replace(step, outputs=[output], times={}))


class Inbox:
    """Handles the daemon's messages between two steps."""

    def __init__(self, engine: "Engine", channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._pixels: dict[bytes, bytes] = {}
        """Images of `KeepImages`, by hash."""
        self._profiler: StepProfiler | None = None

    def receive(self, *, block: bool) -> list[RequestOutput] | None:
        """Handle the messages that arrived, and return outputs of requests that end without a step; None
        after `Shutdown`. `block`: wait for a message.
        """
        outputs = []
        for message in self._channel.receive(block=block):
            if isinstance(message, Shutdown):
                return None
            if (output := self._handle(message)) is not None:
                outputs.append(output)
        if self._profiler is not None:
            self._profiler.end_if_late()
        return outputs

    def _handle(self, message: ToEngine) -> RequestOutput | None:
        engine, channel = self._engine, self._channel
        match message:
            case AddRequest():
                return engine.add(self._with_pixels(message))
            case KeepImages():
                self._pixels |= {image.content_hash: image.pixels for image in message.images}
                for digest in message.drop:
                    self._pixels.pop(digest, None)
            case Vocabulary():
                engine.set_vocabulary(message)
            case Prefill():
                return engine.prefill(message)
            case TakenSlots():
                engine.free_slots(message.slots)
            case AbortRequest():
                return engine.abort(message.request_id)
            case Ping():
                channel.send(Pong(nonce=message.nonce, stats=engine.stats()))
            case AskBlocks():
                channel.send(engine.blocks())
            case AskRows():
                channel.send(_read_rows(message))
            case AskProfile():
                profiler = self._profiler = self._profiler or StepProfiler(engine, channel)
                channel.send(profiler.start(message.seconds) if message.seconds else profiler.stop())
            case _:
                raise ValueError(f"{type(message).__name__} out of turn")
        return None

    def _with_pixels(self, request: AddRequest) -> AddRequest:
        if not request.images:
            return request
        images = [
            replace(image, pixels=image.pixels or self._pixels.get(image.content_hash, b""))
            for image in request.images
        ]
        return replace(request, images=images)


def _read_rows(asked: AskRows) -> WeightRows:
    from ..gguf.tensors import read_rows  # noqa: PLC0415 - a fake engine must do without torch

    try:
        place = (asked.dtype, asked.shape, asked.offset, asked.nbytes)
        matrix = TensorEntry(Path(asked.file), asked.tensor, *place)
        return WeightRows(asked=asked, rows=read_rows(matrix, asked.rows))
    except EngineError as error:
        log.warning("%s", error)
        return WeightRows(asked=asked, rows=[])


def _run(channel: Channel, load: Load) -> int:
    gc.freeze()
    gc.enable()
    setproctitle("llmbox: engine (waits for a model)")
    first = _first_message(channel)
    if not isinstance(first, Start):
        return EXIT_OK
    setproctitle(f"llmbox: engine {first.config.name}")
    started = time.monotonic()
    try:
        engine = load(first.config, channel.send)
    except EngineError as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        channel.send(LoadFailed(code=error.code, message=str(error)))
        channel.drain(5.0)
        return EXIT_LOAD_FAILED
    # Objects made by loading live as long as the process: the garbage collector need not visit them.
    gc.freeze()
    log.info("ready after %.1f s", time.monotonic() - started)
    channel.send(Ready(info=engine.info))
    serve(engine, channel)
    channel.drain(1.0)
    return EXIT_OK


def _first_message(channel: Channel) -> ToEngine:
    """Receive the first message, usually `Start`: the daemon sends the next one after `Ready`.

    Raises ValueError for more than one message.
    """
    (message,) = channel.receive(block=True)
    return message


def _import_torch() -> None:
    """Import torch before `Start` arrives; import it in full where the light import fails."""
    name_gpus()
    import_torch_or_restart()


def _import_engine(channel: Channel) -> Load:
    """Import the engine and open the kernels, which may have to be compiled."""
    from ..executor.build import load_engine, open_kernels  # noqa: PLC0415 - a fake engine must do without torch

    open_kernels(channel.send)
    return load_engine


if __name__ == "__main__":
    exit_process(main())
