"""File format of packed weights: written once, memory-mapped for reading, verified when read from disk.

    data       items one after the other, each at a multiple of ALIGNMENT
    index      JSON: key, origin files, items, a hash of each CHUNK of the data
    trailer    magic, length and hash of the index

XXH3 (64 bits) detects damage, not malice: whoever can write to the folder could as well replace the program.
Torch-free, as files are inspected before torch is imported.
"""

import contextlib
import json
import mmap
import os
import resource
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

MAGIC = b"LLMBOXW1"
TRAILER = struct.Struct("<8sQQ")
ALIGNMENT = 4096
CHUNK = 4 << 20
MAX_INDEX = 64 << 20
_VERIFIED: Final = "user.llmbox.verified"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of linux/mman.h, which Python 3.11 does not name."""


def _digest(data: bytes | bytearray | memoryview) -> int:
    from xxhash import xxh3_64_intdigest  # noqa: PLC0415 - machines without this cache need not have it

    return xxh3_64_intdigest(data)


class DamagedPackedFile(Exception):  # noqa: N818 - named for what was found
    """Packed file that fails verification and must not be used."""


@dataclass(frozen=True, slots=True)
class PackedItem:
    """Named bytes in the file. The writer defines the meaning of `shape` and `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedContent:
    """Item to be written to a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: memoryview


@dataclass(frozen=True, slots=True)
class PackedOrigin:
    """Checkpoint file from which the weights were packed, with size and time as they were then."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "PackedOrigin":
        status = path.stat()
        return cls(str(path), status.st_size, status.st_mtime_ns)

    @property
    def still_there(self) -> bool:
        try:
            return PackedOrigin.of(Path(self.path)) == self
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """Index of a packed file."""

    key: str
    model: str
    """Directory of the model."""
    format: str
    """Human-readable dtype or quantization, and kernels."""
    origins: tuple[PackedOrigin, ...]
    items: tuple[PackedItem, ...]
    data_bytes: int
    hashes: tuple[int, ...]


def planned_bytes(contents: Sequence[PackedContent]) -> int:
    """Return the bytes of the data, without the index."""
    return sum(_aligned(content.data.nbytes) for content in contents)


def write(
    out: BinaryIO,
    contents: Sequence[PackedContent],
    *,
    key: str,
    model: str,
    format: str,  # noqa: A002 - the field's name
    origins: Iterable[PackedOrigin],
) -> None:
    """Write a packed file to `out`, which is empty and unbuffered."""
    chunks, items = _ChunkWriter(out), []
    for content in contents:
        items.append(
            PackedItem(content.name, content.shape, content.dtype, chunks.offset, content.data.nbytes)
        )
        chunks.add(content.data)
        chunks.add(memoryview(bytes(-chunks.offset % ALIGNMENT)))
    chunks.flush()
    index = PackedIndex(key, model, format, tuple(origins), tuple(items), chunks.offset, tuple(chunks.hashes))
    text = json.dumps(asdict(index)).encode()
    out.write(text + TRAILER.pack(MAGIC, len(text), _digest(text)))


class _ChunkWriter:
    """Writer of whole chunks at multiples of CHUNK, which the page cache keeps in huge pages."""

    def __init__(self, out: BinaryIO) -> None:
        self.offset = 0
        self.hashes: list[int] = []
        self._out = out
        self._buffer = bytearray(CHUNK)
        self._filled = 0

    def add(self, data: memoryview) -> None:
        while data:
            part = data[: CHUNK - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self.offset += len(part)
            data = data[len(part) :]
            if self._filled == CHUNK:
                self.flush()

    def flush(self) -> None:
        if self._filled:
            chunk = memoryview(self._buffer)[: self._filled]
            self.hashes.append(_digest(chunk))
            self._out.write(chunk)
            self._filled = 0


def read_index(file: BinaryIO) -> PackedIndex:
    """Read and verify the index. Raises DamagedPackedFile."""
    size = os.fstat(file.fileno()).st_size
    if size < TRAILER.size:
        raise DamagedPackedFile(f"{size} bytes")
    file.seek(size - TRAILER.size)
    magic, length, digest = TRAILER.unpack(file.read(TRAILER.size))
    if magic != MAGIC:
        raise DamagedPackedFile("no trailer")
    if length > min(MAX_INDEX, size - TRAILER.size):
        raise DamagedPackedFile("an index longer than the file")
    file.seek(size - TRAILER.size - length)
    text = file.read(length)
    if _digest(text) != digest:
        raise DamagedPackedFile("the index has changed")
    try:
        index = _index(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedPackedFile(f"the index is invalid: {error!r}") from None
    if index.data_bytes != size - TRAILER.size - length:
        raise DamagedPackedFile("data of another length")
    return index


def _index(raw: dict[str, Any]) -> PackedIndex:
    items = tuple(PackedItem(**{**item, "shape": tuple(item["shape"])}) for item in raw["items"])
    data_bytes, hashes = int(raw["data_bytes"]), tuple(raw["hashes"])
    for item in items:
        if not 0 <= item.offset <= item.offset + item.nbytes <= data_bytes or item.offset % ALIGNMENT:
            raise ValueError(f"{item.name} lies outside")
    if len(hashes) != -(-data_bytes // CHUNK) or len({item.name for item in items}) != len(items):
        raise ValueError("counts do not agree")
    return PackedIndex(
        key=str(raw["key"]),
        model=str(raw["model"]),
        format=str(raw["format"]),
        origins=tuple(PackedOrigin(**origin) for origin in raw["origins"]),
        items=items,
        data_bytes=data_bytes,
        hashes=hashes,
    )


def is_noted(file: Path | int, name: str, state: str = "") -> bool:
    """Return whether `note` was called with the same arguments since the machine started."""
    with contextlib.suppress(OSError, AttributeError):  # no such attribute, or a system without them
        return os.getxattr(file, name) == _BOOT.read_bytes() + state.encode()
    return False


def note(file: Path | int, name: str, state: str = "") -> None:
    """Note something beside a file, which holds until the machine restarts. A failure is ignored."""
    with contextlib.suppress(OSError, AttributeError):
        os.setxattr(file, name, _BOOT.read_bytes() + state.encode())


def note_verified(file: BinaryIO) -> None:
    """Note that a file was verified, as it is now. Later loads trust what of it is in the page cache."""
    note(file.fileno(), _VERIFIED, _state(file))


def _state(file: BinaryIO) -> str:
    status = os.fstat(file.fileno())
    return f"{status.st_size} {status.st_mtime_ns}"


class MappedWeights:
    """Verified memory map of a file's data. The mapping lives as long as a view of it."""

    def __init__(self, file: BinaryIO, index: PackedIndex) -> None:
        """Map the file, and verify it unless it is in the page cache and was verified since the machine
        started. Raises DamagedPackedFile, or OSError when memory is short.
        """
        self.index = index
        self.path = Path(file.name)
        self._items = {item.name: item for item in index.items}
        memory = mmap.mmap(file.fileno(), index.data_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        with contextlib.suppress(OSError):  # a file system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(memory)
        if _is_in_memory(memory) and is_noted(file.fileno(), _VERIFIED, _state(file)):
            return
        changed = [
            number for number, is_same in enumerate(_compare(self.memory, index.hashes)) if not is_same
        ]
        if changed:
            raise DamagedPackedFile(f"chunk {changed[0]} has changed")

    def item(self, name: str) -> PackedItem | None:
        return self._items.get(name)


def _is_in_memory(memory: mmap.mmap) -> bool:
    """Map all pages of a file. False: some had to be read from disk, or the system cannot do this."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
    try:
        memory.madvise(_POPULATE_READ)
    except (OSError, ValueError):  # before Linux 5.14; an empty mapping
        return False
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock == before


def _compare(data: memoryview, hashes: Sequence[int]) -> list[bool]:
    """Return whether each chunk has its hash. Two threads read it: one core does not use all of the memory's
    bandwidth, and a load waits for this.
    """
    from xxhash import xxh3_64  # noqa: PLC0415 - as above

    def is_same(number: int) -> bool:
        hasher = xxh3_64()
        hasher.update(data[number * CHUNK : (number + 1) * CHUNK])  # without the interpreter lock
        return hasher.intdigest() == hashes[number]

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(is_same, range(len(hashes))))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
