"""Poison-request detection: find the request that kills the engine, and fail it alone.

One crash proves nothing: every request is resumed. After a second crash in a row, every request that was
in the engine is a suspect, and the next engine gets them one at a time. The next suspect follows when the one
on trial has delivered `PROVEN_TOKENS` tokens or ended; requests that passed keep running. The newest suspect
is tried first, because the last request to arrive before the crashes is the likeliest cause.

    crash 1     all resume
    crash 2     all on trial, one by one            (only one request was present: it is guilty)
    crash 3     the one on trial was alone: guilty
                others had passed: one of them may have reached a fatal token of its own since, so
                nobody is judged and the one on trial is tried again, alone
    crash 4     it was alone: guilty

The guilty request is found within four deaths however many requests are open. (Halving would need log2(n),
and five deaths in a minute end the model.) An innocent request never fails for one that kills reliably. Few
tokens suffice as proof: a resumed request starts right where the engine died, so a reliable killer kills in
its prefill or at its first token. A request that kills at random passes, and so does a broken machine: then
nobody is judged and the limit on deaths decides.

Deaths from outside (SIGSTOP, or a SIGKILL that neither the daemon nor the OOM killer sent) accuse no request;
they call `record_interruption`. Requests that arrive during a trial wait for its end, so that it has an end.
Pure bookkeeping of request ids: no clock, no I/O. Every returned list is to be sent to the engine in order.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

PROVEN_TOKENS: Final = 2


class PoisonDetector:
    """State machine that finds the request that kills its engine (see the module). Requests are ids."""

    def __init__(self) -> None:
        self._crashes: dict[str, int] = {}
        self._untried: deque[str] = deque()
        self._passed: set[str] = set()
        self._newcomers: list[str] = []
        self.on_trial: str | None = None
        self._delivered = 0

    @property
    def open(self) -> bool:
        return bool(self._untried) or self.on_trial is not None

    def begin(self, requests: Iterable[str]) -> list[str]:
        """Start with a new engine. Returns those of the open requests to send now."""
        here = dict.fromkeys(requests)
        self._untried = deque(r for r in self._untried if r in here)
        if not self._untried:
            self._passed.clear()
            self._newcomers.clear()
            return list(here)
        untried = set(self._untried)
        self._newcomers = [r for r in here if r not in untried and r not in self._passed]
        return [r for r in here if r in self._passed] + self._next()

    def quarantine_new(self, request: str) -> bool:
        """Register a new request. True: keep it back until a later call returns it."""
        if self.open:
            self._newcomers.append(request)
        return self.open

    def record_tokens(self, request: str, tokens: int) -> list[str]:
        if request != self.on_trial:
            return []
        self._delivered += tokens
        if self._delivered < PROVEN_TOKENS:
            return []
        self._passed.add(request)
        return self._next()

    def record_end(self, request: str) -> list[str]:
        """Record that the engine has ended the request (finished, aborted, refused)."""
        self._crashes.pop(request, None)
        self._passed.discard(request)
        return self._next() if request == self.on_trial else []

    def client_left(self, request: str) -> None:
        """Record that the client has left.

        A request on trial stays on trial until the engine confirms by `record_end`: it may be crashing the
        engine at this moment, and the next one must not be blamed for it.
        """
        self._crashes.pop(request, None)
        self._passed.discard(request)
        for waiting in (self._untried, self._newcomers):
            if request in waiting:
                waiting.remove(request)

    def record_crash(self, present: Sequence[str]) -> str | None:
        """Record that the engine crashed by itself. Returns the guilty request, if it is known now.

        `present` are all requests inside the engine. Cancelled requests whose end the engine had not
        confirmed are included: it may have died of one of them.
        """
        if self.on_trial is not None:
            return self._record_crash_in_trial(self.on_trial, present)
        if not present:
            return None
        self._crashes = {request: self._crashes.get(request, 0) + 1 for request in present}
        if max(self._crashes.values()) < 2:
            return None
        if len(present) == 1:
            self._crashes.clear()
            return present[0]
        # Requests seen at both deaths, then the newest: `sort` keeps the order of equals.
        order = list(reversed(present))
        order.sort(key=lambda request: -self._crashes[request])
        self._untried = deque(order)
        self._passed.clear()
        return None

    def _record_crash_in_trial(self, suspect: str, present: Sequence[str]) -> str | None:
        self.on_trial = None
        others = [request for request in present if request != suspect]
        if not others:
            self._crashes.clear()
            return suspect
        self._untried = deque([suspect, *reversed(others), *self._untried])
        self._passed.clear()
        return None

    def record_interruption(self) -> None:
        """Record that the engine died from outside: the request on trial is tried again."""
        if self.on_trial is not None:
            self._untried.appendleft(self.on_trial)
            self.on_trial = None

    def forget(self) -> None:
        """Forget old crashes (the last one is long ago)."""
        self._crashes.clear()

    def _next(self) -> list[str]:
        self._delivered = 0
        if self._untried:
            self.on_trial = self._untried.popleft()
            return [self.on_trial]
        self.on_trial = None
        self._passed.clear()
        newcomers, self._newcomers = self._newcomers, []
        return newcomers
