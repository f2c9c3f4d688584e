"""Open request, from submission to its end: its streams, timestamps and one log record; the end of requests
whose key is revoked.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from llmbox.engine.ipc.messages import RequestOutput

from ..errors import ApiError
from ..lifecycle.drain import shutting_down
from ..security.rate_limit import TokenReservation
from ..store.record import LiveRequest, RequestRecord
from ..util.formatting import hide_folders
from .choice_stream import AnswerBuffer, ChoiceStream
from .generation import Delta, Generation, TimeLimits, TokenUsage

CLIENT_CLOSED = 499
"""Status in the log of a request whose client disconnected; never sent."""

_SHORTEST_RATE = 0.1
"""Seconds since the first token from which on a speed means something: an answer may arrive at once."""

_ENGINE_STATUS = {
    "does_not_fit": 400,
    "bad_adapter": 400,
    "request_too_large": 400,
    "invalid_request": 400,
    "grammar_error": 400,
    "queue_full": 429,
}
_UNAVAILABLE = {"engine_failed", "model_unloaded", "server_shutdown"}


@dataclass(slots=True)
class Timeline:
    """Timestamps in monotonic seconds, except `created` (Unix seconds)."""

    created: float
    began: float
    """Headers of its HTTP exchange were read: the first token and the end are counted from here."""
    submitted: float
    """Gateway took it, tokenized."""
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def waited(self) -> float:
        """Seconds before the gateway accepted it."""
        return self.submitted - self.began


class OpenRequest:
    """Context manager around reading `deltas` once. Leaving it aborts the work and writes the record."""

    def __init__(
        self,
        generation: Generation,
        sequences: list[ChoiceStream],
        on_end: Callable[["OpenRequest", int, str], None],
        gap_observer: Callable[[], Callable[[float], None]],
        transcript: AnswerBuffer | None = None,
        more: Iterator[ChoiceStream] | None = None,
        reservation: TokenReservation | None = None,
    ) -> None:
        """`gap_observer` is called at the first gap between two tokens; what it returns takes the seconds of
        each. `more`: streams submitted one by one, each when another has ended. `reservation`: of its key's
        token limit.
        """
        self.generation = generation
        self.sequences = sequences
        self.usage = TokenUsage(prompt_tokens=sum(map(len, generation.prompts)))
        submitted = time.monotonic()
        self.timeline = Timeline(time.time(), min(generation.clock.began, submitted), submitted)
        self.transcript = transcript
        self._more = more or iter(())
        self._reservation = reservation
        self.reason = ""
        """Message of the error that it ended with."""
        self._why: ApiError | None = None
        self._limits = TimeLimits(generation)
        self._prefix_ends: dict[int, str] = {}
        self._on_end = on_end
        self._gap_observer = gap_observer
        self._observe_gap: Callable[[float], None] | None = None
        self._last: list[float | None] = [None] * len(sequences)
        self._ended = False

    @property
    def created(self) -> int:
        return int(self.timeline.created)

    @property
    def resumes(self) -> int:
        return max(sequence.stream.resumes for sequence in self.sequences)

    @property
    def prefix_end(self) -> str:
        """Reason why the prefix cache had no more: one word per prompt, comma separated."""
        return ",".join(self._prefix_ends[prompt] for prompt in sorted(self._prefix_ends))

    def usage_now(self) -> TokenUsage:
        self.usage.output_tokens = sum(s.output_tokens for s in self.sequences)
        return self.usage

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all choices. Raises ApiError if the engine failed or the request was
        cancelled.
        """
        self._limits.start(self.cancel)
        try:
            if len(self.sequences) == 1:
                sequence = self.sequences[0]
                # `async for output in stream`, without a coroutine for each token.
                stream, outputs = sequence.stream, sequence.stream.outputs
                loop = asyncio.get_running_loop()
                while sequence.finish_reason is None:
                    if outputs:
                        yield self._delta(sequence, outputs.popleft())
                    elif stream.finished:
                        break
                    else:
                        stream.wake = loop.create_future()
                        await stream.wake
            else:
                async for sequence, output in self._merged():
                    yield self._delta(sequence, output)
            self.end(200, "")
        except ApiError as error:
            self._end_with(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the request if it is still open: the client left, or the answer could not be made."""
        if isinstance(error, ApiError):
            self._end_with(error)
        elif isinstance(error, Exception) and not isinstance(error, OSError):
            self._end_with(ApiError(500, "Something went wrong inside llmbox.", "internal_error"))
        elif self.generation.drain is not None and self.generation.drain.expired:
            self._end_with(shutting_down())  # its task was cancelled by the daemon's end
        else:
            self.end(CLIENT_CLOSED, "client_disconnected")

    def cancel(self, why: ApiError | None = None) -> None:
        """Cancel by order of the server: the client gets the error `why`, or one saying that an operator did
        it.
        """
        self._why = why
        for sequence in self.sequences:
            sequence.stream.cancel()

    def _end_with(self, error: ApiError) -> None:
        if not self._ended:
            self.reason = error.message
        self.end(error.status, error.code or "")

    def end(self, status: int, code: str) -> None:
        """Abort what still runs and write the record. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._limits.stop()
        for sequence in self.sequences:
            sequence.stream.cancel()
        self.usage_now()
        if self._reservation is not None:
            self._reservation.settle()
        self._on_end(self, status, code)

    def live(self) -> LiveRequest:
        now = time.monotonic()
        clock = self.timeline
        usage = self.usage_now()
        decoding = now - clock.first_token if clock.first_token is not None else 0.0
        generation = self.generation
        return LiveRequest(
            id=generation.id,
            model=generation.model.name,
            endpoint=generation.endpoint,
            key=generation.key,
            client=generation.client,
            state="queued"
            if clock.scheduled is None
            else "prefill"
            if clock.first_token is None
            else "decode",
            age=now - clock.began,
            stream=generation.stream,
            n=len(self.sequences),
            ttft=None if clock.first_token is None else clock.first_token - clock.began,
            tokens_per_second=usage.output_tokens / decoding if decoding >= _SHORTEST_RATE else None,
            resumes=self.resumes,
            prefix_end=self.prefix_end,
            **usage.counts(),
        )

    def _delta(self, sequence: ChoiceStream, output: RequestOutput) -> Delta:
        """Convert one output. Raises ApiError if the engine failed or the request was cancelled."""
        if output.finish_reason is not None:
            if output.finish_reason == "abort" and self._limits.has_ended_answer:
                output = replace(output, finish_reason="length")  # the text so far
            if output.finish_reason in {"error", "abort"}:
                raise self._failure(output)
        if output.scheduled_at is not None or output.prefix_end is not None:
            self._note_prefill(sequence, output)
        if output.token_ids:
            self._note_tokens(sequence, output)
        delta = sequence.feed(output)
        if self.transcript is not None:
            self.transcript.add(delta)
        return delta

    def _note_tokens(self, sequence: ChoiceStream, output: RequestOutput) -> None:
        count = len(output.token_ids)
        if output.draft_tokens:
            self.usage.draft_tokens += output.draft_tokens
            self.usage.accepted_tokens += output.accepted_tokens
        if not self._limits.has_tokens:
            self._limits.note_first_token()
        if self._reservation is not None:
            self._reservation.spend(count)
        now, last = time.monotonic(), self._last[sequence.index]
        self._last[sequence.index] = self.timeline.last_token = now
        if last is not None:
            if self._observe_gap is None:
                self._observe_gap = self._gap_observer()
            self._observe_gap((now - last) / count)
        elif self.timeline.first_token is None:
            self.timeline.first_token = now

    async def _merged(self) -> AsyncIterator[tuple[ChoiceStream, RequestOutput]]:
        queue: asyncio.Queue[tuple[ChoiceStream, RequestOutput | None]] = asyncio.Queue()

        async def read(sequence: ChoiceStream) -> None:
            async for output in sequence.stream:
                queue.put_nowait((sequence, output))
            queue.put_nowait((sequence, None))

        tasks = [asyncio.create_task(read(sequence)) for sequence in self.sequences]
        try:
            reading = len(tasks)
            while reading:
                sequence, output = await queue.get()
                if output is None:
                    following = list(islice(self._more, 1))
                    self.sequences += following
                    tasks += [asyncio.create_task(read(each)) for each in following]
                    reading += len(following) - 1
                elif sequence.finish_reason is None:
                    yield sequence, output
        finally:
            for task in tasks:
                task.cancel()

    def _note_prefill(self, sequence: ChoiceStream, output: RequestOutput) -> None:
        clock = self.timeline
        if output.scheduled_at is not None and (
            clock.scheduled is None or output.scheduled_at < clock.scheduled
        ):
            clock.scheduled = output.scheduled_at
        if output.prefix_end is not None and sequence.index % self.generation.n == 0:
            self._prefix_ends[sequence.index] = output.prefix_end
            self.usage.cached_tokens += output.cached_tokens or 0
            self.usage.looked_up_tokens += output.looked_up_tokens or 0
            self.usage.disk_tokens += output.disk_tokens or 0
            self.usage.host_tokens += output.host_tokens or 0

    def _failure(self, output: RequestOutput) -> ApiError:
        if output.finish_reason == "abort":
            return self._why or ApiError(
                400, "The request was cancelled by the operator.", code="request_cancelled"
            )
        code = output.error_code or "engine_error"
        status = _ENGINE_STATUS.get(code, 503 if code in _UNAVAILABLE else 500)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        message = output.error_message or "The engine failed."
        if code == "bad_adapter":
            model = self.generation.model
            if not Path(model.adapter).is_dir():
                return adapter_removed(model.name)
            message = hide_folders(message)  # it names files of the box
        error = ApiError(status, message, code=code, type=kind)
        seconds = self.generation.model.supervisor.seconds_to_try
        if code == "engine_failed" and seconds is not None:
            error.headers = {"Retry-After": str(seconds)}
        return error


def adapter_removed(name: str) -> ApiError:
    return ApiError(
        404,
        f"The files of the adapter {name!r} are gone: it was removed while the request waited, or by hand. "
        "Add it again, or use its base model.",
        "model_not_found",
        "model",
    )


INTERVAL = 0.25
"""Seconds between two checks. A check costs one stat of the key file and a dictionary look-up per request."""


class RevocationWatcher:
    """Periodic check of the open requests. Use it only from the daemon's event loop."""

    def __init__(self, requests: Mapping[str, OpenRequest]) -> None:
        """`requests`: the open requests; the mapping is owned and kept up to date by the caller."""
        self._requests = requests
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, request: OpenRequest) -> None:
        if request.generation.still_authorized is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        for request in list(self._requests.values()):
            allowed = request.generation.still_authorized
            if allowed is not None and not allowed():
                request.cancel(_no_longer())
        for request in self._requests.values():
            self.watch(request)


def _no_longer() -> ApiError:
    return ApiError(
        401,
        "The credentials of this request are no longer valid: the key was revoked or has expired.",
        "invalid_api_key",
        None,
        "authentication_error",
    )


class RequestObserver:
    """Observer of requests; this one does nothing. Called on the event loop; must be quick and not raise."""

    def on_open(self, request: LiveRequest) -> None:
        pass

    def on_end(self, record: RequestRecord, reason: str = "") -> None:
        """Called when a request has ended. `reason`: the message of its error."""

    def on_refusal(self, record: RequestRecord, reason: str = "") -> None:
        """Called when a request was refused before it reached an engine."""
