"""Who is told of requests as they come and go."""

from typing import Protocol

from ..store.record import RequestRecord
from .live_request import LiveRequest


class RequestObserver(Protocol):
    """Called on the event loop; must be quick and must not raise."""

    def opened(self, request: LiveRequest) -> None: ...

    def ended(self, record: RequestRecord, reason: str = "") -> None:
        """`reason`: the message of the error that the request ended with."""

    def refused(self, record: RequestRecord, reason: str = "") -> None: ...


class Unobserved:
    def opened(self, request: LiveRequest) -> None:
        pass

    def ended(self, record: RequestRecord, reason: str = "") -> None:
        pass

    def refused(self, record: RequestRecord, reason: str = "") -> None:
        pass
