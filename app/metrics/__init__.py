"""Prometheus metrics under vLLM's names, so that existing dashboards work."""

from .metrics import EngineReading, Metrics

__all__ = ["EngineReading", "Metrics"]
