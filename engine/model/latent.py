"""Multi-head latent attention (MLA) over the paged KV cache.

T rows, E hidden, H query heads of this rank, D numbers that the cache holds for a token: L of a latent and R
rotated ones of a key. N dims of a query are not rotated, V are those of a value.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout
from llmbox.kernels.ops import KVCache, Ops

from ..checkpoint.safetensors import ShardSlice
from ..model_config.config import ModelConfig
from ..weights.source import Weights
from .attention import rows_of, spread_gates
from .forward_context import ForwardContext


@dataclass(slots=True)
class KeySelection:
    """Keys that rows of a step attend to, as layers of sparse attention choose them one after the other."""

    top: int
    """Number of keys of a row, which earlier rows have not."""
    layout: BatchLayout | None = None
    slots: dict[int, Tensor] = field(default_factory=dict)
    """Slots of the keys of each row, ascending by position, as the last indexer chose them."""

    def begin(self, layout: BatchLayout | None) -> None:
        """Begin a step."""
        self.layout, self.slots = layout, {}

    def long_sequences(self) -> Iterator[tuple[range, int, Tensor]]:
        """Yield rows that see more than `top` keys, the number of keys that the first one sees, and slots of
        the whole sequence.
        """
        assert self.layout is not None
        layout, start = self.layout, 0
        for n, (length, context) in enumerate(zip(layout.query_lens, layout.contexts, strict=True)):
            first = max(0, length - (context - self.top))
            if context > self.top:
                positions, size = torch.arange(context), layout.block_size
                blocks = layout.block_tables_NB[n].long()[positions // size]
                rows = range(start + first, start + length)
                yield rows, context - len(rows) + 1, blocks * size + positions % size
            start += length


class Indexer:
    """Lightning indexer (DeepSeek-AI, "DeepSeek-V3.2", 2025): the score of a key is the sum over small heads
    of their weight times max(q k, 0), and a row attends to the `top` best ones.

    J heads of I dims, of which R are rotated. Scores are float32 and computed row by row, so that a row
    selects the same keys in any step.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        latent = config.latent
        assert latent is not None
        assert latent.index is not None
        self.ops, self.latent, self.index = ops, latent, latent.index
        index, hidden = latent.index, ShardSlice.whole(config.hidden_size)
        turned = tuple(range(latent.rope))
        if index.is_interleaved:
            turned = config.ropes[0].order(latent.rope) or turned
        order = (*turned, *range(latent.rope, index.dim))
        queries = ShardSlice.whole(index.heads * index.dim)
        heads, rope = range(0, queries.total, index.dim), latent.rope
        apart = [head + dim for part in (order[:rope], order[rope:]) for head in heads for dim in part]
        self.q = weights.linear(
            {"wq_b": queries},
            ShardSlice.whole(latent.q_rank),
            bias=False,
            order=tuple(apart),
        )
        self.k = weights.linear({"wk": ShardSlice.whole(index.dim)}, hidden, bias=False, order=order)
        self.weigh = weights.router("weights_proj", ShardSlice.whole(index.heads), hidden)
        self.norm_I = weights.vector("k_norm.weight", index.dim)[list(order)]
        self.bias_I = weights.vector("k_norm.bias", index.dim)[list(order)]
        self._queries: list[Tensor] = []

    def key(self, x_TE: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the key of each row, [T, 1, R] and [T, 1, I - R]."""
        ops, rope = self.ops, self.latent.rope
        key_TI = ops.layer_norm(ops.linear(self.k, x_TE), None, self.norm_I, LATENT_EPS, self.bias_I)
        return ops.rotary(key_TI[:, :rope].unsqueeze(1), *angles), key_TI[:, rope:].unsqueeze(1)

    def note(self, x_TE: Tensor, q_TQ: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Keep the queries of rows and the weights of heads for `select`. `q_TQ`: latents of queries."""
        ops, rope = self.ops, self.latent.rope
        q, heads = ops.linear(self.q, q_TQ), self.index.heads
        q_TJR = ops.rotary(q[:, : heads * rope].view(len(q), heads, rope), *angles)
        q_TJN = q[:, heads * rope :].view(len(q), heads, self.index.dim - rope)
        ops.host_callback(self._keep, (q_TJR, q_TJN, ops.logits(self.weigh, x_TE)))

    def _keep(self, q_TJR: Tensor, q_TJN: Tensor, weights_TJ: Tensor) -> None:
        self._queries = [torch.cat((q_TJR, q_TJN), -1).float(), weights_TJ.float().clone()]

    def select(self, cache: KVCache, layer: int, selection: KeySelection) -> None:
        assert self.ops.read_keys is not None
        q_TJI, weights_TJ = self._queries
        dims = slice(self.latent.compressed, self.latent.width)
        for rows, first, slots_S in selection.long_sequences():
            keys_SI = self.ops.read_keys(cache, layer, slots_S, dims)
            for row, seen in zip(rows, range(first, first + len(rows)), strict=True):
                scores_JS = (q_TJI[row] @ keys_SI[:seen].T).relu_()
                best = _best(weights_TJ[row] @ scores_JS, self.index.top)
                selection.slots[row] = slots_S[best]


def _best(scores_S: Tensor, count: int) -> Tensor:
    """Return the places of the `count` best scores, ascending; of equally good ones the lower."""
    scores_S = scores_S.nan_to_num()  # the result is NaN whatever is selected
    least = scores_S.topk(count).values[-1]
    chosen_S = scores_S > least
    equal = (scores_S == least).nonzero().flatten()
    chosen_S[equal[: count - int(chosen_S.sum())]] = True
    return chosen_S.nonzero().flatten()


class LatentAttention:
    """MLA (DeepSeek-AI, "DeepSeek-V2", 2024): the cache holds one latent vector and one rotated key
    for a token, whatever the heads.

    The linears that expand latents to keys and values are absorbed: queries are mapped to latents before
    attention, and its results from latents to values after it. Prompts are computed in the same way as single
    tokens, so that a token has the same bits in a chunk of any size. With tensor parallelism each rank has
    some heads and all latents.

    Where an indexer selects keys, rows that see no more than those are computed like others, and longer ones
    one by one after them. Kernels that cannot read keys run contexts without longer rows alone
    (`RunnablePlan.cpu_part`).
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        assert config.latent is not None
        self.latent = latent = config.latent
        self.rank = rank = weights.rank
        self.ops = ops
        stage = rank.layout.layers(config.num_layers)
        self.layer = config.layers_with(range(stage.start, layer), state=False)
        """Index in the KV cache, which holds the layers of this stage."""
        assert config.scales.attention is not None
        self.scale, self.eps = config.scales.attention, LATENT_EPS
        self.rope = config.layer_ropes[layer]
        self.growth = next((table for table, rope in enumerate(config.ropes) if rope.of_queries), None)
        """Table by which queries grow with their position (Mistral 4)."""
        turned = config.ropes[self.rope].order(latent.rope) or tuple(range(latent.rope))
        heads, hidden = rank.part(config.num_heads), ShardSlice.whole(config.hidden_size)
        self.heads, self.hidden = heads.size, config.hidden_size
        self.input = self.kv = weights.linear(
            {"kv_a_proj_with_mqa": ShardSlice.whole(latent.compressed)},
            hidden,
            bias=latent.has_bias,
            order=(*range(latent.kv_rank), *(latent.kv_rank + dim for dim in turned)),
        )
        self.kv_norm_1L = weights.vector("kv_a_layernorm.weight", latent.kv_rank).unsqueeze(0)
        self.q_latent, self.q_norm_1L = None, None
        queries, inputs = rows_of(heads, latent.query), hidden
        if latent.q_rank:
            inputs = ShardSlice.whole(latent.q_rank)
            self.q_latent = weights.linear({"q_a_proj": inputs}, hidden, bias=latent.has_bias)
            self.q_norm_1L = weights.vector("q_a_layernorm.weight", latent.q_rank).unsqueeze(0)
        name = "q_b_proj" if latent.q_rank else "q_proj"
        self.q = weights.linear({name: queries}, inputs, bias=False, order=self._query_order(turned))
        self._absorb(heads, weights)
        self.head_gate = self.spread = None
        if config.has_head_gate:
            self.head_gate = weights.linear({"g_proj": heads}, hidden, bias=False)
            self.spread = spread_gates(ops, weights, self.heads, latent.value)
        self.output = weights.linear({"o_proj": hidden}, rows_of(heads, latent.value), bias=latent.has_bias)
        self.indexer, self.rest_11I = None, None
        self._selects = latent.index is not None and ops.read_keys is not None
        self.selection: KeySelection | None = None
        """Set by the decoder, where an indexer selects keys."""
        if latent.index is not None:
            self.rest_11I = torch.zeros(1, 1, latent.index.dim, dtype=weights.dtype, device=weights.device)
            if latent.index.layers[layer]:
                self.indexer = Indexer(config, weights.at("indexer"), ops)

    def _query_order(self, turned: tuple[int, ...]) -> tuple[int, ...]:
        """Return the row order of the queries' linear: what is not rotated of all heads comes first."""
        nope, begins = self.latent.nope, [head * self.latent.query for head in range(self.heads)]
        plain = [begin + dim for begin in begins for dim in range(nope)]
        return (*plain, *(begin + nope + dim for begin in begins for dim in turned))

    def _absorb(self, heads: ShardSlice, weights: Weights) -> None:
        """Read each head's part of the linear that expands latents."""
        latent, every = self.latent, [f"kv_b_proj.{head}" for head in range(heads.total)]
        parts = {
            f"{name}.{part}": rows
            for name in every
            for part, rows in (("k", latent.nope), ("v", latent.value))
        }
        weights.split("kv_b_proj", parts)
        here = every[heads.start : heads.stop]
        for name in set(every) - set(here):
            weights.skip(f"{name}.")
        rank, nope, value = map(ShardSlice.whole, (latent.kv_rank, latent.nope, latent.value))
        keys = [weights.wide_linear(f"{name}.k", nope, rank, transposed=True) for name in here]
        values = [weights.wide_linear(f"{name}.v", value, rank) for name in here]
        self.keys, self.values = self.ops.stack_heads(keys), self.ops.stack_heads(values)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        """Return partial results for `TensorParallel.add_rms_norm`, [T, E]."""
        ops, latent, plan, x = self.ops, self.latent, forward.plans[None], x_TE
        angles = forward.cos_ATD[self.rope], forward.sin_ATD[self.rope]
        self._write_latents(x_TE, forward, angles)
        if self.q_latent is not None:
            assert self.q_norm_1L is not None
            rows = ops.linear(self.q_latent, x_TE).unsqueeze(1)
            x_TE = ops.rms_norm(rows, self.q_norm_1L, self.eps).flatten(1)
        if self.indexer is not None and self._selects:
            self.indexer.note(x, x_TE, angles)
        q = ops.linear(self.q, x_TE)
        if self.growth is not None:
            grown = forward.cos_ATD[self.growth], forward.sin_ATD[self.growth]
            q = ops.rotary(q.view(len(q), -1, latent.rope), *grown).flatten(1)
        plain = self.heads * latent.nope
        q_THN = q[:, :plain].view(len(q), self.heads, latent.nope)
        q_THR = ops.rotary(q[:, plain:].view(len(q), self.heads, latent.rope), *angles)
        rest = () if self.rest_11I is None else (self.rest_11I.expand(len(q), self.heads, -1),)
        q_THD = ops.concat((ops.linear_by_head(self.keys, q_THN), q_THR, *rest))
        out = ops.attention(q_THD, forward.cache, self.layer, plan, self.scale)
        if self._selects:
            ops.host_callback(partial(self._attend_to_selected, forward.cache), (q_THD, out))
        out_THL = out.view(len(q), self.heads, -1)[..., : latent.kv_rank]
        out_THV = ops.linear_by_head(self.values, out_THL)
        out = out_THV.flatten(1)
        if self.head_gate is not None:
            assert ops.recurrent is not None
            gates = ops.linear(self.spread, ops.linear(self.head_gate, x))
            out = ops.recurrent.sigmoid_mul(out, gates)
        return self.rank.row_parallel_linear(ops, self.output, out, self.hidden)

    def _write_latents(self, x_TE: Tensor, forward: ForwardContext, angles: tuple[Tensor, Tensor]) -> None:
        """Norm each row's latent, rotate its key, and write both to the cache, as keys and as values."""
        ops, rank = self.ops, self.latent.kv_rank
        rest: tuple[Tensor, ...] = ()
        if self.indexer is not None:  # first: linears of the same width have one result
            rest = self.indexer.key(x_TE, angles)
        elif self.rest_11I is not None:
            rest = (self.rest_11I.expand(len(x_TE), 1, -1),)
        kv = ops.linear(self.kv, x_TE)
        latent_T1L = ops.rms_norm(kv[:, :rank].unsqueeze(1), self.kv_norm_1L, self.eps)
        key_T1R = ops.rotary(kv[:, rank:].unsqueeze(1), *angles)
        row_T1D = ops.concat((latent_T1L, key_T1R, *rest))
        ops.write_kv(forward.cache, self.layer, row_T1D, row_T1D, forward.plans[None])

    def _attend_to_selected(self, cache: KVCache, q_THD: Tensor, out_TF: Tensor) -> None:
        """Replace the results of rows that see more keys than they may attend to."""
        selection, latent = self.selection, self.latent
        assert selection is not None
        assert self.ops.read_keys is not None
        if self.indexer is not None:
            self.indexer.select(cache, self.layer, selection)
        for row, slots_S in selection.slots.items():
            keys_SD = self.ops.read_keys(cache, self.layer, slots_S, slice(0, latent.compressed))
            scores_HS = self.scale * (q_THD[row, :, : latent.compressed].float() @ keys_SD.T)
            result_HL = scores_HS.softmax(1) @ keys_SD[:, : latent.kv_rank]
            out_TF[row].view(self.heads, -1)[:, : latent.kv_rank] = result_HL


LATENT_EPS = 1e-6
"""Epsilon of the norms of latents and of the indexer's keys, whatever `rms_norm_eps` is."""
