"""Operations of LoRA adapters on the C++ kernels."""

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..lora import ExpertLora, LoraOps, LoraRows, LoraSite, LoraWeights, unload
from .command_buffer import CommandRecorder, CPUOperations
from .ffi import NativeLoraSource, Step
from .weight_packing import DTYPES, PackedHandle

ALIGNMENT = 64
"""Bytes of a cache line: what is packed begins with one."""
SMALLEST = 1 << 16
"""Bytes of the smallest memory that the system is asked for."""


class LoraMemory(PackedHandle):
    """Memory of one adapter's weights, which are packed one after another as a step reads them."""

    def __init__(self, library: ctypes.CDLL, nbytes: int) -> None:
        super().__init__(library.llmbox_lora_memory(nbytes), library.llmbox_lora_memory_free)
        self.address: int = library.llmbox_lora_memory_data(self.pointer)
        self.nbytes, self.used = nbytes, 0


def _suits(memory: LoraMemory, nbytes: int) -> bool:
    return nbytes <= memory.nbytes <= 2 * nbytes


class CPULora(CPUOperations):
    """Adapters on one kernel library. `is_int8`: beside quantized weights A and B have 8 bits too."""

    def __init__(self, recorder: CommandRecorder, *, is_int8: bool) -> None:
        super().__init__(recorder)
        self._is_int8 = is_int8
        self._memory: dict[int, list[LoraMemory]] = {}
        """By slot."""
        self._spare: LoraMemory | None = None
        """Memory for the next adapter, from another one or prepared: new pages of the system are slow."""
        self._preparing: threading.Thread | None = None

    def ops(self) -> LoraOps:
        return LoraOps(
            self.load,
            self.load_table,
            unload,
            self.add,
            self.embed,
            self.load_experts,
            reserve=self.reserve,
            release=self.release,
            prepare=self.prepare,
            is_int8=self._is_int8,
        )

    def prepare(self, nbytes: int) -> None:
        """Get memory in a thread. A virtual machine hands out 20 MB in 50 ms: a step would wait for it."""
        if self._preparing is None and (self._spare is None or not _suits(self._spare, nbytes)):
            self._preparing = threading.Thread(
                target=self._get_spare, args=(nbytes,), name="llmbox-lora", daemon=True
            )
            self._preparing.start()

    def _get_spare(self, nbytes: int) -> None:
        with contextlib.suppress(MemoryError):  # loading says so, if it is short then too
            spare = LoraMemory(self.library, max(nbytes, SMALLEST))
            ctypes.memset(spare.address, 0, spare.nbytes)  # without the interpreter's lock
            self._spare = spare

    def _await_spare(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def reserve(self, slot: int, nbytes: int) -> None:
        self._await_spare()
        spare, self._spare = self._spare, None
        if spare is None or not _suits(spare, nbytes):
            del spare  # before there is more
            spare = LoraMemory(self.library, max(nbytes, SMALLEST))
        spare.used = 0
        self._memory[slot] = [spare]

    def release(self, slot: int) -> None:
        self._await_spare()
        held = self._memory.pop(slot, ())
        self._spare = max((*held, *filter(None, [self._spare])), key=lambda each: each.nbytes, default=None)

    def _take(self, slot: int, nbytes: int) -> int:
        """Return the address of memory of a slot, more of it than was reserved where that is full."""
        held = self._memory.setdefault(slot, [])
        if not held or held[-1].nbytes - held[-1].used < nbytes:
            held.append(LoraMemory(self.library, max(nbytes, SMALLEST, held[0].nbytes // 8 if held else 0)))
        memory = held[-1]
        address = memory.address + memory.used
        memory.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return address

    def _pack(self, slot: int, weights: LoraWeights, count: int) -> Tensor:
        """Pack the weights of `count` linears. Return the address of each, a `LoraWeights` of lora.h."""
        a_XRI = weights.a_RI
        assert a_XRI.is_contiguous()
        assert weights.scales_R.dtype == torch.float32
        assert all(piece.b_Or.is_contiguous() for piece in weights.pieces)
        parts = [
            (piece.start, piece.stop, piece.first, piece.b_Or.shape[-1], piece.b_Or.data_ptr())
            for piece in weights.pieces
        ]
        parts_P5 = torch.tensor(parts, dtype=torch.int64)
        rank, inputs = a_XRI.shape[-2:]
        source = NativeLoraSource(
            linears=count,
            inputs=inputs,
            rank=rank,
            count=len(parts),
            a=a_XRI.data_ptr(),
            scales=weights.scales_R.data_ptr(),
            parts=parts_P5.data_ptr(),
        )
        kind = DTYPES[a_XRI.dtype], self._is_int8
        nbytes: int = self.library.llmbox_lora_bytes(*kind, source)
        address = self._take(slot, count * nbytes)
        self.library.llmbox_lora_pack(*kind, source, address)
        return address + nbytes * torch.arange(count)

    def load(self, site: LoraSite, slot: int, weights: LoraWeights) -> None:
        site.addresses[slot] = int(self._pack(slot, weights, 1))
        site.weights[slot] = replace(weights, a_RI=weights.a_RI[:0], pieces=())

    def load_table(self, site: LoraSite, slot: int, table_VE: Tensor) -> None:
        assert table_VE.is_contiguous()
        site.tables[slot] = table_VE
        site.addresses[slot] = table_VE.data_ptr()

    def load_experts(self, site: LoraSite, slot: int, count: int, batches: Sequence[ExpertLora]) -> None:
        """Write a table: the address of each expert's weights, 0 where it has none, and the most ranks."""
        table = torch.zeros(count + 1, dtype=torch.int64)
        for batch in batches:
            table[list(batch.experts)] = self._pack(slot, batch.weights, len(batch.experts))
            table[count] = max(int(table[count]), batch.weights.a_RI.shape[1])
        site.experts[slot] = table
        site.addresses[slot] = table.data_ptr()

    def add(self, site: LoraSite, x_TI: Tensor, y_TO: Tensor, rows: LoraRows) -> None:
        assert x_TI.stride(1) == y_TO.stride(1) == 1
        dtypes, addresses = (DTYPES[x_TI.dtype], DTYPES[y_TO.dtype]), site.addresses.buffer_info()[0]
        numbers = x_TI, x_TI.stride(0), x_TI.shape[1], y_TO, y_TO.stride(0)
        step = Step(rows=len(x_TI))
        step.use_adapters(rows)
        self.recorder.launch(self.library.llmbox_lora_op, step, *dtypes, addresses, *numbers, keeps=site)

    def embed(self, site: LoraSite, ids_T: Tensor, x_TE: Tensor, scale: float, rows: LoraRows) -> None:
        ids, addresses = ids_T.contiguous(), site.addresses.buffer_info()[0]
        step = Step(rows=len(ids), ids=ids.data_ptr())
        step.use_adapters(rows)
        numbers = DTYPES[x_TE.dtype], addresses, scale, x_TE, x_TE.stride(0), x_TE.shape[1]
        self.recorder.launch(self.library.llmbox_lora_embedding_op, step, *numbers, keeps=site)
