"""Length of a draft model's drafts, from what they cost and how many are accepted.

A step with k drafts takes the time of a step and of k passes of the draft model. With acceptance a of each
token it gives 1 + a + a^2 + ... + a^k tokens (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023, section 3). The length with most tokens a second is taken, or none.
"""

from collections import deque
from math import inf
from statistics import median
from typing import Final
from weakref import WeakKeyDictionary

from ..request import Request

PRIOR_ACCEPTANCE: Final = 0.6
"""Acceptance that is assumed of a draft model before any verification."""
PRIOR_TOKENS: Final = 4.0
"""Tokens that the engine's acceptance counts for, at a request's first draft."""
MEMORY: Final = 0.97
"""Factor of earlier verifications with each new one."""
TIMES: Final = 15
"""Number of steps whose times are known."""
PRIOR_COST: Final = 0.2
"""Time of a pass of the draft model over that of a step, before any was measured."""
MIN_GAIN: Final = 1.05
"""Fewest tokens over those of steps without drafts, in the same time."""
REST: Final = 64
"""Tokens without drafts before a request where they do not pay tries again, once."""
PROBED_REQUESTS: Final = 8
"""Number of requests of which one tries drafts, while they do not pay."""


class Acceptance:
    """Share of draft tokens that are accepted, of those whose predecessors were."""

    def __init__(self, share: float, tokens: float) -> None:
        self._accepted, self._tried = share * tokens, tokens
        self.rest = 0.0
        """Tokens without drafts; infinite: they have never paid."""
        self.failures = 0
        """Number of times that drafts were found not to pay."""

    @property
    def share(self) -> float:
        return self._accepted / self._tried

    def record(self, drafted: int, accepted: int) -> None:
        self._accepted = self._accepted * MEMORY + accepted
        self._tried = self._tried * MEMORY + accepted + (accepted < drafted)


class MovingMedian:
    """Median of the last times: first steps, which touch memory for the first time, count for little."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=TIMES)

    def add(self, value: float) -> None:
        self._last.append(value)

    @property
    def value(self) -> float | None:
        return median(self._last) if self._last else None


class DraftLength:
    """Chooses how many tokens a draft model proposes for each request."""

    def __init__(self) -> None:
        self._all = Acceptance(PRIOR_ACCEPTANCE, PRIOR_TOKENS)
        self._requests: WeakKeyDictionary[Request, Acceptance] = WeakKeyDictionary()
        self._step, self._pass = MovingMedian(), MovingMedian()
        self._unprobed = 0

    @property
    def cost(self) -> float:
        """Time of a pass of the draft model over the time of a step."""
        step, own = self._step.value, self._pass.value
        return own / step if step and own is not None else PRIOR_COST

    def choose(self, request: Request, most: int) -> int:
        """Return the number of drafts, at most `most`; 0 where they do not pay."""
        if most <= 0:
            return 0
        own = self._requests.get(request)
        if own is None:
            own = self._requests[request] = self._begin(most)
        if own.rest > 0:
            own.rest -= 1
            return 0
        best = best_length(own.share, self.cost, most)
        if best == 0:
            own.failures += 1
            own.rest = REST if own.failures == 1 else inf
            return 1  # to learn whether they would pay by now
        return best

    def _begin(self, most: int) -> Acceptance:
        """Begin a request. The draft model has to read its prompt first, so few requests try in vain."""
        own = Acceptance(self._all.share, PRIOR_TOKENS)
        if best_length(own.share, self.cost, most) == 0:
            self._unprobed = (self._unprobed + 1) % PROBED_REQUESTS
            own.rest = inf if self._unprobed else 0.0
        return own

    def record_verification(self, request: Request, drafted: int, accepted: int) -> None:
        self._requests[request].record(drafted, accepted)
        self._all.record(drafted, accepted)

    def record_step(self, seconds: float) -> None:
        """Record the time of a step of the target, drafting left out."""
        self._step.add(seconds)

    def record_passes(self, seconds: float, passes: int) -> None:
        """Record the time of passes of the draft model."""
        if passes:
            self._pass.add(seconds / passes)


def best_length(acceptance: float, cost: float, most: int) -> int:
    """Return the number of drafts, up to `most`, with most tokens a second; 0 where none gains `MIN_GAIN`.

    `cost`: time of a pass of the draft model over the time of a step.
    """
    best, gain, tokens, power = 0, MIN_GAIN, 1.0, 1.0
    for length in range(1, most + 1):
        power *= acceptance
        tokens += power
        if tokens / (1 + length * cost) > gain:
            best, gain = length, tokens / (1 + length * cost)
    return best
