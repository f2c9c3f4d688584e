"""Clients that ask over HTTP: the daemon's ASGI application in process, without a socket.

A body arrives in pieces, which a client that leaves does not finish. Answers wait for a reader who is slow.
What comes back is read as the dialect has it, event by event.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmbox.app.config.settings import Settings
from llmbox.app.errors import ApiError
from llmbox.app.http.app import DIALECTS, App, create_app
from llmbox.app.http.in_process import http_scope
from llmbox.app.http.server.middleware import RequestPacer
from llmbox.app.lifecycle.drain import Drain
from llmbox.app.security.security import Identity
from support.http_app import security_in

from .dialects import DIALECTS_BY_NAME, AnswerPart, request_of
from .rules import expected_answer
from .step_rules import BrokenRuleError

if TYPE_CHECKING:
    from .clients import Outcome
    from .scenario import RequestSetup
    from .world import World

_WINDOW = 600
"""Bytes on their way to a reader; more wait in the daemon."""
_NOTICE_S = 1.0
"""Seconds within which a request ends whose client has left."""


class SimulatedCaller(Identity):
    """Caller with a share of its own and no key."""

    def __init__(self, tenant: str) -> None:
        super().__init__("local")
        object.__setattr__(self, "_tenant", tenant)

    @property
    def tenant(self) -> str:
        return str(self._tenant)  # type: ignore[attr-defined]

    def cache_namespace(self, salt: str) -> str:
        return salt


class Exchange:
    """One request and its answer, as ASGI has them."""

    def __init__(self, chance: Random, body: bytes, pause: float) -> None:
        count = chance.choice([0, 0, 1, 3]) if body else 0
        cuts = sorted(chance.randrange(len(body)) for _ in range(count))
        ends = [*cuts, len(body)]
        self._pieces = [body[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
        self._pause = pause
        self._gone = asyncio.Event()
        self._moved = asyncio.Event()
        self._unread: list[bytes] = []
        self.status = 0
        self.has_ended = False

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()
        self._moved.set()

    @property
    def is_left(self) -> bool:
        return self._gone.is_set()

    async def receive(self) -> dict[str, Any]:
        if len(self._pieces) == 1 and self._pause:  # before the last piece
            await asyncio.sleep(self._pause)
        if self.is_left or not self._pieces:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def send(self, message: Any) -> None:
        if self.has_ended:
            raise BrokenRuleError("something follows the end of an answer")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self._unread.append(message.get("body", b""))
        self.has_ended = not message.get("more_body", False)
        self._moved.set()
        while not self.is_left and sum(map(len, self._unread)) > _WINDOW:
            self._moved.clear()
            await self._moved.wait()

    async def read(self) -> AsyncIterator[bytes]:
        """Yield what arrives, until the answer ends or the connection is closed."""
        while not self.is_left:
            data = b"".join(self._unread)
            self._unread.clear()
            if data:
                self._moved.set()
                yield data
            elif self.has_ended:
                return
            else:
                self._moved.clear()
                await self._moved.wait()


class HttpClient:
    """One request over HTTP: sends it, reads the answer, and notes what it got."""

    def __init__(self, world: "World", request: "RequestSetup", outcome: "Outcome") -> None:
        self._world, self._request, self._outcome = world, request, outcome
        self._dialect = DIALECTS_BY_NAME[request.dialect]
        self._is_marked = False
        """The last event has come."""
        self._numbered = 0
        """Events that have a number."""
        self._error: ApiError | None = None
        """Error that came inside the stream."""

    async def ask(self) -> None:
        """Return when the answer has ended or the client has left. Raises ApiError for an error."""
        request, world = self._request, self._world
        sent = self._dialect.body(request)
        body = json.dumps({name: value for name, value in sent.items() if value is not None}).encode()
        exchange = Exchange(world.chance, body, request.preparing)
        served = asyncio.create_task(
            serve_exchange(
                world,
                exchange,
                path=self._dialect.route,
                name=request.id,
                tenant=request.tenant,
                size=len(body),
            )
        )
        timer = None
        if request.leaves_at is not None:
            timer = world.loop.call_later(request.leaves_at, exchange.leave)
        try:
            if request.streams:
                await self._read_stream(exchange, request.leaves_after)
            else:
                await self._read_whole(exchange)
            if exchange.is_left:
                self._outcome.status = "left"
        finally:
            if timer is not None:
                timer.cancel()
            ended, was_open = world.loop.time(), self._outcome.is_open
            exchange.leave()
            await asyncio.wait({served})
        if was_open and world.loop.time() > ended + _NOTICE_S:
            raise BrokenRuleError(f"{request.id} runs on although its client has left")
        await served

    # ------------------------------------------------------------------ the answer

    async def _read_whole(self, exchange: Exchange) -> None:
        data = b"".join([piece async for piece in exchange.read()])
        if exchange.is_left:
            return
        answer = json.loads(data)
        if exchange.status != 200:
            raise self._to_error(exchange.status, answer)
        for part in self._dialect.whole(answer):
            self._take(part)

    async def _read_stream(self, exchange: Exchange, leaves_after: int | None) -> None:
        buffer, count = b"", 0
        async for piece in exchange.read():
            buffer += piece
            if exchange.status != 200:
                continue
            *events, buffer = buffer.split(self._dialect.separator)
            for event in events:
                if not self._take_event(event):
                    continue
                count += 1
                if leaves_after is not None and count > leaves_after:
                    exchange.leave()
                    return
                if self._request.read_pause:
                    await asyncio.sleep(self._request.read_pause)
        if exchange.is_left:
            return
        if exchange.status != 200:
            raise self._to_error(exchange.status, json.loads(buffer))
        if buffer or not self._is_marked:
            raise BrokenRuleError(f"{self._request.id}: its stream ends with {buffer!r}, and no last event")
        if self._error is not None:
            raise self._error

    def _take_event(self, data: bytes) -> bool:
        """Take an event. Returns whether it has a part of the answer."""
        name, outcome = self._request.id, self._outcome
        if self._is_marked:
            raise BrokenRuleError(f"{name}: {data!r} follows the last event")
        event = self._dialect.event(data)
        self._is_marked = event.is_last
        if event.number is not None:
            if event.number != self._numbered:
                raise BrokenRuleError(f"{name}: event {event.number} comes as number {self._numbered}")
            self._numbered += 1
        if event.error is not None:
            outcome.is_cut = True
            self._error = self._to_error(0, event.error)
            return False
        for part in event.parts:
            self._take(part)
        if event.whole is not None and event.whole != outcome.text[0]:
            raise BrokenRuleError(f"{name}: told at the end is {event.whole!r}, came has {outcome.text[0]!r}")
        if event.count is not None and event.count != len(outcome.tokens[0]):
            raise BrokenRuleError(f"{name}: {event.count} tokens are told, {len(outcome.tokens[0])} came")
        return bool(event.parts)

    def _take(self, part: AnswerPart) -> None:
        outcome, index, tokens = self._outcome, part.index, part.tokens
        if index in outcome.reasons:
            raise BrokenRuleError(f"{self._request.id}: a part after the last one of choice {index}")
        if tokens is None:
            tokens = [ord(letter) - 48 for letter in part.text]
            if part.reason == "stop":  # the token that stops has no letter
                tokens += expected_answer(self._world, outcome, index)[0][-1:]
        outcome.tokens.setdefault(index, []).extend(tokens)
        outcome.text[index] = outcome.text.get(index, "") + part.text
        if tokens:
            outcome.token_times.append(self._world.loop.time())
        if part.reason is not None:
            outcome.reasons[index] = part.reason
        self._world.note(f"{self._request.id} {index} {tokens} {part.reason}")

    def _to_error(self, status: int, answer: dict[str, Any]) -> ApiError:
        """Read an error. Ollama's have a text alone: it must be one that the daemon made."""
        told = answer["error"]
        if isinstance(told, str):
            if (made := self._world.told_errors.get(told)) is None:
                raise BrokenRuleError(f"{self._request.id}: an error of nobody: {told}")
            return ApiError(status, told, code=made.code)
        return ApiError(status, told["message"], code=told["code"])


# ---------------------------------------------------------------------- the application


async def serve_exchange(
    world: "World",
    exchange: Exchange,
    *,
    path: str,
    name: str,
    tenant: str,
    size: int = 0,
    method: str = "POST",
    query: str = "",
) -> None:
    """Have the application serve one request. `name`: its id; `size`: bytes of its body, which is JSON."""
    headers = [(b"host", b"127.0.0.1:8000"), (b"x-request-id", name.encode())]
    if size:
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % size)]
    caller = SimulatedCaller(tenant)
    client, server = ("127.0.0.1", 40_000), ("127.0.0.1", 8000)
    scope = http_scope(method, path, query.encode(), headers, caller, client=client, server=server)
    try:
        await application()(scope, exchange.receive, exchange.send)
    finally:
        if not exchange.has_ended and not exchange.is_left:
            exchange.leave()
            world.loop.failures.append(f"{name}: the answer has no end")


@cache
def application() -> App:
    """Application of all runs. `begin_http` gives it the parts of one."""
    settings = Settings()
    return create_app(SimpleNamespace(settings=settings, drain=Drain(), version="0"), DIALECTS)  # type: ignore[arg-type]


def begin_http(world: "World", settings: Settings) -> None:
    """Connect the application with the parts of a run."""
    app = application()
    app.state["services"] = SimpleNamespace(
        settings=settings,
        engines=world.engines,
        gateway=world.gateway,
        request_log=world.request_log,
        stored=world.stored,
        background=world.background,
        security=security_in(world.machine.folder),
        find_model=world.residency.find,
        drain=world.drain,
        aliases=dict,
        real_name=str,
        version="0",
    )
    engines = SimpleNamespace(engines=world.engines)
    app.state["control"] = SimpleNamespace(services=engines, residency=world.residency)
    app.state["stream_buffer_bytes"] = 2000
    app.shell._pacer, app.shell._drain = RequestPacer(), world.drain
    gateway = world.gateway
    open_request, record_refusal = gateway.open, gateway.record_refusal

    def find(name: str) -> "Outcome":
        return world.clients.outcomes[request_of(name)]

    def refuse_watched(name: str, *fields: Any, **more: Any) -> None:
        world.clients.note_refusal(find(name))
        record_refusal(name, *fields, **more)

    def open_watched(generation: Any) -> Any:
        outcome = find(generation.id)
        request = outcome.request
        if (dialect := DIALECTS_BY_NAME.get(request.dialect)) is None:
            return world.clients.open_watched(outcome, generation, open_request)
        if not dialect.has_seed:
            request.params = replace(request.params, seed=generation.params.seed)
        if dialect.is_clamped and request.max_tokens is not None:
            room = world.setups[request.model].most_tokens - len(request.prompt)
            request.max_tokens = max(1, min(request.max_tokens, room))
        return world.clients.open_watched(outcome, generation, open_request)

    gateway.open, gateway.record_refusal = open_watched, refuse_watched  # type: ignore[method-assign]
