"""Bytes of one KV block or one recurrent state, in a file or in a slot of a hand-over segment.

    header   magic, version, kind, bytes of the payload, digest of the model, address, two checksums
    payload  as long as the header says, and as the reader expects

A file appears by a rename and never changes. Nothing is synced: whatever a crash of the system tears is
refused by its length or its checksums, and computed again.

A segment is shared memory through which a prefill engine hands KV blocks to a decode engine:

    segment   slot | slot | ...
    slot      header, then the payload, padded to whole pages

A slot belongs to one process at a time. The prefill engine writes free ones, seals each with its header and
says so in a message; the decode engine reads it and says when it is free again. The checksums tell a slot
that is torn or of another block; such a block is computed again.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

BlockKind = Literal["kv", "window", "state"]
KINDS: Final[tuple[BlockKind, ...]] = ("kv", "window", "state")
MAGIC: Final = b"LLMBOXKV"
VERSION: Final = 1
ADDRESS_BYTES: Final = 20
MODEL_BYTES: Final = 16
_FIELDS: Final = struct.Struct(f"<8sHHIQ{MODEL_BYTES}s{ADDRESS_BYTES}s")
_CHECKSUMS: Final = struct.Struct("<II")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUMS.size

Checksums = Callable[[memoryview, int, int], tuple[int, int]]
"""(data, checksums of the bytes before it) -> CRC-32 and Adler-32 of all, as zlib computes them."""


def zlib_checksums(data: memoryview | bytes, crc: int, adler: int) -> tuple[int, int]:
    return zlib.crc32(data, crc), zlib.adler32(data, adler)


class DamagedBlock(Exception):  # noqa: N818 - counted and computed again
    """File is torn, changed, of another model or of another version."""


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Name of a block: keyed digests, which tell nothing without the folder's secret."""

    owner: str
    """Folder of the caller's key."""
    digest: bytes
    kind: BlockKind

    @property
    def file_name(self) -> str:
        return self.digest.hex()


def write_block(
    path: Path,
    part: Path,
    address: BlockAddress,
    model: bytes,
    payload: memoryview,
    checksums: Checksums = zlib_checksums,
) -> None:
    """Write the file at `path` by way of `part`, in the same folder. Raises OSError."""
    header = make_header(address, model, payload, checksums)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            written = os.writev(handle, [header, payload])
            whole = len(header) + len(payload)
            while written < whole:  # interrupted, or more than one call writes
                written += os.write(handle, payload[written - len(header) :])
        finally:
            os.close(handle)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_block(
    path: Path,
    address: BlockAddress,
    model: bytes,
    payload: memoryview,
    checksums: Checksums = zlib_checksums,
) -> None:
    """Read the file into `payload`, which has the expected length. Raises DamagedBlock and OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_size != HEADER_BYTES + len(payload):
            raise DamagedBlock("it is not as long as such a block")
        header = bytearray(HEADER_BYTES)
        count = os.readv(handle, [header, payload])
        while count < HEADER_BYTES + len(payload):
            more = os.readv(handle, [payload[max(0, count - HEADER_BYTES) :]])
            if more == 0 or count < HEADER_BYTES:
                raise DamagedBlock("it ends early")
            count += more
    finally:
        os.close(handle)
    check_header(bytes(header), address, model, payload, checksums)


def make_header(
    address: BlockAddress, model: bytes, payload: memoryview, checksums: Checksums = zlib_checksums
) -> bytes:
    """Return the header of a block, with the checksums of `payload`."""
    fields = _fields(address, model, payload)
    return fields + _checksums(fields, payload, checksums)


def check_header(
    header: bytes,
    address: BlockAddress,
    model: bytes,
    payload: memoryview,
    checksums: Checksums = zlib_checksums,
) -> None:
    """Check that `header` is that of this block and that `payload` is whole. Raises DamagedBlock."""
    fields = header[: _FIELDS.size]
    if fields != _fields(address, model, payload):
        raise DamagedBlock("it is of another block, model or version")
    if header[_FIELDS.size :] != _checksums(fields, payload, checksums):
        raise DamagedBlock("its checksum differs")


def _fields(address: BlockAddress, model: bytes, payload: memoryview) -> bytes:
    return _FIELDS.pack(MAGIC, VERSION, KINDS.index(address.kind), 0, len(payload), model, address.digest)


def _checksums(fields: bytes, payload: memoryview, checksums: Checksums) -> bytes:
    return _CHECKSUMS.pack(*checksums(payload, *zlib_checksums(fields, 0, 1)))


SEGMENT_BYTES: Final = 64 << 20
"""Size of a segment, unless a few blocks take more."""
LEAST_SLOTS: Final = 4
_PAYLOAD_AT: Final = 128
"""Offset of the payload in its slot."""
assert HEADER_BYTES <= _PAYLOAD_AT


def slot_bytes(largest_block: int) -> int:
    """Return the size of a slot for blocks of `largest_block` bytes at most."""
    page = mmap.PAGESIZE
    return -(-(_PAYLOAD_AT + largest_block) // page) * page


def segment_bytes(largest_block: int) -> int:
    """Return the size of a segment for blocks of `largest_block` bytes at most."""
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
