"""Log record of one finished request, without prompt and answer (`Content`)."""

from dataclasses import dataclass
from typing import Final, Literal

ContentState = Literal["", "kept", "dropped"]
NOT_NOW: Final = {
    "model_loading",
    "model_unloaded",
    "memory_busy",
    "too_many_connections",
    "shutting_down",
    "server_shutdown",
    "draining",
}
"""Error codes of 503 answers that are no failure: the box is busy, starting or stopping, or an operator
decided.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One row of the request log. Times are in seconds; `created` is Unix time, the rest are durations."""

    id: str
    created: float
    model: str
    endpoint: str
    http_status: int
    key: str = ""
    stream: bool = False
    finish_reasons: str = ""
    """One word per choice, comma separated."""
    error_code: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    n: int = 1
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean time per output token after the first."""
    e2e_s: float | None = None
    resumes: int = 0
    """Number of resumes after an engine restart."""
    seed: int | None = None
    params: str = "{}"
    """JSON of the sampling parameters."""
    client: str = ""
    looked_up_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_end: str = ""
    """Reason why the prefix cache had no more: one `PrefixMissReason` per prompt, comma separated. Empty
    without a first token.
    """
    output_hash: str = ""
    """Keyed hash of the answer's token ids (`app/gateway/output_hash.py`); empty where there is none."""
    fingerprint: str = ""
    """Hash of build and settings: with another one the same request may get another answer."""
    tier: str = ""
    """`premium`, `standard` or `background`, by its priority; empty if it reached no engine."""
    content: ContentState = ""
    """Empty: not allowed to be kept. `dropped`: allowed, but the disk or the queue was full."""

    @property
    def is_failure(self) -> bool:
        """Return whether the server failed: 5xx, engine errors included; not 4xx, not cancellations (499)."""
        return self.http_status >= 500 and self.error_code not in NOT_NOW


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Filter of records to read, newest first."""

    model: str | None = None
    key: str | None = None
    status: int | None = None
    errors_only: bool = False
    since: float | None = None
    before_seq: int | None = None
    """Keyset paging: only rows older than this one."""
    limit: int = 50
