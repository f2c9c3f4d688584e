"""Export of spans to a collector: OTLP over HTTP, as JSON, from a separate thread.

Nothing waits for it. Spans beyond a bound are dropped and counted, also while the collector is down, slow or
refuses them.
"""

import contextlib
import http.client
import logging
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from llmbox import __version__

from ..errors import CliError, Exit

log = logging.getLogger(__name__)

QUEUE_SPANS: Final = 8192
"""Spans that may wait; a span has some 300 to 1,500 bytes."""
BATCH_SPANS: Final = 512
TRIES: Final = 5
"""Attempts to send a batch."""
LONGEST_WAIT_S: Final = 60.0
_RETRIED: Final = frozenset({429, 502, 503, 504})
"""Statuses after which OTLP requires a retry of the batch; after others it is lost."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e]*")
_OURS: Final = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection"})
_PATH: Final = "/v1/traces"
_ANSWER_BYTES: Final = 65_536
Attribute = bool | int | float | str | Sequence[str] | None


class OtlpExporter:
    """Sends encoded spans to one collector. `put` is called on the event loop, `close` from any thread."""

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        service: str,
        *,
        timeout: float = 10.0,
        delay: float = 1.0,
        first_wait: float = 1.0,
        queue_spans: int = QUEUE_SPANS,
    ) -> None:
        """Start nothing yet: the thread begins with the first span.

        `timeout`: seconds without a byte after which the collector counts as dead. `delay`: seconds for which
        spans are gathered. `first_wait`: seconds before the second attempt; each failure doubles them.
        """
        self.exported = self.dropped = 0
        self._endpoint = endpoint
        self._headers = {**headers, "Content-Type": "application/json", "User-Agent": f"llmbox/{__version__}"}
        self._timeout, self._delay, self._first_wait = timeout, delay, first_wait
        self._most = queue_spans
        self._head, self._tail = _envelope(service)
        self._spans: deque[bytes] = deque()
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self._end = float("inf")
        self._failures = 0
        self._thread: threading.Thread | None = None

    def put(self, spans: Sequence[bytes]) -> None:
        """Queue spans. Never blocks on the collector; drops and counts those for which there is no room."""
        with self._lock:
            room = 0 if self._closing.is_set() else max(0, self._most - len(self._spans))
            self._spans.extend(spans[:room])
            self.dropped += len(spans[room:])
            if self._thread is None and self._spans:
                self._thread = threading.Thread(target=self._run, name="otlp-export", daemon=True)
                self._thread.start()
            self._lock.notify()

    def close(self, seconds: float = 3.0) -> None:
        """Send what is queued, for `seconds` at most; the rest is dropped and counted."""
        with self._lock:
            self._end = time.monotonic() + seconds
            self._closing.set()
            self._lock.notify()
        if self._thread is not None:
            self._thread.join(seconds)
        with self._lock:
            self.dropped += len(self._spans)
            self._spans.clear()
        if self.dropped:
            log.warning("traces: %d spans were not delivered", self.dropped)

    # ----------------------------------------------------------------- the exporting thread

    def _run(self) -> None:
        while batch := self._take():
            self._deliver(batch)

    def _take(self) -> list[bytes]:
        """Wait for spans. Returns none once it is closed and they are sent."""
        with self._lock:
            while not self._spans and not self._closing.is_set():
                self._lock.wait()
            self._lock.wait_for(
                lambda: len(self._spans) >= BATCH_SPANS or self._closing.is_set(), self._delay
            )
            return [self._spans.popleft() for _ in range(min(BATCH_SPANS, len(self._spans)))]

    def _deliver(self, batch: list[bytes]) -> None:
        for attempt in range(1, TRIES + 1):
            rejected, wait, problem = self._try(batch)
            if not problem:
                self._note_success(len(batch), rejected)
                return
            self._note_failure(problem)
            if wait is None or attempt == TRIES or self._closing.wait(wait):
                break
        with self._lock:
            self.dropped += len(batch)

    def _try(self, batch: list[bytes]) -> tuple[int, float | None, str]:
        """Send a batch once. Returns (spans that the collector rejected, seconds until the next attempt or
        None, the problem).
        """
        backoff = min(LONGEST_WAIT_S, self._first_wait * 2 ** min(self._failures, 10))
        try:
            status, asked, answer = self._post(self._head + b",".join(batch) + self._tail)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return 0, backoff, str(error) or type(error).__name__
        if 200 <= status < 300:
            return _rejected(answer), None, ""
        problem = f"it answers {status}"
        return 0, max(backoff, asked) if status in _RETRIED else None, problem

    def _post(self, body: bytes) -> tuple[int, float, bytes]:
        """Send one request. Returns (status, seconds of Retry-After, answer). No redirect is followed, and
        no proxy of the environment is used.
        """
        timeout = max(0.1, min(self._timeout, self._end - time.monotonic()))
        parts = urlsplit(self._endpoint)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(kind(parts.hostname or "", parts.port, timeout=timeout)) as connection:
            connection.request("POST", _target(parts.path), body, self._headers)
            response = connection.getresponse()
            after = response.headers.get("Retry-After", "")
            seconds = min(LONGEST_WAIT_S, float(after)) if after.isdecimal() else 0.0
            return response.status, seconds, response.read(_ANSWER_BYTES)

    def _note_success(self, spans: int, rejected: int) -> None:
        if self._failures or rejected:
            log.log(
                logging.WARNING if rejected else logging.INFO,
                "traces: the collector takes spans%s",
                f", but rejected {rejected}" if rejected else " again",
            )
        self._failures = 0
        with self._lock:
            self.exported += spans - min(spans, rejected)
            self.dropped += min(spans, rejected)

    def _note_failure(self, problem: str) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("traces: the collector at %s does not take spans: %s", self._endpoint, problem)


def _target(path: str) -> str:
    """Path of a request: below the endpoint's, unless the endpoint names the traces' already."""
    path = path.rstrip("/")
    return path if path.endswith(_PATH) else path + _PATH


def _envelope(service: str) -> tuple[bytes, bytes]:
    """Return what stands before and after the spans of a request."""
    resource = {"service.name": service, "service.version": __version__}
    scope = {"scope": {"name": "llmbox", "version": __version__}, "spans": []}
    whole = {
        "resourceSpans": [{"resource": {"attributes": encode_attributes(resource)}, "scopeSpans": [scope]}]
    }
    head, _, tail = msgspec.json.encode(whole).rpartition(b'"spans":[]')
    return head + b'"spans":[', b"]" + tail


def _rejected(answer: bytes) -> int:
    """Return the number of spans that a collector rejected although it answered 200."""
    try:
        return max(0, int(msgspec.json.decode(answer)["partialSuccess"]["rejectedSpans"]))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return 0


def read_headers(file: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Read the headers for the collector: those of the file (lines of `Name: value`), else those of
    OpenTelemetry's variables. Raises CliError.
    """
    if file:
        pairs, place = _file_pairs(Path(file).expanduser()), file
    else:
        names = "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"
        place = next((name for name in names if environ.get(name)), names[-1])
        entries = (entry.partition("=") for entry in environ.get(place, "").split(",") if entry.strip())
        pairs = [(name.strip(), unquote(value.strip())) for name, _, value in entries]
    for name, value in pairs:
        is_header = _TOKEN.fullmatch(name) and _VALUE.fullmatch(value) and name.lower() not in _OURS
        if not is_header:
            raise _bad_headers(place, f"{name[:64]!r} is not a header that can be sent")
    return dict(pairs)


def _file_pairs(path: Path) -> list[tuple[str, str]]:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise _bad_headers(str(path), "other users may read it", f"chmod 600 {path}")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise _bad_headers(str(path), reason) from error
    lines = (line.partition(":") for line in text.splitlines() if line.strip())
    return [(name.strip(), value.strip()) for name, _, value in lines]


def _bad_headers(place: str, why: str, fix: str = "") -> CliError:
    return CliError(
        f"the headers for the collector of traces cannot be used ({place})",
        why,
        fix or "write one 'Name: value' a line into the file of telemetry.otlp_headers_file",
        Exit.USAGE,
    )


def encode_attributes(attributes: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    """Encode attributes as OTLP's JSON has them; those that are None are left out."""
    return [{"key": name, "value": _value(value)} for name, value in attributes.items() if value is not None]


def _value(value: bool | float | str | Sequence[str]) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits: JSON of protobuf has them as text
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [{"stringValue": each} for each in value]}}
