"""Model in memory: its engine, tokenizer, users and time to live; readiness of it and of the daemon."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import ModelInfo

from ..text.tokenizer.tokenizer import TextModel
from .admission import State
from .supervisor import Supervisor


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedModel:
    """Model that is ready to serve, with its aliases and its use."""

    name: str
    aliases: frozenset[str]
    path: Path
    config: EngineConfig
    supervisor: Supervisor
    text: TextModel
    loaded_at: float
    """Unix seconds."""
    last_used: float
    """Unix seconds; set by `EngineManager.get`."""
    clock: Callable[[], float] = time.monotonic
    idle_since: float = 0.0
    """Time at which the last request ended, in seconds of `clock`."""
    ttl: float | None = None
    """Time to live: idle seconds after which it is unloaded. None keeps it."""
    lasting_ttl: float | None = None
    """Time to live of its next load: `ttl`, but 0 ends this load alone."""
    pinned: bool = False
    on_request: bool = False
    """Loaded because a request named it. Requests may then also set its time to live."""
    context_cap: int | None = None
    """Tokens: the context limit of an alias, where it is below the engine's window."""
    adapter: str = ""
    """Folder of the LoRA adapter that the request named; `name` is then the adapter's."""
    users: "set[asyncio.Task[Any]]" = field(default_factory=set)
    """Tasks of requests that found this model and have not ended."""

    @property
    def info(self) -> ModelInfo:
        """Facts of the model, which its engine reported when it was ready first."""
        assert self.supervisor.info is not None
        return self.supervisor.info

    @property
    def busy(self) -> bool:
        return bool(self.users) or self.supervisor.open_requests > 0 or self.supervisor.state == "restarting"

    def touch(self) -> None:
        """Mark the model as used by the running task (a request) until that task ends."""
        self.last_used = time.time()
        self.idle_since = self.clock()
        task = asyncio.current_task() if _in_loop() else None
        if task is not None and task not in self.users:
            self.users.add(task)
            task.add_done_callback(self._left)

    def _left(self, task: "asyncio.Task[Any]") -> None:
        self.users.discard(task)
        self.idle_since = self.clock()

    def with_alias_defaults(
        self, sampling: dict[str, float], system: str | None, context: int | None
    ) -> "LoadedModel":
        """Return the same load with other defaults, for one request."""
        defaults = {**self.text.generation_defaults, **sampling}
        text = replace(self.text, generation_defaults=defaults, system=system)
        return replace(self, text=text, context_cap=context)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ModelReadiness:
    """Readiness of one model."""

    name: str
    state: State
    cause: str
    """Reason why it does not answer; empty where it does."""
    on_request: bool = False
    """Loading because of an inference request: readiness of the box does not depend on it."""

    @property
    def problem(self) -> str:
        if not self.cause or self.on_request:
            return ""
        return self.cause if self.cause.startswith(f"{self.name} ") else f"{self.name}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Readiness of the daemon and of each model."""

    ready: bool
    cause: str
    """First problem found, even while other models answer."""
    models: Sequence[ModelReadiness] = ()


def judge_readiness(
    failures: Sequence[ModelReadiness],
    loaded: Sequence[ModelReadiness],
    loading: Sequence[ModelReadiness],
    *,
    has_served: bool,
) -> Readiness:
    """Combine the states of all models.

    The box is ready while any model answers. With none in memory it is not ready while an operator's load is
    in progress, nor after a failed load as long as nothing was served. Otherwise requests may load one.
    """
    models = [*failures, *loaded, *loading]
    if loaded:
        ready = any(not model.cause for model in loaded)
    else:
        ready = all(model.on_request for model in loading) and (has_served or not failures)
    return Readiness(ready, next((model.problem for model in models if model.problem), ""), models)
