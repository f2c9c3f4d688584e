"""Measured model of one engine's queue: when a new request would have its first token, and how far apart its
tokens would be.

Prompts are computed in the order of their priority and arrival, in steps that running requests share. All
numbers were measured on this engine: step times, lengths of answers, the error of earlier forecasts. Times
are seconds, sizes are tokens.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from llmbox.engine.ipc.messages import AddRequest, EngineStats, ModelInfo

from ..config.entries import LatencyTarget
from .prefix_table import PrefixTable, block_hashes
from .step_times import LEAST_WEIGHT, ForecastErrors, MeasuredSteps

USUAL_ANSWER: Final = 512
"""Expected tokens of an answer before any has ended; fewer if a request asks for fewer."""
LOWEST_BAND: Final = 8
"""Priorities beyond it count as equal, as in the engine's scheduler."""
_LONGEST_WAIT: Final = 60
_SAMPLED: Final = 8
"""Learn from one of so many steps while no decision depends on it; always from the first two."""
_REFUSING_S: Final = 10.0
"""Maximum seconds between two refusals of the same period of refusals."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Prediction for one request, made at its arrival."""

    ttft: float
    """Time to its first token."""
    tpot: float
    """Time per output token, of it and of the requests beside it."""
    idle_ttft: float
    idle_tpot: float
    """Both on an engine without other requests."""
    ends_every: float
    """Time between the ends of two running requests."""
    is_first: bool
    """True if no request of its class or a better one is open."""
    is_behind: bool
    """True if other prompts are computed before its own."""
    measured_ttft: float
    measured_tpot: float
    """`ttft` and `tpot` computed from step times, before correction by earlier errors."""

    def missed(self, target: LatencyTarget, waited: float = 0.0) -> list[str]:
        """Return which targets it would miss: `ttft`, `tpot`. `waited`: seconds since the request arrived."""
        return missed_targets(self.ttft + waited, self.tpot, target)

    def never_met(self, target: LatencyTarget) -> list[str]:
        """Return which targets it would miss on an idle engine too."""
        return missed_targets(self.idle_ttft, self.idle_tpot, target)

    def seconds_to_try(self, target: LatencyTarget) -> int:
        """Return the seconds until the queue is short enough, if no other request arrives."""
        wait = self.ttft - target.ttft
        if self.tpot > target.tpot:
            wait = max(wait, self.ends_every)
        return min(_LONGEST_WAIT, max(1, math.ceil(wait)))


def missed_targets(ttft: float | None, tpot: float | None, target: LatencyTarget) -> list[str]:
    """Return which targets these times miss: `ttft`, `tpot`."""
    pairs = {"ttft": (ttft, target.ttft), "tpot": (tpot, target.tpot)}
    return [name for name, (value, most) in pairs.items() if value is not None and value > most]


@dataclass(slots=True)
class AdmissionCounts:
    """Number of requests by outcome, since the model was loaded."""

    admitted: int = 0
    refused: int = 0
    missed: int = 0
    """Admitted requests that missed a target."""


@dataclass(slots=True)
class _Entry:
    band: int
    tokens: int
    """Prompt tokens still to be computed; 0 after the first output token."""
    hashes: Sequence[bytes] = ()
    most: int = 1
    """Maximum number of output tokens."""
    output: Sequence[int] = ()
    """Output tokens so far."""


class QueueModel:
    """Model of one engine. It is notified of each request and step, and survives restarts of the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._info: ModelInfo | None = None
        self._stats = EngineStats()
        self._times_of: dict[tuple[int, int] | None, MeasuredSteps] = {}
        """Times of one engine, and of pairs of engines (`--disaggregate`)."""
        self.times = self._times_of[None] = MeasuredSteps(self._refusing)
        self.learns_all = False
        """Learn from every step: admission or the choice of engines depends on it."""
        self.counts = AdmissionCounts()
        self._refused_at, self._refusing_s = -math.inf, 0.0
        self.errors = {False: ForecastErrors(), True: ForecastErrors()}
        """Errors of earlier forecasts, of requests without others before them and of those behind others: in
        a burst the cores have more to do than before.
        """
        self.never_met = ""
        """Text naming the targets that the newest request missed although it waited for no other; empty if
        none.
        """
        self.warned_of: LatencyTarget | None = None
        """Target whose miss was logged last."""
        self._serial: float | None = None
        """Seconds a prompt token where another engine computes prompts (`--disaggregate`)."""
        self._first_at = -math.inf
        self._step_at = -math.inf
        """Time at which the current step began, or slightly later."""
        self._new_tokens = 0
        """Prompt tokens of requests that arrived since, which the current step does not compute."""
        self._answer: float | None = None
        """Mean output tokens of ended requests."""
        self._open: dict[str, _Entry] = {}
        self._estimates: dict[str, _Entry] = {}
        self._requests: Counter[int] = Counter()
        """Open requests by band."""
        self._prompts: Counter[int] = Counter()
        """Prompt tokens of open requests without an output token, by band."""
        self._prefixes = PrefixTable()

    # ------------------------------------------------------------------ what happens

    def begin(self, info: ModelInfo) -> None:
        """Note that an engine is ready: its counters and its prefix cache are empty."""
        self._info, self._stats = info, EngineStats()
        self._step_at, self._new_tokens = self._clock(), 0
        self.times = self._times_of.setdefault(info.disaggregate, MeasuredSteps(self._refusing))
        self._prefixes = PrefixTable(most_blocks=max(1, info.num_blocks))

    def observe(self, stats: EngineStats) -> None:
        """Learn from the step that these counters report, or skip it."""
        before, self._stats = self._stats, stats
        self._step_at, self._new_tokens = self._clock(), 0
        steps = stats.work.steps
        if self.learns_all or steps % _SAMPLED == 0 or steps <= 2 * _SAMPLED:
            self.times.observe(before, stats)

    def enter(self, request: AddRequest, output: Sequence[int]) -> None:
        """Note a request that was submitted. `output` grows as its tokens come."""
        entry = self._estimates.pop(request.request_id, None)
        if entry is None:
            entry = _Entry(_band(request), 0 if request.fork_of else len(request.prompt_ids))
        if not self._open:
            self._step_at, self._new_tokens = self._clock(), 0
        entry.most, entry.output = request.params.max_tokens, output
        if entry.hashes:
            self._prefixes.record("", entry.hashes)
        self._open[request.request_id] = entry
        self._requests[entry.band] += 1
        self._prompts[entry.band] += entry.tokens
        self._new_tokens += entry.tokens

    def note_first(self, request: AddRequest, sent_at: float, cached: int) -> None:
        """Note a request's first token. `cached`: prompt tokens found in a cache."""
        now, entry = self._clock(), self._open.get(request.request_id)
        if entry is None:
            return
        self._prompts[entry.band] -= entry.tokens
        entry.tokens = 0
        if computed := len(request.prompt_ids) - cached:
            # The prefill engine computes one prompt after another.
            seconds = (now - max(sent_at, self._first_at)) / computed
            before = seconds if self._serial is None else self._serial
            self._serial = before + LEAST_WEIGHT * (seconds - before)
        self._first_at = now

    def leave(self, request_id: str, answered: int | None) -> None:
        """Note the end of a request. `answered`: its output tokens, where the engine finished it."""
        if (entry := self._open.pop(request_id, None)) is None:
            return
        self._requests[entry.band] -= 1
        self._prompts[entry.band] -= entry.tokens
        if answered:
            before = answered if self._answer is None else self._answer
            self._answer = before + LEAST_WEIGHT * (answered - before)
        if not self._open:
            self.times.rest()

    def settle(
        self,
        forecast: Forecast,
        target: LatencyTarget,
        ttft: float | None,
        tpot: float | None,
        *,
        waited: float = 0.0,
    ) -> list[str]:
        """Compare an admitted request's times with its forecast, and learn from the error. Returns the
        targets that it missed.

        Forecasts far below their target are not learned from: their error decides nothing. `waited`: seconds
        of `ttft` before the forecast was made.
        """
        if ttft is not None and 4 * forecast.ttft > target.ttft:
            self.errors[forecast.is_behind].ttft.add(forecast.measured_ttft, ttft - waited)
        if tpot is not None and 4 * forecast.tpot > target.tpot:
            self.errors[forecast.is_behind].tpot.add(forecast.measured_tpot, tpot)
        missed = missed_targets(ttft, tpot, target)
        self.counts.missed += bool(missed)
        return missed

    # ------------------------------------------------------------------ forecasts

    def forecast(self, requests: Sequence[AddRequest]) -> Forecast | None:
        """Predict the times of requests that come together, the choices of one call. None if no step was
        measured, as with engines that do not report steps.
        """
        self.learns_all = True
        if (info := self._known) is None:
            return None
        own = sum(self._estimate(request, info) for request in requests)
        return self._forecast(_band(requests[0]), own, len(requests), requests[0].params.max_tokens, info)

    def forecast_shortest(self) -> Forecast | None:
        """Predict the times of a standard request with a prompt of one token; None as `forecast`."""
        return None if (info := self._known) is None else self._forecast(0, 1, 1, USUAL_ANSWER, info)

    @property
    def _known(self) -> ModelInfo | None:
        """Return the engine's facts, once its steps are known."""
        info = self._info
        if info is None or not self.times.is_measured or (info.disaggregate and self._serial is None):
            return None
        return info

    def _forecast(self, band: int, own: int, rows: int, most: int, info: ModelInfo) -> Forecast:
        open_requests = self._requests.total()
        beside = min(info.max_running, open_requests + rows)
        answer = self._answer or min(USUAL_ANSWER, most)
        tpot = self._tpot(beside, self._prompts.total() + own, answer, info)
        ends_every = answer * tpot / max(1, min(info.max_running, open_requests))
        better = sum(count for each, count in self._requests.items() if _class(each) <= _class(band))
        wait = self._places_wait(band, rows, answer, info) * tpot
        wait = max(wait, self._block_ends(own, info) * ends_every)
        ahead = self._ahead(band)
        prefill = self._prefill(ahead + own, beside - 1, info, is_filled=ahead > 0)
        ttft = wait + max(0.0, self._in_flight(band, beside, ahead, info) + prefill)
        ttft, tpot = ttft * self.times.pace, tpot * self.times.pace
        errors = self.errors[ahead > 0]
        ttft_factor, tpot_factor = errors.ttft.factor, errors.tpot.factor
        return Forecast(
            ttft=ttft * ttft_factor,
            tpot=tpot * tpot_factor,
            idle_ttft=self._prefill(own, rows - 1, info) * ttft_factor,
            idle_tpot=self.times.predict_decode(rows) / self.times.tokens_per_row * tpot_factor,
            ends_every=ends_every,
            is_first=not better,
            is_behind=ahead > 0,
            measured_ttft=ttft,
            measured_tpot=tpot,
        )

    def forget(self, requests: Sequence[AddRequest]) -> None:
        """Drop the state that `forecast` kept for refused requests."""
        for request in requests:
            self._estimates.pop(request.request_id, None)

    def refuse(self, requests: Sequence[AddRequest]) -> None:
        """Record that requests were refused by their forecast."""
        self.forget(requests)
        self.counts.refused += 1
        now = self._clock()
        self._refusing_s += min(now - self._refused_at, _REFUSING_S)
        self._refused_at = now

    def _refusing(self) -> float:
        """Return for how many seconds requests have been refused one after another."""
        return self._refusing_s

    def _estimate(self, request: AddRequest, info: ModelInfo) -> int:
        """Return the prompt tokens of a request that are to be computed, kept until it is submitted."""
        if request.fork_of:
            entry = _Entry(_band(request), 0)
        else:
            # Hashes do not tell images apart, and log-probabilities of a prompt need all of it computed.
            is_cached = not request.images and request.params.prompt_logprobs is None
            hashes = block_hashes(request, info.block_size, len(request.prompt_ids)) if is_cached else ()
            has_cache = self._stats.prefix_queries > 0
            known = self._prefixes.count_known("", hashes) * info.block_size if has_cache else 0
            # The last token is computed in any case: its logits are needed.
            entry = _Entry(_band(request), max(1, len(request.prompt_ids) - known), hashes)
        self._estimates[request.request_id] = entry
        return entry.tokens

    def _ahead(self, band: int) -> int:
        """Return the prompt tokens to be computed before a new request of a band.

        Computed tokens of prompts in progress count for worse bands first, as they may belong to one.
        """
        total = self._prompts.total()
        ahead = sum(tokens for each, tokens in self._prompts.items() if each <= band)
        done = max(0, self._stats.prefill_done - (total - ahead))
        return max(0, ahead - done)

    def _places_wait(self, band: int, rows: int, answer: float, info: ModelInfo) -> float:
        """Return after how many tokens of running requests the last of `rows` new ones has a place, behind
        those of its class and better ones.
        """
        before = [entry for entry in self._open.values() if _class(entry.band) <= _class(band)]
        if len(before) + rows <= info.max_running:
            return 0.0
        ends: list[float] = []
        start = 0.0
        for entry in sorted(before, key=lambda entry: not entry.output):
            whole = min(entry.most, answer)
            if len(ends) < info.max_running:
                heappush(ends, max(1.0, whole - len(entry.output)))
            else:
                heappush(ends, heappop(ends) + whole)
        for _ in range(rows):
            start = heappop(ends) if len(ends) >= info.max_running else start
            heappush(ends, start + answer)
        return start

    def _block_ends(self, own: int, info: ModelInfo) -> int:
        """Return how many running requests must end until there are blocks for the prompts that wait."""
        stats = self._stats
        needed = (self._prompts.total() - stats.prefill_done + own) / info.block_size
        lacking = needed - (stats.blocks_total - stats.blocks_used)
        if not stats.blocks_total or lacking <= 0 or not stats.running:
            return 0
        return math.ceil(lacking * stats.running / max(1, stats.blocks_used))

    def _in_flight(self, band: int, rows: int, ahead: int, info: ModelInfo) -> float:
        """Return the rest of the step under way, which a new request of a band waits for. Below zero where it
        computes some of the `ahead` tokens, whose whole time is counted apart.
        """
        if not self._open:
            return 0.0
        elapsed = self._clock() - self._step_at
        worse = sum(tokens for each, tokens in self._prompts.items() if each > band)
        if worse and not info.disaggregate:
            step = self.times.predict_mixed(rows, min(worse, _chunk(info, rows, worse)))
        elif info.disaggregate or self._prompts.total() <= self._new_tokens:
            step = self.times.predict_decode(rows)
        else:
            return -min(self.times.predict_mixed(rows, min(ahead, _chunk(info, rows, ahead))), elapsed)
        return max(0.0, step - elapsed)

    def _prefill(self, tokens: int, rows: int, info: ModelInfo, *, is_filled: bool = False) -> float:
        """Predict the steps that compute `tokens` of prompts. `is_filled`: requests that come later fill the
        last one.
        """
        if info.disaggregate:
            return tokens * (self._serial or 0.0) + self.times.predict_decode(rows + 1)
        if is_filled:
            chunk = _chunk(info, rows, tokens)
            tokens = math.ceil(tokens / chunk) * chunk
        return self.times.predict_prompts(tokens, rows, info.step_tokens(rows) or tokens + rows)

    def _tpot(self, rows: int, prompts: int, answer: float, info: ModelInfo) -> float:
        """Predict the time per token of `rows` requests while `prompts` tokens of prompts are computed."""
        times = self.times
        step = times.predict_decode(rows)
        extra = times.extra
        if not info.disaggregate:
            chunk = _chunk(info, rows, prompts)
            mixed = min(1.0, math.ceil(prompts / chunk) / max(1.0, answer))
            extra = max(extra, mixed * (times.predict_mixed(rows, min(chunk, prompts)) - step))
        return (step + extra) / times.tokens_per_row


def _chunk(info: ModelInfo, rows: int, tokens: int) -> int:
    """Return the prompt tokens of a step beside `rows` running requests."""
    return max(1, (info.step_tokens(rows) or tokens + rows) - rows)


def _band(request: AddRequest) -> int:
    return max(-LOWEST_BAND, min(LOWEST_BAND, request.priority))


def _class(band: int) -> int:
    """Return the class of a band: premium, standard, background. A better one displaces worse ones."""
    return (band > 0) - (band < 0)
