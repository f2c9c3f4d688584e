"""Models in memory: list, load, unload, pin; the state of the box."""

import asyncio
import time
from pathlib import Path

from litestar import get, post
from litestar.params import JSONBody

from ...control.controller import DaemonController, Failure
from ...engines.loaded_model import LoadedModel
from ...engines.pair_switch import usable_cores
from ...engines.step_times import recommend_pair
from ...engines.supervisor import Supervisor
from ...errors import ApiError, CliError, Exit
from ...models.catalog import BUILTIN, in_memory
from ...models.load_request import ModelRequest, options_of, show_pair
from ..server.request import StrictRequest
from .schema import (
    Config,
    LoadRequest,
    ModelAnswer,
    ModelStats,
    ModelStatus,
    ModelStatusList,
    PinRequest,
    QueueStatus,
    Setting,
    Stats,
    StatsTotals,
    Status,
    UnloadedModels,
    UnloadRequest,
)

STATUS_OF_EXIT = {Exit.NOT_FOUND: (404, "model_not_found"), Exit.USAGE: (400, "invalid_value")}


@get("/models", sync_to_thread=False)
def models(request: StrictRequest) -> ModelStatusList:
    control: DaemonController = request.app.state.control
    evicted = {each.name: each.config.model_path for each in control.residency.evicted.all()}
    return ModelStatusList(describe_all(control), evicted)


@post("/models/load", status_code=202)
async def load_model(request: StrictRequest, data: JSONBody[LoadRequest]) -> ModelAnswer:
    """Start loading a model and answer at once; `GET /models` reports the progress."""
    control: DaemonController = request.app.state.control
    wanted, _ = await begin_load(control, data)
    name = wanted.served_name
    return ModelAnswer(next(model for model in describe_all(control) if model.name == name))


async def begin_load(
    control: DaemonController, data: LoadRequest
) -> tuple[ModelRequest, "asyncio.Task[Failure | None]"]:
    """Return what is loaded now and the task that ends with the result. Raises ApiError for a load that
    cannot even begin.
    """
    try:
        wanted = await asyncio.to_thread(control.model_request, data.model, data.alias, data.options)
        return wanted, control.begin_load(wanted, data.ttl or None)
    except CliError as error:
        status, code = STATUS_OF_EXIT.get(error.exit, (400, "bad_model"))
        raise ApiError(status, f"{error.what}: {error.why}", code, "model") from error


@post("/models/unload", status_code=200)
async def unload_model(request: StrictRequest, data: JSONBody[UnloadRequest]) -> UnloadedModels:
    control: DaemonController = request.app.state.control
    return UnloadedModels(await control.unload(data.model))


@post("/models/pin", status_code=200, sync_to_thread=False)
def pin_model(request: StrictRequest, data: JSONBody[PinRequest]) -> ModelAnswer:
    """Pin or unpin a model. A pinned model is neither evicted for others nor unloaded when idle."""
    control: DaemonController = request.app.state.control
    return ModelAnswer(_loaded(control.residency.pin(data.model, pinned=data.pinned)))


def describe_all(control: DaemonController) -> list[ModelStatus]:
    """List all models: loaded, loading, then failed."""
    engines = control.services.engines
    failed = [
        ModelStatus(
            name=name,
            aliases=[],
            state="failed",
            cause=cause,
            path="",
            ref=name,
            chat=False,
            options={},
            error_code=control.failure_codes.get(name),
        )
        for name, cause in engines.failures().items()
    ]
    loaded = [_loaded(model) for model in engines.models()]
    described = loaded + [_loading(supervisor) for supervisor in engines.loading()]
    if any(each.stats is not None and each.stats.adapters for each in loaded):
        _name_adapters(control, loaded)
    for each in described:
        each.asked = dict(control.asked.get(each.name, {}))
    return described + failed


def _name_adapters(control: DaemonController, loaded: list[ModelStatus]) -> None:
    """Set `adapters`: engines know adapters by the digests of their files."""
    for name, alias in sorted(control.library.registry.read_or_nothing().aliases.items()):
        base = control.residency.real_name(name) if alias.adapter else ""
        for each in loaded:
            if each.name == base and each.stats is not None and alias.adapter in each.stats.adapters:
                each.adapters.append(name)


def _loaded(model: LoadedModel) -> ModelStatus:
    described = _of(model.supervisor)
    described.aliases = sorted(model.aliases)
    described.warnings = list(model.text.warnings)
    if described.info is not None and described.info.kernels_problem:
        described.warnings.append(f"slower kernels run: {described.info.kernels_problem}")
    described.chat = model.text.chat_template is not None
    described.loaded_at, described.last_used = model.loaded_at, model.last_used
    described.pinned, described.busy, described.ttl_s = model.pinned, model.busy, model.ttl
    if model.ttl is not None and not model.busy and not model.pinned:
        described.expires_s = round(max(0.0, model.idle_since + model.ttl - model.clock()), 1)
    return described


def _loading(supervisor: Supervisor) -> ModelStatus:
    """Describe a model that is being loaded. Its engine may be ready while its tokenizer is not: requests are
    still refused.
    """
    described = _of(supervisor)
    described.state = "loading"
    described.cause = supervisor.load_stage
    return described


def _of(supervisor: Supervisor) -> ModelStatus:
    path = supervisor.config.model_path
    ref = in_memory(supervisor.name, Path(path))
    return ModelStatus(
        name=supervisor.name,
        aliases=[],
        state=supervisor.state,
        cause=supervisor.problem,
        retry_s=supervisor.seconds_to_try,
        path=path,
        ref=BUILTIN if ref.source == "builtin" else ref.ref,
        chat=False,
        options=options_of(supervisor.config),
        progress=supervisor.progress if supervisor.state == "loading" else None,
        info=supervisor.info,
        stats=supervisor.stats,
        restarts=supervisor.restarts,
        resumed=supervisor.resumed,
        open_requests=supervisor.open_requests,
        queue=_queue(supervisor) if supervisor.state == "ready" else None,
    )


def _queue(supervisor: Supervisor) -> QueueStatus | None:
    queue, info = supervisor.queue, supervisor.info
    forecast = queue.forecast_shortest()
    if forecast is None or info is None:
        return None
    recommended = None
    if not supervisor.pair_switch.is_on:
        work, cores = supervisor.stats.work, usable_cores(supervisor.config)
        recommended = recommend_pair(queue.times.interference, work, info, cores)
    counts, interference = queue.counts, queue.times.interference
    return QueueStatus(
        ttft=forecast.ttft,
        tpot=forecast.tpot,
        admitted=counts.admitted,
        refused=counts.refused,
        missed=counts.missed,
        problem=queue.never_met,
        prompt_ratio=interference.ratio,
        prompt_share=interference.share,
        disaggregate=show_pair(recommended),
        engines=supervisor.pair_switch.describe(),
    )


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


@get("/status", sync_to_thread=False)
def status(request: StrictRequest) -> Status:
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
        request_log_problem=services.request_log.problem,
        error_rates=services.telemetry.error_rates.read(),
    )


@get("/stats", sync_to_thread=False)
def stats(request: StrictRequest) -> Stats:
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


@get("/config", sync_to_thread=False)
def config(request: StrictRequest) -> Config:
    """Return the daemon's settings by key, with the origin of each value."""
    control: DaemonController = request.app.state.control
    return Config(
        {
            row.name: Setting(value, origin.source, origin.place, row.default, row.live)
            for row, value, origin in control.loaded.table()
        }
    )
