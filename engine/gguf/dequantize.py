"""Dequantization of ggml's block formats.

Each function maps blocks as bytes [N, bytes of a block] to float32 [N, weights of a block], by the formulas
of ggml's `dequantize_row_*` (ggml-quants.c). N blocks, B bytes, S groups of a block with a scale of their
own, L weights.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from .reader import BLOCKS

IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantise(kind: str, raw: Tensor) -> Tensor:
    """Dequantize the bytes of whole blocks to float32 [count], in order."""
    block_NB = raw.view(-1, BLOCKS[kind][1])
    return _FORMATS[kind](block_NB).flatten()


def _half(block_NB: Tensor, at: int) -> Tensor:
    """Read the float16 at a byte offset of each block, [N, 1]."""
    return block_NB[:, at : at + 2].contiguous().view(torch.float16).float()


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


def _signed(value: Tensor, offset: int) -> Tensor:
    return value.float() - offset


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * _signed(_nibbles(b[:, 2:]), 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _half(b, 0) * _signed(_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4, 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4) + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].contiguous().view(torch.int8)


def _q2_k(b: Tensor) -> Tensor:
    scale_NS = _half(b, 80) * (b[:, :16] & 15)
    least_NS = _half(b, 82) * (b[:, :16] >> 4)
    code_NSL = _quarters(b[:, 16:80]).view(-1, 16, 16)
    return (scale_NS.unsqueeze(-1) * code_NSL - least_NS.unsqueeze(-1)).flatten(1)


def _quarters(bytes_NB: Tensor) -> Tensor:
    """Unpack 64 bytes of 2-bit numbers to [N, 256]: in each half all lowest bits first, then the next."""
    return _fields(bytes_NB.reshape(-1, 32), 2).reshape(len(bytes_NB), 256)


def _q3_k(b: Tensor) -> Tensor:
    """Dequantize Q3_K. The third bits are in the first 32 bytes: bit k is that of the k-th 32 weights, and a
    cleared one subtracts 4.
    """
    third_NL = _fields(b[:, :32], 1).reshape(-1, 256)
    code_NL = _quarters(b[:, 32:96]).float() - 4 * (1 - third_NL.float())
    low_NS = _fields(b[:, 96:104], 4).reshape(-1, 16)
    high_NS = _fields(b[:, 104:108], 2).reshape(-1, 16)
    scale_NS = _half(b, 108) * _signed(low_NS | high_NS << 4, 32)
    return (scale_NS.unsqueeze(-1) * code_NL.view(-1, 16, 16)).flatten(1)


def _scales_and_leasts(b: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the scales and minimums of Q4_K and Q5_K, [N, 8, 1] each: 6-bit numbers in 12 bytes."""
    first, second, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale_NS = torch.cat((first & 63, last & 15 | first >> 6 << 4), 1)
    least_NS = torch.cat((second & 63, last >> 4 | second >> 6 << 4), 1)
    return (_half(b, 0) * scale_NS).unsqueeze(-1), (_half(b, 2) * least_NS).unsqueeze(-1)


def _halves(bytes_NB: Tensor) -> Tensor:
    """Unpack nibbles to [N, 8, 32]: of each 32 bytes, low nibbles are one group, high ones the next."""
    return _fields(bytes_NB.reshape(-1, 32), 4).reshape(len(bytes_NB), 8, 32)


def _q4_k(b: Tensor) -> Tensor:
    scale, least = _scales_and_leasts(b)
    return (scale * _halves(b[:, 16:]) - least).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scale, least = _scales_and_leasts(b)
    fifth = _fields(b[:, 16:48], 1)
    return (scale * (_halves(b[:, 48:]) | fifth << 4) - least).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low = _fields(b[:, :128].reshape(-1, 64), 4)  # of each half: 64 low nibbles, 64 high ones
    high = _fields(b[:, 128:192].reshape(-1, 32), 2)
    code = _signed(low.reshape(len(b), 256) | high.reshape(len(b), 256) << 4, 32)
    scale_NS = _half(b, 208) * b[:, 192:208].contiguous().view(torch.int8)
    return (scale_NS.unsqueeze(-1) * code.view(-1, 16, 16)).flatten(1)


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b, 0) * torch.tensor(IQ4_VALUES, dtype=torch.float32)[_nibbles(b[:, 2:]).int()]


def _iq4_xs(b: Tensor) -> Tensor:
    low_NS = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), 2).flatten(1)
    high_NS = torch.stack([b[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    scale_NS = _half(b, 0) * _signed(low_NS | high_NS << 4, 32)
    code = _fields(b[:, 8:].reshape(-1, 16), 4).reshape(len(b), 8, 32)
    return (scale_NS.unsqueeze(-1) * torch.tensor(IQ4_VALUES, dtype=torch.float32)[code.int()]).flatten(1)


_FORMATS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "F32": lambda raw: raw.contiguous().view(torch.float32),
    "F16": lambda raw: raw.contiguous().view(torch.float16).float(),
    "BF16": lambda raw: raw.contiguous().view(torch.bfloat16).float(),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
