"""What a daemon is composed of. Tests hand in other parts; everything else runs as in production."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llmbox import __version__
from llmbox.engine.client import Launch
from llmbox.kernels.cpu.build import KERNEL_CACHE

from ..engines.manager import EngineManager
from ..engines.supervisor import Supervisor
from ..events import Events
from ..gateway.gateway import Gateway
from ..metrics.metrics import EngineReading, Metrics
from ..paths import Paths
from ..security.security import Security
from ..services import Services
from ..settings import Settings
from ..store import RequestLog
from ..telemetry.gpus import GpuReader
from ..telemetry.telemetry import Telemetry
from ..text.model_text import ModelText, load_model_text


@dataclass(frozen=True, slots=True)
class Parts:
    """How engines are started and where the text side of a model comes from."""

    launch: Launch
    load_text: Callable[[Path], ModelText]
    gpus: GpuReader | None = None
    """Replaces the reader of GPUs."""


def real_parts() -> Parts:
    return Parts(Launch(), load_model_text)


def compose(settings: Settings, paths: Paths, parts: Parts) -> Services:
    """Nothing runs yet."""
    events = Events()
    request_log = RequestLog(
        paths.request_db,
        retention_days=settings.requests.retention_days,
        max_bytes=settings.requests.max_bytes,
    )

    def changed(supervisor: Supervisor) -> None:
        events.publish(f"model.{supervisor.state}", {"model": supervisor.name, "cause": supervisor.cause})

    launch = with_kernel_cache(parts.launch, paths)
    engines = EngineManager(parts.load_text, launch, settings.limits.queue, on_change=changed)
    metrics = Metrics(lambda: readings(engines), lambda: request_log.dropped)
    telemetry = Telemetry(engines, events, request_log, parts.gpus)
    gateway = Gateway(engines, request_log, metrics, settings, telemetry.feed)
    return Services(
        settings=settings,
        paths=paths,
        engines=engines,
        gateway=gateway,
        request_log=request_log,
        metrics=metrics,
        events=events,
        telemetry=telemetry,
        security=Security.of(paths.keys_file, paths.keys_used_file),
        version=__version__,
    )


def with_kernel_cache(launch: Launch, paths: Paths) -> Launch:
    """Compiled kernels are kept where everything else is: under --data-dir, if there is one."""
    if KERNEL_CACHE in os.environ:
        return launch
    return replace(launch, env={KERNEL_CACHE: str(paths.kernel_cache), **launch.env})


def readings(engines: EngineManager) -> list[EngineReading]:
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
