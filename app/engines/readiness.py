"""Readiness of the box and of each model, as `/ready` and the dashboards report it. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from .admission import State


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
    """Readiness of the box, with that of each model."""

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
