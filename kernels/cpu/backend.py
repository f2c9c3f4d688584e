"""`Ops` on the C++ kernels: each method creates one C++ operation and submits it."""

import ctypes
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..activation import CODES, UNGATED, XIELU, Activation
from ..op_types import AltUpOps
from ..ops import Ops, StepInputs
from ..quant_formats import Quant
from .attention import CPUAttention, CPUAttentionMetadata, CPUKVCache
from .command_buffer import CommandGraph, CommandRecorder, CPUOperations
from .experts import CPUExperts
from .ffi import Step
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
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            layer_norm=self.layer_norm,
            rotary=self.rotary,
            gate_mul=self.gate_mul,
            softcap=self.softcap,
            scale=self.scale,
            concat=self.concat,
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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        groups, width = weight.shape if weight.dim() == 2 else (1, len(weight))
        assert x.stride(-1) == 1
        assert x.dim() == 2 or x.stride(1) == width
        out = self.recorder.result("rms_norm", len(x), groups * width, x.dtype)
        dtypes = DTYPES[x.dtype], DTYPES[weight.dtype]
        numbers = x, x.stride(0), weight, groups, width, eps, out
        self.recorder.launch(self.library.llmbox_norm_op, len(x), *dtypes, *numbers)
        return out.view(len(out), *x.shape[1:])

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        assert residual_TE.is_contiguous()
        assert x_TE.stride(1) == 1
        out_TE = self.recorder.result("add_rms_norm", len(x_TE), len(weight_E), x_TE.dtype)
        dtypes = DTYPES[x_TE.dtype], DTYPES[weight_E.dtype]
        numbers = x_TE, x_TE.stride(0), residual_TE, weight_E, len(weight_E), eps, out_TE
        self.recorder.launch(self.library.llmbox_add_norm_op, len(x_TE), *dtypes, *numbers)
        return out_TE

    def layer_norm(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        weight_E: Tensor,
        eps: float,
        bias_E: Tensor | None = None,
    ) -> Tensor:
        assert bias_E is None or bias_E.dtype == weight_E.dtype
        assert residual_TE is None or residual_TE.is_contiguous()
        assert x_TE.stride(1) == 1
        out_TE = self.recorder.result("layer_norm", len(x_TE), len(weight_E), x_TE.dtype)
        dtypes = DTYPES[x_TE.dtype], DTYPES[weight_E.dtype]
        numbers = x_TE, x_TE.stride(0), residual_TE, weight_E, bias_E, len(weight_E), eps, out_TE
        self.recorder.launch(self.library.llmbox_layer_norm_op, len(x_TE), *dtypes, *numbers)
        return out_TE

    def rotary(self, x_TnD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        rows, heads, width = x_TnD.shape
        assert x_TnD.stride()[1:] == (width, 1)
        numbers = DTYPES[x_TnD.dtype], x_TnD, x_TnD.stride(0), heads, width, self.recorder.table_of(cos_TD)
        cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
        step = Step(rows=rows)
        step.use_angles(cos_TD, sin_TD)
        self.recorder.launch(self.library.llmbox_rotary_op, step, *numbers)
        return x_TnD

    def gate_mul(self, gate_up_T2F: Tensor, activation: Activation | XIELU) -> Tensor:
        """Multiply in place, over the gates: rows of the result are strided."""
        if isinstance(activation, XIELU):
            return self._xielu(gate_up_T2F, activation)
        width = gate_up_T2F.shape[1] // (1 if activation in UNGATED else 2)
        codes = DTYPES[gate_up_T2F.dtype], CODES[activation]
        numbers = gate_up_T2F, gate_up_T2F.stride(0), width
        self.recorder.launch(self.library.llmbox_gate_mul_op, len(gate_up_T2F), *codes, *numbers)
        return gate_up_T2F[:, :width]

    def _xielu(self, x_TF: Tensor, numbers: XIELU) -> Tensor:
        assert x_TF.stride(1) == 1
        (rows, width), dtype = x_TF.shape, DTYPES[x_TF.dtype]
        self.recorder.launch(self.library.llmbox_xielu_op, rows, dtype, x_TF, x_TF.stride(0), width, *numbers)
        return x_TF

    def scale(self, x_TE: Tensor, factor: float) -> Tensor:
        assert x_TE.stride(1) == 1
        numbers = DTYPES[x_TE.dtype], x_TE, x_TE.stride(0), x_TE.shape[1], factor
        self.recorder.launch(self.library.llmbox_scale_op, len(x_TE), *numbers)
        return x_TE

    def softcap(self, logits_RV: Tensor, cap: float) -> Tensor:
        """Cap logits in place; they are float32, as `logits` returns them."""
        assert logits_RV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        rows, width = logits_RV.shape
        self.recorder.launch(self.library.llmbox_softcap_op, rows, logits_RV, logits_RV.stride(0), width, cap)
        return logits_RV

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        rows, heads, _ = parts[0].shape
        width = sum(part.shape[2] for part in parts)
        out_THD = self.recorder.result("concat", rows, heads * width, parts[0].dtype).view(-1, heads, width)
        start = 0
        for part in parts:
            self.recorder.copy(out_THD[:, :, start:], part)
            start += part.shape[2]
        return out_THD

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


class CPUAltUp(CPUOperations):
    """Operations of Gemma 3n on streams."""

    def ops(self) -> AltUpOps:
        return AltUpOps(
            self.predict,
            self.correct,
            self.add_to_others,
            self.match_size,
            self.gate_sums,
            self.cut_gates,
        )

    def predict(self, x: Tensor, routed_TN: Tensor, coefs_JN: Tensor) -> Tensor:
        (rows, whole), streams = x.shape, coefs_JN.shape[1]
        _require_floats(routed_TN, coefs_JN)
        out = self.recorder.result("predict", rows, whole, x.dtype)
        numbers = DTYPES[x.dtype], x, routed_TN, coefs_JN, streams, whole // streams, out
        self.recorder.launch(self.library.llmbox_predict_streams_op, rows, *numbers)
        return out

    def correct(
        self, predicted: Tensor, x_TE: Tensor, stream: int, routed_TN: Tensor, coefs_NN: Tensor
    ) -> Tensor:
        _require_floats(routed_TN, coefs_NN)
        assert x_TE.is_contiguous()
        rows, width = x_TE.shape
        out = self.recorder.result("correct", rows, predicted.shape[1], x_TE.dtype)
        numbers = predicted, x_TE, routed_TN, coefs_NN, len(coefs_NN), stream, width, out
        self.recorder.launch(self.library.llmbox_correct_streams_op, rows, DTYPES[x_TE.dtype], *numbers)
        return out

    def add_to_others(self, x: Tensor, added_TE: Tensor) -> None:
        assert x.is_contiguous()
        assert added_TE.is_contiguous()
        width = added_TE.shape[1]
        numbers = DTYPES[x.dtype], x, added_TE, x.shape[1] // width, width
        self.recorder.launch(self.library.llmbox_add_to_streams_op, len(x), *numbers)

    def match_size(self, x: Tensor, like_TE: Tensor, eps: float) -> None:
        assert x.is_contiguous()
        assert like_TE.stride(1) == 1
        width = like_TE.shape[1]
        numbers = DTYPES[x.dtype], x, like_TE, like_TE.stride(0), x.shape[1] // width, width, eps
        self.recorder.launch(self.library.llmbox_match_size_op, len(x), *numbers)

    def gate_sums(self, gate_TF: Tensor) -> Tensor:
        assert gate_TF.stride(1) == 1
        rows, width = gate_TF.shape
        out_T2 = self.recorder.result("gate_sums", rows, 2, torch.float32)
        numbers = DTYPES[gate_TF.dtype], gate_TF, gate_TF.stride(0), width, out_T2
        self.recorder.launch(self.library.llmbox_gate_sums_op, rows, *numbers)
        return out_T2

    def cut_gates(self, gate_TF: Tensor, sums_T2: Tensor, width: int, factor: float) -> None:
        assert gate_TF.stride(1) == 1
        _require_floats(sums_T2)
        numbers = DTYPES[gate_TF.dtype], gate_TF, gate_TF.stride(0), gate_TF.shape[1], sums_T2, width, factor
        self.recorder.launch(self.library.llmbox_cut_gates_op, len(gate_TF), *numbers)


def _require_floats(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
