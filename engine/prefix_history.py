"""What the prefix cache has forgotten, in bounded memory: why a prompt was not found."""

from collections import OrderedDict
from typing import Final, Literal, TypeVar

PrefixEnd = Literal[
    "off", "prompt_logprobs", "pooling", "short", "complete", "new", "diverged", "evicted", "namespace"
]
"""Why the cache gave no more of a prompt.

    off               the cache is off
    prompt_logprobs   they come from computing the whole prompt
    pooling           a vector of all rows comes from computing them
    short             no whole block before the last token, whose logits are wanted
    complete          every block that was looked up was there
    new               nobody computed such a first block
    diverged          the blocks before were there, this one never was
    evicted           it was there, and made room for others
    namespace         another namespace (another key, another `cache_salt`) computed the same first block
"""

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

    def why_absent(self, block_hash: bytes, first_tokens: bytes | None) -> PrefixEnd:
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
