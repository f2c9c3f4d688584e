"""HTTP client of the admin API over the daemon's unix socket. Uses the standard library only."""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, NamedTuple, Self

from .config.paths import Paths, socket_address
from .errors import CliError, Exit

TIMEOUT = 30.0
"""Seconds to wait for an answer of the admin API, which never waits for an engine. Busy machines are slow."""

EXIT_OF_STATUS = {
    400: Exit.FAILED,
    401: Exit.DENIED,
    403: Exit.DENIED,
    404: Exit.NOT_FOUND,
    409: Exit.CONFLICT,
}
EXIT_OF_CODE = {"does_not_fit": Exit.DOES_NOT_FIT, "model_not_found": Exit.NOT_FOUND}


class UnixConnection(HTTPConnection):
    """HTTP connection over the unix socket of a daemon."""

    def __init__(self, paths: Paths, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._paths = paths

    def connect(self) -> None:
        folder = os.open(self._paths.runtime_dir, os.O_PATH | os.O_DIRECTORY)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(socket_address(self._paths.socket_file, folder))
        finally:
            os.close(folder)


class Client:
    """Client of the admin API of the daemon that `paths` belong to. Raises CliError."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    @property
    def log_file(self) -> str:
        return str(self._paths.log_file)

    def is_up(self) -> bool:
        """Return whether a daemon answers. Never raises."""
        try:
            connection = UnixConnection(self._paths, 2.0)
            connection.connect()
        except OSError:
            return False
        connection.close()
        return True

    def connect(self, timeout: float | None) -> HTTPConnection:
        return UnixConnection(self._paths, timeout)

    def headers(self) -> Mapping[str, str]:
        """Return the headers that every request carries."""
        return {}

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None, TIMEOUT)

    def post(self, path: str, body: object, timeout: float | None = TIMEOUT) -> dict[str, Any]:
        return self._call("POST", path, body, timeout)

    def call(self, method: str, path: str, body: object | None, timeout: float | None) -> Any:
        """Return any route's answer: JSON, or a text where it is none. `timeout`: seconds, None waits."""
        connection, response = self._send(method, path, body, timeout)
        with closing(connection):
            if response.status >= 400:
                raise self._refusal(response)
            text = response.read().decode("utf-8", "replace")
        is_json = (response.getheader("Content-Type") or "").startswith("application/json")
        return json.loads(text or "{}") if is_json else text

    def stream(
        self, method: str, path: str, body: object | None = None, headers: Mapping[str, str] | None = None
    ) -> "Stream":
        """Open a stream of server-sent events. Closing the stream stops the work behind it."""
        connection, response = self._send(method, path, body, None, headers)
        if response.status >= 400:
            with closing(connection):
                raise self._refusal(response)
        return Stream(connection, response)

    def _call(self, method: str, path: str, body: object | None, timeout: float | None) -> dict[str, Any]:
        connection, response = self._send(method, path, body, timeout)
        with closing(connection):
            if response.status >= 400:
                raise self._refusal(response)
            answer: dict[str, Any] = json.loads(response.read() or b"{}")
            return answer

    def _send(
        self,
        method: str,
        path: str,
        body: object | None,
        timeout: float | None,
        more_headers: Mapping[str, str] | None = None,
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self.connect(timeout)
        headers = {"Accept": "application/json, text/event-stream", **self.headers(), **(more_headers or {})}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body, ensure_ascii=False).encode()  # text that is not UTF-8 is refused here
        try:
            connection.request(method, path, data, headers)
            return connection, connection.getresponse()
        except TimeoutError as error:
            connection.close()
            raise CliError(
                "the daemon does not answer",
                f"no answer to {path} within {timeout:g} s",
                "llmbox logs, then llmbox restart",
                Exit.UNREACHABLE,
                str(self._paths.log_file),
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            connection.close()
            raise self.not_running() from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise CliError(
                "lost the daemon",
                str(error) or type(error).__name__,
                "llmbox status",
                Exit.UNREACHABLE,
                str(self._paths.log_file),
            ) from error

    def not_running(self) -> CliError:
        return CliError(
            "the daemon is not running",
            f"nothing listens on {self._paths.socket_file}",
            "llmbox up",
            Exit.UNREACHABLE,
            str(self._paths.log_file),
        )

    def _refusal(self, response: HTTPResponse) -> CliError:
        raw = response.read()
        try:
            error = json.loads(raw)["error"]
            message, code = str(error["message"]), error.get("code")
        except (ValueError, KeyError, TypeError):
            message, code = f"HTTP {response.status}", None
        exit_code = EXIT_OF_CODE.get(code, EXIT_OF_STATUS.get(response.status, Exit.FAILED))
        return ApiRefusal(
            message, exit=exit_code, log=str(self._paths.log_file), status=response.status, code=code
        )


class ApiRefusal(CliError):  # noqa: N818 - family of CliError
    """Error object that the daemon answered with."""

    def __init__(self, what: str, *, exit: Exit, log: str, status: int, code: str | None) -> None:  # noqa: A002
        super().__init__(what, exit=exit, log=log)
        self.status = status
        self.code = code


class Stream:
    """Events of a response as (type, data). Ends when the server ends it."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.last_id: str | None = None
        """Id of the newest event, to send as `Last-Event-ID` after the stream broke off."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def close(self) -> None:
        """Close from a thread other than the reader's: the pending read ends at once."""
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def events(self) -> Iterator[tuple[str, str]]:
        kind = "message"
        data: list[str] = []
        try:
            while raw := self._response.readline():
                line = raw.decode("utf-8").rstrip("\r\n")
                if not line and data:
                    yield kind, "\n".join(data)
                    kind, data = "message", []
                name, _, value = line.partition(":")
                if name == "event":
                    kind = value.strip()
                elif name == "id":
                    self.last_id = value.strip()
                elif name == "data":
                    data.append(value.removeprefix(" "))
        except (OSError, HTTPException) as error:
            raise CliError("the stream broke off", str(error), "llmbox status", Exit.UNREACHABLE) from error


class AnswerPiece(NamedTuple):
    """Piece of a streamed answer."""

    is_thought: bool
    text: str


def stream_answer(
    client: Client, body: Mapping[str, Any], opened: Callable[[Stream], object]
) -> Iterator[AnswerPiece]:
    """Stream an answer: to a chat if `body` has `messages`, else to a text to go on with.

    `opened` gets the stream, to close it from another thread. Raises CliError.
    """
    is_chat = "messages" in body
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    with client.stream("POST", path, {**body, "stream": True}) as stream:
        opened(stream)
        for _, data in stream.events():
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise CliError("the answer broke off", error["message"], "ask again", log=client.log_file)
            for choice in chunk["choices"]:
                delta = choice["delta"] if is_chat else {"content": choice["text"]}
                if thought := delta.get("reasoning_content"):
                    yield AnswerPiece(True, thought)
                if piece := delta.get("content"):
                    yield AnswerPiece(False, piece)
    raise CliError("the answer broke off", "the stream ended early", "llmbox status", Exit.UNREACHABLE)
