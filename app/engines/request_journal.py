"""Journal of one model's open requests, from which every new engine resumes them.

It keeps the prompt, parameters and received tokens of each request (`TokenStream`). When an engine dies, the
next one gets all requests again with their tokens so far, in order of arrival.

No token is lost or doubled. Outputs arrive in order on one socket, everything that the dead engine sent is
read before the next one starts, and sampling noise depends on (seed, position) alone: the next engine draws
the same tokens. After crashes `PoisonDetector` decides which requests to send, and when.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Self

from llmbox.engine.ipc.channel import FrameTooLarge
from llmbox.engine.ipc.messages import AbortRequest, AddRequest, KeepImages, RequestOutput, StepOutputs
from llmbox.engine.ipc.sequence_times import SequenceTimes

from .poison_detector import PoisonDetector
from .queue_model import QueueModel


class TokenStream:
    """Async iterator over the outputs of one request; the one with `finish_reason` is the last.

    Every stream ends: with `stop` or `length`, with `abort` after `cancel`, else with `error` and an
    `error_code`. Use it as a context manager: leaving the block cancels a running request.
    """

    def __init__(self, request: AddRequest, cancel: Callable[["TokenStream"], None]) -> None:
        self.request = request
        self.output_ids: list[int] = list(request.output_ids)
        """Every token received from an engine, read or not. A resumed engine continues after them."""
        self.resumes = 0
        """Number of engine deaths that interrupted this request after it had been sent."""
        self.finished = False
        self.added_at = time.monotonic()
        """CLOCK_MONOTONIC seconds, as the next two."""
        self.sent_at: float | None = None
        """Moment when it was last sent to an engine."""
        self.received_at: float | None = None
        """Moment when it ended."""
        self.lost_s = 0.0
        """Seconds from being sent to an engine that died to being sent to the next one."""
        self.times: SequenceTimes | None = None
        """Times that the engine reported at its end."""
        self.awaits_times = False
        """True if it was cancelled and the engine has not reported its times yet."""
        self.on_times: Callable[[TokenStream], None] = lambda _: None
        """Called when the times have arrived, or never will."""
        self._cancel = cancel
        self.outputs: deque[RequestOutput] = deque()
        """Unread outputs."""
        self.wake: asyncio.Future[None] | None = None
        """Future that a reader without outputs sets and waits for."""
        self._first_seen = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self.outputs:
            if self.finished:
                raise StopAsyncIteration
            self.wake = asyncio.get_running_loop().create_future()
            await self.wake
        return self.outputs.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the request. The engine gets the abort at once and frees the blocks before its next step.
        Idempotent.
        """
        if not self.finished:
            self._cancel(self)

    # ------------------------------------------------------------------ the supervisor's side

    def push(self, output: RequestOutput) -> None:
        """Queue an output. No output is accepted after the last one."""
        assert not self.finished
        if self._first_seen:
            if output.scheduled_at is not None or output.prompt_logprobs is not None:
                # A resumed engine sends the first output's facts again; the reader has them.
                output = replace(
                    output,
                    scheduled_at=None,
                    cached_tokens=None,
                    looked_up_tokens=None,
                    disk_tokens=None,
                    host_tokens=None,
                    prefix_end=None,
                    prompt_logprobs=None,
                )
        elif output.token_ids:
            self._first_seen = True
        self.output_ids += output.token_ids
        if output.finish_reason is not None:
            self.finished, self.received_at = True, time.monotonic()
        self.outputs.append(output)
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)

    def note_sent(self) -> None:
        now = time.monotonic()
        if self.sent_at is not None:
            self.lost_s += now - self.sent_at
        self.sent_at = now

    def note_times(self, times: SequenceTimes | None) -> None:
        """Set the engine's times; None: they will not arrive."""
        self.times, self.awaits_times = times, False
        self.on_times(self)

    def fail(self, code: str, message: str) -> None:
        name = self.request.request_id
        output = RequestOutput(request_id=name, finish_reason="error", error_code=code, error_message=message)
        self.push(output)

    def message(self, in_engine: Collection[str]) -> AddRequest:
        """Message to send to an engine that already has the requests `in_engine`."""
        request = self.request
        params = request.params
        if self._first_seen and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        return replace(
            request,
            params=params,
            output_ids=list(self.output_ids),
            fork_of=request.fork_of if request.fork_of in in_engine else None,
        )


class SharedImages:
    """Images of the requests in an engine: each is sent once for all of them, before the first one."""

    def __init__(self, send: Callable[[KeepImages], None]) -> None:
        self._send = send
        self._users: defaultdict[bytes, set[str]] = defaultdict(set)
        """Ids of requests by the hash of an image that the engine has."""

    def send(self, request: AddRequest) -> AddRequest:
        """Send images that the engine lacks, and return the request without pixels. Raises FrameTooLarge."""
        if not request.images:
            return request
        new = {image.content_hash: image for image in request.images if image.content_hash not in self._users}
        if new:
            self._send(KeepImages(images=list(new.values())))
        for image in request.images:
            self._users[image.content_hash].add(request.request_id)
        return replace(request, images=[replace(image, pixels=b"") for image in request.images])

    def release(self, request: AddRequest) -> None:
        """Make the engine drop images that no other open request has."""
        drop = []
        for digest in {image.content_hash for image in request.images}:
            users = self._users.get(digest, set())
            users.discard(request.request_id)
            if digest in self._users and not users:
                del self._users[digest]
                drop.append(digest)
        if drop:
            self._send(KeepImages(drop=drop))

    def clear(self) -> None:
        """Forget all: the engine is gone."""
        self._users.clear()


class RequestJournal:
    """Open requests of one model. Use it only from the event loop."""

    def __init__(
        self,
        send: Callable[[AddRequest | AbortRequest | KeepImages], None],
        *,
        on_empty: Callable[[], None],
        on_finish: Callable[[], None],
    ) -> None:
        """`send` sends to the running engine and raises FrameTooLarge.

        `on_empty` is called when no request is open any more, `on_finish` when an engine has finished one.
        """
        self.resumed = 0
        """Number of resumes: requests sent again to a new engine."""
        self.queue = QueueModel()
        self._send = send
        self._images = SharedImages(send)
        self._on_empty = on_empty
        self._on_finish = on_finish
        self.of_tenant: Counter[str] = Counter()
        """Open requests by tenant."""
        self._open: dict[str, TokenStream] = {}
        self._in_engine: dict[str, None] = {}
        """Requests sent and not yet ended by the engine, in order of sending. Includes cancelled ones."""
        self._cancelled: dict[str, TokenStream] = {}
        """Streams that ended while an engine had their request, until it reports their times."""
        self._interrupted: set[str] = set()
        """Requests that were in an engine that died and have not been sent to the next one yet."""
        self.detector = PoisonDetector(lambda request_id: send(AbortRequest(request_id=request_id)))

    def __len__(self) -> int:
        return len(self._open)

    # ------------------------------------------------------------------ called by the supervisor

    def add(self, message: AddRequest, *, hand_over: bool) -> TokenStream:
        """Open a request. Its id must never have been used.

        `hand_over`: an engine is ready to take it now.
        """
        assert message.request_id not in self._open
        stream = TokenStream(message, self._cancel)
        self._open[message.request_id] = stream
        self.queue.enter(message, stream.output_ids)
        self.of_tenant[message.tenant] += 1
        held = self.detector.quarantine_new(message.request_id)
        if hand_over and not held:
            self._send_requests([message.request_id])
        return stream

    def fail_all(self, code: str, message: str) -> None:
        """End every stream with this error."""
        self._forget_cancelled()
        self._fail(list(self._open), code, message)

    # ------------------------------------------------------------------ engines come and go

    def engine_ready(self) -> None:
        # Also without open requests: those under suspicion may all have been cancelled, and their trial would
        # hold back every later one.
        self._send_requests(self.detector.begin(list(self._open)))

    def deliver_step(self, step: StepOutputs) -> None:
        """Deliver the outputs of a step, and learn from its time."""
        self.queue.observe(step.stats)
        for name, times in step.times.items():
            if name != self.detector.recalled:
                self.note_times(name, times)
        is_trial = self.detector.on_trial is not None  # begins with an engine, never within a step
        for output in step.outputs:
            if is_trial or output.finish_reason is not None or output.cached_tokens is not None:
                self.deliver(output)
            elif (stream := self._open.get(output.request_id)) is not None:
                stream.push(output)

    def note_times(self, request_id: str, times: SequenceTimes) -> None:
        """Set the times that arrived with a request's last output."""
        stream = self._open.get(request_id) or self._cancelled.pop(request_id, None)
        if stream is not None:
            stream.note_times(times)

    def deliver(self, output: RequestOutput) -> None:
        request_id = output.request_id
        stream = self._open.get(request_id)
        if output.finish_reason == "abort" and stream is not None and request_id == self.detector.recalled:
            self._in_engine.pop(request_id, None)
            self._send_requests(self.detector.record_recall(request_id))
            return
        if output.finish_reason is not None:
            self._in_engine.pop(request_id, None)
            if (told_nothing := self._cancelled.pop(request_id, None)) is not None:
                told_nothing.note_times(None)
            if stream is not None:
                self._close(request_id)
                self._on_finish()
        if stream is not None:
            if output.cached_tokens is not None and stream.sent_at is not None:
                self.queue.note_first(stream.request, stream.sent_at, output.cached_tokens)
            stream.push(output)
        if self.detector.open:
            self._send_requests(
                self.detector.record_tokens(request_id, len(output.token_ids))
                if output.finish_reason is None
                else self.detector.record_end(request_id)
            )

    def engine_died(self, *, from_outside: bool) -> str | None:
        """Record the engine's death. Returns the id of the request that caused it, if that is known now; that
        request has failed.
        """
        self._interrupted |= self._in_engine.keys() & self._open.keys()
        present = list(self._in_engine)
        self._in_engine.clear()
        self._images.clear()
        self._forget_cancelled()
        if from_outside:
            self.detector.record_interruption()
            return None
        guilty = self.detector.record_crash(present)
        if guilty in self._open:
            prompt = _first_choice(self._open[guilty])
            # Its other choices would kill too, and their client gets this error.
            choices = [name for name, each in self._open.items() if _first_choice(each) == prompt]
            self._fail(choices, "engine_error", "The engine failed repeatedly on this request.")
        return guilty

    def resend(self, request_id: str, most: int) -> None:
        """Resend one request whose engine is gone while other engines continue. It fails after `most`
        resumes.
        """
        stream = self._open.get(request_id)
        if stream is None or self._in_engine.pop(request_id, self) is self:
            return
        if stream.resumes >= most:
            self._close(request_id)
            stream.fail("engine_error", "The engine failed repeatedly on this request.")
            return
        self._interrupted.add(request_id)
        self._send_requests([request_id])

    # ------------------------------------------------------------------ internals

    def _fail(self, request_ids: Iterable[str], code: str, message: str) -> None:
        for request_id in request_ids:
            stream = self._close(request_id)
            assert stream is not None
            stream.fail(code, message)

    def _send_requests(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            stream = self._open.get(request_id)
            if stream is None:
                continue
            assert request_id not in self._in_engine
            stream.note_sent()
            try:
                self._send(self._images.send(stream.message(self._in_engine)))
            except FrameTooLarge:
                self._close(request_id)
                stream.fail("request_too_large", "The request is too large for the engine.")
                self._send_requests(self.detector.record_end(request_id))
                continue
            self._in_engine[request_id] = None
            if request_id in self._interrupted:
                self._interrupted.remove(request_id)
                stream.resumes += 1
                self.resumed += 1

    def _forget_cancelled(self) -> None:
        """Stop waiting for times that an engine may never report."""
        cancelled, self._cancelled = self._cancelled, {}
        for stream in cancelled.values():
            stream.note_times(None)

    def _cancel(self, stream: TokenStream) -> None:
        request_id = stream.request.request_id
        self._close(request_id)
        if request_id in self._in_engine:
            stream.awaits_times = True
            self._cancelled[request_id] = stream
            self._send(AbortRequest(request_id=request_id))
        stream.push(RequestOutput(request_id=request_id, finish_reason="abort"))

    def _close(self, request_id: str) -> TokenStream | None:
        self.detector.client_left(request_id)
        self._interrupted.discard(request_id)
        stream = self._open.pop(request_id, None)
        if stream is not None:
            self.queue.leave(request_id, len(stream.output_ids))
            if stream.request.images:
                self._images.release(stream.request)
            tenant = stream.request.tenant
            self.of_tenant[tenant] -= 1
            if not self.of_tenant[tenant]:
                del self.of_tenant[tenant]
        if not self._open:
            self._on_empty()
        return stream


def _first_choice(stream: TokenStream) -> str:
    """Return the id of the first choice of its request."""
    return stream.request.fork_of or stream.request.request_id
