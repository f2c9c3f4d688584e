"""Steps over a paged KV cache with made-up sequences, and attention's exact result, for any backend."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout, KVShape
from llmbox.kernels.ops import KVCache, Ops

CPU = torch.device("cpu")


def ragged_rows(
    tables: Sequence[list[int]],
    spans: Sequence[tuple[int, int]],
    block_size: int,
    device: torch.device = CPU,
) -> BatchLayout:
    """A step of the positions `spans`, (start, end) of each sequence, on the blocks of `tables`."""

    def int32(numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    owned = [(table, p) for table, span in zip(tables, spans, strict=True) for p in range(*span)]
    width = max(len(table) for table in tables)
    starts = [0]
    for start, end in spans:
        starts.append(starts[-1] + end - start)
    return BatchLayout(
        block_size=block_size,
        query_lens=[end - start for start, end in spans],
        contexts=[end for _, end in spans],
        query_starts_N1=int32(starts),
        context_lens_N=int32([end for _, end in spans]),
        block_tables_NB=int32([table + [0] * (width - len(table)) for table in tables]),
        positions_T=int32([p for _, p in owned]),
        slots_T=int32([table[p // block_size] * block_size + p % block_size for table, p in owned]),
    )


class PagedStep:
    """Sequences of (past, new) tokens on scattered blocks; everything random by `seed`."""

    def __init__(
        self,
        sequences: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
        seed: int = 0,
        softcap: float | None = None,
        sinks: bool = False,
        latent: int = 0,
        spans: Sequence[int] = (),
    ) -> None:
        """`spans`: see `BatchLayout.spans_N`."""
        self.spans = spans or [0] * len(sequences)
        self.sequences, self.heads, self.head_dim, self.device = sequences, heads, head_dim, device
        self.softcap = softcap
        self.sinks_H = torch.linspace(-3, 4, heads[0], device=device) if sinks else None
        self.block_size, self.dtype, self.kv_dtype = block_size, dtype, kv_dtype or dtype
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        need = [-(-(past + new) // block_size) for past, new in sequences]
        self.num_blocks = sum(need) + 3
        blocks = rng.sample(range(self.num_blocks), sum(need))
        self.tables = [[blocks.pop() for _ in range(n)] for n in need]

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        ends = [past + new for past, new in sequences]
        self.k = [randn(end, heads[1], head_dim) for end in ends]
        self.latent, self.v = latent, [k[..., :latent] for k in self.k]
        if not latent:
            self.v = [randn(end, heads[1], head_dim) for end in ends]
        self.q = [randn(new, heads[0], head_dim) for _, new in sequences]

    def shape(self) -> KVShape:
        return KVShape(
            num_layers=2,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            dtype=self.kv_dtype,
            compute_dtype=self.dtype,
            latent=self.latent,
        )

    def ragged(self, spans: Sequence[tuple[int, int]]) -> BatchLayout:
        """`spans` are (start, end) positions of each sequence."""
        return ragged_rows(self.tables, spans, self.block_size, self.device)

    def write(self, ops: Ops, cache: KVCache, spans: Sequence[tuple[int, int]], layer: int) -> None:
        ragged = self.ragged(spans)
        k = torch.cat([k[start:end] for k, (start, end) in zip(self.k, spans, strict=True)])
        v = torch.cat([v[start:end] for v, (start, end) in zip(self.v, spans, strict=True)])
        v = k if self.latent else v
        if type(cache).__name__ == "TritonKVCache" and self.device == CPU and self.kv_dtype == self.dtype:
            # In Triton's interpreter the kernel, which has tests of its own, would take most of the time.
            block, place = ragged.slots_T // self.block_size, ragged.slots_T % self.block_size
            cache.k[layer][block, :, place], cache.v[layer][block, :, place] = k, v
            return
        ops.write_kv(cache, layer, k, v, ops.plan_attention(ragged, cache, None))

    def attend(self, ops: Ops, window: int | None = None, layer: int = 1) -> Tensor:
        cache = ops.make_kv_cache(self.shape(), self.device)
        spans = [(past, past + new) for past, new in self.sequences]
        ops.clear_blocks(cache, list(range(self.num_blocks)))
        self.write(ops, cache, [(0, end) for _, end in spans], layer)
        ragged = self.ragged(spans)
        if any(self.spans):
            numbers = torch.tensor(self.spans, dtype=torch.int32, device=self.device)
            ragged = replace(ragged, spans_N=numbers)
        plan = ops.plan_attention(ragged, cache, window)
        scale = self.head_dim**-0.5
        return ops.attention(torch.cat(self.q), cache, layer, plan, scale, self.softcap, self.sinks_H)

    def exact(self, window: int | None = None) -> Tensor:
        """In float64."""
        group = self.heads[0] // self.heads[1]
        results = []
        parts = zip(self.sequences, self.spans, self.q, self.k, self.v, strict=True)
        for (past, new), span, q, k, v in parts:
            keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * self.head_dim**-0.5
            if self.softcap is not None:
                scores = self.softcap * (scores / self.softcap).tanh()
            row = torch.arange(past, past + new, device=self.device)[:, None]
            key = torch.arange(past + new, device=self.device)
            hidden = key > (row if span == 0 or (span == 2 and not window) else past + new + 0 * row)
            if window is not None:
                hidden = hidden | (key <= row - window if window > 0 else key < row - row % -window)
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks_H is not None:
                scores = torch.cat((scores, self.sinks_H.view(-1, 1, 1).expand(-1, new, 1)), -1)
            weights = torch.softmax(scores, -1)[..., : past + new]
            results.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(results).flatten(1)
