"""One finished request as the log knows it, without what was asked and answered (`Content`)."""

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
"""Error codes of answers 503 that are no failure: the box is busy, starts or ends, or an operator said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times are in seconds; `created` is Unix time, the rest are durations."""

    id: str
    created: float
    model: str
    endpoint: str
    http_status: int
    key: str = ""
    stream: bool = False
    finish_reasons: str = ""
    """One word a choice, comma separated."""
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
    """How often the request went on after an engine restart."""
    seed: int | None = None
    params: str = "{}"
    """JSON of the sampling parameters."""
    client: str = ""
    looked_up_tokens: int = 0
    """Prompt tokens that the prefix cache was asked for."""
    prefix_end: str = ""
    """Why it had no more: one `PrefixEnd` a prompt, comma separated. Empty where no first token came."""
    output_hash: str = ""
    """Keyed hash of the answer's token ids (`app/gateway/output_hash.py`); empty where there is none."""
    fingerprint: str = ""
    """Of build and settings: another one may well answer otherwise."""
    tier: str = ""
    """`premium`, `standard` or `background`, by its priority; empty where it reached no engine."""
    content: ContentState = ""
    """Empty: nobody allowed it to be kept. `dropped`: allowed, but the disk or the queue was full."""

    @property
    def is_failure(self) -> bool:
        """The server's fault: 5xx, errors of engines included; not callers' 4xx, not cancellations (499)."""
        return self.http_status >= 500 and self.error_code not in NOT_NOW


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Which records to read; newest first."""

    model: str | None = None
    key: str | None = None
    status: int | None = None
    errors_only: bool = False
    since: float | None = None
    before_seq: int | None = None
    """Keyset paging: only rows older than this one."""
    limit: int = 50
