"""Choice of draft lengths: which guesses of which requests a step verifies, and whether a model is to guess.

A draft's token j is accepted with a probability of a^j, with the measured acceptance a of its request, method
and kind of match. A row more has a price: the time of a step with it over the time without drafts, measured
by requests and rows of a step (`RowPrices`). Of all guesses the likeliest are taken, as many as give most
tokens in a unit of time (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023,
section 3, for one request). A method that runs a model costs its passes besides.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log
from typing import Final

from .proposer import DraftMethod

MOST_DRAFTS: Final = 15
"""Maximum length of a draft."""
MIN_GAIN: Final = 1.01
"""Fewest tokens over those of steps without drafts, in the same time."""
MEMORY: Final = 0.97
"""Factor of earlier verifications with each new one, for models."""
LOOKUP_MEMORY: Final = 0.9
"""The same for lookups: text that repeats ends suddenly."""
LOOKUP_PRIORS: Final = ((16, 0.9), (8, 0.8), (4, 0.6), (0, 0.2))
"""Shortest match and the acceptance that is assumed of its kind before any verification in a request."""
LOOKUP_PRIOR_TOKENS: Final = 2.0
START_LOSS: Final = 0.25
"""Tokens that the lookups of a request may cost at its begin."""
LOSS_SHARE: Final = 0.005
"""Tokens that they may cost in addition, for each token of the answer."""
MOST_CREDIT: Final = 3.0
"""Tokens of gain that may be lost again."""
CLIPPED: Final = log(2)
"""Largest deviation of one step's time that counts: others use the machine too."""
FIRST_COUNT: Final = 2.0
"""Steps that the expected time of so many rows counts for, when they are measured for the first time."""
FORGOTTEN: Final = 128
"""Steps after which half of what is known of a number of rows is forgotten, where none had it meanwhile."""

REFRESHED: Final = 16
"""Steps for which a table of prices holds."""


class Acceptance:
    """Share of draft tokens that are accepted, of those whose predecessors were."""

    def __init__(self, share: float, tokens: float, memory: float = MEMORY) -> None:
        """`tokens`: number that the assumed `share` counts for."""
        self._accepted, self._tried, self._memory = share * tokens, tokens, memory

    @property
    def share(self) -> float:
        return self._accepted / self._tried

    def record(self, drafted: int, accepted: int) -> None:
        self._accepted = self._accepted * self._memory + accepted
        self._tried = self._tried * self._memory + accepted + (accepted < drafted)


@dataclass(slots=True)
class RowPrice:
    """Knowledge of the time of steps with so many rows."""

    level: float
    """Logarithm of the time, over that of all steps."""
    count: float
    seen: int
    """Number of the last step that had as many."""


class RowPrices:
    """Time of a step with drafts over that of the same step without, by its requests and rows.

    Times are compared as logarithms over a common level, which follows the machine's load and the contexts.
    """

    def __init__(self, slope: float) -> None:
        """`slope`: price of a row before any was measured."""
        self._slope = slope
        self._known: dict[int, dict[int, RowPrice]] = {}
        self._level = 0.0
        self._steps = 0
        self._tables: dict[int, tuple[int, list[float]]] = {}

    def record(self, requests: int, rows: int, seconds: float) -> None:
        """Record the time of a step."""
        if seconds <= 0:
            return
        observed, place = log(seconds), _bucket(rows)
        if not self._steps:
            self._level = observed
        self._steps += 1
        known = self._known.setdefault(_bucket(requests), {})
        price = known.get(place)
        if price is None:
            levels = self._levels(requests, range(rows, rows + 1)) if known else [observed - self._level]
            price = known[place] = RowPrice(levels[0], FIRST_COUNT, self._steps)
            self._tables.pop(requests, None)
        error = max(-CLIPPED, min(CLIPPED, observed - self._level - price.level))
        price.count = self._count(price) + 1
        price.level += error * max(1 / price.count, 0.1)
        price.seen = self._steps
        self._level += 0.1 * error

    def table(self, requests: int, most: int) -> list[float]:
        """Return the prices of steps with 0 to at least `most` drafts; the first is 1 and none is below the
        one before.
        """
        made, table = self._tables.get(requests, (-REFRESHED, []))
        if len(table) <= most or self._steps - made >= REFRESHED:
            levels = self._levels(requests, range(requests, requests + most + 1))
            table = list(accumulate((exp(level - levels[0]) for level in levels), max))
            self._tables[requests] = self._steps, table
        return table

    def _count(self, price: RowPrice) -> float:
        return price.count * 0.5 ** ((self._steps - price.seen) // FORGOTTEN)

    def _levels(self, requests: int, rows: Sequence[int]) -> list[float]:
        """Return the levels of steps with so many rows: between neighbours that are known, or beyond the last
        one at the assumed price of a row.
        """

        def assumed(number: int) -> float:
            return log(1 + self._slope * max(0, number - requests))

        known = self._known.get(_bucket(requests), {})
        points = sorted((number, price.level) for number, price in known.items() if self._count(price) > 0.5)
        if not points:
            return [assumed(number) for number in rows]
        found = []
        for number in map(_bucket, rows):
            place = bisect_left(points, (number, -inf))
            after, before = points[min(place, len(points) - 1)], points[max(place - 1, 0)]
            if after[0] == number:
                found.append(after[1])
            elif after[0] < number or number < before[0]:
                edge = after if after[0] < number else before
                found.append(edge[1] + assumed(number) - assumed(edge[0]))
            else:
                part = (number - before[0]) / (after[0] - before[0])
                found.append(before[1] + part * (after[1] - before[1]))
        return found


def _bucket(number: int) -> int:
    """Return the number that stands for `number`: of small ones each, then every second, fourth, eighth."""
    step = 1 if number <= 8 else 2 if number <= 16 else 4 if number <= 32 else 8
    return -(-number // step) * step


class RequestDrafts:
    """Drafts of one request: what its lookups have gained and lost, and how often they are accepted."""

    def __init__(self) -> None:
        self.has_ended = False
        self._credit = START_LOSS
        self._outputs = 0
        self._kinds: dict[tuple[DraftMethod, int], Acceptance] = {}

    def acceptance(self, method: DraftMethod, match: int) -> Acceptance:
        """Return the acceptance of lookups with a match of so many tokens."""
        kind = next(place for place, (least, _) in enumerate(LOOKUP_PRIORS) if match >= least)
        found = self._kinds.get((method, kind))
        if found is None:
            prior = LOOKUP_PRIORS[kind][1]
            found = self._kinds[method, kind] = Acceptance(prior, LOOKUP_PRIOR_TOKENS, LOOKUP_MEMORY)
        return found

    def may_lose(self, num_output: int) -> bool:
        """Return True while a wrong draft costs no more than the share of the answer that drafts may cost."""
        self._credit += LOSS_SHARE * (num_output - self._outputs)
        self._outputs = num_output
        return self._credit > 0

    def record_gain(self, tokens: float) -> None:
        """Record what the drafts of a step gained; negative: cost."""
        self._credit = min(self._credit + tokens, MOST_CREDIT)


def choose_lengths(
    chances: Sequence[float], lengths: Sequence[int], prices: Sequence[float], *, extra: float = 0.0
) -> tuple[list[int], float]:
    """Return how many drafts of each request give most tokens in a unit of time, and how many times those of
    a step without drafts these are; no drafts where the gain is below `MIN_GAIN`.

    `chances`: acceptance of each request's drafts. `lengths`: how many each has. `prices`: of steps with 0,
    1, ... drafts. `extra`: price of the passes that propose.
    """
    guesses = sorted(
        (
            (chance**depth, -depth, -place)
            for place, (chance, length) in enumerate(zip(chances, lengths, strict=True))
            for depth in range(1, length + 1)
        ),
        reverse=True,
    )
    base = tokens = float(len(chances))
    best, gain = 0, MIN_GAIN
    for count, (chance, _, _) in enumerate(guesses[: len(prices) - 1], 1):
        tokens += chance
        rate = tokens / base / (prices[count] + extra)
        if rate > gain:
            best, gain = count, rate
    chosen = [0] * len(chances)
    for _, _, place in guesses[:best]:
        chosen[-place] += 1
    return chosen, gain if best else 1.0


def expected_gain(chance: float, length: int) -> float:
    """Return the expected number of accepted drafts of so many."""
    return float(sum(chance**depth for depth in range(1, length + 1)))
