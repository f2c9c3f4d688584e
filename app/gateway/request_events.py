"""An open request as dashboards and `llmbox requests` see it. Cheap to import for readers elsewhere."""

from dataclasses import dataclass
from typing import Protocol

from ..store.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """Times in seconds."""

    id: str
    model: str
    endpoint: str
    key: str
    client: str
    state: str
    """`queued` until the engine gives a first sign, `decode` after the first token."""
    age: float
    stream: bool
    n: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: float | None
    tokens_per_second: float | None
    resumes: int
    looked_up_tokens: int = 0
    prefix_end: str = ""
    """As in `RequestRecord`; both are known from the first token on."""


class RequestObserver(Protocol):
    """Called on the event loop; must be quick and must not raise."""

    def opened(self, request: LiveRequest) -> None: ...

    def ended(self, record: RequestRecord, reason: str = "") -> None:
        """`reason`: the message of the error that the request ended with."""

    def refused(self, record: RequestRecord, reason: str = "") -> None: ...


class NullObserver:
    def opened(self, request: LiveRequest) -> None:
        pass

    def ended(self, record: RequestRecord, reason: str = "") -> None:
        pass

    def refused(self, record: RequestRecord, reason: str = "") -> None:
        pass
