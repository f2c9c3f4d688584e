"""What each key used, as the request log tells it. Importable without SQLAlchemy."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from .request_log import RequestLog

if TYPE_CHECKING:
    from sqlalchemy import Engine

log = logging.getLogger(__name__)


class Usage(Struct, frozen=True, kw_only=True):
    """Since `since`, the oldest row that is kept. Times are Unix seconds."""

    requests: int
    errors: int
    """Of these."""
    tokens_in: int
    tokens_out: int
    since: float
    last: float


async def usage_by_key(store: RequestLog) -> Mapping[str, Usage]:
    """By the key's name; those who needed no key under `""`. Empty while the log cannot be read."""
    try:
        return await store.read(_by_key, {})
    except Exception as error:  # noqa: BLE001 - a damaged or locked file: the keys themselves are still shown
        log.warning("what keys used cannot be read: %s", str(error).splitlines()[0])
        return {}


def _by_key(engine: "Engine") -> dict[str, Usage]:
    from .usage_queries import by_key  # noqa: PLC0415 - SQLAlchemy belongs to the store's threads

    return {
        key: Usage(requests=count, errors=errors, tokens_in=into, tokens_out=out, since=since, last=last)
        for key, count, errors, into, out, since, last in by_key(engine)
    }
