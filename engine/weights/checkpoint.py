"""`WeightSource` over a checkpoint: tensors are read from files one at a time, checked, stacked and packed.

Peak memory beyond the model is one stacked linear and one tensor of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.quant_formats import HEADS, OF_LAYERS, QUANTS, ROUNDED_HEAD, Quant
from llmbox.kernels.weight_packing import QuantizedWeight

from ..checkpoint.files import open_regular, read_json
from ..checkpoint.formats.floats import split_experts
from ..checkpoint.formats.registry import find_weight_format
from ..checkpoint.formats.weight_format import NativeFormat, StoredTensor, WeightFormat, form_of, is_quantized
from ..checkpoint.index import NOT_NEEDED, list_tensors, refuse_undeclared
from ..checkpoint.quantized_layout import SCALES, STEP
from ..checkpoint.safetensors import (
    FETCH_AGAIN,
    ShardSlice,
    TensorEntry,
    misplaced_tensor,
    missing_tensor,
    shown,
    wrong_shape,
)
from ..checkpoint.tensor_io import (
    DTYPES,
    ROUNDED_DTYPES,
    byte_runs,
    bytes_of,
    read_fully,
    refuse_non_finite,
    split_rows,
    split_stack,
)
from ..distributed.communicator import SINGLE, TensorParallel
from ..errors import ModelError
from .quantized import read_quantized, select_rows
from .source import PackingSource, WeightObserver, WeightRequest, pack
from .stored import StoredReader

LAYERS = ("model.layers.", "mtp.layers.")
EXPERT_SUFFIXES = {"": ".weight", ".weight": ".weight", "_bias": ".bias"}
"""Suffixes of tensors that hold all experts of a layer, and of those of one expert."""
REPORTED_EVERY = 1 << 20
"""Bytes between two reports of progress, where a tensor is read in many small runs."""


class Checkpoint(PackingSource):
    """`WeightSource` over a checkpoint's safetensors files.

    `progress` gets bytes read so far and bytes in total. Methods raise ModelError for missing or bad tensors.
    """

    def __init__(
        self,
        directory: Path,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        keeper: WeightObserver | None = None,
        rank: TensorParallel = SINGLE,
        rename: Callable[[str], str] | None = None,
        entries: dict[str, TensorEntry] | None = None,
    ) -> None:
        """`rename`: turns names of the files' tensors into those that the model asks for. `entries`: tensors
        by these names, if others than those of the language model are wanted.
        """
        super().__init__(ops, dtype, device, keeper, rank)
        self._directory = directory
        self._entries = list_tensors(directory) if entries is None else entries
        if rename is not None:
            self._entries = renamed(self._entries, rename)
        self._form = find_weight_format(read_json(directory / "config.json"), directory)
        self._reader: StoredReader | None = None
        if self._form is not None and not isinstance(self._form, NativeFormat):
            self._entries = split_experts(self._form, self._entries)
            self._reader = StoredReader(self._form, self)
        self._progress = progress
        self._done = self._reported = 0
        self._total = sum(entry.nbytes for entry in self._entries.values())

    def vector(self, name: str, size: int) -> Tensor:
        return self._kept(name, self.take(name, (size,)))

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        target, entry = torch.empty(shape, dtype=torch.float32, device=self.device), self.entry(name)
        # ERNIE stores some vectors as a row, Apertus single numbers as numbers.
        if entry.shape == (1, *shape) or (entry.shape, shape) == ((), (1,)):
            entry = replace(entry, shape=shape)
        self.fill(entry, target, *map(ShardSlice.whole, shape))
        return self._kept(name, target)

    def _packed(self, asked: WeightRequest) -> tuple[PackedLinear, Tensor | None]:
        form = self._form
        if form is None or not any(is_quantized(form, name, self._entries) for name in asked.outputs):
            return self._pack_wide(asked)
        refuse_partly_quantized(form, asked.outputs, self._entries)
        return self._pack_quantized(asked, form)

    def _pack_wide(self, asked: WeightRequest) -> tuple[PackedLinear, Tensor | None]:
        """Read and pack unquantized weights. Formats of checkpoints leave them as they are."""
        entry = self._entries.get(f"{next(iter(asked.outputs))}.weight")
        if entry is not None:
            refuse_undeclared(entry)
        shape = asked.shape[::-1] if asked.transposed else asked.shape
        weight_OI = torch.empty(shape, dtype=self.dtype, device=self.device)
        row = 0
        for name, rows in asked.outputs.items():
            end = row + rows.size
            self.take_into(f"{name}.weight", weight_OI[row:end], rows, asked.inputs)
            row = end
        return self._pack(asked, weight_OI)

    def _pack(self, asked: WeightRequest, weight_OI: Tensor) -> tuple[PackedLinear, Tensor | None]:
        stored = self.ops.packing or self.ops.stored
        quant = None if stored is None else stored.format(asked.kind)
        kind = asked.kind
        if self._form is not None and kind in OF_LAYERS and quant is not None and quant.keeps_head:
            kind = "head"  # such formats leave it unquantized
        if asked.order is not None:
            weight_OI = weight_OI[list(asked.order)]
        if asked.transposed:
            weight_OI = weight_OI.T.contiguous()
        bias_O = self._bias(asked)
        if asked.kind in HEADS and self._rounds_head():
            packing = self.ops.packing
            assert packing is not None
            return packing.pack_quantized(packing.round(ROUNDED_HEAD, weight_OI), self.dtype, bias_O), bias_O
        return pack(self.ops, kind, weight_OI, bias_O), bias_O

    def _rounds_head(self) -> bool:
        layers = None if self.ops.packing is None else self.ops.packing.format("linear")
        return layers is not None and layers.rounds_head

    def _pack_quantized(self, asked: WeightRequest, form: WeightFormat) -> tuple[PackedLinear, Tensor | None]:
        """Pack weights in the format that they are stored in, or dequantize them where the kernels have
        another one.
        """
        stored = self.ops.packing or self.ops.stored
        running = None if stored is None else stored.format(asked.kind)
        weight = self._read_quantized(asked, form, running)
        if isinstance(weight, Tensor):
            return self._pack(asked, weight.to(self.dtype))
        assert stored is not None
        if asked.order is not None:
            weight = select_rows(weight, list(asked.order))
        bias_O = self._bias(asked)
        if asked.kind == "experts" and self.ops.pack_experts is not None:
            return self.ops.pack_experts(weight, bias_O), bias_O
        return stored.pack_quantized(weight, self.dtype, bias_O), bias_O

    def _read_quantized(
        self, asked: WeightRequest, form: WeightFormat, running: Quant | None
    ) -> QuantizedWeight | Tensor:
        """Read in the format that is `running` if it holds the numbers of the files, else in float32."""
        if self._reader is not None:
            holds = running is not None and running.layers_name == form.quant
            return self._reader.read(asked.outputs, asked.inputs, as_stored=holds)
        assert form.quant is not None
        native = QUANTS[form.quant]
        name = next(iter(asked.outputs))
        if native.is_float and not name.startswith(LAYERS):
            refuse_undeclared(self._entries[f"{name}.weight"])
        native = native if asked.kind in OF_LAYERS else native.head
        if running is not None and running.holds(native):
            return read_quantized(self, asked.outputs, asked.inputs, running)
        return read_quantized(self, asked.outputs, asked.inputs, native).floats()

    def _bias(self, asked: WeightRequest) -> Tensor | None:
        if not asked.bias:
            return None
        bias_O = torch.empty(asked.shape[0], dtype=self.dtype, device=self.device)
        row = 0
        for name, rows in asked.outputs.items():
            self.take_into(f"{name}.bias", bias_O[row : row + rows.size], rows)
            row += rows.size
        return bias_O if asked.order is None else bias_O[list(asked.order)]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        target = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.take_into(name, target)
        return target

    def take_into(self, name: str, target: Tensor, *parts: ShardSlice) -> None:
        """Read `name` into `target`, converted to its dtype. Each name can be taken once.

        `parts`: slice of each dimension to read; default all of it. Padding is zeros.
        """
        self.fill(self.entry(name), target, *(parts or map(ShardSlice.whole, target.shape)))

    def fill(self, entry: TensorEntry, target: Tensor, *parts: ShardSlice) -> None:
        """Read an entry that was taken already into `target`, as `take_into` does."""
        wanted = tuple(part.total for part in parts)
        if entry.shape != wanted:
            raise wrong_shape(entry, wanted)
        if entry.dtype in ROUNDED_DTYPES:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} may not be {entry.dtype}; {FETCH_AGAIN}"
            )
        raw = self.read(entry, parts)
        refuse_non_finite(raw, entry, "")
        rows = len(raw)
        target[:rows].copy_(raw)
        target[rows:].zero_()
        if self.dtype == torch.float16 and entry.dtype != "F16":
            refuse_non_finite(target, entry, " in float16: serve the model in bfloat16 or float32")

    def has(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        entry = self._entries.pop(name, None)
        if entry is None:
            raise missing_tensor(self._directory, name)
        return entry

    def take_stored(self, linear: str, tensors: tuple[StoredTensor, ...]) -> dict[str, TensorEntry]:
        found = {each.suffix: self._entries.pop(linear + each.suffix, None) for each in tensors}
        return {suffix: entry for suffix, entry in found.items() if entry is not None}

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        form, suffixes = self._form, [".weight", ".bias", *(f".weight{scale}" for scale in SCALES)]
        if form is not None and self._reader is not None and is_quantized(form, name, self._entries):
            self._reader.split(name, parts)
            main = self._entries[name + form_of(form, name).main.suffix]
            self._entries |= {part + form_of(form, part).main.suffix: main for part in parts}
            suffixes = [".bias"]
        for suffix in suffixes:
            if entry := self._entries.pop(f"{name}{suffix}", None):
                self._entries |= {f"{part}{suffix}": cut for part, cut in split_rows(entry, parts).items()}

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        for stored, suffix in EXPERT_SUFFIXES.items():
            if entry := self._entries.pop(f"{name}{stored}", None):
                turned = transposed and suffix == ".weight"
                cut = split_stack(entry, [f"{part}{suffix}" for part in parts], transposed=turned)
                self._entries |= cut

    def skip(self, name: str) -> None:
        names = [n for n in self._entries if n.startswith(name)] if name.endswith(".") else [name]
        for each in (*names, *(f"{name}{scale}" for scale in (*SCALES, STEP))):
            entry = self._entries.pop(each, None)
            self._total -= entry.nbytes if entry else 0

    def skip_experts(self, name: str, held: Sequence[int]) -> None:
        for each in [each for each in self._entries if each.startswith(f"{name}.")]:
            expert = each[len(name) + 1 :].partition(".")[0]
            if expert.isdecimal() and int(expert) not in held:
                self._total -= self._entries.pop(each).nbytes

    def finish(self) -> None:
        for name in [name for name in self._entries if name.endswith(NOT_NEEDED)]:
            self.skip(name)
        if self._reader is not None:
            for name in [name for name in self._entries if name.endswith(".bias")]:
                self._skip_zeros(name)
        if self._entries:
            raise misplaced_tensor(self._entries)

    def _skip_zeros(self, name: str) -> None:
        """Skip a bias of zeros, which AutoGPTQ writes for linears without a bias."""
        entry = self._entries[name]
        is_vector = entry.dtype in DTYPES and len(entry.shape) == 1 and entry.nbytes
        if is_vector and not bool(self.read(entry, (ShardSlice.whole(entry.shape[0]),)).any()):
            del self._entries[name]

    def read(self, entry: TensorEntry, parts: tuple[ShardSlice, ...]) -> Tensor:
        if entry.is_transposed:
            rows, inputs = parts
            first, total = entry.columns or (0, rows.total)
            nbytes = entry.nbytes * total // max(1, rows.total)
            stored = replace(entry, shape=(inputs.total, total), is_transposed=False, nbytes=nbytes)
            self._total += nbytes - entry.nbytes
            return self.read(stored, (inputs, ShardSlice(total, rows.start + first, rows.stop + first))).T
        runs, shape = byte_runs(entry, parts)
        buffer = torch.empty(sum(length for _, length in runs), dtype=torch.uint8)
        self._total -= entry.nbytes - buffer.nbytes
        view = bytes_of(buffer)
        try:
            with open_regular(entry.file, buffering=0) as stream:
                for offset, length in runs:
                    stream.seek(entry.offset + offset)
                    read_fully(stream.readinto, view[:length], entry)
                    view = view[length:]
                    self._done += length
                    if self._done - self._reported >= REPORTED_EVERY or not view:
                        self._reported = self._done
                        self._progress(self._done, self._total)
        except OSError as error:
            raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None
        return buffer.view((DTYPES | ROUNDED_DTYPES)[entry.dtype]).view(shape)


def renamed(entries: Mapping[str, TensorEntry], rename: Callable[[str], str]) -> dict[str, TensorEntry]:
    """Return the tensors by other names. Raises ModelError where two have one name."""
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        other = found.setdefault(rename(name), entry)
        if other is not entry:
            raise ModelError(f"{entry.file}: {shown(name)} and {shown(other.name)} are the same tensor")
    return found


def refuse_partly_quantized(
    form: WeightFormat, names: Iterable[str], entries: Mapping[str, TensorEntry]
) -> None:
    """Raise ModelError if one of the linears `names`, which are fused into one, is quantized and another is
    not.
    """
    wide = [name for name in names if not is_quantized(form, name, entries)]
    rest = [name for name in names if name not in wide]
    if wide and rest and (entry := entries.get(f"{wide[0]}.weight")) is not None:
        other = entries[rest[0] + form_of(form, rest[0]).main.suffix]
        raise ModelError(
            f"{entry.file}: {shown(entry.name)} is kept in {entry.dtype} and {shown(other.name)} is "
            f"{other.dtype}, but both are multiplied as one matrix here: use a checkpoint that keeps all of "
            "q_proj, k_proj and v_proj (of gate_proj and up_proj) unquantized, or none of them"
        )
