"""Replay: run a logged request again with the same messages, parameters and seed, and compare the tokens."""

import json
import secrets
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..errors import ApiError
from ..gateway.choice_stream import same
from ..gateway.gateway import system_fingerprint
from ..gateway.generation import Generation
from ..gateway.open_request import OpenRequest
from ..http.openai.chat import prepare_chat
from ..http.openai.completions import prepare_completion
from ..http.openai.request_context import RequestContext
from ..http.openai.request_types import ChatCompletionRequest, CompletionRequest
from ..http.server import request as strict_json
from ..security.security import Identity
from ..services import Services
from ..store.record import Content, RequestRecord
from .detail import content_note, find_logged, is_chat, is_pooled

_NOT_AGAIN = ("stream", "stream_options", "request_id")
"""Parameters not taken over: how the answer is sent, and the request's own id."""
CLIENT = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of a replay."""

    original: str
    id: str
    """Id of the replay's own row."""
    equal: bool | None
    """None: unknown, for the reason in `verdict`."""
    verdict: str
    output_tokens: int
    outputs: list[str]
    """One text per choice."""
    kept: list[str]
    """Texts of the original answer, as far as they are kept."""
    first_difference: int | None = None
    """Offset in characters, in the first choice that differs."""


async def replay(services: Services, identity: Identity, request_id: str) -> ReplayResult:
    """Run the request and compare. Takes as long as the model takes. Raises ApiError; 409 if there is nothing
    to send again.
    """
    record, content, foreign = await find_logged(services, identity, request_id)
    if is_pooled(record):
        raise ApiError(
            409, "It was answered with vectors; only tokens are compared.", "not_replayable", "request_id"
        )
    if content is None or not content.is_whole:
        note = content_note(record, content, services.request_log.keep.content_days, foreign=foreign)
        raise ApiError(409, f"It cannot be sent again. {note}", "not_replayable", "request_id")
    generation = await _prepare(services, identity, record, content)
    with services.gateway.open(generation) as opened:
        texts: list[list[str]] = [[] for _ in opened.sequences]
        async for delta in opened.deltas():
            texts[delta.index].append(delta.text)
    outputs = ["".join(pieces) for pieces in texts]
    equal = same(record.output_hash, services.gateway.output_hash(opened))
    return ReplayResult(
        original=record.id,
        id=generation.id,
        equal=equal,
        verdict=_verdict(equal, record, content, opened),
        output_tokens=opened.usage.output_tokens,
        outputs=outputs,
        kept=content.outputs,
        first_difference=None if equal else _first_difference(content, outputs),
    )


async def _prepare(
    services: Services, identity: Identity, record: RequestRecord, content: Content
) -> Generation:
    plain = {name: value for name, value in json.loads(content.body).items() if name not in _NOT_AGAIN}
    plain["model"] = plain.get("model") or record.model
    plain["seed"] = record.seed
    if record.http_status != 200 and record.n == 1 and record.output_tokens:
        plain |= _as_far_as_it_got(plain, record)
    body, depth = msgspec.json.encode(plain), services.settings.limits.json_depth
    call = RequestContext(services, record.endpoint, secrets.token_hex(16), CLIENT, identity, plain, body)
    if is_chat(record):
        chat, _ = strict_json.decode(body, ChatCompletionRequest, depth)
        generation = (await prepare_chat(call, chat)).generation
    else:
        completion, _ = strict_json.decode(body, CompletionRequest, depth)
        generation = (await prepare_completion(call, completion)).generation
    # The original's content belongs to its key; a copy would belong to somebody else.
    return replace(generation, keep=None)


def _as_far_as_it_got(plain: dict[str, Any], record: RequestRecord) -> dict[str, int]:
    """Limit the replay of an answer that was cut off to the same length."""
    if (plain.get("min_tokens") or 0) > record.output_tokens:
        return {}
    name = "max_completion_tokens" if plain.get("max_completion_tokens") else "max_tokens"
    return {name: record.output_tokens}


def _verdict(equal: bool | None, record: RequestRecord, content: Content, opened: OpenRequest) -> str:
    tokens = opened.usage.output_tokens
    if equal:
        ended = "" if record.http_status == 200 else ", which is all that came before it ended"
        return f"Equal: the same {tokens} tokens{ended}."
    if not record.output_hash:
        return "Unknown: the earlier request has no answer to compare with."
    if equal is None:
        return "Unknown: the secret of the hashes (output-hash.key) has changed since."
    return f"Different: {record.output_tokens} tokens then, {tokens} now. {_reason(record, content, opened)}"


def _reason(record: RequestRecord, content: Content, opened: OpenRequest) -> str:
    generation = opened.generation
    if system_fingerprint(generation.model) != record.fingerprint:
        return "llmbox, the model or its settings have changed since."
    text = generation.model.text
    prompts = [text.decode(prompt, skip_special=False) for prompt in generation.prompts]
    if not content.was_cut("prompt") and prompts != content.prompts:
        return "The chat template renders the messages differently now; some contain today's date."
    if record.http_status != 200:
        return "The earlier request was cut off, so this one may only continue further."
    return "No cause is known: this should not happen. Run llmbox doctor."


def _first_difference(content: Content, now: list[str]) -> int | None:
    """Offset of the first difference, as far as the original answer is kept."""
    cut = content.was_cut("output")
    for one, whole in zip(content.outputs, now, strict=False):
        other = whole[: len(one)] if cut else whole
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    return None
