"""Statistics of the prefix cache: why a prefix is absent, and which prefixes requests share most."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from ...ipc.messages import PrefixMissReason, PrefixUse

V = TypeVar("V")
REMEMBERED: Final = 4096
"""Entries of each kind; about 1.5 MB in all."""


class PrefixHistory:
    """Record with a fixed number of entries, oldest dropped first. A miss whose entry was dropped is reported
    as `new` or `diverged`.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._first_blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def note_evicted(self, block_hash: bytes) -> None:
        _put(self._evicted, block_hash, None, self._limit)

    def note_first_block(self, tokens: bytes, block_hash: bytes) -> None:
        """Record a computed first block: the digest of its tokens, and its chain hash with the namespace."""
        _put(self._first_blocks, tokens, block_hash, self._limit)

    def why_absent(self, block_hash: bytes, first_tokens: bytes | None) -> PrefixMissReason:
        """Return why a block is not cached. `first_tokens`: digest of a first block's tokens, None for later
        blocks.
        """
        if block_hash in self._evicted:
            return "evicted"
        if first_tokens is None:
            return "diverged"
        computed = self._first_blocks.get(first_tokens)
        if computed is None:
            return "new"
        return "evicted" if computed == block_hash else "namespace"


def _put(ring: OrderedDict[bytes, V], key: bytes, value: V, limit: int) -> None:
    ring[key] = value
    ring.move_to_end(key)
    if len(ring) > limit:
        ring.popitem(last=False)


REMEMBERED_USES: Final = 256
MAX_REPORTED: Final = 20


class PrefixUses:
    """Hits by the chain hash of a prefix's last block. The least recently hit entry is dropped first."""

    def __init__(self, limit: int = REMEMBERED_USES) -> None:
        self._limit = limit
        self._uses: OrderedDict[bytes, PrefixUse] = OrderedDict()

    def note(self, chain_hash: bytes, blocks: int, block_size: int, request_id: str) -> None:
        before = self._uses.pop(chain_hash, None)
        self._uses[chain_hash] = PrefixUse(
            prefix=chain_hash.hex()[:12],
            tokens=blocks * block_size,
            blocks=blocks,
            hits=1 if before is None else before.hits + 1,
            last_request=request_id,
        )
        if len(self._uses) > self._limit:
            self._uses.popitem(last=False)

    def top(self, is_here: Callable[[bytes], bool], count: int = MAX_REPORTED) -> list[PrefixUse]:
        """Return the `count` prefixes that saved most tokens, among those for which `is_here` is true."""
        here = [use for chain_hash, use in self._uses.items() if is_here(chain_hash)]
        return sorted(here, key=lambda use: use.hits * use.tokens, reverse=True)[:count]
