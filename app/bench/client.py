"""Load generator: prompts, and streamed completions over fresh connections with every token's arrival time.

Built on h11 and asyncio's transports: a benchmark client must cost little beside the server it measures,
and parsing waits until the stream has ended.
"""

import asyncio
import json
import math
import random
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

_TIMEOUT_S = 600
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A server under test. `url` has no path; `extra` is merged into every request body."""

    url: str
    model: str
    key: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestTiming:
    """One request as the client saw it. Times in seconds on the monotonic clock."""

    started: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """Arrival of each chunk that carried text."""
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        if self.tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.tokens - 1)


async def complete(target: BenchTarget, prompt: list[int] | str, max_tokens: int) -> RequestTiming:
    """Stream one greedy completion of exactly `max_tokens` tokens. Failures end up in
    `RequestTiming.error`.
    """
    sample = RequestTiming()
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **target.extra,
    }
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await _exchange(target, json.dumps(body).encode(), sample)
    except (OSError, h11.ProtocolError, TimeoutError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    if not sample.error and not sample.token_times:
        sample.error = "no text came back"
    return sample


async def _exchange(target: BenchTarget, body: bytes, sample: RequestTiming) -> None:
    parts = urlsplit(target.url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    connection = h11.Connection(h11.CLIENT)
    headers = [("Host", parts.netloc), ("Content-Type", "application/json"), ("Connection", "close")]
    headers += [("Content-Length", str(len(body)))]
    if target.key:
        headers.append(("Authorization", f"Bearer {target.key}"))
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    asked = h11.Request(method="POST", target=path, headers=headers), h11.Data(data=body), h11.EndOfMessage()
    request = b"".join(connection.send(event) or b"" for event in asked)
    loop = asyncio.get_running_loop()
    sample.started = time.perf_counter()
    transport, answer = await loop.create_connection(
        lambda: _Answer(connection), parts.hostname or "", port, ssl=tls
    )
    try:
        transport.write(request)
        await answer.ended
    finally:
        transport.close()
    if answer.status != 200:
        text = b"".join(data for _, data in answer.pieces)[:300].decode(errors="replace")
        sample.error = f"HTTP {answer.status}: {text}"
        return
    sample.ended = answer.pieces[-1][0] if answer.pieces else time.perf_counter()
    _read_events(answer.pieces, sample)


class _Answer(asyncio.Protocol):
    """Status of an answer, and (arrival, bytes) of everything in it.

    A chunked answer is only kept until it has ended, and then read: the client may run on the cores that the
    server computes on, and what it costs meanwhile would count as the server's.
    """

    def __init__(self, connection: h11.Connection) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        self._connection = connection
        self._unread: list[tuple[float, bytes]] = []
        self._is_chunked = False

    def data_received(self, data: bytes) -> None:
        self._unread.append((time.perf_counter(), data))
        if not self._is_chunked or data.endswith(_LAST_CHUNK):
            self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._fail(exc)
            return
        self._unread.append((time.perf_counter(), b""))
        self._read()
        self._fail(ConnectionError("the answer ended too soon"))

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        try:
            for arrived, data in unread:
                if not self.ended.done():
                    self._connection.receive_data(data)
                    self._take_events(arrived)
        except h11.ProtocolError as error:
            self._fail(error)

    def _take_events(self, arrived: float) -> None:
        while (event := self._connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self._is_chunked = (b"transfer-encoding", b"chunked") in event.headers
            elif isinstance(event, h11.Data):
                self.pieces.append((arrived, bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                self.ended.set_result(None)
                return

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def _read_events(pieces: list[tuple[float, bytes]], sample: RequestTiming) -> None:
    buffer = b""
    for arrived, data in pieces:
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                _read_chunk(json.loads(payload), arrived, sample)


def _read_chunk(chunk: dict[str, Any], arrived: float, sample: RequestTiming) -> None:
    if error := chunk.get("error"):
        sample.error = json.dumps(error)[:300]
        return
    if any(choice.get("text") for choice in chunk.get("choices") or ()):
        sample.token_times.append(arrived)
        sample.tokens += 0 if sample.prompt_tokens else 1
    if usage := chunk.get("usage"):
        sample.tokens = usage["completion_tokens"]
        sample.prompt_tokens = usage["prompt_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. `after` delays its start, in seconds since the run began."""

    prompt: list[int]
    max_tokens: int
    after: float = 0.0
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order; at most `concurrency` are open at once."""

    asks: list[BenchRequest]
    concurrency: int


class Prompts:
    """Random token ids in a range. A new seed for every run, so that no cache helps by accident."""

    def __init__(self, seed: str, id_range: tuple[int, int]) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._range = id_range

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(*self._range) for _ in range(count)]

    def capped_exponential(self, mean: float, cap: int) -> int:
        """Draw an output length as in the classic continuous-batching experiment, from 1 to `cap`."""
        return min(cap, max(1, math.ceil(self._random.expovariate(1 / mean))))


def uniform(prompts: Prompts, count: int, concurrency: int, prompt: int, output: int) -> Workload:
    return Workload([BenchRequest(prompts.ids(prompt), output) for _ in range(count)], concurrency)


def heavy_tail(prompts: Prompts, count: int, concurrency: int, prompt: int, mean: int, cap: int) -> Workload:
    asks = [BenchRequest(prompts.ids(prompt), prompts.capped_exponential(mean, cap)) for _ in range(count)]
    return Workload(asks, concurrency)


def shared_prefix(
    prompts: Prompts, count: int, concurrency: int, prefix: int, tail: int, output: int
) -> Workload:
    head = prompts.ids(prefix)
    return Workload([BenchRequest(head + prompts.ids(tail), output) for _ in range(count)], concurrency)


def long_arrival(prompts: Prompts, streams: int, prompt: int, output: int, long_prompt: int) -> Workload:
    """Build a workload of `streams` that decode; once they do, one long prompt arrives (tag `long`)."""
    asks = [BenchRequest(prompts.ids(prompt), output, tag="stream") for _ in range(streams)]
    asks.append(BenchRequest(prompts.ids(long_prompt), 4, after=1.0, tag="long"))
    return Workload(asks, streams + 1)
