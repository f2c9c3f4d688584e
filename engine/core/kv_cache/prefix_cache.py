"""Prefix cache: index from token prefixes to KV blocks, so that a known prompt is not computed again.

The key of a full block is a chain hash: sha256 over the hash of the block before it (for the first, over the
namespace and which of LongRoPE's factors are used), its own token ids, and the hashes of images that have
rows in it. Equal hashes therefore mean equal tokens, images and factors from position 0 on: a prefix is
found by walking its hashes until one is missing.

The cache indexes blocks and orders the unreferenced ones; `BlockPool` counts references. `PrefixHistory` has
the statistics: why a prefix is absent, and which prefixes requests share most.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final, TypeVar

from ...ipc.messages import PrefixMissReason
from ...ipc.profile_messages import PrefixUse
from ..request import Request, first_image


def extend_hashes(request: Request, block_size: int, num_blocks: int) -> None:
    """Extend `request.block_hashes` to `num_blocks` full blocks. A block is hashed once per request."""
    hashes = request.block_hashes
    parent = hashes[-1] if hashes else root_hash(request)
    tokens = array("I", request.token_ids[len(hashes) * block_size : num_blocks * block_size])
    data, size = tokens.tobytes(), block_size * tokens.itemsize
    for start in range(0, len(data), size):
        own = data[start : start + size]
        if request.images:
            own += image_hashes(request, len(hashes) * block_size, block_size)
        parent = sha256(parent + own).digest()
        hashes.append(parent)


def root_hash(request: Request) -> bytes:
    """Return the seed of the first block's hash: a digest of the namespace and of LongRoPE's factors."""
    namespace = sha256(request.cache_namespace.encode()).digest()
    # In front: no digest and tokens of a block are as long as this.
    return sha256(b"long factors:" + namespace).digest() if request.is_long else namespace


def image_hashes(request: Request, start: int, block_size: int) -> bytes:
    """Return content hashes and places of the images with rows in the block that begins at `start`."""
    images, found = request.images, b""
    for image in images[first_image(images, start) :]:
        if image.start >= start + block_size:
            break
        found += image.start.to_bytes(8, "little") + image.content_hash
    return found


def first_block_digest(request: Request, block_size: int) -> bytes:
    """Return the hash of the first block's tokens and images without the namespace."""
    own = array("I", request.token_ids[:block_size]).tobytes()
    return sha256(own + image_hashes(request, 0, block_size) if request.images else own).digest()


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
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Callback with a block that is evicted and its hash, while the block still has its content."""

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
        if self.on_evict is not None:
            self.on_evict(block, block_hash)
        return block

    def check(self) -> set[int]:
        """Return idle blocks, after asserting that the index is one-to-one and that idle blocks are in it."""
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of
        assert self.idle.keys() <= self._hash_of.keys()
        return set(self.idle)


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

    def __init__(self) -> None:
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
        if len(self._uses) > REMEMBERED_USES:
            self._uses.popitem(last=False)

    def top(self, is_here: Callable[[bytes], bool]) -> list[PrefixUse]:
        """Return the prefixes that saved most tokens, among those for which `is_here` is true."""
        here = [use for chain_hash, use in self._uses.items() if is_here(chain_hash)]
        return sorted(here, key=lambda use: use.hits * use.tokens, reverse=True)[:MAX_REPORTED]


_KEY_BYTES: Final = 8
"""Bytes of a block's hash that tell it from others here; a mix-up would only spoil a replay."""


class BlockOwners:
    """First ended sequence of each block, by its hash, for records of scheduling."""

    def __init__(self, most: int) -> None:
        """`most`: number of blocks that are remembered."""
        self._owners: OrderedDict[bytes, int] = OrderedDict()
        self._most = most

    def link(self, number: int, hashes: list[bytes]) -> tuple[int, int]:
        """Return (owner of the last known block, number of known blocks) of a sequence, and remember all of
        them.

        The last ones are forgotten first: without its beginning the rest of a prefix is of no use.
        """
        owners = self._owners
        keys = [block[:_KEY_BYTES] for block in hashes[: self._most]]
        owner, shared = -1, 0
        for key in keys:
            found = owners.get(key)
            if found is None:
                break
            owner, shared = found, shared + 1
        for place in range(len(keys) - 1, -1, -1):
            if place >= shared:
                owners[keys[place]] = number
            owners.move_to_end(keys[place])
        while len(owners) > self._most:
            owners.popitem(last=False)
        return owner, shared
