"""Scheduling of draft tokens into steps that have rows to spare.

The time of a linear with few rows is the time to read its weights, so a few more rows cost little. Draft
tokens fill a step of decoding requests up to as many rows as pay (`draft_choice.py`). Steps with prompts have
none. Proposers are asked in this order:

    ngram     tokens that followed the same ones before, in the request
    suffix    tokens that followed them in earlier answers to the same caller, without a long match there
    grammar   tokens that the request's grammar leaves no choice about
    models    draft models and heads, where they are expected to gain more (`model_drafting.py`)

Where steps are launched ahead, as on GPUs, drafts follow only a token that the host knows: while they are
expected to gain more than the overlap does, each step waits for the tokens of the one before.
"""

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ...config import SchedulerConfig
from ..kv_cache.manager import KVCacheManager
from ..request import Request
from ..step import ONE_STAGE, PipelineDepth, SampledToken, ScheduledRequest, StepPlan, count_accepted
from .draft_choice import MOST_DRAFTS, CallerDrafts, RequestDrafts, RowPrices, choose_lengths, expected_gain
from .model_drafting import ModelDrafting, ModelWaits, choose_model
from .proposer import DraftMethod, DraftStatistics, DraftStats, Proposer
from .text_drafting import LONGER, GrammarProposer, NgramProposer, SuffixProposer

FIRST_CHARGE: Final = 0.03
"""Tokens that a wrong draft is expected to cost before there was one."""
LOST_OVERLAP: Final = 0.1
"""Tokens of each request of a step that a wait for drafts costs where none follow."""
CALLERS: Final = 64
"""Callers whose success with lookups is known, the last ones."""


@dataclass(slots=True)
class DraftCandidate:
    """Request of a step that may have drafts, and those that lookups have for it."""

    place: int
    """Index of its row in the plan."""
    request: Request
    history: RequestDrafts
    most: int
    """Maximum number of drafts."""
    drafts: list[int] = field(default_factory=list)
    method: DraftMethod = "ngram"
    chance: float = 0.0
    """Expected acceptance of these drafts."""
    match: int = 0
    """Number of tokens that they rest on."""
    model: ModelDrafting | None = None
    """Model that proposed them."""
    known: int = 0
    """Number of tokens of the request when it was looked up."""

    def shift(self) -> bool:
        """Take the tokens that the request has got since then off the drafts; False if these were wrong, or
        nothing is left.
        """
        tokens, self.known = self.request.token_ids[self.known :], self.request.num_tokens
        is_right = self.drafts[: len(tokens)] == tokens
        del self.drafts[: len(tokens)]
        self.match += len(tokens)
        return is_right and bool(self.drafts)


@dataclass(slots=True)
class OpenStep:
    """Step that was scheduled and has not finished."""

    plan: StepPlan
    began: float = 0.0
    drafted: dict[Request, DraftCandidate] = field(default_factory=dict)
    """Its requests with drafts."""


class DraftScheduler:
    """Add draft tokens to plans and count how many are accepted. Steps finish in the order of their plans."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        proposers: Sequence[Proposer] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`proposers`: those that run a model."""
        self._rows = config.draft_rows
        """Maximum rows of a step with drafts; 0: none has any."""
        self._kv_cache = kv_cache
        self._clock = clock
        self._ngrams, self.answers = NgramProposer(), SuffixProposer()
        self._grammars = GrammarProposer()
        self._models = [ModelDrafting(proposer, clock) for proposer in proposers]
        self._prices = RowPrices(config.draft_row_price)
        self._open: deque[OpenStep] = deque()
        self._drafted: dict[Request, DraftCandidate] = {}
        """Requests with drafts of the step that finished last."""
        self._ended = -math.inf
        """When it did."""
        self._overlaps = False
        """Steps are launched ahead of the results of older ones."""
        self._awaited: dict[Request, DraftCandidate] = {}
        """Requests for whose drafts a step has waited, with what lookups had for them before."""
        self._model_waits = ModelWaits()
        self._callers: OrderedDict[tuple[str, str], CallerDrafts] = OrderedDict()
        self._charge = 0.0
        """Tokens that a wrong draft of the last step with drafts costs; 0: there was none."""
        methods: list[DraftMethod] = [
            "ngram",
            "suffix",
            "grammar",
            *(each.proposer.method for each in self._models),
        ]
        self._statistics = DraftStatistics(methods, clock())
        self.counts = self._statistics.counts

    def stats(self) -> DraftStats:
        """Return the fields of `EngineStats` about drafts."""
        return self._statistics.read()

    def awaits_tokens(self, requests: Iterable[Request]) -> bool:
        """Return True if the next step is to be scheduled when the tokens of launched ones are known: drafts
        are verified there, or are expected to pay after them. `requests`: those that run; all decode.
        """
        if not self._rows:
            return False
        running = [each for each in requests if not each.pools]
        if any(each.has_open_drafts for each in running):
            return True
        decoding = [each for each in running if not (each.num_pending and each.is_ending)]
        size = len(decoding)
        if not (size < self._rows and any(each.num_pending for each in decoding)):
            return False
        candidates = self._look_up(decoding, self._rows - size)
        # The unknown token is expected to be the first of what is found.
        lengths = [max(0, len(each.drafts) - each.request.num_pending) for each in candidates]
        if not any(lengths) and not self._models:
            return False
        prices, chances = self._table(size), [each.chance for each in candidates]
        chosen, _ = choose_lengths(chances, lengths, prices, others=size - len(candidates))
        self._awaited = {
            each.request: each for each, length in zip(candidates, chosen, strict=True) if length
        }
        if self._awaited or not self._models or not self._model_waits.may_begin():
            return bool(self._awaited)
        # A model's drafts follow the unknown token.
        wanted = [(each.request, each.most - each.request.num_pending) for each in candidates]
        choice = choose_model(self._models, wanted, chances, lengths, prices)
        if choice is None:
            return False
        self._model_waits.begin()
        if choice.explores:  # neither the step with drafts nor the one after it is launched ahead
            choice.model.charge(2 * max(LOST_OVERLAP, prices[1] - 1))
        return True

    def extend(self, plan: StepPlan, running: int, pipeline: PipelineDepth = ONE_STAGE) -> None:
        """Add drafts to the plan's decoding rows. `running`: requests that may need one more block each."""
        size = len(plan.rows)
        if not self._rows or not size:
            return
        self._overlaps |= pipeline.ahead > 0 and bool(self._open)
        step = OpenStep(plan)
        self._open.append(step)
        if size < self._rows and all(row.num_tokens == 1 and row.samples for row in plan.rows):
            candidates = self._look_up([row.request for row in plan.rows], self._rows - size)
            if candidates and (self._models or any(each.drafts for each in candidates)):
                self._fill(step, candidates, running)
        self._model_waits.end()
        if self._awaited:
            if not step.drafted:
                for each in self._awaited.values():
                    each.history.record_gain(-LOST_OVERLAP * size / len(self._awaited))
            self._awaited = {}
        step.began = self._clock()

    def record_step(self, plan: StepPlan) -> None:
        """Record that a step has finished, before its tokens are."""
        step = None
        while self._open and step is None:  # steps that failed are left out
            oldest = self._open.popleft()
            step = oldest if oldest.plan is plan else None
        if step is None:
            return
        self._drafted, ended, self._ended = step.drafted, self._ended, self._clock()
        size = len(plan.rows)
        rows = size + sum(len(row.drafts) for row in plan.rows) if step.drafted else size
        if not size <= rows <= self._rows or rows != plan.num_tokens:
            return
        # Steps with drafts compete with those that are launched ahead, not with those that had to wait.
        if self._overlaps and not step.drafted and step.began >= ended:
            return
        seconds = self._ended - max(step.began, ended)
        self._prices.record(size, rows, seconds)
        for model in self._models:
            model.record_step(seconds)

    def record_acceptance(self, row: ScheduledRequest, taken: list[SampledToken]) -> bool:
        """Record how many drafts of a finished row were accepted. `taken`: tokens that the row gave. Returns
        whether a model proposed them.
        """
        request, drafted = row.request, len(row.drafts)
        accepted = count_accepted([each.token_id for each in taken], row.drafts)
        candidate = self._drafted[request]
        self._statistics.add(candidate.method, drafted, accepted)
        history = candidate.history
        if candidate.model is not None:
            candidate.model.record_verification(request, drafted, accepted)
            return True
        history.record_verification(candidate.method, candidate.match, drafted, accepted)
        history.record_gain(accepted - drafted * self._charge)
        return False

    def remember(self, request: Request) -> None:
        """Keep the answer of a request that has ended, for drafts of later ones."""
        if self._rows and not request.pools:
            self.answers.remember(request)
            self._statistics.log(self._clock())

    def close(self, seconds: float) -> None:
        """Write the answers that are not on disk yet, for `seconds` at most. No step follows."""
        self.answers.stores.close(seconds)

    def end(self, request: Request) -> None:
        """Turn drafts off for this request."""
        self._history(request).has_ended = True

    def _look_up(self, requests: Sequence[Request], room: int) -> list[DraftCandidate]:
        """Return the requests that may have drafts, with what lookups propose for those that may lose."""
        candidates, wanted, has_models = list[DraftCandidate](), list[DraftCandidate](), bool(self._models)
        for place, request in enumerate(requests):
            if request.num_unknown:
                continue
            history = request.drafts or self._history(request)
            awaited = self._awaited.get(request)
            if awaited is not None and awaited.shift():
                most = self._most(request, history, room)
                awaited.place, awaited.most, awaited.drafts = place, most, awaited.drafts[: max(0, most)]
                candidates.append(awaited)
                continue
            may_lose = history.may_lose(request.num_output)
            if may_lose or has_models:
                most = self._most(request, history, room)
                candidate = DraftCandidate(place, request, history, most, known=request.num_tokens)
                candidates.append(candidate)
                if may_lose and candidate.most > 0:
                    wanted.append(candidate)
        self._take_lookups(self._ngrams, wanted)
        self._take_lookups(self.answers, [each for each in wanted if each.match < LONGER[0]])
        limited = [each for each in wanted if each.request.constraint is not None]
        self._take_lookups(self._grammars, limited)
        for each in wanted:
            constraint = each.request.constraint
            found = bool(each.drafts) or (constraint is not None and constraint.has_grammar)
            each.history.record_lookup(each.request.num_output, found=found)
        return candidates

    def _take_lookups(self, proposer: Proposer, candidates: Sequence[DraftCandidate]) -> None:
        """Give each request the proposed drafts where more of them are expected to be accepted than of those
        that it has.
        """
        if not candidates:
            return
        charge = self._charge or FIRST_CHARGE
        proposed = proposer.propose(
            [(each.request, min(each.most, each.history.affordable(charge))) for each in candidates]
        )
        for each, found, match in zip(candidates, proposed.drafts, proposed.matches, strict=True):
            drafts, constraint = found, each.request.constraint
            if found and constraint is not None:
                drafts = found[: constraint.count_allowed(each.request.token_ids, found)]
            if not drafts:
                continue
            chance = each.history.chance(proposer.method, match)
            if expected_gain(chance, len(drafts)) > expected_gain(each.chance, len(each.drafts)):
                each.drafts, each.chance, each.method, each.match = drafts, chance, proposer.method, match

    def _most(self, request: Request, history: RequestDrafts, room: int) -> int:
        """Return the maximum number of drafts for a request."""
        # A step gives one token more than accepted drafts, and the KV of the last token is never computed.
        most = min(MOST_DRAFTS, room, request.params.max_tokens - request.num_output - 1)
        most = min(most, request.num_short - request.num_tokens)
        if self._kv_cache.states is not None:
            most = min(most, self._kv_cache.states.pool.num_free)
        return 0 if history.has_ended else most

    def _table(self, size: int) -> list[float]:
        """Return the prices of steps of so many requests with 0, 1, ... drafts."""
        return self._prices.table(size, self._rows - size)[: self._rows - size + 1]

    def _fill(self, step: OpenStep, candidates: Sequence[DraftCandidate], running: int) -> None:
        """Add the drafts that are expected to pay."""
        size = len(step.plan.rows)
        prices = self._table(size)
        # A model's passes would wait for the steps under way.
        if self._models and not any(row.request.num_unknown for row in step.plan.rows):
            self._ask_model(candidates, prices, running)
        # Those of a model are all verified, as its passes are spent; lookups get the rows that are left.
        kept = [each for each in candidates if each.model is not None]
        first = min(sum(len(each.drafts) for each in kept), len(prices) - 1)
        gained = sum(expected_gain(each.chance, len(each.drafts)) for each in kept)
        lengths, _ = choose_lengths(
            [each.chance for each in candidates],
            [0 if each.model else len(each.drafts) for each in candidates],
            [price / prices[first] for price in prices[first:]] if kept else prices,
            others=size - len(candidates) + gained,
        )
        added = 0
        for each, length in zip(candidates, lengths, strict=True):
            drafts = each.drafts[:length] if each.model is None else each.drafts
            if count := self.add(step.plan, each.place, drafts, running):
                added += count
                step.drafted[each.request] = each
        if added:
            self._charge = self._prices.charge(prices, size, added)

    def _ask_model(self, candidates: Sequence[DraftCandidate], prices: Sequence[float], running: int) -> None:
        """Replace drafts by those of the model that is expected to gain most, or try one where none is."""
        requests = [(each.request, each.most) for each in candidates]
        chances, found = [each.chance for each in candidates], [len(each.drafts) for each in candidates]
        choice = choose_model(self._models, requests, chances, found, prices)
        if choice is None:
            return
        asked = [
            (each, self._slots(each.request, length, running))
            for each, length in zip(candidates, choice.lengths, strict=True)
        ]
        asked = [(each, length) for each, length in asked if length]
        if not asked:
            return
        self._model_waits.note_asked()
        wanted, model = [(each.request, length) for each, length in asked], choice.model
        drafts = model.propose(wanted, explores=choice.explores)
        for (each, _), proposed in zip(asked, drafts, strict=True):
            if proposed:
                each.drafts, each.model, each.method = proposed, model, model.proposer.method
                each.chance = model.chance(each.request)

    def add(self, plan: StepPlan, place: int, drafts: list[int], running: int) -> int:
        """Add the drafts that have KV slots to a row of the plan; return their number."""
        assert plan.rows[place].request.num_pending == 1
        if self._kv_cache.states is not None:  # drafts of other requests have taken some meanwhile
            drafts = drafts[: self._kv_cache.states.pool.num_free]
        drafts = drafts[: self._slots(plan.rows[place].request, len(drafts), running)]
        if not drafts:
            return 0
        plan.rows[place] = row = replace(plan.rows[place], num_tokens=1 + len(drafts), drafts=drafts)
        row.request.num_scheduled += len(drafts)
        if self._kv_cache.states is not None:
            self._kv_cache.states.plan_drafts(row)
        if self._kv_cache.windows is not None:
            self._kv_cache.windows.cover(row.request, row.end)
        return len(drafts)

    def _slots(self, request: Request, wanted: int, running: int) -> int:
        """Return the number of KV slots for drafts after the request's tokens, at most `wanted`.

        Allocates a block ahead of need only while every running request could still get one: no request is
        preempted for drafts.
        """
        pool = self._kv_cache.pool
        while True:
            free = len(request.block_table) * pool.block_size - request.num_tokens
            if (
                free >= wanted
                or pool.num_available <= running
                or not self._kv_cache.extend(request, alone=False)
            ):
                return min(free, wanted)

    def _history(self, request: Request) -> RequestDrafts:
        """Return the drafts of a request, which begin with what its caller's earlier ones had."""
        if request.drafts is None:
            name = request.tenant, request.cache_namespace
            caller = self._callers.setdefault(name, CallerDrafts())
            self._callers.move_to_end(name)
            if len(self._callers) > CALLERS:  # salts of one key do not push other keys out
                ((most, _),) = Counter(tenant for tenant, _ in self._callers).most_common(1)
                del self._callers[next(name for name in self._callers if name[0] == most)]
            request.drafts = RequestDrafts(caller)
        return request.drafts
