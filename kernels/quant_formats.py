"""Weight formats by name. Torch-free, as settings and memory estimates use them too."""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

Kind = Literal["linear", "experts", "router", "head", "table", "tied"]
"""Kind of a weight matrix: a layer's linear, all experts of a layer in one, the MoE router, the output head,
the embedding table, or one matrix that is both head and table.
"""
OF_LAYERS: frozenset[Kind] = frozenset({"linear", "experts"})
"""Kinds that have the format of the layers."""
HEADS: frozenset[Kind] = frozenset({"head", "tied"})
"""Kinds of the output head, alone or as the table too."""
UNQUANTIZED_KINDS: frozenset[Kind] = frozenset({"router", "table"})
"""Kinds that no format quantizes."""


BlockGrid = Literal[
    "", "centered", "table", "minimums", "k_minimums", "k_pairs", "k_signed", "k_table", "k_iq1", "k_iq2",
    "k_iq3_xxs", "k_iq3_s",
]  # fmt: skip
"""Meaning of the numbers n of a block of a GGUF file, with its scale d, and m:

    centered    d * (n - `zero`)
    table       d * value of n in `BLOCK_TABLES`
    minimums    d * n + m
    k_minimums  d * s * n - m * t, with bytes s and t for each 32 inputs
    k_pairs     the same for each 16 inputs, s and t in one byte
    k_signed    d * s * (n - `zero`), with a signed byte s for each 16 inputs
    k_table     d * s * value of n, with a signed byte s for each 32 inputs
    k_iq3_…     the same
    k_iq1, _iq2 the same for each 16 inputs
"""
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCK_TABLES: Final[dict[BlockGrid, tuple[tuple[int, ...], float]]] = {
    "table": (_IQ4, 1.0),
    "k_table": (_IQ4, 1.0),
    "k_iq1": ((-9, -7, -1, 1, 7, 9), 1 / 8),
    "k_iq2": ((-43, -25, -8, 8, 25, 43), 1 / 8),
    "k_iq3_xxs": ((-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62), 1 / 4),
    "k_iq3_s": (tuple(range(-15, 16, 2)), 1.0),
}
"""Values of numbers by grid, and the power of two that each is multiplied by. Products with a scale and a
byte are exact in float32, so that a weight is that of ggml in any order of them.
"""
_BLOCK_SCALES: Final[dict[BlockGrid, float]] = {
    "centered": 2 / 32, "table": 2 / 32, "minimums": 4 / 32, "k_minimums": 20 / 256, "k_pairs": 20 / 256,
    "k_signed": 18 / 256, "k_table": 10 / 256, "k_iq1": 18 / 256, "k_iq2": 18 / 256, "k_iq3_xxs": 10 / 256,
    "k_iq3_s": 10 / 256,
}  # fmt: skip
"""Bytes of scales for each weight of blocks in memory."""


@dataclass(frozen=True, slots=True)
class Quant:
    """Quantization format: integer weights with one float16 scale for each `group` inputs of an output.

    If `step` is not 0, that many neighboring inputs share a step and a zero point (`weight_packing.py`). A
    weight is then its scale times (step * n - zero), where n has 4 bits and the value in parentheses fits 8
    bits.

    Other kinds run on GPUs only, and quantize activations to 8 bits too:

        rows      W8A8: the same int8 weights; int8 activations, one scale for each row and group
        float     FP8 per channel: E4M3 with one float32 scale for each output; activations one for each row
        given     FP8 static: the same weights, and one float32 scale for all activations of a linear, held
                  by the checkpoint
        blocks    FP8 block: E4M3 with one float32 scale for `group` x `group` weights; activations one for
                  each row and group

    Formats that other tools publish are `in_checkpoints_only`: their numbers are taken as they are stored
    (`engine/checkpoint/formats`). With `has_zeros` a group of 4-bit weights has a zero point too: a weight is
    its scale times (n - zero). With `is_e2m1` four bits are a small float, which times two is an integer.
    Blocks of GGUF files have a `grid`.
    """

    name: str
    bits: int
    group: int
    kind: Literal["integer", "rows", "float", "given", "blocks"] = "integer"
    keeps_head: bool = False
    """True if the output head stays unquantized, as in checkpoints of this format."""
    is_mixed: bool = False
    """True if some linears of the layers have the head's format; the engine's recipe says which."""
    step: int = 0
    """Inputs that share a step and a zero point; 0: the format has none."""
    has_zeros: bool = False
    """True if 4-bit groups have a zero point of 0 to 15 each."""
    is_e2m1: bool = False
    """True if four bits are floats of one sign, two exponent and one mantissa bit (MXFP4)."""
    rounds_head: bool = False
    """True if an output head that the checkpoint leaves unquantized becomes int8 at load (`--quant-head`)."""
    in_checkpoints_only: bool = False
    """True if weights are never quantized to this format at load: only checkpoints hold it."""
    grid: BlockGrid = ""
    is_gguf: bool = False
    """True if each weight of the model has the format of its own blocks in a GGUF file (`GGUF_QUANTS`)."""

    @property
    def bytes_per_weight(self) -> float:
        if self.grid:
            return self.bits / 8 + _BLOCK_SCALES[self.grid]
        scales = 4 / self.group**2 if self.kind == "blocks" else 2 / self.group
        offsets = 1 / self.step if self.step else self.has_zeros / self.group
        return self.bits / 8 + scales + offsets

    def head_bytes(self, wide: int) -> float:
        """Bytes of one weight of the output head; `wide` is the size of an unquantized one."""
        if self.rounds_head:
            return ROUNDED_HEAD.bytes_per_weight
        return wide if self.keeps_head else self.head.bytes_per_weight

    @property
    def layers_name(self) -> str:
        """Name of the format of the layers, as checkpoints have it."""
        return self.name.removesuffix(_HEAD_SUFFIX)

    @property
    def has_unquantized_head(self) -> bool:
        return self.keeps_head and not self.rounds_head

    @property
    def unit(self) -> int:
        """Number of inputs with one float16 scale."""
        return 256 if self.grid.startswith("k_") else self.group

    @property
    def zero(self) -> int:
        """Code of 0 in centered grids: half of all codes, or 1 for ternary weights."""
        return 1 if self.bits == 2 else 1 << (self.bits - 1)

    @property
    def span(self) -> int:
        """Number of inputs with one byte of a unit's scales."""
        return 16 if self.grid in {"k_pairs", "k_signed", "k_iq1", "k_iq2"} else 32

    def shared(self, inputs: int) -> int:
        """Return the number of these inputs that share a scale."""
        return inputs if self.by_output else self.group

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.shared(inputs))

    @property
    def by_output(self) -> bool:
        """True if all inputs of an output share a scale (per-channel scales)."""
        return self.kind in {"float", "given"}

    def steps(self, inputs: int) -> int:
        """Number of steps of one output, with the padding of its last group."""
        return self.groups(inputs) * (self.group // self.step) if self.step else 0

    def holds(self, other: "Quant") -> bool:
        """Return whether weights of `other` are valid in this format unchanged: int8 ones run as w8a8."""
        kinds = {self.kind, other.kind}
        return (self.bits, self.group, self.step) == (other.bits, other.group, other.step) and (
            len(kinds) == 1 or kinds == {"integer", "rows"}
        )

    @property
    def on_cpu(self) -> bool:
        return self.kind == "integer"

    @property
    def is_float(self) -> bool:
        return self.by_output or self.kind == "blocks"

    @property
    def head(self) -> "Quant":
        """Format of the output head and of a table tied to it: 8 bits, as errors there reach the tokens
        directly.

        Not defined where `keeps_head`.
        """
        if self.kind == "rows":
            return Quant("int8", 8, self.group)
        return self if self.bits == 8 else QUANTS["int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Bytes of a weight of a GGUF model in memory, on average, and the inputs that ranks cannot split."""

    layers: float
    head: float
    table: float
    """Bytes in the input embedding, where it is not the head."""
    unit: int
    has_dequantized: bool = False
    """True if weights of some types are dequantized at load: those of `GGUF_DEQUANTIZED`."""


_HEAD_SUFFIX: Final = "+int8-head"


def _stored(name: str, bits: int, group: int, **kind: Any) -> Quant:
    return Quant(name, bits, group, keeps_head=True, in_checkpoints_only=True, **kind)


QUANTS = {
    quant.name: quant
    for quant in (
        Quant("int8", 8, 128),
        Quant("int8-g32", 8, 32),
        Quant("int4", 4, 128, step=16),
        Quant("int4-g128", 4, 128),
        Quant("int4-mix", 4, 128, step=16, is_mixed=True),
        Quant("w8a8", 8, 128, "rows"),
        Quant("fp8", 8, 512, "float"),  # 512: counts the scales as for outputs of 1024 inputs
        Quant("fp8-block", 8, 128, "blocks", keeps_head=True),
        _stored("fp8-dynamic", 8, 512, kind="float"),
        _stored("fp8-static", 8, 512, kind="given"),
        _stored("w4a16-g128", 4, 128),
        _stored("w4a16-g32", 4, 32),
        _stored("w4a16-g128-zp", 4, 128, has_zeros=True),
        _stored("w4a16-g32-zp", 4, 32, has_zeros=True),
        _stored("w8a16-g128", 8, 128),
        _stored("w8a16-g32", 8, 32),
        _stored("mxfp4", 4, 32, is_e2m1=True),
        _stored("gguf", 8, 32, is_gguf=True),
    )
}

ROUNDED_HEAD: Final = QUANTS["int8"]
"""Format of the heads that `Quant.rounds_head` is about."""
QUANTS |= {
    quant.name + _HEAD_SUFFIX: replace(quant, name=quant.name + _HEAD_SUFFIX, rounds_head=True)
    for quant in QUANTS.values()
    if quant.in_checkpoints_only and quant.kind == "integer" and not quant.is_gguf
}


def with_rounded_head(name: str) -> str:
    """Return the name of the format with a head of int8; the same name where there is none, as the head has
    8 bits anyway or no kernel has both.
    """
    return name + _HEAD_SUFFIX if name + _HEAD_SUFFIX in QUANTS else name


GGUF_QUANTS: Final[dict[str, Quant]] = {
    "Q4_0": QUANTS["w4a16-g32"],
    "Q8_0": QUANTS["int8-g32"],
    "MXFP4": QUANTS["mxfp4"],
    "Q4_1": _stored("q4_1", 4, 32, grid="minimums"),
    "Q5_0": _stored("q5_0", 5, 32, grid="centered"),
    "Q5_1": _stored("q5_1", 5, 32, grid="minimums"),
    "Q2_K": _stored("q2_k", 2, 32, grid="k_pairs"),
    "Q3_K": _stored("q3_k", 3, 32, grid="k_signed"),
    "Q4_K": _stored("q4_k", 4, 32, grid="k_minimums"),
    "Q5_K": _stored("q5_k", 5, 32, grid="k_minimums"),
    "Q6_K": _stored("q6_k", 6, 32, grid="k_signed"),
    "IQ4_NL": _stored("iq4_nl", 4, 32, grid="table"),
    "IQ4_XS": _stored("iq4_xs", 4, 32, grid="k_table"),
    "IQ1_S": _stored("iq1", 3, 32, grid="k_iq1"),
    "IQ1_M": _stored("iq1", 3, 32, grid="k_iq1"),
    "IQ2_XXS": _stored("iq2", 3, 32, grid="k_iq2"),
    "IQ2_XS": _stored("iq2", 3, 32, grid="k_iq2"),
    "IQ2_S": _stored("iq2", 3, 32, grid="k_iq2"),
    "IQ3_XXS": _stored("iq3_xxs", 4, 32, grid="k_iq3_xxs"),
    "IQ3_S": _stored("iq3_s", 4, 32, grid="k_iq3_s"),
    "TQ1_0": _stored("tq", 2, 32, grid="centered"),
    "TQ2_0": _stored("tq", 2, 32, grid="centered"),
}
"""Formats that hold the numbers of ggml's blocks, by the name of the type. Types whose blocks name rows of a
table of patterns (IQ1 to IQ3) are held weight by weight, which takes more memory than in the file.
"""
GGUF_DEQUANTIZED: Final = frozenset({"NVFP4"})
"""Types of ggml's blocks that no kernel has."""
KERNEL_QUANTS: Final = QUANTS | {quant.name: quant for quant in GGUF_QUANTS.values()}
"""All formats that a packed weight can have, by name."""
