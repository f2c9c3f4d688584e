"""One finished request as the log knows it: metadata only, never content."""

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Which records to read; newest first."""

    model: str | None = None
    status: int | None = None
    errors_only: bool = False
    since: float | None = None
    before_seq: int | None = None
    """Keyset paging: only rows older than this one."""
    limit: int = 50
