"""The daemon as a whole: state, numbers, settings."""

import time
from typing import Any

from litestar import Request, get
from litestar.datastructures import State

from ...control.controller import DaemonController
from .models import describe_all
from .schema import Config, ModelStats, Setting, Stats, StatsTotals, Status

SUMMED = (
    "running",
    "waiting",
    "blocks_total",
    "blocks_used",
    "prompt_tokens",
    "output_tokens",
    "prefix_queries",
    "prefix_hits",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
)


@get("/status", sync_to_thread=False, name="admin_status")
def status(request: Request[Any, Any, State]) -> Status:
    control: DaemonController = request.app.state.control
    services, running = control.services, control.running
    readiness = services.engines.readiness()
    return Status(
        version=running.version,
        pid=running.pid,
        url=running.url,
        host=running.host,
        port=running.port,
        socket=running.socket,
        log_file=str(services.paths.log_file),
        config_file=str(services.paths.config_file),
        started_at=running.started_at,
        uptime_s=time.time() - running.started_at,
        ready=readiness.ready and not services.drain.draining,
        cause="draining" if services.drain.draining else readiness.cause,
        draining=services.drain.draining,
        open_requests=len(services.gateway.in_flight()),
        pending_restart=control.pending_restart(),
        begun_with=dict(control.begun_with),
        models=describe_all(control),
        error_rates=services.telemetry.error_rates.read(),
    )


@get("/stats", sync_to_thread=False, name="admin_stats")
def stats(request: Request[Any, Any, State]) -> Stats:
    control: DaemonController = request.app.state.control
    services = control.services
    readiness = services.engines.readiness()
    supervisors = [model.supervisor for model in services.engines.models()]
    sums = {name: sum(getattr(each.stats, name) for each in supervisors) for name in SUMMED}
    return Stats(
        monotonic_s=time.monotonic(),
        ready=readiness.ready,
        cause=readiness.cause,
        total=StatsTotals(
            **sums,
            open_requests=len(services.gateway.in_flight()),
            restarts=sum(each.restarts for each in supervisors),
            resumed=sum(each.resumed for each in supervisors),
        ),
        models=[ModelStats(each.name, each.state, each.stats) for each in supervisors],
        log_rows_dropped=services.request_log.dropped,
    )


@get("/config", sync_to_thread=False, name="admin_config")
def config(request: Request[Any, Any, State]) -> Config:
    """Return the daemon's settings by key, with the origin of each value."""
    control: DaemonController = request.app.state.control
    return Config(
        {
            row.name: Setting(value, origin.source, origin.place, row.default, row.live)
            for row, value, origin in control.loaded.table()
        }
    )
