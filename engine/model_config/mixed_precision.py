"""Mixed-precision formats: the linears that get as many bits as the output head.

These are `down_proj` of the first and the last eighth of the layers, and of every third layer between them,
as in llama.cpp's Q4_K_M. In the built-in model they gain most from more bits (docs/quantization.md).
"""

import re

from llmbox.kernels.quant_formats import Quant

from .shape import ModelShape

_FINE = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp\.down_proj|feed_forward\.w2|.+\.experts\.\d+\.(?:down_proj|w2))"
)


def is_fine(name: str, layers: int) -> bool:
    """Return True if the linear gets more bits. `name`: its name in a checkpoint without `.weight`."""
    found = _FINE.fullmatch(name)
    return found is not None and _has_more_bits(int(found[1]), layers)


def layers_bytes(shape: ModelShape, quant: Quant, wide: int, rows: int | None = None) -> int:
    """Return the bytes of all quantized and unquantized linears except the output head. `wide`: bytes of an
    unquantized parameter.

    `rows`: count only the experts that so many tokens select.
    """
    params = shape.matmul_params - shape.table_params - (shape.unread_params(rows) if rows else 0)
    fine = 0
    if quant.is_mixed:
        layers = sum(_has_more_bits(layer, shape.layers) for layer in range(shape.layers))
        read = 1.0
        if rows and shape.experts:
            read = shape.experts.read(rows) / shape.experts.count
        fine = int(layers * shape.hidden * shape.inner_rows * read / shape.layers)
    kept = shape.wide_params + shape.router_params
    return int(
        (params - fine - kept) * quant.bytes_per_weight + fine * quant.head.bytes_per_weight + kept * wide
    )


def _has_more_bits(layer: int, layers: int) -> bool:
    edge = max(1, layers // 8)
    return layer < edge or layer >= layers - edge or (layer - edge) % 3 == 2
