"""`Ops` on the C++ kernels. Products with packed weights are here, other operations in the modules beside it.
Each method creates one C++ operation and submits it.
"""

import ctypes
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..activation import LIMITED_CODE, code_of
from ..lora import ExpertAdapters, LoraRows
from ..op_types import ExpertResults, Mixture
from ..ops import Ops, StepInputs
from ..quant_formats import Quant
from .attention import CPUAttention, CPUAttentionMetadata, CPUKVCache
from .command_buffer import CommandGraph, CommandRecorder, CPUOperations
from .elementwise import CPUAltUp, CPUElementwise
from .ffi import NativeHeldExperts, NativeRouting, Step
from .lora import CPULora
from .profile import CPUProfiler
from .recurrent import CPURecurrent
from .sampling import CPUSampling
from .weight_packing import DTYPES, KV_DTYPES, CPULinear, CPUWeights, Packer, pointers


class CPUBackend:
    """CPU backend over one kernel library. Models are float32 or bfloat16; the KV cache is either of these or
    int8.
    """

    def __init__(self, library: ctypes.CDLL, name: str, layout: str, origin: str) -> None:
        """Keep the library. `layout` identifies the packed layout: the same name, the same bytes. `origin`
        says where the library is from.
        """
        self.library = library
        self.layout = layout
        self.origin = origin
        self.problem = ""
        self.recorder = CommandRecorder(library)
        self.drawing = CPUSampling(self.recorder)
        self.name = name

    def ops(self, quant: Quant | None = None) -> Ops:
        """Build `Ops`, with unquantized weights or with weights quantized as they are packed."""
        packer = Packer(self.library, self.layout, quant)
        attention = CPUAttention(self.recorder)
        experts = CPUExperts(self.recorder)
        elementwise = CPUElementwise(self.recorder)
        return Ops(
            name=f"{self.name} ({self.origin})" + ("" if quant is None else f", {quant.name} weights"),
            problem=self.problem,
            pack_embedding=lambda weight_VE, tied: packer.pack("tied" if tied else "table", weight_VE),
            embedding=self.embedding,
            pack_linear=lambda weight_OI, bias_O: packer.pack("linear", weight_OI, bias_O),
            pack_head=lambda weight_OI, bias_O: packer.pack("head", weight_OI, bias_O),
            pack_router=lambda weight_XE, bias_X: packer.pack("router", weight_XE, bias_X),
            linear=self.linear,
            logits=self.logits,
            rms_norm=elementwise.rms_norm,
            add_rms_norm=elementwise.add_rms_norm,
            layer_norm=elementwise.layer_norm,
            rotary=elementwise.rotary,
            gate_mul=elementwise.gate_mul,
            softcap=elementwise.softcap,
            scale=elementwise.scale,
            concat=elementwise.concat,
            linear_by_head=self.linear_by_head,
            experts=experts.experts,
            expert_results=experts.expert_results,
            combine_experts=experts.combine_experts,
            make_kv_cache=lambda shape, _device: CPUKVCache(self.library, shape),
            plan_attention=lambda ragged, _cache, window: CPUAttentionMetadata(ragged, window),
            write_kv=attention.write_kv,
            read_keys=attention.read_keys,
            attention=attention.attention,
            copy_blocks=attention.copy_blocks,
            clear_blocks=attention.clear_blocks,
            populate_blocks=attention.populate_blocks,
            block_tensors=CPUKVCache.block_tensors,
            checksums=self.checksums,
            copy_runs=self.library.llmbox_copy_runs,
            cos_sin=self.cos_sin,
            linear_in_shares=self.linear_in_shares,
            graph=self.graph,
            host_callback=self.recorder.host_callback,
            scratch=self.recorder.scratch,
            kv_dtypes=frozenset(KV_DTYPES),
            packing=packer,
            weight_memory=packer.memory,
            row_invariant=True,
            recurrent=CPURecurrent(self.recorder).ops(),
            altup=CPUAltUp(self.recorder).ops(),
            lora=CPULora(self.recorder, is_int8=quant is not None).ops(),
            rotate_and_write=attention.rotate_and_write,
            attend_whole_texts=attention.attend_whole_texts,
            best_of=self.drawing.best_of,
            draw=self.drawing.draw,
            rank=self.drawing.rank,
            profiler=CPUProfiler(self.library, self.recorder),
        )

    def use_threads(self, cores: list[int]) -> None:
        """Start one thread a core: the caller, and a worker pinned to each core but the first."""
        workers = cores[1:]
        self.library.llmbox_threads(len(workers), (ctypes.c_int * len(workers))(*workers))

    def checksums(self, data: memoryview, crc: int, adler: int) -> tuple[int, int]:
        """Continue CRC-32 and Adler-32 over `data`, which can be written to."""
        if not data:
            return crc, adler
        sums = ctypes.c_uint32(crc), ctypes.c_uint32(adler)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
        if not self.library.llmbox_checksums(address, len(data), *map(ctypes.byref, sums)):
            return zlib.crc32(data, crc), zlib.adler32(data, adler)
        return sums[0].value, sums[1].value

    def cos_sin(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        angle = angle.contiguous()
        cos, sin = torch.empty_like(angle), torch.empty_like(angle)
        self.library.llmbox_turn(angle, angle.numel(), cos, sin)
        return cos, sin

    def embedding(self, table: CPULinear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
        out_TE = self.recorder.result(f"embedding {table.pointer}", len(ids_T), table.inputs, table.dtype)
        quantized = table.quant is not None
        make = self.library.llmbox_quant_embedding_op if quantized else self.library.llmbox_embedding_op
        ids = ids_T.contiguous()
        step = Step(rows=len(ids), ids=ids.data_ptr())
        self.recorder.launch(make, step, DTYPES[table.dtype], table, scale, out_TE, out_TE.stride(0))
        return out_TE

    def linear(self, packed: CPUWeights, x_TI: Tensor) -> Tensor:
        return self._linear("linear", packed, x_TI, packed.dtype)

    def logits(self, packed: CPUWeights, x_TI: Tensor) -> Tensor:
        return self._linear("logits", packed, x_TI, torch.float32)

    def linear_in_shares(self, packed: CPUWeights, x_TI: Tensor, ranks: int) -> Tensor:
        """Sum integer weights in 4 shares of all groups of inputs, or 2 or 1 where these do not divide."""
        (quant,) = {part.quant for part in packed.parts}
        assert quant is not None
        assert not quant.grid
        groups = quant.groups(packed.inputs) * ranks
        shares = next(each for each in (4, 2, 1) if groups % each == 0)
        dtype = packed.dtype if ranks == 1 else torch.float32
        return self._linear("shares", packed, x_TI, dtype, shares=shares // ranks)

    def _linear(
        self, name: str, packed: CPUWeights, x_TI: Tensor, dtype: torch.dtype, shares: int = 1
    ) -> Tensor:
        out_TO = self.recorder.result(name, len(x_TI), packed.outputs, dtype)
        if out_TO.untyped_storage().data_ptr() == x_TI.untyped_storage().data_ptr():
            # A linear that reads another one of as many outputs does not write over its input.
            out_TO = self.recorder.result(f"{name} of {name}", len(x_TI), packed.outputs, dtype)
        first = 0
        for part in packed.parts:
            self._linear_to(out_TO[:, first : first + part.outputs], part, x_TI, shares)
            first += part.outputs
        return out_TO

    def _linear_to(self, out_TO: Tensor, packed: CPULinear, x_TI: Tensor, shares: int = 1) -> None:
        assert x_TI.dtype == packed.dtype
        assert x_TI.stride(1) == 1
        if packed.is_wide:
            self._linears_to(out_TO.unsqueeze(1), (packed,), x_TI.unsqueeze(1))
            return
        library, dtype = self.library, DTYPES[packed.dtype]
        numbers = dtype, packed, x_TI, x_TI.stride(0), out_TO, out_TO.stride(0), DTYPES[out_TO.dtype]
        if shares > 1:
            self.recorder.launch(library.llmbox_shared_quant_op, len(x_TI), *numbers, shares)
        else:
            make = library.llmbox_linear_op if packed.quant is None else library.llmbox_quant_op
            self.recorder.launch(make, len(x_TI), *numbers)

    def linear_by_head(self, packed: Sequence[CPULinear], x_THI: Tensor) -> Tensor:
        heads, outputs = len(packed), packed[0].outputs
        out = self.recorder.result("linear_by_head", len(x_THI), heads * outputs, x_THI.dtype)
        out_THO = out.view(-1, heads, outputs)
        self._linears_to(out_THO, packed, x_THI)
        return out_THO

    def _linears_to(self, out_THO: Tensor, packed: Sequence[CPULinear], x_THI: Tensor) -> None:
        """Run linears of one shape and form, each on its own part of a row."""
        (form,) = {linear.form for linear in packed}
        assert x_THI.dtype == packed[0].dtype
        assert x_THI.stride(2) == out_THO.stride(2) == 1
        read, written = (x_THI, *x_THI.stride()[:2]), (out_THO, *out_THO.stride()[:2])
        self.recorder.launch(
            self.library.llmbox_linear_by_head_op,
            len(x_THI),
            *(DTYPES[x_THI.dtype], form, len(packed), pointers(packed)),
            *(*read, *written, DTYPES[out_THO.dtype]),
            keeps=packed,
        )

    def graph(self, body: Callable[[StepInputs], tuple[Tensor, ...]]) -> CommandGraph:
        return CommandGraph(self.recorder, body)


def strided(rows: Tensor | None) -> tuple[Tensor | None, int]:
    """Return rows that may be missing, and their stride."""
    return rows, 0 if rows is None else rows.stride(0)


class CPUExperts(CPUOperations):
    """Expert operations of one kernel library (`Ops.experts`, `expert_results`, `combine_experts`)."""

    def experts(
        self,
        mixture: Mixture,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None = None,
        gate_T1: Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Run the experts; logits of router and gate are float32, as `logits` returns them."""
        out_TE = self.recorder.result("experts", len(x_TE), x_TE.shape[1], x_TE.dtype)
        self._experts_to(out_TE, mixture, x_TE, logits_TX, (shared_TE, gate_T1), adapters)
        return out_TE

    def expert_results(
        self, mixture: Mixture, x_TE: Tensor, logits_TX: Tensor, adapters: ExpertAdapters | None = None
    ) -> ExpertResults:
        rows, (hidden, per_token) = len(x_TE), (x_TE.shape[1], mixture.per_token)
        results = ExpertResults(
            self.recorder.result("expert results", rows, per_token * hidden, x_TE.dtype),
            self.recorder.result("expert shares", rows, per_token, torch.float32),
            self.recorder.result("expert owners", rows, per_token, torch.int32),
        )
        self._experts_to(results.rows_TKE, mixture, x_TE, logits_TX, (None, None), adapters, results)
        return results

    def _experts_to(
        self,
        out: Tensor,
        mixture: Mixture,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared: tuple[Tensor | None, Tensor | None],
        adapters: ExpertAdapters | None,
        results: ExpertResults | None = None,
    ) -> None:
        shared_TE, gate_T1 = shared
        assert logits_TX.dtype == torch.float32
        assert shared_TE is None or (shared_TE.dtype == x_TE.dtype and shared_TE.stride(1) == 1)
        assert logits_TX.stride(1) == x_TE.stride(1) == 1
        assert results is None or mixture.owners is not None
        activation = code_of(mixture.activation)
        assert activation[0] in {0, 1, 2, 3, LIMITED_CODE}
        here = NativeHeldExperts.of(mixture, None if results is None else mixture.owners)
        step = Step(rows=len(x_TE))
        if adapters is not None:
            assert isinstance(adapters.rows, LoraRows)
            step.use_adapters(adapters.rows)
        self.recorder.launch(
            self.library.llmbox_experts_op,
            step,
            DTYPES[x_TE.dtype],
            mixture.gate_ups[0].quant is not None,
            mixture.count,
            here,
            len(mixture.here),
            mixture.load_X,
            pointers(mixture.gate_ups),
            pointers(mixture.downs),
            *strided(x_TE),
            *strided(logits_TX),
            mixture.per_token,
            mixture.normalized,
            NativeRouting.of(mixture.routing),
            *activation,
            *strided(shared_TE),
            *strided(gate_T1),
            *strided(out),
            None if adapters is None else adapters.gate_ups.addresses.buffer_info()[0],
            None if adapters is None else adapters.downs.addresses.buffer_info()[0],
            None if results is None else results.shares_TK,
            None if results is None else results.owners_TK,
            keeps=(mixture, here.kept, adapters),
        )

    def combine_experts(
        self, results: ExpertResults | None, shared_TE: Tensor | None = None, gate_T1: Tensor | None = None
    ) -> Tensor:
        rows, shares = (None, None) if results is None else (results.rows_TKE, results.shares_TK)
        like = shared_TE if rows is None else rows
        assert like is not None
        per_token = 0 if shares is None else shares.shape[1]
        out_TE = self.recorder.result("experts", len(like), like.shape[1] // max(1, per_token), like.dtype)
        results_and_width = DTYPES[like.dtype], rows, shares, per_token, out_TE.shape[1]
        parts = *strided(shared_TE), *strided(gate_T1), *strided(out_TE)
        self.recorder.launch(self.library.llmbox_combine_op, len(like), *results_and_width, *parts)
        return out_TE
