"""The interface of a kernel backend: one `Ops` holds every hot operation of the engine.

T rows of the step, N sequences in it, E hidden, F feed-forward, V vocabulary, X experts, I and O the inputs
and outputs of a linear, H query heads, G KV heads (H a multiple of G), D head dim. Floating-point tensors
have the model's dtype unless said otherwise. A result called "new tensor" may live in a workspace of the
backend: it is valid until the same operation runs again with the same shape.

Each output row must be computed in an order that does not depend on the number of rows. A request's tokens
are independent of its batch because of that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .activation import XIELU, Activation, LimitedSwiGLU
from .lora import LoraOps
from .op_types import (
    AltUpOps,
    BatchLayout,
    CombineResults,
    ComputeResults,
    CopyRuns,
    CosSin,
    Experts,
    KernelProfiler,
    KVShape,
    PopulateBlocks,
    cos_sin,
)
from .recurrent import RecurrentOps
from .sampling_types import (
    CandidateRanks,
    DecodeInputs,
    DecodeRows,
    DrawRow,
    PenaltyState,
    Sampled,
    SampleRows,
)
from .weight_packing import Packing, QuantizedWeight, StoredWeights

PackedLinear = Any
"""Weights in the backend's own layout: `pack_linear` makes them, `linear` reads them."""
KVCache = Any
"""Keys and values of all layers in the backend's own layout, made by `make_kv_cache`."""
AttentionPlan = Any
"""Attention metadata: what the backend derives from a step's layout, once for all layers."""


class StepInputs(Protocol):
    """Inputs of one forward pass that change from step to step."""

    @property
    def ids_T(self) -> Tensor: ...  # noqa: N802
    @property
    def cos_ATD(self) -> Tensor:  # noqa: N802
        """Cosine tables of RoPE, contiguous. Layers may differ in the table that they use."""
        ...

    @property
    def sin_ATD(self) -> Tensor: ...  # noqa: N802
    @property
    def plans(self) -> Mapping[int | None, AttentionPlan]:
        """Attention metadata by sliding window size; None: full attention. See `plan_attention`."""
        ...


class Sample(Protocol):
    def __call__(self, logits_RV: Tensor, rows: SampleRows, rules: PenaltyState | None = None) -> Sampled:
        """Sample a token for every row on the device, without synchronizing. Logits are unchanged."""
        ...


class Embed(Protocol):
    def __call__(self, table: PackedLinear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
        """Look up rows of the table for int64 ids, times `scale`: x_TE, a new tensor of this table alone."""
        ...


class NormLayer(Protocol):
    def __call__(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        weight_E: Tensor,
        eps: float,
        bias_E: Tensor | None = None,
    ) -> Tensor:
        """Add x to the residual in place, then LayerNorm of the sum (of x without a residual): (y - mean(y))
        / sqrt(variance(y) + eps) * weight + bias. Sums in float32, new tensor.
        """
        ...


class Attend(Protocol):
    def __call__(
        self,
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Causal attention: softmax(scale q k^T) v over each row's context, [T, HD]. Of latents
        (`KVShape.latent`) a result has those numbers at least.

        With `softcap` c a score s becomes c tanh(s / c). With `sinks_H`, float32, each head's softmax has one
        more score, which takes its share and adds nothing. `write_kv` of this step and layer must have run.
        Query head h reads KV head h // (H / G). Slots outside a row's context may hold any finite number.
        """
        ...


RotateAndWrite = Callable[[Tensor, Tensor | None, float, Tensor, Tensor, KVCache, int, AttentionPlan], Tensor]
NormBy = Callable[[Callable[[Any], tuple[Tensor, Any]]], Tensor]
ForwardBody = Callable[[Any], tuple[Tensor, ...]]
"""Forward pass as a function of one `StepInputs`."""


def _empty_scratch(_name: str, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(like), width, dtype=dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class Ops:
    name: str
    """Name of the backend, shown to users."""

    pack_embedding: Callable[[Tensor, bool], PackedLinear]
    """(weight_VE, tied) -> table for `embedding`. With `tied` it is also the output head, for `logits`."""

    embedding: Embed

    pack_linear: Callable[[Tensor, Tensor | None], PackedLinear]
    """(weight_OI, bias_O or None), contiguous -> packed weights. They may alias the arguments, which the
    caller must not use afterwards.
    """

    pack_head: Callable[[Tensor, Tensor | None], PackedLinear]
    """Variant of `pack_linear` for an untied output head, which may be kept in more bits."""

    pack_router: Callable[[Tensor, Tensor | None], PackedLinear]
    """Variant of `pack_linear` for a router, [X, E], whose `logits` choose experts. Never quantized."""

    linear: Callable[[PackedLinear, Tensor], Tensor]
    """(packed, x_TI with contiguous rows) -> x_TI @ weight.T + bias, a new tensor [T, O]."""

    logits: Callable[[PackedLinear, Tensor], Tensor]
    """Variant of `linear` for the output head and routers: the result may be float32 whatever the model's
    dtype.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x, weight, eps) -> x / sqrt(mean(x^2) + eps) * weight over the last dim; sums in float32, new tensor.

    x is [T, E] with weight [E], or [T, n, D] (rows may be strided) with one weight row a head, [n, D].
    Weights of norms have the model's dtype or float32; the product is rounded once in either case.
    """

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x_TE, residual_TE, weight_E, eps): add x to residual in place, then `rms_norm` of the sum."""

    layer_norm: NormLayer

    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    """RoPE: (x_TnD, cos_TD, sin_TD float32) -> halves (a, b) of each head become (a cos - b sin, b cos + a
    sin).

    cos repeats its first half, sin holds (-sin, sin): x * cos + swapped halves * sin. New tensor or in place.
    """

    gate_mul: Callable[[Tensor, Activation | LimitedSwiGLU | XIELU], Tensor]
    """(gate_up_T2F, gate first; activation) -> activation(gate) * up, [T, F]. May overwrite its argument.
    Activations of `UNGATED` take [T, F], without ups; xIELU is given with its numbers."""

    softcap: Callable[[Tensor, float], Tensor]
    """(logits_RV as `logits` returns them, cap) -> cap * tanh(logits / cap), in place or a new tensor."""

    scale: Callable[[Tensor, float], Tensor]
    """(x_TE, factor) -> x times the factor, in place."""

    concat: Callable[[Sequence[Tensor]], Tensor]
    """(x_TnD of several widths D, strided in T and n) -> their columns side by side, new tensor."""

    linear_by_head: Callable[[PackedLinear, Tensor], Tensor]
    """(result of `stack_heads`, x_THI, strided in T and H) -> `linear` of each head, new tensor [T, H, O]."""

    experts: Experts

    make_kv_cache: Callable[[KVShape, torch.device], KVCache]
    """(shape, device) -> cache of undefined content: `clear_blocks` comes before a block's first use."""

    plan_attention: Callable[[BatchLayout, KVCache, int | None], AttentionPlan]
    """(layout of the step, cache, sliding window or None) -> attention metadata for `write_kv` and
    `attention`.

    A window of w lets a row at position p see positions p - w + 1 .. p; one of -c, attention within chunks
    of c positions, p - p mod c .. p.
    """

    write_kv: Callable[[KVCache, int, Tensor, Tensor, AttentionPlan], None]
    """(cache, layer, k_TGD, v_TGD, plan): store each row at its slot. Rows may be strided."""

    attention: Attend

    copy_blocks: Callable[[KVCache, list[tuple[int, int]]], None]
    """(cache, [(source, destination)]): copy blocks in all layers. No block is both a source and a
    destination.
    """

    clear_blocks: Callable[[KVCache, list[int]], None]
    """(cache, blocks): make every slot of these blocks finite, in all layers.

    Called for blocks that this step begins to fill: an earlier owner may have left NaN in slots that are
    masked but still multiplied (0 * NaN). A backend that never reads masked slots does nothing here.
    """

    block_tensors: Callable[[KVCache], list[Tensor]]
    """(cache) -> all of its memory as tensors [layers, blocks, ...]: a block's bytes are `tensor[:, block]`
    of each. They can be kept elsewhere and written back, to any block of a cache of the same shape.
    """

    graph: Callable[[ForwardBody], ForwardBody]
    """(forward pass) -> the same function, recorded where the backend can record.

    The body takes one `StepInputs`, consists of nothing but these operations and views of their results, and
    returns tensors of T rows. A backend may call it once, record the operations and replay them with the
    tensors of later steps. The KV cache and all weights stay the same.
    """

    host_callback: Callable[[Callable[..., None], tuple[Tensor, ...]], None] = lambda function, tensors: (
        function(*tensors)
    )
    """Host callback: (function, tensors of T rows) calls the function, which changes the tensors in place.

    A graph's body may do this besides operations. The function runs at that point of every replay: ranks
    exchange their results in this way.
    """

    checksums: Callable[[memoryview, int, int], tuple[int, int]] | None = None
    """(writable data, CRC-32 and Adler-32 before it) -> both, as zlib's; None: not faster than zlib."""

    copy_runs: CopyRuns | None = None
    populate_blocks: PopulateBlocks | None = None
    """Copies and pages of KV blocks in host memory; None: not had."""

    cos_sin: CosSin = cos_sin
    """float32 angles of RoPE -> their cosines and sines. The C++ kernels round them alike on every CPU."""

    read_keys: Callable[[KVCache, int, Tensor, slice], Tensor] | None = None
    """(cache with one KV head, layer, slots_S int64, dimensions) -> their keys, float32 [S, dimensions]. For
    host callbacks, not for the body of a graph; None: not had."""

    linear_in_shares: Callable[[PackedLinear, Tensor, int], Tensor] | None = None
    """Linear whose sums are the same on one rank, and on 2 or 4 whose results are added in pairs: (packed,
    x_TI, ranks) -> new tensor, the model's dtype on one rank and float32 on more. None: not had."""

    scratch: Callable[[str, Tensor, int, torch.dtype], Tensor] = _empty_scratch
    """Scratch: (name, any tensor of T rows, width, dtype) -> [T, width] of undefined content. `host_callback`
    fills it. New tensor for each name."""

    fused_norm: NormBy = lambda norm: norm(None)[0]
    """Fused norm: runs an `add_rms_norm` of another kernel, such as one fused with the all-reduce.

    `norm` takes the 8-bit row format that the next linear wants, or None. It returns the normed rows and the
    quantized ones, or None.
    """

    writing_rows_for: Callable[["Ops", PackedLinear], "Ops"] | None = None
    """Implementation of `before`, or None: no operation quantizes rows for the next linear."""

    kv_dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    """dtypes that `make_kv_cache` accepts."""

    stack_heads: Callable[[Sequence[PackedLinear]], PackedLinear] = tuple
    """(weights of each head of `pack_router` or `pack_wide`, without biases) -> those of `linear_by_head`."""

    packing: Packing | None = None
    """Interface for packed weights on disk and for quantized checkpoints; None: there is none."""

    stored: StoredWeights | None = None
    """Interface for quantized checkpoints, where there is no `packing`."""

    pack_experts: Callable[[Tensor | QuantizedWeight, Tensor | None], PackedLinear] | None = None
    """(weights of all experts of a layer, concatenated, [X O, I]; biases [X O] or None) -> packed, for
    `experts` alone.

    None: a `Mixture` has one linear for each expert instead of one for all.
    """

    weight_memory: Callable[[PackedLinear], list[Tensor]] | None = None
    """(packed) -> its bytes, uint8, which may become those of another linear of its shape and format."""

    row_invariant: bool = False
    """True if a row's bits depend neither on the rows beside it nor on how its sequence is cut into steps."""

    expert_results: ComputeResults | None = None
    """First half of `experts`, before the exchange of rows between ranks with whole experts; None: each rank
    adds up its own, and the sums of ranks are added."""

    combine_experts: CombineResults | None = None
    """Second half; set where `expert_results` is."""

    host_experts: "Ops | None" = None
    """Operations of the CPU that pack and compute experts, in main memory; None: this backend does so."""

    send_expert_inputs: Callable[[Tensor, Tensor], None] | None = None
    """(x_TE, logits_TX): begin to copy what `experts` reads next to `host_experts`, beside what the device
    is given until then; set where those are."""

    recurrent: RecurrentOps | None = None
    """Operations of recurrent layers; None: models that have some cannot run."""

    altup: AltUpOps | None = None
    """Operations of Gemma 3n; None: it cannot run."""

    lora: LoraOps | None = None
    """Operations of LoRA adapters; None: requests with one are refused."""

    rotate_and_write: RotateAndWrite | None = None
    """Fused QK-norm (where norm_nD is given), `rotary` and `write_kv` in one pass, or None:

    (qkv_TnD of H + 2 G heads, norm_nD of H + G heads or None, eps, cos_TD, sin_TD, cache, layer, plan) ->
    q_THD."""

    attend_texts: Callable[[Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor] | None = None
    """Attention in both directions within whole texts, or None, where torch computes it text by text:

    (q_THD, k_TGD, v_TGD, starts_N1 of the texts in int32, scale, reach) -> [T, HD]. `reach`: distance of the
    farthest token that one sees; None: all of its text.
    """

    attend_whole_texts: Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Iterator[Tensor]] | None = (
        None
    )
    """The same without a reach, on a CPU, or None: (q_THD, k_TGD, v_TGD, rows of each text, scale)
    -> [T, HD] in pieces, some rows after another."""

    best_of: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """Argmax: (logits_RV of `logits`, or a float32 copy) -> largest logit and its lowest id, per row.

    NaN anywhere in a row gives NaN.
    """

    draw: Callable[[Tensor, Sequence[DrawRow]], Tensor] | None = None
    """Sample on the host: (logits_RV as for `best_of`, in rows that do not overlap; parameters of each row)
    -> float64 [R, 3]: id, the model's largest logit, the largest after the edits.

    A largest logit that is NaN or infinite means that the row has no valid id. Follows
    `kernels/reference/sampling.py` bit by bit. Logits are edited in place and restored.
    """

    rank: Callable[[Tensor, Sequence[int], Sequence[int], int], CandidateRanks] | None = None
    """Logprobs: (logits_RV as for `best_of`, rows, one id for each, N) -> ranks of these ids and the N
    likeliest."""

    sample: Sample | None = None

    count_last_tokens: Callable[[Tensor, PenaltyState], None] | None = None
    """(position_S, rules): count each row's last token, unless `sample` or this counted it at this position.

    For rows that another rank samples; set where there is `sample`."""

    prepare_decode_inputs: Callable[[DecodeRows, Tensor | None, DecodeInputs, int], None] | None = None
    """Prepare decode inputs: (rows, sampled ids_R or None, inputs, block_size).

    Appends the sampled tokens to rows that are not free, in place, then writes the next decode step's inputs.
    Without ids it only writes the inputs.
    """

    profiler: KernelProfiler | None = None
    """Time of the operations by kind, counted on request; None: not supported."""

    warmup_batch_sizes: tuple[int, ...] = ()
    """Warmup batch sizes. Steps of these sizes, and one of the most rows, run every kernel variant for the
    sizes between, so that everything compiled on first use is compiled. Empty: nothing is."""

    problem: str = ""
    """Reason why these kernels run instead of faster ones; empty if the best do."""

    def before(self, reader: PackedLinear | None) -> "Ops":
        """Return operations for results that `reader` multiplies next; None: it is not known.

        Norms, gates and attention may also write those rows as `reader` wants them, quantized. Results are
        the same, also where another linear reads them.
        """
        if self.writing_rows_for is None or reader is None:
            return self
        return self.writing_rows_for(self, reader)
