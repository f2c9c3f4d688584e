"""View of a key for people and programs: without the secret or its hash."""

import msgspec

from .key_store import LastUsed
from .keys import ApiKey


class KeyView(msgspec.Struct, kw_only=True):
    """Fields of a key that may be shown. Times are Unix seconds."""

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
    """Make the view of a key."""
    fields = msgspec.structs.asdict(key)
    del fields["digest"]
    return KeyView(**fields, expired=key.is_expired(), last_used=used.of(key.id))
