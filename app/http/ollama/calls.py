"""Preparation of an Ollama request: a checked chat or completion."""

from dataclasses import dataclass, replace

from ...gateway.generation import Generation
from ..openai.chat import ChatCall
from ..openai.chat_parts import Parsing
from ..openai.completions import CompletionCall
from ..openai.dialect import prepare_translated, prepare_translated_completion
from ..openai.request_context import RequestContext
from ..openai.request_types import NoEffect
from ..openai.sampling import invalid
from ..openai.unsupported import refuse_unsupported, unknown_fields
from .request_types import ChatRequest, Common, GenerateRequest, Options
from .translate import NAMES, chat_fields, generate_fields, raw_fields

_RAW = Parsing(
    thinking="no", tools=None, names=frozenset(), custom=frozenset(), most_calls=None, tells_thoughts=False
)
_WITHOUT_EFFECT = [name for name, hint in Options.__annotations__.items() if hint is NoEffect]

_REASONS = {
    "num_ctx": ": the window is that of the load",
    "repeat_last_n": ": penalties are of the whole context",
}
_WHOLE_CONTEXT = ("repeat_last_n", -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaCall:
    prepared: ChatCall | CompletionCall
    parsing: Parsing
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
    raw = await prepare_translated_completion(call, raw_fields(data), NAMES)
    params = raw.generation.params
    if data.logprobs:
        params = replace(params, logprobs=data.top_logprobs or 0)
    if data.system:
        warnings.append("'system' has no effect: a prompt without a template has no place for it.")
    generation = replace(
        raw.generation, params=params, max_tokens_clamped=True, stream=data.stream is not False
    )
    return OllamaCall(
        prepared=replace(raw, generation=generation, warnings=warnings + raw.warnings),
        parsing=_RAW,
        has_logprobs=bool(data.logprobs),
    )


def find_warnings(call: RequestContext, data: Common) -> list[str]:
    """Return warnings for fields that are ignored or only partly supported."""
    found = unknown_fields(type(data), call.plain)
    options = data.options or Options()
    found += unknown_fields(Options, call.plain.get("options") or {}, "options.")
    for name in _WITHOUT_EFFECT:
        if getattr(options, name) is not None and (name, getattr(options, name)) != _WHOLE_CONTEXT:
            found.append(f"'options.{name}' has no effect{_REASONS.get(name, '')}.")
    if data.truncate:
        found.append("'truncate' has no effect: prompts are never cut.")
    if data.shift:
        found.append("'shift' has no effect: an answer ends with the context.")
    return found
