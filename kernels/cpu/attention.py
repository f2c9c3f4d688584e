"""Attention and the paged KV cache of the C++ library."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..op_types import BatchLayout, KVShape
from .command_buffer import CPUOperations, ragged_step
from .weight_packing import DTYPES, KV_DTYPES, PackedHandle

_BLOCK: Final = 256
_STRIP: Final = 32
"""Rows of a block of whole texts, and the number that they are a multiple of."""
_STRIP_TOKENS: Final = 16
"""Tokens whose keys the cache stores together."""
_TOGETHER: Final = 32
"""Rows of a text that are computed together."""
_PAIRS: Final = 1 << 24
"""Pairs of a query and a key after which the caller may do something else: a slice of a vision tower."""


@dataclass(frozen=True, slots=True)
class CPUAttentionMetadata:
    """Layout of the step and the sliding window of some layers."""

    ragged: BatchLayout
    window: int | None


class CPUKVCache(PackedHandle):
    """KV cache owned by the C++ library. Raises MemoryError if it cannot be allocated."""

    def __init__(self, library: ctypes.CDLL, shape: KVShape) -> None:
        self.dtype = shape.dtype
        self.heads = shape.num_kv_heads
        self.block_size = shape.block_size
        self._shape = shape
        self._library = library
        super().__init__(
            library.llmbox_cache_new(
                KV_DTYPES[shape.dtype],
                shape.num_layers,
                shape.num_blocks,
                shape.block_size,
                shape.num_kv_heads,
                shape.head_dim,
                shape.is_windowed,
            ),
            library.llmbox_cache_free,
        )

    def block_tensors(self) -> list[Tensor]:
        """Implement `Ops.block_tensors`: the library's own memory, valid as long as the cache."""
        at = self._library.llmbox_cache_data(self.pointer)
        size = self._library.llmbox_cache_block_bytes(self.pointer)
        count = self._shape.num_layers * self._shape.num_blocks * size
        memory = torch.frombuffer((ctypes.c_uint8 * count).from_address(at), dtype=torch.uint8)
        return [memory.view(self._shape.num_layers, self._shape.num_blocks, size)]


class CPUAttention(CPUOperations):
    """Operations of `Ops` on a KV cache."""

    def write_kv(
        self, cache: CPUKVCache, layer: int, k_TGD: Tensor, v_TGD: Tensor, plan: CPUAttentionMetadata
    ) -> None:
        assert k_TGD.dtype == v_TGD.dtype
        assert k_TGD.stride()[1:] == v_TGD.stride()[1:] == (k_TGD.shape[2], 1)
        self.recorder.launch(
            self.library.llmbox_write_kv_op,
            ragged_step(len(k_TGD), plan.ragged),
            *(DTYPES[k_TGD.dtype], KV_DTYPES[cache.dtype], cache, layer),
            *(k_TGD, k_TGD.stride(0), v_TGD, v_TGD.stride(0)),
        )

    def rotate_and_write(
        self,
        qkv_TnD: Tensor,
        norm_nD: Tensor | None,
        eps: float,
        cos_TD: Tensor,
        sin_TD: Tensor,
        cache: CPUKVCache,
        layer: int,
        plan: CPUAttentionMetadata,
    ) -> Tensor:
        """Norm and rotate queries and keys in place, and write the cache."""
        rows, heads, width = qkv_TnD.shape
        assert qkv_TnD.stride()[1:] == (width, 1)
        norm_dtype = qkv_TnD.dtype if norm_nD is None else norm_nD.dtype
        dtypes = DTYPES[qkv_TnD.dtype], DTYPES[norm_dtype], KV_DTYPES[cache.dtype]
        numbers = qkv_TnD, qkv_TnD.stride(0), heads, norm_nD, eps, self.recorder.table_of(cos_TD)
        cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
        step = ragged_step(rows, plan.ragged)
        step.use_angles(cos_TD, sin_TD)
        self.recorder.launch(self.library.llmbox_heads_op, step, *dtypes, cache, layer, *numbers)
        return qkv_TnD[:, : heads - 2 * cache.heads]

    def read_keys(self, cache: CPUKVCache, layer: int, slots_S: Tensor, dims: slice) -> Tensor:
        """Implement `Ops.read_keys` on the layout of native/attention/kv_cache.h."""
        (memory,), size = cache.block_tensors(), cache.block_size
        blocks, strips = memory.shape[1], -(-size // _STRIP_TOKENS)
        keys = memory[layer][:, : memory.shape[2] // 2].view(blocks, strips, -1)
        places = slots_S // size, slots_S % size // _STRIP_TOKENS
        lanes_S, pack = slots_S % size % _STRIP_TOKENS, 4 // cache.dtype.itemsize
        first, end = dims.start // pack, -(-dims.stop // pack)
        words = keys[..., first * 4 * _STRIP_TOKENS : end * 4 * _STRIP_TOKENS]
        words = words.view(blocks, strips, -1, _STRIP_TOKENS, 4)
        words_SW4: Tensor = words[(*places, slice(None), lanes_S)].contiguous()
        kept = slice(dims.start - first * pack, dims.stop - first * pack)
        if cache.dtype != torch.int8:
            return words_SW4.view(cache.dtype).flatten(1)[:, kept].float()
        scales = keys[..., -4 * _STRIP_TOKENS :].view(blocks, strips, _STRIP_TOKENS, 4)
        scales_S4: Tensor = scales[(*places, lanes_S)].contiguous()
        return (words_SW4.flatten(1)[:, kept].float() - 128) * scales_S4.view(torch.float32)

    def attention(
        self,
        q_THD: Tensor,
        cache: CPUKVCache,
        layer: int,
        plan: CPUAttentionMetadata,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        assert sinks_H is None or sinks_H.dtype == torch.float32
        rows, heads, width = q_THD.shape
        assert q_THD.stride()[1:] == (width, 1)
        out = self.recorder.result("attention", rows, heads * width, q_THD.dtype)
        self.recorder.launch(
            self.library.llmbox_attention_op,
            ragged_step(rows, plan.ragged),
            *(DTYPES[q_THD.dtype], KV_DTYPES[cache.dtype], cache, layer, q_THD, q_THD.stride(0), heads),
            *(plan.window or 0, scale, softcap or 0.0, sinks_H, out),
        )
        return out

    def attend_whole_texts(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lens: Sequence[int], scale: float
    ) -> Iterator[Tensor]:
        """Attend in both directions, by the kernel of paged attention: `_TOGETHER` rows of a text are query
        heads of one token at its end, which sees all of the text. Rows are computed until about `_PAIRS`
        pairs of a query and a key are done.
        """
        rows, heads, width = q_THD.shape
        kv_heads, group = k_TGD.shape[1], heads // k_TGD.shape[1]
        block = min(_BLOCK, -(-max(lens) // _STRIP) * _STRIP)
        blocks = [-(-length // block) for length in lens]
        firsts = [sum(blocks[:text]) for text in range(len(lens))]
        shape = KVShape(1, sum(blocks), block, kv_heads, width, k_TGD.dtype, k_TGD.dtype)
        cache = CPUKVCache(self.library, shape)
        slots = [
            torch.arange(first * block, first * block + n) for first, n in zip(firsts, lens, strict=True)
        ]
        whole = _layout(block, rows, [rows], [rows], torch.zeros(1, 1), torch.cat(slots))
        self.write_kv(cache, 0, k_TGD, v_TGD, CPUAttentionMetadata(whole, None))
        tables, contexts, places, start = [], [], [], 0
        for first, count, length in zip(firsts, blocks, lens, strict=True):
            tokens = -(-length // _TOGETHER)
            table = torch.zeros(max(blocks))
            table[:count] = torch.arange(first, first + count)
            tables.append(table.expand(tokens, -1))
            contexts += [length] * tokens
            places.append(torch.arange(tokens * _TOGETHER).clamp(max=length - 1) + start)
            start += length
        # The last token of a text repeats its last row: the results are the same, and are written twice.
        place_P, table_NB = torch.cat(places), torch.cat(tables)
        at_once = max(1, _PAIRS // (max(lens) * _TOGETHER))
        for first in range(0, len(contexts), at_once):
            part = slice(first, first + at_once)
            tokens = len(contexts[part])
            own_P = place_P[first * _TOGETHER : (first + tokens) * _TOGETHER]
            split = (tokens, _TOGETHER, kv_heads, group, width)
            queries = q_THD[own_P].view(split).permute(0, 2, 1, 3, 4).reshape(tokens, -1, width)
            layout = _layout(block, tokens, [1] * tokens, contexts[part], table_NB[part], torch.zeros(tokens))
            found = self.attention(queries, cache, 0, CPUAttentionMetadata(layout, None), scale)
            found = found.view(tokens, kv_heads, _TOGETHER, group, width).transpose(1, 2)
            begin, end = int(own_P[0]), int(own_P[-1]) + 1
            out_TH = torch.empty(end - begin, heads * width, dtype=q_THD.dtype)
            out_TH[own_P - begin] = found.reshape(len(own_P), heads * width)
            yield out_TH

    def copy_blocks(self, cache: CPUKVCache, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.library.llmbox_cache_copy(cache.pointer, source, destination)

    def clear_blocks(self, cache: CPUKVCache, blocks: list[int]) -> None:
        if blocks:
            self.library.llmbox_cache_clear(cache.pointer, (ctypes.c_int * len(blocks))(*blocks), len(blocks))

    def populate_blocks(self, cache: CPUKVCache, blocks: range, stop: ctypes.c_int) -> bool:
        args = blocks.start, len(blocks), ctypes.byref(stop)
        return bool(self.library.llmbox_cache_populate(cache.pointer, *args))


def _layout(
    block: int, rows: int, lens: list[int], contexts: list[int], tables: Tensor, slots: Tensor
) -> BatchLayout:
    """Return the layout of a step of its own, whose positions nothing reads."""
    starts = torch.tensor([0, *lens]).cumsum(0)
    return BatchLayout(
        block_size=block,
        query_lens=lens,
        contexts=contexts,
        query_starts_N1=starts.int(),
        context_lens_N=torch.tensor(contexts, dtype=torch.int32),
        block_tables_NB=tables.int(),
        positions_T=torch.zeros(rows, dtype=torch.int32),
        slots_T=slots.int(),
    )
