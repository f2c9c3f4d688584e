"""How near a kernel's main loop can come to the memory bandwidth of a card, from its machine code alone.

A turn of the loop reads some bytes of keys, values or weights, and every warp issues its instructions. Where
issuing takes longer than reading, the kernel cannot reach the bandwidth whatever else happens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support.triton_compile import Loop

ISSUED_PER_CLOCK = 4
"""Warp instructions that a multiprocessor issues in a clock."""
BYTES = {"i8": 1, "u8": 1, "fp8e4nv": 1, "fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU; its bandwidth is nine tenths of the datasheet's, in TB/s."""

    name: str
    multiprocessors: int
    ghz: float
    bandwidth: float


CARDS = {
    80: Card("A100 80 GB", 108, 1.41, 1.84),
    86: Card("RTX 3090 Ti", 84, 1.86, 0.91),
    89: Card("RTX 4090", 128, 2.52, 0.91),
    90: Card("H200", 132, 1.755, 4.32),
    100: Card("B200", 148, 1.85, 7.2),
    120: Card("RTX 5090", 170, 2.41, 1.61),
}
"""By compute capability."""


def main_loop(loops: Sequence[Loop]) -> int:
    """Instructions of a warp in the loop that most turns take: the shortest with products (others have masks
    for what is not whole), else the longest; 0 without loops.
    """
    products = [loop.instructions for loop in loops if loop.has_products]
    return min(products) if products else max((loop.instructions for loop in loops), default=0)


def describe_turn(kernel: str, types: Mapping[str, str], constants: Mapping[str, Any]) -> tuple[str, int]:
    """Say what a turn of the main loop reads, and how many bytes of keys and values or of weights that are; 0
    for kernels that this does not know.
    """
    kinds = {name: kind.removeprefix("*") for name, kind in types.items()}
    rows = constants.get("ROWS")
    if kernel == "attention_kernel":
        values = 0 if constants["TAIL"] else constants["D"]
        width = constants["D"] + constants["TAIL"] + values
        key = width * BYTES[kinds["k"]] + (4 * (1 + (values > 0)) if constants["CONVERSION"] else 0)
        phase = "decode" if constants["DECODING"] else "prefill"
        phase += ", fixed" if constants["FIXED_SPLIT"] else ""
        return f"{phase}, {rows} rows, heads of {constants['D']}, {kinds['k']}", constants["COLUMNS"] * key
    if kernel == "product_kernel":
        group, bits = constants["GROUP"], constants["BITS"]
        offsets = {1: 1, 3: group // 16}.get(constants["GRID"], 0)
        cell = (
            group * bits // 8 + BYTES[kinds["scales"]] + offsets if bits else group * BYTES[kinds["weight"]]
        )
        grid = {0: "", 1: ", zeros", 2: ", E2M1", 3: ", steps"}[constants["GRID"]]
        variant = f"{rows} rows, {bits or 16} bits in groups of {group}{grid}"
        return variant, constants["COLUMNS"] * constants["UNROLL"] * cell
    return "", 0


def issue_share(card: Card, instructions: int, warps: int, turn_bytes: int) -> float:
    """Time that a turn's instructions take to issue, in that of reading its bytes at the card's bandwidth."""
    issuing = instructions * warps / (ISSUED_PER_CLOCK * card.ghz * 1e9)
    reading = turn_bytes / (card.bandwidth * 1e12 / card.multiprocessors)
    return issuing / reading
