"""How many answers are stored, and whose; never what is in them."""

from typing import Any

from litestar import Request, get, post
from litestar.datastructures import State
from msgspec import Struct

from ...services import Services
from ...store.stored import Kind
from .schema import Purged


class StoredOfKey(Struct, kw_only=True):
    """Times are Unix seconds."""

    key: str
    """Its name; empty for callers without one."""
    kind: Kind
    answers: int
    size: int
    """Bytes."""
    oldest_at: float
    newest_at: float


class Stored(Struct):
    stored: list[StoredOfKey]


@get("/stored", name="admin_stored")
async def stored(request: Request[Any, Any, State]) -> Stored:
    services: Services = request.app.state.services
    rows = []
    for total in await services.stored.totals():
        key = services.security.keys.by_id(total.owner)
        rows.append(
            StoredOfKey(
                key=total.owner if key is None else key.name,
                kind=total.kind,
                answers=total.answers,
                size=total.size,
                oldest_at=total.oldest,
                newest_at=total.newest,
            )
        )
    return Stored(rows)


@post("/stored/forget", status_code=200, name="admin_stored_forget")
async def forget_stored(request: Request[Any, Any, State]) -> Purged:
    """Erases what belongs to keys that are no more, now and not within the hour."""
    services: Services = request.app.state.services
    return Purged(await services.stored.erase_owners_but(services.security.keys.ids()))
