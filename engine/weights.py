"""Weights flow from the files into the model one tensor at a time, checked, fused and packed on the way.

The model asks for what it needs, in its own order; `finish` then refuses what nobody asked for. The most
memory in use beyond the model is one fused linear and one tensor of it.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear

from .checkpoint import list_tensors
from .errors import ModelError
from .safetensors_header import FETCH_AGAIN, TensorEntry, shown

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
READ_CHUNK = 64 << 20


class Weights:
    """Tensors of one checkpoint under a name prefix; `at` goes deeper."""

    def __init__(self, source: "Source", prefix: str = "") -> None:
        self._source = source
        self._prefix = prefix

    def at(self, name: str) -> "Weights":
        return Weights(self._source, f"{self._prefix}{name}.")

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.take(f"{self._prefix}{name}", (size,))

    def embedding(self, name: str, vocab: int, hidden: int, *, tied: bool) -> PackedLinear:
        weight_VE = self._source.take(f"{self._prefix}{name}.weight", (vocab, hidden))
        return self._source.ops.pack_embedding(weight_VE, tied)

    def head(self, name: str, vocab: int, hidden: int) -> PackedLinear:
        weight_VE = self._source.take(f"{self._prefix}{name}.weight", (vocab, hidden))
        return self._source.ops.pack_head(weight_VE, None)

    def linear(self, outputs: Mapping[str, int], inputs: int, *, bias: bool) -> PackedLinear:
        """One linear of all the named ones, stacked: {name: rows}."""
        source = self._source
        total = sum(outputs.values())
        weight_OI = torch.empty(total, inputs, dtype=source.dtype, device=source.device)
        bias_O = torch.empty(total, dtype=source.dtype, device=source.device) if bias else None
        row = 0
        for name, rows in outputs.items():
            full = f"{self._prefix}{name}"
            source.take_into(f"{full}.weight", weight_OI[row : row + rows])
            if bias_O is not None:
                source.take_into(f"{full}.bias", bias_O[row : row + rows])
            row += rows
        return source.ops.pack_linear(weight_OI, bias_O)


class Source:
    """The checkpoint's files, read as the model asks. `progress` gets bytes read so far and bytes in all."""

    def __init__(
        self,
        directory: Path,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.bytes_taken = 0
        self._directory = directory
        self._entries = list_tensors(directory)
        self._progress = progress
        self._done = 0
        self._total = sum(entry.nbytes for entry in self._entries.values())

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        target = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.take_into(name, target)
        return target

    def take_into(self, name: str, target: Tensor) -> None:
        """Read `name` into `target`, converted to its dtype. Each name can be taken once."""
        entry = self._entries.pop(name, None)
        if entry is None:
            raise ModelError(f"{self._directory}: tensor {shown(name)} is missing; {FETCH_AGAIN}")
        if entry.shape != tuple(target.shape):
            raise ModelError(
                f"{entry.file}: tensor {shown(name)} has shape {list(entry.shape)}, config.json asks for "
                f"{list(target.shape)}: config and weights are not of the same model"
            )
        raw = self._read(entry)
        refuse_non_finite(raw, entry, "")
        target.copy_(raw)
        if self.dtype == torch.float16 and entry.dtype != "F16":
            refuse_non_finite(target, entry, " in float16: serve the model in bfloat16 or float32")
        self.bytes_taken += target.numel() * target.element_size()

    def skip(self, name: str) -> None:
        """`name` may be there and is not used."""
        entry = self._entries.pop(name, None)
        self._total -= entry.nbytes if entry else 0

    def finish(self) -> None:
        for name in [name for name in self._entries if name.endswith(".rotary_emb.inv_freq")]:
            self.skip(name)  # older checkpoints store it; it is computed from config.json
        if self._entries:
            name, entry = next(iter(self._entries.items()))
            more = f" and {len(self._entries) - 1} more" if len(self._entries) > 1 else ""
            raise ModelError(
                f"{entry.file}: tensor {shown(name)}{more} has no place in the architecture that config.json "
                "names: config and weights are not of the same model"
            )

    def _read(self, entry: TensorEntry) -> Tensor:
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        # Not through numpy: torch does without it, and so do we.
        view = memoryview((ctypes.c_ubyte * entry.nbytes).from_address(buffer.data_ptr())).cast("B")
        try:
            with entry.file.open("rb", buffering=0) as stream:
                stream.seek(entry.offset)
                for start in range(0, entry.nbytes, READ_CHUNK):
                    part = view[start : start + READ_CHUNK]
                    read_fully(stream.readinto, part, entry)
                    self._done += len(part)
                    self._progress(self._done, self._total)
        except OSError as error:
            raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None
        return buffer.view(DTYPES[entry.dtype]).view(entry.shape)


def read_fully(readinto: Callable[[memoryview], int | None], view: memoryview, entry: TensorEntry) -> None:
    while view:
        count = readinto(view)
        if not count:
            raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is cut short; {FETCH_AGAIN}")
        view = view[count:]


def refuse_non_finite(tensor: Tensor, entry: TensorEntry, place: str) -> None:
    if tensor.numel() and not all(torch.isfinite(x) for x in torch.aminmax(tensor)):
        raise ModelError(
            f"{entry.file}: tensor {shown(entry.name)} holds NaN or infinity{place or '; ' + FETCH_AGAIN}"
        )
