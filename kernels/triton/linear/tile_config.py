"""Tile sizes by architecture: small fixed tables instead of tuning while requests wait.

Shapes are rows x columns of one program's tile. Hopper's table is meant for 227 KB of shared memory a block
and its asynchronous tensor cores, which need 64 rows and 4 warps or multiples; the other one for 99 KB.
"""

from dataclasses import dataclass
from functools import cache

import torch

ROW_COUNTS = (1, 16, 32, 64, 128, 192, 256, 512, 1024, 2048)
"""First row count of every tile size, and the last one of each range of counts that shares a size: inside a
range the inputs are split among programs up to some number of rows, and not beyond it. The last two are for
MoE, whose tiles depend on the rows of an expert.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int
    warps: int
    stages: int


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; (0, 0) on a CPU, where only the interpreter runs."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or capability(device) >= (8, 9)


def power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def warps_for(width: int) -> int:
    """Return the warps of a program that holds a row in registers: at most 16 numbers a thread, up to 16
    warps.
    """
    return min(16, max(1, power_of_two(width) // 512))


def tile_of_8_bits(device: torch.device, rows: int, *, fixed: bool = False) -> Tile:
    """Return the tile of a W8A8 product; `fixed`: one tile whatever the number of rows."""
    if fixed:
        return Tile(64, 64, 4, 4)
    if rows <= 64 or capability(device)[0] != 9:
        return Tile(16 if rows <= 16 else 64, 64, 4, 4)
    return Tile(128, 128, 8, 4)


# Attention. A page number is loaded before the keys it leads to: 5 stages hold two tiles of keys and values.


def prefill_tile(device: torch.device, head_dim: int, itemsize: int) -> Tile:
    if itemsize == 4:  # no tensor cores in full float32: the tile lives in registers, of 8 warps or it spills
        return Tile(16, 32, 8, 2)
    hopper = capability(device)[0] == 9
    if head_dim > 256:
        return Tile(32, 32, 8, 3)
    if head_dim > 128:  # with 4 warps int8 keys spill 300 bytes a thread elsewhere, with 8 nothing does
        return Tile(64, 32, 4 if hopper else 8, 3)
    if hopper:
        return Tile(128, 64, 8, 5)
    return Tile(64, 32, 4, 5)


def decode_tile(device: torch.device, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of decode: tensor cores take at least 16 rows. Hopper then runs three programs a
    multiprocessor.
    """
    if itemsize == 4:
        return Tile(16, 32, 8, 2)
    if head_dim > 256:
        return Tile(16, 32, 8, 5 if capability(device)[0] == 9 else 3)
    if head_dim > 128 or capability(device)[0] != 9:
        return Tile(16, 32, 4, 5)
    return Tile(16, 64, 4, 5)


def fixed_tile(device: torch.device, head_dim: int, itemsize: int, kv_itemsize: int) -> Tile:
    """Return one tile for prefill and decode alike, so that a row goes through the same instructions in
    both.
    """
    if itemsize == 4:
        return Tile(16, 32, 8, 2)
    # Two tiles of sums are in registers while pieces are folded.
    if head_dim > 256:
        return Tile(16, 32, 8, 3)
    if capability(device)[0] != 9:  # with 4 warps int8 keys of 128 spill 248 bytes, with 64 rows those of 256
        return Tile(64 if head_dim <= 128 else 32, 32, 8, 3)
    if head_dim > 128:
        return Tile(64, 32, 8, 3)
    return Tile(64, 32, 4, 3) if kv_itemsize == 1 else Tile(64, 64, 4, 5)
