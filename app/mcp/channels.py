"""Ways to an MCP server that the chat uses: a program on stdin and stdout, or streamable HTTP."""

import asyncio
import contextlib
import http.client
import os
import signal
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from ..hub.http import ConnectionHandler, ConnectionSet
from ..util.threads import in_thread
from .protocol import METHOD_NOT_FOUND, VERSIONS, RpcError, check_message, error_response

END_SECONDS: Final = 2.0
"""Time for a program to end by itself, and again after SIGTERM."""
LONGEST_MESSAGE: Final = 4_000_000
"""Bytes of one message."""
SILENCE_SECONDS: Final = 130.0
"""Seconds without a byte until a connection counts as dead; calls end before."""
_STDERR_LINES: Final = 5
_INHERITED: Final = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR")
"""Environment variables of the daemon that a program inherits. No key or token is among them."""


class ServerProblem(Exception):  # noqa: N818 - reported as ApiError, with the server's name
    """Reason why a server gave no answer."""


class McpChannel(Protocol):
    """Connection to a server. `request` raises ServerProblem, or RpcError for an error object."""

    async def request(self, method: str, params: Mapping[str, Any]) -> Any: ...
    async def notify(self, method: str, params: Mapping[str, Any]) -> None: ...
    async def close(self) -> None: ...


class StdioChannel:
    """Program in a process group of its own, started without a shell."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._problem: ServerProblem | None = None
        """Reason why no answer can come any more."""
        self._said: deque[str] = deque(maxlen=_STDERR_LINES)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "StdioChannel":
        own = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env={**own, **environment},
                cwd=own.get("HOME", "/"),
                limit=LONGEST_MESSAGE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ServerProblem(f"{command[0]} cannot be started: {error}") from None
        return cls(process)

    async def request(self, method: str, params: Mapping[str, Any]) -> Any:
        self._next += 1
        id_ = self._next
        answer = self._waiting[id_] = asyncio.get_running_loop().create_future()
        try:
            await self._write({"jsonrpc": "2.0", "id": id_, "method": method, "params": params})
            return await answer
        except asyncio.CancelledError:
            cancelled = {"method": "notifications/cancelled", "params": {"requestId": id_}}
            with contextlib.suppress(ServerProblem):
                self._send({"jsonrpc": "2.0", **cancelled})  # without waiting: it may read no more
            raise
        finally:
            self._waiting.pop(id_, None)

    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        await self._write({"jsonrpc": "2.0", "method": method, "params": params})

    async def close(self) -> None:
        """End the program: first by the end of its stdin, then by signals to its group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await self._process.wait()
                    break
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, message: Mapping[str, Any]) -> None:
        self._send(message)
        assert self._process.stdin is not None
        try:
            await self._process.stdin.drain()
        except OSError:
            raise await self._ended() from None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._problem is not None:
            raise self._problem
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read(self) -> None:
        """Hand over responses until the program closes stdout; then fail what still waits."""
        assert self._process.stdout is not None
        problem = None
        try:
            while line := await self._process.stdout.readline():
                if line.strip():
                    await self._take(line)
        except ValueError:
            problem = ServerProblem(f"it wrote a line of more than {LONGEST_MESSAGE:,} bytes")
        self._problem = problem or await self._ended()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._problem)

    async def _take(self, line: bytes) -> None:
        try:
            message = check_message(msgspec.json.decode(line))
        except (msgspec.DecodeError, UnicodeError, RpcError):
            self._said.append(line[:200].decode("utf-8", "replace"))  # a program that logs to stdout
            return
        if "method" in message:
            if "id" in message:
                with contextlib.suppress(ServerProblem):  # it reads no more, and may still answer
                    await self._write(_reply(message))
            return
        answer = self._waiting.get(message.get("id", 0))
        if answer is None or answer.done():
            return
        try:
            answer.set_result(result_of(message))
        except RpcError as error:
            answer.set_exception(error)

    async def _listen(self) -> None:
        """Keep the newest lines of stderr, for errors."""
        assert self._process.stderr is not None
        rest = b""
        while piece := await self._process.stderr.read(4096):
            *lines, rest = (rest + piece)[-8192:].split(b"\n")
            self._said.extend(line.decode("utf-8", "replace") for line in lines if line.strip())

    async def _ended(self) -> ServerProblem:
        """Describe how the program ended; its pipes may close a moment before it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        code = self._process.returncode
        how = "closed its output" if code is None else f"ended with exit code {code}"
        return ServerProblem(f"it {how}" + (f": {self._said[-1][:300]}" if self._said else ""))


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of the server. Only `ping` is supported."""
    if request["method"] == "ping":
        return {"jsonrpc": "2.0", "id": request["id"], "result": {}}
    return error_response(request["id"], RpcError(METHOD_NOT_FOUND, "This client offers no methods."))


def result_of(message: dict[str, Any]) -> Any:
    """Return a response's result. Raises RpcError."""
    if "error" not in message:
        return message.get("result")
    error = message["error"] if isinstance(message["error"], dict) else {}
    code = error.get("code")
    raise RpcError(
        code if isinstance(code, int) else 0, str(error.get("message", "it gave no reason"))[:1000]
    )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse redirects: the owner allowed one host."""


class HttpChannel:
    """Streamable HTTP with the standard library, each exchange in a thread that can be cut off."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url, self._headers = url, dict(headers)
        self._session: str | None = None
        self._next = 0

    async def request(self, method: str, params: Mapping[str, Any]) -> Any:
        self._next += 1
        id_ = self._next
        try:
            reply = await self._post({"jsonrpc": "2.0", "id": id_, "method": method, "params": params}, id_)
        except asyncio.CancelledError:
            self._post_aside({"method": "notifications/cancelled", "params": {"requestId": id_}})
            raise
        return result_of(reply)

    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        await self._post({"jsonrpc": "2.0", "method": method, "params": params}, None)

    async def close(self) -> None:
        """End the session on the server, without waiting for its answer for long."""
        if self._session is not None:
            done = in_thread(lambda: self._try("DELETE", None), "mcp http")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await done

    async def _post(self, message: Mapping[str, Any], id_: int | None) -> dict[str, Any]:
        connections = ConnectionSet()
        try:
            return await in_thread(lambda: self._exchange("POST", message, id_, connections), "mcp http")
        finally:
            connections.cut()

    def _post_aside(self, message: dict[str, Any]) -> None:
        in_thread(lambda: self._try("POST", {"jsonrpc": "2.0", **message}), "mcp http")

    def _try(self, method: str, message: Mapping[str, Any] | None) -> None:
        with contextlib.suppress(ServerProblem, RpcError):
            self._exchange(method, message, None, ConnectionSet(), END_SECONDS)

    def _exchange(
        self,
        method: str,
        message: Mapping[str, Any] | None,
        id_: int | None,
        connections: ConnectionSet,
        timeout: float = SILENCE_SECONDS,
    ) -> dict[str, Any]:
        """Send a message; return the response to `id_`, or nothing where no response is due."""
        headers = {**self._headers, "User-Agent": "llmbox", "Content-Type": "application/json"}
        headers |= {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": VERSIONS[0]}
        if self._session is not None:
            headers["Mcp-Session-Id"] = self._session
        data = None if message is None else msgspec.json.encode(message)
        request = urllib.request.Request(self._url, data, headers, method=method)  # noqa: S310 - checked
        opener = urllib.request.build_opener(_NoRedirects(), ConnectionHandler(connections))
        try:
            with opener.open(request, timeout=timeout) as response:
                self._session = response.headers.get("Mcp-Session-Id", self._session)
                return {} if id_ is None else _read_response(response, id_)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerProblem(f"{self._url} cannot be reached: {reason or type(error).__name__}") from None


def _refused(error: urllib.error.HTTPError) -> ServerProblem:
    if 300 <= error.code < 400:
        where = error.headers.get("Location", "another address")
        return ServerProblem(f"it redirects to {where[:200]}: enter that URL if you trust it")
    return ServerProblem(f"it answered with HTTP {error.code}{_HINTS.get(error.code, '')}")


_HINTS: Final = {
    401: ": it needs a header Authorization",
    403: ": it refuses this client",
    404: ": the URL is wrong, or the session ended",
}


def _read_response(response: http.client.HTTPResponse, id_: int) -> dict[str, Any]:
    """Read the response to a request, as JSON or as an event of a stream."""
    if response.headers.get_content_type() != "text/event-stream":
        return _decode(response.read(LONGEST_MESSAGE + 1), id_)
    data: list[bytes] = []
    size = 0
    while line := response.readline(LONGEST_MESSAGE + 1):
        size += len(line)
        if size > LONGEST_MESSAGE:
            break
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif not name and data:
            message = _decode(b"\n".join(data), None)
            data = []
            if "method" not in message and message.get("id") == id_:
                return message
    raise ServerProblem("its stream ended without an answer")


def _decode(data: bytes, id_: int | None) -> dict[str, Any]:
    if len(data) > LONGEST_MESSAGE:
        raise ServerProblem(f"its answer has more than {LONGEST_MESSAGE:,} bytes")
    try:
        message = check_message(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeError, RpcError):
        raise ServerProblem("its answer is not JSON-RPC: is this the address of an MCP server?") from None
    if id_ is not None and message.get("id") != id_:
        raise ServerProblem("its answer belongs to another request")
    return message
