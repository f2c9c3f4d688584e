"""Incremental search for stop strings.

One Knuth-Morris-Pratt automaton a stop string: constant work a character, and the result does not depend
on where the pieces were cut. The string that is complete first wins (of several, the longest); text ends
before it, or with it where `keep` says so. What may still become a stop string is held back.
"""

from collections.abc import Sequence


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
