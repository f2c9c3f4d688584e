"""Clients of a simulated run: what each asks, how it behaves, and what it got."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from llmbox.app.gateway.generation import Delta, Generation
from llmbox.app.gateway.open_request import OpenRequest
from llmbox.engine.sampling_params import SamplingParams

from .http_clients import HttpClient
from .rules import check_room
from .scenario import RequestSetup
from .step_rules import BrokenRuleError
from .stored_clients import StoredClient

Opener = Callable[[Generation], OpenRequest]

if TYPE_CHECKING:
    from .world import World


@dataclass(slots=True)
class Outcome:
    """What a client got."""

    request: RequestSetup
    arrived: float = 0.0
    status: str = ""
    """`done`, `left` or `error`; of a stored response also `cancelled`, `deleted`, `forgotten` by its client,
    or `lost` by the disk. Empty: nothing.
    """
    error: ApiError | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    ended: float = 0.0
    is_open: bool = False
    """The gateway took it."""
    open_choices: int = 0
    """Choices of all requests that were open or had a place when this one was refused."""
    prompt_logprobs: list[int] | None = None
    token_times: list[float] = field(default_factory=list)
    row: str = ""
    """Id of its row in the request log, if it is another one than its own."""
    is_cut: bool = False
    """The error came inside a stream, which had begun with 200."""


class Clients:
    """Requests of a run, each in a task of its own."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._loop = world.loop
        self.outcomes = {request.id: Outcome(request) for request in world.scenario.requests}
        self._opened: dict[str, OpenRequest] = {}
        self._reserved: dict[str, tuple[RequestSetup, Supervisor]] = {}
        """Requests that have a place in a queue and are not submitted yet."""
        self._asking: dict[str, RequestSetup] = {}
        """Requests over HTTP whose answer has not ended."""
        self.stored: dict[str, StoredClient] = {}
        """Those of stored responses, by the id of the request."""

    async def ask(self, request: RequestSetup) -> None:
        await asyncio.sleep(request.at)
        outcome = self.outcomes[request.id]
        outcome.arrived = self._loop.time()
        task = asyncio.create_task(self._serve(request, outcome))
        timer = None
        if request.leaves_at is not None and request.stored is None:
            timer = self._loop.call_later(request.leaves_at, task.cancel)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                outcome.status = "left"
            elif (error := task.exception()) is not None:
                if not isinstance(error, ApiError):
                    raise BrokenRuleError(f"{request.id} ends with {error!r}") from error
                outcome.status, outcome.error = "error", error
        finally:
            outcome.ended = self._loop.time()
            if timer is not None:
                timer.cancel()
        opened = self._opened.get(request.id) if outcome.status != "forgotten" else None
        if opened is not None and not all(each.stream.finished for each in opened.sequences):
            raise BrokenRuleError(f"{request.id} runs on although its client has {outcome.status}")
        told = "" if outcome.error is None else outcome.error.code
        self._world.note(f"{request.id} {outcome.status} {told} {outcome.tokens} {outcome.reasons}")
        client = self.stored.get(request.id)
        if client is not None and (turn := client.next_turn()) is not None:
            self.outcomes[turn.id] = Outcome(turn)
            await self.ask(turn)

    async def _serve(self, request: RequestSetup, outcome: Outcome) -> None:
        """One request as a route handles it: model, place in the queue, prompt, submission, stream."""
        if request.dialect:
            await self._ask_over_http(request, outcome)
            return
        now = self._loop.time()
        model = await self._world.residency.find(request.model)
        outcome.open_choices = self._count_with_asking(request.model)
        reservation = model.supervisor.reserve(request.n, request.tenant)
        self._reserved[request.id] = request, model.supervisor
        try:
            await asyncio.sleep(request.preparing)
        except asyncio.CancelledError:  # the place is given back when the task has ended
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(lambda _: self._reserved.pop(request.id))
            raise
        del self._reserved[request.id]
        generation = Generation(
            id=request.id,
            endpoint="/v1/completions",
            model=model,
            prompts=[request.prompt],
            params=request.params,
            max_tokens=request.max_tokens,
            n=request.n,
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.salt,
            stream=True,
            reservation=reservation,
            finish_by=None if request.finish_after is None else now + request.finish_after,
            first_token_by=None if request.first_token_after is None else now + request.first_token_after,
            still_authorized=None
            if request.is_revoked_at is None
            else lambda: self._loop.time() < now + request.is_revoked_at,
        )
        before = self.count_open(request.model)
        outcome.open_choices = self._count_with_asking(request.model)
        own = self.count_open(request.model, request.tenant)
        with self._world.gateway.open(generation) as opened:
            outcome.is_open = True
            check_room(self._world, request, before, own)
            self._opened[request.id] = opened
            async with aclosing(opened.deltas()) as deltas:
                count = 0
                async for delta in deltas:
                    self._take(outcome, delta)
                    count += 1
                    if request.leaves_after is not None and count > request.leaves_after:
                        outcome.status = "left"
                        return
                    if request.read_pause:
                        await asyncio.sleep(request.read_pause)
        outcome.status = "done"

    async def _ask_over_http(self, request: RequestSetup, outcome: Outcome) -> None:
        self._asking[request.id] = request
        try:
            if request.stored is None:
                await HttpClient(self._world, request, outcome).ask()
            else:
                self.stored[request.id] = client = StoredClient(self._world, request, outcome)
                await client.ask()
        finally:
            self.note_answered(request)
        outcome.status = outcome.status or "done"

    def note_answered(self, request: RequestSetup) -> None:
        """Note that a request over HTTP has no place any more, or an open one."""
        self._asking.pop(request.id, None)

    def note_refusal(self, outcome: Outcome) -> None:
        """Count the choices that are open, or may have a place, when a route refuses a request."""
        request = outcome.request
        if request.dialect:
            outcome.open_choices = self._count_with_asking(request.model) - request.n

    def _count_with_asking(self, name: str) -> int:
        """Choices that are open, have a place, or are asked for over HTTP and may have one."""
        asking = [
            each.n for key, each in self._asking.items() if key not in self._opened and each.model == name
        ]
        return self.count_open(name) + sum(asking)

    def open_watched(self, outcome: Outcome, generation: Generation, open_request: Opener) -> OpenRequest:
        """Open what a route opens, and check and note it as for a request of `_serve`."""
        request = outcome.request
        before = self.count_open(request.model)
        own = self.count_open(request.model, request.tenant)
        outcome.row = generation.id
        opened = open_request(generation)
        outcome.is_open = True
        if (client := self.stored.get(request.id)) is not None:
            client.note_open()
        check_room(self._world, request, before, own)
        self._opened[request.id] = opened
        return opened

    def _take(self, outcome: Outcome, delta: Delta) -> None:
        index = delta.index
        if index in outcome.reasons:
            raise BrokenRuleError(f"{outcome.request.id}: a delta after the last one of choice {index}")
        outcome.tokens.setdefault(index, []).extend(delta.token_ids)
        outcome.text[index] = outcome.text.get(index, "") + delta.text
        if delta.prompt_logprobs is not None:
            if outcome.prompt_logprobs is not None and outcome.request.n == 1:
                raise BrokenRuleError(f"{outcome.request.id}: prompt logprobs came twice")
            outcome.prompt_logprobs = [each.token_id for each in delta.prompt_logprobs[1:]]
        if delta.token_ids:
            outcome.token_times.append(self._loop.time())
        if delta.finish_reason is not None:
            outcome.reasons[index] = delta.finish_reason
        self._world.note(f"{outcome.request.id} {index} {delta.token_ids}")

    def count_open(self, name: str, tenant: str | None = None) -> int:
        """Choices that are open, or have a place: counted beside the product's own counters."""
        streams = [
            sequence.stream
            for opened in self._opened.values()
            for sequence in opened.sequences
            if opened.generation.model.name == name and tenant in {None, opened.generation.tenant}
        ]
        held = sum(
            request.n
            for request, supervisor in self._reserved.values()
            # Places of a model that was unloaded meanwhile are none of the one that was loaded after it.
            if request.model == name and tenant in {None, request.tenant} and supervisor.state != "stopped"
        )
        return sum(not stream.finished for stream in streams) + held

    async def ask_control(self) -> None:
        """Ask each model that is in memory once more: whatever happened to it, it answers."""
        for model in list(self._world.engines.models()):
            for number in range(60):
                request = RequestSetup(
                    id=f"control-{model.name}-{number}",
                    model=model.name,
                    at=0.0,
                    prompt=[1, 2, 3, 1],
                    params=SamplingParams(max_tokens=0, seed=5),
                    max_tokens=4,
                )
                outcome = self.outcomes[request.id] = Outcome(request, self._loop.time())
                await self.ask(request)
                if outcome.status == "done":
                    break
                await asyncio.sleep(30.0)
            else:
                raise BrokenRuleError(f"{model.name} answers no more: {outcome.error}")
