"""POST /v1/chat/completions: build the generation, then turn deltas into an answer or into chunks.

Requests of other dialects come here as chats and completions, with errors and warnings that name the fields
of that dialect.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from llmbox.engine.ipc.messages import PreparedImage, TokenLogprobs
from llmbox.engine.model_config.vision.config import NO_TOWER
from llmbox.engine.sampling_params import ThinkingParams

from ...config.settings import LimitSettings
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.gateway import Gateway, check_generates
from ...gateway.generation import Delta, Generation, TokenEntry
from ...gateway.open_request import OpenRequest
from ...images.reader import DecodedImage, ImageLease, place_images
from ...text.chat_template import Chat, RenderedChat
from ...text.output.call_parsers import ParsedToolCall
from ...text.output.output_parser import OutputParser, ParsedOutput
from ...util.threads import off_loop
from ..server.request import convert
from .chat_messages import ParserOptions, build_chat, call_id, final_reason, input_of, reasoning_tokens
from .completions import CompletionCall, prepare_completion
from .request_context import CheckedRequest, Deadlines, RequestContext, check_prompts, truncate_prompts
from .request_types import ChatCompletionRequest, CompletionRequest, Message
from .response_types import (
    CalledCustom,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    CompletionUsage,
    PromptLogprobs,
)
from .sampling import (
    Logprobs,
    budget_warnings,
    chat_logprobs,
    check_alternatives,
    check_common,
    check_max_tokens,
    describe_thinking,
    invalid,
    prompt_logprobs,
    public_id,
    sampling_params,
    stop_strings,
    thinking_budget,
    with_effort,
)
from .stored import NOT_STORED, Store
from .structured_output import (
    StructuredAnswer,
    add_grammar,
    find_answer_constraint,
    find_call_constraint,
    unknown_inside,
)
from .unsupported import refuse_unsupported, unknown_fields


@dataclass(frozen=True, slots=True)
class ChatCall(CheckedRequest[ChatCompletionRequest]):
    parsing: ParserOptions
    echo: str = ""
    """Text that each answer begins with."""

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.logprobs)


@dataclass(frozen=True, slots=True)
class _ChatInputs:
    """Parts of a chat request that need no model."""

    chat: Chat
    answer: StructuredAnswer | None
    stop: tuple[str, ...]
    max_tokens: int | None
    max_tokens_param: str

    @classmethod
    def of(cls, body: ChatCompletionRequest, limits: LimitSettings) -> "_ChatInputs":
        """Check all that can be checked without a model. Raises ApiError."""
        refuse_unsupported(body)
        check_common(body, limits)
        check_alternatives("top_logprobs", body.top_logprobs, 20)
        max_tokens, max_tokens_param = _max_tokens(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "it is only allowed when 'logprobs' is true")
        stop = stop_strings(body, limits)
        answer = find_answer_constraint(body, limits)
        return cls(build_chat(body, limits), answer, stop, max_tokens, max_tokens_param)


async def prepare_chat(
    call: RequestContext, body: ChatCompletionRequest, prefix: str = "chatcmpl"
) -> ChatCall:
    """Check a chat request and build its generation. Raises ApiError for every error that can be found before
    the engine has the request.

    `prefix`: of the answer's id.
    """
    inputs = _ChatInputs.of(body, call.limits)
    deadlines = Deadlines.of(call, body)
    model = await call.find_model(body.model, deadlines)
    check_generates(model)
    chat, warnings = with_effort(inputs.chat, body.reasoning_effort, model.text.chat_template)
    logprobs = Logprobs((body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)
    reservation = call.reserve(model, body.n or 1)
    params = await sampling_params(body, model, call.limits, logprobs)
    lease, decoded = await read_images(call.gateway, model, chat)
    rendered = await model.text.render_chat(call.gateway.templates, chat)
    parsing = ParserOptions.of(body, model.text, chat, rendered)
    calls = find_call_constraint(body, chat.tools, parsing.tools, call.limits)
    thinking = await _thinking(body, parsing, model)
    warnings += budget_warnings(body.thinking_token_budget, thinking)
    params = replace(params, thinking=thinking)
    params, unchecked = await add_grammar(params, inputs.answer, calls, model, call.gateway, call.limits)
    prompts, images, cut = await _prompts(body, model, rendered, decoded, inputs.max_tokens)
    generation = Generation(
        id=public_id(prefix, body.request_id, call.exchange, call.gateway),
        model=model,
        prompts=prompts,
        images=images,
        image_lease=lease,
        params=params,
        max_tokens=inputs.max_tokens,
        stop=inputs.stop,
        call_mark=parsing.tools.call_mark if parsing.tools and stops_loops(body) else None,
        skip_special=body.skip_special_tokens is not False and not parsing.needs_special(model.text),
        **call.generation_fields(body, deadlines, reservation),
        max_tokens_param=inputs.max_tokens_param,
    )
    echo = _echo(chat) if body.echo else ""
    return ChatCall(body, generation, [*_warnings(call, body), *warnings, *unchecked, *cut], parsing, echo)


async def _prompts(
    body: ChatCompletionRequest,
    model: LoadedModel,
    rendered: RenderedChat,
    decoded: Sequence[DecodedImage],
    max_tokens: int | None,
) -> tuple[list[list[int]], list[PreparedImage], list[str]]:
    """Return the prompt's ids, its images and warnings. Raises ApiError where it does not fit."""
    prompt, images = await encode_chat(model, rendered, decoded)
    check_prompts([prompt], "messages", model)
    if images and body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "a prompt with images is not truncated")
    prompts, cut = truncate_prompts([prompt], body.truncate_prompt_tokens, max_tokens, model)
    return prompts, images, cut


async def _thinking(
    body: ChatCompletionRequest, parsing: ParserOptions, model: LoadedModel
) -> ThinkingParams | None:
    text, size = model.text, model.info.vocab_size
    budget = thinking_budget(body.thinking_token_budget, body.reasoning_effort, text.chat_template)
    stop_loops = stops_loops(body)
    return await text.off_loop(
        0,
        lambda: describe_thinking(
            parsing.format, parsing.thinking, text, size, budget=budget, stop_loops=stop_loops
        ),
    )


def stops_loops(body: ChatCompletionRequest) -> bool:
    return body.thinking_loop_detection is not False


def _echo(chat: Chat) -> str:
    """Return the text of the last message where the answer has the same role."""
    last = chat.messages[-1]
    return str(last["content"] or "") if last["role"] == "assistant" else ""


async def chat_ids(gateway: Gateway, model: LoadedModel, chat: Chat) -> list[int]:
    _, decoded = await read_images(gateway, model, chat)
    ids, _ = await encode_chat(model, await model.text.render_chat(gateway.templates, chat), decoded)
    return ids


async def read_images(
    gateway: Gateway, model: LoadedModel, chat: Chat
) -> tuple[ImageLease | None, list[DecodedImage]]:
    """Decode the images of a conversation, with the lease of their memory. Raises ApiError: 400, also for a
    model that reads none, 429 and 503.
    """
    if not chat.images:
        return None, []
    info, vision = model.info, model.text.vision
    if info.image_problem or vision is None:
        raise ApiError(
            400,
            f"{model.name} cannot read images: {info.image_problem or NO_TOWER}.",
            code="images_not_supported",
            param=chat.images[0].param,
        )
    lease = ImageLease(gateway.images)
    decoded = await gateway.images.read(
        chat.images, vision, gateway.limits, lease, may_fetch=gateway.fetches_images
    )
    return lease, decoded


async def encode_chat(
    model: LoadedModel, rendered: RenderedChat, decoded: Sequence[DecodedImage]
) -> tuple[list[int], list[PreparedImage]]:
    """Return the ids of a prompt, and its images with their places. Raises ApiError."""
    vision = model.text.vision
    if not decoded or vision is None:
        return await model.text.off_loop(len(rendered.marked), rendered.ids), []
    texts = [vision.number_text(number) + each.text for number, each in enumerate(decoded)]
    rendered = rendered.with_images(vision.placeholder, texts)
    ids = await model.text.off_loop(len(rendered.marked), rendered.ids)
    return ids, await off_loop(len(ids), lambda: place_images(ids, decoded, vision))


async def complete_chat(gateway: Gateway, chat: ChatCall, store: Store | None = None) -> ChatCompletion:
    with gateway.open(chat.generation) as opened:
        parts: list[list[Delta]] = [[] for _ in opened.sequences]
        async for delta in opened.deltas():
            parts[delta.index].append(delta)
    answer = await whole_answer(opened, chat, parts)
    if store is not None and not store_answer(store, opened, chat, answer):
        answer.warnings = [*chat.warnings_at_end(opened), NOT_STORED]
    return answer


async def whole_answer(opened: OpenRequest, chat: ChatCall, parts: list[list[Delta]]) -> ChatCompletion:
    """Build the complete answer. `parts`: all deltas of each choice."""
    usage = opened.usage_now()
    size = usage.output_tokens if chat.wants_logprobs else 0
    size += usage.prompt_tokens if chat.body.prompt_logprobs is not None else 0
    return await off_loop(size, lambda: _answer(opened, chat, parts))


def store_answer(store: Store, opened: OpenRequest, chat: ChatCall, answer: ChatCompletion) -> bool:
    """Store the answer. Returns False where there is no room."""
    tokens = opened.usage.output_tokens
    return store.put(answer, opened.timeline.created, tokens, logprobs=chat.wants_logprobs)


def _answer(opened: OpenRequest, chat: ChatCall, parts: list[list[Delta]]) -> ChatCompletion:
    body, prompt = chat.body, chat.generation.prompts[0]
    parsers = [chat.parsing.parser() for _ in parts]
    return ChatCompletion(
        **chat.header(opened),
        choices=[_choice(index, deltas, chat, parsers[index]) for index, deltas in enumerate(parts)],
        usage=CompletionUsage.of(opened.usage, reasoning_tokens(opened, parsers)),
        prompt_token_ids=prompt if body.return_token_ids else UNSET,
        prompt_logprobs=build_prompt_logprobs(parts[0], chat),
        **chat.extras(opened),
    )


def _choice(index: int, deltas: list[Delta], chat: ChatCall, parser: OutputParser) -> ChatChoice:
    entries = [entry for delta in deltas for entry in delta.entries]
    reason = deltas[-1].finish_reason
    assert reason is not None
    parts = parser.parse_whole("".join(delta.text for delta in deltas), is_cut=reason == "length")
    return ChatChoice(
        index=index,
        message=_message(index, parts, chat),
        logprobs=build_logprobs(chat, entries) if chat.wants_logprobs else None,
        finish_reason=final_reason(reason, parser),
        token_ids=[i for delta in deltas for i in delta.token_ids] if chat.body.return_token_ids else UNSET,
    )


def _message(index: int, parts: ParsedOutput, chat: ChatCall) -> ChatMessage:
    content = chat.echo + parts.content
    message = ChatMessage(content=None if parts.calls and not content else content)
    if parts.calls:
        message.tool_calls = [
            _called(call_id(chat.generation.id, index, number), call, chat.parsing)
            for number, call in enumerate(parts.calls)
        ]
    if parts.reasoning and chat.parsing.includes_reasoning:
        message.reasoning_content = message.reasoning = parts.reasoning
    return message


def _called(id_: str, call: ParsedToolCall, parsing: ParserOptions) -> ChatToolCall:
    if call.name in parsing.custom:
        return ChatToolCall(id=id_, type="custom", custom=CalledCustom(call.name, input_of(call)))
    return ChatToolCall(id=id_, function=CalledFunction(call.name, call.arguments))


def build_logprobs(chat: ChatCall, entries: Sequence[TokenEntry]) -> ChatLogprobs:
    tokens = chat.generation.model.text.tokens
    return chat_logprobs(entries, tokens, as_ids=chat.body.return_tokens_as_token_ids)


def build_prompt_logprobs(deltas: Sequence[Delta], chat: ChatCall) -> PromptLogprobs | UnsetType:
    top = chat.body.prompt_logprobs
    if top is None:
        return UNSET
    entries: list[TokenLogprobs | None] = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs), [])
    return prompt_logprobs(entries, chat.generation.model.text.tokens, chat.generation.prompts[0], top)


def _max_tokens(body: ChatCompletionRequest) -> tuple[int | None, str]:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_completion_tokens", "it differs from 'max_tokens', which it replaces")
    name = "max_tokens" if new is None else "max_completion_tokens"
    wanted = old if new is None else new
    check_max_tokens(name, wanted, 1, body)
    return wanted, name


def _warnings(call: RequestContext, body: ChatCompletionRequest) -> list[str]:
    found = call.warnings(type(body))
    for message in call.plain["messages"]:
        found += unknown_fields(Message, message, "messages[].")
    for tool, plain in zip(body.tools or (), call.plain.get("tools") or (), strict=True):
        known = {name: value for name, value in plain.items() if name != "type"}
        found += unknown_fields(type(tool), known, "tools[].")
    found += unknown_inside(call.plain)
    options = body.stream_options
    if options is not None and options.include_obfuscation:
        found.append("'stream_options.include_obfuscation' has no effect.")
    return list(dict.fromkeys(found))


async def prepare_translated_completion(
    call: RequestContext, plain: dict[str, Any], names: Mapping[str, str]
) -> CompletionCall:
    """Prepare a raw prompt of another dialect. See `prepare_translated`. The request log has it as a
    completion.
    """
    body = msgspec.json.encode(plain)
    translated = replace(call, plain=plain, body=body, endpoint="/v1/completions")
    converted = convert(plain, CompletionRequest)
    try:
        return await prepare_completion(translated, converted)
    except ApiError as error:
        _rename(error, names)
        raise


async def prepare_translated(
    call: RequestContext, plain: dict[str, Any], warnings: list[str], prefix: str, names: Mapping[str, str]
) -> ChatCall:
    """Prepare a chat of another dialect. If content is kept, `plain` is what is kept. `warnings` come from
    that dialect. `names` maps the chat's fields to its own.
    """
    translated = replace(call, plain=plain, body=msgspec.json.encode(plain))
    try:
        chat = await prepare_chat(translated, convert(plain, ChatCompletionRequest), prefix=prefix)
    except ApiError as error:
        _rename(error, names)
        raise
    blamed = chat.generation.prompt_param, chat.generation.max_tokens_param
    prompt_param, max_tokens_param = (names.get(name, name) for name in blamed)
    generation = replace(chat.generation, prompt_param=prompt_param, max_tokens_param=max_tokens_param)
    found = [_renamed(each, names) for each in chat.warnings]
    return replace(chat, generation=generation, warnings=[*warnings, *found])


def _renamed(warning: str, names: Mapping[str, str]) -> str:
    """Name the field that the caller sent in a warning."""
    field = re.match(r"'(\w+)'", warning)
    if field is None or field[1] not in names:
        return warning
    return f"'{names[field[1]]}'{warning[field.end() :]}"


def _rename(error: ApiError, names: Mapping[str, str]) -> None:
    """Name the field that the caller sent in the error. A place inside it (`tools[0].name`) stays
    as it is.
    """
    param = error.param or ""
    field = re.match(r"\w*", param)
    name = names.get(field[0]) if field else None
    if field is not None and name is not None:
        error.message = error.message.replace(f"'{param}'", f"'{name}{param[field.end() :]}'")
        error.param = name + param[field.end() :]
