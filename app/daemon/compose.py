"""Composition of the daemon's services. Tests replace `DaemonParts`; everything else runs as in
production.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmbox import __version__
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.spawn import ForkServer, Launch, SpawnedProcess

from ..batches import BatchRunner
from ..config.paths import Paths
from ..config.settings import RequestSettings, Settings
from ..engines.engine_process import SupervisorOptions
from ..engines.manager import EngineManager
from ..engines.restart_policy import RestartLimits
from ..engines.supervisor import Supervisor
from ..events import Events
from ..gateway.gateway import Gateway
from ..metrics import EngineReading, Metrics
from ..security.security import Security
from ..services import Services
from ..store import RequestLog, Retention
from ..store.batches import BatchStore
from ..store.files import FileStore
from ..store.stored_answers import StoredAnswers
from ..telemetry.gpus import GpuReader
from ..telemetry.telemetry import Telemetry
from ..text.tokenizer.text_loader import load_model_text
from ..text.tokenizer.tokenizer import TextModel
from ..tracing.tracer import RequestTracer
from .run import with_caches


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """Parts that tests replace: how engines are started and how a model's text side is loaded."""

    launch: Launch
    load_text: Callable[[Path], TextModel]
    gpus: GpuReader | None = None
    """Replaces the reader of GPUs."""
    supervise: Callable[[EngineConfig, SupervisorOptions], Supervisor] = Supervisor
    """Makes the supervisor of a model."""


def real_parts() -> DaemonParts:
    """Parts of a production daemon."""
    return DaemonParts(Launch(), load_model_text)


def compose(
    settings: Settings,
    paths: Paths,
    parts: DaemonParts,
    first: SpawnedProcess | ForkServer | None = None,
    on_model_change: Callable[[EngineManager], None] = lambda _: None,
) -> Services:
    """Build the services without starting them.

    `first`: engine process that was started already and waits for its model. `on_model_change` is called
    after each change of a model's state.
    """
    events = Events()
    security = Security.of(paths.keys_file, paths.keys_used_file, paths.keys_quota_file)
    kept = settings.requests
    files = FileStore(
        paths.files_dir, most_bytes=kept.file_bytes, days=kept.file_days, owners=security.keys.ids
    )
    request_log = _request_log(kept, paths, security, files)

    def changed(supervisor: Supervisor) -> None:
        events.publish(f"model.{supervisor.state}", {"model": supervisor.name, "cause": supervisor.problem})
        on_model_change(engines)

    engines = _engine_manager(settings, paths, parts, first, changed)
    tracer = RequestTracer.of(settings.telemetry, os.environ)
    metrics = Metrics(lambda: read_engines(engines), lambda: request_log.dropped, lambda: tracer.counts)
    telemetry = Telemetry(engines, events, request_log, parts.gpus, targets=settings.usage.targets)
    gateway = Gateway(engines, request_log, metrics, settings, telemetry.feed, tracer)
    return Services(
        settings=settings,
        paths=paths,
        engines=engines,
        gateway=gateway,
        request_log=request_log,
        metrics=metrics,
        events=events,
        telemetry=telemetry,
        security=security,
        stored=StoredAnswers(request_log),
        batches=BatchRunner(
            BatchStore(request_log), most_at_once=kept.batch_parallel, most_bytes=kept.batch_bytes
        ),
        files=files,
        version=__version__,
    )


def _request_log(kept: RequestSettings, paths: Paths, security: Security, files: FileStore) -> RequestLog:
    retention = Retention(
        rows_days=kept.retention_days,
        content_days=kept.content_days,
        max_bytes=kept.max_bytes,
        stored_days=kept.stored_days,
        stored_bytes=kept.stored_bytes,
        batch_days=kept.batch_days,
        owners=security.keys.ids,
        sweep_files=files.sweep,
    )
    return RequestLog(paths.request_db, retention, content_bytes=kept.content_bytes)


def _engine_manager(
    settings: Settings,
    paths: Paths,
    parts: DaemonParts,
    first: SpawnedProcess | ForkServer | None,
    on_change: Callable[[Supervisor], None],
) -> EngineManager:
    server = settings.server
    options = SupervisorOptions(
        launch=with_caches(parts.launch, paths, settings.cache),
        queue_limit=settings.limits.queue,
        queue_per_key=settings.limits.queue_per_key,
        deaths=RestartLimits(cooldown=server.restart_cooldown, longest_cooldown=server.restart_cooldown_max),
        on_change=on_change,
    )
    return EngineManager(
        parts.load_text,
        options,
        keep_spare=settings.memory.spare_engine,
        first=first,
        supervise=parts.supervise,
    )


def read_engines(engines: EngineManager) -> list[EngineReading]:
    """Read the state of all loaded engines for `/metrics`."""
    return [
        EngineReading(
            model.name,
            model.supervisor.stats,
            model.supervisor.restarts,
            model.supervisor.resumed,
            model.supervisor.state == "ready",
        )
        for model in engines.models()
    ]
