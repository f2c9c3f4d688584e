"""API keys: list, create, rotate, revoke; and links that sign a browser in."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from litestar import delete, get, patch, post
from litestar.params import FromPath, JSONBody
from msgspec import Struct

from ...control.controller import DaemonController
from ...control.kv_cache import purge_key
from ...errors import ApiError, CliError, Exit
from ...security.key_store import KeyView, view
from ...security.keys import ApiKey, KeyChange, KeySpec
from ...security.security import TOKEN_LIFE, Security
from ...services import Services
from ...store.conversations import ToolServerSecrets
from ...store.record import StoreError
from ...store.usage import KeyUsage, usage_by_key
from ..server.request import StrictRequest

log = logging.getLogger(__name__)

T = TypeVar("T")
_STATUS = {
    Exit.NOT_FOUND: (404, "key_not_found", "invalid_request_error"),
    Exit.CONFLICT: (409, "key_exists", "invalid_request_error"),
}


class Keys(Struct):
    keys: list[KeyView]
    usage: dict[str, KeyUsage]
    """Usage by the key's name, as far back as the request log goes."""


class NewKey(Struct):
    """A created key. Its secret is shown this one time only."""

    key: KeyView
    secret: str


class RevokedKey(Struct):
    revoked: str


class SignInLink(Struct):
    url: str
    expires_in: float
    """Seconds."""


@get("/keys")
async def keys(request: StrictRequest) -> Keys:
    services = request.services
    security = services.security
    usage = await usage_by_key(services.request_log)
    known = security.keys.list()
    return Keys(
        [view(key, security.used, security.quotas) for key in known],
        {key.name: usage[key.name] for key in known if key.name in usage},
    )


@post("/keys", status_code=201)
async def add_key(request: StrictRequest, data: JSONBody[KeySpec]) -> NewKey:
    security = _security(request)
    key, secret = await changing(lambda: security.keys.add(data))
    return NewKey(view(key, security.used, security.quotas), secret)


@post("/keys/{name:str}/rotate", status_code=200)
async def rotate_key(request: StrictRequest, name: FromPath[str]) -> NewKey:
    """Give a key a new secret; the old one is refused from now on."""
    security = _security(request)
    key, secret = await changing(lambda: security.keys.rotate(name))
    return NewKey(view(key, security.used, security.quotas), secret)


@patch("/keys/{name:str}")
async def change_key(request: StrictRequest, name: FromPath[str], data: JSONBody[KeyChange]) -> KeyView:
    """Change limits, quotas and permissions of a key; null removes a limit. Its secret stays."""
    security = _security(request)
    key = await changing(lambda: security.keys.change(name, data))
    return view(key, security.used, security.quotas)


@delete("/keys/{name:str}", status_code=200)
async def revoke_key(request: StrictRequest, name: FromPath[str]) -> RevokedKey:
    return RevokedKey((await revoke(request.services, name)).name)


@post("/signin-link", status_code=200, sync_to_thread=False)
def sign_in_link(request: StrictRequest) -> SignInLink:
    control: DaemonController = request.app.state.control
    url = _security(request).sign_in_link(control.running.url)
    return SignInLink(url, TOKEN_LIFE)


async def revoke(services: Services, name: str) -> ApiKey:
    """Revoke a key and erase the data that it stored. Raises ApiError."""
    gone = await changing(lambda: services.security.revoke(name))
    await asyncio.to_thread(purge_key, services.paths, services.settings.cache, gone.id)
    try:
        await erase_stored_of_gone_keys(services)
    except (StoreError, ApiError) as error:
        log.warning("what the key %s had stored goes within the hour: %s", name, error)
    return gone


async def erase_stored_of_gone_keys(services: Services) -> int:
    """Erase the data that revoked keys stored. Returns the number of rows. Raises StoreError or ApiError
    after it has erased as much as possible.
    """
    known = services.security.keys.ids()
    try:
        return await services.stored.erase_owners_but(known)
    finally:
        await asyncio.to_thread(ToolServerSecrets(services.paths.mcp_secrets_file).keep_owners, known)


async def changing(change: Callable[[], T]) -> T:
    """Run `change` in a thread, as the disk may be slow. Raises ApiError, whose text names no path."""
    try:
        return await asyncio.to_thread(change)
    except CliError as error:
        status, code, kind = _STATUS.get(error.exit, (500, "storage_failed", "server_error"))
        why = error.why.partition(":")[0]
        raise ApiError(
            status, f"{error.what[:1].upper()}{error.what[1:]}: {why}.", code, None, kind
        ) from error


def _security(request: StrictRequest) -> Security:
    return request.services.security
