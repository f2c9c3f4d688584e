"""POST /v1/chat/completions: request to generation, deltas to answer or chunks."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from llmbox.engine.messages import TokenLogprobs

from ...engines.loaded_model import LoadedModel
from ...gateway.gateway import Gateway
from ...gateway.generation import Delta, Generation
from ...gateway.open_request import OpenRequest
from ...text.chat_prompt import Chat
from ...text.off_loop import off_loop
from ..sse import data_event
from .context import Call, Heading
from .fields import ChatCompletionRequest, Message
from .logprobs import chat_logprobs, prompt_logprobs
from .messages import build_chat
from .prepared import Prepared
from .responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    CompletionUsage,
)
from .sampling import (
    Logprobs,
    check_common,
    check_max_tokens,
    invalid,
    public_id,
    sampling_params,
    stop_strings,
)
from .unsupported import refuse_unsupported, unknown_fields


class ChatCall(Prepared[ChatCompletionRequest]):
    __slots__ = ()

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.logprobs)


async def prepare_chat(call: Call, body: ChatCompletionRequest) -> ChatCall:
    """Raises ApiError for everything that can be known before the engine has it."""
    refuse_unsupported(body)
    check_common(body, call.limits)
    max_tokens, max_tokens_param = _max_tokens(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "it is only allowed when 'logprobs' is true")
    stop = stop_strings(body, call.limits)
    chat = build_chat(body, call.limits.messages)
    model = await call.find_model(body.model)
    logprobs = Logprobs((body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)
    params = sampling_params(body, model, call.limits, logprobs)
    generation = Generation(
        id=public_id("chatcmpl", body.request_id, call.exchange, call.gateway),
        endpoint=call.endpoint,
        model=model,
        prompts=[await chat_ids(call.gateway, model, chat)],
        params=params,
        max_tokens=max_tokens,
        n=body.n or 1,
        stop=stop,
        skip_special=body.skip_special_tokens is not False,
        seed_drawn=body.seed is None,
        priority=call.caller.priority(body.priority or 0),
        cache_salt=call.caller.cache_namespace(body.cache_salt or ""),
        key=call.caller.name,
        meter=call.caller.meter,
        allowed=call.allowed(),
        client=call.client,
        keep=call.keep(),
        stream=bool(body.stream),
        max_tokens_param=max_tokens_param,
    )
    return ChatCall(body, generation, _warnings(call, body))


async def chat_ids(gateway: Gateway, model: LoadedModel, chat: Chat) -> list[int]:
    rendered = await model.text.render_chat(gateway.templates, chat)
    return await off_loop(len(rendered.marked), rendered.ids)


async def complete_chat(gateway: Gateway, chat: ChatCall) -> ChatCompletion:
    with gateway.open(chat.generation) as opened:
        parts: list[list[Delta]] = [[] for _ in opened.sequences]
        async for delta in opened.deltas():
            parts[delta.index].append(delta)
    size = opened.usage.output_tokens if chat.wants_logprobs else 0
    size += opened.usage.prompt_tokens if chat.body.prompt_logprobs is not None else 0
    return await off_loop(size, lambda: _answer(opened, chat, parts))


def _answer(opened: OpenRequest, chat: ChatCall, parts: list[list[Delta]]) -> ChatCompletion:
    heading = _heading(opened, chat)
    body, prompt = chat.body, chat.generation.prompts[0]
    return ChatCompletion(
        id=heading.id,
        created=heading.created,
        model=heading.model,
        system_fingerprint=heading.system_fingerprint,
        choices=[_choice(index, deltas, chat) for index, deltas in enumerate(parts)],
        usage=CompletionUsage.of(opened.usage),
        prompt_token_ids=prompt if body.return_token_ids else UNSET,
        prompt_logprobs=_prompt_logprobs(parts[0], chat),
        **chat.extras(),
    )


async def stream_chat(gateway: Gateway, chat: ChatCall) -> AsyncGenerator[bytes, None]:
    """Framed events: role first, one finish chunk a choice, then usage where asked for."""
    with gateway.open(chat.generation) as opened:
        chunks = _Chunks(opened, chat)
        for index in range(len(opened.sequences)):
            yield chunks.first(index)
        unfinished = len(opened.sequences)
        async for delta in opened.deltas():
            unfinished -= delta.finish_reason is not None
            if event := chunks.event(delta, last=unfinished == 0):
                yield event
    if chunks.with_usage:
        yield chunks.usage()


class _Chunks:
    """Chunks of one stream. The common one (text and nothing else) is glued from parts encoded once."""

    def __init__(self, opened: OpenRequest, chat: ChatCall) -> None:
        self._opened = opened
        self._chat = chat
        heading = _heading(opened, chat)
        self.with_usage = chat.usage_at_end
        self._running_usage = chat.usage_in_chunks
        self._tokens = chat.generation.model.text.tokens
        self._base = ChatChunk(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            system_fingerprint=heading.system_fingerprint,
            choices=[],
            usage=None if self.with_usage else UNSET,
        )
        self._plain = not (chat.wants_logprobs or chat.body.return_token_ids or self._running_usage)
        self._glue = [self._glued(index) for index in range(len(opened.sequences))]

    def first(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content="", refusal=None)
        chunk = self._chunk(ChatChunkChoice(index=index, delta=delta))
        if self._chat.body.return_token_ids and index == 0:
            chunk.prompt_token_ids = self._chat.generation.prompts[0]
        return data_event(chunk)

    def event(self, delta: Delta, *, last: bool) -> bytes:
        """Empty where there is nothing to say yet."""
        if delta.finish_reason is None:
            if not delta.text and self._plain:
                return b""
            if self._plain:
                before, after = self._glue[delta.index]
                return before + msgspec.json.encode(delta.text) + after
            return self._full(delta)
        said = b""
        if delta.text or delta.entries or (delta.token_ids and not self._plain):
            said = self._full(delta)
        return said + self._finish(delta, last=last)

    def usage(self) -> bytes:
        self._base.choices = []
        self._base.usage = CompletionUsage.of(self._opened.usage)
        for name, value in self._chat.extras().items():
            setattr(self._base, name, value)
        return data_event(self._base)

    def _finish(self, delta: Delta, *, last: bool) -> bytes:
        choice = ChatChunkChoice(index=delta.index, delta=ChatDelta(), finish_reason=delta.finish_reason)
        chunk = self._chunk(choice)
        if last and not self.with_usage:
            for name, value in self._chat.extras().items():
                setattr(chunk, name, value)
        return data_event(chunk)

    def _full(self, delta: Delta) -> bytes:
        choice = ChatChunkChoice(index=delta.index, delta=ChatDelta(content=delta.text))
        if self._chat.wants_logprobs:
            choice.logprobs = chat_logprobs(delta.entries, self._tokens)
        if self._chat.body.return_token_ids:
            choice.token_ids = delta.token_ids
        return data_event(self._chunk(choice))

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        chunk = msgspec.structs.replace(self._base, choices=[choice])
        if self._running_usage:
            chunk.usage = CompletionUsage.of(self._opened.usage_now())
        return chunk

    def _glued(self, index: int) -> tuple[bytes, bytes]:
        mark = "\x00"
        event = data_event(self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=mark))))
        before, _, after = event.partition(msgspec.json.encode(mark))
        return before, after


def _choice(index: int, deltas: list[Delta], chat: ChatCall) -> ChatChoice:
    entries = [entry for delta in deltas for entry in delta.entries]
    reason = deltas[-1].finish_reason
    assert reason is not None
    return ChatChoice(
        index=index,
        message=ChatMessage(content="".join(delta.text for delta in deltas)),
        logprobs=chat_logprobs(entries, chat.generation.model.text.tokens) if chat.wants_logprobs else None,
        finish_reason=reason,
        token_ids=[i for delta in deltas for i in delta.token_ids] if chat.body.return_token_ids else UNSET,
    )


def _prompt_logprobs(deltas: Sequence[Delta], chat: ChatCall) -> Any:
    top = chat.body.prompt_logprobs
    if top is None:
        return UNSET
    entries: list[TokenLogprobs | None] = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs), [])
    return prompt_logprobs(entries, chat.generation.model.text.tokens, chat.generation.prompts[0], top)


def _heading(opened: OpenRequest, chat: ChatCall) -> Heading:
    return Heading.of(chat.generation.id, opened.created, chat.body.model, chat.generation.model)


def _max_tokens(body: ChatCompletionRequest) -> tuple[int | None, str]:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "it differs from 'max_completion_tokens', which replaces it")
    name = "max_tokens" if new is None else "max_completion_tokens"
    wanted = old if new is None else new
    check_max_tokens(name, wanted, 1, body)
    return wanted, name


def _warnings(call: Call, body: ChatCompletionRequest) -> list[str]:
    found = call.warnings(type(body))
    for message in call.plain["messages"]:
        found += unknown_fields(Message, message, "messages[].")
    options = body.stream_options
    if options is not None and options.include_obfuscation:
        found.append("'stream_options.include_obfuscation' has no effect.")
    return list(dict.fromkeys(found))
