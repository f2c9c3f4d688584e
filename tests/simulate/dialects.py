"""Dialects of HTTP: the body of a request in each, and how its answer is read, whole or event by event."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .scenario import RequestSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """Part of one choice of an answer."""

    text: str = ""
    reason: str | None = None
    """`stop` or `length` where the choice ends."""
    index: int = 0
    tokens: list[int] | None = None
    """None where the dialect tells none."""


@dataclass(slots=True, kw_only=True)
class AnswerEvent:
    """One event of a stream."""

    parts: list[AnswerPart] = field(default_factory=list)
    is_last: bool = False
    """Nothing may follow."""
    error: Any = None
    """Error in the dialect's own shape."""
    whole: str | None = None
    """Text of the whole answer, which some dialects tell again at the end."""
    number: int | None = None
    """Place of the event in the stream."""
    count: int | None = None
    """Tokens of the whole answer."""


class Dialect:
    """One API: its route, what it can ask for, and how its answers are read."""

    route = ""
    prefix = ""
    """Beginning of the ids of its answers."""
    separator = b"\n\n"
    """Bytes behind each event."""
    has_fields = False
    """It has llmbox's own fields: stop tokens, choices, priorities, deadlines."""
    has_seed = True
    is_clamped = False
    """An answer ends with the context, whatever was asked for."""
    needs_limit = False
    """It has no request without a bound of its answer."""

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, answer: Any) -> list[AnswerPart]:
        """Return the parts of an answer that came whole, one for each choice."""
        raise NotImplementedError

    def event(self, data: bytes) -> AnswerEvent:
        raise NotImplementedError


def _text_of(request: "RequestSetup") -> str:
    return "".join(chr(48 + token) for token in request.prompt[request.num_known :])


def _told(event: bytes) -> list[bytes]:
    """Return the data of a server-sent event; a comment has none."""
    return [line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")]


class _OpenAI(Dialect):
    has_fields = True

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        params = request.params
        return {
            "model": request.model,
            "stream": request.streams,
            "temperature": params.temperature,
            "max_tokens": request.max_tokens,
            "request_id": request.id,
            "seed": params.seed,
            "n": request.n,
            "min_tokens": params.min_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "priority": request.priority,
            "cache_salt": request.salt or None,
            "timeout": request.finish_after,
            "first_token_timeout": request.first_token_after,
        }

    def event(self, data: bytes) -> AnswerEvent:
        told = _told(data)
        if told in ([], [b"[DONE]"]):
            return AnswerEvent(is_last=bool(told))
        (chunk,) = map(json.loads, told)
        if chunk.get("error"):
            return AnswerEvent(error=chunk)  # [DONE] follows
        return AnswerEvent(parts=self.whole(chunk))

    def whole(self, answer: Any) -> list[AnswerPart]:
        return [self._part(choice) for choice in answer["choices"]]

    def _part(self, choice: Mapping[str, Any]) -> AnswerPart:
        raise NotImplementedError


class Completions(_OpenAI):
    route, prefix = "/v1/completions", "cmpl-"

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        return {**super().body(request), "prompt": request.prompt, "return_token_ids": True}

    def _part(self, choice: Mapping[str, Any]) -> AnswerPart:
        return AnswerPart(
            index=choice["index"],
            text=choice["text"],
            reason=choice["finish_reason"],
            tokens=choice.get("token_ids"),
        )


class Chat(_OpenAI):
    route, prefix = "/v1/chat/completions", "chatcmpl-"

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        return {
            **super().body(request),
            "messages": [{"role": "user", "content": _text_of(request)}],
        }

    def _part(self, choice: Mapping[str, Any]) -> AnswerPart:
        said = choice["delta"] if "delta" in choice else choice["message"]
        return AnswerPart(
            index=choice["index"], text=said.get("content") or "", reason=choice["finish_reason"]
        )


class Messages(Dialect):
    """Anthropic's."""

    route, prefix = "/v1/messages", "msg_"
    has_seed, is_clamped, needs_limit = False, True, True
    _REASONS: ClassVar = {
        "end_turn": "stop",
        "max_tokens": "length",
        "model_context_window_exceeded": "length",
    }

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        return {
            "model": request.model,
            "stream": request.streams,
            "temperature": request.params.temperature,
            "max_tokens": request.max_tokens,
            "messages": [{"role": "user", "content": _text_of(request)}],
        }

    def whole(self, answer: Any) -> list[AnswerPart]:
        text = answer["content"][0]["text"] if answer["content"] else ""
        return [AnswerPart(text=text, reason=self._REASONS[answer["stop_reason"]])]

    def event(self, data: bytes) -> AnswerEvent:
        (told,) = map(json.loads, _told(data))
        match told["type"]:
            case "error":
                return AnswerEvent(error=told, is_last=True)
            case "content_block_delta":
                return AnswerEvent(parts=[AnswerPart(text=told["delta"]["text"])])
            case "message_delta":
                return AnswerEvent(parts=[AnswerPart(reason=self._REASONS[told["delta"]["stop_reason"]])])
        return AnswerEvent(is_last=told["type"] == "message_stop")


class Responses(Dialect):
    route, prefix = "/v1/responses", "resp_"
    has_seed = False
    _REASONS: ClassVar = {"completed": "stop", "incomplete": "length"}

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        return {
            "model": request.model,
            "stream": request.streams,
            "temperature": request.params.temperature,
            "max_output_tokens": request.max_tokens,
            "input": _text_of(request),
            "previous_response_id": request.previous or None,
            "store": True if request.stored is not None else None,
            "background": True if request.stored is not None and request.stored.is_background else None,
        }

    def whole(self, answer: Any) -> list[AnswerPart]:
        return [AnswerPart(text=self._said(answer), reason=self._REASONS[answer["status"]])]

    def event(self, data: bytes) -> AnswerEvent:
        if not (lines := _told(data)):
            return AnswerEvent()
        (told,) = map(json.loads, lines)
        kind = told["type"]
        if kind == "error":
            return AnswerEvent(error={"error": told}, is_last=True)
        made = AnswerEvent(number=told["sequence_number"])
        if kind == "response.output_text.delta":
            made.parts = [AnswerPart(text=told["delta"])]
        elif kind.removeprefix("response.") in self._REASONS:
            (end,) = self.whole(told["response"])
            made.parts, made.whole, made.is_last = [AnswerPart(reason=end.reason)], end.text, True
            made.count = told["response"]["usage"]["output_tokens"]
        return made

    @staticmethod
    def _said(response: Any) -> str:
        items = response["output"]
        assert all(item["type"] == "message" for item in items)
        return "".join(part["text"] for item in items for part in item["content"])


class OllamaChat(Dialect):
    route, prefix = "/api/chat", "ollama-"
    separator = b"\n"
    is_clamped = True

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        options = {
            "temperature": request.params.temperature,
            "seed": request.params.seed,
            "num_predict": request.max_tokens,
        }
        return {
            "model": request.model,
            "stream": request.streams,
            "options": {name: value for name, value in options.items() if value is not None},
            "keep_alive": request.keep_alive,
            "messages": [{"role": "user", "content": _text_of(request)}],
        }

    def whole(self, answer: Any) -> list[AnswerPart]:
        assert answer["done"]
        return [self._part(answer)]

    def event(self, data: bytes) -> AnswerEvent:
        told = json.loads(data)
        if "error" in told:
            return AnswerEvent(error=told, is_last=True)
        return AnswerEvent(
            parts=[self._part(told)], is_last=told["done"], count=told["eval_count"] if told["done"] else None
        )

    def _part(self, told: Any) -> AnswerPart:
        return AnswerPart(text=self._said(told), reason=told.get("done_reason"))

    def _said(self, told: Any) -> str:
        return str(told["message"]["content"])


class OllamaGenerate(OllamaChat):
    """Every other request leaves the template out."""

    route = "/api/generate"

    def body(self, request: "RequestSetup") -> dict[str, Any]:
        body = super().body(request)
        del body["messages"]
        return {**body, "prompt": _text_of(request), "raw": request.params.seed % 2 == 1}

    def _said(self, told: Any) -> str:
        return str(told["response"])


DIALECTS_BY_NAME: dict[str, Dialect] = {
    "completions": Completions(),
    "chat": Chat(),
    "messages": Messages(),
    "responses": Responses(),
    "ollama_chat": OllamaChat(),
    "ollama_generate": OllamaGenerate(),
}


def request_of(id_: str) -> str:
    """Return the name of the request to which an id of an answer belongs."""
    for dialect in DIALECTS_BY_NAME.values():
        id_ = id_.removeprefix(dialect.prefix)
    return id_
