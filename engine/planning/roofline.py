"""The speed that memory bandwidth and arithmetic peak allow: a bound to show beside what is measured."""

from llmbox.kernels.quant_formats import Quant

from ..model_config.mixed_precision import layers_bytes
from ..model_config.shape import DTYPE_BYTES, ModelShape


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
    """All `rows` streams together: a step reads every weight once, and the KV of each stream's `context`.

    Of experts those that the rows choose, were all of them equally likely.
    """
    seen = shape.seen(context)
    weight_bytes = (shape.matmul_params - shape.unread_params(rows)) * DTYPE_BYTES[dtype]
    if quant is not None:
        head = shape.table_params
        wide = DTYPE_BYTES[dtype]
        weight_bytes = int(head * quant.head_bytes(wide)) + layers_bytes(shape, quant, wide, rows)
    return rows * bandwidth / (weight_bytes + rows * seen * shape.kv_bytes_per_token(kv_dtype))


def prefill_tokens_per_second(shape: ModelShape, peak_flops: float, *, prompt: int) -> float:
    """Mean over a prompt: two operations a parameter, and four a head dimension and visible token.

    The output projection is left out, as only the last row of a prompt needs it.
    """
    visible = shape.seen(prompt / 2)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * visible
    return peak_flops / (2 * (shape.active_params - shape.vocab * shape.hidden) + attention)
