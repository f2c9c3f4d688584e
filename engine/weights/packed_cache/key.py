"""Key of packed weights in their cache, a digest of checkpoint, format, kernels and shard, and the
environment variables with the folder and limit of the cache. Torch-free.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.files import MAX_BYTES, open_regular, read_regular
from ...checkpoint.index import weight_files
from ...checkpoint.safetensors import MAX_HEADER
from ...gguf.folder import gguf_of, projector_of
from ...gguf.reader import files_of
from .file import PackedOrigin

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackKey:
    directory: Path
    dtype: str
    quant: str
    layout: str
    """Memory layout of the kernels (`Packing.layout`)."""
    shard: str = ""
    """Shard of the model (`ParallelLayout.shard`); empty for all of it."""
    placement: str = ""
    """`ParallelLayout.placement_digest`: a new placement of experts replaces the file of the old one."""

    @property
    def format(self) -> str:
        """Human-readable format."""
        shard = f", part {self.shard}" if self.shard else ""
        weights = self.dtype if self.quant == "none" else f"{self.quant} ({self.dtype})"
        return f"{weights}, {self.layout.partition(' ')[0]}{shard}"

    def origins(self) -> tuple[PackedOrigin, ...]:
        """Return the checkpoint's files. Raises ModelError and OSError."""
        return tuple(PackedOrigin.of(file.resolve()) for file in self._files())

    def _files(self) -> list[Path]:
        file = gguf_of(self.directory)
        if file is None:
            return weight_files(self.directory)
        projector = projector_of(self.directory)
        return [*files_of(file), *([] if projector is None else [projector])]

    def digest(self) -> str:
        """Return the key as hex. Reads headers and config, not the weights. Raises ModelError and OSError."""
        digest = hashlib.sha256()
        parts = (self.dtype, self.quant, self.layout, self.shard, *filter(None, [self.placement]))
        config = read_regular(self.directory / "config.json", MAX_BYTES)
        for part in (*map(str.encode, parts), config):
            digest.update(part + b"\0")
        for file in self._files():
            digest.update(identity(file.resolve()).encode() + b"\0")
        return digest.hexdigest()[:32]


def identity(file: Path) -> str:
    """Identify a weights file: a blob of the hub's cache by its content hash, others by path and header."""
    if file.parent.name == "blobs" and SHA256.fullmatch(file.name):
        return file.name
    status = file.stat()
    with open_regular(file) as stream:
        length = min(int.from_bytes(stream.read(8), "little"), status.st_size, MAX_HEADER)
        header = hashlib.sha256(stream.read(length)).hexdigest()
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{header}"


FOLDER, MOST = "LLMBOX_REPACKED", "LLMBOX_REPACKED_GB"


def variables(folder: Path, most_gb: float) -> dict[str, str]:
    return {FOLDER: str(folder), MOST: str(most_gb)}


def read(environ: Mapping[str, str] = os.environ) -> tuple[Path, int] | None:
    """Return the cache folder and its limit in bytes; None when the cache is off."""
    folder, most = environ.get(FOLDER), environ.get(MOST)
    if not folder or not most or float(most) <= 0:
        return None
    return Path(folder), int(float(most) * 1e9)
