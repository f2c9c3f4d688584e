"""Every hot operation of the engine, by signature. A backend is one `Ops` with all of them.

T rows of the step, N sequences in it, E hidden, F feed-forward, V vocabulary, X experts, I and O the sides of
a linear, H query heads, G kv heads (H a multiple of G), D head dim. Floating tensors have the model's dtype
unless said otherwise. "New tensor" results may live in a workspace of the backend: valid until the same
operation runs again with the same shape.

Each output row must be computed in an order that does not depend on how many rows there are: that is what
makes a request's tokens independent of its batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .activation import Activation
from .op_types import BatchLayout, KVShape, Mixture
from .sampling_types import (
    CandidateRanks,
    DecodeInputs,
    DecodeRows,
    DrawResult,
    DrawRow,
    PartOps,
    PenaltyState,
    Sampled,
    SampleRows,
)
from .weight_packing import Packing, QuantizedWeight, StoredWeights

PackedLinear = Any
"""Weights in the backend's own layout, made by `pack_linear`, read by `linear`."""
KVCache = Any
"""Keys and values of all layers in the backend's own layout, made by `make_kv_cache`."""
AttentionPlan = Any
"""Whatever the backend derives from a step's shape, once for all layers."""


class StepInputs(Protocol):
    """What changes from step to step in one forward pass."""

    @property
    def ids_T(self) -> Tensor: ...  # noqa: N802
    @property
    def cos_ATD(self) -> Tensor:  # noqa: N802
        """Tables of angles, contiguous: layers may differ in which of them they rotate by."""
        ...

    @property
    def sin_ATD(self) -> Tensor: ...  # noqa: N802
    @property
    def plans(self) -> Mapping[int | None, AttentionPlan]:
        """By sliding window."""
        ...


class Sample(Protocol):
    def __call__(self, logits_RV: Tensor, rows: SampleRows, rules: PenaltyState | None = None) -> Sampled:
        """Draws every row on the device, without waiting for it; logits are the same afterwards."""
        ...


class Embed(Protocol):
    def __call__(self, table: PackedLinear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of the table for int64 ids, times `scale`: x_TE, new tensor."""
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
    ) -> Tensor:
        """softmax(scale q k^T) v over each row's context, causal: [T, HD].

        With `softcap` c a score s counts as c tanh(s / c). `write_kv` of this step and layer has run. Query
        head h reads kv head h // (H / G). Slots outside a row's context may hold anything finite.
        """
        ...


RotateAndWrite = Callable[[Tensor, Tensor | None, float, Tensor, Tensor, KVCache, int, AttentionPlan], Tensor]
NormBy = Callable[[Callable[[Any], tuple[Tensor, Any]], Tensor], Tensor]
ForwardBody = Callable[[Any], tuple[Tensor, ...]]
"""Of one `StepInputs`."""


def _empty_states(_name: str, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(like), width, dtype=dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class Ops:
    name: str
    """Shown to users as the backend that runs."""

    pack_embedding: Callable[[Tensor, bool], PackedLinear]
    """(weight_VE, tied) -> table for `embedding`; with `tied` it is also the output head, for `linear`."""

    embedding: Embed

    pack_linear: Callable[[Tensor, Tensor | None], PackedLinear]
    """(weight_OI, bias_O or None), contiguous -> packed. May keep its arguments; the caller lets go."""

    pack_head: Callable[[Tensor, Tensor | None], PackedLinear]
    """As `pack_linear`, for an output head that is not tied: it may be kept in more bits."""

    pack_router: Callable[[Tensor], PackedLinear]
    """As `pack_linear`, of the linear [X, E] that chooses experts, for `logits`: never rounded."""

    linear: Callable[[PackedLinear, Tensor], Tensor]
    """(packed, x_TI with contiguous rows) -> x_TI @ weight.T + bias, a new tensor [T, O]."""

    logits: Callable[[PackedLinear, Tensor], Tensor]
    """As `linear`, for the output head: the result may be float32 whatever the model's dtype."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x, weight, eps) -> x / sqrt(mean(x^2) + eps) * weight over the last dim, sums in float32; new tensor.

    x is [T, E] with weight [E], or [T, n, D] (rows may be strided) with one weight row a head, [n, D].
    Weights of all norms have the model's dtype or float32; the product is rounded once either way.
    """

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x_TE, residual_TE, weight_E, eps): adds x to residual in place, then rms_norm of it."""

    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x_TnD, cos_TD, sin_TD float32) -> each head's halves (a, b) become (a cos - b sin, b cos + a sin).

    cos repeats its first half, sin holds (-sin, sin): x * cos + swapped halves * sin. New tensor or in place.
    """

    gate_mul: Callable[[Tensor, Activation], Tensor]
    """(gate_up_T2F, gate first; activation) -> activation(gate) * up, [T, F]. May overwrite its argument."""

    softcap: Callable[[Tensor, float], Tensor]
    """(logits_RV as `logits` gives them, cap) -> cap * tanh(logits / cap), in place or a new tensor."""

    experts: Callable[[Mixture, Tensor, Tensor], Tensor]
    """(mixture, x_TE, logits_TX of its router) -> down(silu(gate(x)) * up(x)) of each row's `per_token`
    likeliest experts, summed by their shares of a float32 softmax over all X: new tensor [T, E].

    Each expert's result is as `linear` and `gate_mul` give it; a row's are summed in float32, the likeliest
    first (of equally likely ones the lower number), and rounded once.
    """

    make_kv_cache: Callable[[KVShape, torch.device], KVCache]
    """Content is undefined: `clear_blocks` comes before a block's first use."""

    plan_attention: Callable[[BatchLayout, KVCache, int | None], AttentionPlan]
    """(shape of the step, cache, sliding window or None) -> plan for `write_kv` and `attention`.

    A window of w lets a row at position p see positions p - w + 1 .. p.
    """

    write_kv: Callable[[KVCache, int, Tensor, Tensor, AttentionPlan], None]
    """(cache, layer, k_TGD, v_TGD, plan): stores each row at its slot. Rows may be strided."""

    attention: Attend

    copy_blocks: Callable[[KVCache, list[tuple[int, int]]], None]
    """(cache, [(source, destination)]) in all layers. No block is both a source and a destination."""

    clear_blocks: Callable[[KVCache, list[int]], None]
    """(cache, blocks): make every slot finite, in all layers.

    Called for blocks that this step begins to fill: an earlier owner may have left NaN in slots that are
    masked but still multiplied (0 * NaN). A backend that never reads masked slots does nothing here.
    """

    graph: Callable[[ForwardBody], ForwardBody]
    """A function of one `StepInputs`, made of nothing but these operations and views of their results, with
    results of T rows -> the same function. A backend may call it once, note the operations and replay them
    with the tensors of later steps. The KV cache and all weights stay the same."""

    call: Callable[[Callable[..., None], tuple[Tensor, ...]], None] = lambda function, tensors: function(
        *tensors
    )
    """(function, tensors of T rows): calls it with them, to change them in place. The one thing besides
    operations that a graph's body may do, once at every replay: that is how ranks exchange results."""

    states: Callable[[str, Tensor, int, torch.dtype], Tensor] = _empty_states
    """(name, any tensor of T rows, width, dtype) -> [T, width] of undefined content for `call` to fill. New
    tensor for each name."""

    norm_by: NormBy = lambda norm, _weight: norm(None)[0]
    """(norm, its weight_E): `add_rms_norm` that another kernel does, as together with the sum of ranks.
    `norm` takes how the linear that is next wants its rows, or None, and gives the norm and those rows, or
    None."""

    kv_dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    """That `make_kv_cache` takes."""

    packing: Packing | None = None
    """For packed weights that are kept on disk, and checkpoints that hold rounded ones; None: not here."""

    stored: StoredWeights | None = None
    """For checkpoints that hold rounded weights, where there is no `packing`."""

    pack_experts: Callable[[Tensor | QuantizedWeight], PackedLinear] | None = None
    """(weights of all experts of a layer, one after the other, [X O, I]) -> packed, for `experts` alone.

    None: a `Mixture` has a linear for each expert instead of one of all."""

    row_invariant: bool = False
    """Whether every operation computes a row bit by bit the same, whatever rows stand beside it and however
    its sequence was cut into steps."""

    rotate_and_write: RotateAndWrite | None = None
    """`rms_norm` of queries and keys (where norm_nD is given), `rotary` and `write_kv` in one pass, or None:

    (qkv_TnD of H + 2 G heads, norm_nD of H + G heads or None, eps, cos_TD, sin_TD, cache, layer, plan)
    -> q_THD.
    """

    best_of: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """(logits_RV of `logits`, or a float32 copy) -> largest logit and its lowest id, per row.

    NaN anywhere in a row gives NaN."""

    draw: Callable[[Tensor, Sequence[DrawRow]], list[DrawResult]] | None = None
    """(logits_RV as for `best_of`, rows that do not overlap; how each is drawn): on the host, by the rules of
    `engine/sampler` to the last bit. Edits change a row meanwhile, and it is put back."""

    rank: Callable[[Tensor, Sequence[int], Sequence[int], int], CandidateRanks] | None = None
    """(logits_RV as for `best_of`, rows, an id of each, N): how likely these are, and the N likeliest."""

    sample: Sample | None = None

    parts: PartOps | None = None
    """Where there is `sample`: the same of rows that several ranks share."""

    advance: Callable[[DecodeRows, Tensor | None, DecodeInputs, int], None] | None = None
    """(rows, drawn ids_R or None, inputs, block_size): takes the drawn tokens into rows that are not free,
    in place, then writes the next decoding step's inputs. Without tokens only the latter."""

    row_counts: tuple[int, ...] = ()
    """Steps of so many rows, and one of the most rows, run every variant of the kernels between them: what is
    compiled on first use is compiled by these. Empty: nothing is."""
