"""Poison-request detection: find the request that kills the engine, and fail it alone.

One crash proves nothing: every request is resumed. After a second crash in a row, every request that was
in the engine is a suspect, and the next engine gets them one at a time. The next suspect follows when the one
on trial has delivered `PROVEN_TOKENS` tokens or ended; requests that passed keep running. The newest suspect
is tried first, because the last request to arrive before the crashes is the likeliest cause.

    crash 1     all resume
    crash 2     all on trial, one by one            (only one request was present: it is guilty)
    crash 3     the one on trial was alone: guilty
                others had passed: one of them may have reached a fatal token of its own since, so
                nobody is judged, and all that were there are tried again, each alone
    crash 4     it was alone: guilty

In a trial where each is alone, one that passed is recalled from the engine before the next one is sent, and
waits for the end of the trial. So every further death convicts, however many requests kill: no more than
four deaths a guilty request, of which the limit on deaths counts neither the third nor the fourth. (Halving
would need log2(n) deaths.) An innocent request never fails for one that kills reliably. Few tokens suffice
as proof: a resumed request starts right where the engine died, so a reliable killer kills in its prefill or
at its first token. A request that kills at random passes, and so does a broken machine: then nobody is
judged and the limit on deaths decides.

Deaths from outside (SIGSTOP, or a SIGKILL that neither the daemon nor the OOM killer sent) accuse no request;
they call `record_interruption`. Requests that arrive during a trial wait for its end, so that it has an end.
Pure bookkeeping of request ids: no clock, no I/O. Every returned list is to be sent to the engine in order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

PROVEN_TOKENS: Final = 2


class PoisonDetector:
    """State machine that finds the request that kills its engine (see the module). Requests are ids."""

    def __init__(self, recall: Callable[[str], None]) -> None:
        """`recall` takes a request back from the engine, while its client keeps waiting. Call `record_recall`
        once the engine has returned it, or `record_end` if it had ended before.
        """
        self._recall = recall
        self._crashes: dict[str, int] = {}
        self._untried: deque[str] = deque()
        self._passed: dict[str, None] = {}
        self._newcomers: list[str] = []
        self.on_trial: str | None = None
        self.recalled: str | None = None
        """Request on trial, if it has passed and the engine has not returned it yet."""
        self._delivered = 0
        self._is_apart = False
        """True if each request is tried alone: those that passed stay outside the engine until the trial
        ends.
        """
        self.narrowed = False
        """True if the last crash identified no guilty request, and the next crash of the trial will."""
        self.proven: set[str] = set()
        """Requests that passed a trial and were not found guilty later, since `forget`."""

    @property
    def open(self) -> bool:
        return bool(self._untried) or self.on_trial is not None

    def begin(self, requests: Iterable[str]) -> list[str]:
        """Start with a new engine. Returns the open requests to send now."""
        here = dict.fromkeys(requests)
        self._untried = deque(r for r in self._untried if r in here)
        if not self._untried:
            self._next()
            return list(here)
        untried = set(self._untried)
        self._newcomers = [r for r in here if r not in untried and r not in self._passed]
        running = [] if self._is_apart else [r for r in here if r in self._passed]
        return running + self._next()

    def quarantine_new(self, request: str) -> bool:
        """Register a new request. True: keep it back until a later call returns it."""
        if self.open:
            self._newcomers.append(request)
        return self.open

    def record_tokens(self, request: str, tokens: int) -> list[str]:
        if request != self.on_trial or request == self.recalled:
            return []
        self._delivered += tokens
        if self._delivered < PROVEN_TOKENS:
            return []
        self.proven.add(request)
        if self._is_apart and self._untried:
            self.recalled = request
            self._recall(request)
            return []
        if not self._is_apart:
            self._passed[request] = None
        return self._next()

    def record_recall(self, request: str) -> list[str]:
        """Record that the engine has given the request back."""
        self._passed[request] = None
        return self._next()

    def record_end(self, request: str) -> list[str]:
        """Record that the engine has ended the request (finished, aborted, refused)."""
        self._crashes.pop(request, None)
        self._passed.pop(request, None)
        return self._next() if request == self.on_trial else []

    def client_left(self, request: str) -> None:
        """Record that the client has left.

        A request on trial stays on trial until the engine confirms by `record_end`: it may be crashing the
        engine at this moment, and the next one must not be blamed for it.
        """
        self._crashes.pop(request, None)
        self._passed.pop(request, None)
        for waiting in (self._untried, self._newcomers):
            if request in waiting:
                waiting.remove(request)

    def record_crash(self, present: Sequence[str]) -> str | None:
        """Record that the engine crashed by itself. Returns the guilty request, if it is known now.

        `present` are all requests inside the engine. Cancelled requests whose end the engine had not
        confirmed are included: it may have died of one of them.
        """
        self.narrowed = False
        if self.on_trial is not None:
            return self._record_crash_in_trial(self.on_trial, present)
        if not present:
            return None
        self._crashes = {request: self._crashes.get(request, 0) + 1 for request in present}
        if max(self._crashes.values()) < 2:
            return None
        if len(present) == 1:
            return self._convict(present[0])
        # Requests seen at both deaths, then the newest: `sort` keeps the order of equals.
        order = list(reversed(present))
        order.sort(key=lambda request: -self._crashes[request])
        self._untried = deque(order)
        self._passed.clear()
        return None

    def _record_crash_in_trial(self, suspect: str, present: Sequence[str]) -> str | None:
        self.on_trial = self.recalled = None
        others = [request for request in present if request != suspect]
        if not others:
            return self._convict(suspect)
        self._untried = deque([suspect, *reversed(others), *self._untried])
        self._passed.clear()
        self._is_apart = self.narrowed = True
        return None

    def _convict(self, request: str) -> str:
        self._crashes.clear()
        self.proven.discard(request)
        return request

    def record_interruption(self) -> None:
        """Record that the engine died from outside: the request on trial is tried again."""
        if self.on_trial is not None:
            self._untried.appendleft(self.on_trial)
            self.on_trial = self.recalled = None

    def forget(self) -> None:
        """Forget old crashes (the last one is long ago)."""
        self._crashes.clear()
        self.proven.clear()

    def _next(self) -> list[str]:
        self._delivered, self.recalled = 0, None
        if self._untried:
            self.on_trial = self._untried.popleft()
            return [self.on_trial]
        self.on_trial = None
        waiting = [*(self._passed if self._is_apart else ()), *self._newcomers]
        self._is_apart = False
        self._passed.clear()
        self._newcomers.clear()
        return waiting
