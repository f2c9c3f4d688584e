"""Writer of safetensors checkpoints: shards of a few gigabytes with an index, in an atomic directory."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torch import Tensor

from ..errors import ModelError
from .index import INDEX, SINGLE
from .tensor_io import DTYPES, ROUNDED_DTYPES, bytes_of

SHARD_BYTES: Final = 2 << 30
_NAMES: Final = {dtype: name for name, dtype in (ROUNDED_DTYPES | DTYPES).items() if name != "F8_E8M0"}


class ShardWriter:
    """Write tensors into shards as they arrive; at most one shard is held in memory."""

    def __init__(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, name_of: Callable[[str], str] = str
    ) -> None:
        """`name_of`: name in the files of a tensor that is added."""
        self._folder = folder
        self._name_of = name_of
        self._most = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors that must be in the same file, as quantized weights and their scales."""
        have = sum(each.nbytes for each in self._tensors.values())
        more = sum(each.nbytes for each in tensors.values())
        if self._tensors and have + more > self._most:
            self._write()
        self._tensors |= {self._name_of(name): tensor.contiguous() for name, tensor in tensors.items()}
        self._total += more

    def finish(self) -> None:
        """Write the last shard, give the files their final names and write the index."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        write_file(self._tensors, self._part(len(self._shards)))
        self._shards.append(list(self._tensors))
        self._tensors = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def write_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors as one safetensors file. The package's `save_file` needs numpy, which is no
    dependency.
    """
    # Largest elements first, and a header of whole words, so that each tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        dtype = _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _name, tensor in ordered:
            stream.write(bytes_of(tensor))


def require_free_space(folder: Path, need: int) -> None:
    """Raise ModelError if the file system where `folder` is or will be has less than `need` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(f"{folder} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed")


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Create the directory `out` atomically: yield a temporary sibling to fill, fsync it, rename it into
    place.

    `out` must not exist or must be empty. Raises ModelError and OSError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there already: choose another place with --out")
    part = out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        fsync_tree(part)
        if out.is_dir():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fsync_tree(folder: Path) -> None:
    """Fsync a directory and everything in it: a rename does not guarantee that earlier writes are on disk."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
