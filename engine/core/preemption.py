"""Running requests, and preemption: which of them lose their place, for lack of blocks or for waiting ones.

A waiting request of a better class takes a running slot, or blocks, of a worse one: premium (bands below 0)
before standard (0) before background. Within a class, a caller with nothing running takes a slot from a
caller that has more than its share, so that nobody waits for another caller's long answers. A preempted
request keeps its tokens and continues later with the same tokens that it would have got anyway.
"""

from collections.abc import Iterable, Iterator, Mapping

from .kv_cache.manager import KVCacheManager
from .request import Request
from .request_queue import ALL_BANDS, Flows, WaitingQueue, least_deserving

CLASS_ENDS = (0, 1)
"""First band after the premium class and first band after the standard class."""
MAX_DISPLACEMENTS = 4
"""Maximum preemptions of one request for callers of its own band, which bounds what is computed again."""


class PreemptionPolicy:
    def __init__(
        self, max_running: int, kv_cache: KVCacheManager, flows: Flows, waiting: WaitingQueue
    ) -> None:
        self._max_running = max_running
        self._kv_cache = kv_cache
        self._flows = flows
        self._waiting = waiting

    def victims(self, running: Mapping[str, Request]) -> Iterator[Request]:
        """Yield requests to preempt. The caller preempts each one before it asks for the next."""
        for class_end in CLASS_ENDS:
            if self._flows.has_running(class_end):
                yield from self._victims_of_better(class_end, running)
        head, _ = self._waiting.choose({}, better_than=ALL_BANDS)
        while head is not None and self._lacks_place(head, running):
            if (victim := self._pick(self._beyond_share(head, running))) is None:
                break
            self._flows.pay(head, self._cost(victim))
            yield victim

    def _victims_of_better(self, class_end: int, running: Mapping[str, Request]) -> Iterator[Request]:
        """Yield running requests of bands from `class_end` on, for waiting requests of better bands."""

        def pick() -> Request | None:
            return self._pick(each for each in running.values() if each.flow.band >= class_end)

        while self._waiting.num_queued(class_end) + len(running) > self._max_running:
            if (victim := pick()) is None:
                return
            yield victim
        head, _ = self._waiting.choose({}, better_than=class_end)
        while head is not None and running and not self._kv_cache.fits(head):
            if (victim := pick()) is None:
                return
            yield victim

    def _lacks_place(self, request: Request, running: Mapping[str, Request]) -> bool:
        """Return True if the request cannot be admitted now and its caller has nothing running."""
        if request.flow.running or not running:
            return False
        return len(running) >= self._max_running or not self._kv_cache.fits(request)

    def _beyond_share(self, request: Request, running: Mapping[str, Request]) -> Iterator[Request]:
        """Return running requests of no better band whose callers have more slots than their share and are
        ahead by the cost of the preemption. The cost keeps busy callers from preempting each other in turn.
        """
        share = max(1.0, len(running) / self._flows.num_present())
        return (
            each
            for each in running.values()
            if each.flow.band >= request.flow.band
            and each.flow.running > share
            and each.flow.tokens >= request.flow.tokens + self._cost(each)
            and each.displacements < MAX_DISPLACEMENTS
        )

    def _cost(self, victim: Request) -> int:
        """Estimate the tokens that are computed again; the prefix cache keeps all but the last block."""
        pool = self._kv_cache.pool
        return min(victim.num_computed, pool.block_size) if pool.caching else victim.num_computed

    def _pick(self, candidates: Iterable[Request]) -> Request | None:
        """Return the least deserving candidate that may be preempted, or None."""
        able = [each for each in candidates if not (each.keeps_place or self._kv_cache.is_pinned(each))]
        return max(able, key=least_deserving, default=None)


class RunningRequests:
    """Requests that hold blocks, and one of `max_running` slots each."""

    def __init__(
        self, max_running: int, kv_cache: KVCacheManager, flows: Flows, waiting: WaitingQueue
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.preemptions = 0
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._policy = PreemptionPolicy(max_running, kv_cache, flows, waiting)

    @property
    def prefill_done(self) -> int:
        """Number of tokens computed so far for prompts that are in progress; cache hits do not count."""
        return sum(
            max(0, request.num_computed - (request.num_cached or 0))
            for request in self.by_id.values()
            if not request.first_output_sent
        )

    def start(self, request: Request) -> None:
        """Add a request whose blocks were allocated."""
        self.by_id[request.request_id] = request
        request.flow.running += 1

    def stop(self, request: Request, *, suspect: bool) -> None:
        """Remove a request and free its blocks; those of a suspect leave the prefix cache."""
        del self.by_id[request.request_id]
        request.flow.running -= 1
        self._kv_cache.free(request, suspect=suspect)

    def grow(self) -> None:
        """Allocate a slot for the next token of every request; preempt when blocks are short. A request that
        has outgrown the RoPE factors of its keys is queued to be computed again.

        Call it before any row is planned, so that no planned row loses its blocks.
        """
        size = self._kv_cache.pool.block_size
        for request in list(self.by_id.values()):
            if request.outgrows_factors:
                self.requeue(request)
                continue
            if len(request.block_table) * size >= request.num_tokens + request.num_pending:
                continue
            if request.num_pending and request.is_ending:
                continue
            while request.request_id in self.by_id:
                if self._kv_cache.extend(request, alone=len(self.by_id) == 1):
                    break
                self.preempt(max(self.preemptible(), key=least_deserving))

    def displace(self) -> None:
        """Preempt requests for waiting ones. Call it before any row is planned, too."""
        for victim in self._policy.victims(self.by_id):
            victim.displacements += 1
            self.preemptions += 1
            self.requeue(victim)

    def preemptible(self) -> Iterator[Request]:
        """Return the requests that are not pinned. Never empty when a request must grow: pinned requests do
        not grow, so it is one of them.
        """
        return (request for request in self.by_id.values() if not self._kv_cache.is_pinned(request))

    def preempt(self, request: Request) -> None:
        request.preemptions += 1
        self.preemptions += 1
        self.requeue(request)

    def requeue(self, request: Request, *, suspect: bool = False) -> None:
        """Return a request to the queue, by its arrival; its tokens so far are computed again."""
        self.stop(request, suspect=suspect)
        if request.clock is not None:
            request.clock.requeue(request)
        request.prompt_logprobs.clear()
        request.pooled.clear()
        request.choose_factors(request.short_context)
        self._waiting.push(request)
