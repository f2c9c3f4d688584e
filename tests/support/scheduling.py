"""Factories for schedulers, requests and engines as the engine's tests need them: small, no tensors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from llmbox.engine.config import SchedulerConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.request import Request
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.core.speculation.proposer import Proposer
from llmbox.engine.core.step import SampledToken, StepPlan, StepResult, SyncExecutor
from llmbox.engine.ipc.messages import AddRequest, ModelInfo, RequestOutput
from llmbox.engine.sampling_params import SamplingParams
from support.fake_runner import FakeOverlappingRunner, FakeRunner

INFO = ModelInfo(
    name="fake",
    architecture="fake",
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    backend="reference",
    context_window=0,
    vocab_size=1 << 31,
    block_size=0,
    num_blocks=0,
    weights_bytes=0,
    kv_bytes=0,
    kv_bytes_per_token=0,
    workspace_bytes=0,
    max_running=0,
    max_concurrency=0.0,
    load_seconds=0.0,
)


def make_scheduler(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    cache: bool = True,
    clock: Callable[[], float] = lambda: 0.0,
    proposers: Sequence[Proposer] = (),
    **config: object,
) -> Scheduler:
    numbers = {
        "context": 10_000,
        "max_running": 8,
        "token_budget": 64,
        "premium_share": 0.0,
        "watermark": 0.0,
        "draft_row_price": 0.1,
    }
    pool = BlockPool(num_blocks, block_size, enable_prefix_cache=cache)
    return Scheduler(SchedulerConfig(**{**numbers, **config}), pool, clock, proposers)


def make_request(
    request_id: str = "a",
    prompt: Iterable[int] | int = 10,
    *,
    output: Iterable[int] = (),
    priority: int = 0,
    tenant: str = "",
    namespace: str = "",
    fork_of: str | None = None,
    **params: object,
) -> Request:
    """`prompt` as a number: that many tokens, different from those of other request ids."""
    ids = list(prompt) if not isinstance(prompt, int) else unique_prompt(request_id, prompt)
    return Request(
        request_id=request_id,
        prompt_ids=ids,
        token_ids=[*ids, *output],
        params=SamplingParams(**{"max_tokens": 8, **params}),
        priority=priority,
        tenant=tenant,
        cache_namespace=namespace,
        fork_of=fork_of,
    )


def unique_prompt(request_id: str, length: int) -> list[int]:
    start = sum(ord(letter) * 131**place for place, letter in enumerate(request_id)) % 1_000_000
    return list(range(start, start + length))


def play_model(scheduler: Scheduler, plan: StepPlan, token_id: int = 7) -> list[RequestOutput]:
    """Answer a plan as a model would that always says `token_id`."""
    tokens = {row.request.request_id: SampledToken(token_id) for row in plan.rows if row.samples}
    return scheduler.update(plan, StepResult(tokens=tokens))


def scheduled(plan: StepPlan) -> dict[str, int]:
    """Request -> tokens this step, in the plan's order."""
    return {row.request.request_id: row.num_tokens for row in plan.rows}


def step(scheduler: Scheduler, token_id: int = 7) -> dict[str, int]:
    plan = scheduler.schedule()
    play_model(scheduler, plan, token_id)
    scheduler.check()
    return scheduled(plan)


@dataclass
class Answer:
    """All outputs of one request put together."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[RequestOutput] = field(default_factory=list)


class FakeEngine:
    """An engine over `FakeRunner` that keeps what it answered."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        depth: int = 0,
        stages: int = 1,
        state_slots: int = 0,
        window: int = 0,
        window_blocks: int = 0,
        **scheduler: object,
    ) -> None:
        kinds = state_slots, window, window_blocks
        scheduler |= {"state_slots": state_slots, "window": window, "window_blocks": window_blocks}
        self.scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, **scheduler)
        self.runner: FakeRunner
        if depth:
            self.runner = driven = FakeOverlappingRunner(num_blocks, block_size, depth, stages, *kinds)
        else:
            self.runner = FakeRunner(num_blocks, block_size, *kinds)
            driven = SyncExecutor(self.runner)
        self.engine = Engine(self.scheduler, driven, INFO)
        self.answers: dict[str, Answer] = {}

    def add(self, request: Request) -> None:
        self.answers.setdefault(request.request_id, Answer())
        self._take(
            self.engine.add(
                AddRequest(
                    request_id=request.request_id,
                    prompt_ids=list(request.prompt_ids),
                    params=request.params,
                    output_ids=request.token_ids[request.num_prompt :],
                    priority=request.priority,
                    tenant=request.tenant,
                    cache_namespace=request.cache_namespace,
                    fork_of=request.fork_of,
                )
            )
        )

    def abort(self, request_id: str) -> None:
        self._take(self.engine.abort(request_id))

    def step(self) -> None:
        for output in self.engine.step().outputs:
            self._take(output)

    def run(self, max_steps: int = 100_000) -> dict[str, Answer]:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            before = len(self.runner.plans), len(self.engine._launched)
            self.step()
            after = len(self.runner.plans), len(self.engine._launched)
            assert after != before, "work is left, but nothing was done"
        assert not self.engine.has_work
        self.scheduler.check()
        assert self.scheduler.pool.num_used == 0
        if self.scheduler.kv_cache.states is not None:
            assert self.scheduler.kv_cache.states.pool.num_used == 0
        if self.scheduler.kv_cache.windows is not None:
            assert self.scheduler.kv_cache.windows.pool.num_used == 0
        return self.answers

    def _take(self, output: RequestOutput | None) -> None:
        if output is not None:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, "an answer after the last one"
            answer.outputs.append(output)
            answer.token_ids += output.token_ids
            answer.finish_reason = output.finish_reason
