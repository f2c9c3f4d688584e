"""Replicas that run, and autoscaling by the longer of two queues: open requests, and KV blocks they hold."""

import math
from collections.abc import Mapping
from typing import Any, Final

RUNNING: dict[str, dict[str, str]] = {}
"""Fingerprint of each running replica, by deployment, as the router of this process knows them.

A handle does not show its router, and who owns the handle must know whether any replica runs. Ray copies the
router's own module by value, so its globals are not shared: this module's are.
"""

KV_TARGET: Final = 0.8
"""Share of the KV cache in use that replicas are scaled for: above it requests soon wait for blocks."""


def wanted_replicas(open_requests: float, target: float, kv_used: Mapping[str, float], running: int) -> int:
    """Return the replicas for the load. `target`: open requests of a replica; `kv_used`: share by replica."""
    for_requests = open_requests / target
    mean = sum(kv_used.values()) / len(kv_used) if kv_used else 0.0
    # A pool in use says "more" alone: what is cached or idle never asks for fewer than the requests do.
    for_memory = running * mean / KV_TARGET if mean > KV_TARGET else 0.0
    return math.ceil(max(for_requests, for_memory))


def scale_by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy of Ray Serve. Serve keeps the limits of the configuration."""
    shares = {
        str(replica): float(value)
        for replica, value in (context.aggregated_metrics.get("kv_used") or {}).items()
    }
    wanted = wanted_replicas(
        context.total_num_requests,
        context.config.get_target_ongoing_requests(),
        shares,
        context.current_num_replicas,
    )
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), context.policy_state
