"""Prefix cache: index from token prefixes to KV blocks, so that a known prompt is not computed again.

The key of a full block is a chain hash: sha256 over the hash of the block before it (over the namespace, for
the first), its own token ids, and the hashes of pictures that have rows in it. Equal hashes therefore mean
equal tokens and pictures from position 0 on: a prefix is found by walking its hashes until one is missing.

The cache indexes blocks and orders the unreferenced ones; `BlockPool` counts references.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from ..request import Request, first_image
from .prefix_history import PrefixHistory


def extend_hashes(request: Request, block_size: int, num_blocks: int) -> None:
    """Extend `request.block_hashes` to `num_blocks` full blocks. A block is hashed once per request."""
    hashes = request.block_hashes
    parent = hashes[-1] if hashes else sha256(request.cache_namespace.encode()).digest()
    tokens = array("I", request.token_ids[len(hashes) * block_size : num_blocks * block_size])
    data, size = tokens.tobytes(), block_size * tokens.itemsize
    for start in range(0, len(data), size):
        own = data[start : start + size]
        if request.images:
            own += picture_hashes(request, len(hashes) * block_size, block_size)
        parent = sha256(parent + own).digest()
        hashes.append(parent)


def picture_hashes(request: Request, start: int, block_size: int) -> bytes:
    """Return content hashes and places of the pictures with rows in the block that begins at `start`."""
    images, found = request.images, b""
    for image in images[first_image(images, start) :]:
        if image.start >= start + block_size:
            break
        found += image.start.to_bytes(8, "little") + image.content_hash
    return found


def first_block_digest(request: Request, block_size: int) -> bytes:
    """Return the hash of the first block's tokens and pictures without the namespace."""
    own = array("I", request.token_ids[:block_size]).tobytes()
    return sha256(own + picture_hashes(request, 0, block_size) if request.images else own).digest()


class PrefixCache:
    """Two-way index hash <-> block, and the least-recently-used order of unreferenced blocks.

    Two requests that compute the same prefix at the same time fill two blocks; only the first is indexed. It
    does not replace the second, because block tables are append-only: a block in a table never changes under
    the runner. The second is freed when its request ends.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Indexed blocks without references, which can be evicted, least recently used first."""
        self.history = PrefixHistory()

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block: int, block_hash: bytes) -> None:
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def remove(self, block: int) -> None:
        """Remove a referenced block from the index; no effect on a block that is not in it."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def mark_evictable(self, block: int) -> None:
        self.idle[block] = None

    def mark_referenced(self, block: int) -> None:
        del self.idle[block]

    def evict(self) -> int:
        """Remove the least recently used unreferenced block from the index and return it."""
        block, _ = self.idle.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.history.note_evicted(block_hash)
        return block

    def check(self) -> set[int]:
        """Return idle blocks, after asserting that the index is one-to-one and that idle blocks are in it."""
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of
        assert self.idle.keys() <= self._hash_of.keys()
        return set(self.idle)
