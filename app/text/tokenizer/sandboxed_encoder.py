"""Encoder in a separate process that can be killed, for a tokenizer that is not known to be safe.

Texts of one model wait for each other. A process that the CPU alarm, the memory limit or a crash ended takes
the request along that it worked on, and no other: the next one gets a new process.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from llmbox.engine.errors import ModelError

from ...errors import ApiError
from ...sandbox.pool import workers_busy
from ...util.threads import FairSlots
from .text_encoder import SpecialTokenMarkers, TokenizeError

T = TypeVar("T")
CPU_SECONDS: Final = 5.0
"""CPU time for one request, and for loading the file."""
SILENCE_SECONDS: Final = 60.0
"""Time for all texts of a request, on a machine where others have every core."""
WAIT_SECONDS: Final = 30.0
"""Time to wait for the requests before."""
MEMORY_BYTES: Final = 1 << 30
MEMORY_PER_BYTE: Final = 16
"""Bytes of memory for each byte of tokenizer.json."""


class SandboxedEncoder:
    """Encoder in a separate process. It blocks: call it in `run`. Raises TokenizeError."""

    def __init__(self, file: Path) -> None:
        """Start the process. Raises ModelError where the tokenizer cannot be loaded within the limits."""
        self._file = file
        self._is_own = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._turn = FairSlots(1, most_per_caller=1)
        self._deadline = time.monotonic() + SILENCE_SECONDS
        self._closed = False
        try:
            self._ask({"text": "", "special": False})
        except TokenizeError as error:
            self.close()
            raise ModelError(f"tokenizer.json is not a tokenizer: {error}") from None

    @classmethod
    def of_source(cls, source: bytes) -> "SandboxedEncoder":
        """Start the process with a temporary file, which is removed at the end."""
        with tempfile.NamedTemporaryFile(prefix="llmbox-tokenizer-", delete=False) as file:
            file.write(source)
        try:
            encoder = cls(Path(file.name))
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
        encoder._is_own = True
        return encoder

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self._ask({"text": text, "special": special})

    def encode_marked(self, rendered: str, markers: SpecialTokenMarkers) -> list[int]:
        return self._ask({"text": rendered, "markers": [markers.start, markers.end, markers.tail]})

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        start, *ids = self._ask({"text": first, "pair": second})
        return ids, start or None

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work` on `size` characters in this encoder's own thread; callers take turns. Raises ApiError
        503 where it does not begin in time.
        """

        def begin() -> T:
            self._deadline = time.monotonic() + SILENCE_SECONDS
            return work()

        try:
            async with asyncio.timeout(WAIT_SECONDS):
                caller = await self._turn.acquire(size)
        except TimeoutError:
            raise workers_busy() from None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, begin)
        finally:
            self._turn.release(caller)

    def close(self) -> None:
        """End the process, and with it what it works on."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._kill()
        if self._is_own:
            self._file.unlink(missing_ok=True)

    def _ask(self, job: dict[str, Any]) -> list[int]:
        if self._closed:
            raise TokenizeError("the model is no longer loaded")
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            data = json.dumps(job).encode()
            process.stdin.write(len(data).to_bytes(4, "little") + data)
            process.stdin.flush()
            answer = _read(process.stdout, self._deadline)
        except OSError as error:
            self._kill()
            raise TokenizeError(_cause_of_death(process.wait(), error)) from None
        if "error" in answer:
            raise TokenizeError(answer["error"])
        ids: list[int] = answer["ids"]
        return ids

    def _start(self) -> subprocess.Popen[bytes]:
        memory = MEMORY_BYTES + MEMORY_PER_BYTE * self._file.stat().st_size
        passed = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-P", "-m", "llmbox.app.sandbox.tokenizer_worker",
             str(self._file), str(CPU_SECONDS), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=passed | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            _read(process.stdout, self._deadline)  # "ready"
        except OSError as error:
            process.kill()
            raise TokenizeError(_cause_of_death(process.wait(), error)) from None
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                _close(pipe)


def as_api_error(error: TokenizeError, param: str | None = None) -> ApiError:
    return ApiError(
        400,
        f"The model's tokenizer could not read this text: {error}. Shorten or change it.",
        code="tokenizer_error",
        param=param,
    )


def _read(stdout: IO[bytes], deadline: float) -> Any:
    size = int.from_bytes(_read_exactly(stdout, 4, deadline), "little")
    return json.loads(_read_exactly(stdout, size, deadline))


def _read_exactly(stdout: IO[bytes], size: int, deadline: float) -> bytes:
    """Read `size` bytes. Raises OSError where the process ended or is silent."""
    pieces: list[bytes] = []
    waiting = (
        select.poll()
    )  # `select.select` takes no descriptor above 1023, and the daemon may have thousands
    waiting.register(stdout, select.POLLIN)
    while size:
        if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        piece = os.read(stdout.fileno(), size)
        if not piece:
            raise BrokenPipeError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _cause_of_death(status: int, error: OSError) -> str:
    if status == -signal.SIGPROF or isinstance(error, TimeoutError):
        return f"it takes more than {CPU_SECONDS:g} s of CPU time"
    if status == -signal.SIGABRT:
        return "it takes too much memory"
    return "its process ended"


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except OSError:  # bytes that were not written yet
        return
