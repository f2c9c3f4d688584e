"""A safetensors checkpoint written tensor by tensor: files of some gigabytes, and an index of several."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import INDEX, SINGLE

SHARD_BYTES: Final = 2 << 30


class ShardWriter:
    """At most one shard's tensors are in memory."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._most = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """These stand in one file: readers look for scales beside their integers."""
        have = sum(each.nbytes for each in self._tensors.values())
        more = sum(each.nbytes for each in tensors.values())
        if self._tensors and have + more > self._most:
            self._write()
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._total += more

    def finish(self) -> None:
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
        save_file(self._tensors, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._tensors))
        self._tensors = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
