"""Open requests as the dashboards show them. Cheap to import."""

from dataclasses import dataclass
from typing import Protocol

from ..store.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """Snapshot of an open request. Times in seconds."""

    id: str
    model: str
    endpoint: str
    key: str
    client: str
    state: str
    """`queued` until the engine has scheduled it, `decode` after the first token."""
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
    """Reason of `RequestRecord.prefix_end`."""
    disk_tokens: int = 0
    """Tokens of `cached_tokens` that came from disk."""
    host_tokens: int = 0
    """Tokens of it that came from main memory to a GPU. These four are known from the first token on."""
    draft_tokens: int = 0
    """Draft tokens that were verified so far."""
    accepted_tokens: int = 0
    """Number of them that were accepted."""


class RequestObserver(Protocol):
    """Observer of requests. Called on the event loop; must be quick and must not raise."""

    def on_open(self, request: LiveRequest) -> None: ...

    def on_end(self, record: RequestRecord, reason: str = "") -> None:
        """Called when a request has ended. `reason`: the message of its error."""

    def on_refusal(self, record: RequestRecord, reason: str = "") -> None: ...


class NullObserver:
    """Observer that does nothing."""

    def on_open(self, request: LiveRequest) -> None:
        pass

    def on_end(self, record: RequestRecord, reason: str = "") -> None:
        pass

    def on_refusal(self, record: RequestRecord, reason: str = "") -> None:
        pass
