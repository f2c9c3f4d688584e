"""Times of a request: the daemon's timestamps around those that the engine reported for each sequence."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from llmbox.engine.ipc.sequence_times import PhaseTimes, SequenceTimes

from ..engines.request_journal import TokenStream
from ..store.record import (
    MOST_SEQUENCES,
    NO_PHASE,
    PhaseRecord,
    SequenceRecord,
    encode_schedule,
    encode_sequence,
)
from ..tracing.tracer import TraceContext

if TYPE_CHECKING:
    from .open_request import OpenRequest

_MOST_STALLS: Final = 1000
NO_TIMES: Final = PhaseTimes()
_PHASE_FIELDS: Final = tuple(each.name for each in fields(PhaseTimes))


@dataclass(slots=True)
class ExchangeClock:
    """Moments of an HTTP exchange around its request, in `time.monotonic()` seconds, and its trace."""

    began: float = field(default_factory=time.monotonic)
    """Headers were read."""
    arrived: float = 0.0
    """Body was read and parsed; 0: not yet."""
    model_s: float = 0.0
    """Seconds of waiting for a model."""
    stalls: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_STALLS))
    """(end, seconds) of the last waits for a client that did not read its stream."""
    trace: TraceContext | None = None


def sequence_records(request: "OpenRequest", ended: float) -> list[bytes]:
    """Return the encoded times of the request's sequences."""
    clock = request.generation.clock
    streams = sorted(
        (each.stream for each in request.sequences), key=lambda stream: stream.received_at or ended
    )
    entered = min((stream.added_at for stream in streams), default=ended)
    arrived = min(clock.arrived or entered, entered)
    before = {
        "reading": arrived - clock.began,
        "model": clock.model_s,
        "prompt": entered - arrived - clock.model_s,
    }
    cached = request.usage.cached_tokens if len(streams) == 1 else 0
    made = []
    for stream in streams[-MOST_SEQUENCES:]:
        received = min(ended, stream.received_at or ended)
        end = ended if stream is streams[-1] else received
        seconds = before | _in_daemon(stream, entered, received, end, clock)
        values: dict[str, Any] = {name: micro(value) for name, value in seconds.items()}
        record = SequenceRecord(
            total=micro(end - clock.began),
            preemptions=stream.times.preemptions if stream.times else 0,
            prompt_tokens=len(stream.request.prompt_ids),
            cached_tokens=cached,
            output_tokens=len(stream.output_ids),
            schedule=encode_schedule(stream.times.schedule if stream.times else None),
            **values,
            **_phases(stream.times, end),
        )
        made.append(encode_sequence(record))
    return made


def _in_daemon(
    stream: TokenStream, entered: float, received: float, end: float, clock: ExchangeClock
) -> dict[str, float]:
    """Return the daemon's times of a sequence, and its waits in the engine."""
    sent, times = stream.sent_at, stream.times
    if sent is None:
        return {"gateway": end - entered}
    made = {"gateway": sent - stream.lost_s - entered, "lost": stream.lost_s}
    if times is None:
        return made | {"unsplit": received - sent, **_delivery(received, end, clock)}
    if end <= times.arrived_at:  # given up before the engine had read it
        return made | {"sending": end - sent}
    made["sending"] = times.arrived_at - sent
    kept = _kept(times, end)
    made |= {"queued": times.queued * kept, "preempted": times.preempted * kept}
    return made | _delivery(min(times.ended_at, end), end, clock)


def _delivery(done: float, end: float, clock: ExchangeClock) -> dict[str, float]:
    stalled = sum(min(seconds, at - done) for at, seconds in clock.stalls if done < at <= end)
    return {"delivery": end - done - stalled, "client": stalled}


def _kept(times: SequenceTimes, end: float) -> float:
    """Return the share of the engine's time that lies before the end: an aborted sequence ends a little later
    there than here.
    """
    whole = times.ended_at - times.arrived_at
    return 1.0 if times.ended_at <= end or whole <= 0 else max(0.0, end - times.arrived_at) / whole


def _phases(times: SequenceTimes | None, end: float) -> dict[str, Any]:
    if times is None:
        return {}
    kept = _kept(times, end)
    return {name: _phase(getattr(times, name), kept) for name in ("prefill", "recompute", "decode")}


def _phase(phase: PhaseTimes, kept: float) -> PhaseRecord:
    if phase == NO_TIMES:
        return NO_PHASE
    values = [getattr(phase, name) for name in _PHASE_FIELDS]
    return PhaseRecord(*(micro(value * kept) if isinstance(value, float) else value for value in values))


def micro(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def call_after_times(streams: Sequence[TokenStream], call: Callable[[], None]) -> bool:
    """Call back once the engine has reported the times of all aborted sequences. False: none is awaited."""
    awaited = {id(stream) for stream in streams if stream.awaits_times}

    def note(stream: TokenStream) -> None:
        awaited.discard(id(stream))
        if not awaited:
            call()

    for stream in streams:
        if stream.awaits_times:
            stream.on_times = note
    return bool(awaited)
