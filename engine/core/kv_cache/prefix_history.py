"""What the prefix cache has forgotten, in bounded memory: why a prompt was not found."""

from collections import OrderedDict
from typing import Final, TypeVar

from ...ipc.messages import PrefixMissReason

V = TypeVar("V")
REMEMBERED: Final = 4096
"""Of each kind: about 1.5 MB in all."""


class PrefixHistory:
    """Old entries go first; what has gone is told as `new` or `diverged`."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._first_blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def note_evicted(self, block_hash: bytes) -> None:
        _put(self._evicted, block_hash, None, self._limit)

    def note_first_block(self, tokens: bytes, block_hash: bytes) -> None:
        """A first block was computed: a digest of its tokens, and its chain hash, which has the namespace."""
        _put(self._first_blocks, tokens, block_hash, self._limit)

    def why_absent(self, block_hash: bytes, first_tokens: bytes | None) -> PrefixMissReason:
        """`first_tokens`: the digest of a first block's tokens, None for later blocks."""
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
