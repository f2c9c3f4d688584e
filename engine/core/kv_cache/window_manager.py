"""KV of sliding-window layers: blocks of their own, freed behind the window.

    request.window_table   | 0 0 0 ... | blocks from `window_begin` on, to the end of the scheduled tokens |

The pool has room for the windows of all running requests and for the tokens of a step (`pool_blocks`), so
`cover` always finds blocks, and no request is preempted for them. Freed blocks stay in the prefix cache until
they are needed.
"""

from collections import Counter
from collections.abc import Sequence

from ..request import Request
from .block_pool import BlockPool


def pool_blocks(window: int, block_size: int, running: int, step_tokens: int) -> int:
    """Return the blocks that `running` requests need at most, with `step_tokens` in the steps in flight."""
    return running * (-(-window // block_size) + 3) + 2 * -(-step_tokens // block_size)


class WindowManager:
    """Only writer of `Request.window_table` and `window_begin`."""

    def __init__(self, pool: BlockPool, window: int) -> None:
        """`window`: tokens that a row may read, itself included."""
        self.pool = pool
        self._window = window

    def first_needed(self, position: int) -> int:
        """Return the index of the first block that a token at `position` may read."""
        return max(0, position - self._window + 1) // self.pool.block_size

    def usable_ends(self, has: Sequence[bool]) -> list[int]:
        """Return the prefixes in blocks, longest first, whose window is among the blocks that `has` is true
        for.
        """
        ends, run = list[int](), 0
        for index, is_here in enumerate(has):
            run = run + 1 if is_here else 0
            needed = index + 1 - self.first_needed((index + 1) * self.pool.block_size)
            if run >= needed:
                ends.append(index + 1)
        return ends[::-1]

    def allocate(self, request: Request, blocks: int) -> None:
        """Share the cached window of the first `blocks` blocks, one of `usable_ends`."""
        first = self.first_needed(blocks * self.pool.block_size)
        shared = [self.pool.find((block_hash,))[0] for block_hash in request.block_hashes[first:blocks]]
        self.pool.touch(shared)
        request.window_begin, request.window_table = first, [0] * first + shared

    def cover(self, request: Request, end: int) -> None:
        """Allocate the blocks of tokens up to `end`."""
        missing = self.pool.blocks_for(end) - len(request.window_table)
        if missing > 0:
            request.window_table += self.pool.allocate(missing)

    def trim(self, request: Request, position: int) -> None:
        """Free the blocks that tokens from `position` on do not read, once those up to there are computed and
        cached: a prompt may leave this one within a chunk. Steps in flight may read them: a step that writes
        to them runs later.
        """
        first = min(self.first_needed(position), len(request.window_table))
        if first > request.window_begin:
            self.pool.free(request.window_table[request.window_begin : first])
            request.window_table[request.window_begin : first] = [0] * (first - request.window_begin)
            request.window_begin = first

    def cache_blocks(self, request: Request, first: int, last: int) -> None:
        """Add the blocks `first` .. `last` - 1 to the prefix cache. Their hashes are known."""
        for index in range(max(first, request.window_begin), last):
            self.pool.cache_block(request.window_table[index], request.block_hashes[index])

    def free(self, request: Request, *, suspect: bool) -> None:
        blocks = request.window_table[request.window_begin :]
        if suspect:
            self.pool.uncache(blocks)
        self.pool.free(blocks)
        request.window_table, request.window_begin = [], 0

    def check(self, running: Sequence[Request], loading: Sequence[int] = ()) -> None:
        self.pool.check()
        held = Counter(loading)
        for request in running:
            assert not any(request.window_table[: request.window_begin])
            held.update(request.window_table[request.window_begin :])
        self.pool.check_holders(held)
