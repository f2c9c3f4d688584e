"""Weights are streamed at every step: they should lie in huge pages, or page walks cost 5 to 15 %.

A mapped file lies in huge pages where its file system keeps large folios (ext4 and XFS of recent kernels) and
it was written in large pieces: then the mapping is used as it is, which costs nothing and is shared with the
page cache. Elsewhere the data is copied once into anonymous huge pages.
"""

import mmap
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

SMALL = 64 << 20
"""Bytes below which small pages do not matter."""
ENOUGH = 0.95
"""Of the mapping. With 82 % in huge pages 32 streams came at 0.87 to 0.91 times the speed of a copy."""
_HUGE = 2 << 20
_SMAPS = Path("/proc/self/smaps")


def in_huge_pages(mapped: Tensor) -> Tensor:
    """The bytes of a whole mapping that was read once: itself, or a copy. Raises OSError."""
    if mapped.nbytes < SMALL or huge_share(mapped.data_ptr()) >= ENOUGH:
        return mapped
    return copied(mapped)


def read_only(data: memoryview) -> Tensor:
    """Torch knows no tensors that cannot be written to: nobody may try."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)


def huge_share(address: int) -> float:
    """Of the mapping that begins at `address`; 1 where nobody tells, as a copy might gain nothing."""
    try:
        lines = _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 1.0
    begin = f"{address:x}-"
    start = next((i for i, line in enumerate(lines) if line.startswith(begin)), None)
    if start is None:
        return 1.0
    fields: dict[str, int] = {}
    for line in lines[start + 1 :]:
        name, _, value = line.partition(":")
        if not value.endswith("kB"):
            break
        fields[name] = int(value.split()[0])
    return fields.get("FilePmdMapped", 0) / max(1, fields.get("Size", 1))


def copied(data: Tensor, threads: int = 2) -> Tensor:
    memory = mmap.mmap(-1, data.nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    target = whole[start : start + data.nbytes]
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
