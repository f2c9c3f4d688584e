"""Streaming chat answers as `chat.completion.chunk` events."""

from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from msgspec import UNSET

from ...gateway.gateway import Gateway
from ...gateway.generation import Delta
from ...gateway.open_request import OpenRequest
from ...text.output.call_parsers import ParsedToolCall
from ...text.output.output_parser import ParsedOutput
from ...util.threads import off_loop
from ..server.sse import TEXT_MARK, data_event, encode, split_at_text
from .chat import ChatCall, build_logprobs, build_prompt_logprobs, store_answer, whole_answer
from .chat_messages import call_id, final_reason, input_of, reasoning_tokens
from .response_types import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    CompletionUsage,
    CustomDelta,
    FunctionDelta,
    ToolCallDelta,
)
from .stored import NOT_STORED, Store


async def stream_chat(
    gateway: Gateway, chat: ChatCall, store: Store | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield framed events: the role first, one finish chunk a choice, then usage if requested."""
    with gateway.open(chat.generation) as opened:
        chunks = _ChunkEncoder(opened, chat)
        for index in range(len(opened.sequences)):
            yield chunks.first(index)
        unfinished = len(opened.sequences)
        parts: list[list[Delta]] = [[] for _ in opened.sequences]
        async for delta in opened.deltas():
            unfinished -= delta.finish_reason is not None
            if store is not None:
                parts[delta.index].append(delta)
            if store is not None and unfinished == 0:  # before the last event: the client may ask for it then
                answer = await whole_answer(opened, chat, parts)
                if not store_answer(store, opened, chat, answer):
                    chat.warnings.append(NOT_STORED)
            if delta.prompt_logprobs and delta.index == 0:
                yield await off_loop(len(delta.prompt_logprobs), partial(chunks.prompt, delta))
            if chunks.has_text_alone and delta.finish_reason is None:
                if delta.text:
                    before, after = chunks.glue[delta.index]
                    yield before + encode(delta.text) + after
            elif event := chunks.event(delta, last=unfinished == 0):
                yield event
    if chunks.with_usage:
        yield chunks.usage()


class _ChunkEncoder:
    """Chunks of one stream. The common chunk (text alone) is joined from parts that are encoded once."""

    def __init__(self, opened: OpenRequest, chat: ChatCall) -> None:
        self._opened = opened
        self._chat = chat
        self.with_usage = chat.usage_at_end
        self._running_usage = chat.usage_in_chunks
        self._base = ChatChunk(**chat.header(opened), choices=[], usage=None if self.with_usage else UNSET)
        self._plain = not (chat.wants_logprobs or chat.body.return_token_ids or self._running_usage)
        self._parsers = [chat.parsing.parser() for _ in opened.sequences] if chat.parsing.needed else []
        self.has_text_alone = self._plain and not self._parsers
        """All chunks but the first and the last hold only the text of a delta."""
        self.glue = [self._glued(index) for index in range(len(opened.sequences))]
        """Bytes around the text of such a chunk, by choice."""

    def first(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content="", refusal=None)
        chunk = self._chunk(ChatChunkChoice(index=index, delta=delta))
        if self._chat.body.return_token_ids and index == 0:
            chunk.prompt_token_ids = self._chat.generation.prompts[0]
        events = data_event(chunk)
        if self._chat.echo:
            said = ChatDelta(content=self._chat.echo)
            events += data_event(self._chunk(ChatChunkChoice(index=index, delta=said)))
        return events

    def prompt(self, delta: Delta) -> bytes:
        """Encode the prompt's log-probabilities, which come with the first tokens."""
        chunk = self._chunk(ChatChunkChoice(index=0, delta=ChatDelta()))
        chunk.prompt_logprobs = build_prompt_logprobs([delta], self._chat)
        return data_event(chunk)

    def event(self, delta: Delta, *, last: bool) -> bytes:
        """Encode the events of one delta. Empty where there is nothing to send yet."""
        if self._parsers:
            return self._parsed(delta, last=last)
        if delta.finish_reason is None:
            return self._full(delta, ChatDelta(content=delta.text))
        said = b""
        if delta.text or delta.entries or (delta.token_ids and not self._plain):
            said = self._full(delta, ChatDelta(content=delta.text))
        return said + self._finish(delta, last=last)

    def usage(self) -> bytes:
        self._base.choices = []
        thoughts = reasoning_tokens(self._opened, self._parsers) if self._parsers else 0
        self._base.usage = CompletionUsage.of(self._opened.usage, thoughts)
        self._chat.add_extras(self._opened, self._base)
        return data_event(self._base)

    def _parsed(self, delta: Delta, *, last: bool) -> bytes:
        parser = self._parsers[delta.index]
        parts = parser.push(delta.text)
        if delta.finish_reason is not None:
            parts.add(parser.finish(is_cut=delta.finish_reason == "length"))
        elif self._plain and not (parts.reasoning or parts.calls):
            before, after = self.glue[delta.index]
            return before + encode(parts.content) + after if parts.content else b""
        said = b"".join(
            self._full(delta, part, first=number == 0)
            for number, part in enumerate(self._spoken(delta, parts, parser.called - len(parts.calls)))
        )
        return said if delta.finish_reason is None else said + self._finish(delta, last=last)

    def _spoken(self, delta: Delta, parts: ParsedOutput, number: int) -> list[ChatDelta]:
        """Split parsed output into chat deltas. `number`: tool calls sent before these."""
        said = []
        if parts.reasoning and self._chat.parsing.includes_reasoning:
            said.append(ChatDelta(reasoning_content=parts.reasoning, reasoning=parts.reasoning))
        if parts.content:
            said.append(ChatDelta(content=parts.content))
        for index, call in enumerate(parts.calls, number):
            id_ = call_id(self._base.id, delta.index, index)
            calls = (
                _custom(index, id_, call)
                if call.name in self._chat.parsing.custom
                else _function(index, id_, call)
            )
            said += [ChatDelta(tool_calls=[each]) for each in calls]
        silent = not said and not self._plain and (delta.entries or delta.token_ids)
        return [ChatDelta()] if silent else said

    def _finish(self, delta: Delta, *, last: bool) -> bytes:
        reason = delta.finish_reason
        if self._parsers and reason is not None:
            reason = final_reason(reason, self._parsers[delta.index])
        choice = ChatChunkChoice(index=delta.index, delta=ChatDelta(), finish_reason=reason)
        chunk = self._chunk(choice)
        if last and not self.with_usage:
            self._chat.add_extras(self._opened, chunk)
        return data_event(chunk)

    def _full(self, delta: Delta, said: ChatDelta, *, first: bool = True) -> bytes:
        """Encode one chunk with all fields. Fields of the whole step come with its `first` chunk."""
        choice = ChatChunkChoice(index=delta.index, delta=said)
        if first and self._chat.wants_logprobs:
            choice.logprobs = build_logprobs(self._chat, delta.entries)
        if first and self._chat.body.return_token_ids:
            choice.token_ids = delta.token_ids
        return data_event(self._chunk(choice))

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        chunk = msgspec.structs.replace(self._base, choices=[choice])
        if self._running_usage:
            chunk.usage = CompletionUsage.of(self._opened.usage_now())
        return chunk

    def _glued(self, index: int) -> tuple[bytes, bytes]:
        choice = ChatChunkChoice(index=index, delta=ChatDelta(content=TEXT_MARK))
        return split_at_text(data_event(self._chunk(choice)))


def _function(index: int, id_: str, call: ParsedToolCall) -> tuple[ToolCallDelta, ToolCallDelta]:
    named = FunctionDelta(name=call.name, arguments="")
    rest = FunctionDelta(arguments=call.arguments)
    return (
        ToolCallDelta(index=index, id=id_, type="function", function=named),
        ToolCallDelta(index=index, function=rest),
    )


def _custom(index: int, id_: str, call: ParsedToolCall) -> tuple[ToolCallDelta, ToolCallDelta]:
    named = CustomDelta(name=call.name, input="")
    rest = CustomDelta(input=input_of(call))
    return (
        ToolCallDelta(index=index, id=id_, type="custom", custom=named),
        ToolCallDelta(index=index, custom=rest),
    )
