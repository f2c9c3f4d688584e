"""Choice of draft lengths: which guesses of which requests a step verifies, and whether a model is to guess.

A draft's token j is accepted with a probability of a^j, with the measured acceptance a of its request, method
and kind of match. A row more has a price: the time of a step with it over the time without drafts, measured
by requests and rows of a step (`RowPrices`). Of all guesses the likeliest are taken, as many as give most
tokens in a unit of time (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023,
section 3, for one request). A method that runs a model costs its passes besides.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, log
from statistics import median
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
START_LOSS: Final = 0.15
"""Tokens that the lookups of a request may cost at its begin."""
LOSS_SHARE: Final = 0.003
"""Tokens that they may cost in addition, for each token of the answer."""
REGAINED: Final = 0.02
"""Tokens that they may cost again when they resume."""
MOST_CREDIT: Final = 3.0
"""Tokens of gain that may be lost again."""
OWED: Final = 0.5
"""Most tokens of loss that are held against a caller."""
DISTRUSTED: Final = 0.25
"""Share of `START_LOSS` for a caller whose drafts have lost lately."""
INHERITED: Final = 0.5
"""Share of what drafts have gained a caller that his next request may lose."""
MISSES: Final = 16
"""Lookups in vain, one after another, after which a token more passes before the next."""
LONGEST_PAUSE: Final = 4
"""Most tokens from one lookup in vain to the next: so many of a quotation may pass before it is found."""
CLIPPED: Final = 0.3
"""Largest deviation of one step's time from its expectation that the common level follows."""
LAST_TIMES: Final = 9
"""Number of steps with so many rows whose median is their time: others use the machine too."""
ASSUMED_TIMES: Final = 2
"""Steps that the expected time of so many rows counts for in that median."""
FORGOTTEN: Final = 64
"""Steps after which the expectation counts for one step more, where none had so many rows meanwhile."""
LEAST_PRICE: Final = 0.3
"""Lowest share of the assumed price of a row that a wrong draft is charged with."""
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


class RowPrice:
    """Knowledge of the time of steps with so many rows, as logarithms over the level of all steps."""

    __slots__ = "assumed", "level", "seen", "times"

    def __init__(self, level: float, assumed: float | None, step: int) -> None:
        """`assumed`: level that is expected by those of other numbers of rows; None: there are none."""
        self.level, self.assumed, self.seen = level, assumed, step
        self.times: deque[float] = deque(maxlen=LAST_TIMES)

    def weight(self, step: int) -> int:
        """Return the number of steps that are known, less those that the expectation counts for by age."""
        return len(self.times) - (step - self.seen) // FORGOTTEN

    def update(self, step: int) -> None:
        """Set the level to the median of the last steps."""
        count = ASSUMED_TIMES + (step - self.seen) // FORGOTTEN
        assumed = [] if self.assumed is None else [self.assumed] * count
        self.level = median([*self.times, *assumed])


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
            level = assumed = self._levels(requests, range(rows, rows + 1))[0] if known else None
            if level is None:
                level = observed - self._level
            price = known[place] = RowPrice(level, assumed, self._steps)
            self._tables.pop(requests, None)
        deviation = observed - self._level
        price.times.append(deviation)
        price.seen = self._steps
        self._level += 0.1 * max(-CLIPPED, min(CLIPPED, deviation - price.level))

    def charge(self, prices: Sequence[float], requests: int, drafts: int) -> float:
        """Return the tokens that each of so many drafts costs where it is wrong."""
        measured = (prices[drafts] - 1) / drafts
        return max(measured, LEAST_PRICE * self._slope) * requests

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

    def _levels(self, requests: int, rows: Sequence[int]) -> list[float]:
        """Return the levels of steps with so many rows: between neighbors that are known, or beyond the last
        one at the assumed price of a row.
        """

        def assumed(number: int) -> float:
            return log(1 + self._slope * max(0, number - requests))

        points = self._points(requests)
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

    def _points(self, requests: int) -> list[tuple[int, float]]:
        """Return numbers of rows and their levels; the mean of both where more rows took less time."""
        known, points = self._known.get(_bucket(requests), {}), list[tuple[list[int], float, int]]()
        for rows, price in sorted(known.items()):
            weight = price.weight(self._steps)
            if weight <= 0:
                continue
            price.update(self._steps)
            merged, level = [rows], price.level
            while points and points[-1][1] > level:
                others, other, count = points.pop()
                level = (level * weight + other * count) / (weight + count)
                merged, weight = [*others, *merged], weight + count
            points.append((merged, level, weight))
        return [(rows, level) for merged, level, _ in points for rows in merged]


def _bucket(number: int) -> int:
    """Return the number that stands for `number`: of small ones each, then every second, fourth, eighth."""
    step = 1 if number <= 8 else 2 if number <= 16 else 4 if number <= 32 else 8
    return -(-number // step) * step


class CallerDrafts:
    """Acceptance of the lookups in one caller's earlier requests: the prior of the next request."""

    def __init__(self) -> None:
        self.credit = 0.0
        """Tokens that they have gained lately; negative: lost."""
        self._kinds: dict[tuple[DraftMethod, int], Acceptance] = {}

    def acceptance(self, method: DraftMethod, kind: int) -> Acceptance:
        found = self._kinds.get((method, kind))
        if found is None:
            found = self._kinds[method, kind] = Acceptance(LOOKUP_PRIORS[kind][1], LOOKUP_PRIOR_TOKENS)
        return found

    def take_credit(self) -> float:
        """Return how many tokens a new request may lose, and take that credit from the caller's gains."""
        if self.credit < 0:
            return DISTRUSTED * START_LOSS
        taken = INHERITED * self.credit
        self.credit -= taken
        return START_LOSS + taken


class RequestDrafts:
    """Drafts of one request: gains and losses of its lookups, and their acceptance."""

    def __init__(self, caller: CallerDrafts) -> None:
        self.has_ended = False
        self.resumes_at = 0
        """Number of output tokens before which it is not looked up."""
        self._caller = caller
        self._credit = caller.take_credit()
        self._misses = 0
        self._outputs = 0
        self._kinds: dict[tuple[DraftMethod, int], Acceptance] = {}

    def chance(self, method: DraftMethod, match: int) -> float:
        """Return the expected acceptance of lookups with a match of so many tokens."""
        return self._acceptance(method, _kind(match)).share

    def record_verification(self, method: DraftMethod, match: int, drafted: int, accepted: int) -> None:
        kind = _kind(match)
        self._acceptance(method, kind).record(drafted, accepted)
        self._caller.acceptance(method, kind).record(drafted, accepted)

    def may_lose(self, num_output: int) -> bool:
        """Return True while wrong drafts cost no more than the share of the answer that they may cost."""
        if num_output < self.resumes_at:
            return False
        self._credit += LOSS_SHARE * (num_output - self._outputs)
        self._outputs = num_output
        if self._credit > 0:
            return True
        self.resumes_at = num_output + 1 + int((REGAINED - self._credit) / LOSS_SHARE)
        return False

    def record_lookup(self, num_output: int, *, found: bool) -> None:
        """Record whether anything was proposed. Where nothing is, time after time, lookups become rarer."""
        if found:
            self._misses = 0
        else:
            self._misses += 1
            self.resumes_at = num_output + min(LONGEST_PAUSE, 1 + self._misses // MISSES)

    def affordable(self, charge: float) -> int:
        """Return how many drafts at this charge may be wrong; at least one."""
        return 1 + int(self._credit / charge)

    def record_gain(self, tokens: float) -> None:
        """Record what the drafts of a step gained; negative: cost."""
        self._credit = min(self._credit + tokens, MOST_CREDIT)
        self._caller.credit = max(-OWED, min(self._caller.credit + tokens, MOST_CREDIT))

    def _acceptance(self, method: DraftMethod, kind: int) -> Acceptance:
        """Return the acceptance of a kind of match. It begins at the mean of the caller's and of what is
        assumed of anybody: few tries tell whether this request is another one.
        """
        found = self._kinds.get((method, kind))
        if found is None:
            prior = (LOOKUP_PRIORS[kind][1] + self._caller.acceptance(method, kind).share) / 2
            found = self._kinds[method, kind] = Acceptance(prior, LOOKUP_PRIOR_TOKENS, LOOKUP_MEMORY)
        return found


def _kind(match: int) -> int:
    """Return the index of `LOOKUP_PRIORS` for a match of so many tokens."""
    return next(place for place, (least, _) in enumerate(LOOKUP_PRIORS) if match >= least)


def choose_lengths(
    chances: Sequence[float],
    lengths: Sequence[int],
    prices: Sequence[float],
    *,
    others: float = 0.0,
    extra: float = 0.0,
) -> tuple[list[int], float]:
    """Return how many drafts of each request give most tokens in a unit of time, and how many times those of
    a step without drafts these are; no drafts where the gain is below `MIN_GAIN`.

    `chances`: acceptance of each request's drafts. `lengths`: how many each has. `prices`: of steps with 0,
    1, ... drafts. `others`: tokens that the step gives besides. `extra`: price of the passes that propose.
    """
    guesses = sorted(
        (
            (chance**depth, -depth, -place)
            for place, (chance, length) in enumerate(zip(chances, lengths, strict=True))
            for depth in range(1, length + 1)
        ),
        reverse=True,
    )
    base = tokens = float(len(chances) + others)
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
