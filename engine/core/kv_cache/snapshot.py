"""Snapshot of all KV blocks and their holders, made on request."""

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from ...ipc.profile_messages import BlockHolder, BlockMap, BlockRun
from ..request import Request
from .manager import KVCacheManager

_BlockState = tuple[str, int, int]
"""(state, owner, holders), as in `BlockRun`."""
_FREE: Final[_BlockState] = ("free", -1, 0)


def block_map(kv_cache: KVCacheManager, running: Iterable[Request]) -> BlockMap:
    """Return the state of every block. `running`: all requests that have a block table."""
    requests = list(running)
    pool, computed_by = kv_cache.pool, kv_cache.computed_by
    owners: dict[str, int] = {}
    live = _live(requests, owners)

    def describe(block: int) -> _BlockState:
        if (found := live.get(block)) is not None:
            return found
        if not pool.is_cached(block):
            return _FREE
        name = computed_by[block]
        return "cached", -1 if name is None else owners.setdefault(name, len(owners)), 0

    runs = [
        BlockRun(count=sum(1 for _ in same), state=state, owner=owner, holders=holders)
        for (state, owner, holders), same in groupby(map(describe, range(pool.num_blocks)))
    ]
    return BlockMap(
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        runs=runs,
        owners=list(owners),
        holders=[_holder(request, live) for request in requests],
        prefixes=kv_cache.uses.top(pool.has_prefix),
        evictions=pool.evictions,
    )


def _holder(request: Request, live: dict[int, _BlockState]) -> BlockHolder:
    shared = sum(live[block][2] > 1 for block in request.block_table)
    return BlockHolder(request_id=request.request_id, blocks=len(request.block_table), shared=shared)


def _live(running: Iterable[Request], owners: dict[str, int]) -> dict[int, _BlockState]:
    found: dict[int, _BlockState] = {}
    for request in running:
        owner = owners.setdefault(request.request_id, len(owners))
        for block in request.block_table:
            _, first, holders = found.get(block, ("live", owner, 0))
            found[block] = "live", first, holders + 1
    return found
