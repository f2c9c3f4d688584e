"""All settings by section: key, type, default, range and documentation, each defined once.

Settings are immutable: a reload makes a new object (see `loader`). `schema` makes one table of
them, for the TOML file, `LLMBOX_SECTION_KEY` variables, command-line flags, `llmbox config` and the docs.
"""

from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from .entries import COLLECTOR, NETWORK, ORIGIN, PRICE, TARGET, EntryCheck, Scalar, key, live_key
from .model_settings import CacheSettings, MemorySettings, ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = key("127.0.0.1", "Address to listen on; 127.0.0.1 also listens on ::1.")
    port: int = key(7411, "TCP port of the API; 0 picks a free port.", low=0, high=65535)
    tls: bool = key(False, "Serve HTTPS, with server.tls_certificate or a self-signed certificate of llmbox.")
    tls_certificate: str = key(
        "", "PEM file of the certificate and its chain; empty: a self-signed certificate of llmbox."
    )
    tls_key: str = key("", "PEM file of the certificate's private key, without a password.")
    mdns: bool = key(False, "Announce the daemon by mDNS when other machines can connect; needs zeroconf.")
    models: tuple[str, ...] = key(("builtin",), "Models loaded at start when the command names none.")
    allowed_hosts: tuple[str, ...] = key(
        (), "Additional names to accept in the Host header, as host or host:port."
    )
    cors_origins: tuple[str, ...] = key(
        (),
        "Origins of web pages that may call the API from a browser, as https://host or http://host:port; "
        "never the panel or the admin API.",
        each=ORIGIN,
    )
    trusted_proxies: tuple[str, ...] = key(
        (),
        "Addresses of reverse proxies whose X-Forwarded-For header is trusted; from others it is ignored.",
        each=NETWORK,
    )
    require_key: bool = live_key(
        False,
        "Require an API key on this machine too. When other machines can connect, one is always required.",
    )
    fetch_images: bool = live_key(
        False, "Fetch images that requests name by an http or https URL, from public addresses only."
    )
    mcp_commands: bool = live_key(
        False, "Let the chat start local programs as MCP servers, run as this user."
    )
    drain_timeout: float = key(
        30.0,
        "Seconds that open requests may take after SIGTERM before they end with an error.",
        low=0,
        high=3600,
    )
    restart_cooldown: float = key(
        30.0,
        "Seconds before a model whose engine died five times in a minute is started again; doubled after "
        "each failure. 0: only llmbox load starts it.",
        low=0,
        high=86_400,
    )
    restart_cooldown_max: float = key(
        900.0, "Upper limit of the doubled server.restart_cooldown, in seconds.", low=1, high=86_400
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    body_bytes: int = key(2_000_000, "Maximum size of a request body in bytes.", low=1024, high=1 << 30)
    file_bytes: int = key(100_000_000, "Maximum size of an uploaded file in bytes.", low=1024, high=1 << 36)
    open_body_bytes: int | None = key(
        None,
        "Maximum size of the bodies of all open requests in bytes; further ones get 503, those of more than "
        "64 KiB from seven eighths on. auto: 1/128 of the memory (a cgroup's limit counts), 1 GB at most.",
        low=1 << 20,
        high=1 << 40,
    )
    image_body_bytes: int = key(
        32_000_000,
        "Maximum size of the body of a request that may contain images, in bytes.",
        low=1024,
        high=1 << 30,
    )
    image_bytes: int = key(
        20_000_000, "Maximum size of an image file in a request, in bytes.", low=1024, high=1 << 28
    )
    image_pixels: int = key(40_000_000, "Maximum number of pixels of an image.", low=1024, high=1 << 28)
    images: int = key(64, "Maximum number of images in one request.", low=0, high=10_000)
    header_line_bytes: int = key(
        16_384, "Maximum length of a header line, request line included, in bytes.", low=1024, high=1 << 20
    )
    header_count: int = key(100, "Maximum number of headers of one request.", low=8, high=10_000)
    header_timeout: float = key(15.0, "Seconds for a client to send its headers.", low=0.1, high=3600)
    body_timeout: float = key(60.0, "Seconds for a client to send its body.", low=0.1, high=3600)
    idle_timeout: float = key(
        75.0, "Seconds that an idle keep-alive connection stays open.", low=1, high=3600
    )
    connections: int = key(
        4096,
        "Maximum number of open TCP connections; at the limit, a new one closes the longest idle one.",
        low=8,
        high=1_000_000,
    )
    connections_per_address: int | None = key(
        None,
        "Maximum number of connections from one other machine; auto: a quarter of limits.connections.",
        low=1,
        high=1_000_000,
    )
    json_depth: int = key(32, "Maximum nesting depth of a JSON body.", low=4, high=512)
    messages: int = key(2048, "Maximum number of messages in one chat request.", low=1, high=1_000_000)
    tools: int = key(128, "Maximum number of tools in one chat request.", low=1, high=100_000)
    stop_strings: int = key(16, "Maximum number of stop strings in one request.", low=1, high=1024)
    stop_string_bytes: int = key(256, "Maximum length of a stop string in bytes.", low=1, high=65_536)
    logit_bias: int = key(1024, "Maximum number of entries in logit_bias.", low=1, high=1_000_000)
    grammar_bytes: int = key(
        65_536, "Maximum size of a schema, regex, choice or grammar in bytes.", low=64, high=1_000_000
    )
    additional_properties: bool = live_key(
        False, "Allow keys that a JSON schema does not list if it does not set additionalProperties."
    )
    choices: int = key(16, "Maximum of n, the number of answers to one request.", low=1, high=1024)
    request_timeout: float = live_key(
        0.0,
        "Seconds after which an answer ends, complete or not; 0: no limit. Requests may set less.",
        low=0,
        high=86_400,
    )
    first_token_timeout: float = live_key(
        0.0,
        "Seconds without a token after which a request fails with 503; 0: no limit. Requests may set less.",
        low=0,
        high=86_400,
    )
    queue: int = key(
        512, "Maximum number of requests waiting for a model; one more gets 429.", low=1, high=1_000_000
    )
    admission: Literal["queue", "slo"] = live_key(
        "queue",
        "When requests are refused with 429. queue: when the queue is full; slo: also when they would miss "
        "the latency targets of their model (usage.targets).",
    )
    queue_per_key: int = key(
        64,
        "Requests of one key that a model accepts even if other keys fill its queue.",
        low=0,
        high=1_000_000,
    )
    stream_buffer_bytes: int = key(
        1_000_000, "Maximum number of unread bytes buffered for one slow stream.", low=4096, high=1 << 30
    )
    stream_timeout: float = key(
        60.0, "Seconds without progress after which a slow stream is closed.", low=1, high=3600
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Settings of downloads. HF_ENDPOINT, HF_TOKEN and HF_HOME select the hub, the token and the cache."""

    bandwidth: float | None = live_key(
        None,
        "Bandwidth limit of all downloads together, in MB (10^6 bytes) per second; auto: no limit.",
        low=0.01,
        high=100_000,
    )
    files_at_once: int = key(
        4, "Maximum number of files downloaded at once, over all downloads.", low=1, high=64
    )
    pull_on_request: Literal["off", "recommended", "any"] = live_key(
        "off",
        "Models that a request may download by naming them: none, the recommended ones, or any on the hub. "
        "Until the download is complete, requests get 503 with the progress.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    level: Literal["debug", "info", "warning", "error"] = live_key(
        "info", "Lowest level that is written to the daemon log."
    )
    file_bytes: int = key(
        10_000_000, "Size in bytes at which the daemon log is rotated.", low=10_000, high=1 << 40
    )
    files: int = key(3, "Number of rotated daemon logs to keep.", low=0, high=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """Settings of the request log. It holds metadata; it holds content only where a key, `log_content` or a
    request with `store: true` allows it.
    """

    retention_days: float = key(30.0, "Days that request rows are kept.", low=0.01, high=36_500)
    max_bytes: int = key(
        256_000_000,
        "Size of the request log in bytes above which the oldest rows are deleted.",
        low=1_000_000,
        high=1 << 44,
    )
    log_content: bool = live_key(
        False,
        "Keep prompts and answers of callers without a key (this user, the panel). Each key has its own "
        "setting.",
    )
    content_days: float = key(
        7.0, "Days that prompts and answers are kept, if they are kept at all.", low=0.01, high=36_500
    )
    content_bytes: int = key(
        256_000,
        "Maximum number of bytes kept of each prompt, answer and request; the rest is cut off.",
        low=1000,
        high=1 << 26,
    )
    store: bool = live_key(
        True,
        "Store answers to requests with store: true, for their callers only; false refuses such requests.",
    )
    stored_days: float = key(30.0, "Days that stored answers are kept.", low=0.01, high=36_500)
    stored_bytes: int = key(
        256_000_000,
        "Total size of stored answers in bytes above which the oldest are deleted; not part of max_bytes.",
        low=1_000_000,
        high=1 << 44,
    )
    batch_days: float = key(30.0, "Days that batches and their results are kept.", low=0.01, high=36_500)
    batch_bytes: int = key(
        1_000_000_000,
        "Maximum size of one key's batches and their results, in bytes; not part of max_bytes.",
        low=100_000,
        high=1 << 44,
    )
    file_days: float = key(30.0, "Days that uploaded files are kept.", low=0.01, high=36_500)
    file_bytes: int = key(
        1_000_000_000, "Maximum size of one key's uploaded files, in bytes.", low=100_000, high=1 << 44
    )
    batch_parallel: int = key(8, "Maximum number of batch requests that run at once.", low=1, high=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSettings:
    """Prices of tokens, for costs and the budgets of keys, and latency targets."""

    prices: tuple[str, ...] = live_key(
        (),
        "Prices per million tokens, as MODEL=INPUT/OUTPUT; MODEL may be a glob, and the first match counts.",
        each=PRICE,
    )
    currency: str = live_key("USD", "Currency of prices and budgets, for display.")
    targets: tuple[str, ...] = live_key(
        (),
        "Latency targets, as MODEL=TTFT/TPOT in milliseconds: time to first token, time per output token.",
        each=TARGET,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Settings of traces. Without an endpoint nothing is sent to anybody."""

    otlp_endpoint: str = key(
        "",
        "Collector that gets a trace of each request by OTLP over HTTP, such as http://127.0.0.1:4318; "
        "empty: nothing is sent.",
        each=COLLECTOR,
    )
    otlp_headers_file: str = key(
        "",
        "File with headers for the collector, one 'Name: value' per line, readable by its owner only; "
        "empty: the value of OTEL_EXPORTER_OTLP_HEADERS.",
    )
    otlp_service_name: str = key("llmbox", "Name of this service in traces.")
    trace_share: float = key(
        1.0, "Share of the requests without a traceparent that are traced.", low=0, high=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    server: ServerSettings = field(default_factory=ServerSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    hub: HubSettings = field(default_factory=HubSettings)
    log: LogSettings = field(default_factory=LogSettings)
    requests: RequestSettings = field(default_factory=RequestSettings)
    usage: UsageSettings = field(default_factory=UsageSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    def get(self, name: str) -> Scalar:
        section, _, attribute = name.partition(".")
        value: Scalar = getattr(getattr(self, section), attribute)
        return value


LOCAL = frozenset({"server.mcp_commands", "telemetry.otlp_endpoint", "telemetry.otlp_headers_file"})
"""Keys that the panel shows and cannot change: only who may run commands on this machine can."""


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One row of the table. `name` is `section.key`; `kind` is the type of the value."""

    name: str
    kind: type
    optional: bool
    choices: tuple[str, ...]
    default: Scalar
    doc: str
    low: float | None
    high: float | None
    each: EntryCheck | None
    live: bool

    @property
    def is_local(self) -> bool:
        return self.name in LOCAL

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def variable(self) -> str:
        return "LLMBOX_" + self.name.replace(".", "_").upper()


SECTIONS: dict[str, type] = {
    "server": ServerSettings,
    "limits": LimitSettings,
    "model": ModelSettings,
    "memory": MemorySettings,
    "cache": CacheSettings,
    "hub": HubSettings,
    "log": LogSettings,
    "requests": RequestSettings,
    "usage": UsageSettings,
    "telemetry": TelemetrySettings,
}


@cache
def schema() -> dict[str, SettingSpec]:
    """All keys by name, in the order of their definition."""
    keys: dict[str, SettingSpec] = {}
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        for item in fields(cls):
            name = f"{section}.{item.name}"
            kind, optional, choices = _shape(hints[item.name])
            default = cast("Scalar", item.default)
            keys[name] = SettingSpec(name, kind, optional, choices, default, **item.metadata)
    return keys


def _shape(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    optional = False
    if get_origin(hint) is UnionType:
        optional = True
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return str, optional, get_args(hint)
    if get_origin(hint) is tuple:
        return tuple, optional, ()
    return hint, optional, ()
