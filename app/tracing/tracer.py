"""Traces of requests: W3C trace context, spans as OTLP/HTTP JSON, and the choice of requests to trace.

A `traceparent` header that is not exactly as https://www.w3.org/TR/trace-context/ says is ignored, never
repaired. Names follow OpenTelemetry's conventions for generative AI. Nothing of prompts or answers is in a
span, nor the name of a key.
"""

import json
import random
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..config.settings import TelemetrySettings
from ..store.record import RequestRecord, SequenceRecord, decode_sequence
from .otlp_exporter import Attribute, OtlpExporter, encode_attributes, read_headers

_HEADER: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?",
    re.DOTALL | re.ASCII,
)
_SAMPLED: Final = 1
MOST_BYTES: Final = 512
"""Longest header that is looked at; those of the only version so far have 55."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Place of one request in a trace. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    """Id of the request's own span."""
    parent_id: str = ""
    """Span of the caller; empty: the request begins its trace."""
    is_sampled: bool = False
    """Its spans are exported."""
    address: str = ""
    """Address that the request came to."""
    port: int | None = None


def parse_traceparent(values: Sequence[str]) -> tuple[str, str, bool] | None:
    """Parse the values of all `traceparent` headers. Returns (trace id, parent span id, whether the caller
    samples); None if there is not exactly one, or it is not valid.
    """
    if len(values) != 1 or len(values[0]) > MOST_BYTES:
        return None
    match = _HEADER.fullmatch(values[0])
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"] is not None):
        return None
    if not int(match["trace"], 16) or not int(match["parent"], 16):
        return None
    return match["trace"], match["parent"], bool(int(match["flags"], 16) & _SAMPLED)


def draw_span_id() -> str:
    return _draw(8)


def draw_trace_id() -> str:
    return _draw(16)


def _draw(size: int) -> str:
    """Draw a random id of `size` bytes that is not zero, which stands for none."""
    return f"{1 + secrets.randbelow((1 << 8 * size) - 1):0{2 * size}x}"


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
    prefill, decode = record.prefill, record.decode
    yield "read", record.reading, {}
    yield "load model", record.model, {}
    yield "tokenize", record.prompt, {}
    waited = record.gateway + record.lost + record.sending + record.queued
    yield "queue", waited, {"llmbox.scheduler_queue_ms": record.queued / 1000}
    yield "engine", record.unsplit, {}
    yield (
        "prefill",
        prefill.total,
        {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "llmbox.steps": prefill.steps,
            "llmbox.own_ms": prefill.own / 1000,
        },
    )
    yield (
        "decode",
        decode.total + record.recompute.total + record.preempted,
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


class RequestTracer:
    """Traces requests. Use it only from the event loop. Without an exporter it only reads the trace that a
    caller's `traceparent` names, and sends nothing.
    """

    def __init__(self, exporter: OtlpExporter | None = None, share: float = 1.0) -> None:
        """`share`: share of the requests without a `traceparent` that are sampled, 0 to 1."""
        self._exporter = exporter
        self._share = share

    @classmethod
    def of(cls, settings: TelemetrySettings, environ: Mapping[str, str]) -> "RequestTracer":
        """Make the tracer of the settings. Raises CliError for headers that cannot be used."""
        if not settings.otlp_endpoint:
            return cls()
        headers = read_headers(settings.otlp_headers_file, environ)
        return cls(
            OtlpExporter(settings.otlp_endpoint, headers, settings.otlp_service_name), settings.trace_share
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Spans exported and dropped so far."""
        exporter = self._exporter
        return (0, 0) if exporter is None else (exporter.exported, exporter.dropped)

    def begin(self, traceparents: Sequence[str], server: Any = None) -> TraceContext | None:
        """Find the place of a new request in a trace; None if it has none.

        `traceparents`: values of its headers of this name. `server`: ASGI's (address, port).
        """
        caller = parse_traceparent(traceparents) if traceparents else None
        is_on = self._exporter is not None
        if caller is None and not (is_on and random.random() < self._share):  # noqa: S311 - no secret
            return None
        trace_id, parent, samples = caller or (draw_trace_id(), "", True)
        # A unix socket's is (path, None); the path may have the user's name.
        address, port = server if server and server[1] else ("", None)
        return TraceContext(
            trace_id=trace_id,
            span_id=draw_span_id(),
            parent_id=parent,
            is_sampled=is_on and samples,
            address=address,
            port=port,
        )

    def export_request(self, record: RequestRecord, trace: TraceContext | None, began: float) -> None:
        """Export the span of a request that ends now. `began`: in `time.monotonic()` seconds."""
        if self._exporter is not None and trace is not None and trace.is_sampled:
            end = time.time_ns()
            self._exporter.put([request_span(record, trace, end - _nanos(time.monotonic() - began), end)])

    def export_phases(self, trace: TraceContext | None, times: Sequence[bytes], began: float) -> None:
        """Export the phases of the sequence that ended last. `times`: encoded `SequenceRecord`s."""
        if self._exporter is None or trace is None or not trace.is_sampled or not times:
            return
        if (record := decode_sequence(times[-1])) is not None:
            start = time.time_ns() - _nanos(time.monotonic() - began)
            self._exporter.put(phase_spans(record, trace, start))

    def close(self) -> None:
        """Send the spans that wait, for three seconds at most."""
        if self._exporter is not None:
            self._exporter.close()


def _nanos(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e9)
