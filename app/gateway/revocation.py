"""Cancels open requests whose credentials end: a key revoked, rotated or expired, a session signed out.

Another process may change the key file, so it is checked while such requests are open, and only then.
"""

import asyncio
from collections.abc import Mapping

from ..errors import ApiError
from .open_request import OpenRequest

INTERVAL = 0.25
"""Seconds between two checks. A check costs one stat of the key file and a dictionary look-up per request."""


class RevocationWatcher:
    """Periodic check of the open requests. Use it only from the daemon's event loop."""

    def __init__(self, requests: Mapping[str, OpenRequest]) -> None:
        """`requests`: the open requests; the mapping is owned and kept up to date by the caller."""
        self._requests = requests
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, request: OpenRequest) -> None:
        if request.generation.still_authorized is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        for request in list(self._requests.values()):
            allowed = request.generation.still_authorized
            if allowed is not None and not allowed():
                request.cancel(_no_longer())
        for request in self._requests.values():
            self.watch(request)


def _no_longer() -> ApiError:
    return ApiError(
        401,
        "The credentials of this request hold no longer: the key was revoked or has expired.",
        "invalid_api_key",
        None,
        "authentication_error",
    )
