"""The engine: one loop of four verbs over token ids. No text, no HTTP, no sockets (see `process.py`)."""

import time
from collections.abc import Callable
from typing import Protocol

from .answers import error_answer, finish_reason
from .errors import DoesNotFit
from .messages import AddRequest, EngineStats, ModelInfo, RequestOutput, StepOutputs
from .request import Request
from .scheduler import Scheduler
from .step import StepPlan, StepResult


class Runner(Protocol):
    """Owns the model and the KV memory; knows nothing of queues."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the plan's copies, then write KV for every row and sample where `row.samples`.

        Reads requests, never changes them. May raise: the step then counts as not done.
        """
        ...


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: ModelInfo,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> StepOutputs:
        """Schedule, run, take the results, answer."""
        started = self._clock()
        plan = self._scheduler.schedule()
        result = self._run(plan)
        outputs = self._scheduler.update(plan, result)
        self._count(plan, self._clock() - started)
        return StepOutputs(outputs=outputs, stats=self.stats())

    def add(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request; an output only if it ends here: refused, or complete before it was resumed."""
        request = Request(
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            params=message.params,
            priority=message.priority,
            cache_namespace=message.cache_namespace,
            fork_of=message.fork_of,
            token_ids=message.prompt_ids + message.output_ids,
        )
        if (reason := finish_reason(request)) is not None:
            return RequestOutput(request_id=request.request_id, finish_reason=reason)
        try:
            self._scheduler.add(request)
        except DoesNotFit as error:
            return error_answer(request, error.code, str(error))
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        """Forget a request and free its blocks now; None if it is not (or no longer) here."""
        if not self._scheduler.abort(request_id):
            return None
        return RequestOutput(request_id=request_id, finish_reason="abort")

    def stats(self) -> EngineStats:
        scheduler, pool, tables = self._scheduler, self._scheduler.pool, self._scheduler.tables
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            steps=self._steps,
            prompt_tokens=scheduler.prompt_tokens,
            output_tokens=scheduler.output_tokens,
            prefix_queries=tables.prefix_queries,
            prefix_hits=tables.prefix_hits,
            preemptions=scheduler.preemptions,
            slots_used=scheduler.slots_used,
            step_seconds=self._step_seconds,
        )

    def _run(self, plan: StepPlan) -> StepResult:
        if not plan:
            return StepResult()
        try:
            return self._runner.execute(plan)
        except BaseException:
            self._scheduler.discard(plan)  # what the step wrote is in doubt: nothing may refer to it any more
            raise

    def _count(self, plan: StepPlan, seconds: float) -> None:
        if plan:
            self._steps += 1
            self._step_seconds += seconds
