"""Drafts of a model: for which requests it is asked for how many, by what its passes cost and gain.

A method that has not paid so far is tried again on a budget, a share of the time of all steps: acceptance
differs from text to text, and nobody knows that of the next one.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from ..request import Request
from .draft_choice import Acceptance, choose_lengths, expected_gain
from .proposer import Proposals, Proposer

PRIOR_ACCEPTANCE: Final = 0.6
"""Acceptance that is assumed of a model before any verification."""
PRIOR_TOKENS: Final = 4.0
"""Tokens that the engine's acceptance counts for, at a request's first draft."""
TIMES: Final = 15
"""Number of passes and steps whose times are known."""
PRIOR_COST: Final = 0.2
"""Time of a pass over that of a step, before any was measured."""
MIN_GAIN: Final = 1.03
"""Fewest tokens over those of lookups alone, in the same time."""
TRIES: Final = 6
"""Verifications after which a request's own acceptance is known."""
REST: Final = 64
"""Tokens without tries after that, where drafts do not pay; doubled each time."""
TRIED_SHARE: Final = 0.005
"""Share of the time of steps that may be spent on tries."""
START_STEPS: Final = 3.0
"""Steps whose time may be spent on tries at the begin, and saved for later ones at most."""
LONGEST_PAUSE: Final = 8
"""Most steps from one that waited in vain for a model's drafts to the next."""
CAUGHT_UP_ROWS: Final = 2
"""Most rows of a request in a pass whose time tells what a draft costs."""


class MovingMedian:
    """Median of the last times: first steps, which touch memory for the first time, count for little."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=TIMES)

    def add(self, value: float) -> None:
        self._last.append(value)

    @property
    def value(self) -> float | None:
        return median(self._last) if self._last else None


class ModelWaits:
    """Steps that wait for the tokens of launched ones because a model is to propose what follows. Where none
    is asked in the end, as without a KV slot for a draft, later steps wait less often.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._in_vain = self._pause = 0

    def may_begin(self) -> bool:
        """Return True if the next step may wait; called once a step."""
        if self._pause:
            self._pause -= 1
        return not self._pause

    def begin(self) -> None:
        self._is_open = True

    def note_asked(self) -> None:
        """Record that a model was asked."""
        self._is_open, self._in_vain = False, 0

    def end(self) -> None:
        """Record that the step is scheduled."""
        if self._is_open:
            self._is_open, self._in_vain = False, self._in_vain + 1
            self._pause = min(2**self._in_vain, LONGEST_PAUSE)


class DraftingChoice(NamedTuple):
    """Model to ask in a step."""

    model: "ModelDrafting"
    lengths: list[int]
    """Most drafts of each request."""
    explores: bool = False
    """They are not expected to pay."""


class ModelHistory:
    """Verified drafts of one request."""

    def __init__(self, share: float) -> None:
        self.acceptance = Acceptance(share, PRIOR_TOKENS)
        self.tries = 0
        self.rest = REST
        self.resumes_at = 0
        """Number of output tokens from which on it is tried again."""


class ModelDrafting:
    """Decides about the drafts of one `Proposer` that runs a model, and asks it for them."""

    def __init__(self, proposer: Proposer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.proposer = proposer
        self._clock = clock
        self._all = {sampled: Acceptance(PRIOR_ACCEPTANCE, PRIOR_TOKENS) for sampled in (False, True)}
        """Acceptance over all requests, of greedy ones and of those with a temperature."""
        self._requests: WeakKeyDictionary[Request, ModelHistory] = WeakKeyDictionary()
        self._step = MovingMedian()
        self._passes: dict[int, MovingMedian] = {}
        """Times of a pass by the bits of its number of requests."""
        self._budget = START_STEPS

    def cost(self, requests: int) -> float:
        """Return the time of a pass for so many requests over the time of a step."""
        size, step = requests.bit_length(), self._step.value
        if not self._passes or not step:
            return PRIOR_COST
        nearest = min(self._passes, key=lambda known: (abs(known - size), known))
        return (self._passes[nearest].value or 0.0) / step

    def choose(
        self,
        requests: Sequence[tuple[Request, int]],
        chances: Sequence[float],
        lengths: Sequence[int],
        prices: Sequence[float],
    ) -> tuple[list[int], float]:
        """Return how many drafts to ask for, for each of the `requests` with their limits, and how many times
        the tokens of a step without drafts come of it in the same time. `chances`, `lengths`: of the drafts
        that lookups have for them; 0 where these are kept.
        """
        own = [self._history(request).acceptance.share for request, _ in requests]
        _, best_rate = choose_lengths(chances, lengths, prices)
        best, falling = [0] * len(requests), 0
        for length in range(1, max((most for _, most in requests), default=0) + 1):
            mine = [min(length, most) for _, most in requests]
            asked = [
                expected_gain(share, most) > expected_gain(chance, found)
                for most, share, chance, found in zip(mine, own, chances, lengths, strict=True)
            ]
            if not any(asked):
                break
            chosen, rate = choose_lengths(
                [share if asks else found for asks, share, found in zip(asked, own, chances, strict=True)],
                [most if asks else found for asks, most, found in zip(asked, mine, lengths, strict=True)],
                prices,
                extra=length * self.cost(sum(asked)),
            )
            wanted = [count if asks else 0 for asks, count in zip(asked, chosen, strict=True)]
            if rate > max(MIN_GAIN, best_rate) and any(wanted):
                best, best_rate, falling = wanted, rate, 0
            elif (falling := falling + 1) == 2:
                break
        return best, best_rate

    def explore(self, requests: Sequence[tuple[Request, int]]) -> int | None:
        """Return the index of a request to try a draft for, though none is expected to pay; None without
        budget.
        """
        if self._budget <= 0:
            return None
        best, best_key = None, (False, 0)
        for place, (request, most) in enumerate(requests):
            history = self._history(request)
            if history.tries >= TRIES:
                history.tries, history.resumes_at = 0, request.num_output + history.rest
                history.rest *= 2
            if most <= 0 or request.num_output < history.resumes_at:
                continue
            key = history.tries > 0, request.params.max_tokens - request.num_output
            if best is None or key > best_key:
                best, best_key = place, key
        return best

    def propose(self, wanted: Sequence[tuple[Request, int]], *, explores: bool = False) -> list[list[int]]:
        """Ask for drafts. `explores`: they are not expected to pay."""
        began = self._clock()
        proposed: Proposals = self.proposer.propose(wanted)
        seconds, step = self._clock() - began, self._step.value
        if proposed.passes and proposed.rows <= CAUGHT_UP_ROWS * proposed.passes * len(wanted):
            known = self._passes.setdefault(len(wanted).bit_length(), MovingMedian())
            known.add(seconds / proposed.passes)
        if explores:
            self._budget -= seconds / step if step else PRIOR_COST * max(1, proposed.passes)
        return proposed.drafts

    def charge(self, steps: float) -> None:
        """Take the time of so many steps from what may be spent on tries."""
        self._budget -= steps

    def chance(self, request: Request) -> float:
        """Return the expected acceptance of its drafts for a request."""
        return self._history(request).acceptance.share

    def record_verification(self, request: Request, drafted: int, accepted: int) -> None:
        history = self._history(request)
        history.tries += 1
        history.acceptance.record(drafted, accepted)
        self._all[request.params.temperature > 0].record(drafted, accepted)

    def record_step(self, seconds: float) -> None:
        """Record the time of a step of the target, without the proposer's passes."""
        self._step.add(seconds)
        self._budget = min(self._budget + TRIED_SHARE, START_STEPS)

    def _history(self, request: Request) -> ModelHistory:
        found = self._requests.get(request)
        if found is None:
            share = self._all[request.params.temperature > 0].share
            found = self._requests[request] = ModelHistory(share)
        return found


def choose_model(
    models: Sequence[ModelDrafting],
    requests: Sequence[tuple[Request, int]],
    chances: Sequence[float],
    found: Sequence[int],
    prices: Sequence[float],
) -> DraftingChoice | None:
    """Choose the model that is expected to gain most, or one to try where none is; None where none is to be
    asked. `requests`: with the most drafts of each. `chances`, `found`: acceptance and number of those that
    lookups have for it.
    """
    choices = [(model, *model.choose(requests, chances, found, prices)) for model in models]
    best, lengths, _ = max(choices, key=lambda choice: any(choice[1]) * choice[2])
    if any(lengths):
        return DraftingChoice(best, lengths)
    free = [place for place, (_, most) in enumerate(requests) if not found[place] and most > 0]
    for model in models:
        tried = model.explore([requests[place] for place in free])
        if tried is not None:
            lengths = [int(place == free[tried]) for place in range(len(requests))]
            return DraftingChoice(model, lengths, explores=True)
    return None
