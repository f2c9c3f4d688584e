"""Huge pages for mapped weights: every step streams them, and page walks of small pages cost 5 to 15 %.

A mapped file is in huge pages where its file system uses large folios (ext4 and XFS of recent kernels) and it
was written in large pieces: then the mapping is used directly, which costs nothing and shares the page cache.
Otherwise the data is copied once into anonymous huge pages.

Huge pages of the page cache can still be slow: they stay where they were allocated when the file was written,
perhaps in another socket's memory, or in memory that a hypervisor backs with small pages. So both are timed,
until they have been found fast once since the machine started.
"""

import contextlib
import logging
import mmap
import os
import statistics
import threading
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor

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
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_FOUND_FAST = "user.llmbox.found_fast"

log = logging.getLogger(__name__)


def in_huge_pages(mapped: Tensor, file: Path) -> Tensor:
    """Return a whole mapping of `file` that was read once, or a copy of it in huge pages. Raises OSError."""
    if mapped.nbytes < SMALL:
        return mapped
    if huge_share(mapped.data_ptr()) < ENOUGH:
        return copy_to_huge_pages(mapped)
    if was_fast(file):
        return mapped
    if (speed := relative_speed(mapped)) < SPEED_ENOUGH:
        log.info("packed weights are copied: their pages are read at %.2f times the speed of new ones", speed)
        return copy_to_huge_pages(mapped)
    note_fast(file)
    return mapped


def was_fast(file: Path) -> bool:
    """Return whether the pages of a file were found fast since the machine started."""
    with contextlib.suppress(OSError, AttributeError):  # no such attribute, or a system without them
        return os.getxattr(file, _FOUND_FAST) == _BOOT.read_bytes()
    return False


def note_fast(file: Path) -> None:
    """Note beside a file that its pages were found fast. Where that fails they are timed again."""
    with contextlib.suppress(OSError, AttributeError):
        os.setxattr(file, _FOUND_FAST, _BOOT.read_bytes())


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
            # The system counts the pages of a mapping when its lines are read: not those of torch's, behind it.
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
    share = -(-data.nbytes // threads)
    workers = [
        threading.Thread(  # copying releases the interpreter lock
            target=target[begin : begin + share].copy_, args=(data[begin : begin + share],)
        )
        for begin in range(0, data.nbytes, share)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return target


def _anonymous(nbytes: int) -> Tensor:
    """Allocate zeroed memory in huge pages, not touched yet."""
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + nbytes]
