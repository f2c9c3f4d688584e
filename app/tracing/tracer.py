"""Tracer of requests: which are traced, and the spans of those that are."""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.settings import TelemetrySettings
from ..store.record import RequestRecord
from ..store.sequence_record import decode_sequence
from .otlp_exporter import OtlpExporter, read_headers
from .request_spans import phase_spans, request_span
from .trace_context import TraceContext, draw_span_id, draw_trace_id, parse_traceparent


class RequestTracer:
    """Traces requests. Use it only from the event loop. Without an exporter it sends nothing: it only tells
    the trace that a caller's `traceparent` names.
    """

    def __init__(self, exporter: OtlpExporter | None = None, share: float = 1.0) -> None:
        """`share`: of the requests without a `traceparent`, those that are sampled, 0 to 1."""
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
        # Of a unix socket it is a path and None: the path has this user's name.
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
        """Send what waits, for three seconds at most."""
        if self._exporter is not None:
            self._exporter.close()


def _nanos(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e9)
