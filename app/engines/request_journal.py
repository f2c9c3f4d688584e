"""The open requests of one model, and what each engine in turn is told of them.

It remembers of each request its prompt, parameters and every token that arrived (`TokenStream`). When an
engine dies, the next one gets them all again with their tokens so far, in order of arrival. No token is lost
or doubled: outputs count in the order of one socket, all that the dead engine managed to send is read before
the next one starts, and noise depends on (seed, position) alone, so the next engine draws what the dead one
would have drawn. Whom to hand over, and when, is decided by `PoisonDetector` after crashes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from llmbox.engine.ipc.codec import FrameTooLarge
from llmbox.engine.ipc.messages import AbortRequest, AddRequest, RequestOutput

from .poison_detector import PoisonDetector
from .token_stream import TokenStream


@dataclass(frozen=True, slots=True)
class JournalHooks:
    tell: Callable[[AddRequest | AbortRequest], None]
    """Send to the engine that runs. Raises FrameTooLarge."""
    emptied: Callable[[], None]
    """No request is open any more."""
    finished: Callable[[], None]
    """An engine has answered one to its end."""


class RequestJournal:
    def __init__(self, hooks: JournalHooks) -> None:
        self.resumed = 0
        """Requests carried over, each time one is."""
        self._hooks = hooks
        self.of_tenant: Counter[str] = Counter()
        """Open requests by caller."""
        self._open: dict[str, TokenStream] = {}
        self._in_engine: dict[str, None] = {}
        """Handed over and not ended by the engine yet, in that order; cancelled ones too."""
        self._interrupted: set[str] = set()
        """Was in an engine that died and has not been handed to the next one yet."""
        self._trial = PoisonDetector()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._open)

    async def idle(self) -> None:
        """Wait until none is open."""
        await self._idle.wait()

    # ------------------------------------------------------------------ from outside

    def add(self, message: AddRequest, *, hand_over: bool) -> TokenStream:
        """`hand_over`: an engine is ready to take it now. Its id must never have been used."""
        assert message.request_id not in self._open
        stream = TokenStream(message, self._cancel)
        self._open[message.request_id] = stream
        self.of_tenant[message.tenant] += 1
        self._idle.clear()
        held = self._trial.hold(message.request_id)
        if hand_over and not held:
            self._send([message.request_id])
        return stream

    def abort_all(self, code: str, message: str) -> None:
        """End every stream with this error; the engine drops them."""
        for request_id in self._open:
            self._hooks.tell(AbortRequest(request_id=request_id))
        self.fail_all(code, message)

    def fail_all(self, code: str, message: str) -> None:
        for request_id in list(self._open):
            stream = self._close(request_id)
            assert stream is not None
            stream.fail(code, message)

    # ------------------------------------------------------------------ engines come and go

    def engine_ready(self) -> None:
        if self._open:
            self._send(self._trial.begin(list(self._open)))

    def deliver(self, output: RequestOutput) -> None:
        request_id = output.request_id
        stream = self._open.get(request_id)
        if output.finish_reason is not None:
            self._in_engine.pop(request_id, None)
            if stream is not None:
                self._close(request_id)
                self._hooks.finished()
        if stream is not None:
            stream.push(output)
        if self._trial.open:
            self._send(
                self._trial.delivered(request_id, len(output.token_ids))
                if output.finish_reason is None
                else self._trial.ended(request_id)
            )

    def engine_died(self, *, from_outside: bool) -> str | None:
        """The id of the request that is guilty of it, if that is clear now: it has failed."""
        self._interrupted |= self._in_engine.keys() & self._open.keys()
        present = list(self._in_engine)
        self._in_engine.clear()
        if from_outside:
            self._trial.interrupted()
            return None
        guilty = self._trial.crashed(present)
        if guilty is not None and (stream := self._close(guilty)) is not None:
            stream.fail("engine_error", "The engine failed repeatedly on this request.")
        return guilty

    def forget_crashes(self) -> None:
        self._trial.forget()

    # ------------------------------------------------------------------ inside

    def _send(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            stream = self._open.get(request_id)
            if stream is None:
                continue
            assert request_id not in self._in_engine
            try:
                self._hooks.tell(stream.message(self._in_engine))
            except FrameTooLarge:
                self._close(request_id)
                stream.fail("request_too_large", "The request is too large for the engine.")
                self._send(self._trial.ended(request_id))
                continue
            self._in_engine[request_id] = None
            if request_id in self._interrupted:
                self._interrupted.remove(request_id)
                stream.resumes += 1
                self.resumed += 1

    def _cancel(self, stream: TokenStream) -> None:
        request_id = stream.request.request_id
        self._close(request_id)
        if request_id in self._in_engine:
            self._hooks.tell(AbortRequest(request_id=request_id))
        stream.push(RequestOutput(request_id=request_id, finish_reason="abort"))

    def _close(self, request_id: str) -> TokenStream | None:
        self._trial.withdrawn(request_id)
        self._interrupted.discard(request_id)
        stream = self._open.pop(request_id, None)
        if stream is not None:
            tenant = stream.request.tenant
            self.of_tenant[tenant] -= 1
            if not self.of_tenant[tenant]:
                del self.of_tenant[tenant]
        if not self._open:
            self._idle.set()
            self._hooks.emptied()
        return stream
