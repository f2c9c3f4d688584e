"""Event writer of one response: it builds the response while the chat is generated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...gateway.generation import TokenEntry
from ...gateway.open_request import OpenRequest
from ...text.output.output_parser import ParsedOutput
from ..openai.chat import ChatCall, heading_of
from ..openai.chat_parts import call_id, reasoning_tokens
from ..openai.logprobs import chat_logprobs
from ..openai.stored import NOT_STORED, Store
from ..server.errors import to_api_error
from .item_writer import Event, ItemWriter
from .request_types import ResponseRequest
from .response_types import ResponseObject, ResponseUsage, choice_of, text_of, tools_of
from .tools import Toolbox
from .translate import ConversationTarget


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A checked request: the chat that generates its answer, and where the answer is stored."""

    request: ResponseRequest
    chat: ChatCall
    tools: Toolbox
    store: Store | None = None
    conversation: ConversationTarget | None = None


CUTS = "_cuts"
"""Key beside a stored response: `ItemWriter.cuts`."""


def run(events: Iterator[Event]) -> None:
    """Consume events that nobody reads, for their effect on the writer."""
    for _ in events:
        pass


class Writer:
    """Event writer of one response. An ended response is stored before its last event is sent, however it
    ended.
    """

    def __init__(self, opened: OpenRequest, prepared: PreparedResponse) -> None:
        self._opened, self._prepared = opened, prepared
        self._chat, self._request, self._store = prepared.chat, prepared.request, prepared.store
        self._ended: ResponseObject | None = None
        self._parser = prepared.chat.parsing.parser()
        self._items = ItemWriter(prepared.chat.generation.id)
        self._entries: list[TokenEntry] = []
        """Entries of tokens whose text was not sent yet."""

    def begin(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._items.event(f"response.{name}", response=self.response())

    def say(self, text: str, entries: Sequence[TokenEntry] = ()) -> Iterator[Event]:
        """Append text. `entries`: of the tokens in `text`."""
        before = self._parser.called
        return self._parts(self._parser.push(text), before, entries)

    def finish(self) -> Iterator[Event]:
        before = self._parser.called
        yield from self._parts(self._parser.finish(), before)
        yield from self._items.close(whole=self._opened.sequences[0].finish_reason != "length")
        self._ended = response = self._build_response()
        lost = self._store is not None and not self.keep(response)
        if (target := self._prepared.conversation) is not None:
            lost |= not target.append(response.output, self._opened.usage.output_tokens)
        if lost:
            response.store, response.warnings = False, [*self._chat.warnings_at_end(self._opened), NOT_STORED]
        yield self._items.event(f"response.{response.status}", response=response)

    def break_off(self, error: BaseException) -> Iterator[Event]:
        """End the response early and store the output that there is."""
        if self._store is None or self._ended is not None:
            return
        if self._opened.sequences[0].finish_reason is not None:  # only its end was not read
            yield from self.finish()
            return
        before = self._parser.called
        yield from self._parts(self._parser.finish(), before)
        yield from self._items.close(whole=False)
        self._ended = made = self._build_response()
        failure = to_api_error(error) if isinstance(error, Exception) else None
        if failure is None or failure.code == "request_cancelled":
            made.status = "cancelled"
        else:
            made.status, made.error = "failed", {"code": "server_error", "message": failure.message}
        made.usage = self._usage()
        self.keep(made)
        yield self._items.event(f"response.{made.status}", response=made)

    def keep(self, response: ResponseObject) -> bool:
        """Store the response. Returns False where there is no room."""
        assert self._store is not None
        tokens = self._opened.usage.output_tokens
        return self._store.put(
            response,
            self._opened.timeline.created,
            tokens,
            logprobs=self._chat.wants_logprobs,
            private={CUTS: self._items.cuts},
        )

    def response(self) -> ResponseObject:
        """Return the response so far. Its sampling parameters are those that were used."""
        return self._ended or self._build_response()

    def _build_response(self) -> ResponseObject:
        heading, params = heading_of(self._opened, self._chat), self._chat.generation.params
        request, ended = self._request, self._opened.sequences[0].finish_reason
        made = ResponseObject(
            id=heading.id,
            created_at=heading.created,
            model=heading.model,
            status="in_progress" if ended is None else "incomplete" if ended == "length" else "completed",
            output=list(self._items.done),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            tool_choice=choice_of(request),
            text=text_of(request),
            tools=tools_of(request),
            temperature=params.temperature,
            top_p=params.top_p,
            reasoning={"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            user=request.user,
            background=bool(request.background),
            previous_response_id=request.previous_response_id,
            conversation=None if request.conversation_id is None else {"id": request.conversation_id},
            store=self._store is not None,
            truncation=request.truncation or "disabled",
            top_logprobs=request.top_logprobs or 0,
            max_tool_calls=request.max_tool_calls,
        )
        if ended is not None:
            made.usage = self._usage()
            extras = self._chat.extras(self._opened)
            made.seed, made.warnings = extras["seed"], extras["warnings"]
            if ended == "length":
                made.incomplete_details = {"reason": "max_output_tokens"}
        return made

    def _usage(self) -> ResponseUsage:
        return ResponseUsage.of(self._opened.usage_now(), reasoning_tokens(self._opened, [self._parser]))

    def _parts(self, parts: ParsedOutput, number: int, entries: Sequence[TokenEntry] = ()) -> Iterator[Event]:
        """Write parsed output. `number`: tool calls before these."""
        self._entries += entries
        if parts.reasoning:
            yield from self._items.fill("reasoning", parts.reasoning)
        if parts.content:
            yield from self._items.fill("message", parts.content, self._logprobs(parts.content))
        if parts.reasoning or parts.content or parts.calls:
            self._entries = []
        for index, call in enumerate(parts.calls, number):
            called = call_id(self._chat.generation.id, 0, index)
            yield from self._items.call(self._prepared.tools.item(called, call))

    def _logprobs(self, content: str) -> list[Any]:
        """Return the log-probabilities of the tokens that hold `content`, without marks and white space
        before it.
        """
        size, first = len(content.encode()), len(self._entries)
        while size > 0 and first > 0:
            first -= 1
            size -= len(self._entries[first].data)
        return chat_logprobs(self._entries[first:], self._chat.generation.model.text.tokens).content
