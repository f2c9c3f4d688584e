"""Table of the models in memory: one supervisor each, found by name or alias."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import EngineError
from llmbox.engine.ipc.spawn import ForkServer, SpawnedProcess

from ..errors import ApiError
from ..text.tokenizer.text_loader import TextCache, load_model_text
from ..text.tokenizer.tokenizer import TextModel
from .admission import draining, load_failed, model_loading, model_not_found, model_unloaded, require_same
from .engine_process import PrewarmedProcess, SupervisorOptions
from .loaded_model import LoadedModel, ModelReadiness, Readiness, judge_readiness
from .restart_policy import keep_config
from .supervisor import Supervisor

log = logging.getLogger("llmbox.engines")

_TEXT_S = 600.0
"""Maximum number of seconds that the tokenizer of an unloaded model is kept."""
_FREE_S = 1.0
"""Delay in seconds before a tokenizer is freed: freeing takes tens of milliseconds, which would slow a model
swap.
"""


@dataclass(slots=True, eq=False)
class _Loading:
    config: EngineConfig
    aliases: frozenset[str]
    supervisor: Supervisor
    on_request: bool = False
    task: "asyncio.Task[LoadedModel]" = field(init=False)


class EngineManager:
    """Owner of the model table. A name is in at most one of loaded, loading and failed."""

    def __init__(
        self,
        load_text: Callable[[Path], TextModel] = load_model_text,
        options: SupervisorOptions | None = None,
        *,
        keep_spare: bool = False,
        first: SpawnedProcess | ForkServer | None = None,
        supervise: Callable[[EngineConfig, SupervisorOptions], Supervisor] = Supervisor,
    ) -> None:
        """`options`: of all supervisors; their `spares` are set here.

        `first` is an engine process or fork server that was started already; `keep_spare` keeps one ready for
        the next model or restart. `supervise` makes the supervisor of a model.
        """
        options = options or SupervisorOptions()
        self._texts = TextCache(load_text)
        self._forgetting: asyncio.TimerHandle | None = None
        self._supervise = supervise
        self._spares = PrewarmedProcess(options.launch, keep=keep_spare, busy=self._busy, first=first)
        self._options = replace(options, spares=self._spares)
        self._loaded: dict[str, LoadedModel] = {}
        self._loading: dict[str, _Loading] = {}
        self._failures: dict[str, str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._has_served = False
        """At least one model has been ready since the start."""
        self.admit: Callable[[EngineConfig, bool], Awaitable[EngineConfig]] = keep_config
        """Called before an engine starts, with whether only a request wants it. Makes room, or raises
        ApiError.
        """
        self.clock: Callable[[], float] = time.monotonic

    # ------------------------------------------------------------------ loading and unloading

    async def load(
        self, config: EngineConfig, *, alias: str | None = None, on_request: bool = False
    ) -> LoadedModel:
        """Load a model and return when it is ready. Raises ApiError when it cannot be loaded; then nothing of
        it is left.

        Concurrent loads of one name share one engine. The load continues if a caller stops waiting.
        """
        loading = self.begin_load(config, alias=alias, on_request=on_request)
        return await wait_for_load(loading, model_unloaded(config.name))

    def begin_load(
        self, config: EngineConfig, *, alias: str | None = None, on_request: bool = False
    ) -> "asyncio.Future[LoadedModel]":
        """Load in the background. A failure is logged, shown by `readiness`, and is the task's exception.

        `on_request`: an inference request names it. An operator's load of the same name takes it over.
        """
        if self._closed:
            raise draining()
        aliases = frozenset([alias] if alias else [])
        if (loaded := self._loaded.get(config.name)) is not None:
            if loaded.supervisor.state != "failed":
                require_same(loaded.config, config)
                self._check_names(config.name, aliases)
                loaded.aliases |= aliases
                done: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
                done.set_result(loaded)
                return done
            loaded.supervisor.retire()  # its process is gone already
            self._release_text(self._loaded.pop(config.name))
        if (loading := self._loading.get(config.name)) is not None:
            require_same(loading.config, config)
            loading.aliases |= aliases
            loading.on_request &= on_request
            return loading.task
        self._check_names(config.name, aliases)
        return self._start_load(config, aliases, on_request=on_request)

    async def unload(self, name: str) -> None:
        """Stop its engine; open streams end with `model_unloaded`. Stops a load in progress too. Raises
        ApiError 404.
        """
        if (loading := self._loading.get(name)) is not None:
            await self._cancel_load(loading)
            return
        if self._failures.pop(name, None) is not None:
            return
        model = self.find(name)
        if model is None:
            raise model_not_found(name)
        # One that is cancelled before its first step would leave the engine to nobody.
        await asyncio.shield(self.begin_unload(model))

    def begin_unload(self, model: LoadedModel) -> "asyncio.Task[None]":
        """Stop a model's engine in the background: it may still write KV blocks. See `finish_unloads`."""
        del self._loaded[model.name]
        ending = asyncio.create_task(self._end(model), name=f"unload {model.name}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def finish_unloads(self) -> None:
        """Wait until the engines of unloaded models have ended."""
        while self._ending:
            await asyncio.wait(self._ending)

    async def _end(self, model: LoadedModel) -> None:
        await model.supervisor.stop()
        self._release_text(model)

    def _release_text(self, model: LoadedModel) -> None:
        """Keep the tokenizer for a while: models may be used by turns."""
        model.text.close()
        freed = self._texts.release(model.path)
        loop = asyncio.get_running_loop()
        loop.call_later(_FREE_S, freed.clear)
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = loop.call_later(_TEXT_S, self._texts.clear)

    def _start_load(
        self, config: EngineConfig, aliases: frozenset[str], *, on_request: bool
    ) -> "asyncio.Task[LoadedModel]":
        self._failures.pop(config.name, None)
        loading = _Loading(config, aliases, self._supervise(config, self._options), on_request)
        self._loading[config.name] = loading
        loading.task = asyncio.create_task(self._load(loading), name=f"load {config.name}")
        loading.task.add_done_callback(_retrieve)
        return loading.task

    async def _load(self, loading: _Loading) -> LoadedModel:
        config, supervisor = loading.config, loading.supervisor
        path = Path(config.model_path)
        try:
            # A task of its own: one whose TaskGroup failed counts as cancelled, and before Python 3.11.3 the
            # next asyncio.timeout in it, that of `stop`, would end the load without its error.
            text = await asyncio.create_task(self._load_parts(loading, path))
        except BaseExceptionGroup as failures:
            self._texts.release(path)
            error = _as_api_error(failures.exceptions[0])
            await supervisor.stop(error.code or "load_failed", error.message)  # nobody unloaded it
            self._failures[config.name] = error.message
            log.error("%s could not be loaded: %s", config.name, error.message)  # noqa: TRY400
            raise error from failures
        except asyncio.CancelledError:
            await supervisor.stop()
            self._texts.release(path)
            raise
        finally:
            del self._loading[config.name]
        now = time.time()
        loaded_text = _with_warnings(config.name, text, supervisor)
        model = LoadedModel(
            name=config.name,
            aliases=loading.aliases,
            path=path,
            config=config,
            supervisor=supervisor,
            text=loaded_text,
            loaded_at=now,
            last_used=now,
            clock=self.clock,
            idle_since=self.clock(),
            on_request=loading.on_request,
        )
        self._loaded[config.name] = model
        self._has_served = True
        return model

    async def _load_parts(self, loading: _Loading, path: Path) -> TextModel:
        """Load engine and tokenizer in parallel, the slower first. The first failure ends both."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start(loading))
            text = group.create_task(self._load_text_beside(loading.supervisor, path))
        return text.result()

    async def _start(self, loading: _Loading) -> None:
        supervisor, config = loading.supervisor, loading.config
        # Nobody asks for a start after a cool-down: it pushes out no model that the owner loaded meanwhile.
        supervisor.readmit = lambda config: self.admit(config, True)
        self._spares.begin()
        try:
            supervisor.admitted = await self.admit(config, loading.on_request)
        except BaseException:
            self._spares.discard_ahead()
            raise
        await supervisor.start()

    async def _load_text_beside(self, supervisor: Supervisor, path: Path) -> TextModel:
        await supervisor.launched()  # a large tokenizer keeps the interpreter for half a second
        return await asyncio.to_thread(self._texts.load, path)

    async def _cancel_load(self, loading: _Loading) -> None:
        loading.task.cancel()
        await asyncio.wait({loading.task})
        if self._loading.get(loading.config.name) is loading:  # it was cancelled before its first step
            del self._loading[loading.config.name]

    def _check_names(self, name: str, aliases: Iterable[str]) -> None:
        """Raise ApiError 409 if a name or alias already means another model."""
        for wanted in (name, *aliases):
            for other, taken in self._names():
                if wanted in taken and other != name:
                    raise ApiError(409, f"The name {wanted} already belongs to {other}.", code="name_taken")

    def _names(self) -> list[tuple[str, frozenset[str]]]:
        loaded = [(m.name, m.aliases | {m.name}) for m in self._loaded.values()]
        loading = [(m.config.name, m.aliases | {m.config.name}) for m in self._loading.values()]
        return loaded + loading

    # ------------------------------------------------------------------ lookup

    def get(self, model: str | None) -> LoadedModel:
        """Find the model for a request. Raises ApiError: 404, 400 without a name, 503 while loading or
        at the end.

        A failed or restarting model is returned: its supervisor knows what to answer.
        """
        if self._closed:
            raise draining()
        name = self._only_name() if model is None else model
        found = self.find(name)
        if found is not None:
            found.touch()
            return found
        if any(name in taken for _, taken in self._names()):
            raise model_loading(name)
        if name in self._failures:
            raise load_failed(name)
        raise model_not_found(name)

    def models(self) -> list[LoadedModel]:
        return list(self._loaded.values())

    def loading(self) -> list[Supervisor]:
        """Supervisors of the models that are being loaded for the first time; see `Supervisor.progress`."""
        return [loading.supervisor for loading in self._loading.values()]

    def failures(self) -> dict[str, str]:
        """Models whose last load failed, with the reason."""
        return dict(self._failures)

    def readiness(self) -> Readiness:
        if self._closed:
            return Readiness(ready=False, cause="shutting down")
        failures = [
            ModelReadiness(name, "failed", f"{name} could not be loaded: {cause}")
            for name, cause in self._failures.items()
        ]
        loaded = [
            ModelReadiness(model.name, model.supervisor.state, model.supervisor.readiness()[1])
            for model in self._loaded.values()
        ]
        loading = [
            ModelReadiness(
                name, "loading", f"{name} is loading: {each.supervisor.load_stage}", each.on_request
            )
            for name, each in self._loading.items()
        ]
        return judge_readiness(failures, loaded, loading, has_served=self._has_served)

    def find_name_by_path(self, path: Path) -> str | None:
        """Name of the loaded or loading model with this folder."""
        loaded = (model.name for model in self._loaded.values() if model.path == path)
        loading = (name for name, each in self._loading.items() if Path(each.config.model_path) == path)
        return next(loaded, None) or next(loading, None)

    def knows(self, name: str) -> bool:
        """Return whether it is loaded, being loaded, or failed to load."""
        return name in self._failures or any(name in taken for _, taken in self._names())

    def find(self, name: str) -> LoadedModel | None:
        """Find by name or alias, without counting as a use."""
        if (exact := self._loaded.get(name)) is not None:
            return exact
        return next((m for m in self._loaded.values() if name in m.aliases), None)

    def _only_name(self) -> str:
        names = [*self._loaded, *self._loading]
        if len(names) == 1:
            return names[0]
        text = "Several models are loaded: name one." if names else "No model is loaded: name one."
        raise ApiError(400, text, param="model", code="model_required")

    # ------------------------------------------------------------------ shutdown

    async def close(self) -> None:
        """Stop every engine."""
        self._closed = True
        self._spares.close()
        await asyncio.gather(*(self._cancel_load(loading) for loading in list(self._loading.values())))
        await asyncio.gather(*(self._stop(model) for model in self._loaded.values()))
        self._loaded.clear()
        await self.finish_unloads()
        if self._forgetting is not None:
            self._forgetting.cancel()

    def _busy(self) -> bool:
        return any(model.supervisor.open_requests for model in self._loaded.values())

    async def _stop(self, model: LoadedModel) -> None:
        await model.supervisor.stop("server_shutdown", "The server is shutting down.")
        model.text.close()


async def wait_for_load(loading: "asyncio.Future[LoadedModel]", ended: ApiError) -> LoadedModel:
    """Wait for a shared load. Raises `ended` if the load is cancelled, but not the waiting task: a
    cancellation would leave the caller without an answer.
    """
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if loading.cancelled() and (task is None or not task.cancelling()):
            raise ended from None
        raise


def _as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(400, str(error), code=error.code)
    log.error("unexpected error while loading", exc_info=error)
    return ApiError(500, "Loading failed with an internal error.", code="engine_error", type="server_error")


def _with_warnings(name: str, text: TextModel, supervisor: Supervisor) -> TextModel:
    """Return the text model with the warnings that need the weights' vocabulary size. Logs each warning."""
    text = text.beside_embedding(0 if supervisor.info is None else supervisor.info.vocab_size)
    for warning in text.warnings:
        log.warning("%s: %s", name, warning)
    return text


def _retrieve(task: "asyncio.Task[LoadedModel]") -> None:
    """Read the exception of a background load, which may have no waiter. It is in the log and in
    `failures`.
    """
    if not task.cancelled():
        task.exception()
