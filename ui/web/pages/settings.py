"""Settings page: every setting with its origin. A change is reviewed as a diff, then written to the TOML
file.
"""

import asyncio
from dataclasses import dataclass

from litestar import Response, get, post

from llmbox.app.config.entries import Scalar
from llmbox.app.config.loader import SettingOrigin, check_value, set_value
from llmbox.app.config.settings import SettingSpec, schema
from llmbox.app.control.controller import DaemonController
from llmbox.app.errors import ApiError, CliError
from llmbox.app.http.server.request import form_of
from llmbox.app.http.server.sockets import is_loopback

from .. import render as show
from ..render import PanelRequest, done, page, panel_of

BACK = "/admin/settings"
LOCKED = {"env": "set in the environment", "flag": "set on the command line"}
ORIGINS = {"default": "built in", "user": "your file", "system": "the system's file", **LOCKED}


SECTION_TITLES = {
    "server": ("Access and start", "Addresses, who may connect, what is loaded at start"),
    "usage": ("Prices and targets", "Costs, budgets and goodput on the overview"),
    "model": ("Model defaults", "How models are loaded, unless a load says otherwise"),
    "memory": ("Memory", "How much models may take, and how long they stay"),
    "hub": ("Downloads", "Bandwidth, and models that requests may fetch"),
    "requests": ("Request log and kept data", "What is kept, and for how long"),
    "telemetry": ("Traces", "Your collector for the spans of requests; none by default"),
    "limits": ("Limits of requests", "Sizes, time limits, connections and queues"),
    "log": ("Daemon log", "Level, size and number of files"),
    "cache": ("Packed weights on disk", "Disk space that makes loads faster"),
}
"""Title and description by section of the file, in the order of the page."""
TITLES = {
    "server.host": "Listen address",
    "server.port": "Port",
    "server.mdns": "Announce on the network (mDNS)",
    "server.models": "Models loaded at start",
    "server.allowed_hosts": "Additional host names",
    "server.cors_origins": "Web pages that may use the API",
    "server.tls": "HTTPS",
    "server.tls_certificate": "Certificate file",
    "server.tls_key": "Private key file",
    "server.trusted_proxies": "Trusted reverse proxies",
    "server.require_key": "Require a key on this machine",
    "server.fetch_images": "Images by URL",
    "server.mcp_commands": "Programs as MCP servers of the chat",
    "server.drain_timeout": "Time for open requests at shutdown",
    "server.restart_cooldown": "Pause before a crashed model restarts",
    "server.restart_cooldown_max": "Maximum pause before a restart",
    "usage.prices": "Token prices",
    "usage.currency": "Currency",
    "usage.targets": "Latency targets",
    "telemetry.otlp_endpoint": "Collector (OTLP over HTTP)",
    "telemetry.otlp_headers_file": "File with its headers",
    "telemetry.otlp_service_name": "Service name",
    "telemetry.trace_share": "Share of requests traced",
    "limits.body_bytes": "Request body",
    "limits.file_bytes": "Uploaded file",
    "limits.open_body_bytes": "Bodies of open requests",
    "limits.image_body_bytes": "Request body with images",
    "limits.image_bytes": "Image file",
    "limits.image_pixels": "Pixels of an image",
    "limits.images": "Images of a request",
    "limits.header_line_bytes": "Header line",
    "limits.header_count": "Headers",
    "limits.header_timeout": "Time to send headers",
    "limits.body_timeout": "Time to send a body",
    "limits.idle_timeout": "Idle connections",
    "limits.connections": "Connections",
    "limits.connections_per_address": "Connections of one machine",
    "limits.json_depth": "Nesting depth of JSON",
    "limits.messages": "Messages of a chat",
    "limits.tools": "Tools of a chat",
    "limits.stop_strings": "Stop strings",
    "limits.stop_string_bytes": "Length of a stop string",
    "limits.logit_bias": "Entries of logit_bias",
    "limits.grammar_bytes": "Schema or grammar",
    "limits.additional_properties": "Open JSON schemas",
    "limits.choices": "Answers of one request",
    "limits.request_timeout": "Time limit of an answer",
    "limits.first_token_timeout": "Time limit of the first token",
    "limits.queue": "Queue of a model",
    "limits.admission": "Admission of requests",
    "limits.queue_per_key": "Queue places of a key",
    "limits.stream_buffer_bytes": "Buffer of a slow stream",
    "limits.stream_timeout": "Time limit of a slow stream",
    "model.device": "Device",
    "model.dtype": "Precision",
    "model.kv_dtype": "Precision of the KV cache",
    "model.quant": "Quantization at load",
    "model.quant_head": "Quantization of the output head",
    "model.ctx": "Context length",
    "model.max_running": "Sequences in a batch",
    "model.token_budget": "Tokens per step",
    "model.memory": "Memory of a model",
    "model.kv_tokens": "Size of the KV cache",
    "model.kv_host_memory": "Main memory for evicted KV blocks",
    "model.threads": "CPU threads",
    "model.tp": "Tensor parallelism",
    "model.pp": "Pipeline parallelism",
    "model.expert_parallel": "Expert parallelism",
    "model.redundant_experts": "Copies of hot experts",
    "model.cpu_experts": "Experts in main memory",
    "model.disaggregate": "Disaggregated prefill",
    "model.batching": "Batching",
    "model.premium_share": "KV cache reserved for premium keys",
    "model.prefix_cache": "Prefix caching",
    "model.chunked_prefill": "Chunked prefill",
    "model.speculate": "Speculative decoding",
    "model.draft": "Draft model",
    "model.lora_memory": "Memory for adapters",
    "model.deterministic": "Deterministic kernels only",
    "model.exact": "Bit-identical on every CPU",
    "model.overlap": "Overlapped scheduling on a GPU",
    "model.cuda_graphs": "CUDA graphs",
    "model.overrides": "Settings of single models",
    "memory.budget": "Memory of all models",
    "memory.ttl": "Unload idle models after",
    "memory.spare_engine": "Spare engine process",
    "memory.load_on_request": "Load models on request",
    "cache.repacked_gb": "Size of the cache",
    "cache.kv_disk_gb": "KV cache on disk",
    "cache.kv_key_share": "Share of one key in it",
    "hub.bandwidth": "Bandwidth",
    "hub.files_at_once": "Files at once",
    "hub.pull_on_request": "Download models on request",
    "log.level": "Level",
    "log.file_bytes": "Size of a file",
    "log.files": "Rotated files",
    "requests.retention_days": "Keep requests",
    "requests.max_bytes": "Size of the request log",
    "requests.log_content": "Keep prompts without a key",
    "requests.content_days": "Keep prompts and answers",
    "requests.content_bytes": "Stored part of a prompt or answer",
    "requests.store": "Stored answers",
    "requests.stored_days": "Keep stored answers",
    "requests.stored_bytes": "Size of stored answers",
    "requests.batch_days": "Keep batches",
    "requests.batch_bytes": "Size of a key's batches",
    "requests.file_days": "Keep uploaded files",
    "requests.file_bytes": "Size of a key's files",
    "requests.batch_parallel": "Batch requests at once",
}
"""Plain name of each setting; the page shows its key in the file beside it."""


@dataclass(frozen=True, slots=True)
class SettingsRow:
    key: SettingSpec
    text: str
    default: str
    origin: SettingOrigin
    waits: bool
    """True if the value in the file takes effect at the next start."""

    @property
    def title(self) -> str:
        return _title_of(self.key)

    @property
    def changed(self) -> bool:
        """Return whether it differs from the default."""
        return self.text != self.default

    @property
    def locked(self) -> str:
        locked = LOCKED.get(self.origin.source, "")
        return locked or ("changed by llmbox config set" if self.key.is_local else "")

    @property
    def origin_text(self) -> str:
        return ORIGINS[self.origin.source]


@dataclass(frozen=True, slots=True)
class SettingChange:
    key: SettingSpec
    before: str
    after: str
    value: Scalar

    @property
    def title(self) -> str:
        return _title_of(self.key)


def _title_of(key: SettingSpec) -> str:
    return TITLES.get(key.name, key.name)


@get("/settings", sync_to_thread=False, name="panel_settings")
def settings_page(request: PanelRequest) -> Response[str]:
    return _page(request)


@post("/settings", status_code=200, name="panel_settings_review")
async def review_settings(request: PanelRequest) -> Response[str]:
    """Review the changes; nothing is written."""
    form = await form_of(request)
    try:
        changes = _changes(panel_of(request).control, form)
    except CliError as error:
        return _page(request, 400, problem=f"{error.why}.", form=form)
    if not changes:
        return _page(request, problem="Nothing was changed.")
    return page(request, "settings/settings_review.html", "settings", changes=changes)


@post("/settings/save", status_code=200, name="panel_settings_save")
async def save_settings(request: PanelRequest) -> Response[str]:
    control = panel_of(request).control
    path = control.services.paths.config_file
    try:
        changes = _changes(control, await form_of(request))
        for change in changes:
            await asyncio.to_thread(set_value, path, change.key, change.value)
    except CliError as error:
        raise ApiError(400, f"{error.what}: {error.why}", "invalid_value") from error
    control.reload()
    return done(request, BACK, "Saved.")


def _page(
    request: PanelRequest, status: int = 200, *, problem: str = "", form: dict[str, str] | None = None
) -> Response[str]:
    control = panel_of(request).control
    waiting = set(control.pending_restart())
    sections: dict[str, list[SettingsRow]] = {name: [] for name in SECTION_TITLES}
    for key, value, origin in control.loaded.table():
        given = (form or {}).get(key.name)
        text = show.value(value) if given is None else given
        row = SettingsRow(key, text, show.value(key.default), origin, key.name in waiting)
        sections.setdefault(key.section, []).append(row)
    return page(
        request,
        "settings/settings.html",
        "settings",
        status,
        sections=sections,
        section_titles=SECTION_TITLES,
        changed=sum(row.changed for rows in sections.values() for row in rows),
        waiting=sorted(waiting),
        problem=problem,
        reach=_describe_reach(control),
        file=control.services.paths.config_file,
    )


def _changes(control: DaemonController, form: dict[str, str]) -> list[SettingChange]:
    """Return the changes in a form. Locked settings are never changed. Raises CliError for an invalid
    value.
    """
    table = {key.name: (value, origin) for key, value, origin in control.loaded.table()}
    found = []
    for name, text in form.items():
        key = schema().get(name)
        if key is None or key.is_local or table[name][1].source in LOCKED:
            continue
        before = table[name][0]
        if text.strip() == show.value(before):
            continue
        value = check_value(key, text.strip(), name, from_text=True)
        if value != before:
            found.append(SettingChange(key, show.value(before), show.value(value), value))
    return found


def _describe_reach(control: DaemonController) -> list[str]:
    """Describe in sentences who can reach the daemon, from the sockets inwards."""
    settings, running = control.services.settings.server, control.running
    keys = [key for key in control.services.security.keys.list() if not key.is_expired()]
    admins = sum("admin" in key.scopes for key in keys)
    if is_loopback(running.host):
        rest = "and each needs an API key" if settings.require_key else "without a key"
        who = f"Programs on this machine reach the API at {running.url}, {rest}. Other machines do not."
    else:
        who = f"Every machine that reaches {running.host} reaches the API; each request needs an API key."
    names = ", ".join(settings.allowed_hosts)
    hosts = f"Besides the names of this machine, requests may use the host names {names}." if names else ""
    valid = "1 key is valid" if len(keys) == 1 else f"{len(keys)} keys are valid"
    count = f"{valid}; {admins or 'none'} of them may administer this box."
    panel = "This panel and the admin API accept a one-time link from llmbox up, or an admin key."
    local = f"The command line uses {running.socket}, which only your user on this machine can open."
    return [who, *([hosts] if hosts else []), count, panel, local]
