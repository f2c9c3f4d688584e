"""Hand-over segment: shared memory through which a prefill engine hands KV blocks to a decode engine.

    segment   slot | slot | ...
    slot      header as in a file of one block (`block_file.py`), then the payload, padded to whole pages

A slot belongs to one process at a time. The prefill engine writes free ones, seals each with its header and
says so in a message; the decode engine reads it and says when it is free again. The checksums tell a slot
that is torn or of another block; such a block is computed again.
"""

import mmap
import os
from typing import Final

from .block_file import (
    ADDRESS_BYTES,
    HEADER_BYTES,
    MODEL_BYTES,
    BlockAddress,
    BlockKind,
    Checksums,
    DamagedBlock,
    check_header,
    make_header,
    zlib_checksums,
)

SEGMENT_BYTES: Final = 64 << 20
"""Size of a segment, unless a few blocks take more."""
LEAST_SLOTS: Final = 4
_PAYLOAD_AT: Final = 128
"""Offset of the payload in its slot."""
assert HEADER_BYTES <= _PAYLOAD_AT


def slot_bytes(largest_block: int) -> int:
    """Return the size of a slot for blocks of so many bytes."""
    page = mmap.PAGESIZE
    return -(-(_PAYLOAD_AT + largest_block) // page) * page


def segment_bytes(largest_block: int) -> int:
    """Return the size of a segment for blocks of so many bytes."""
    size = slot_bytes(largest_block)
    return max(LEAST_SLOTS, SEGMENT_BYTES // size) * size


class HandoverSegment:
    """One process's view of the segment behind a descriptor."""

    def __init__(
        self,
        handle: int,
        largest_block: int,
        model: bytes = bytes(MODEL_BYTES),
        checksums: Checksums = zlib_checksums,
    ) -> None:
        """`model`: digest of all that the bits of a block depend on, the same on both sides."""
        self.handle = handle
        self._size = slot_bytes(largest_block)
        self._model, self._checksums = model, checksums
        self._memory = memoryview(mmap.mmap(handle, os.fstat(handle).st_size))
        self.num_slots = len(self._memory) // self._size

    @staticmethod
    def create(largest_block: int) -> int:
        """Return the descriptor of a new segment, which ends with the last process that has it."""
        handle = os.memfd_create("llmbox-handover", os.MFD_CLOEXEC)
        os.ftruncate(handle, segment_bytes(largest_block))
        return handle

    def payload(self, slot: int, size: int) -> memoryview:
        """Return the memory of a slot's block."""
        at = slot * self._size + _PAYLOAD_AT
        return self._memory[at : at + size]

    def seal(self, slot: int, kind: BlockKind, block_hash: bytes, size: int) -> None:
        """Write the header of a block whose payload is complete."""
        at = slot * self._size
        address = _address(kind, block_hash)
        header = make_header(address, self._model, self.payload(slot, size), self._checksums)
        self._memory[at : at + HEADER_BYTES] = header

    def open(self, slot: int, kind: BlockKind, block_hash: bytes, size: int) -> memoryview:
        """Return the payload of a block that was handed over. Raises DamagedBlock."""
        if not 0 <= slot < self.num_slots:
            raise DamagedBlock("there is no such slot")
        at, payload = slot * self._size, self.payload(slot, size)
        header = bytes(self._memory[at : at + HEADER_BYTES])
        check_header(header, _address(kind, block_hash), self._model, payload, self._checksums)
        return payload


def _address(kind: BlockKind, block_hash: bytes) -> BlockAddress:
    return BlockAddress("", block_hash[:ADDRESS_BYTES].ljust(ADDRESS_BYTES, b"\0"), kind)
