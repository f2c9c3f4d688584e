"""Sampling and reasoning fields of a request as the engine's `SamplingParams`: defaults filled in, checked
against the model.
"""

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from llmbox.engine.ipc.messages import TokenLogprobs
from llmbox.engine.sampling_params import SamplingParams, ThinkingParams

from ...config.settings import LimitSettings
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...gateway.generation import TokenEntry, draw_seed
from ...text.chat_template import Chat
from ...text.output.format_table import recognize_format
from ...text.output.output_formats import HARMONY_ANSWER, HARMONY_TURN, OutputFormat, Thinking
from ...text.tokenizer.detokenizer import TokenBytes
from ...text.tokenizer.tokenizer import TextModel
from .request_types import Effort, GenerationFields
from .response_types import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TokenLogprob,
    TopLogprob,
)

_MOST_BAD_WORDS = 1024


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Number of alternatives: for generated tokens, and for prompt tokens."""

    output: int | None
    prompt: int | None


async def sampling_params(
    fields: GenerationFields, model: LoadedModel, limits: LimitSettings, logprobs: Logprobs
) -> SamplingParams:
    """Build the engine's parameters. Raises ApiError 400. The gateway fills in `max_tokens`."""
    vocabulary = model.info.vocab_size
    stop_ids = _check_ids("stop_token_ids", fields.stop_token_ids or (), vocabulary)
    if not fields.ignore_eos:
        stop_ids += tuple(i for i in model.text.eos_token_ids if i < vocabulary and i not in stop_ids)
    allowed = None
    if fields.allowed_token_ids is not None:
        allowed = _check_ids("allowed_token_ids", fields.allowed_token_ids, vocabulary)
        _check_allowed(allowed, fields.min_tokens or 0, stop_ids)
    defaults = model.text.generation_defaults
    return SamplingParams(
        max_tokens=0,
        seed=draw_seed() if fields.seed is None else fields.seed,
        temperature=_first(fields.temperature, defaults.get("temperature"), 1.0),
        top_k=_top_k(fields, int(defaults.get("top_k", 0)), vocabulary),
        top_p=_first(fields.top_p, defaults.get("top_p"), 1.0),
        min_p=_first(fields.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(fields.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        presence_penalty=_first(fields.presence_penalty, 0.0),
        frequency_penalty=_first(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields, vocabulary, limits.logit_bias),
        bad_words=await _bad_words(fields.bad_words or (), model),
        allowed_token_ids=allowed,
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=stop_ids,
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.prompt,
    )


def check_common(fields: GenerationFields, limits: LimitSettings) -> None:
    """Check the fields without a model. Raises ApiError 400."""
    if (fields.n or 1) > limits.choices:
        raise invalid("n", f"at most {limits.choices} choices are allowed")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "it is only allowed when 'stream' is true")
    check_alternatives("prompt_logprobs", fields.prompt_logprobs, 20)
    if fields.top_k == 0:
        raise invalid("top_k", "it must be -1 (all tokens) or at least 1")
    if fields.metadata is not None and len(fields.metadata) > 16:
        raise invalid("metadata", "at most 16 entries are allowed")


def check_alternatives(name: str, wanted: int | None, most: int) -> None:
    if wanted == -1:
        raise invalid(
            name,
            f"the whole vocabulary is too large to send; ask for at most {most} alternatives",
        )


def stop_strings(fields: GenerationFields, limits: LimitSettings) -> tuple[str, ...]:
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > limits.stop_strings:
        raise invalid("stop", f"at most {limits.stop_strings} stop strings are allowed")
    for stop in stops:
        if not stop:
            raise invalid("stop", "a stop string must not be empty")
        if len(stop.encode()) > limits.stop_string_bytes:
            raise invalid("stop", f"a stop string has at most {limits.stop_string_bytes} bytes")
    return tuple(dict.fromkeys(stops))


def check_max_tokens(name: str, wanted: int | None, minimum: int, fields: GenerationFields) -> None:
    if wanted is None:
        return
    if wanted < minimum:
        raise invalid(name, f"it must be at least {minimum}")
    if (fields.min_tokens or 0) > wanted:
        raise invalid("min_tokens", f"it must not be greater than '{name}' ({wanted})")


def public_id(prefix: str, asked: str | None, exchange: str, gateway: Gateway) -> str:
    """Return the response's id: from `request_id`, else from `x-request-id`, so that logs of both sides
    match.
    """
    start = prefix if prefix.endswith("_") else f"{prefix}-"
    if asked is not None:
        return start + asked
    made = start + exchange.removeprefix("req_")
    return start + secrets.token_hex(16) if gateway.is_open(made) else made


def invalid(param: str, why: str) -> ApiError:
    return ApiError(400, f"Invalid value for '{param}': {why}.", code="invalid_value", param=param)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _top_k(fields: GenerationFields, default: int, vocabulary: int) -> int:
    if fields.top_k is None:
        return min(default, vocabulary)
    if fields.top_k > vocabulary:
        raise invalid("top_k", f"the vocabulary has {vocabulary} tokens")
    return max(fields.top_k, 0)


def _logit_bias(fields: GenerationFields, vocabulary: int, most: int) -> dict[int, float]:
    bias = {int(key): value for key, value in (fields.logit_bias or {}).items()}
    if len(bias) > most:
        raise invalid("logit_bias", f"at most {most} entries are allowed")
    _check_ids("logit_bias", bias, vocabulary)
    return bias


def _check_ids(param: str, ids: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(ids))
    for id_ in ids:
        if id_ >= vocabulary:
            raise invalid(param, f"token id {id_} is not in the vocabulary of {vocabulary}")
    return ids


def _check_allowed(allowed: tuple[int, ...], min_tokens: int, stop_ids: tuple[int, ...]) -> None:
    if not allowed:
        raise invalid("allowed_token_ids", "it must name at least one token")
    if min_tokens and set(allowed) <= set(stop_ids):
        raise invalid("allowed_token_ids", "they can only end the answer, which 'min_tokens' forbids")


async def _bad_words(words: Collection[str], model: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word alone and after a space, which gives different tokens."""
    if not words:
        return ()
    words = dict.fromkeys(word.lstrip() for word in words)
    if not all(words):
        raise invalid("bad_words", "a word must not be empty")
    if len(words) > _MOST_BAD_WORDS:
        raise invalid("bad_words", f"at most {_MOST_BAD_WORDS} words are allowed")

    def encode() -> tuple[tuple[int, ...], ...]:
        texts = (text for word in words for text in (word, " " + word))
        found = dict.fromkeys(tuple(model.text.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(ids for ids in found if ids)

    return await model.text.off_loop(sum(map(len, words)), encode)


LOWEST = -9999.0
"""Stand-in for minus infinity, which JSON does not have (OpenAI's value)."""


def token_label(data: bytes, prefix: str = "") -> str:
    r"""Return a token's text. Bytes that are not whole characters are written `\xe4\xbd`, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    entries: Sequence[TokenEntry], tokens: TokenBytes, *, as_ids: bool | None = False
) -> ChatLogprobs:
    """Build the chat shape. `as_ids`: tokens are named by their ids, `token_id:N`; `bytes` stay those of
    their texts.
    """
    return ChatLogprobs([_chat_entry(entry, tokens, as_ids=bool(as_ids)) for entry in entries])


def completion_logprobs(
    entries: Sequence[TokenEntry], tokens: TokenBytes, offset: int, top: int, *, as_ids: bool | None = False
) -> CompletionLogprobs:
    """Build the completion shape. `offset` is where the answer begins in the returned text, `top` the number
    of alternatives requested.
    """
    result = CompletionLogprobs()
    for entry in entries:
        id_, start = entry.logprobs.token_id, offset + entry.start
        append_completion_entry(result, entry.logprobs, id_, start, tokens, top, as_ids=as_ids)
    return result


def append_completion_entry(
    result: CompletionLogprobs,
    logprobs: TokenLogprobs | None,
    token_id: int,
    offset: int,
    tokens: TokenBytes,
    top: int,
    *,
    as_ids: bool | None = False,
) -> None:
    """Append one token. The chosen token is always among the alternatives. The first token of a prompt has no
    logprobs: None.
    """
    label = _id_label if as_ids else lambda id_: token_label(tokens[id_], "bytes:")
    result.text_offset.append(offset)
    result.tokens.append(label(token_id))
    if logprobs is None:
        result.token_logprobs.append(None)
        result.top_logprobs.append(None)
        return
    best = {label(id_): _finite(value) for id_, value in reversed(logprobs.top[:top])}
    chosen = _finite(logprobs.logprob)
    result.token_logprobs.append(chosen)
    result.top_logprobs.append(dict(reversed(best.items())) | {label(token_id): chosen})


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], tokens: TokenBytes, prompt: Sequence[int], top: int
) -> PromptLogprobs:
    return [
        None if entry is None else _prompt_entry(entry, tokens, token_id, top)
        for entry, token_id in zip(entries, prompt, strict=True)
    ]


def _prompt_entry(
    entry: TokenLogprobs, tokens: TokenBytes, token_id: int, top: int
) -> dict[str, PromptTokenLogprob]:
    ranked = {id_: (value, rank) for rank, (id_, value) in enumerate(entry.top[:top], 1)}
    ranked[token_id] = (entry.logprob, entry.rank)
    return {
        str(id_): PromptTokenLogprob(_finite(value), rank, token_label(tokens[id_]))
        for id_, (value, rank) in ranked.items()
    }


def _chat_entry(entry: TokenEntry, tokens: TokenBytes, *, as_ids: bool) -> TokenLogprob:
    def label(id_: int, data: bytes) -> str:
        return _id_label(id_) if as_ids else token_label(data)

    ranked = ((id_, tokens[id_], value) for id_, value in entry.logprobs.top)
    top = [TopLogprob(label(id_, data), _finite(value), list(data)) for id_, data, value in ranked]
    chosen = label(entry.logprobs.token_id, entry.data)
    return TokenLogprob(chosen, _finite(entry.logprobs.logprob), list(entry.data), top)


def _id_label(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


_LEVELS, _SWITCH = "reasoning_effort", "enable_thinking"
_BUDGETS: Final[dict[str, int]] = {"low": 1024, "medium": 8192, "high": 24_576}
"""Tokens of thoughts for models whose templates know no levels. `xhigh` has no limit."""


def thinks(effort: Effort) -> bool:
    """True if this effort turns thinking on in a template that has only a switch."""
    return effort not in {"none", "minimal"}


def with_effort(chat: Chat, effort: Effort | None, template: str | None) -> tuple[Chat, list[str]]:
    """Return the chat with the template variables of `effort`, and warnings. `chat_template_kwargs` of the
    request take precedence.
    """
    if effort is None:
        return chat, []
    known = template or ""
    chosen: dict[str, str | bool]
    warnings: list[str]
    if _LEVELS in known:
        chosen, warnings = {_LEVELS: effort}, []
    elif _SWITCH in known:
        chosen, warnings = {_SWITCH: thinks(effort)}, []
        if effort == "minimal":
            warnings = ["'reasoning_effort': 'minimal' turns thinking off with this model."]
    elif recognize_format(template).reasoning is not None:
        return chat, []
    else:
        return chat, ["'reasoning_effort' has no effect: this model's chat template leaves no choice."]
    return replace(chat, template_kwargs=chosen | chat.template_kwargs), warnings


def thinking_budget(asked: int | None, effort: Effort | None, template: str | None) -> int | None:
    """Return the number of reasoning tokens after which an answer must begin; None: no limit.

    `asked`: the request's own number, -1 for none. Otherwise the effort stands for one, unless the template
    has words for it.
    """
    if asked is not None:
        return None if asked < 0 else asked
    known = template or ""
    if effort is None or _LEVELS in known:
        return None
    return _BUDGETS.get(effort) if thinks(effort) or _SWITCH in known else 0


def describe_thinking(
    format_: OutputFormat,
    begins: Thinking,
    text: TextModel,
    vocab_size: int,
    *,
    budget: int | None,
    stop_loops: bool,
) -> ThinkingParams | None:
    """Describe the thoughts of an answer for the engine; None for an answer without. Encodes short texts."""
    marks = format_.reasoning
    if marks is None or (begins == "no" and not marks.anywhere):
        return None

    def encode(mark: str) -> tuple[int, ...]:
        number = text.tokenizer.token_to_id(mark)
        ids = [number] if number is not None else text.encode(mark, add_special_tokens=False)
        return tuple(ids) if all(each < vocab_size for each in ids) else ()

    closer = text.tokenizer.token_to_id(marks.closer)
    return ThinkingParams(
        begins=begins,
        opener=marks.opener,
        closer=marks.closer,
        opener_ids=encode(marks.opener),
        closer_ids=() if closer is None or closer >= vocab_size else (closer,),
        end_ids=encode(marks.closer + HARMONY_ANSWER if format_.is_harmony else marks.closer),
        budget=budget,
        stop_loops=stop_loops,
        anywhere=marks.anywhere,
        ended_by_calls=format_.tools is not None and format_.tools.ends_thoughts,
    )


def within_grammar(params: SamplingParams, text: TextModel, *, calls_only: bool) -> SamplingParams:
    """Return parameters of an answer in harmony whose grammar describes the thoughts too. `calls_only`: the
    answer must be a call.
    """
    thinking = params.thinking
    if thinking is None or not text.output_format.is_harmony:
        return params
    ids = thinking.end_ids
    if calls_only:
        end = f"{thinking.closer}{HARMONY_TURN}<|channel|>commentary to=functions."
        ids = tuple(text.encode(end, add_special_tokens=False))
    return replace(params, thinking=replace(thinking, end_ids=ids, in_grammar=True))


def budget_warnings(asked: Any, thinking: ThinkingParams | None) -> list[str]:
    if asked is None or thinking is not None:
        return []
    return ["'thinking_token_budget' has no effect: this answer has no thoughts."]
