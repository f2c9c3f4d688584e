"""Batches: lists of requests that run in the background at low priority and survive a restart of the
daemon.
"""

from .runner import BatchRunner, RouteAnswer

__all__ = ["BatchRunner", "RouteAnswer"]
