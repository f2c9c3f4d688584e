"""Engine: add and abort requests, step, report. Token ids only; `process/engine_main.py` has the sockets."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from ..checkpoint.adapter import has_int8_numbers, read_adapter
from ..errors import EngineError, InvalidRequest
from ..ipc.handover_messages import Prefill
from ..ipc.messages import AddRequest, EngineStats, ModelInfo, RequestOutput, StepOutputs, Vocabulary
from ..ipc.profile_messages import BlockMap
from ..ipc.sequence_times import SequenceTimes
from ..sampling_params import SamplingParams
from .constraints.output_constraint import GrammarCompiler
from .images import check_images
from .kv_cache.block_pool import block_map
from .kv_cache.manager import KVCacheManager
from .request import Request, check_request
from .scheduler import Scheduler
from .step import Executor, StepPlan, finish_reason, make_error_output, pipeline_of

log = logging.getLogger("llmbox.engine")

IDLE_SECONDS: Final = 0.005
"""Time for which the engine waits for the KV cache's threads where it has nothing else to do: so long may a
message wait.
"""
CLOSE_SECONDS: Final = 1.5
PROMPT_STEP: Final = 64
"""Tokens of a step from which on its time tells how fast prompts are computed."""


class ExpertCounters(Protocol):
    """Counters of the rows that chose each expert of a mixture (`engine/executor/expert_load.py`)."""

    def stats(self) -> Mapping[str, Any]:
        """Return fields of `EngineStats`."""
        ...

    def balance(self) -> bool:
        """Move one expert to another rank, where that evens the load. Call it between two steps. Returns
        False if there was nothing to do.
        """
        ...

    def save(self) -> None: ...


class Engine:
    """Drive a scheduler and an executor, one step at a time. All methods are called from one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: ModelInfo,
        clock: Callable[[], float] = time.perf_counter,
        experts: ExpertCounters | None = None,
    ) -> None:
        """`experts`: counters of a mixture's experts."""
        self.info = info
        self._experts = experts
        self.scheduler = scheduler
        self._images = scheduler.images
        self.executor = executor
        self._pipeline = pipeline_of(executor)
        self._masks_ahead = bool(self._pipeline.ahead or info.worker_pids)
        """The masks after drafts are known before their step: it samples all its rows at once, or workers do,
        which have no grammars."""
        self._launched: deque[tuple[StepPlan, Any, float]] = deque()
        """Launched steps whose results have not been collected, oldest first, with the executor's handles and
        the clock."""
        self._collected_at = -math.inf
        self._grammars = GrammarCompiler(info.vocab_size)
        self._clock = clock
        self._steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launched)

    @property
    def _kv_cache(self) -> KVCacheManager:
        return self.scheduler.kv_cache

    def step(self) -> StepOutputs:
        """Schedule a step, launch it, collect the oldest finished step and return its outputs.

        Up to `depth` more steps may be launched before the results of one are collected: while the device
        runs the first, the second is scheduled, with the tokens of the first still unknown on the host.

        If the executor raises, no launched step counts as done: their requests are queued to be computed
        again.
        """
        started = self._clock()
        worked = bool(self._launched)
        plan = self.scheduler.schedule(self._pipeline)
        try:
            self._update_masks(plan)
            if plan.rows:
                self._launch(plan)
            outputs = self._take_results() if self._is_full or not plan.rows else []
        except BaseException:
            self._discard(plan)
            raise
        self._move_blocks(is_idle=not (plan.rows or worked))
        if self._images is not None and self._images.has_work:
            worked = True
            outputs += self._advance_images()
        self._steps += bool(plan.rows)
        if plan.rows or worked:
            self._step_seconds += self._clock() - started
        return StepOutputs(outputs=outputs, stats=self.stats(), times=self.take_times())

    def _launch(self, plan: StepPlan) -> None:
        if self._experts is not None and not self._launched:
            self._experts.balance()
        if self._kv_cache.adapters is not None:
            plan.adapter_loads.extend(self._kv_cache.adapters.take_loads())
        if self._kv_cache.tiers is not None:
            self._kv_cache.tiers.before_step()
        launched_at = self._clock()
        self._launched.append((plan, self.executor.launch(plan), launched_at))

    def _move_blocks(self, *, is_idle: bool) -> None:
        """Copy KV blocks to and from the tiers and a prefill engine. `is_idle`: there is nothing else to do,
        so wait a moment for those that are on their way.
        """
        tiers, outlet, intake = self._kv_cache.tiers, self._kv_cache.outlet, self._kv_cache.intake
        if tiers is not None and tiers.has_work:
            tiers.pump(sparingly=self.info.device == "cpu")
            if is_idle and tiers.reads.is_reading:
                tiers.reads.wait(IDLE_SECONDS)
        if outlet is not None:
            outlet.pump()
        if is_idle and intake is not None and intake.is_waiting:
            intake.link.wait(IDLE_SECONDS)

    def prepare(self) -> bool:
        """Do one piece of idle-time work that makes later steps faster. False once nothing is left to do."""
        if self.executor.prepare() or (self._experts is not None and self._experts.balance()):
            return True
        tiers = self._kv_cache.tiers
        if tiers is None or not tiers.pump():
            return False
        tiers.wait_for_writer(IDLE_SECONDS)
        return True

    def close(self) -> None:
        """Write the answers and KV blocks that wait to be written, for `CLOSE_SECONDS` at most. No step
        follows.
        """
        end = self._clock() + CLOSE_SECONDS
        self.scheduler.drafting.close(CLOSE_SECONDS / 4)
        if (tiers := self._kv_cache.tiers) is not None:
            tiers.close(max(0.0, end - self._clock()))
        if (intake := self._kv_cache.intake) is not None:
            intake.link.close()
        if self._experts is not None:
            self._experts.save()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the token texts that grammars are compiled over; needed before the first request with a
        grammar.
        """
        self._grammars.set_vocabulary(vocabulary)

    def add(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request. Returns an output only if the request ends at once: it is refused, or it is
        resumed with output that is complete already.

        Never raises because of the content of `message`: an error ends this request alone.
        """
        if self.scheduler.has(message.request_id):
            # An error output would end the request that is present, which has the same id.
            log.error("a second request with the id %s is dropped", message.request_id)
            return None
        try:
            return self._add(message)
        except EngineError as error:
            return make_error_output(message.request_id, error.code, str(error))
        except Exception:
            log.exception("the request %s cannot be taken", message.request_id)
            return make_error_output(
                message.request_id, EngineError.code, "The engine cannot take this request."
            )

    def _add(self, message: AddRequest) -> RequestOutput | None:
        """Validate and queue a request. Raises EngineError. The scheduler is changed last, so an error leaves
        no trace.
        """
        check_request(message, self.info)
        if message.images:
            check_images(message.images, message.prompt_ids, self.info)
        namespace = message.cache_namespace
        if message.adapter:
            # In front: callers choose the rest, and none of theirs begins so.
            namespace = f"{self._admit_adapter(message.adapter)}\0{namespace}"
        request = Request(
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            params=message.params,
            priority=message.priority,
            tenant=message.tenant,
            cache_namespace=namespace,
            adapter=message.adapter,
            fork_of=message.fork_of,
            images=message.images,
            token_ids=message.prompt_ids + message.output_ids,
        )
        if (reason := finish_reason(request)) is not None:
            return RequestOutput(request_id=request.request_id, finish_reason=reason)
        request.constraint = self._grammars.constraint(request.params, request.num_prompt)
        self.scheduler.add(request)
        return None

    def _admit_adapter(self, folder: str) -> str:
        """Note the adapter's size, and return the name under which the blocks of its requests are cached: its
        folder's, which contains a digest of its weights. Raises EngineError.
        """
        slots = self._kv_cache.adapters
        if slots is None:
            raise InvalidRequest(
                f"LoRA adapters are not supported here ({self.info.backend} on {self.info.device}): load the "
                "base with --device cpu, or merge the adapter into a model with `llmbox lora merge`"
            )
        if not slots.knows(folder):
            width = 4 if self.info.dtype == "float32" else 2
            is_int8 = has_int8_numbers(self.info.device, self.info.quant)
            slots.admit(folder, read_adapter(Path(folder)).memory_bytes(width, is_int8=is_int8))
        return Path(folder).name

    def prefill(self, message: Prefill) -> RequestOutput | None:
        """Queue a prompt whose blocks are to be handed over. Returns an output only if it is refused."""
        outlet = self._kv_cache.outlet
        assert outlet is not None
        outlet.expect(message)
        refusal = self.add(
            AddRequest(
                request_id=message.request_id,
                prompt_ids=message.prompt_ids,
                params=SamplingParams(max_tokens=1, temperature=0.0),
                priority=message.priority,
                tenant=message.tenant,
                cache_namespace=message.cache_namespace,
                adapter=message.adapter,
            )
        )
        if refusal is not None:
            outlet.drop(message.request_id)
        return refusal

    def free_slots(self, slots: list[int]) -> None:
        """Mark slots of the hand-over segment as free: the decode engine has read them."""
        outlet = self._kv_cache.outlet
        assert outlet is not None
        outlet.release(slots)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Remove a request and free its blocks at once; None if it is not (or no longer) here."""
        if (outlet := self._kv_cache.outlet) is not None:
            outlet.drop(request_id)
        if not self.scheduler.abort(request_id):
            return None
        return RequestOutput(request_id=request_id, finish_reason="abort")

    def take_times(self) -> dict[str, SequenceTimes]:
        """Return the times of sequences that ended since the last call."""
        return self.scheduler.ledger.take()

    def stats(self) -> EngineStats:
        scheduler, pool, kv_cache = self.scheduler, self.scheduler.pool, self._kv_cache
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            steps=self._steps,
            prompt_tokens=scheduler.prompt_tokens,
            output_tokens=scheduler.output_tokens,
            prefix_queries=kv_cache.prefix_queries,
            prefix_hits=kv_cache.prefix_hits,
            disk_hits=kv_cache.disk_hits,
            host_hits=kv_cache.host_hits,
            preemptions=scheduler.active.preemptions,
            slots_used=scheduler.slots_used,
            step_seconds=self._step_seconds,
            work=scheduler.ledger.work,
            prefill_done=scheduler.active.prefill_done,
            adapters=[] if kv_cache.adapters is None else kv_cache.adapters.digests,
            **({} if self._experts is None else self._experts.stats()),
            **scheduler.drafting.stats(),
            **({} if kv_cache.intake is None else kv_cache.intake.stats()),
            **({} if kv_cache.tiers is None else kv_cache.tiers.stats()),
        )

    def blocks(self) -> BlockMap:
        """Return the state of every KV block. Walks the whole pool, so it is made on request only."""
        kv_cache = self._kv_cache
        return block_map(kv_cache.pool, kv_cache.computed_by, kv_cache.uses, self.scheduler.running)

    def _advance_images(self) -> list[RequestOutput]:
        """Encode one slice of an image. Returns the ends of the requests whose image cannot be encoded."""
        assert self._images is not None
        try:
            self._images.advance()
        except Exception as error:
            log.exception("an image cannot be encoded")
            failed = self._images.give_up()
            for request in failed:
                self.scheduler.abort(request.request_id)
            why = f"An image of this request cannot be encoded: {error}"
            return [make_error_output(request.request_id, EngineError.code, why) for request in failed]
        return []

    @property
    def _is_full(self) -> bool:
        return len(self._launched) > self.executor.depth

    def _take_results(self) -> list[RequestOutput]:
        """Wait for the oldest launched step, if there is one, and return its outputs."""
        if not self._launched:
            return []
        plan, handle, launched_at = self._launched[0]
        result = self.executor.collect(handle)
        self._launched.popleft()
        tokens, now = plan.num_tokens, self._clock()
        seconds = now - max(launched_at, self._collected_at)  # launched before another ended, it began then
        self._collected_at = now
        self.scheduler.ledger.advance(plan, tokens, seconds, self.scheduler.active.by_id)
        if tokens >= PROMPT_STEP and (tiers := self._kv_cache.tiers) is not None:
            tiers.reads.note_computed(tokens, seconds)
        return self.scheduler.update(plan, result)

    def _update_masks(self, plan: StepPlan) -> None:
        """Update the masks of the sampling rows, before the step is launched. `Scheduler` takes a request
        whose next tokens are limited only when all its tokens are known.
        """
        for row in plan.rows:
            request = row.request
            if row.samples and request.constraint is not None:
                request.update_mask()
                if row.drafts and self._masks_ahead:
                    tokens, mask = request.token_ids, request.mask
                    row.draft_masks = request.constraint.allowed_after(tokens, mask, row.drafts)

    def _discard(self, plan: StepPlan) -> None:
        """Discard all launched steps and `plan`: the KV they wrote may be wrong and must not be used."""
        for launched, *_ in self._launched:
            self.scheduler.discard(launched)
        self.scheduler.discard(plan)
        self._launched.clear()
