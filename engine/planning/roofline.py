"""Roofline: upper bounds of speed by memory bandwidth and peak FLOP/s, to show beside measured speeds."""

from llmbox.kernels.quant_formats import Quant

from ..model_config.shape import DTYPE_BYTES, ModelShape, head_bytes, layers_bytes


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
