"""The KV memory as fixed-size blocks. The only class that hands blocks out and takes them back.

A block is always in exactly one of three states:

    free     no content worth keeping
    cached   nobody holds it, but it is named in the prefix cache: given away last, least recently used first
    used     in the block tables of `refs[block]` requests
"""

from collections.abc import Mapping, Sequence

from .prefix_cache import PrefixCache
from .prefix_history import PrefixHistory


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = enable_prefix_cache
        self._refs = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))  # a stack: what was used last is warm
        self._cache = PrefixCache()
        self.evictions = 0
        """Cached blocks that `take` gave away."""

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free ones, then cached ones."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_cached(self) -> int:
        return self._cache.num_idle

    @property
    def history(self) -> PrefixHistory:
        """What the prefix cache had, as far as it is remembered."""
        return self._cache.history

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks of undefined content, each held once. The caller has looked at `num_available`."""
        assert count <= self.num_available
        self.evictions += max(0, count - len(self._free))
        blocks = [self._free.pop() if self._free else self._cache.evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Hold these blocks once more: they are used already, or just found in the cache."""
        for block in blocks:
            if self._refs[block] == 0:
                self._cache.set_held(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give a block table back, tail first: a prefix without its tail is of use, a tail alone is not."""
        for block in reversed(blocks):
            assert self._refs[block] > 0
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._cache:
                    self._cache.set_idle(block)
                else:
                    self._free.append(block)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix. Not held: `share` them before the next `take`."""
        return self._cache.find(hashes)

    def is_cached(self, block: int) -> bool:
        """Named and held by nobody."""
        return self._refs[block] == 0 and block in self._cache

    def has_prefix(self, block_hash: bytes) -> bool:
        return bool(self._cache.find((block_hash,)))

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these found blocks count as available now and will not once shared."""
        return sum(self._refs[block] == 0 for block in blocks)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Name a held block that is full and computed, so that others find it."""
        assert self._refs[block] > 0
        self._cache.name(block, block_hash)

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Nobody shall find these held blocks any more: their content is in doubt."""
        for block in blocks:
            assert self._refs[block] > 0
            self._cache.unname(block)

    def check(self) -> None:
        """Prove free + cached + used = all. For tests and idle moments: costs a walk over the pool."""
        free, cached = set(self._free), self._cache.check()
        used = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(used) == self.num_blocks
        assert free | cached | used == set(range(self.num_blocks))
        assert not any(block in self._cache for block in free), "a free block is still named"
        assert self.num_used == len(used)

    def check_holders(self, held: Mapping[int, int]) -> None:
        """Prove that block tables hold what the pool thinks they hold."""
        assert dict(held) == {block: refs for block, refs in enumerate(self._refs) if refs > 0}
