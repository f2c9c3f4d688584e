"""Answers in Ollama's shape: lines of JSON, or one object."""

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...gateway.generation import Delta, TokenEntry
from ...gateway.open_request import OpenRequest
from ...text.output.output_parser import ParsedOutput
from ...util.threads import off_loop
from ..openai.logprobs import chat_logprobs
from ..server.errors import encode_error
from ..server.sse import SseOptions
from .calls import OllamaCall

Kind = Literal["chat", "generate"]


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def error_line(error: ApiError) -> bytes:
    return encode_error(error, "/api/chat") + b"\n"


LINES = SseOptions(last=b"", error=error_line, comment=b"", content_type=b"application/x-ndjson")


class AnswerWriter:
    """Writer of one answer in the shape of its route."""

    def __init__(self, kind: Kind, model: str, opened: OpenRequest, call: OllamaCall) -> None:
        self._kind: Kind = kind
        self._opened, self._call = opened, call
        self._head = {"model": model, "created_at": stamp(opened.timeline.created)}
        self._entries: list[TokenEntry] = []
        """Log-probabilities that no line has held yet."""

    def note(self, delta: Delta) -> None:
        if self._call.has_logprobs:
            self._entries += delta.entries

    def part(self, parts: ParsedOutput) -> dict[str, Any]:
        thoughts = parts.reasoning if self._call.parsing.tells_thoughts else ""
        said: dict[str, Any] = {"thinking": thoughts} if thoughts else {}
        if self._kind == "generate":
            return {**self._head, "response": parts.content, **said, "done": False} | self._logprobs()
        if parts.calls:
            said["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in parts.calls
            ]
        message = {"role": "assistant", "content": parts.content, **said}
        return {**self._head, "message": message, "done": False} | self._logprobs()

    def end(self, parts: ParsedOutput) -> dict[str, Any]:
        """Build the last object. Times are nanoseconds."""
        clock, usage = self._opened.timeline, self._opened.usage_now()
        begun = clock.scheduled if clock.scheduled is not None else clock.arrived
        first = clock.first_token if clock.first_token is not None else begun
        last = clock.last_token if clock.last_token is not None else first
        told = {
            **self.part(parts),
            "done": True,
            "done_reason": self._opened.sequences[0].finish_reason,
            "total_duration": _nanoseconds(last - clock.arrived),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - begun),
            "eval_count": usage.output_tokens,
            "eval_duration": _nanoseconds(last - first),
        }
        warnings = self._call.prepared.warnings_at_end(self._opened)
        return told | ({"warnings": warnings} if warnings else {})

    def _logprobs(self) -> dict[str, Any]:
        if not self._entries:
            return {}
        told = chat_logprobs(self._entries, self._call.generation.model.text.tokens).content
        self._entries = []
        return {"logprobs": told}


async def complete(gateway: Gateway, call: OllamaCall, kind: Kind, model: str) -> dict[str, Any]:
    parser = call.parsing.parser()
    with gateway.open(call.generation) as opened:
        writer = AnswerWriter(kind, model, opened, call)
        pieces = []
        async for delta in opened.deltas():
            writer.note(delta)
            pieces.append(delta.text)
    parts = parser.push("".join(pieces))
    parts.add(parser.finish())
    tokens = opened.usage.output_tokens if call.has_logprobs else 0
    return await off_loop(tokens, lambda: writer.end(parts))


async def stream(gateway: Gateway, call: OllamaCall, kind: Kind, model: str) -> AsyncGenerator[bytes, None]:
    parser = call.parsing.parser()
    with gateway.open(call.generation) as opened:
        writer = AnswerWriter(kind, model, opened, call)
        async for delta in opened.deltas():
            writer.note(delta)
            parts = parser.push(delta.text)
            if parts.reasoning or parts.content or parts.calls:
                yield line(writer.part(parts))
    rest = parser.finish()
    if rest.reasoning or rest.content or rest.calls:
        yield line(writer.part(rest))
    yield line(writer.end(ParsedOutput()))


def build_empty_answer(
    kind: Kind, model: str, now: float, reason: Literal["load", "unload"], warnings: list[str]
) -> dict[str, Any]:
    """Build the answer to a request without a prompt."""
    said: dict[str, Any] = (
        {"response": ""} if kind == "generate" else {"message": {"role": "assistant", "content": ""}}
    )
    told = {"model": model, "created_at": stamp(now), **said, "done": True, "done_reason": reason}
    return told | ({"warnings": warnings} if warnings else {})


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
