"""Preparation of an Ollama request: a checked chat or completion, and its `keep_alive`."""

import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from ...control.controller import DaemonController
from ...engines.admission import model_not_found
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.generation import Generation
from ...security.security import Identity
from ..openai.chat import ChatCall, prepare_translated, prepare_translated_completion
from ..openai.chat_messages import PLAIN, ParserOptions
from ..openai.completions import CompletionCall
from ..openai.request_context import RequestContext
from ..openai.request_types import NoEffect
from ..openai.sampling import invalid
from ..openai.unsupported import refuse_unsupported, unknown_fields
from .request_types import (
    AliasParameters,
    ChatRequest,
    CreateRequest,
    GenerateRequest,
    OllamaGenerateFields,
    OllamaMessage,
    OllamaOptions,
    normalize_name,
)

_SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
NAMES = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "top_k": "options.top_k",
    "reasoning_effort": "think",
    **{name: f"options.{name}" for name in _SAME},
}
"""Ollama's fields by those of the chat."""
_EFFORTS = {"max": "xhigh"}
"""Levels that chat templates know under another name."""
_OF_CHATS = {"chat_template_kwargs", "reasoning_effort", "include_reasoning", "logprobs", "top_logprobs"}


def chat_fields(request: ChatRequest) -> dict[str, Any]:
    body = _common(request)
    body["messages"] = _messages(request.messages or [])
    if request.tools:
        body["tools"] = msgspec.to_builtins(request.tools)
    return body


def generate_fields(request: GenerateRequest) -> dict[str, Any]:
    body = _common(request)
    system = [{"role": "system", "content": request.system}] if request.system else []
    body["messages"] = [
        *system,
        {"role": "user", "content": with_images(request.prompt or "", request.images)},
    ]
    return body


def raw_fields(request: GenerateRequest) -> dict[str, Any]:
    """Build a completion: the prompt as it is, or fill-in-the-middle before a suffix."""
    body = {name: value for name, value in _common(request).items() if name not in _OF_CHATS}
    body["prompt"] = request.prompt or ""
    if request.suffix:
        body["suffix"] = request.suffix
    return body


def _common(request: OllamaGenerateFields) -> dict[str, Any]:
    body: dict[str, Any] = {"model": normalize_name(request.model)}
    options = request.options
    if options is not None:
        given = {name: getattr(options, name) for name in _SAME}
        given["top_k"] = options.top_k or None
        given["repetition_penalty"] = options.repeat_penalty
        given["max_tokens"] = options.num_predict if (options.num_predict or 0) > 0 else None
        body |= {name: value for name, value in given.items() if value is not None}
    if (asked := request.format) not in (None, ""):
        body["response_format"] = _format(asked)
    if request.think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": request.think is not False}
        body["include_reasoning"] = request.think is not False
        if isinstance(request.think, str):
            effort = _EFFORTS.get(request.think, request.think)
            body["chat_template_kwargs"]["reasoning_effort"] = body["reasoning_effort"] = effort
    if request.logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return body


def _format(asked: Any) -> dict[str, Any]:
    if asked == "json":
        return {"type": "json_object"}
    if isinstance(asked, str):
        raise ApiError(
            400,
            "Invalid value for 'format': it is 'json' or a JSON schema.",
            code="invalid_value",
            param="format",
        )
    return {"type": "json_schema", "json_schema": {"schema": asked}}


def with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return the content of a message: images precede its text."""
    if not images:
        return text
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": each if "," in each[:64] else f"data:;base64,{each}"}}
        for each in images
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert messages. Ollama's calls have no ids, and some templates want them: results are matched to
    calls in order.
    """
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    calls = 0
    for message in messages:
        plain: dict[str, Any] = {
            "role": message.role,
            "content": with_images(message.content, message.images),
        }
        if message.thinking is not None:
            plain["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            id_, calls = f"call{calls:05}", calls + 1
            waiting.append(id_)
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            plain.setdefault("tool_calls", []).append({"id": id_, "type": "function", "function": function})
        if message.role == "tool":
            if message.tool_name is not None:
                plain["name"] = message.tool_name
            if waiting:
                plain["tool_call_id"] = waiting.pop(0)
        made.append(plain)
    return made


_WITHOUT_EFFECT = [name for name, hint in OllamaOptions.__annotations__.items() if hint is NoEffect]

_REASONS = {
    "num_ctx": ": the context window is set at load",
    "repeat_last_n": ": penalties count the whole context",
}
_WHOLE_CONTEXT = ("repeat_last_n", -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaCall:
    prepared: ChatCall | CompletionCall
    parsing: ParserOptions
    has_logprobs: bool

    @property
    def generation(self) -> Generation:
        return self.prepared.generation


async def prepare_ollama(call: RequestContext, data: ChatRequest | GenerateRequest) -> OllamaCall:
    """Check a request and build its chat or completion. Raises ApiError for every error that can be found
    before the engine has the request.
    """
    refuse_unsupported(data)
    if data.options is not None:
        refuse_unsupported(data.options, "options.")
    if data.top_logprobs is not None and not data.logprobs:
        raise invalid("top_logprobs", "it is only allowed when 'logprobs' is true")
    warnings = find_warnings(call, data)
    if isinstance(data, GenerateRequest) and (data.raw or data.suffix):
        return await _prepare_raw(call, data, warnings)
    if isinstance(data, GenerateRequest):
        plain, names = generate_fields(data), NAMES | {"messages": "prompt"}
    else:
        plain, names = chat_fields(data), NAMES
    chat = await prepare_translated(call, plain, warnings, "ollama", names)
    generation = replace(chat.generation, max_tokens_clamped=True, stream=data.stream is not False)
    return OllamaCall(
        prepared=replace(chat, generation=generation),
        parsing=chat.parsing,
        has_logprobs=bool(data.logprobs),
    )


async def _prepare_raw(call: RequestContext, data: GenerateRequest, warnings: list[str]) -> OllamaCall:
    if data.images:
        raise invalid("images", "a prompt without a template has no places for images")
    raw = await prepare_translated_completion(call, raw_fields(data), NAMES)
    params = raw.generation.params
    if data.logprobs:
        params = replace(params, logprobs=data.top_logprobs or 0)
    if data.system:
        warnings.append("'system' has no effect: a prompt without a template cannot hold one.")
    generation = replace(
        raw.generation, params=params, max_tokens_clamped=True, stream=data.stream is not False
    )
    return OllamaCall(
        prepared=replace(raw, generation=generation, warnings=warnings + raw.warnings),
        parsing=PLAIN,
        has_logprobs=bool(data.logprobs),
    )


def find_warnings(call: RequestContext, data: OllamaGenerateFields) -> list[str]:
    """Return warnings for fields that are ignored or only partly supported."""
    found = unknown_fields(type(data), call.plain)
    options = data.options or OllamaOptions()
    found += unknown_fields(OllamaOptions, call.plain.get("options") or {}, "options.")
    for name in _WITHOUT_EFFECT:
        if getattr(options, name) is not None and (name, getattr(options, name)) != _WHOLE_CONTEXT:
            found.append(f"'options.{name}' has no effect{_REASONS.get(name, '')}.")
    if data.truncate:
        found.append("'truncate' has no effect: prompts are never cut.")
    if data.shift:
        found.append("'shift' has no effect: an answer ends with the context.")
    return found


_ALIAS_PARAMETERS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
    "repeat_penalty": "repetition_penalty",
    "num_ctx": "ctx",
}
"""Parameters of an alias by Ollama's names."""


def alias_parameters(call: RequestContext, data: CreateRequest) -> tuple[dict[str, Any], list[str]]:
    """Return the alias's parameters, and warnings for those without effect. Raises ApiError 400."""
    warnings = unknown_fields(CreateRequest, call.plain)
    if data.parameters is None:
        return {}, warnings
    refuse_unsupported(data.parameters, "parameters.")
    warnings += unknown_fields(AliasParameters, call.plain["parameters"], "parameters.")
    given = {name: getattr(data.parameters, name) for name in AliasParameters.__struct_fields__}
    found = {_ALIAS_PARAMETERS[name]: value for name, value in given.items() if name in _ALIAS_PARAMETERS}
    warnings += [
        f"'parameters.{name}' has no effect."
        for name in _WITHOUT_EFFECT
        if given[name] is not None and name not in _ALIAS_PARAMETERS
    ]
    return {name: value for name, value in found.items() if value is not None}, warnings


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})"
_PIECE = re.compile(rf"({_NUMBER})({'|'.join(_UNITS)})")
_DURATION = re.compile(rf"[+-]?(?:{_NUMBER}|(?:{_PIECE.pattern})+)")
NOT_DECIDED = (
    "'keep_alive' has no effect: this model was loaded by the owner. It takes effect with the scope admin."
)


def seconds_of(value: float | str | None) -> float | None:
    """Parse idle seconds, infinite for negative values; None where the field is absent. Raises
    ApiError 400.
    """
    if value is None:
        return None
    seconds = _parse_duration(value.strip()) if isinstance(value, str) else float(value)
    return math.inf if seconds < 0 else seconds


def _parse_duration(text: str) -> float:
    """Parse Go's durations (`1h30m`) and plain seconds."""
    if not _DURATION.fullmatch(text):
        raise ApiError(
            400,
            "Invalid value for 'keep_alive': it is seconds, or a duration such as '5m' or '1h30m'.",
            code="invalid_value",
            param="keep_alive",
        )
    sign = -1 if text.startswith("-") else 1
    pieces = _PIECE.findall(text)
    if not pieces:
        return float(text)
    return sign * sum(float(number) * _UNITS[unit] for number, unit in pieces)


def may_decide(caller: Identity, model: LoadedModel) -> bool:
    """Return True if the caller may change the idle time: requests may unload a model that a request loaded;
    all else is the owner's.
    """
    return caller.may("admin") or (model.on_request and not model.pinned)


def keep_for(control: DaemonController, caller: Identity, name: str, seconds: float) -> list[str]:
    """Set the idle time. Returns warnings where the caller may not decide it."""
    model = control.services.engines.find(name)
    if model is None:  # gone meanwhile
        return []
    if not may_decide(caller, model):
        return [NOT_DECIDED]
    control.residency.set_ttl(model, None if math.isinf(seconds) else seconds)
    return []


async def load_or_unload(
    control: DaemonController, call: RequestContext, name: str, keep_alive: float | str | None
) -> tuple[Literal["load", "unload"], list[str]]:
    """Handle a request without a prompt: load the model, or unload it where `keep_alive` is 0.

    Returns what was done, and warnings.
    """
    seconds = seconds_of(keep_alive)
    if seconds == 0:
        call.caller.require_model(name)
        await unload(control, call.caller, name)
        return "unload", []
    model = await call.find_model(name)
    warnings = keep_for(control, call.caller, model.name, seconds) if seconds is not None else []
    return "load", warnings


async def unload(control: DaemonController, caller: Identity, name: str) -> None:
    """Unload a model once no request uses it. Ignores a model that is on disk only.

    Raises ApiError 403, 404, 409.
    """
    model = control.services.engines.find(control.residency.real_name(name))
    if model is None:
        if not await control.places([name]):
            raise model_not_found(name)
        return
    if not may_decide(caller, model):
        message = (
            f"{model.name} was loaded by the box's owner: unloading it needs a key with the scope admin."
        )
        raise ApiError(403, message, "insufficient_scope", None, "permission_error")
    await control.residency.release(model)
