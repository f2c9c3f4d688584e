"""Spans of one request as OTLP/HTTP JSON: the request, and its phases below it.

Names follow OpenTelemetry's conventions for generative AI. Nothing of prompts or answers is in a span, nor
the name of a key.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..store.record import RequestRecord
from ..store.sequence_record import SequenceRecord
from .trace_context import TraceContext, draw_span_id

SERVER_KIND: Final = 2
INTERNAL_KIND: Final = 1
_ERROR: Final = 2
_OPERATIONS: Final = (("embed", "embeddings"), ("rerank", "rerank"), ("score", "rerank"))
_CHATS: Final = ("chat", "messages", "responses")
_PARAMS: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
Attribute = bool | int | float | str | Sequence[str] | None


def request_span(record: RequestRecord, trace: TraceContext, start_ns: int, end_ns: int) -> bytes:
    """Encode the span of a request that has ended. Times are in nanoseconds of Unix time."""
    operation = _operation(record.endpoint)
    span = _span(
        trace,
        trace.span_id,
        trace.parent_id,
        f"{operation} {record.model}".strip(),
        SERVER_KIND,
        (start_ns, end_ns),
        _attributes(record, trace, operation),
    )
    if record.http_status >= 500:
        span["status"] = {"code": _ERROR, "message": record.error_code}
    return msgspec.json.encode(span)


def phase_spans(record: SequenceRecord, trace: TraceContext, start_ns: int) -> list[bytes]:
    """Encode the phases of a sequence, one after the other from the request's start on.

    A preemption and what was computed again because of it are part of `decode`: the log has their sums, not
    their moments.
    """
    spans, at = [], start_ns
    for name, micros, attributes in _phases(record):
        end = at + 1000 * micros
        if micros:
            place = draw_span_id(), trace.span_id
            spans.append(
                msgspec.json.encode(_span(trace, *place, name, INTERNAL_KIND, (at, end), attributes))
            )
        at = end
    return spans


def _phases(record: SequenceRecord) -> Iterator[tuple[str, int, Mapping[str, Attribute]]]:
    prefill, decode, again = record.prefill, record.decode, record.recompute
    yield "read", record.reading, {}
    yield "load model", record.model, {}
    yield "tokenize", record.prompt, {}
    waited = record.gateway + record.lost + record.sending + record.queued
    yield "queue", waited, {"llmbox.scheduler_queue_ms": record.queued / 1000}
    yield "engine", record.unsplit, {}
    yield (
        "prefill",
        sum((prefill.own, prefill.decoding, prefill.prompts, prefill.absent, prefill.between)),
        {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "llmbox.steps": prefill.steps,
            "llmbox.own_ms": prefill.own / 1000,
        },
    )
    yield (
        "decode",
        sum(
            phase.own + phase.decoding + phase.prompts + phase.absent + phase.between
            for phase in (decode, again)
        )
        + record.preempted,
        {
            "gen_ai.usage.output_tokens": record.output_tokens,
            "llmbox.steps": decode.steps,
            "llmbox.own_ms": decode.own / 1000,
            "llmbox.preemptions": record.preemptions or None,
        },
    )
    delivery = record.delivery + record.client
    yield "delivery", delivery, {"llmbox.client_wait_ms": record.client / 1000}


def _operation(endpoint: str) -> str:
    """Name of the operation; `rerank` is one of our own, which the conventions allow."""
    for part, name in _OPERATIONS:
        if part in endpoint:
            return name
    return "chat" if any(part in endpoint for part in _CHATS) else "text_completion"


def _attributes(record: RequestRecord, trace: TraceContext, operation: str) -> dict[str, Attribute]:
    reached = bool(record.fingerprint)
    params = json.loads(record.params)
    sent = {name: params[key] for key, name in _PARAMS.items() if isinstance(params.get(key), int | float)}
    generates = operation in {"chat", "text_completion"}
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "llmbox",
        "gen_ai.request.model": record.model or None,
        **sent,
        "gen_ai.request.seed": record.seed,
        "gen_ai.request.choice.count": record.n if record.n > 1 else None,
        "gen_ai.request.stream": record.stream or None,
        "gen_ai.response.id": record.id,
        "gen_ai.response.model": record.model if reached else None,
        "gen_ai.response.finish_reasons": record.finish_reasons.split(",") if record.finish_reasons else None,
        "gen_ai.usage.input_tokens": record.prompt_tokens if reached else None,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens if reached else None,
        "gen_ai.usage.output_tokens": record.output_tokens if reached and generates else None,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "server.address": trace.address or None,
        "server.port": trace.port,
        "url.path": record.endpoint,
        "http.response.status_code": record.http_status,
        "error.type": (record.error_code or str(record.http_status)) if record.http_status >= 400 else None,
        "llmbox.tier": record.tier or None,
        "llmbox.resumes": record.resumes or None,
    }


def _span(
    trace: TraceContext,
    span_id: str,
    parent_id: str,
    name: str,
    kind: int,
    times_ns: tuple[int, int],
    attributes: Mapping[str, Attribute],
) -> dict[str, Any]:
    start, end = times_ns
    parent = {"parentSpanId": parent_id} if parent_id else {}
    return {
        "traceId": trace.trace_id,
        "spanId": span_id,
        **parent,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end),
        "attributes": encode_attributes(attributes),
    }


def encode_attributes(attributes: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    """Encode attributes as OTLP's JSON has them; those that are None are left out."""
    return [{"key": name, "value": _value(value)} for name, value in attributes.items() if value is not None]


def _value(value: bool | float | str | Sequence[str]) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits: JSON of protobuf has them as text
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [{"stringValue": each} for each in value]}}
