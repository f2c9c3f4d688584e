"""A scheduler whose requests answer with known texts, and whose steps take the time of a cost model."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property

from llmbox.engine.core.request import Request
from llmbox.engine.core.speculation.proposer import DraftMethod, Proposals, Proposer
from llmbox.engine.core.step import PipelineDepth, SampledToken, ScheduledRequest, StepPlan, StepResult
from support.scheduling import make_request, make_scheduler


class GuessingModel:
    """A proposer that is right about each token with a probability of `share`, in passes of `cost`."""

    method: DraftMethod = "draft_model"

    def __init__(self, share: float, cost: float) -> None:
        self.share, self.cost = share, cost
        self.played: PlayedRequests | None = None
        self.asked = 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        assert self.played is not None
        drafts = []
        for request, most in wanted:
            text, place = self.played.texts[request.request_id], request.num_output
            guesses = [
                token if random.Random(f"{request.request_id} {at}").random() < self.share else -1 - token
                for at, token in enumerate(text[place : place + most], place)
            ]
            drafts.append(guesses)
        passes = max(most for _, most in wanted)
        self.played.now += self.cost * passes
        self.asked += passes
        return Proposals(drafts, passes, passes * len(wanted))


class PlayedRequests:
    """Requests and the time that they have taken, in steps of one request without drafts."""

    def __init__(
        self,
        time_of: Callable[[int, int], float],
        rows: int = 40,
        proposers: Sequence[Proposer] = (),
        first_price: float = 0.03,
    ) -> None:
        """`time_of`: time of a step by its requests and rows."""
        self.now = 0.0
        self.time_of = time_of
        self.texts: dict[str, list[int]] = {}
        self.scheduler = make_scheduler(
            num_blocks=4000,
            context=100_000,
            max_running=64,
            token_budget=4096,
            draft_rows=rows,
            draft_row_price=first_price,
            clock=lambda: self.now,
            proposers=proposers,
        )
        for each in proposers:
            if isinstance(each, GuessingModel):
                each.played = self

    def run(
        self, texts: Sequence[Sequence[int]], prompt: Sequence[int] = (1, 2, 3), **params: object
    ) -> float:
        """Answer with these texts, all at once; return the time from the first tokens on."""
        for text in texts:
            request = make_request(f"r{len(self.texts)}", prompt, max_tokens=len(text), **params)
            self.texts[request.request_id] = list(text)
            self.scheduler.add(request)
        self.step()
        began = self.now
        while self.scheduler.has_work:
            self.step()
        return self.now - began

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.now += self.time_of(len(plan.rows), plan.num_tokens)
        self.take(plan)

    def take(self, plan: StepPlan) -> None:
        """Apply the result of a step."""
        result = StepResult()
        for row in plan.rows:
            drawn = [SampledToken(token) for token in self._draw(row)]
            result.tokens[row.request.request_id] = drawn[-1]
            result.accepted[row.request.request_id] = drawn[:-1]
        self.scheduler.update(plan, result)

    def _draw(self, row: ScheduledRequest) -> list[int]:
        text = self.texts[row.request.request_id]
        place = row.end - len(row.drafts) - row.request.num_prompt
        drawn = [text[place]]
        for draft in row.drafts:
            if draft != drawn[-1]:
                break
            drawn.append(text[place + len(drawn)])
        return drawn


class PlayedAhead(PlayedRequests):
    """The same on a device that computes a step while the host schedules the next, in `host` of a step."""

    host = 0.2

    def step(self) -> None:
        plan = self.scheduler.schedule(PipelineDepth(1, 1))
        self.now += self.host
        launched = self._launched
        if plan.rows:
            begin = max([self.now, *(end for _, end in launched)])
            launched.append((plan, begin + self.time_of(len(plan.rows), plan.num_tokens)))
        if len(launched) > 1 or not plan.rows:
            oldest, end = launched.popleft()
            self.now = max(self.now, end)
            self.take(oldest)

    @cached_property
    def _launched(self) -> deque[tuple[StepPlan, float]]:
        """Launched steps, and when each ends."""
        return deque()


def time_without_drafts(time_of: Callable[[int, int], float], texts: Sequence[Sequence[int]]) -> float:
    """Return the time that these answers take from their first tokens on, one token a step."""
    lengths = sorted(len(text) for text in texts)
    return sum(
        time_of(running, running)
        for step in range(1, lengths[-1])
        if (running := sum(length > step for length in lengths))
    )
