"""Encoders: models whose tokens attend to those after them too, so that a text is computed at once.

Linears run over all rows of a step. On CPUs everything else runs over one text at a time, because torch may
compute a row differently in a tensor of another shape: so a text has the same bits alone and in a batch.

T rows of the step, L rows of one text, E hidden, F feed-forward, H heads, G kv heads, D head dim.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from llmbox.kernels.ops import Ops, PackedLinear

from ..checkpoint.safetensors import ShardSlice
from ..errors import ModelError
from ..model_config.config import ModelConfig
from ..model_config.encoders.config import (
    UNUSED_OF_ENCODERS,
    ClassifierConfig,
    EncoderActivation,
    EncoderConfig,
)
from ..weights.source import Weights, WeightSource
from .attention import Attention
from .forward_context import ForwardContext, TaskRows
from .rotary import AlibiBias, DistanceBias, ScoreBias, remembered

FUNCTIONS: Final[dict[EncoderActivation, Callable[[Tensor], Tensor]]] = {
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": torch_functional.silu,
    "tanh": torch.tanh,
}
_QUERIES: Final = 256
"""Queries of a sliding window, or with a bias, that are computed at once, to bound memory."""


def attend(
    ops: Ops,
    lens: Sequence[int],
    starts_N1: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    scale: float,
    reach: int | None = None,
    bias: ScoreBias | None = None,
) -> Tensor:
    """Compute attention within each text, [T, HD]. `lens`, `starts_N1`: rows of each text, and the first of
    each in int32; `reach`: distance of the farthest token that one sees.
    """
    if ops.attend_texts is not None and bias is None:
        return ops.attend_texts(q_THD, k_TGD, v_TGD, starts_N1, scale, reach)
    heads, width = q_THD.shape[1:]
    out_TH = torch.empty(len(q_THD), heads * width, dtype=q_THD.dtype, device=q_THD.device)
    start = 0
    for length in lens:
        rows = slice(start, start + length)
        # New tensors have one alignment, whatever the place of the text in the step.
        q, k, v = (_by_head(x[rows], heads) for x in (q_THD, k_TGD, v_TGD))
        cut = bias is None and (reach is None or length <= reach + 1)
        size = length if cut else _QUERIES
        for first in range(0, length, size):
            last = min(first + size, length)
            low, high = 0, length
            mask = None if bias is None else bias(length, first, last)
            if reach is not None and not cut:
                low, high = max(0, first - reach), min(length, last + reach)
                queries, keys = (
                    torch.arange(*span, device=q_THD.device) for span in ((first, last), (low, high))
                )
                distance = queries.unsqueeze(1) - keys
                mask = distance.abs() <= reach
            part = torch_functional.scaled_dot_product_attention(
                q[:, :, first:last], k[:, :, low:high], v[:, :, low:high], attn_mask=mask, scale=scale
            )
            out_TH[start + first : start + last] = part[0].transpose(0, 1).reshape(last - first, -1)
        start += length
    return out_TH


def _by_head(x_LGD: Tensor, heads: int) -> Tensor:
    """Return a text's rows as a new tensor [1, H, L, D]."""
    x = x_LGD.transpose(0, 1)
    if len(x) != heads:
        x = x.repeat_interleave(heads // len(x), dim=0)
    return x.clone(memory_format=torch.contiguous_format).unsqueeze(0)


class BidirectionalAttention(Attention):
    """Attention of a decoder's layers in both directions (EmbeddingGemma). It keeps no keys and values."""

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        ops, rotated = self.ops, self.heads + self.kv_heads
        assert forward.layout is not None
        rows = ops.linear(self.qkv, x_TE).view(len(x_TE), -1, self.head_dim)
        qk_TnD = rows[:, :rotated]
        if self.norm_nD is not None:
            qk_TnD = ops.rms_norm(qk_TnD, self.norm_nD, self.eps)
        qk_TnD = ops.rotary(qk_TnD, forward.cos_ATD[self.rope], forward.sin_ATD[self.rope])
        q_THD, k_TGD, v_TGD = qk_TnD[:, : self.heads], qk_TnD[:, self.heads :], rows[:, rotated:]
        reach = None if self.window is None else self.window // 2
        lens, starts_N1 = forward.layout.query_lens, forward.layout.query_starts_N1
        out = attend(ops, lens, starts_N1, q_THD, k_TGD, v_TGD, self.scale, reach)
        return self.rank.row_parallel_linear(ops, self.output, out, x_TE.shape[1])


class LayerNorm:
    def __init__(self, weights: Weights, name: str, config: ModelConfig, *, bias: bool) -> None:
        self.size, self.eps = config.hidden_size, config.rms_norm_eps
        self.weight_E = weights.vector(f"{name}.weight", self.size)
        self.bias_E = weights.vector(f"{name}.bias", self.size) if bias else None

    def __call__(self, x_TE: Tensor) -> Tensor:
        return torch_functional.layer_norm(x_TE, (self.size,), self.weight_E, self.bias_E, self.eps)


class TaskAdapters:
    """LoRA adapters of one linear, one for each task: A and B of N tasks, with R numbers between them."""

    def __init__(self, weights: Weights, name: str, config: EncoderConfig, inputs: int, outputs: int) -> None:
        tasks, rank = len(config.tasks), config.task_rank
        a_NRI = weights.floats(f"{name}.lora_A", tasks, rank, inputs)
        b_NOR = config.task_scale * weights.floats(f"{name}.lora_B", tasks, outputs, rank)
        self.a_NRI, self.b_NOR = a_NRI.to(weights.dtype), b_NOR.to(weights.dtype)

    def add(self, x_TI: Tensor, out_TO: Tensor, texts: Sequence[TaskRows]) -> Tensor:
        """Add the output of the task's adapter to the rows of each text, in place."""
        for rows, task in texts:
            out_TO[rows] += x_TI[rows].clone() @ self.a_NRI[task].T @ self.b_NOR[task].T
        return out_TO


class TaskTable:
    """Adapters of a table of V rows: A has R numbers of a row for each task, B makes an embedding of them."""

    def __init__(self, weights: Weights, name: str, config: EncoderConfig, rows: int, hidden: int) -> None:
        tasks, rank = len(config.tasks), config.task_rank
        self.a_NVR = weights.floats(f"{name}.lora_A", tasks, rows, rank).to(weights.dtype)
        b_NRE = config.task_scale * weights.floats(f"{name}.lora_B", tasks, rank, hidden)
        self.b_NRE = b_NRE.to(weights.dtype)

    def add(self, ids_T: Tensor | None, out_TE: Tensor, texts: Sequence[TaskRows]) -> None:
        """Add to embeddings in place. `ids_T`: rows of the table; None: the first for all."""
        for rows, task in texts:
            ids = torch.zeros_like(out_TE[rows, 0], dtype=torch.int64) if ids_T is None else ids_T[rows]
            out_TE[rows] += self.a_NVR[task, ids.long()] @ self.b_NRE[task]


class EncoderLayer:
    """Attention and MLP with LayerNorms before or after them."""

    def __init__(
        self, model: ModelConfig, config: EncoderConfig, number: int, weights: Weights, ops: Ops
    ) -> None:
        self.ops, self.config = ops, config
        self.heads, self.head_dim = model.num_heads, model.head_dim
        self.rope, self.window = model.layer_ropes[number], model.windows[number]
        whole = ShardSlice.whole
        hidden, ffn = whole(model.hidden_size), whole(model.intermediate_size)
        _split_stacks(weights, model)
        attention, mlp = weights.at("self_attn"), weights.at("mlp")
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        self.qkv = attention.linear(parts, hidden, bias=model.qkv_bias)
        self.output = attention.linear({"o_proj": hidden}, hidden, bias=model.o_bias)
        self.tasks: dict[str, TaskAdapters] = {}
        for name, (inputs, outputs) in config.task_linears(model).items():
            self.tasks[name] = TaskAdapters(weights, name, config, inputs, outputs)
        self.experts = None
        if config.has_experts(number):
            self.experts = EncoderExperts(model, config, mlp, ops)
        else:
            ups = dict.fromkeys(("gate_proj", "up_proj") if config.is_gated else ("up_proj",), ffn)
            self.up = mlp.linear(ups, hidden, bias=config.up_bias)
            self.down = mlp.linear({"down_proj": hidden}, ffn, bias=config.down_bias)
        first, second = "post_attention_layernorm", "post_feedforward_layernorm"
        if config.is_pre_norm:
            first, second = "input_layernorm", "post_attention_layernorm"
        norm = config.norm_bias
        self.first = None
        if number or not config.is_pre_norm:
            self.first = LayerNorm(weights, first, model, bias=norm)
        self.second = LayerNorm(weights, second, model, bias=norm)

    def __call__(self, x_TE: Tensor, forward: ForwardContext, bias: ScoreBias | None) -> Tensor:
        if not self.config.is_pre_norm:
            assert self.first is not None
            x_TE = self.first(x_TE + self._attend(x_TE, forward, bias))
            return self.second(x_TE + self._mlp(x_TE, forward))
        normed_TE = x_TE if self.first is None else self.first(x_TE)
        x_TE = x_TE + self._attend(normed_TE, forward, bias)
        return x_TE + self._mlp(self.second(x_TE), forward)

    def _attend(self, x_TE: Tensor, forward: ForwardContext, bias: ScoreBias | None) -> Tensor:
        assert forward.layout is not None
        rows = self._linear("self_attn.qkv_proj", self.qkv, x_TE, forward).view(len(x_TE), -1, self.head_dim)
        qk_TnD, v_THD = rows[:, : 2 * self.heads], rows[:, 2 * self.heads :]
        if self.config.rotates:
            qk_TnD = self.ops.rotary(qk_TnD, forward.cos_ATD[self.rope], forward.sin_ATD[self.rope])
        q_THD, k_THD = qk_TnD[:, : self.heads], qk_TnD[:, self.heads :]
        reach = None if self.window is None else self.window // 2
        lens, starts_N1, scale = (
            forward.layout.query_lens,
            forward.layout.query_starts_N1,
            self.head_dim**-0.5,
        )
        out = attend(self.ops, lens, starts_N1, q_THD, k_THD, v_THD, scale, reach, bias)
        return self._linear("self_attn.o_proj", self.output, out, forward)

    def _linear(self, name: str, packed: PackedLinear, x_TI: Tensor, forward: ForwardContext) -> Tensor:
        out_TO = self.ops.linear(packed, x_TI)
        return self.tasks[name].add(x_TI, out_TO, forward.task_rows) if forward.task_rows else out_TO

    def _mlp(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        assert forward.layout is not None
        lens = forward.layout.query_lens
        if self.experts is not None:
            return self.experts(x_TE, lens)
        rows = self._linear("mlp.up_proj", self.up, x_TE, forward)
        if rows.device.type != "cpu":
            lens = [len(rows)]
        activation = self.config.activation
        if self.config.is_gated and activation in {"silu", "gelu_tanh"}:
            return self._linear("mlp.down_proj", self.down, self.ops.gate_mul(rows, activation), forward)
        out_TF = rows
        if self.config.is_gated:
            out_TF = torch.empty(len(rows), rows.shape[1] // 2, dtype=rows.dtype, device=rows.device)
        for text, out in zip(torch.split(rows, list(lens)), torch.split(out_TF, list(lens)), strict=True):
            if self.config.is_gated:
                gate, up = text.chunk(2, dim=1)
                torch.mul(FUNCTIONS[activation](gate), up, out=out)
            else:
                out.copy_(FUNCTIONS[activation](text))
        return self._linear("mlp.down_proj", self.down, out_TF, forward)


class EncoderExperts:
    """Experts; each row uses the best ones by a softmax. Their sum may have a bias (nomic v2)."""

    def __init__(self, model: ModelConfig, config: EncoderConfig, weights: Weights, ops: Ops) -> None:
        self.ops, self.activation, self.per_token = ops, config.activation, config.experts[1]
        whole, names = ShardSlice.whole, [f"experts.{expert}" for expert in range(config.experts[0])]
        hidden, ffn = whole(model.hidden_size), whole(model.intermediate_size)
        for stack, part in (("w1", "up"), ("w2", "down")):
            weights.split(f"experts.{stack}", {f"{name}.{part}": ffn.total for name in names})
        self.router = weights.router("router.layer", whole(len(names)), hidden)
        self.ups = [weights.linear({f"{name}.up": ffn}, hidden, bias=False) for name in names]
        is_turned = config.has_expert_bias
        rows, inputs = (ffn, hidden) if is_turned else (hidden, ffn)
        self.downs = [
            weights.linear({f"{name}.down": rows}, inputs, bias=False, transposed=is_turned) for name in names
        ]
        self.bias_E = None
        if config.has_expert_bias:
            self.bias_E = weights.vector("experts.bias", model.hidden_size)

    def __call__(self, x_TE: Tensor, lens: Sequence[int]) -> Tensor:
        out_TE, logits_TX = torch.zeros_like(x_TE), self.ops.logits(self.router, x_TE).float()
        parts = (torch.split(rows, list(lens)) for rows in (x_TE, logits_TX, out_TE))
        for text_LE, logits_LX, out_LE in zip(*parts, strict=True):
            best = logits_LX.softmax(1).topk(self.per_token, 1)
            for number, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
                rows, places = (best.indices == number).nonzero(as_tuple=True)
                if not len(rows):
                    continue
                inner = FUNCTIONS[self.activation](self.ops.linear(up, text_LE[rows]))
                weights_L1 = best.values[rows, places].unsqueeze(1).to(x_TE.dtype)
                out_LE[rows] += self.ops.linear(down, inner) * weights_L1
            if self.bias_E is not None:
                out_LE.add_(self.bias_E)
        return out_TE


def _split_stacks(weights: Weights, config: ModelConfig) -> None:
    """Declare the stacked linears that a checkpoint may have instead of single ones."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    weights.at("self_attn").split("qkv_proj", {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden})
    weights.at("mlp").split("gate_up_proj", {"gate_proj": ffn, "up_proj": ffn})
    weights.at("mlp").split("up_gate_proj", {"up_proj": ffn, "gate_proj": ffn})


class ClassifierHead:
    """Head of a reranker or classifier: the logits of a text's labels."""

    def __init__(
        self, model: ModelConfig, config: ClassifierConfig, norm_bias: bool, weights: Weights
    ) -> None:
        hidden = model.hidden_size
        self.config, self.size, self.eps = config, hidden, model.rms_norm_eps
        self.dense = weights.floats("dense.weight", hidden, hidden)
        self.dense_bias = weights.floats("dense.bias", hidden) if config.dense_bias else None
        self.norm = weights.floats("norm.weight", hidden) if config.has_norm else None
        self.norm_bias = weights.floats("norm.bias", hidden) if config.has_norm and norm_bias else None
        self.rows = weights.floats("out_proj.weight", config.labels, hidden)
        self.bias = weights.floats("out_proj.bias", config.labels)

    def __call__(self, states_LE: Tensor) -> Tensor:
        """Return the logits of a text in float32 from its states."""
        x_E = (states_LE[0] if self.config.pooling == "cls" else states_LE.float().mean(0)).float()
        x_E = FUNCTIONS[self.config.activation](torch_functional.linear(x_E, self.dense, self.dense_bias))
        if self.norm is not None:
            x_E = torch_functional.layer_norm(x_E, (self.size,), self.norm, self.norm_bias, self.eps)
        return torch_functional.linear(x_E, self.rows, self.bias)


class Encoder:
    """Encoder of the BERT family. The constructor reads every tensor from `source`. Raises ModelError."""

    def __init__(
        self, model: ModelConfig, config: EncoderConfig, source: WeightSource, mixed_layers: int = 0
    ) -> None:
        self.config, self.encoder, self.dtype = model, config, source.dtype
        self.ops = ops = source.ops
        if source.rank.layout.ranks > 1:
            raise ModelError("encoders run on one rank: load without --tp and --pp")
        weights = Weights(source, mixed_layers=mixed_layers)
        whole, hidden = ShardSlice.whole, model.hidden_size
        self.table = weights.embedding("model.embed_tokens", whole(model.vocab_size), hidden, tied=False)
        self.positions = None
        if config.position_rows:
            rows = whole(config.position_rows)
            self.positions = weights.embedding("model.embed_positions", rows, hidden, tied=False)
        self.types_YE = None
        if config.type_rows:
            self.types_YE = weights.floats("model.embed_types.weight", config.type_rows, hidden)
        self.task_table, self.task_types = None, None
        if config.tasks:
            rows_V, rows_Y = model.vocab_size, config.type_rows
            self.task_table = TaskTable(weights, "model.embed_tokens", config, rows_V, hidden)
            if rows_Y:
                self.task_types = TaskTable(weights, "model.embed_types", config, rows_Y, hidden)
        self.embed_norm = LayerNorm(weights, "model.embed_norm", model, bias=config.norm_bias)
        self.bias: ScoreBias | None = None
        if config.relative_buckets:
            self.bias = DistanceBias(weights, model, config.relative_buckets)
        elif config.has_alibi:
            self.bias = AlibiBias(model, self.dtype, self.embed_norm.weight_E.device)
        self.layers = [
            EncoderLayer(model, config, i, weights.at(f"model.layers.{i}"), ops)
            for i in range(model.num_layers)
        ]
        self.norm = None
        if config.is_pre_norm:
            self.norm = LayerNorm(weights, "model.norm", model, bias=config.norm_bias)
        self.classifier = None
        if config.head is not None:
            self.classifier = ClassifierHead(model, config.head, config.norm_bias, weights.at("head"))
        for name in (*UNUSED_OF_ENCODERS, *(() if config.head else ("head.",))):
            weights.skip(name)
        source.finish()

    def hidden(self, forward: ForwardContext, rows_R: Tensor | None) -> Tensor:
        """Return the final states of `rows_R`, or of all rows."""
        assert forward.layout is not None
        x_TE = self.ops.embedding(self.table, forward.ids_T).clone()
        if self.positions is not None:
            places_T = forward.layout.positions_T.long() + self.encoder.position_offset
            x_TE += self.ops.embedding(self.positions, places_T)
        if self.types_YE is not None:
            types_T = forward.types_T
            x_TE += (self.types_YE[0] if types_T is None else self.types_YE[types_T]).to(x_TE.dtype)
        if self.task_table is not None:
            self.task_table.add(forward.ids_T, x_TE, forward.task_rows)
        if self.task_types is not None:
            self.task_types.add(forward.types_T, x_TE, forward.task_rows)
        x_TE = self.embed_norm(x_TE)
        bias = None if self.bias is None else remembered(self.bias)
        for layer in self.layers:
            x_TE = layer(x_TE, forward, bias)
        if self.norm is not None:
            x_TE = self.norm(x_TE)
        return x_TE if rows_R is None else x_TE[rows_R]
