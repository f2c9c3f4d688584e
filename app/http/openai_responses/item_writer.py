"""Events of a response's output items: each item is started, filled and ended before the next.

Used while an answer is generated, and again when a stored one is replayed as a stream.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from .response_types import message_item, reasoning_item, text_part

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
