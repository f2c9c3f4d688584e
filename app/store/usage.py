"""Usage from the request log: by key, by key and model, outcomes over time. Importable without SQLAlchemy."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from ..config.entries import LatencyTarget, TokenPrice
from . import queries as sql
from .record import RecordFilter, RecordTotals
from .writer import RequestLog

if TYPE_CHECKING:
    from sqlalchemy import Engine

T = TypeVar("T")


class KeyUsage(Struct, frozen=True, kw_only=True):
    """Usage of one key since `since`, the oldest kept row. Times are Unix seconds."""

    requests: int
    errors: int
    """Failed requests, included in `requests`."""
    tokens_in: int
    tokens_out: int
    since: float
    last: float


class ModelUsage(Struct, frozen=True, kw_only=True):
    """Usage of one model by one key in a time range."""

    key: str
    model: str
    requests: int
    failed: int
    """Requests that failed by the server's fault."""
    refused: int
    """Requests that the box refused: 429, and 503 while it was busy."""
    tokens_in: int
    tokens_cached: int
    """Tokens of prompts that the prefix cache had, included in `tokens_in`."""
    tokens_out: int
    measured: int
    """Answers with a time to first token."""
    good: int | None
    """Answers within the model's latency target; None without one."""
    cost: float | None
    """None without a price."""


class Outcomes(Struct, frozen=True, kw_only=True):
    """Requests by how they ended, in intervals of `step` seconds from `times` (Unix) on."""

    step: int
    times: list[int]
    answered: list[int]
    refused: list[int]
    caller: list[int]
    """Errors of callers, and requests that they cancelled."""
    failed: list[int]


async def usage_by_key(store: RequestLog) -> Mapping[str, KeyUsage]:
    """Usage by the key's name; callers without a key are under `""`. Empty while the log cannot be read."""
    rows = await _read(store, lambda engine: sql.requests.by_key(engine))  # noqa: PLW0108 - it imports
    return {
        key: KeyUsage(requests=count, errors=errors, tokens_in=into, tokens_out=out, since=since, last=last)
        for key, count, errors, into, out, since, last in rows
    }


async def usage_by_model(
    store: RequestLog,
    since: float,
    price: Callable[[str], TokenPrice | None],
    target: Callable[[str], LatencyTarget | None],
) -> list[ModelUsage]:
    """Usage by key and model since a Unix time, most requests first. Empty while the log cannot be read."""

    def find(engine: "Engine") -> Sequence[Any]:
        rows = sql.requests.by_model(engine, since)
        targets = {model: found for model in {row.model for row in rows} if (found := target(model))}
        good: dict[tuple[str, str], int] = {}
        for model, each in targets.items():
            for key, count in sql.requests.count_good(engine, since, model, each.ttft, each.tpot):
                good[key, model] = count
        return [(row, good.get((row.key, row.model), 0) if row.model in targets else None) for row in rows]

    made = []
    for row, good in await _read(store, find):
        cost = price(row.model)
        made.append(
            ModelUsage(
                **row._mapping,  # noqa: SLF001 - public in SQLAlchemy
                good=good,
                cost=None if cost is None else cost.cost(row.tokens_in, row.tokens_out),
            )
        )
    return made


async def outcomes(store: RequestLog, since: int, until: int, step: int) -> Outcomes:
    """Count the requests of each interval by how they ended. All zero while the log cannot be read."""
    begin = since // step * step
    times = list(range(begin, until + 1, step))
    columns: dict[str, list[int]] = {
        name: [0] * len(times) for name in ("answered", "refused", "caller", "failed")
    }
    for row in await _read(store, lambda engine: sql.requests.outcomes(engine, begin, step)):
        if row.interval < len(times):
            for name, column in columns.items():
                column[row.interval] = getattr(row, name)
    return Outcomes(step=step, times=times, **columns)


async def totals_of(store: RequestLog, want: RecordFilter) -> RecordTotals:
    """Totals of the records that match a filter. Zeros while the log cannot be read."""
    found: Sequence[RecordTotals] = await _read(store, lambda engine: [sql.requests.totals(engine, want)])
    return found[0] if found else RecordTotals()


async def known_names(store: RequestLog) -> tuple[list[str], list[str]]:
    """Models and keys that the log knows. Empty while it cannot be read."""
    found = await _read(store, lambda engine: sql.requests.names(engine))  # noqa: PLW0108 - it imports
    return (found[0], found[1]) if found else ([], [])


async def _read(store: RequestLog, find: "Callable[[Engine], Sequence[Any]]") -> Sequence[Any]:
    return await store.read(find, [], "usage")
