"""JSON-RPC of the Model Context Protocol (MCP), and the server side of a connection.

It knows no transport: `McpServer.answer` takes a decoded message and returns the response to it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from .features import Resource, Tool, ToolApi, ToolCaller, ToolError, resources
from .tools import TOOLS

log = logging.getLogger(__name__)

VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
"""Protocol versions that both sides speak, newest first."""

RESOURCE_NOT_FOUND: Final = -32002
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = (
    -32700,
    -32600,
    -32601,
    -32602,
    -32603,
)
INSTRUCTIONS: Final = (
    "llmbox serves language models on this machine. Before a download ask check_fit whether the model fits; "
    "recommended_models lists models that were tried, by short names. pull_model and load_model go on in the "
    "daemon after they answered: call them again to wait longer."
)

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends a notification to the client while a request is under way."""


class RpcError(Exception):
    """Error object of JSON-RPC: the message itself is wrong, not what a tool did."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def error_response(id_: Any, error: RpcError) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "error": {"code": error.code, "message": str(error)}}


def decode_message(data: bytes | str) -> dict[str, Any]:
    """Decode one message. Raises RpcError."""
    try:
        message = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RpcError(PARSE_ERROR, f"The message is not valid JSON: {error}.") from None
    return check_message(message)


def check_message(message: Any) -> dict[str, Any]:
    """Check the envelope of a message. Raises RpcError; batches are refused, as newer versions have none."""
    if isinstance(message, list):
        raise RpcError(INVALID_REQUEST, "Batches are not supported. Send each message by itself.")
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, 'A message is a JSON object with "jsonrpc": "2.0".')
    if "method" not in message and "result" not in message and "error" not in message:
        raise RpcError(INVALID_REQUEST, 'A message needs "method", "result" or "error".')
    if not isinstance(message.get("method", ""), str):
        raise RpcError(INVALID_REQUEST, '"method" must be a string.')
    id_ = message.get("id")
    if isinstance(id_, bool) or not isinstance(id_, str | int | None) or ("id" in message and id_ is None):
        raise RpcError(INVALID_REQUEST, '"id" must be a string or an integer.')
    if not isinstance(message.get("params", {}), dict):
        raise RpcError(INVALID_PARAMS, '"params" must be an object.')
    return message


def is_request(message: dict[str, Any]) -> bool:
    return "method" in message and "id" in message


class McpServer:
    """Server side of one connection or session. `may_use` decides which tools and resources are open."""

    def __init__(self, caller: ToolCaller, version: str, may_use: Callable[[Tool | Resource], bool]) -> None:
        self._caller = caller
        self._version = version
        self._may_use = may_use
        self._running: dict[str | int, asyncio.Task[dict[str, Any]]] = {}

    async def answer(self, message: dict[str, Any], send: Send) -> dict[str, Any] | None:
        """Return the response to a checked message; None for a notification, a response and a request that
        the client cancelled.
        """
        if not is_request(message):
            self._notice(message)
            return None
        id_ = message["id"]
        if id_ in self._running:
            return error_response(id_, RpcError(INVALID_REQUEST, f"The id {id_!r} is in use."))
        task = asyncio.create_task(self._result(message, send))
        self._running[id_] = task
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # this caller may be cancelled itself
            del self._running[id_]
        if task.cancelled():
            return None
        try:
            return {"jsonrpc": "2.0", "id": id_, "result": task.result()}
        except RpcError as error:
            return error_response(id_, error)
        except Exception:
            log.exception("the MCP request %s failed", message["method"])
            return error_response(id_, RpcError(INTERNAL_ERROR, "Something went wrong inside llmbox."))

    def _notice(self, message: dict[str, Any]) -> None:
        if message.get("method") == "notifications/cancelled":
            task = self._running.get(message.get("params", {}).get("requestId"))
            if task is not None:
                task.cancel()

    async def _result(self, message: dict[str, Any], send: Send) -> dict[str, Any]:
        params = message.get("params", {})
        match message["method"]:
            case "initialize":
                return self._initialize(params)
            case "ping":
                return {}
            case "tools/list":
                return {"tools": [tool.describe() for tool in TOOLS.values() if self._may_use(tool)]}
            case "tools/call":
                return await self._call(params, send)
            case "resources/list":
                return {
                    "resources": [each.describe() for each in resources().values() if self._may_use(each)]
                }
            case "resources/templates/list":
                return {"resourceTemplates": []}
            case "resources/read":
                return await self._read(params)
            case method:
                has = "it has tools and resources"
                raise RpcError(METHOD_NOT_FOUND, f"This server has no method {method[:64]!r}; {has}.")

    def _initialize(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = params.get("protocolVersion")
        if not isinstance(asked, str):
            raise RpcError(INVALID_PARAMS, '"protocolVersion" is missing.')
        return {
            "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {}, "resources": {}},
            "serverInfo": {"name": "llmbox", "title": "llmbox", "version": self._version},
            "instructions": INSTRUCTIONS,
        }

    async def _read(self, params: dict[str, Any]) -> dict[str, Any]:
        uri = params.get("uri")
        found = resources().get(uri) if isinstance(uri, str) else None
        if found is None:
            text = f"There is no resource {str(uri)[:64]!r}. resources/list names those there are."
            raise RpcError(RESOURCE_NOT_FOUND, text)
        if not self._may_use(found):
            raise RpcError(INVALID_REQUEST, _refusal(found.uri, found.scope))
        try:
            return await found.contents(ToolApi(self._caller))
        except ToolError as error:
            raise RpcError(INTERNAL_ERROR, str(error)) from None

    async def _call(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        tool = TOOLS.get(name) if isinstance(name, str) else None
        if tool is None:
            names = ", ".join(each.name for each in TOOLS.values() if self._may_use(each))
            raise RpcError(INVALID_PARAMS, f"There is no tool {str(name)[:64]!r}. The tools are {names}.")
        if not self._may_use(tool):
            return _failure(_refusal(tool.name, tool.scope))
        try:
            result = await tool.call(self._caller, arguments, _reporter(params, send))
        except ToolError as error:
            return _failure(str(error))
        content = result if isinstance(result, str) else msgspec.json.encode(result).decode()
        structured = {} if isinstance(result, str) else {"structuredContent": result}
        return {"content": [_text(content)], **structured, "isError": False}


def _refusal(name: str, scope: str | None) -> str:
    option = "" if scope == "key" else f" --scope {scope}"
    return (
        f"This client may not use {name}. Give it a key made with llmbox key add NAME{option}, "
        "or run llmbox mcp on the machine itself."
    )


def _failure(text: str) -> dict[str, Any]:
    return {"content": [_text(text)], "isError": True}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _reporter(params: dict[str, Any], send: Send) -> Callable[[float, float | None, str], Awaitable[None]]:
    """Return a function that reports progress, if the client asked for it."""
    meta = params.get("_meta")
    token = meta.get("progressToken") if isinstance(meta, dict) else None

    async def report(done: float, total: float | None, text: str) -> None:
        if not isinstance(token, str | int):
            return
        progress = {"progressToken": token, "progress": done, "message": text}
        if total is not None:
            progress["total"] = total
        await send({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})

    return report
