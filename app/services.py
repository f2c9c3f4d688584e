"""What the daemon is made of, handed to whoever needs it: no globals."""

import time
from dataclasses import dataclass, field

from .engines.manager import EngineManager
from .events import Events
from .gateway.gateway import Gateway
from .http.drain import Drain
from .metrics.metrics import Metrics
from .paths import Paths
from .security.security import Security
from .settings import Settings
from .store import RequestLog
from .telemetry.telemetry import Telemetry


@dataclass(kw_only=True)
class Services:
    settings: Settings
    paths: Paths
    engines: EngineManager
    gateway: Gateway
    request_log: RequestLog
    metrics: Metrics
    events: Events
    telemetry: Telemetry
    security: Security
    version: str
    drain: Drain = field(default_factory=Drain)
    started_at: float = field(default_factory=time.time)
    """Unix seconds."""
