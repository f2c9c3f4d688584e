"""MCP server over streamable HTTP, at `/mcp`. Its tools call the daemon's own routes as the caller."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec
from litestar import Response, Router, delete, post

from ..errors import ApiError
from ..mcp.features import Resource, Tool, ToolError
from ..mcp.protocol import (
    INVALID_REQUEST,
    PARSE_ERROR,
    VERSIONS,
    McpServer,
    RpcError,
    check_message,
    error_response,
    is_request,
)
from ..security.security import LOCAL, Identity
from .auth.guard import Access, identity_of, services_and_owner
from .in_process import call_route
from .server.request import StrictRequest, load
from .server.sse import EventStreamResponse, SseOptions, data_event, while_connected

SESSION: Final = "mcp-session-id"
VERSION: Final = "mcp-protocol-version"
MOST_SESSIONS: Final = 256
"""Maximum number of sessions; the least recently used one is dropped."""
CANCELLED: Final = -32800
_STREAM: Final = SseOptions(last=b"")


class McpSessions:
    """Sessions by id, each for the caller that opened it."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, tuple[str, McpServer]] = OrderedDict()

    def open(self, owner: str, server: McpServer) -> str:
        """Keep a session. Returns its id."""
        id_ = secrets.token_hex(16)
        self._all[id_] = owner, server
        if len(self._all) > MOST_SESSIONS:
            self._all.popitem(last=False)
        return id_

    def find(self, id_: str, owner: str) -> McpServer:
        """Return a session's server. Raises ApiError 404, upon which clients begin a new session."""
        known, server = self._all.get(id_, (None, None))
        if server is None or known != owner:
            raise ApiError(404, "This MCP session has ended. Start a new one.", "session_not_found", SESSION)
        self._all.move_to_end(id_)
        return server

    def close(self, id_: str, owner: str) -> None:
        self.find(id_, owner)
        del self._all[id_]


class RouteCaller:
    """Calls routes in this process as the caller, so that each route's guard decides."""

    def __init__(self, request: StrictRequest) -> None:
        self._app = request.app
        identity = identity_of(request)
        # The session's token was checked with this request; the calls that it makes carry none.
        self.identity = replace(identity, session=None)
        client = request.scope["client"]
        self._client = ("unix socket", 0) if client is None else (str(client[0]), int(client[1]))

    async def request(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, seconds: float | None
    ) -> Any:
        return await self._call(self.identity, method, path, query, body, seconds)

    async def own_requests(self, query: Mapping[str, Any]) -> Any:
        who, path = self.identity, "/admin/api/requests"
        if who.key is not None and not who.may("admin"):
            # A name may have had another key before: its rows are not this one's.
            query = {**query, "key": who.key.name, "since": who.key.created}
            who = LOCAL
        return await self._call(who, "GET", path, query, None, None)

    async def _call(
        self,
        who: Identity,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any,
        seconds: float | None,
    ) -> Any:
        data = b"" if body is None else msgspec.json.encode(body)
        work = call_route(self._app, method, path, data, who, query=_texts(query), client=self._client)
        try:
            async with asyncio.timeout(seconds):
                answer = await work
        except TimeoutError:
            raise ToolError(f"{path} took more than {seconds:g} s. Try again later.") from None
        if answer.status >= 400:
            raise ToolError(_message(answer.body, answer.status))
        try:
            return msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            return answer.body.decode("utf-8", "replace")


def _texts(query: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in query.items()
    }


def _message(body: bytes, status: int) -> str:
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode(body)["error"]["message"])
    return f"The daemon answered with HTTP {status}. See llmbox logs."


@post("/mcp", status_code=200)
async def receive_message(request: StrictRequest) -> Response[Any]:
    """Answer one message: with JSON, or with events where the client asked for progress."""
    try:
        message = await _read(request)
    except RpcError as error:
        return Response(error_response(None, error), status_code=400)
    services, owner = services_and_owner(request)
    sessions: McpSessions = request.app.state.mcp_sessions
    given = request.headers.get(SESSION)
    begins = message.get("method") == "initialize"
    if given is None or begins:
        caller = RouteCaller(request)
        server = McpServer(caller, services.version, permission(caller.identity))
    else:
        server = sessions.find(given, owner)
    if not is_request(message):
        await server.answer(message, _ignore)
        return Response(None, status_code=202)
    if _wants_events(request, message):
        return EventStreamResponse(_events(server, message), _STREAM)
    answer = await while_connected(request.receive, server.answer(message, _ignore))
    answer = answer or error_response(message["id"], RpcError(CANCELLED, "The client cancelled the request."))
    headers = {SESSION: sessions.open(owner, server)} if begins and "result" in answer else {}
    return Response(answer, headers=headers)


@delete("/mcp", status_code=204, sync_to_thread=False)
def end_session(request: StrictRequest) -> None:
    sessions: McpSessions = request.app.state.mcp_sessions
    sessions.close(request.headers.get(SESSION, ""), services_and_owner(request)[1])


def permission(identity: Identity) -> Callable[[Tool | Resource], bool]:
    """Return the function that decides which tools and resources a caller may use. Routes check again."""

    def may_use(tool: Tool | Resource) -> bool:
        if tool.scope is None:
            return True
        if tool.scope == "key":
            return identity.key is not None or identity.may("admin")
        # Without a key the guard let it in, on this machine: then `infer` and `read` are open too.
        return identity.may(tool.scope) or (identity.kind == "nobody" and tool.scope != "admin")

    return may_use


async def _read(request: StrictRequest) -> dict[str, Any]:
    version = request.headers.get(VERSION, VERSIONS[0])
    if version not in VERSIONS:
        known = ", ".join(VERSIONS)
        raise RpcError(INVALID_REQUEST, f"MCP {version[:32]!r} is not supported; {known} are.")
    try:
        return check_message(load(await request.body(), request.app.state.json_depth))
    except ApiError as error:
        raise RpcError(PARSE_ERROR, error.message) from None


def _wants_events(request: StrictRequest, message: dict[str, Any]) -> bool:
    meta = message.get("params", {}).get("_meta")
    accepts = "text/event-stream" in request.headers.get("accept", "")
    return accepts and isinstance(meta, dict) and "progressToken" in meta


async def _events(server: McpServer, message: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yield progress, then the response. Closing the generator ends the request."""
    ready: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    work = asyncio.create_task(server.answer(message, ready.put))
    work.add_done_callback(lambda _: ready.put_nowait(None))
    try:
        while (each := await ready.get()) is not None:
            yield data_event(each)
        if (answer := work.result()) is not None:
            yield data_event(answer)
    finally:
        work.cancel()


async def _ignore(_: dict[str, Any]) -> None:
    """Drop a notification: the answer is one JSON object."""


mcp_router = Router(
    "/",
    route_handlers=[receive_message, end_session],
    opt={"access": Access.KNOWN},
    include_in_schema=False,
)
