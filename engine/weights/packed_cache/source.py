"""Read packed weights from a cache file, and write them to one."""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
from .file import DamagedPackedFile, MappedWeights, PackedContent, PackedItem
from .huge_pages import in_huge_pages, read_only

log = logging.getLogger(__name__)

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
        if hasattr(os, "setpriority"):
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
