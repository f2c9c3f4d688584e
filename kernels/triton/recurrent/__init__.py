"""Triton kernels of recurrent layers."""

import torch
from torch import Tensor

from ...recurrent import RecurrentOps, ScanShape, ScanWeights
from ...reference.recurrent import swap_heads
from .chunked_scan import CHUNK, chunked_scan
from .gates import gated_norm, mul_add, sigmoid_mul, silu_mul, softplus_mul
from .scan import scan
from .short_conv import StatePlace, short_conv


def recurrent_ops(*, fixed: bool) -> RecurrentOps:
    """Return the operations. `fixed`: a state's bits never depend on how its sequence was cut into steps."""
    scans = scan if fixed else _scan
    return RecurrentOps(
        short_conv, scans, gated_norm, sigmoid_mul, silu_mul, softplus_mul, mul_add, swap_heads
    )


def _scan(rows: Tensor, gates: Tensor, weights: ScanWeights, shape: ScanShape, *place: *StatePlace) -> Tensor:
    """Scan prompts chunk by chunk where states are saved at the ends of chunks, else row by row. In float32
    too: tensor cores do not multiply it in full. And Mamba 1, whose decays are no factors of keys.
    """
    layout = place[2]
    by_chunks = len(rows) > len(layout.query_lens) and layout.block_size % CHUNK == 0
    is_wide, is_s6 = rows.dtype == torch.float32, shape.rule == "s6"
    return (chunked_scan if by_chunks and not is_wide and not is_s6 else scan)(
        rows, gates, weights, shape, *place
    )
