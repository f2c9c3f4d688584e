"""Traces of requests: W3C trace context, spans, and their export over OTLP. Off unless an endpoint is set."""
