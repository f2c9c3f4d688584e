"""Read packed weights from a cache file, in huge pages, and write them to one.

Every step streams mapped weights, and page walks of small pages cost 5 to 15 %. A mapped file is in huge
pages where its file system uses large folios (ext4 and XFS of recent kernels) and it was written in large
pieces: then the mapping is used directly, which costs nothing and shares the page cache. Where some of it is
in small pages, as memory was in fragments when it was written or read, these parts are replaced by copies in
anonymous huge pages; before Linux 6.7, which first tells where they are, all of it is.

Huge pages of the page cache can still be slow: they stay where they were allocated when the file was written,
perhaps in another socket's memory, or in memory that a hypervisor backs with small pages. So both are timed,
until they have been found fast once since the machine started.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import statistics
import struct
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.weight_packing import Packing

from ...checkpoint.files import open_regular
from ...checkpoint.tensor_io import bytes_of
from ...distributed.communicator import SINGLE, TensorParallel
from ...hardware.proc import at_exit
from ..source import WeightRequest
from .cache import PackedWeightCache, PackKey
from .file import DamagedPackedFile, MappedWeights, PackedContent, PackedItem, is_noted, note

SMALL = 64 << 20
"""Mapping size in bytes below which small pages do not matter."""
ENOUGH = 0.95
"""Least share of the mapping in huge pages. With 82 % of it there, 32 concurrent streams ran at 0.87 to 0.91
times the speed of a copy."""
SPEED_ENOUGH = 0.9
"""Least read speed relative to new memory. In a virtual machine two files were read at 0.65 to 0.75 times
that speed, and int8 decoding of one stream ran at 0.79 times the rate of a copy; two other files at 0.9 to
1."""
_PIECES = 16
_PIECE = 4 << 20
_HUGE = 2 << 20
_SMAPS = Path("/proc/self/smaps")
_FOUND_FAST = "user.llmbox.found_fast"

log = logging.getLogger(__name__)


def in_huge_pages(mapped: Tensor, file: Path) -> tuple[Tensor, int]:
    """Return a whole mapping of `file` that was read once, or a copy of it in huge pages; and the bytes of
    the file that are used in place. Raises OSError.
    """
    if mapped.nbytes < SMALL:
        return mapped, mapped.nbytes
    small = small_ranges(mapped.data_ptr(), mapped.nbytes)
    if small is None:
        share = huge_share(mapped.data_ptr())
    else:
        share = 1 - sum(end - begin for begin, end in small) / mapped.nbytes
    replaced = 0
    if share < ENOUGH:
        if small is None:
            return copy_to_huge_pages(mapped), 0
        replaced = replace_pages(mapped, small)
    if is_noted(file, _FOUND_FAST):
        return mapped, mapped.nbytes - replaced
    if (speed := relative_speed(mapped)) < SPEED_ENOUGH:
        log.info("packed weights are copied: their pages are read at %.2f times the speed of new ones", speed)
        return copy_to_huge_pages(mapped), 0
    note(file, _FOUND_FAST)
    return mapped, mapped.nbytes - replaced


_SCAN: Final = struct.Struct("<12Q")
"""`struct pm_scan_arg` of linux/fs.h, and its ioctl (Linux 6.7): which pages of a range are in huge ones."""
_SCAN_IOCTL: Final = 0xC0606610
_IS_HUGE: Final = 1 << 6
_REGIONS: Final = 4096
_PAGEMAP: Final = Path("/proc/self/pagemap")


def small_ranges(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Return the ranges [begin, end) of addresses of a mapping that are in small pages, each of whole huge
    pages; None where the system cannot tell.

    Takes a tenth of a millisecond, where `huge_share` takes seven: the system visits every page for that.
    """
    first, last = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    regions = (ctypes.c_uint64 * (3 * _REGIONS))()
    where = ctypes.addressof(regions), _REGIONS
    asked = bytearray(_SCAN.pack(_SCAN.size, 0, first, last, 0, *where, 0, 0, _IS_HUGE, 0, _IS_HUGE))
    try:
        with _PAGEMAP.open("rb") as pages:
            count = fcntl.ioctl(pages, _SCAN_IOCTL, asked)
    except OSError:
        return None
    small, at = [], first
    for number in range(count):
        begin, end = regions[3 * number], regions[3 * number + 1]
        if begin > at:
            small.append((at, begin))
        at = end
    return [*small, (at, last)] if at < last else small


def replace_pages(mapped: Tensor, ranges: Sequence[tuple[int, int]]) -> int:
    """Replace the pages of these ranges, in place, by copies in huge pages. Returns their bytes. Raises
    OSError; then the mapping must not be used.
    """
    nbytes = sum(end - begin for begin, end in ranges)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    offset, size = ctypes.c_long(0), ctypes.c_size_t(nbytes + _HUGE)
    base = libc.mmap(None, size, access, kind, -1, offset)
    if base == _FAILED:
        raise OSError(ctypes.get_errno(), "no memory for packed weights")
    at = start = -(-base // _HUGE) * _HUGE
    try:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype=torch.uint8)
        copied, pairs = 0, []
        for begin, end in ranges:
            source = mapped[begin - mapped.data_ptr() : end - mapped.data_ptr()]
            pairs.append((whole[copied : copied + end - begin], source))
            copied += end - begin
        copy_beside(pairs)
        for begin, end in ranges:
            part = ctypes.c_size_t(end - begin)
            moved = libc.mremap(ctypes.c_void_p(at), part, part, _MOVE_TO, ctypes.c_void_p(begin))
            if moved == _FAILED:
                raise OSError(ctypes.get_errno(), "packed weights cannot be replaced in place")
            at += end - begin
    finally:
        for begin, end in ((base, start), (at, base + nbytes + _HUGE)):
            if begin < end:
                libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))
    return nbytes


_FAILED: Final = ctypes.c_void_p(-1).value
_MOVE_TO: Final = 3
"""MREMAP_MAYMOVE | MREMAP_FIXED"""


def relative_speed(mapped: Tensor) -> float:
    """Measure the read speed of samples of `mapped` (64 MB or more) relative to new memory, in some 50 ms."""
    fresh = _anonymous(_PIECES * _PIECE).zero_()
    every = mapped.nbytes // _PIECES // _PIECE * _PIECE
    theirs, ours = [], []
    for i in range(_PIECES):  # alternate: the machine's own speed drifts
        theirs.append(_read_seconds(mapped[i * every :][:_PIECE]))
        ours.append(_read_seconds(fresh[i * _PIECE :][:_PIECE]))
    return statistics.median(ours) / statistics.median(theirs)


def _read_seconds(piece: Tensor) -> float:
    start = time.perf_counter()
    piece.view(torch.int32).amax()
    return time.perf_counter() - start


def read_only(data: memoryview) -> Tensor:
    """View read-only memory as a uint8 tensor. It must not be written: torch has no read-only tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)


def huge_share(address: int) -> float:
    """Return the share in huge pages of the mapping that begins at `address`; 1 where unknown, as a copy
    might gain nothing.
    """
    fields: dict[str, int] = {}
    begin, is_found = f"{address:x}-", False
    try:
        with _SMAPS.open(encoding="utf-8", errors="replace") as lines:
            # Pages of a mapping are counted when its lines are read: those of torch's, behind it, are not.
            for line in lines:
                if is_found:
                    name, _, value = line.rstrip().partition(":")
                    if not value.endswith("kB"):
                        break
                    fields[name] = int(value.split()[0])
                is_found = is_found or line.startswith(begin)
    except OSError:
        return 1.0
    if not is_found:
        return 1.0
    return fields.get("FilePmdMapped", 0) / max(1, fields.get("Size", 1))


def copy_to_huge_pages(data: Tensor, threads: int = 2) -> Tensor:
    """Copy into anonymous huge pages with several threads."""
    target = _anonymous(data.nbytes)
    copy_beside([(target, data)], threads)
    return target


def copy_beside(pairs: Sequence[tuple[Tensor, Tensor]], threads: int = 2) -> None:
    """Copy the second of each pair into the first, a share of its bytes in each thread."""

    def copy(number: int) -> None:  # releases the interpreter lock
        for target, data in pairs:
            share = -(-data.nbytes // threads)
            target[number * share :][:share].copy_(data[number * share :][:share])

    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(copy, range(threads)))


def _anonymous(nbytes: int) -> Tensor:
    """Allocate zeroed memory in huge pages, not touched yet."""
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + nbytes]


_BIAS = ".bias"
_FORMAT = ":"
"""Separates a weight's kind from its format, which is not that of all weights of its kind: a checkpoint may
leave some linears unquantized."""
_WRITER = "keep packed weights"
"""Name of the thread that writes."""
END_S = 1.5
"""Seconds for which a process that ends waits for the write; its daemon kills it after 2."""


class PackedWeightSource:
    """`WeightSource` over a packed file. Requests for missing weights raise DamagedPackedFile."""

    def __init__(
        self, ops: Ops, dtype: torch.dtype, file: MappedWeights, rank: TensorParallel = SINGLE
    ) -> None:
        assert ops.packing is not None
        self.ops = ops
        self.rank = rank
        self._packing: Packing = ops.packing
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._file = file
        self._bytes, self.mapped = in_huge_pages(read_only(file.memory), file.path)
        """`mapped`: bytes of the file that stay mapped, and were not copied."""

    def vector(self, name: str, size: int) -> Tensor:
        return self._tensor(name, (size,), self.dtype)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._tensor(name, shape, torch.float32)

    def packed(self, asked: WeightRequest) -> PackedLinear:
        bias_O = self._tensor(asked.name + _BIAS, asked.shape[:1], self.dtype) if asked.bias else None
        item = self._file.item(asked.name)
        kind, _, name = ("", "", "") if item is None else item.dtype.partition(_FORMAT)
        if item is None or (item.shape, kind) != (asked.shape, asked.kind):
            raise DamagedPackedFile(f"{asked.name} is missing or another one")
        panels = self._bytes[item.offset : item.offset + item.nbytes]
        linear = self._packing.attach(name, asked.shape, self.dtype, panels, bias_O)
        if linear is None:
            raise DamagedPackedFile(f"{asked.name} does not fit its shape")
        return linear

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        pass

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        pass

    def skip(self, name: str) -> None:
        pass

    def skip_experts(self, name: str, held: Sequence[int]) -> None:
        pass

    def finish(self) -> None:
        pass

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        item = self._item(name, shape, str(dtype))
        return self._bytes[item.offset : item.offset + item.nbytes].view(dtype).view(shape)

    def _item(self, name: str, shape: tuple[int, ...], dtype: str) -> PackedItem:
        item = self._file.item(name)
        if item is None or (item.shape, item.dtype) != (shape, dtype):
            raise DamagedPackedFile(f"{name} is missing or another one")
        return item


class PackedWeightWriter:
    """`WeightObserver` that collects the packed weights of a load and writes them in a thread."""

    def __init__(self, cache: PackedWeightCache, key: PackKey, packing: Packing) -> None:
        self._cache = cache
        self._key = key
        self._packing = packing
        self._contents: list[PackedContent] = []
        self._alive: list[Any] = []

    def vector(self, name: str, vector: Tensor) -> None:
        shape, dtype = tuple(vector.shape), str(vector.dtype)
        self._add(name, shape, dtype, memoryview(bytes(bytes_of(vector.contiguous()))))

    def packed(self, asked: WeightRequest, packed: PackedLinear, bias_O: Tensor | None) -> None:
        dtype = f"{asked.kind}{_FORMAT}{self._packing.format_name(packed)}"
        self._add(asked.name, asked.shape, dtype, self._packing.panels(packed))
        self._alive.append(packed)
        if bias_O is not None:
            self.vector(asked.name + _BIAS, bias_O)

    def start(self) -> None:
        """Write in a thread of lowest priority. A process that ends waits up to END_S seconds for it.

        If the last process of these weights could not wait, write them now: models that take turns would be
        packed at every turn.
        """
        if self._cache.take_interrupted(self._key):
            self._write()
            return
        thread = threading.Thread(target=self._write_behind, name=_WRITER, daemon=True)
        thread.start()
        at_exit(partial(self._end, thread))

    def _end(self, thread: threading.Thread) -> None:
        """Wait for the write; drop the unfinished file where it takes too long."""
        thread.join(END_S)
        if thread.is_alive():
            log.warning("packed weights are not kept: the engine ended while they were written")
            self._cache.note_interrupted(self._key)
            self._cache.drop_unfinished()

    def _write_behind(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        self._write()

    def _write(self) -> None:
        try:
            if self._cache.store(self._key, self._contents):
                forget_pages([Path(origin.path) for origin in self._key.origins()])
        except Exception:
            log.exception("packed weights are not kept")
        self._contents, self._alive = [], []

    def _add(self, name: str, shape: tuple[int, ...], dtype: str, data: memoryview) -> None:
        self._contents.append(PackedContent(name, shape, dtype, data))


def is_writing() -> bool:
    """Return whether this process still writes packed weights, which must not change until then."""
    return any(thread.name == _WRITER for thread in threading.enumerate())


def forget_pages(files: Sequence[Path]) -> None:
    """Drop these files from the page cache: the next load will not read them."""
    for file in files:
        with open_regular(file) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
