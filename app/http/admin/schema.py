"""Parameters and answer types of the admin API. Times: `*_s` are seconds, `*_at` Unix seconds."""

from typing import Annotated, Any, Literal

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import QueryParameter
from msgspec import Meta, Struct, field

from llmbox.engine.ipc.messages import EngineStats, ModelInfo, Progress

from ...config.entries import Scalar
from ...errors import ApiError
from ...store.record import LiveRequest
from ...telemetry.snapshot import ErrorRate


class QueueStatus(Struct, kw_only=True):
    """Measured times of a model's engine. Times in seconds."""

    ttft: float
    """Time to first token that a request with a short prompt would have now."""
    tpot: float
    """Time per output token that it would have."""
    admitted: int
    """Requests that `limits.admission` compared with latency targets and admitted."""
    refused: int
    missed: int
    """Admitted requests that missed a target."""
    problem: str
    """Reason why targets cannot be met at all; empty if they can."""
    prompt_ratio: float | None
    """Time of a decoding step that also computes prompts, divided by the time of one that does not."""
    prompt_share: float
    """Share of the decoding steps that also compute prompts."""
    disaggregate: str
    """Cores of `--disaggregate` by which prompts would no longer hold up running requests; empty where they
    do not, or where it is not possible."""
    engines: str = ""
    """Engines that `--disaggregate auto` chose, and why; empty without it."""


class ModelStatus(Struct, kw_only=True):
    name: str
    aliases: list[str]
    state: str
    cause: str
    path: str
    ref: str
    """Finds the model again: `builtin`, a Hub id or a directory."""
    chat: bool
    """True if the model has a chat template."""
    options: dict[str, Scalar]
    asked: dict[str, Scalar] = field(default_factory=dict)
    """Options that the load named; the other `options` come from the settings."""
    warnings: list[str] = field(default_factory=list)
    """Ignored declarations in the model's files, features that will not work, why slower kernels run."""
    error_code: str | None = None
    retry_s: int | None = None
    """Seconds until a failed model's engine is started again; null where it is not."""
    progress: Progress | None = None
    info: ModelInfo | None = None
    stats: EngineStats | None = None
    restarts: int = 0
    resumed: int = 0
    open_requests: int = 0
    loaded_at: float | None = None
    last_used: float | None = None
    adapters: list[str] = field(default_factory=list)
    """Names of the LoRA adapters in memory."""
    pinned: bool = False
    busy: bool = False
    ttl_s: float | None = None
    """Idle seconds after which it leaves memory."""
    expires_s: float | None = None
    """Seconds until then, if no request comes."""
    queue: QueueStatus | None = None
    """Null while no step was measured."""


class ModelStatusList(Struct):
    models: list[ModelStatus]
    evicted: dict[str, str] = field(default_factory=dict)
    """Folders of models that left memory for others, by name: a request brings them back."""


class ModelAnswer(Struct):
    model: ModelStatus


class LoadRequest(Struct, forbid_unknown_fields=True):
    model: str
    alias: str | None = None
    options: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    ttl: Annotated[float, Meta(ge=0, le=1e7)] | None = None
    """Idle seconds after which it leaves memory; absent or 0 keeps it."""


class PinRequest(Struct, forbid_unknown_fields=True):
    model: str
    pinned: bool = True


class UnloadRequest(Struct, forbid_unknown_fields=True):
    model: str | None
    """Model to unload. None unloads all."""


class UnloadedModels(Struct):
    unloaded: list[str]


class Status(Struct, kw_only=True):
    version: str
    pid: int
    url: str
    host: str
    port: int
    socket: str
    log_file: str
    config_file: str
    started_at: float
    uptime_s: float
    ready: bool
    cause: str
    draining: bool
    open_requests: int
    pending_restart: list[str]
    begun_with: dict[str, Any]
    models: list[ModelStatus]
    request_log_problem: str = ""
    """Reason why requests are not logged."""
    error_rates: tuple[ErrorRate, ...] = ()
    """Models with requests in the last five minutes; most failures first."""


class Setting(Struct):
    value: Scalar
    origin: str
    place: str
    default: Scalar
    live: bool


class Config(Struct):
    settings: dict[str, Setting]


class StatsTotals(Struct, kw_only=True):
    """Sums over the loaded models. Counters begin again when an engine restarts."""

    running: int = 0
    waiting: int = 0
    open_requests: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    restarts: int = 0
    resumed: int = 0


class ModelStats(Struct):
    name: str
    state: str
    stats: EngineStats


class Stats(Struct, kw_only=True):
    monotonic_s: float
    ready: bool
    cause: str
    total: StatsTotals
    models: list[ModelStats]
    log_rows_dropped: int


class RequestPage(Struct):
    in_flight: list[LiveRequest]
    requests: list[dict[str, Any]]
    """Fields of `RequestRecord` and `seq`, newest first."""
    dropped: int
    """Rows that never reached the disk."""
    problem: str = ""
    """Reason why `requests` is empty, where the log cannot be read."""


class PurgeRequest(Struct, forbid_unknown_fields=True):
    before: Annotated[float, Meta(ge=0, lt=1e11)]
    """Unix seconds."""
    what: Literal["requests", "content", "stored"] = "requests"
    """Rows with their contents, and stored answers; all prompts and answers; stored answers alone."""


class PurgedRows(Struct):
    purged: int


class CancelledRequest(Struct):
    cancelled: str


_LATEST = 1e11
Since = Annotated[float | None, QueryParameter(ge=0, le=_LATEST, description="Unix seconds.")]
Before = Annotated[int | None, QueryParameter(ge=0, le=2**63 - 1, description="A `seq`, for the next page.")]
HttpStatus = Annotated[int | None, QueryParameter(ge=100, le=599)]


def require_known_parameters(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Route guard. Raises ApiError 400: a misspelled filter must not answer with everything."""
    known = handler.parsed_fn_signature.parameters
    for name in connection.query_params:
        if name not in known or name in {"request", "data"}:
            shown = name[:64]
            others = ", ".join(sorted(set(known) - {"request", "data"} - set(connection.path_params)))
            takes = f"It takes {others}." if others else "It takes none."
            raise ApiError(
                400, f"This route has no query parameter {shown!r}. {takes}", "unknown_parameter", shown
            )
