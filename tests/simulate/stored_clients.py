"""Clients that have their responses stored, or made in the background, and come back for them.

A client looks at its response, follows its events from any number on, cancels it and deletes it: at any
moment, also before it was taken, since the id is known. Whatever it is told must fit together: statuses only
go on, an ended response never changes, an event has one content however often it comes, a deleted response
stays away, and so it is for the daemon that is started next.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from llmbox.app.errors import ApiError

from .http_clients import Exchange, HttpClient, serve_exchange
from .rules import expected_answer
from .step_rules import BrokenRuleError

if TYPE_CHECKING:
    from .clients import Outcome
    from .scenario import RequestSetup
    from .world import World

_NEXT_TURN = [3, 1]
"""Tokens that a client says after an answer."""

_RANKS = {"queued": 0, "in_progress": 1, "completed": 2, "incomplete": 2, "failed": 2, "cancelled": 2}
_END = 2
_LOST = "The daemon stopped before this response had ended"
_MOST_VISITS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """What a client does about its stored response beside asking for it."""

    is_background: bool = False
    """It is generated without a connection."""
    pause: float = 1.0
    """Seconds between two visits."""
    follows: bool = False
    """It visits by the stream of events, from the next one on; else it asks for the response."""
    cancels_after: float | None = None
    """Seconds after its arrival at which it cancels the response."""
    deletes_after: float | None = None
    forgets: bool = False
    """It never comes back."""
    goes_on: bool = False
    """It asks for a next turn once the response has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """What is known of a stored response at one moment."""

    opened_at: float | None = None
    """The gateway took it."""
    end: Any = None
    """The response as its client saw it first after its end."""
    ended_at: float = 0.0
    deletion: str = ""
    """Empty, `asked` or `done`."""


class StoredClient(HttpClient):
    """One response that is stored: asked for, visited, cancelled, deleted."""

    def __init__(self, world: "World", request: "RequestSetup", outcome: "Outcome") -> None:
        super().__init__(world, request, outcome)
        assert request.stored is not None
        self.plan = request.stored
        self.state = StoredState()
        self.id = f"{self._dialect.prefix}{request.id}"
        self.request = request
        self._path = f"{self._dialect.route}/{self.id}"
        self._rank = 0
        self._answered = False
        """The first request has its answer, or its client has left."""
        self._events: dict[int, tuple[str, str]] = {}
        self._last: int | None = None
        """Number of the last event, once it has come."""
        self._calls = 0

    @property
    def is_lenient(self) -> bool:
        """The disk was held up, or lost something: what is stored may be missing."""
        return self._world.scenario.loses_answers

    @property
    def is_background(self) -> bool:
        return self.plan.is_background

    @property
    def latest(self) -> int:
        """Number of the last event that was seen."""
        return max(self._events, default=-1)

    def remember(self, other: "StoredClient") -> None:
        """Expect the events that another client has seen."""
        self._events = dict(other._events)

    def next_turn(self) -> "RequestSetup | None":
        """Return the request with which the client goes on from its response; None where it does not."""
        request, end = self.request, self.state.end
        if not self.plan.goes_on or end is None or self.state.deletion:
            return None
        if end["status"] not in {"completed", "incomplete"}:
            return None
        said = [*request.prompt, *expected_answer(self._world, self._outcome, 0)[0]]
        return replace(
            request,
            id=f"{request.id}-next",
            at=0.0,
            prompt=[*said, *_NEXT_TURN],
            num_known=len(said),
            previous=self.id,
            max_tokens=3,
            leaves_after=None,
            leaves_at=None,
            stored=None,
        )

    def note_open(self) -> None:
        self.state = replace(self.state, opened_at=self._world.loop.time())

    async def ask(self) -> None:
        """Return when the response has ended and was looked at for the last time. Raises ApiError as it
        would have been told.
        """
        planned = (self._cancel, self.plan.cancels_after), (self._delete, self.plan.deletes_after)
        acts = [asyncio.create_task(act(after)) for act, after in planned if after is not None]
        error: ApiError | None = None
        try:
            try:
                await super().ask()
            except ApiError as refused:
                error = refused
            self._answered, self._error = True, None
            if self.is_background:  # it goes on without its client
                self._outcome.status = ""
            self._world.clients.note_answered(self._request)
            if self.plan.forgets:
                self._outcome.status = "forgotten"
            else:
                await self._come_back()
        finally:
            await asyncio.gather(*acts)
        if not self.plan.forgets:
            await self._look_again()
            error = self._judge(error)
        if error is not None:
            raise error

    # ------------------------------------------------------------------ visits

    async def _come_back(self) -> None:
        """Visit until the response has ended, or is not there."""
        chance, visits = self._world.chance, 0
        while self.state.end is None:
            if visits and not await self._visit(follows=self.plan.follows or chance.random() < 0.2):
                return
            visits += 1
            if visits > _MOST_VISITS:
                raise BrokenRuleError(f"{self.id} does not end")
            await asyncio.sleep(self.plan.pause)
            if not (self.is_background or self.is_lenient) and visits > 2:
                raise BrokenRuleError(f"{self.id} was no background response, and has not ended")

    async def _visit(self, *, follows: bool) -> bool:
        """Return whether the response was there, or was not to be had for a moment."""
        if not follows:
            had_ended = self.state.end is not None
            status, told = await self.call("GET")
            if status == 200 and (had_ended or self.state.end is None):  # else it was told before the end
                self.see(told)
            return status == 200 or self._check_absence(status, told)
        leaves_after = self._world.chance.choice([None, None, 0, 2]) if self.is_background else None
        try:
            await self.follow(self.latest, leaves_after)
        except ApiError as error:
            return self._check_absence(error.status, {"error": {"code": error.code}})
        return True

    async def follow(self, after: int, leaves_after: int | None = None) -> None:
        query = f"stream=true&starting_after={after}" if after >= 0 else "stream=true"
        self._is_marked = self._last is not None and after >= self._last
        self._numbered = after + 1
        await self._send("GET", query=query, leaves_after=leaves_after)

    async def _look_again(self) -> None:
        """Look once more when all is over: at the response, at its events from the first one on, and as
        somebody else.
        """
        status, told = await self.call("GET")
        if status == 200:
            if self.state.deletion == "done":
                raise BrokenRuleError(f"{self.id} is there although it was deleted")
            self.see(told)
            if self.state.end is None:
                raise BrokenRuleError(f"{self.id} goes on although its client has seen its end")
            try:
                await self.follow(self._world.chance.choice([-1, -1, 0, 1]))
            except ApiError as error:  # a deletion that was held up has come
                self._check_absence(error.status, {"error": {"code": error.code}})
        else:
            self._check_absence(status, told)
        status, _ = await self.call("GET", tenant="somebody else")
        if status != 404 and not self.is_lenient:
            raise BrokenRuleError(f"{self.id} is shown to somebody else, with status {status}")

    async def _cancel(self, after: float) -> None:
        await asyncio.sleep(after)
        before = self.state
        was_answered = self._answered
        status, told = await self.call("POST", "/cancel")
        if status == 200:
            self.see(told)
            if self.state.end is None or not self.is_background:
                raise BrokenRuleError(f"{self.id} was cancelled, and is {told['status']}")
            self._check_stopped()
        elif status == 400:
            if self.is_background or told["error"]["code"] != "response_not_in_background":
                raise BrokenRuleError(f"{self.id} cannot be cancelled: {told}")
        else:
            self._check_absence(status, told, before, was_answered=was_answered)

    async def _delete(self, after: float) -> None:
        await asyncio.sleep(after)
        before = self.state
        was_answered = self._answered
        self.state = replace(before, deletion="asked")
        status, told = await self.call("DELETE")
        if status == 200:
            self.state = replace(self.state, deletion="done")
            self._check_stopped()
        elif status == 404:
            self._check_absence(status, told, before, was_answered=was_answered)
            self.state = replace(self.state, deletion="asked" if self.is_lenient else "")
        else:  # it may still come
            self._check_absence(status, told, before, was_answered=was_answered)

    def _check_stopped(self) -> None:
        if self.is_background and self.id in self._world.gateway._open:
            raise BrokenRuleError(f"{self.id} runs on although it was cancelled")

    def _check_absence(
        self, status: int, told: Any, before: StoredState | None = None, *, was_answered: bool = True
    ) -> bool:
        """Check an answer that is no response. `before`: what was known when it was asked for. Returns
        whether it is worth asking again.
        """
        state, code = before or self.state, told["error"]["code"]
        if status == 503 and code == "request_log_unavailable" and self.is_lenient:
            return True
        is_kept = state.opened_at is not None and (self.is_background or was_answered)
        is_gone = self.state.deletion or state.deletion
        if status != 404 or (is_kept and not is_gone and not self.is_lenient):
            raise BrokenRuleError(f"{self.id}: {status} {code}, although it is stored")
        return False

    # ------------------------------------------------------------------ what it is told

    def see(self, response: Any) -> None:
        """Take a response as the daemon tells it. Raises BrokenRuleError where it contradicts another."""
        status, end = response["status"], self.state.end
        if self.is_lenient and end is not None and is_lost(end):  # its stream, read slowly, may know better
            end = None
        if end is not None:
            if response != end and not (self.is_lenient and is_lost(response)):
                raise BrokenRuleError(f"{self.id} has ended as {end}, and now is {response}")
            return
        if _RANKS[status] < self._rank:
            raise BrokenRuleError(f"{self.id} is {status} again")
        self._rank = _RANKS[status]
        if self._rank == _END:
            self.state = replace(self.state, end=response, ended_at=self._world.loop.time())
            self._world.note(f"{self.id} {status}")

    async def _read_whole(self, exchange: Exchange) -> None:
        data = b"".join([piece async for piece in exchange.read()])
        if exchange.is_left:
            return
        answer = json.loads(data)
        if exchange.status != 200:
            raise self._to_error(exchange.status, answer)
        self.see(answer)

    def _take_event(self, data: bytes) -> bool:
        if self._is_marked:
            raise BrokenRuleError(f"{self.id}: {data!r} follows the last event")
        lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
        if not lines:
            return False
        told = json.loads(lines[0])
        kind = told["type"].removeprefix("response.")
        if kind == "error":
            self._is_marked = self._outcome.is_cut = True
            self._error = self._to_error(0, {"error": told})
            return False
        number = told["sequence_number"]
        if number != self._numbered:
            raise BrokenRuleError(f"{self.id}: event {number} comes as number {self._numbered}")
        self._numbered += 1
        content = kind, told.get("delta", told.get("text", ""))
        is_lost_now = self.is_lenient and kind == "failed" and is_lost(told["response"])
        if self._events.setdefault(number, content) != content and not is_lost_now:
            before = self._events[number]
            raise BrokenRuleError(f"{self.id}: event {number} was {before}, and now is {content}")
        if _RANKS.get(kind, 0) == _END:
            self._is_marked, self._last = True, number
            self.see(told["response"])
        return kind.endswith(".delta")

    # ------------------------------------------------------------------ the verdict

    def _judge(self, error: ApiError | None) -> ApiError | None:
        """Note what came of it. Returns the error that it amounts to."""
        outcome, end = self._outcome, self.state.end
        if end is None:
            if self.state.deletion:
                outcome.status = "deleted"
            elif outcome.is_open and not self.is_lenient:
                raise BrokenRuleError(f"{self.id} has no end")
            elif error is None:
                outcome.status = "lost" if outcome.is_open else "left"
            return error
        take_end(outcome, end, self._world)
        if is_lost(end):
            outcome.status = outcome.status or "lost"
            if error is None and not self.is_lenient:
                raise BrokenRuleError(f"{self.id} lost its end, and no disk failed")
            return error
        said = "".join(text for kind, text in self._events.values() if kind == "output_text.delta")
        if not outcome.text[0].startswith(said) or (self._last is not None and said != outcome.text[0]):
            raise BrokenRuleError(f"{self.id}: its events say {said!r}, it has {outcome.text[0]!r}")
        match end["status"]:
            case "failed":
                error = self._failure(error)
                if error is None:
                    raise BrokenRuleError(f"{self.id} failed for no reason: {end['error']}")
            case "cancelled" if error is None and outcome.status != "left":
                if not self._was_cancelled:
                    raise BrokenRuleError(f"{self.id} was cancelled by nobody")
                outcome.status = "cancelled"
            case "completed" | "incomplete" if error is None and outcome.status != "left":
                outcome.status = "done"
        return error

    @property
    def _was_cancelled(self) -> bool:
        plan, world = self.plan, self._world
        asked = plan.cancels_after is not None or plan.deletes_after is not None
        return asked or self.id in world.cancelled or world.is_drained_early

    def _failure(self, error: ApiError | None) -> ApiError | None:
        """Return the error with which a response has failed; that of its stream, where it had one."""
        told = self.state.end["error"]["message"]
        if error is not None:
            if error.code != "request_cancelled" and error.message != told and not self.is_lenient:
                raise BrokenRuleError(f"{self.id} failed by {error.message!r}, stored is {told!r}")
            return error
        status, code, reason = self._world.ends.get(self.id, (0, "", ""))
        return ApiError(status, reason, code=code) if reason and reason == told else None

    # ------------------------------------------------------------------ exchanges

    async def call(self, method: str, more: str = "", *, tenant: str | None = None) -> tuple[int, Any]:
        """Return the status and the answer of a request about the response."""
        exchange, served = self._begin(method, more, tenant=tenant)
        data = b"".join([piece async for piece in exchange.read()])
        await served
        return exchange.status, json.loads(data)

    async def _send(self, method: str, query: str, leaves_after: int | None) -> None:
        exchange, served = self._begin(method, query=query)
        try:
            await self._read_stream(exchange, leaves_after)
        finally:
            exchange.leave()
            await asyncio.wait({served})
        await served

    def _begin(
        self, method: str, more: str = "", *, query: str = "", tenant: str | None = None
    ) -> tuple[Exchange, asyncio.Task[None]]:
        self._calls += 1
        exchange = Exchange(self._world.chance, b"", 0.0)
        serving = serve_exchange(
            self._world,
            exchange,
            method=method,
            path=self._path + more,
            query=query,
            name=f"{self.id}-{self._calls}",
            tenant=self._request.tenant if tenant is None else tenant,
        )
        return exchange, asyncio.create_task(serving)


def is_lost(response: Mapping[str, Any]) -> bool:
    """Return whether a daemon found no end of a response on its disk."""
    return response["error"] is not None and response["error"]["message"].startswith(_LOST)


def text_of(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def take_end(outcome: "Outcome", end: Mapping[str, Any], world: "World") -> None:
    """Note the text of an ended response as tokens."""
    outcome.text[0] = text_of(end)
    tokens = [ord(letter) - 48 for letter in outcome.text[0]]
    if end["status"] == "completed":  # the token that stops has no letter
        tokens += expected_answer(world, outcome, 0)[0][-1:]
    outcome.tokens[0] = tokens
    if end["status"] in {"completed", "incomplete"}:
        outcome.reasons[0] = "stop" if end["status"] == "completed" else "length"
        if end["usage"]["output_tokens"] != len(tokens):
            raise BrokenRuleError(f"{end['id']}: {end['usage']} are told, {len(tokens)} came")


def draw_plan(chance: Random) -> StoredPlan:
    act = chance.randrange(8)
    at = chance.choice([0.0, 0.0001, 0.01, 0.3, 2.0, 20.0])
    return StoredPlan(
        is_background=chance.random() < 0.7,
        pause=chance.choice([0.002, 0.02, 0.02, 0.3, 15.0]),
        follows=chance.random() < 0.5,
        cancels_after=at if act in {0, 1, 2} else None,
        deletes_after=at + chance.choice([0.0, 0.001, 1.0]) if act in {2, 3, 4} else None,
        forgets=act == 5,
    )
