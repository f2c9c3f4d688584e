"""A key as people and programs see it: without what could open anything."""

import msgspec

from .key_store import LastUsed
from .keys import ApiKey


class KeyView(msgspec.Struct, kw_only=True):
    """Times are Unix seconds."""

    id: str
    name: str
    display: str
    scopes: tuple[str, ...]
    models: tuple[str, ...]
    expires: float | None
    expired: bool
    rpm: int | None
    tpm: int | None
    priority: int
    log_content: bool
    created: float
    rotated: float | None
    last_used: float | None


def view(key: ApiKey, used: LastUsed) -> KeyView:
    told = msgspec.structs.asdict(key)
    del told["digest"]
    return KeyView(**told, expired=key.is_expired(), last_used=used.of(key.id))
