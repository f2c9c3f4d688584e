"""Event writer of one response: it builds the response while the chat is generated."""

from collections.abc import Iterator, Sequence
from typing import Any

from ...gateway.generation import TokenEntry
from ...gateway.open_request import OpenRequest
from ...text.output.output_parser import ParsedOutput
from ..openai.chat_messages import call_id, reasoning_tokens
from ..openai.sampling import chat_logprobs
from ..openai.stored import NOT_STORED
from ..server.errors import to_api_error
from .items import (
    ResponseObject,
    ResponseUsage,
    choice_of,
    message_item,
    reasoning_item,
    text_of,
    text_part,
    tools_of,
)
from .translate import PreparedResponse

Event = dict[str, Any]


class ItemWriter:
    """Writer of item events. `done` are the items that have ended. Ids and numbers follow from the response's
    id and their place.
    """

    def __init__(self, response_id: str) -> None:
        self.done: list[dict[str, Any]] = []
        self.cuts: list[int] = []
        """Lengths of the pieces in which texts came."""
        self._base = response_id.removeprefix("resp_")
        self._open = ""
        """Kind of the item that is being filled: `message`, `reasoning` or none."""
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._number = 0

    def event(self, kind: str, /, **data: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **data}

    def fill(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Append text to a `message` or `reasoning` item, and start the item if needed."""
        if self._open != kind:
            yield from self.close()
            self._open = kind
            item = message_item if kind == "message" else reasoning_item
            yield self._item("added", item(self._id(kind), None))
            yield self.event("response.content_part.added", **self._place(), part=self._part(""))
        self._texts.append(text)
        self._logprobs += logprobs
        self.cuts.append(len(text))
        yield self.event(
            f"response.{self._text_name()}.delta", **self._place(), delta=text, **self._with(logprobs)
        )

    def close(self, *, whole: bool = True) -> Iterator[Event]:
        if not self._open:
            return
        text, place = "".join(self._texts), self._place()
        yield self.event(
            f"response.{self._text_name()}.done", **place, text=text, **self._with(self._logprobs)
        )
        yield self.event("response.content_part.done", **place, part=self._part(text))
        if self._open == "message":
            item = message_item(place["item_id"], text, self._logprobs, whole=whole)
        else:
            item = reasoning_item(place["item_id"], text)
        yield from self._end(item)
        self._open, self._texts, self._logprobs = "", [], []

    def call(self, item: dict[str, Any]) -> Iterator[Event]:
        """Write a tool call; the item gets its id here."""
        yield from self.close()
        custom = item["type"] == "custom_tool_call"
        item["id"] = self._id("ctc" if custom else "fc")
        place = {"item_id": item["id"], "output_index": len(self.done)}
        said = "input" if custom else "arguments"
        yield self._item("added", {**item, "status": "in_progress", said: ""})
        kind = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        yield self.event(f"{kind}.delta", **place, delta=item[said])
        named = {} if custom else {"name": item["name"]}
        yield self.event(f"{kind}.done", **place, **named, **{said: item[said]})
        yield from self._end(item)

    def _end(self, item: dict[str, Any]) -> Iterator[Event]:
        yield self._item("done", item)
        self.done.append(item)

    def _item(self, what: str, item: dict[str, Any]) -> Event:
        return self.event(f"response.output_item.{what}", output_index=len(self.done), item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id(self._open), "output_index": len(self.done), "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "message":
            return text_part(text, self._logprobs)
        return {"type": "reasoning_text", "text": text}

    def _with(self, logprobs: Sequence[Any]) -> dict[str, Any]:
        return {"logprobs": list(logprobs)} if self._open == "message" else {}

    def _text_name(self) -> str:
        return "output_text" if self._open == "message" else "reasoning_text"

    def _id(self, kind: str) -> str:
        prefix = {"message": "msg", "reasoning": "rs"}.get(kind, kind)
        return f"{prefix}_{self._base}_{len(self.done)}"


def replay(response: dict[str, Any], cuts: Sequence[int]) -> Iterator[Event]:
    """Yield the events of a response that has ended, in the pieces in which they came."""
    writer, pieces = ItemWriter(response["id"]), iter(cuts)
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    for name in ("created", "in_progress"):
        yield writer.event(f"response.{name}", response={**begun, "error": None})
    for item in response["output"]:
        if item["type"] not in ("message", "reasoning"):
            yield from writer.call(dict(item))
            continue
        part = item["content"][0]
        text, logprobs = part["text"], part.get("logprobs") or []
        while text:
            size = next(pieces, len(text))
            yield from writer.fill(item["type"], text[:size], logprobs)
            text, logprobs = text[size:], []
        yield from writer.close(whole=item.get("status") != "incomplete")
    yield writer.event(f"response.{response['status']}", response=response)


CUTS = "_cuts"
"""Key beside a stored response: `ItemWriter.cuts`."""


def run(events: Iterator[Event]) -> None:
    """Consume events that nobody reads, for their effect on the writer."""
    for _ in events:
        pass


class ResponseEventWriter:
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
        before, is_cut = self._parser.called, self._opened.sequences[0].finish_reason == "length"
        yield from self._parts(self._parser.finish(is_cut=is_cut), before)
        yield from self._items.close(whole=not is_cut)
        self._ended = response = self._build_response()
        lost = self._store is not None and not self.keep(response)
        if (target := self._prepared.conversation) is not None:
            lost |= not target.append(response.output, self._opened.usage.output_tokens)
        if lost:
            response.store, response.warnings = False, [*self._chat.warnings_at_end(self._opened), NOT_STORED]
        yield self._items.event(f"response.{response.status}", response=response)

    def break_off(self, error: BaseException) -> Iterator[Event]:
        """End the response early and store the output so far."""
        if self._store is None or self._ended is not None:
            return
        if self._opened.sequences[0].finish_reason is not None:  # only its end was not read
            yield from self.finish()
            return
        before = self._parser.called
        yield from self._parts(self._parser.finish(is_cut=True), before)
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
        params = self._chat.generation.params
        request, ended = self._request, self._opened.sequences[0].finish_reason
        made = ResponseObject(
            id=self._chat.generation.id,
            created_at=self._opened.created,
            model=self._chat.model_name,
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
