"""Container of the daemon's parts, passed to the code that needs them. There are no globals."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .batches import BatchRunner
from .config.paths import Paths
from .config.settings import Settings
from .engines.loaded_model import LoadedModel
from .engines.manager import EngineManager
from .events import Events
from .gateway.gateway import Gateway
from .lifecycle.drain import BackgroundTasks, Drain
from .mcp.client import McpClients
from .metrics import Metrics
from .models.registry import Alias
from .security.security import Security
from .store import RequestLog
from .store.files import FileStore
from .store.stored_answers import StoredAnswers
from .telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class AvailableModel:
    """Model that is not loaded and that a request may name."""

    name: str
    state: Literal["loading", "on_disk"]
    context_window: int
    """Tokens of context that the model would have if it were alone in memory."""
    created: int
    """Unix seconds."""


@dataclass(kw_only=True)
class Services:
    """All parts of a running daemon."""

    settings: Settings
    paths: Paths
    engines: EngineManager
    gateway: Gateway
    request_log: RequestLog
    stored: StoredAnswers
    batches: BatchRunner
    files: FileStore
    metrics: Metrics
    events: Events
    telemetry: Telemetry
    security: Security
    version: str
    find_model: Callable[[str | None], Awaitable[LoadedModel]] | None = None
    """Return the model for a request, loading it if needed. Without this callback only loaded models are
    found.
    """
    offers: Callable[[], Awaitable[list[AvailableModel]]] | None = None
    """List the models that are not loaded and that `find_model` would load."""
    aliases: Callable[[], Mapping[str, Alias]] = dict
    """Return the aliases: names with parameters that stand for models."""
    real_name: Callable[[str], str] = str
    """Map a model's name or alias to the name that the model is served under."""
    mcp_clients: McpClients = field(default_factory=McpClients)
    """Connections to the MCP servers of the panel's chat."""
    drain: Drain = field(default_factory=Drain)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    """Generations that run without a connection waiting for them."""
