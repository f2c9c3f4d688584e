"""Annotations of charts: loads, evictions, refusals, restarts. Kept as long as the history."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ..store import RequestLog
from .history import KEEP

if TYPE_CHECKING:
    from sqlalchemy import Engine

log = logging.getLogger(__name__)

KEPT_S: Final = max(KEEP.values())
REFUSALS_S: Final = 10
"""Seconds whose refusals make one annotation."""
REFUSALS: Final = {429, 503}
"""Refusals by the box, as opposed to the caller's own errors."""
MOST: Final = 500


class Annotation(Struct, frozen=True, kw_only=True):
    """One annotation. `kind` is `load`, `eviction`, `refusal`, `restart` or `failure`."""

    time: float
    """Unix seconds."""
    kind: str
    model: str
    text: str


class Annotations:
    """Recorder fed by the event stream. Use it only from the daemon's event loop."""

    def __init__(self, store: RequestLog, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._recent: deque[Annotation] = deque(maxlen=MOST)
        """Annotations of this daemon, whether they reached the disk or not."""
        self._refused: dict[tuple[str, str], int] = {}
        self._refused_from = 0.0

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """Record an event of any kind."""
        if kind == "request.refused":
            if data["http_status"] in REFUSALS:
                self._refuse(str(data["model"]), str(data["error_code"]))
        elif (mark := _format_event(kind, data)) is not None:
            self._add(Annotation(time=self._clock(), kind=mark[0], model=str(data["model"]), text=mark[1]))

    async def since(self, begin: float, most: int = MOST) -> list[Annotation]:
        """Annotations since `begin`, newest first."""
        self._end_refusals()
        marks = {*await self._on_disk(begin, most), *(mark for mark in self._recent if mark.time >= begin)}
        return sorted(marks, key=lambda mark: (mark.time, mark.kind, mark.model), reverse=True)[:most]

    def close(self) -> None:
        """Hand pending annotations to the store. Call it before the store closes."""
        self._end_refusals()

    def _refuse(self, model: str, code: str) -> None:
        if self._clock() - self._refused_from >= REFUSALS_S:
            self._end_refusals()
            self._refused_from = self._clock()
        self._refused[model, code] = self._refused.get((model, code), 0) + 1

    def _end_refusals(self) -> None:
        for (model, code), count in self._refused.items():
            text = f"{count} request{'' if count == 1 else 's'} refused: {code}"
            self._add(Annotation(time=self._refused_from, kind="refusal", model=model, text=text))
        self._refused.clear()
        self._refused_from = 0.0

    def _add(self, mark: Annotation) -> None:
        self._recent.append(mark)
        oldest = mark.time - KEPT_S
        self._store.submit(lambda engine: _write(engine, mark, oldest))

    async def _on_disk(self, begin: float, most: int) -> list[Annotation]:
        try:
            return await self._store.read(lambda engine: _find(engine, begin, most), [])
        except Exception as error:  # noqa: BLE001 - a damaged file: what is in memory is still shown
            log.warning("marks of the telemetry cannot be read: %s", str(error).splitlines()[0])
            return []


def _format_event(kind: str, data: dict[str, Any]) -> tuple[str, str] | None:
    """Return (kind, text) of an event's annotation; None for events without one."""
    cause = str(data.get("cause") or data.get("reason") or "")
    match kind:
        case "model.ready":
            return "load", "ready"
        case "model.evicted":
            return "eviction", cause
        case "model.refused":
            return "refusal", cause
        case "model.restarting":
            return "restart", cause
        case "model.failed":
            return "failure", cause
    return None


def _write(engine: "Engine | None", mark: Annotation, oldest: float) -> None:
    if engine is None:
        return
    try:
        from ..store.queries import telemetry as mark_queries  # noqa: PLC0415 - SQLAlchemy belongs to the store's threads

        mark_queries.add_annotation(engine, mark.time, mark.kind, mark.model, mark.text, oldest)
    except Exception as error:  # noqa: BLE001 - full disk, locked or damaged file: a mark is lost, no more
        log.debug("telemetry mark lost: %s", str(error).splitlines()[0])


def _find(engine: "Engine", begin: float, most: int) -> list[Annotation]:
    from ..store.queries import telemetry as mark_queries  # noqa: PLC0415 - as above

    rows = mark_queries.find_annotations(engine, begin, most)
    return [Annotation(time=at, kind=kind, model=model, text=text) for at, kind, model, text in rows]
