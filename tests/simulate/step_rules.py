"""Rules of one engine that hold after every step, whatever happened in it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.manager import MAX_PREEMPTIONS
from llmbox.engine.core.request import Request
from llmbox.engine.core.request_queue import band_of
from llmbox.engine.core.step import StepPlan


class BrokenRuleError(AssertionError):
    """Pass rule that does not hold."""


class StepRules:
    """Rules of one engine that hold after every step.

    Books: every block is in one state, every request in one queue. Bounds: rows, tokens and requests of a
    step; in a calling order within a flow; a stream waits for one express step at most; a request is
    preempted four times at most for lack of blocks; two callers of a band who both wait get the same number
    of tokens, but for the requests that run at once; and all requests end within a number of steps.
    """

    def __init__(self, engine: Engine, sizes: Mapping[str, Any], depth: int) -> None:
        self._engine, self._sizes = engine, sizes
        self._is_plain = not depth and sizes.get("batching", "continuous") == "continuous"
        self._streams: dict[str, tuple[int, int]] = {}
        """Output tokens and admissions of each stream before the step."""
        self._missed: Counter[str] = Counter()
        self._waited: dict[str, Request] = {}
        self._computed: dict[str, int] = {}
        self._service: Counter[tuple[int, str]] = Counter()
        self._backlog: dict[tuple[int, str], dict[tuple[int, str], int]] = {}
        self._owed = 0
        self._steps = 0
        self._seen: set[str] = set()
        self._longest = 0

    def begin(self) -> None:
        scheduler = self._engine.scheduler
        self._streams = {
            r.request_id: (r.num_output, r.admissions)
            for r in scheduler.running
            if r.num_remaining == 1 and not r.num_pending
        }
        self._waited = {name: r for name, r in scheduler._waiting._present.items() if r.scheduled_at is None}
        for name, request in scheduler._requests.items():
            if name not in self._seen:
                self._seen.add(name)
                size = request.num_tokens + request.params.max_tokens
                self._longest = max(self._longest, size)
                self._owed += 12 * size + 20

    def end(self) -> None:
        scheduler, sizes = self._engine.scheduler, self._sizes
        self._steps += 1
        if self._steps > self._owed + 100:
            raise BrokenRuleError(f"{self._steps} steps for work of {self._owed}: requests do not end")
        if self._steps % 4 == 0 or not scheduler.has_work:
            scheduler.check()
        if scheduler.num_running > sizes["max_running"]:
            raise BrokenRuleError(f"{scheduler.num_running} run, allowed are {sizes['max_running']}")
        for request in scheduler._requests.values():
            if request.preemptions > MAX_PREEMPTIONS:
                raise BrokenRuleError(f"{request.request_id} was preempted {request.preemptions} times")
        self._check_order()
        if self._is_plain:
            self._check_streams()
            self._check_shares()
        if not scheduler.has_work and not self._engine._launched and scheduler.pool.num_used:
            raise BrokenRuleError(f"{scheduler.pool.num_used} blocks are leaked")

    def check_plan(self, plan: StepPlan) -> None:
        """A step computes no more tokens than its budget; admission leaves blocks free for those that run."""
        sizes, scheduler = self._sizes, self._engine.scheduler
        self._count_service(plan)
        if sizes.get("batching", "continuous") == "static":
            return
        tokens = sum(row.num_tokens - len(row.drafts) for row in plan.rows)
        budget = -(-sizes["token_budget"] // sizes.get("stages", 1))
        if tokens > budget and sizes.get("chunked_prefill", True):
            raise BrokenRuleError(f"{tokens} tokens in a step, allowed are {budget}")
        admitted = [r for r in self._waited.values() if r.request_id in scheduler._running]
        pool = scheduler.pool
        free = int(sizes.get("watermark", 0.0) * pool.num_blocks)
        for row in plan.rows:  # drafts come after the admissions, and may take what these left
            free -= pool.blocks_for(row.end) - pool.blocks_for(row.end - len(row.drafts))
        if len(scheduler._running) > len(admitted) > 0 and pool.num_available < free:
            raise BrokenRuleError(f"admission left {pool.num_available} blocks, the watermark is {free}")

    def _count_service(self, plan: StepPlan) -> None:
        """Count the tokens of each flow, once: not those that are computed again after a preemption."""
        for row in plan.rows:
            request, end = row.request, row.end - len(row.drafts)
            done = self._computed.get(request.request_id, row.start)
            self._service[band_of(request), request.tenant] += max(0, end - done)
            self._computed[request.request_id] = max(done, end)

    def _check_order(self) -> None:
        """First admissions of a flow are in the order of arrival."""
        scheduler = self._engine.scheduler
        admitted = [r for r in self._waited.values() if r.scheduled_at is not None]
        for request in admitted:
            for other in self._waited.values():
                same = (other.tenant, band_of(other)) == (request.tenant, band_of(request))
                if (
                    same
                    and other.arrived_at < request.arrived_at
                    and other.scheduled_at is None
                    and other.request_id in scheduler._requests
                    and other.request_id not in scheduler._waiting._standing_aside
                    and other.fork_of is None
                ):
                    raise BrokenRuleError(f"{request.request_id} was admitted before {other.request_id}")

    def _check_streams(self) -> None:
        """A stream that runs gets a token in every step, or in the one after it, unless it was preempted: it
        may be admitted again in the same step, with a part of its history to compute.
        """
        running = {r.request_id: r for r in self._engine.scheduler.running}
        for name, (output, admissions) in self._streams.items():
            request = running.get(name)
            if request is None or request.num_output > output or request.admissions > admissions:
                self._missed.pop(name, None)
                continue
            self._missed[name] += 1
            if self._missed[name] > 1:
                raise BrokenRuleError(f"the stream {name} got no token in {self._missed[name]} steps")

    def _check_shares(self) -> None:
        """Tokens of two flows of a band, since both wait."""
        scheduler = self._engine.scheduler
        waiting = {
            (flow.band, flow.tenant) for _, flows in scheduler._flows.bands for flow in flows if flow.queued
        }
        for flow in [flow for flow in self._backlog if flow not in waiting]:
            del self._backlog[flow]
        # Both may run their longest requests at once, and one step is shared as it comes.
        bound = 2 * (self._sizes["max_running"] * self._longest + self._sizes["token_budget"])
        for flow in sorted(waiting):
            since = self._backlog.setdefault(flow, {})
            for other in sorted(waiting):
                if other[0] != flow[0] or other == flow:
                    continue
                lead = self._service[flow] - self._service[other]
                if lead - since.setdefault(other, lead) > bound:
                    raise BrokenRuleError(f"{flow} is ahead of {other} by more than {bound} tokens")
            for gone in [other for other in since if other not in waiting]:
                del since[gone]
