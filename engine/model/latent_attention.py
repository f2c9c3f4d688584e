"""Multi-head latent attention (MLA) over the paged KV cache.

The cache holds one latent vector and one rotated key for a token, whatever the heads. The linears that expand
latents to keys and values are absorbed: queries are mapped to latents before attention, and its results from
latents to values after it. Prompts are computed in the same way as single tokens, so that a token has the
same bits in a chunk of any size.

T rows, E hidden, H query heads of this rank, L numbers of a latent, R rotated dims, N others, V dims of a
value.

DeepSeek-AI, "DeepSeek-V2", 2024.
"""

from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config.config import ModelConfig
from ..partition import ShardSlice
from ..weights.source import Weights
from .attention import rows_of
from .forward_context import ForwardContext


class LatentAttention:
    """MLA with one latent for all heads. With tensor parallelism each rank has some heads and all latents."""

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
        turned = config.ropes[self.rope].order(latent.rope) or tuple(range(latent.rope))
        heads, hidden = rank.part(config.num_heads), ShardSlice.whole(config.hidden_size)
        self.heads, self.hidden = heads.size, config.hidden_size
        self.input = self.kv = weights.linear(
            {"kv_a_proj_with_mqa": ShardSlice.whole(latent.width)},
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
        self.output = weights.linear({"o_proj": hidden}, rows_of(heads, latent.value), bias=latent.has_bias)

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
        ops, latent, plan = self.ops, self.latent, forward.plans[None]
        angles = forward.cos_ATD[self.rope], forward.sin_ATD[self.rope]
        self._write_latents(x_TE, forward, angles)
        if self.q_latent is not None:
            assert self.q_norm_1L is not None
            rows = ops.linear(self.q_latent, x_TE).unsqueeze(1)
            x_TE = ops.rms_norm(rows, self.q_norm_1L, self.eps).flatten(1)
        q = ops.linear(self.q, x_TE)
        plain = self.heads * latent.nope
        q_THN = q[:, :plain].view(len(q), self.heads, latent.nope)
        q_THR = ops.rotary(q[:, plain:].view(len(q), self.heads, latent.rope), *angles)
        q_THD = ops.concat((ops.linear_by_head(self.keys, q_THN), q_THR))
        out = ops.attention(q_THD, forward.cache, self.layer, plan, self.scale)
        out_THL = out.view(len(q), self.heads, -1)[..., : latent.kv_rank]
        out_THV = ops.linear_by_head(self.values, out_THL)
        return self.rank.row_parallel_linear(ops, self.output, out_THV.flatten(1), self.hidden)

    def _write_latents(self, x_TE: Tensor, forward: ForwardContext, angles: tuple[Tensor, Tensor]) -> None:
        """Norm each row's latent, rotate its key, and write both to the cache, as keys and as values."""
        ops, rank = self.ops, self.latent.kv_rank
        kv = ops.linear(self.kv, x_TE)
        latent_T1L = ops.rms_norm(kv[:, :rank].unsqueeze(1), self.kv_norm_1L, self.eps)
        key_T1R = ops.rotary(kv[:, rank:].unsqueeze(1), *angles)
        row_T1D = ops.concat((latent_T1L, key_T1R))
        ops.write_kv(forward.cache, self.layer, row_T1D, row_T1D, forward.plans[None])


LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` is."""
