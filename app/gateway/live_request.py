"""An open request as dashboards and `llmbox requests` see it. Cheap to import for readers elsewhere."""

from dataclasses import dataclass


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
