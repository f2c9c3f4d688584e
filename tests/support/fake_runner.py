"""A model without tensors that notices every mistake of the block bookkeeping.

Each KV slot holds a number that stands for the whole prefix up to its token: mix(slot before, token). When
a row is computed, every slot it attends to must hold exactly the number its tokens call for; so a block that
is shared wrongly, overwritten, freed too early or published uncomputed is found in that step. The next token
is a function of what the *slots* say, so tokens are exact only if the KV is. Slots of recurrent state hold
the number of all tokens before. The numbers of a sequence beyond the short context (LongRoPE) are others.
"""

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

from llmbox.engine.core.request import Request
from llmbox.engine.core.step import ProfiledRunner, SampledToken, ScheduledRequest, StepPlan, StepResult
from llmbox.engine.ipc.messages import TokenLogprobs
from llmbox.engine.sampling_params import SamplingParams

VOCAB = 50
_MASK = (1 << 61) - 1


class RunnerError(Exception):
    pass


def mix(prefix: int, token_id: int) -> int:
    return (prefix * 6364136223846793005 + token_id * 1442695040888963407 + 1) & _MASK


def start_of(namespace: str, *, is_long: bool = False) -> int:
    """Prefix of nothing. Differs by namespace and length, so that sharing across these is a wrong prefix."""
    return sum(map(ord, namespace)) + 17 + 1_000_003 * is_long


def prefixes(namespace: str, token_ids: Sequence[int], *, is_long: bool = False) -> list[int]:
    values, value = [], start_of(namespace, is_long=is_long)
    for token_id in token_ids:  # `mix`, written out: this is called for every row of every step
        value = (value * 6364136223846793005 + token_id * 1442695040888963407 + 1) & _MASK
        values.append(value)
    return values


def next_token(prefix: int, last: int, params: SamplingParams) -> int:
    """Greedy answers go round in circles, and leave them now and then."""
    if params.temperature == 0 and prefix % 7:
        return (last + 1 + params.seed) % 6
    return (prefix ^ params.seed * 2654435761) % 1000003 % VOCAB


def expected_output(
    namespace: str, prompt_ids: Sequence[int], params: SamplingParams, short_context: int = 0
) -> list[int]:
    """What the request gives when served alone, without any engine."""
    output, last = list[int](), prompt_ids[-1]
    ids, was_long = list(prompt_ids), False
    prefix = prefixes(namespace, ids)[-1]
    while len(output) < params.max_tokens:
        if (is_long := 0 < short_context < len(ids)) != was_long:
            prefix, was_long = prefixes(namespace, ids, is_long=is_long)[-1], is_long
        last = next_token(prefix, last, params)
        output.append(last)
        ids.append(last)
        prefix = mix(prefix, last)
        if len(output) > params.min_tokens and output[-1] in params.stop_token_ids:
            break
    return output


class FakeRunner:
    """One step at a time."""

    def __init__(
        self, num_blocks: int, block_size: int, state_slots: int = 0, window: int = 0, window_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.window_slots: list[int | None] = [None] * (window_blocks * block_size)
        self.states: list[int | None] = [None] * state_slots
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.crash_next = False
        self.poisoned: set[str] = set()
        self.plans: list[StepPlan] = []
        self._sampled: dict[Request, int] = {}
        """The last token of each, as a device keeps it."""

    def profiled(self) -> ProfiledRunner:
        return ProfiledRunner(ops=SimpleNamespace(profiler=None), forward=self._compute)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._copy(plan.copies)
        for source, target in plan.state_copies:
            assert self.states[source] is not None
            self.states[target] = self.states[source]
        result = StepResult()
        for row in plan.rows:
            assert row.num_tokens > 0, "a row without a token has no logits"
            self._compute(row)
        if self.crash_next:
            self.crash_next = False
            raise RunnerError
        for row in plan.rows:
            request = row.request
            if request.params.prompt_logprobs is not None:
                result.prompt_logprobs[request.request_id] = [
                    TokenLogprobs(token_id=token, logprob=-1.0, rank=1)
                    for token in request.prompt_ids[row.start + 1 : row.end + 1]
                ]
            if not row.samples:
                continue
            drawn = self._draw(row)
            self._sampled[request] = drawn[-1]
            if request.request_id in self.poisoned:
                result.failed[request.request_id] = "NaN in logits"
                continue
            result.tokens[request.request_id] = SampledToken(drawn[-1])
            if row.drafts:
                result.accepted[request.request_id] = [SampledToken(token) for token in drawn[:-1]]
        return result

    def _draw(self, row: ScheduledRequest) -> list[int]:
        """One token, and one more for each draft that came true, up to the request's end."""
        request, first, drawn = row.request, row.end - len(row.drafts), list[int]()
        tokens = self._tokens(row)
        for position, draft in enumerate([*row.drafts, None], first - 1):
            prefix = self.slots[self._slot(request, position)]
            assert prefix is not None
            drawn.append(next_token(prefix, tokens[position], request.params))
            outputs = request.num_output + len(drawn)
            stops = drawn[-1] in request.params.stop_token_ids and outputs > request.params.min_tokens
            if stops or drawn[-1] != draft:
                break
        assert request.num_output + len(drawn) <= request.params.max_tokens
        return drawn

    def _tokens(self, row: ScheduledRequest) -> list[int]:
        """All up to the row's end."""
        tokens = [*row.request.token_ids[: row.end], *row.drafts]
        if len(tokens) < row.end:
            tokens.append(self._sampled[row.request])
        assert len(tokens) == row.end, "a step may depend on one unknown token at most"
        return tokens

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]

    def _compute(self, row: ScheduledRequest) -> None:
        request, start, end = row.request, row.start, row.end
        assert not row.drafts or row.end - len(row.drafts) == request.num_tokens
        wanted = prefixes(request.cache_namespace, self._tokens(row), is_long=request.is_long)
        size, held = self.block_size, list[int | None]()
        for block in request.block_table[: -(-start // size)]:
            held += self.slots[block * size : (block + 1) * size]
        assert held[:start] == wanted[:start], f"{request.request_id}: wrong KV before {start}"
        for position in range(start, end):
            self.slots[self._slot(request, position)] = wanted[position]
        if self.states:
            self._go_on(row, wanted)
        if self.window:
            self._slide(row, wanted)

    def _slide(self, row: ScheduledRequest, wanted: list[int]) -> None:
        """Write the row's tokens to the window's blocks, and read its window there."""
        size, table = self.block_size, row.request.window_table

        def slot(position: int) -> int:
            return table[position // size] * size + position % size

        for position in range(row.start, row.end):
            self.window_slots[slot(position)] = wanted[position]
        for position in range(max(0, row.start - self.window + 1), row.end):
            found = self.window_slots[slot(position)]
            assert found == wanted[position], f"{row.request.request_id}: wrong window at {position}"

    def _go_on(self, row: ScheduledRequest, wanted: list[int]) -> None:
        """Take the request's recurrent state from `row.start` to `row.end`."""
        slot = row.request.state_slot
        assert slot >= 0
        if row.start:
            found = self.states[slot]
            assert found == wanted[row.start - 1], f"{row.request.request_id}: wrong state at {row.start}"
        self.states[slot] = wanted[row.end - 1]
        for position, target in row.saves:
            assert target != slot
            assert row.start < position <= row.end
            self.states[target] = wanted[position - 1]

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self.block_size] * self.block_size + position % self.block_size


class FakeOverlappingRunner(FakeRunner):
    """Computes a step when it is launched, as what comes next on a device would see it, and tells later."""

    def __init__(
        self, num_blocks: int, block_size: int, depth: int = 1, stages: int = 1, *kinds: int
    ) -> None:
        super().__init__(num_blocks, block_size, *kinds)
        self.depth, self.stages = depth, stages
        self.most_launched = 0
        self.crash_next_collect = False
        self._waiting: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        if self.depth < self.stages:
            self._check_apart(plan)
        self._waiting.append(plan)
        self.most_launched = max(self.most_launched, len(self._waiting))
        assert len(self._waiting) <= self.depth + 1
        try:
            return plan, self.execute(plan)
        except RunnerError:
            self._waiting.clear()
            raise

    def collect(self, handle: tuple[StepPlan, StepResult]) -> StepResult:
        plan, result = handle
        if self.crash_next_collect:
            self.crash_next_collect = False
            self._waiting.clear()
            raise RunnerError
        assert self._waiting.popleft() is plan
        return result

    def prepare(self) -> bool:
        return False

    def _check_apart(self, plan: StepPlan) -> None:
        """No row may need a token that a step draws which has not come back."""
        drawing = {(row.request, row.admission) for step in self._waiting for row in step.rows if row.samples}
        for row in plan.rows:
            assert (row.request, row.admission) not in drawing, row.request.request_id
            assert row.end - len(row.drafts) <= row.request.num_tokens
