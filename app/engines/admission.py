"""Admission: places in a model's queue, and the refusals of a model that cannot take a request now."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal

from llmbox.engine.config import EngineConfig

from ..errors import ApiError

State = Literal["loading", "ready", "restarting", "failed", "stopped"]

_LONGEST_RETRY_AFTER: Final = 60
_RETRY_LOADING: Final = 2


def refuse_by_state(name: str, state: State, seconds_to_try: int | None = None) -> None:
    """Raise ApiError unless the model takes requests.

    A restarting model takes requests; they wait for the next engine. `seconds_to_try`: seconds until the
    engine of a failed model is started again.
    """
    match state:
        case "loading":
            raise model_loading(name)
        case "failed":
            raise engine_failed(name, seconds_to_try)
        case "stopped":
            raise model_unloaded(name)
        case _:
            return


def engine_failed(name: str, seconds_to_try: int | None) -> ApiError:
    """Error 503 of a model whose engine was given up."""
    if seconds_to_try is None:
        return _unavailable(f"The engine of {name} has failed. Load the model again.", "engine_failed")
    error = _unavailable(
        f"The engine of {name} has failed too often. It is started again in {seconds_to_try} s, and at once "
        "when the box's owner loads the model.",
        "engine_failed",
    )
    error.headers = {"Retry-After": str(seconds_to_try)}
    return error


def model_loading(name: str) -> ApiError:
    """Error 503 of a model that is still loading."""
    error = _unavailable(f"{name} is still loading.", "model_loading")
    error.headers = {"Retry-After": str(_RETRY_LOADING)}
    return error


def model_unloaded(name: str) -> ApiError:
    """Return the error 503 of a model that was unloaded while a request waited for it."""
    return _unavailable(f"{name} was unloaded.", "model_unloaded")


def draining() -> ApiError:
    """Error 503 of a daemon that is shutting down."""
    error = _unavailable("The server is shutting down.", "draining")
    error.headers = {"Retry-After": str(_RETRY_LOADING)}
    return error


def load_failed(name: str) -> ApiError:
    """Error 503 of a model whose last load failed."""
    return _unavailable(f"{name} could not be loaded; the log says why.", "model_load_failed")


def queue_full(name: str, open_requests: int, own: int, retry_after: int) -> ApiError:
    """Error 429 of a full queue. `own`: the caller's open requests."""
    return ApiError(
        429,
        f"The queue of {name} is full ({open_requests} requests are open, {own} of this caller). "
        "Try again later.",
        code="queue_full",
        type="rate_limit_error",
        headers={"Retry-After": str(retry_after)},
    )


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, type="server_error")


class FinishRate:
    """Running mean of the time between finished requests, for `Retry-After`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = -math.inf
        self._gap = 1.0

    def record_finish(self) -> None:
        now = self._clock()
        gap = min(now - self._last, float(_LONGEST_RETRY_AFTER))
        self._last = now
        self._gap += 0.1 * (gap - self._gap)

    def seconds_to_next(self) -> int:
        return min(max(1, math.ceil(self._gap)), _LONGEST_RETRY_AFTER)


def require_same(have: EngineConfig, wanted: EngineConfig) -> None:
    """Raise ApiError 409 if a loaded model has other settings than `wanted`."""
    if have != wanted:
        raise ApiError(
            409, f"{have.name} is loaded with other settings. Unload it first.", code="model_already_loaded"
        )


def model_not_found(name: str) -> ApiError:
    """Error 404 of an unknown model."""
    message = f"The model {name!r} does not exist here. Names that do are listed at /v1/models."
    return ApiError(404, message, "model_not_found", "model")


class QueueReservations:
    """Places of one model reserved by requests that are not submitted yet."""

    def __init__(self) -> None:
        self.places = 0
        self.of_tenant: Counter[str] = Counter()

    def hold(self, places: int, tenant: str = "") -> "QueueReservation":
        """Reserve places until they are released or the running task ends, whichever is first."""
        return QueueReservation(self, places, tenant)

    def add(self, places: int, tenant: str) -> None:
        """Count reserved places. `places` is negative when they are given back."""
        self.places += places
        self.of_tenant[tenant] += places
        if not self.of_tenant[tenant]:
            del self.of_tenant[tenant]


class QueueReservation:
    """Reservation of one request. `release` gives it back, once."""

    __slots__ = ("_of", "_places", "_tenant")

    def __init__(self, of: QueueReservations, places: int, tenant: str) -> None:
        self._of = of
        self._places = places
        self._tenant = tenant
        of.add(places, tenant)
        task = asyncio.current_task()
        assert task is not None, "requests are prepared on the event loop"
        task.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        self._of.add(-self._places, self._tenant)
        self._places = 0
