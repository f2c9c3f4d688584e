"""The response that grows while a chat is generated, as events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...gateway.open_request import OpenRequest
from ...text.answer_parts import Parts
from ...text.tool_calls import ToolCall
from ..errors import to_api_error
from ..openai.chat import ChatCall, heading_of
from ..openai.chat_parts import call_id, reasoning_tokens
from ..openai.storing import NOT_STORED, Store
from .answers import (
    ResponseObject,
    ResponseUsage,
    choice_of,
    message_item,
    reasoning_item,
    text_of,
    text_part,
    tools_of,
)
from .fields import ResponseRequest
from .tools import Toolbox

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A checked request: the chat that makes its answer, and what becomes of that."""

    request: ResponseRequest
    chat: ChatCall
    tools: Toolbox
    store: Store | None = None


def run(events: Iterator[Event]) -> None:
    """For what they leave in the writer: nobody reads them."""
    for _ in events:
        pass


class Writer:
    """Items one after another: each is begun, filled and ended before the next.

    The response is stored when it has ended, however it did, before that is told.
    """

    def __init__(self, opened: OpenRequest, prepared: PreparedResponse) -> None:
        self._opened, self._prepared = opened, prepared
        self._chat, self._request, self._store = prepared.chat, prepared.request, prepared.store
        self._ended: ResponseObject | None = None
        self._parser = prepared.chat.parsing.parser()
        self._done: list[dict[str, Any]] = []
        self._open = ""
        """Kind of the item that is being filled: `message`, `reasoning` or none."""
        self._texts: list[str] = []
        self._number = 0

    def begin(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.response())

    def say(self, text: str) -> Iterator[Event]:
        before = self._parser.called
        return self._parts(self._parser.push(text), before)

    def finish(self) -> Iterator[Event]:
        before = self._parser.called
        yield from self._parts(self._parser.finish(), before)
        yield from self._close()
        self._ended = response = self._made()
        if self._store is not None and not self.keep(response):
            response.store, response.warnings = False, [*self._chat.warnings_at_end(self._opened), NOT_STORED]
        yield self._event(f"response.{response.status}", response=response)

    def break_off(self, error: BaseException) -> None:
        """It has ended before it was whole: as much as there is of it is stored."""
        if self._store is None or self._ended is not None:
            return
        if self._opened.sequences[0].finish_reason is not None:  # only its end was not read
            run(self.finish())
            return
        before = self._parser.called
        run(self._parts(self._parser.finish(), before))
        run(self._close(whole=False))
        self._ended = made = self._made()
        failure = to_api_error(error) if isinstance(error, Exception) else None
        if failure is None or failure.code == "request_cancelled":
            made.status = "cancelled"
        else:
            made.status, made.error = "failed", {"code": "server_error", "message": failure.message}
        made.usage = self._usage()
        self.keep(made)

    def keep(self, response: ResponseObject) -> bool:
        """False: there is no room."""
        assert self._store is not None
        return self._store.put(response, self._opened.timeline.created, self._opened.usage.output_tokens)

    def response(self) -> ResponseObject:
        """As far as it is. Its sampling numbers are those that were used."""
        return self._ended or self._made()

    def _made(self) -> ResponseObject:
        heading, params = heading_of(self._opened, self._chat), self._chat.generation.params
        request, ended = self._request, self._opened.sequences[0].finish_reason
        made = ResponseObject(
            id=heading.id,
            created_at=heading.created,
            model=heading.model,
            status="in_progress" if ended is None else "incomplete" if ended == "length" else "completed",
            output=list(self._done),
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
            store=self._store is not None,
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

    def _parts(self, parts: Parts, number: int) -> Iterator[Event]:
        """`number`: calls before these."""
        if parts.reasoning:
            yield from self._fill("reasoning", parts.reasoning)
        if parts.content:
            yield from self._fill("message", parts.content)
        for index, call in enumerate(parts.calls, number):
            yield from self._close()
            yield from self._call(call, call_id(self._chat.generation.id, 0, index))

    def _call(self, call: ToolCall, called: str) -> Iterator[Event]:
        item = self._prepared.tools.item("", called, call, whole=True)
        custom = item["type"] == "custom_tool_call"
        item["id"] = id_ = self._id("ctc" if custom else "fc")
        place = {"item_id": id_, "output_index": len(self._done)}
        yield self._item("added", self._prepared.tools.item(id_, called, call, whole=False))
        if custom:
            yield self._event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        else:
            said = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **place, delta=said)
            yield self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=said
            )
        yield from self._end(item)

    def _fill(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            item = message_item if kind == "message" else reasoning_item
            yield self._item("added", item(self._id(kind), None))
            yield self._event("response.content_part.added", **self._place(), part=self._part(""))
        self._texts.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{self._text_name()}.delta", **self._place(), delta=text, **logprobs)

    def _close(self, *, whole: bool = True) -> Iterator[Event]:
        if not self._open:
            return
        text, place = "".join(self._texts), self._place()
        logprobs: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
        yield self._event(f"response.{self._text_name()}.done", **place, text=text, **logprobs)
        yield self._event("response.content_part.done", **place, part=self._part(text))
        whole = whole and self._opened.sequences[0].finish_reason != "length"
        id_, kind = place["item_id"], self._open
        item = message_item(id_, text, whole=whole) if kind == "message" else reasoning_item(id_, text)
        yield from self._end(item)
        self._open, self._texts = "", []

    def _end(self, item: dict[str, Any]) -> Iterator[Event]:
        yield self._item("done", item)
        self._done.append(item)

    def _item(self, what: str, item: dict[str, Any]) -> Event:
        return self._event(f"response.output_item.{what}", output_index=len(self._done), item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id(self._open), "output_index": len(self._done), "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return text_part(text) if self._open == "message" else {"type": "reasoning_text", "text": text}

    def _text_name(self) -> str:
        return "output_text" if self._open == "message" else "reasoning_text"

    def _id(self, kind: str) -> str:
        prefix = {"message": "msg", "reasoning": "rs"}.get(kind, kind)
        return f"{prefix}_{self._chat.generation.id.removeprefix('resp_')}_{len(self._done)}"

    def _event(self, kind: str, /, **data: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **data}
