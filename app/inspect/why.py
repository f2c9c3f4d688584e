"""Split of a finished request's time, in rows that add up to it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import ApiError
from ..services import Services
from ..store.record import PhaseRecord, RequestRecord, SequenceRecord, decode_sequence

_SECOND: Final = 1e6
"""Microseconds."""
_LEAST: Final = 1000
"""Part of the total below which the rest is the rounding of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """One row. `kind` groups rows: `wait`, `prefill`, `decode`, `engine`, `client` or `other`."""

    name: str
    title: str
    kind: str
    seconds: float
    percent: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTime:
    """Time of the sequence that ended last. It begins with the HTTP headers and ends with the answer's last
    token, after which the rest of the answer is written.
    """

    id: str
    model: str
    total_s: float
    rows: list[TimeShare]
    """Rows with a time, in the order in which they began."""
    sequences: int
    """Sequences of the request whose times are kept."""
    trace_id: str = ""
    """Trace that it belongs to; empty: none."""


def _computed(record: SequenceRecord) -> str:
    computed = max(0, record.prompt_tokens - record.cached_tokens)
    cached = f", {record.cached_tokens:,} from the prefix cache" if record.cached_tokens else ""
    return f"{_count(computed, 'token')} in {_count(record.prefill.steps, 'chunk')}{cached}"


def _decoded(record: SequenceRecord) -> str:
    return f"{_count(record.output_tokens, 'token')} in {_count(record.decode.steps, 'step')}"


def _company(phase: PhaseRecord) -> str:
    return f"{phase.others / phase.steps:.1f} other sequences in a step" if phase.steps else ""


def _mixed(record: SequenceRecord) -> str:
    return f"in {record.decode.mixed:,} of {_count(record.decode.steps, 'step')}"


def _preemptions(record: SequenceRecord) -> str:
    return _count(record.preemptions, "preemption")


def _no_note(_: SequenceRecord) -> str:
    return ""


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" + "s" * (number != 1)


def _shared(phase: PhaseRecord) -> int:
    return phase.decoding + phase.prompts


def _whole(phase: PhaseRecord) -> int:
    return phase.own + _shared(phase) + phase.absent


def _between(record: SequenceRecord) -> int:
    return record.prefill.between + record.recompute.between + record.decode.between


Value = Callable[[SequenceRecord], int]
Note = Callable[[SequenceRecord], str]
_ROWS: Final[tuple[tuple[str, str, str, Value, Note], ...]] = (
    ("reading", "Reading the request", "engine", lambda it: it.reading, _no_note),
    ("model", "Waiting for the model to be in memory", "wait", lambda it: it.model, _no_note),
    ("prompt", "Chat template, tokens, images", "engine", lambda it: it.prompt, _no_note),
    ("gateway", "Waiting in the gateway", "wait", lambda it: it.gateway, _no_note),
    ("lost", "Lost with an engine that died", "wait", lambda it: it.lost, _no_note),
    ("sending", "Sending to the engine", "wait", lambda it: it.sending, _no_note),
    ("unsplit", "In the engine, which told no times", "other", lambda it: it.unsplit, _no_note),
    ("queued", "Waiting in the scheduler's queue", "wait", lambda it: it.queued, _no_note),
    ("prefill_own", "Prompt: its own chunks", "prefill", lambda it: it.prefill.own, _computed),
    (
        "prefill_shared",
        "Prompt: others in the same steps",
        "wait",
        lambda it: _shared(it.prefill),
        lambda it: _company(it.prefill),
    ),
    ("prefill_absent", "Prompt: steps without it", "wait", lambda it: it.prefill.absent, _no_note),
    ("decode_own", "Answer: its own tokens", "decode", lambda it: it.decode.own, _decoded),
    (
        "decode_shared",
        "Answer: others' answers in the same steps",
        "wait",
        lambda it: it.decode.decoding,
        lambda it: _company(it.decode),
    ),
    (
        "decode_prompts",
        "Answer: others' prompts in the same steps",
        "wait",
        lambda it: it.decode.prompts,
        _mixed,
    ),
    ("decode_absent", "Answer: steps without it", "wait", lambda it: it.decode.absent, _no_note),
    ("preempted", "Waiting after preemption", "wait", lambda it: it.preempted, _preemptions),
    ("recompute", "Computing again after preemption", "prefill", lambda it: _whole(it.recompute), _no_note),
    ("between", "Engine between steps", "engine", _between, _no_note),
    ("delivery", "Delivery: text, events", "engine", lambda it: it.delivery, _no_note),
    ("client", "Waiting for the client to read", "client", lambda it: it.client, _no_note),
)


def split(record: SequenceRecord) -> list[TimeShare]:
    """Return the rows with a time. They add up to the total; what is left over is the row `other`."""
    rows = list(_split(record))
    rest = record.total - sum(value(record) for *_, value, _ in _ROWS)
    is_told = abs(rest) * _LEAST > record.total
    return rows + ([_share("other", "Other", "other", rest, record)] if is_told else [])


def _split(record: SequenceRecord) -> Iterator[TimeShare]:
    for name, title, kind, value, note in _ROWS:
        if micros := value(record):
            yield _share(name, title, kind, micros, record, note(record))


def _share(
    name: str, title: str, kind: str, micros: int, record: SequenceRecord, note: str = ""
) -> TimeShare:
    percent = 100 * micros / record.total if record.total else 0.0
    return TimeShare(name=name, title=title, kind=kind, seconds=micros / _SECOND, percent=percent, note=note)


async def times_of_record(services: Services, record: RequestRecord) -> RequestTime | None:
    """Return the times of a request of the log; None where none are kept."""
    return _times(record, await services.request_log.get_times(record.id))


def _times(record: RequestRecord, kept: Sequence[bytes]) -> RequestTime | None:
    last = decode_sequence(kept[-1]) if kept else None
    if last is None:
        return None
    return RequestTime(
        id=record.id,
        model=record.model,
        total_s=last.total / _SECOND,
        rows=split(last),
        sequences=len(kept),
        trace_id=record.trace_id,
    )


async def request_time(services: Services, request_id: str) -> RequestTime:
    """Split the time of a finished request. Raises ApiError 404 and 409."""
    if services.gateway.is_open(request_id):
        raise ApiError(
            409,
            f"The request {request_id!r} is still running. Ask again once it has ended.",
            "request_in_flight",
            "request_id",
        )
    kept = await services.request_log.get_times(request_id)  # first: it waits for rows that are being written
    record = await services.request_log.get(request_id)
    if record is None:
        raise ApiError(
            404,
            f"No request {request_id!r} is known. `llmbox requests` lists them.",
            "request_not_found",
            "request_id",
        )
    times = _times(record, kept)
    if times is None:
        raise ApiError(
            404, f"No times of {request_id!r} are kept: {_reason(record)}.", "times_not_kept", "request_id"
        )
    return times


def _reason(record: RequestRecord) -> str:
    if record.error_code and not record.fingerprint:
        return f"it was refused before it reached an engine ({record.error_code})"
    return "it is older than this version of llmbox, or it was cancelled a moment ago"
