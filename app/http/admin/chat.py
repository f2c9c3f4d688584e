"""Conversations and presets of the panel's chat, and the MCP servers whose tools it may call.

Each caller has its own.
"""

import asyncio
import getpass
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from litestar import delete, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Meta, Struct

from ...errors import ApiError
from ...mcp.client import ServerResult, ServerTool
from ...sandbox.pool import read_pdf
from ...services import Services
from ...store.conversations import (
    MOST_MESSAGES,
    ChatPreset,
    ChatToolServer,
    ConversationBody,
    Conversations,
    PanelItems,
    ToolServerSecrets,
    has_values,
    without_values,
)
from ..auth.guard import services_and_owner
from ..server.request import StrictRequest
from ..server.sse import while_connected

MOST_ITEMS: Final = 100
_PRESET_NAME = re.compile(r"[^\x00-\x1f/]{1,80}")
_SERVER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,23}")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_TEXT = re.compile(r"[\x20-\x7e]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_OWN_HEADERS: Final = frozenset({"host", "content-length", "content-type", "accept", "transfer-encoding"})


class SaveServer(ChatToolServer, kw_only=True, forbid_unknown_fields=True):
    confirmed: bool = False
    """The caller has confirmed the program and the user that it runs as."""


class ChangeServer(Struct, kw_only=True, forbid_unknown_fields=True):
    allowed: bool | None = None
    trust: Mapping[str, bool] = {}
    """Tools to call without asking (true), or to ask for again (false)."""


class CallTool(Struct, kw_only=True, forbid_unknown_fields=True):
    tool: Annotated[str, Meta(min_length=1, max_length=200)]
    arguments: dict[str, Any] = {}


class ServerView(Struct, kw_only=True):
    """Server without its secrets: of headers and variables only the names."""

    name: str
    url: str
    host: str
    """Host that the tools' arguments are sent to; empty for a program on this machine."""
    command: list[str]
    headers: list[str]
    environment: list[str]
    allowed: bool
    trusted: list[str]


class ServerList(Struct):
    servers: list[ServerView]
    commands_allowed: bool
    """Programs may be added (`server.mcp_commands`)."""
    user: str
    """User that programs run as."""


class ServerTools(Struct):
    tools: list[ServerTool]


@get("/chat/presets")
async def presets(request: StrictRequest) -> dict[str, dict[str, ChatPreset]]:
    services, owner = services_and_owner(request)
    return {"presets": await PanelItems(services.request_log, ChatPreset).all(owner)}


@put("/chat/presets/{name:str}", status_code=200)
async def save_preset(
    request: StrictRequest, name: FromPath[str], data: JSONBody[ChatPreset]
) -> dict[str, str]:
    """Save a preset, replacing one of the same name."""
    if not _PRESET_NAME.fullmatch(name) or name != name.strip():
        raise _bad("A preset's name has 1 to 80 characters and no slash.", "name")
    services, owner = services_and_owner(request)
    items = PanelItems(services.request_log, ChatPreset)
    _require_room(await items.all(owner), name)
    await items.put(owner, name, data)
    return {"name": name}


@delete("/chat/presets/{name:str}", status_code=200)
async def delete_preset(request: StrictRequest, name: FromPath[str]) -> dict[str, str]:
    services, owner = services_and_owner(request)
    if not await PanelItems(services.request_log, ChatPreset).delete(owner, name):
        raise ApiError(404, f"No preset {name[:80]!r} is known.", "not_found", "name")
    return {"name": name}


@get("/chat/servers")
async def servers(request: StrictRequest) -> ServerList:
    """List the caller's MCP servers. None is contacted."""
    services, owner = services_and_owner(request)
    found = await _servers_of(services, owner)
    views = [_view(name, each) for name, each in found.items()]
    return ServerList(views, services.settings.server.mcp_commands, getpass.getuser())


@put("/chat/servers/{name:str}", status_code=200)
async def save_server(request: StrictRequest, name: FromPath[str], data: JSONBody[SaveServer]) -> ServerView:
    """Save a server, replacing one of the same name. A program needs the setting and `confirmed`."""
    services, owner = services_and_owner(request)
    if not _SERVER_NAME.fullmatch(name):
        raise _bad("A server's name has 1 to 24 small letters, digits and dashes.", "name")
    if bool(data.url) == bool(data.command):
        raise _bad("A server has either a URL or a command.", "url")
    if data.command:
        _check_command(services, data)
    else:
        _check_url(data)
    _require_room(await _servers_of(services, owner), name)
    names = ChatToolServer.__struct_fields__
    spec = ChatToolServer(**{field: getattr(data, field) for field in names})
    await _keep(services, owner, name, spec)
    services.mcp_clients.leave(owner, name)
    return _view(name, spec)


@post("/chat/servers/{name:str}", status_code=200)
async def change_server(
    request: StrictRequest, name: FromPath[str], data: JSONBody[ChangeServer]
) -> ServerView:
    """Allow a server or not, trust its tools or not."""
    services, owner = services_and_owner(request)
    spec = await _find(services, owner, name)
    if data.allowed is not None:
        spec.allowed = data.allowed
    trusted = {*spec.trusted, *(tool for tool, trust in data.trust.items() if trust)}
    spec.trusted = sorted(trusted - {tool for tool, trust in data.trust.items() if not trust})
    await PanelItems(services.request_log, ChatToolServer).put(owner, name, spec)
    if not spec.allowed:
        services.mcp_clients.leave(owner, name)
    return _view(name, spec)


@delete("/chat/servers/{name:str}", status_code=200)
async def delete_server(request: StrictRequest, name: FromPath[str]) -> dict[str, str]:
    services, owner = services_and_owner(request)
    services.mcp_clients.leave(owner, name)
    if not await PanelItems(services.request_log, ChatToolServer).delete(owner, name):
        raise _unknown(name)
    await asyncio.to_thread(_secrets(services).remove, owner, name)
    return {"name": name}


@post("/chat/servers/{name:str}/tools", status_code=200)
async def server_tools(request: StrictRequest, name: FromPath[str]) -> ServerTools:
    """Connect to an allowed server, if needed, and list its tools."""
    services, owner = services_and_owner(request)
    spec = await _usable(services, owner, name)
    return ServerTools(await while_connected(request.receive, services.mcp_clients.tools(owner, name, spec)))


@post("/chat/servers/{name:str}/call", status_code=200)
async def call_tool(request: StrictRequest, name: FromPath[str], data: JSONBody[CallTool]) -> ServerResult:
    """Call a tool of an allowed server. The call is cancelled when the client leaves."""
    services, owner = services_and_owner(request)
    spec = await _usable(services, owner, name)
    work = services.mcp_clients.call(owner, name, spec, data.tool, data.arguments)
    return await while_connected(request.receive, work)


@post("/chat/pdf", status_code=200)
async def pdf_text(request: StrictRequest) -> dict[str, Any]:
    """Return the text of a PDF, the body of this request, for a question that it is attached to."""
    found = await while_connected(request.receive, read_pdf(await request.body()))
    if "error" in found:
        raise ApiError(400, f"The PDF has no text to attach: {found['error']}.", "pdf_unreadable")
    return found


def _check_command(services: Services, data: SaveServer) -> None:
    _require_commands(services)
    if not data.confirmed:
        user = getpass.getuser()
        raise _bad(f"Confirm that {data.command[0]} is to run as {user} on this machine.", "confirmed")
    if not data.command[0] or any("\0" in part for part in data.command):
        raise _bad("A command begins with a program and has no null characters.", "command")
    if data.headers:
        raise _bad("Headers belong to a server with a URL.", "headers")
    for name, value in data.environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise _bad(f"{name[:64]!r} is not a valid name of an environment variable.", "environment")


def _check_url(data: SaveServer) -> None:
    try:
        parts = urlsplit(data.url)
        good = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or parts.username is not None or not re.fullmatch(r"[\x21-\x7e]+", data.url):
        raise _bad("A URL begins with http:// or https:// and has no name or password in it.", "url")
    if data.environment:
        raise _bad("Environment variables belong to a server with a command.", "environment")
    for name, value in data.headers.items():
        if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS or not _TEXT.fullmatch(value):
            raise _bad(f"The header {name[:64]!r} cannot be set to this value.", "headers")


def _require_commands(services: Services) -> None:
    if not services.settings.server.mcp_commands:
        raise ApiError(
            403,
            "Programs are not allowed as MCP servers here. On the machine itself, run: llmbox config set "
            "server.mcp_commands true",
            "mcp_commands_off",
            "command",
            "permission_error",
        )


async def _find(services: Services, owner: str, name: str) -> ChatToolServer:
    found = (await _servers_of(services, owner)).get(name)
    if found is None:
        raise _unknown(name)
    return found


async def _usable(services: Services, owner: str, name: str) -> ChatToolServer:
    spec = await _find(services, owner, name)
    if not spec.allowed:
        message = f"The MCP server {name} is not allowed. Allow it under Tools in the chat."
        raise ApiError(403, message, "mcp_server_not_allowed", "name", "permission_error")
    if spec.command:
        _require_commands(services)
    return await asyncio.to_thread(_secrets(services).filled, owner, name, spec)


async def _servers_of(services: Services, owner: str) -> dict[str, ChatToolServer]:
    """Return a caller's servers by name, without secrets. Secrets that are still in the database are moved
    out of it.
    """
    found = await PanelItems(services.request_log, ChatToolServer).all(owner)
    for name, spec in found.items():
        if has_values(spec):
            await _keep(services, owner, name, spec)
            found[name] = without_values(spec)
    return found


async def _keep(services: Services, owner: str, name: str, spec: ChatToolServer) -> None:
    """Save a server, its secrets first: one without them could not be used."""
    await asyncio.to_thread(_secrets(services).save, owner, name, spec)
    await PanelItems(services.request_log, ChatToolServer).put(owner, name, without_values(spec))


def _secrets(services: Services) -> ToolServerSecrets:
    return ToolServerSecrets(services.paths.mcp_secrets_file)


def _view(name: str, spec: ChatToolServer) -> ServerView:
    return ServerView(
        name=name,
        url=spec.url,
        host=urlsplit(spec.url).netloc if spec.url else "",
        command=list(spec.command),
        headers=sorted(spec.headers),
        environment=sorted(spec.environment),
        allowed=spec.allowed,
        trusted=list(spec.trusted),
    )


def _require_room(items: Mapping[str, Any], name: str) -> None:
    if len(items) >= MOST_ITEMS and name not in items:
        raise ApiError(400, f"{MOST_ITEMS} are kept at most. Delete one first.", "too_many", "name")


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"No MCP server {name[:64]!r} is known.", "not_found", "name")


def _bad(message: str, param: str) -> ApiError:
    return ApiError(400, message, "invalid_value", param)


_ID = re.compile(r"[A-Za-z0-9-]{8,64}")
MOST_TITLE = 200


@get("/conversations")
async def conversations(request: StrictRequest, text: FromQuery[str] = "") -> dict[str, Any]:
    """List the caller's conversations that contain `text`, the last changed first."""
    store, owner = _store(request)
    return {"conversations": await store.list(owner, text.strip())}


@get("/conversations/{id_:str}")
async def conversation(request: StrictRequest, id_: FromPath[str]) -> ConversationBody:
    store, owner = _store(request)
    found = await store.get(owner, id_)
    if found is None:
        raise _unknown_conversation(id_)
    return found


@put("/conversations/{id_:str}", status_code=200)
async def save_conversation(
    request: StrictRequest, id_: FromPath[str], data: JSONBody[ConversationBody]
) -> dict[str, Any]:
    """Save a conversation, replacing one of the same id."""
    if not _ID.fullmatch(id_):
        raise ApiError(
            400, "The id of a conversation has 8 to 64 letters, digits and dashes.", "invalid_value", "id"
        )
    if not 1 <= len(data.title) <= MOST_TITLE:
        raise ApiError(400, f"A title has 1 to {MOST_TITLE} characters.", "invalid_value", "title")
    if len(data.messages) > MOST_MESSAGES:
        message = f"A conversation has at most {MOST_MESSAGES:,} messages. Begin a new one."
        raise ApiError(400, message, "invalid_value", "messages")
    known = {message.id for message in data.messages}
    if len(known) < len(data.messages) or not {message.parent for message in data.messages} <= known | {""}:
        message = "Each message needs an id of its own, and a parent among the messages."
        raise ApiError(400, message, "invalid_value", "messages")
    store, owner = _store(request)
    await store.put(owner, id_, data)
    return {"id": id_}


@delete("/conversations/{id_:str}", status_code=200)
async def delete_conversation(request: StrictRequest, id_: FromPath[str]) -> dict[str, Any]:
    store, owner = _store(request)
    if not await store.delete(owner, id_):
        raise _unknown_conversation(id_)
    return {"id": id_, "deleted": True}


def _store(request: StrictRequest) -> tuple[Conversations, str]:
    services, owner = services_and_owner(request)
    return Conversations(services.request_log), owner


def _unknown_conversation(id_: str) -> ApiError:
    return ApiError(404, f"No conversation {id_[:64]!r} is known.", "not_found", "id")
