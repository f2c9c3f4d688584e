"""Reservations in a model's queue while requests are rendered and tokenized, which takes time."""

import asyncio
from collections import Counter


class QueueReservations:
    """Places of one model reserved by requests that are not submitted yet."""

    def __init__(self) -> None:
        self.places = 0
        self.of_tenant: Counter[str] = Counter()

    def hold(self, places: int, tenant: str = "") -> "QueueReservation":
        """Reserve places until they are released or the running task ends, whichever is first."""
        return QueueReservation(self, places, tenant)

    def add(self, places: int, tenant: str) -> None:
        """Count reserved places. `places` is negative when they are given back."""
        self.places += places
        self.of_tenant[tenant] += places
        if not self.of_tenant[tenant]:
            del self.of_tenant[tenant]


class QueueReservation:
    """Reservation of one request. `release` gives it back, once."""

    __slots__ = ("_of", "_places", "_tenant")

    def __init__(self, of: QueueReservations, places: int, tenant: str) -> None:
        self._of = of
        self._places = places
        self._tenant = tenant
        of.add(places, tenant)
        task = asyncio.current_task()
        assert task is not None, "requests are prepared on the event loop"
        task.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        self._of.add(-self._places, self._tenant)
        self._places = 0
