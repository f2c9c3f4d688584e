"""Blocks of GGUF files, taken apart: the numbers, scales and minimums that a block holds, as they are stored.

The layouts are those of ggml's `dequantize_row_*` (ggml-quants.c). N blocks, B bytes, L weights of a block, P
parts of a block with a byte of scales of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from llmbox.kernels.quant_formats import GGUF_QUANTS
from llmbox.kernels.quantize_int import E2M1_DOUBLED
from llmbox.kernels.weight_packing import BlockWeight, QuantizedWeight

from .reader import BLOCKS


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Parts of blocks: numbers n [N, L] uint8 (int8 where they are weights times a scale), and of each block
    a scale, a minimum, bytes of scales and bytes of minimums where its type has them.
    """

    numbers_NL: Tensor
    scale_N1: Tensor
    minimum_N1: Tensor | None = None
    scale_parts_NP: Tensor | None = None
    minimum_parts_NP: Tensor | None = None


def dequantise(kind: str, raw: Tensor) -> Tensor:
    """Dequantize the bytes of whole blocks to float32 [count], in order."""
    if kind in FLOATS:
        return raw.contiguous().view(FLOATS[kind]).float()
    return unpack_rows(kind, raw, 1).floats().flatten()


def unpack_rows(kind: str, raw: Tensor, rows: int) -> BlockWeight | QuantizedWeight:
    """Take the bytes of a matrix of `rows` rows apart. Nothing is rounded."""
    quant, found = GGUF_QUANTS[kind], _FORMATS[kind](raw.view(-1, BLOCKS[kind][1]))

    def by_rows(parts: Tensor | None) -> Tensor | None:
        return None if parts is None else parts.reshape(rows, -1)

    numbers_OI, scales_OU = found.numbers_NL.reshape(rows, -1), found.scale_N1.reshape(rows, -1)
    if not quant.grid:
        return QuantizedWeight(quant, numbers_OI, scales_OU)
    parts = map(by_rows, (found.minimum_N1, found.scale_parts_NP, found.minimum_parts_NP))
    return BlockWeight(quant, numbers_OI, scales_OU, *parts)


def _half(block_NB: Tensor, at: int) -> Tensor:
    """Read the float16 at a byte offset of each block, [N, 1]."""
    return block_NB[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(bytes_NB: Tensor) -> Tensor:
    """Unpack nibbles: all low ones, then all high ones."""
    return torch.cat((bytes_NB & 15, bytes_NB >> 4), 1)


def _bits(bytes_NB: Tensor) -> Tensor:
    """Unpack bits: [N, B] -> [N, 8 B], the lowest bit of each byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bytes_NB.unsqueeze(-1) >> shifts & 1).flatten(1)


def _fields(bytes_NB: Tensor, width: int) -> Tensor:
    """Unpack bit fields: [N, B] -> [N, 8 / width, B], the bits at 0, at `width`, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(1, -1, 1)
    return bytes_NB.unsqueeze(1) >> shifts & (1 << width) - 1


def _q4_0(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 2:]).view(torch.int8) - 8, _half(b, 0))


def _q4_1(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2))


def _q5_0(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4, _half(b, 0))


def _q5_1(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4, _half(b, 0), _half(b, 2))


def _q8_0(b: Tensor) -> Unpacked:
    return Unpacked(b[:, 2:].contiguous().view(torch.int8), _half(b, 0))


def _mxfp4(b: Tensor) -> Unpacked:
    """Take MXFP4 apart: doubled E2M1 numbers, and half the power of two that a byte names."""
    numbers = torch.tensor(E2M1_DOUBLED, dtype=torch.int8)[_nibbles(b[:, 1:]).int()]
    return Unpacked(numbers, torch.ldexp(torch.ones(len(b), 1), b[:, :1].int() - 128))


def _quarters(bytes_NB: Tensor) -> Tensor:
    """Unpack 64 bytes of 2-bit numbers to [N, 256]: in each half all lowest bits first, then the next."""
    return _fields(bytes_NB.reshape(-1, 32), 2).reshape(len(bytes_NB), 256)


def _q2_k(b: Tensor) -> Unpacked:
    return Unpacked(_quarters(b[:, 16:80]), _half(b, 80), _half(b, 82), b[:, :16])


def _q3_k(b: Tensor) -> Unpacked:
    """Take Q3_K apart. Third bits are in the first 32 bytes: bit k is that of the k-th 32 weights."""
    third_NL = _fields(b[:, :32], 1).reshape(-1, 256)
    low_NP = _fields(b[:, 96:104], 4).reshape(-1, 16)
    high_NP = _fields(b[:, 104:108], 2).reshape(-1, 16)
    parts = (low_NP | high_NP << 4).view(torch.int8) - 32
    return Unpacked(_quarters(b[:, 32:96]) | third_NL << 2, _half(b, 108), None, parts.view(torch.uint8))


def _k_parts(b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unpack the scales of Q4_K and Q5_K: scale, minimum, and 6-bit numbers [N, 8] of both in 12 bytes."""
    first, second, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale_NP = torch.cat((first & 63, last & 15 | first >> 6 << 4), 1)
    minimum_NP = torch.cat((second & 63, last >> 4 | second >> 6 << 4), 1)
    return _half(b, 0), _half(b, 2), scale_NP, minimum_NP


def _halves(bytes_NB: Tensor) -> Tensor:
    """Unpack nibbles to [N, 8, 32]: of each 32 bytes, low nibbles are one group, high ones the next."""
    return _fields(bytes_NB.reshape(-1, 32), 4).reshape(len(bytes_NB), 8, 32)


def _q4_k(b: Tensor) -> Unpacked:
    return Unpacked(_halves(b[:, 16:]).flatten(1), *_k_parts(b))


def _q5_k(b: Tensor) -> Unpacked:
    return Unpacked((_halves(b[:, 48:]) | _fields(b[:, 16:48], 1) << 4).flatten(1), *_k_parts(b))


def _q6_k(b: Tensor) -> Unpacked:
    low = _fields(b[:, :128].reshape(-1, 64), 4)  # of each half: 64 low nibbles, 64 high ones
    high = _fields(b[:, 128:192].reshape(-1, 32), 2)
    numbers = low.reshape(len(b), 256) | high.reshape(len(b), 256) << 4
    return Unpacked(numbers, _half(b, 208), None, b[:, 192:208])


def _iq4_nl(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 2:]), _half(b, 0))


def _iq4_xs(b: Tensor) -> Unpacked:
    low_NP = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), 2).flatten(1)
    high_NP = torch.stack([b[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    parts = (low_NP | high_NP << 4).view(torch.int8) - 32
    numbers = _fields(b[:, 8:].reshape(-1, 16), 4).reshape(len(b), 256)
    return Unpacked(numbers, _half(b, 0), None, parts.view(torch.uint8))


FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMATS: Final[dict[str, Callable[[Tensor], Unpacked]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
