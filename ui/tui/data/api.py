"""Admin API clients of the dashboard (live, recording, replaying), and the feed of its events."""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

import msgspec
from textual.message import Message

from llmbox.app.admin_client import AnswerPiece, Client, Stream, stream_answer
from llmbox.app.config.paths import Paths
from llmbox.app.errors import CliError, Exit
from llmbox.app.telemetry.snapshot import Tick

from ..messages import Connected, ConnectionLost, EventReceived, TickReceived

SCHEMA = "llmbox.recording/1"
Item = tuple[str, dict[str, Any]]
"""Event as (type, data)."""


class Api(Protocol):
    """Admin API. Calls block and are made from threads. Raises CliError."""

    def get(self, path: str) -> dict[str, Any]: ...

    def post(self, path: str, body: object) -> dict[str, Any]: ...

    def ask(self, body: dict[str, Any]) -> Iterator[AnswerPiece]:
        """Stream an answer: to a chat if `body` has `messages`, else to a text. `stop` ends it."""
        ...

    def stop(self) -> None:
        """End the answer that is being streamed, called from another thread."""
        ...

    def events(self) -> Iterator[Item]:
        """Yield events until the connection ends. A reconnection yields missed events first."""
        ...

    def close(self) -> None:
        """End `events`, called from another thread."""
        ...


class LiveApi:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._stream: Stream | None = None
        self._answer: Stream | None = None
        self._stopped = False
        self._last_id = "0"

    def get(self, path: str) -> dict[str, Any]:
        return self._client.get(f"/admin/api/{path}")

    def post(self, path: str, body: object) -> dict[str, Any]:
        return self._client.post(f"/admin/api/{path}", body)

    def ask(self, body: dict[str, Any]) -> Iterator[AnswerPiece]:
        self._stopped = False

        def opened(stream: Stream) -> None:
            self._answer = stream
            if self._stopped:
                stream.close()

        return stream_answer(self._client, body, opened)

    def stop(self) -> None:
        self._stopped = True
        if self._answer is not None:
            self._answer.close()

    def events(self) -> Iterator[Item]:
        headers = {"Last-Event-ID": self._last_id}
        with self._client.stream("GET", "/admin/api/events", headers=headers) as stream:
            self._stream = stream
            for kind, data in stream.events():
                self._last_id = stream.last_id or self._last_id
                yield kind, json.loads(data)

    def close(self) -> None:
        self.stop()
        if self._stream is not None:
            self._stream.close()


class Recorder:
    """Records all responses and events, one JSON object a line, with the seconds since the start."""

    def __init__(self, api: Api, file: TextIO) -> None:
        self._api, self._file = api, file
        self._begun = time.monotonic()
        # Requests and events have threads of their own, and a text file is not safe for two.
        self._lock = threading.Lock()
        self._write({"schema": SCHEMA})

    def get(self, path: str) -> dict[str, Any]:
        answer = self._api.get(path)
        self._write({"at": self._now(), "path": path, "answer": answer})
        return answer

    def post(self, path: str, body: object) -> dict[str, Any]:
        return self._api.post(path, body)

    def ask(self, body: dict[str, Any]) -> Iterator[AnswerPiece]:
        """Ask without recording: recordings hold no texts."""
        return self._api.ask(body)

    def stop(self) -> None:
        self._api.stop()

    def events(self) -> Iterator[Item]:
        for kind, data in self._api.events():
            self._write({"at": self._now(), "event": kind, "data": data})
            yield kind, data

    def close(self) -> None:
        self._api.close()
        with self._lock:
            self._file.flush()

    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 3)

    def _write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"
        with self._lock:
            self._file.write(line)


class Replay:
    """Replays a recording at its own speed. Every `post` is refused."""

    def __init__(self, path: Path) -> None:
        self._answers: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[float, str, dict[str, Any]]] = []
        self._ended = False
        try:
            self._read(path)
        except (OSError, UnicodeDecodeError) as error:
            raise CliError(f"{path} cannot be read", str(error), exit=Exit.USAGE) from error

    def get(self, path: str) -> dict[str, Any]:
        try:
            return self._answers[path]
        except KeyError:
            raise CliError("not in this recording", path) from None

    def post(self, path: str, body: object) -> dict[str, Any]:  # noqa: ARG002 - as the protocol has it
        raise CliError("a replay cannot change anything", path)

    def ask(self, body: dict[str, Any]) -> Iterator[AnswerPiece]:  # noqa: ARG002 - as the protocol has it
        raise CliError("a replay cannot answer", "it has no model")

    def stop(self) -> None:
        pass

    def events(self) -> Iterator[Item]:
        begun = time.monotonic()
        for at, kind, data in self._events:
            while (left := begun + at - time.monotonic()) > 0 and not self._ended:
                time.sleep(min(left, 0.1))
            if self._ended:
                return
            yield kind, data

    def close(self) -> None:
        self._ended = True

    def _read(self, path: Path) -> None:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file.read().rstrip("\n").split("\n"), 1):
                try:
                    entry = json.loads(line)
                    self._take(entry, first=number == 1)
                except (ValueError, KeyError, TypeError) as error:
                    raise CliError(
                        f"{path} is not a recording of llmbox top",
                        f"line {number}: {error}",
                        "llmbox top --record FILE",
                        Exit.USAGE,
                    ) from error

    def _take(self, entry: dict[str, Any], *, first: bool) -> None:
        if first:
            if entry["schema"] != SCHEMA:
                raise ValueError(f"schema {entry['schema']!r}")
        elif "path" in entry:
            self._answers[str(entry["path"])] = dict(entry["answer"])
        else:
            self._events.append((float(entry["at"]), str(entry["event"]), dict(entry["data"])))


LEAST_KEY = 20


class RemoteClient(Client):
    def __init__(self, paths: Paths, url: str, key_file: Path) -> None:
        """Parse the URL and read the key. Raises CliError if either is invalid."""
        super().__init__(paths)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise CliError(
                f"{url} is not a URL", str(error), "--remote http://HOST:7411", Exit.USAGE
            ) from error
        if parts.scheme not in {"http", "https"} or not self._host:
            raise CliError(f"{url} is not a URL", "", "--remote http://HOST:7411", Exit.USAGE)
        self._secure = parts.scheme == "https"
        self._key = _read_key(key_file)
        self.url = f"{parts.scheme}://{parts.netloc}"

    def connect(self, timeout: float | None) -> HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return HTTPSConnection(self._host, self._port, timeout=timeout, context=context)
        return HTTPConnection(self._host, self._port or 7411, timeout=timeout)

    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._key}"}

    def not_running(self) -> CliError:
        return CliError(
            f"nothing answers at {self.url}", "the connection was refused", "llmbox status, over there",
            Exit.UNREACHABLE,
        )  # fmt: skip


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise CliError(
            f"{path} cannot be read as a key", str(error), "llmbox key add NAME --scope admin", Exit.USAGE
        ) from error
    if len(key) < LEAST_KEY or any(char.isspace() for char in key):
        raise CliError(f"{path} holds no key", "", "llmbox key add NAME --scope admin > FILE", Exit.USAGE)
    return key


RETRY_S = 1.0


class EventFeed:
    def __init__(self, api: Api, post: Callable[[Message], object], *, once: bool = False) -> None:
        """Create the feed. `once`: the end of the stream is final (a replay)."""
        self._api, self._post, self._once = api, post, once
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._api.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            reason = "the daemon ended the stream"
            try:
                self._read()
            except CliError as error:
                reason = error.why or error.what
            except (OSError, ValueError, AttributeError) as error:
                # http.client fails so when `stop` closes the connection from the other thread.
                reason = str(error) or type(error).__name__
            if self._stopped.is_set():
                return
            self._post(ConnectionLost("the recording has ended" if self._once else reason))
            if self._once:
                return
            self._stopped.wait(RETRY_S)

    def _read(self) -> None:
        connected = False
        for kind, data in self._api.events():
            if self._stopped.is_set():
                return
            if not connected:
                connected = True
                self._post(Connected())
            if kind == "tick":
                self._post(TickReceived(msgspec.convert(data, Tick)))
            else:
                self._post(EventReceived(kind, data))
