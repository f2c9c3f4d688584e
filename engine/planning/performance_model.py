"""Performance model: upper bounds of speed by memory bandwidth and peak FLOP/s (roofline), and the cost of
parallelism: the shape of one rank, the traffic between ranks, the expected scaling.
"""

from dataclasses import dataclass, replace

from llmbox.kernels.quant_formats import Quant

from ..model_config.parallel_layout import ParallelLayout
from ..model_config.shape import (
    DTYPE_BYTES,
    ExpertShape,
    LatentShape,
    ModelShape,
    RecurrentShape,
    SlidingShape,
    head_bytes,
    layers_bytes,
)
from .memory_plan import MemoryPlan


def decode_tokens_per_second(
    shape: ModelShape,
    dtype: str,
    kv_dtype: str,
    bandwidth: float,
    *,
    rows: int = 1,
    context: int = 0,
    quant: Quant | None = None,
) -> float:
    """Return the bound of all `rows` streams together: a step reads every weight once, and the KV of each
    stream's `context`. `bandwidth` is in bytes per second.

    Experts are counted as often as the rows select them, if all of them are equally likely.
    """
    return rows * bandwidth / step_bytes(shape, dtype, kv_dtype, rows=rows, context=context, quant=quant)


def step_bytes(
    shape: ModelShape, dtype: str, kv_dtype: str, *, rows: int, context: int, quant: Quant | None = None
) -> float:
    """Return the bytes that a step reads: weights, and KV and recurrent state of `rows` streams."""
    seen = shape.seen(context)
    weight_bytes = (shape.matmul_params - shape.unread_params(rows)) * DTYPE_BYTES[dtype]
    if quant is not None:
        head = shape.table_params
        wide = DTYPE_BYTES[dtype]
        weight_bytes = int(head * head_bytes(shape, quant, wide)) + layers_bytes(shape, quant, wide, rows)
    states = 2 * shape.slot_bytes  # read and written
    return weight_bytes + rows * (seen * shape.kv_bytes_per_token(kv_dtype) + states)


def expert_step_bytes(shape: ModelShape, dtype: str, *, rows: int, quant: Quant | None = None) -> float:
    """Return the bytes of experts that a step of `rows` streams reads, where they are in main memory. The
    step then reads `step_bytes` of `ModelShape.without_routed` on its device.
    """
    all_of, rest = (
        step_bytes(each, dtype, dtype, rows=rows, context=0, quant=quant)
        for each in (shape, shape.without_routed())
    )
    return all_of - rest


def step_flops(shape: ModelShape, *, rows: int, context: int, logits: bool = True) -> float:
    """Return the FLOPs of a step: linears, and attention of each row over `context` tokens. `logits`: the
    output head is computed for each row, which prompts do not need.
    """
    params = shape.active_params - (0 if logits else shape.table_params)
    attention = 2 * shape.heads * shape.head_dim * shape.kv_layers * shape.seen(context)
    return 2 * rows * (params + attention)


def rank_shape(
    shape: ModelShape, tp: int, pp: int, *, expert_parallel: bool = False, redundant_experts: int = 0
) -> ModelShape:
    """Return the shape of the rank that holds most, as if it were a model. `vocab` does not change: logits
    are gathered whole.
    """
    if tp == pp == 1:
        return shape
    layers = -(-shape.layers // pp)
    part = replace(
        shape,
        layers=layers,
        heads=shape.heads // tp,
        kv_heads=max(1, shape.kv_heads // tp),
        ffn=shape.ffn // tp,
        table_rows=-(-shape.vocab // tp),
        # Input embedding and head are on different stages. The first stage has as many layers as any other,
        # and an embedding that is never quantized: no other stage holds more.
        tied=shape.tied or pp > 1,
        no_head=pp > 1 and not shape.tied,
        exact_params=None,
        latent=shape.latent and _latent_share(shape.latent, tp),
        experts=shape.experts
        and _expert_share(shape.experts, layers, tp, expert_parallel, redundant_experts),
        mlp_layers=shape.mlp_layers and min(layers, shape.mlp_layers),
        recurrent=shape.recurrent and _recurrent_share(shape.recurrent, tp, pp),
        has_attention=_attention_share(shape.has_attention, pp),
        sliding=shape.sliding and _sliding_share(shape.sliding, shape.recurrent, tp, pp),
        linear_params=shape.linear_params and -(-shape.linear_params // (tp * pp)),
        looked_up_params=-(-shape.looked_up_params // tp),
    )
    tables = shape.table_params * (1 if shape.tied else 2) + shape.looked_up_params
    in_layers = shape.params - tables - shape.hidden
    more = max(0, in_layers - shape.layers_params)
    # Biases that the closed form does not know are counted on every rank: too much rather than too little.
    # All unquantized linears may be in one stage.
    wide = min(-(-shape.wide_params // tp), part.layers_params)
    return replace(part, exact_params=part.params + -(-more // pp), wide_params=wide)


def _attention_share(has_attention: tuple[bool, ...], pp: int) -> tuple[bool, ...]:
    """Return the layers of the stage that has the most with attention."""
    stages = [ParallelLayout(1, pp, stage).layers(len(has_attention)) for stage in range(pp)]
    return max((tuple(has_attention[layer] for layer in stage) for stage in stages), key=sum)


def _latent_share(latent: LatentShape, tp: int) -> LatentShape:
    split, absorbed, inner = latent.split // tp, latent.absorbed // tp, latent.inner // tp
    return replace(latent, split=split, absorbed=absorbed, inner=inner)


def _expert_share(
    experts: ExpertShape, layers: int, tp: int, expert_parallel: bool, redundant: int
) -> ExpertShape:
    """Return the experts of a stage of `layers` layers, all of which may have experts. Each expert is sharded
    as an MLP is, or a rank has some of them whole, with its share of `redundant` copies.
    """
    part = replace(experts, layers=min(layers, experts.layers), shared=experts.shared // tp)
    if expert_parallel:
        return replace(part, ranks=tp, redundant=redundant)
    return replace(part, inner=experts.inner // tp)


def _recurrent_share(recurrent: RecurrentShape, tp: int, pp: int) -> RecurrentShape:
    """Return the most recurrent layers of any stage, and the most with attention, which every stage is given
    at least one of.
    """
    kinds = recurrent.is_recurrent
    stages = [ParallelLayout(tp, pp, stage * tp).layers(len(kinds)) for stage in range(pp)]
    return replace(
        recurrent,
        layers=max(sum(kinds[layer] for layer in stage) for stage in stages),
        attention_layers=max(1, *(sum(recurrent.has_kv[layer] for layer in stage) for stage in stages)),
        layer_params=recurrent.layer_params // tp,
        layer_bytes=recurrent.layer_bytes // tp,
    )


def _sliding_share(sliding: SlidingShape, recurrent: RecurrentShape | None, tp: int, pp: int) -> SlidingShape:
    """Return the most sliding layers of any stage, and the most others with KV."""
    kinds = sliding.is_sliding
    has_kv = (True,) * len(kinds) if recurrent is None else recurrent.has_kv
    if sliding.heads is not None:
        sliding = replace(sliding, heads=(max(1, sliding.heads[0] // tp), sliding.heads[1]))
    if pp == 1:
        return sliding
    stages = [ParallelLayout(1, pp, stage).layers(len(kinds)) for stage in range(pp)]
    counts = [(sum(kinds[i] for i in stage), sum(has_kv[i] for i in stage)) for stage in stages]
    return replace(
        sliding,
        layers=max(count for count, _ in counts),
        full_layers=max(1, *(size - count for count, size in counts)),
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends per token of a forward pass."""

    sums: int
    """Bytes of all-reduces: attention and MLP of each layer, and the embedding. With `results` also those."""
    stages: int
    """Bytes sent to the next stage."""


def traffic(shape: ModelShape, tp: int, pp: int, dtype: str, *, results: bool = False) -> Traffic:
    """Return the traffic of one rank. An all-reduce of n bytes over t ranks sends 2 (t - 1) / t · n from
    each; a layer has two of them, the embedding one. `results`: ranks exchange the results of experts, k a
    token and layer, of which each sends (t - 1) / t · k; they take the place of the layer's second
    all-reduce, but for that of a shared expert.
    """
    row = shape.hidden * DTYPE_BYTES[dtype]
    layers = -(-shape.layers // pp)
    sums = (2 * layers + 1) * 2 * (tp - 1) * row // tp
    if results and shape.experts is not None:
        experts = shape.experts
        width = (experts.latent or shape.hidden) * DTYPE_BYTES[dtype]
        saved = 0 if experts.shared else 2 * row
        sums += min(layers, experts.layers) * (tp - 1) * (experts.per_token * width - saved) // tp
    return Traffic(sums, 2 * row if pp > 1 else 0)


@dataclass(frozen=True, slots=True)
class RankLink:
    """Ranks of a model as decoding sees them: the link between two of them, and the memory of each."""

    bandwidth: float
    """Bytes a second one way between two ranks."""
    seconds: float
    """Latency of an all-reduce, and of a message to the next stage."""
    memory: float
    """Bytes a second that a rank reads of its memory."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Expected decoding speed in tokens per second, on one rank and on all."""

    one_rank: float
    """Roofline of one rank that holds the whole model."""
    all_ranks: float

    @property
    def factor(self) -> float:
        return self.all_ranks / self.one_rank


def decode_scaling(
    shape: ModelShape, plan: MemoryPlan, link: RankLink, *, rows: int = 1, context: int = 0
) -> Scaling:
    """Return the expected decoding speed of unquantized weights. Ranks with whole experts are counted as if
    rows chose as many of each; a step waits for the one with most.

    The stages process the `rows` of one step one after another, so `pp` does not divide their time. Work for
    other steps at the same time is not counted.
    """

    def speed(read: ModelShape) -> float:
        return decode_tokens_per_second(
            read, plan.dtype, plan.kv_dtype, link.memory, rows=rows, context=context
        )

    part = rank_shape(shape, plan.tp, 1, expert_parallel=plan.expert_parallel)
    sums, handing_on = exchange_seconds(shape, plan, link, rows=rows)
    return Scaling(speed(shape), rows / (rows / speed(part) + sums + handing_on))


def exchange_seconds(
    shape: ModelShape, plan: MemoryPlan, link: RankLink, *, rows: int
) -> tuple[float, float]:
    """Return the seconds that a step of `rows` spends in all-reduces, and between stages."""
    results = plan.exchanges_results
    moved = traffic(shape, plan.tp, plan.pp, plan.dtype, results=results)
    sums = 0.0
    if plan.tp > 1:
        more = shape.experts.layers if results and shape.experts and shape.experts.shared else 0
        sums = (2 * shape.layers + 1 + more) * link.seconds + rows * moved.sums * plan.pp / link.bandwidth
    if plan.pp == 1:
        return sums, 0.0
    return sums, (plan.pp - 1) * (link.seconds + rows * moved.stages / link.bandwidth)
