"""Lists of requests that run in the background, at low priority, and outlive the daemon."""

from .runner import BatchRunner, RouteAnswer

__all__ = ["BatchRunner", "RouteAnswer"]
