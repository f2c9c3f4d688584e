"""Weight formats by name. Torch-free, as settings and memory estimates use them too."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "experts", "router", "head", "table", "tied"]
"""Kind of a weight matrix: a layer's linear, all experts of a layer in one, the MoE router, the output head,
the embedding table, or one matrix that is both head and table.
"""
OF_LAYERS: frozenset[Kind] = frozenset({"linear", "experts"})
"""Kinds that have the format of the layers."""
UNQUANTIZED_KINDS: frozenset[Kind] = frozenset({"router", "table"})
"""Kinds that no format quantizes."""


@dataclass(frozen=True, slots=True)
class Quant:
    """Quantization format: integer weights with one float16 scale for each `group` inputs of an output.

    If `step` is not 0, that many neighboring inputs share a step and a zero point (`quantize_int.py`). A
    weight is then its scale times (step * n - zero), where n has 4 bits and the value in parentheses fits 8
    bits.

    Other kinds run on GPUs only, and quantize activations to 8 bits too:

        rows      W8A8: the same int8 weights; int8 activations, one scale for each row and group
        float     FP8 per channel: E4M3 with one float32 scale for each output; activations one for each row
        given     FP8 static: the same weights, and one float32 scale for all activations of a linear, held
                  by the checkpoint
        blocks    FP8 block: E4M3 with one float32 scale for `group` x `group` weights; activations one for
                  each row and group
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

    @property
    def bytes_per_weight(self) -> float:
        scales = 4 / self.group**2 if self.kind == "blocks" else 2 / self.group
        return self.bits / 8 + scales + (1 / self.step if self.step else 0)

    def head_bytes(self, wide: int) -> float:
        """Bytes of one weight of the output head; `wide` is the size of an unquantized one."""
        return wide if self.keeps_head else self.head.bytes_per_weight

    def shared(self, inputs: int) -> int:
        """Return the number of these inputs that share a scale."""
        return inputs if self.by_output else self.group

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.shared(inputs))

    @property
    def by_output(self) -> bool:
        """True if all inputs of an output share a scale (per-channel scales)."""
        return self.kind in {"float", "given"}

    @property
    def in_checkpoints_only(self) -> bool:
        """True if weights are never quantized to this format at load: only checkpoints hold it."""
        return self.by_output and self.keeps_head

    def steps(self, inputs: int) -> int:
        """Number of steps of one output, with the padding of its last group."""
        return self.groups(inputs) * (self.group // self.step) if self.step else 0

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
        Quant("fp8-dynamic", 8, 512, "float", keeps_head=True),
        Quant("fp8-static", 8, 512, "given", keeps_head=True),
    )
}
