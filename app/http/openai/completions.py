"""POST /v1/completions: raw prompts, one or many, with echo and OpenAI's older shape of logprobs."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from llmbox.engine.errors import ModelError
from llmbox.engine.ipc.messages import TokenLogprobs
from llmbox.engine.model_config.encoders.config import read_prompts
from llmbox.engine.sampling_params import SamplingParams

from ...engines.loaded_model import LoadedModel
from ...gateway.gateway import Gateway
from ...gateway.generation import Delta, Generation, TokenEntry
from ...gateway.open_request import OpenRequest
from ...text.fim import fim_prompt, fim_stop_ids
from ...util.threads import off_loop
from ..server.sse import TEXT_MARK, data_event, encode, split_at_text
from .request_context import CheckedRequest, Deadlines, RequestContext, check_prompts, truncate_prompts
from .request_types import CompletionRequest
from .response_types import Completion, CompletionChoice, CompletionLogprobs, CompletionUsage
from .sampling import (
    Logprobs,
    append_completion_entry,
    check_alternatives,
    check_common,
    check_max_tokens,
    completion_logprobs,
    invalid,
    prompt_logprobs,
    public_id,
    sampling_params,
    stop_strings,
)
from .structured_output import add_grammar, find_answer_constraint, unknown_inside
from .unsupported import refuse_unsupported

_QUERY, _DOCUMENT = ("query", "search_query"), ("document", "passage", "search_document")
_PROMPTS_OF: Final = {**dict.fromkeys(_QUERY, _QUERY), **dict.fromkeys(_DOCUMENT, _DOCUMENT)}
"""Names of prompts for each `input_type`, the usual one first."""


def prompt_items(given: Any, param: str) -> list[Any]:
    """Split the `prompt` field into items, each a text or a list of token ids. Raises ApiError 400."""
    if isinstance(given, str):
        given = [given]
    if not given:
        raise invalid(param, "it must not be empty")
    items: list[Any] = [given] if isinstance(given[0], int) else list(given)
    if len({type(item) for item in (given if isinstance(given[0], int) else items)}) > 1:
        raise invalid(param, "a list holds either texts, or token ids, or lists of token ids")
    return items


async def prompt_ids(items: list[Any], param: str, model: LoadedModel, *, special: bool) -> list[list[int]]:
    """Tokenize the items of `prompt_items`. Raises ApiError 400."""

    def encode() -> list[list[int]]:
        return [model.text.encode(i, add_special_tokens=special) if isinstance(i, str) else i for i in items]

    prompts = await model.text.off_loop(sum(map(len, items)), encode)
    check_prompts(prompts, param, model)
    return prompts


async def with_prompt(
    items: list[Any], model: LoadedModel, name: str | None = None, input_type: str | None = None
) -> list[Any]:
    """Put the prompt of the model's folder before each text: the named one, that of the input type, or the
    default. Token ids stay as they are. Raises ApiError 400.
    """
    try:
        prompts, default = await off_loop(1 << 20, lambda: _read_prompts(model.path, model.loaded_at))
    except ModelError as error:
        raise invalid("prompt_name", f"the model's prompts cannot be read: {error}") from None
    if name is None and input_type is not None:
        name = next((each for each in _PROMPTS_OF[input_type] if each in prompts), None)
    elif name is not None and name not in prompts:
        known = ", ".join(prompts) or "none"
        raise invalid("prompt_name", f"{name!r} is not a prompt of this model; it has {known}")
    elif name is None:
        name = default
    prompt = prompts[name] if name is not None else ""
    return [prompt + item if isinstance(item, str) else item for item in items] if prompt else items


@lru_cache(maxsize=16)
def _read_prompts(folder: Path, loaded_at: float) -> tuple[dict[str, str], str | None]:  # noqa: ARG001
    """Read the prompts of a model, once each time it is loaded. Raises ModelError."""
    return read_prompts(folder)


CompletionCall = CheckedRequest[CompletionRequest]


async def prepare_completion(call: RequestContext, body: CompletionRequest) -> CompletionCall:
    """Check a completion request and build its generation. Raises ApiError for every error that can be found
    before the engine has the request.
    """
    refuse_unsupported(body)
    check_common(body, call.limits)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise invalid("best_of", "it must equal 'n': every choice that is generated is returned")
    check_alternatives("logprobs", body.logprobs, 5)
    # No output at all makes sense only for the log-probabilities of the echoed prompt.
    check_max_tokens("max_tokens", body.max_tokens, 0 if body.echo else 1, body)
    stop = stop_strings(body, call.limits)
    answer = find_answer_constraint(body, call.limits)
    items = prompt_items(body.prompt, "prompt")
    if len(items) * n > call.limits.queue:
        raise invalid(
            "prompt", f"at most {call.limits.queue} choices (prompts times 'n') are allowed at once"
        )
    deadlines = Deadlines.of(call, body)
    model = await call.find_model(body.model, deadlines)
    reservation = call.reserve(model, len(items) * n)
    wanted = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        wanted = max(wanted or 0, body.logprobs)
    params = await sampling_params(body, model, call.limits, Logprobs(body.logprobs, wanted))
    if body.suffix:
        prompts = await _fim_prompts(items, body, model)
        params = replace(params, stop_token_ids=_fim_stops(params, body, model))
    else:
        prompts = await prompt_ids(items, "prompt", model, special=body.add_special_tokens is not False)
    prompts, cut = truncate_prompts(prompts, body.truncate_prompt_tokens, body.max_tokens, model)
    params, _ = await add_grammar(params, answer, None, model, call.gateway, call.limits)
    generation = Generation(
        id=public_id("cmpl", body.request_id, call.exchange, call.gateway),
        model=model,
        prompts=prompts,
        params=params,
        max_tokens=body.max_tokens,
        stop=stop,
        starts_new_text=False,
        skip_special=body.skip_special_tokens is not False,
        **call.generation_fields(body, deadlines, reservation),
        prompt_param="prompt",
    )
    return CheckedRequest(body, generation, call.warnings(type(body)) + unknown_inside(call.plain) + cut)


async def _fim_prompts(items: list[Any], body: CompletionRequest, model: LoadedModel) -> list[list[int]]:
    suffix = body.suffix or ""
    if body.echo:
        raise invalid("echo", "it cannot be combined with 'suffix'")
    if not all(isinstance(item, str) for item in items):
        raise invalid("prompt", "with 'suffix' it must be a text: the part before the gap")
    size = sum(map(len, items)) + len(suffix) * len(items)
    special = body.add_special_tokens is not False
    prompts = await model.text.off_loop(
        size, lambda: [fim_prompt(model.text, item, suffix, add_special_tokens=special) for item in items]
    )
    check_prompts(prompts, "prompt", model)
    return prompts


def _fim_stops(params: SamplingParams, body: CompletionRequest, model: LoadedModel) -> tuple[int, ...]:
    more = () if body.ignore_eos else fim_stop_ids(model.text)
    return tuple(dict.fromkeys((*params.stop_token_ids, *more)))


async def complete(gateway: Gateway, call: CompletionCall) -> Completion:
    with gateway.open(call.generation) as opened:
        writer = _Writer(opened, call)
        parts: list[list[Delta]] = [[] for _ in opened.sequences]
        async for delta in opened.deltas():
            parts[delta.index].append(delta)
    size = opened.usage.output_tokens if call.body.logprobs is not None else 0
    return await off_loop(
        size + writer.prompt_work, lambda: writer.answer([_joined(deltas) for deltas in parts])
    )


async def stream_completion(gateway: Gateway, call: CompletionCall) -> AsyncGenerator[bytes, None]:
    with gateway.open(call.generation) as opened:
        writer = _Writer(opened, call)
        unfinished = len(opened.sequences)
        async for delta in opened.deltas():
            if delta.index in writer.glue and delta.finish_reason is None:
                if delta.text:
                    before, after = writer.glue[delta.index]
                    yield before + encode(delta.text) + after
                continue
            unfinished -= delta.finish_reason is not None
            work = partial(writer.event, delta, last=unfinished == 0)
            event = await off_loop(writer.prompt_work, work) if writer.is_first(delta) else work()
            if event:
                yield event
            writer.glue_next(delta)
    if writer.with_usage:
        yield writer.usage()


class _Writer:
    """Builds choices from deltas. A choice's first delta carries the echo."""

    def __init__(self, opened: OpenRequest, call: CompletionCall) -> None:
        self._opened = opened
        self._call = call
        self._body = call.body
        self._text = call.generation.model.text
        self._header = call.header(opened)
        self.with_usage = call.usage_at_end
        self._running_usage = call.usage_in_chunks
        self._plain = not (
            self._body.logprobs is not None or self._body.return_token_ids or self._running_usage
        )
        self.glue: dict[int, tuple[bytes, bytes]] = {}
        """Bytes around the text of a chunk that has nothing else, by choice, once its first one was sent."""
        self._begun: set[int] = set()
        """Choices whose first chunk was made."""
        self._echoes: dict[int, str] = {}

    @property
    def prompt_work(self) -> int:
        """Number of prompt tokens that the answer reports on."""
        reports_prompt = self._body.echo or self._body.prompt_logprobs is not None
        return self._opened.usage.prompt_tokens if reports_prompt else 0

    def is_first(self, delta: Delta) -> bool:
        return delta.index not in self._begun

    def answer(self, deltas: list[Delta]) -> Completion:
        chunk = self._completion([self._choice(delta) for delta in deltas])
        chunk.usage = CompletionUsage.of(self._opened.usage)
        self._call.add_extras(self._opened, chunk)
        return chunk

    def event(self, delta: Delta, *, last: bool) -> bytes:
        """Encode the events of one delta. Empty where there is nothing to send yet."""
        silent = not (delta.text or delta.finish_reason or delta.entries)
        if silent and not self._body.return_token_ids and (delta.index in self._begun or not self._body.echo):
            return b""
        chunk = self._completion([self._choice(delta)])
        if self._running_usage:
            chunk.usage = CompletionUsage.of(self._opened.usage_now())
        elif self.with_usage:
            chunk.usage = None
        if last and not self.with_usage:
            self._call.add_extras(self._opened, chunk)
        return data_event(chunk)

    def glue_next(self, delta: Delta) -> None:
        """Encode once what the choice's chunks have around their texts."""
        if self._plain and delta.index in self._begun and delta.index not in self.glue:
            mark = Delta(delta.index, TEXT_MARK, [])
            self.glue[delta.index] = split_at_text(self.event(mark, last=False))

    def usage(self) -> bytes:
        chunk = self._completion([])
        chunk.usage = CompletionUsage.of(self._opened.usage)
        self._call.add_extras(self._opened, chunk)
        return data_event(chunk)

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(choices=choices, **self._header)

    def _choice(self, delta: Delta) -> CompletionChoice:
        which = delta.index // self._call.generation.n
        prompt = self._call.generation.prompts[which]
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        echo = self._echo(which) if self._body.echo else ""
        choice = CompletionChoice(
            index=delta.index,
            text=echo + delta.text if first else delta.text,
            logprobs=self._logprobs(delta, prompt, echo, first=first),
            finish_reason=delta.finish_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if first:
                choice.prompt_token_ids = prompt
        if first and self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                delta.prompt_logprobs or [None] * len(prompt),
                self._text.tokens,
                prompt,
                self._body.prompt_logprobs,
            )
        return choice

    def _logprobs(
        self, delta: Delta, prompt: list[int], echo: str, *, first: bool
    ) -> CompletionLogprobs | None:
        top = self._body.logprobs
        if top is None:
            return None
        result = completion_logprobs(
            delta.entries, self._text.tokens, len(echo), top, as_ids=self._body.return_tokens_as_token_ids
        )
        if not (first and self._body.echo):
            return result
        whole = self._prompt_part(prompt, delta.prompt_logprobs or [None] * len(prompt), top)
        for name in whole.__struct_fields__:
            getattr(whole, name).extend(getattr(result, name))
        return whole

    def _prompt_part(
        self, prompt: list[int], entries: Sequence[TokenLogprobs | None], top: int
    ) -> CompletionLogprobs:
        result = CompletionLogprobs()
        as_ids = self._body.return_tokens_as_token_ids
        detokenizer = self._text.detokenizer(skip_special=False)
        offset = 0
        for token_id, entry in zip(prompt, entries, strict=True):
            append_completion_entry(result, entry, token_id, offset, self._text.tokens, top, as_ids=as_ids)
            offset += len(detokenizer.push(token_id))
        return result

    def _echo(self, which: int) -> str:
        if which not in self._echoes:
            self._echoes[which] = self._text.decode(self._call.generation.prompts[which], skip_special=False)
        return self._echoes[which]


def _joined(deltas: list[Delta]) -> Delta:
    entries: list[TokenEntry] = [entry for delta in deltas for entry in delta.entries]
    return Delta(
        deltas[-1].index,
        "".join(delta.text for delta in deltas),
        [i for delta in deltas for i in delta.token_ids],
        entries,
        deltas[-1].finish_reason,
        next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
    )
