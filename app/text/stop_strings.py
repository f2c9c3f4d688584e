"""Incremental search for stop strings, and for calls that an answer repeats for ever.

One Knuth-Morris-Pratt automaton a stop string: constant work a character, and the result does not depend
on where the pieces were cut. The string that is complete first wins (of several, the longest); text ends
before it, or with it where `keep` says so. What may still become a stop string is held back.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LOOP_TOKENS: Final = 224
LOOP_REPEATS: Final = 4
"""Tokens and repetitions that are a loop, as in thoughts (`engine/core/constraints/output_constraint.py`)."""
_LONGEST_CYCLE: Final = 4
"""Most calls of a cycle."""


@dataclass(frozen=True, slots=True)
class CallMark:
    """Text between the calls of an answer."""

    text: str
    begins_next: bool = False
    """True if it begins the next call; else it ends one."""
    number: str = ""
    """Pattern of a call's number, which does not count."""


class StopStrings:
    """State of one output sequence."""

    __slots__ = ("_held", "_keep", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._keep = keep
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certainly before any stop string. `matched` is set once one is complete."""
        whole = self._held + text
        start = len(self._held)
        for index, char in enumerate(text, start):
            found = self._advance(char)
            if found is not None:
                self.matched = found
                self._held = ""
                return whole[: index + 1 - (0 if self._keep else len(found))]
        keep = len(whole) - max(self._states, default=0)
        self._held = whole[keep:]
        return whole[:keep]

    def finish(self) -> str:
        """Return the held text, when the sequence ended for another reason."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for i, (stop, table) in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = table[state - 1]
            self._states[i] = state
        return found


def _failure_table(pattern: str) -> list[int]:
    """Build the KMP table. table[i]: length of the longest proper prefix of pattern[:i+1] that is also its
    suffix.
    """
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        table[i] = matched
    return table


class RepeatedCalls:
    """Search of one answer for a cycle of calls that it writes again and again. The text ends behind the last
    call of the cycle.
    """

    __slots__ = ("_calls", "_held", "_mark", "_pieces", "_state", "_table", "_tokens", "matched")

    def __init__(self, mark: CallMark) -> None:
        self._mark, self._table = mark, _failure_table(mark.text)
        self._state = 0
        """Characters of a mark that the text ends with."""
        self._pieces: list[str] = []
        """Text since the last mark."""
        self._tokens = 0
        self._held = ""
        self._calls: deque[tuple[str, int]] = deque(maxlen=2 * LOOP_TOKENS)
        """Calls with their tokens, the last one last."""
        self.matched = False

    def push(self, text: str) -> str:
        """Return the text before the point where a loop may have begun. Called once a token."""
        self._tokens += 1
        mark, begin = self._mark, 0
        for end, char in enumerate(text, 1):
            if not self._is_complete(char):
                continue
            self._end_call("".join(self._pieces) + text[begin:end])
            begin = end
            if self.matched:
                whole, self._held = self._held + text[:end], ""
                return whole[: len(whole) - len(mark.text) * mark.begins_next]
        self._pieces.append(text[begin:])
        whole = self._held + text
        keep = len(whole) - self._state * mark.begins_next
        self._held = whole[keep:]
        return whole[:keep]

    def _is_complete(self, char: str) -> bool:
        """Return True if the mark ends with this character."""
        state, mark = self._state, self._mark.text
        while state and mark[state] != char:
            state = self._table[state - 1]
        state += mark[state] == char
        self._state = state % len(mark)
        return state == len(mark)

    def finish(self) -> str:
        """Return the held text, when the answer ended for another reason."""
        text, self._held = self._held, ""
        return text

    def _end_call(self, text: str) -> None:
        if self._mark.number:
            text = re.sub(self._mark.number, "", text)
        self._calls.append((text.strip(), self._tokens))
        self._pieces, self._tokens = [], 0
        self.matched = any(self._is_loop(period) for period in range(1, _LONGEST_CYCLE + 1))

    def _is_loop(self, period: int) -> bool:
        calls, count, tokens = self._calls, 0, 0
        for back in range(1, len(calls) + 1):
            if back > period and calls[-back][0] != calls[period - back][0]:
                break
            count, tokens = back, tokens + calls[-back][1]
            if count >= LOOP_REPEATS * period and tokens >= LOOP_TOKENS:
                return True
        return False
