"""Names of weight formats. No torch: settings and estimates use them too."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "experts", "router", "head", "table", "tied"]
"""A layer's linear, those of all its experts in one, its choice of experts, the output head, the input table,
or one matrix that is both of the last."""
OF_LAYERS: frozenset[Kind] = frozenset({"linear", "experts"})
"""That have the format of the layers."""
WIDE_KINDS: frozenset[Kind] = frozenset({"router", "table"})
"""That no format rounds."""


@dataclass(frozen=True, slots=True)
class Quant:
    """Integer weights with one float16 scale for each `group` inputs of an output.

    Where `step` is not 0, that many neighbouring inputs share a step and a zero (`quantize_int.py`), and a
    weight is its scale times (step * n - zero), n of 4 bits, which fits 8 bits.

    Other kinds run on GPUs only, and their activations have 8 bits too:

        rows      the same int8 weights; activations are int8, one scale for each row and group
        float     E4M3 with one float32 scale for each output; activations one for each row
        given     the same weights, and one float32 scale for all activations of a linear, which a checkpoint
                  gives
        blocks    E4M3 with one float32 scale for `group` x `group` weights; activations one for each row and
                  group
    """

    name: str
    bits: int
    group: int
    kind: Literal["integer", "rows", "float", "given", "blocks"] = "integer"
    keeps_head: bool = False
    """The output head keeps its dtype, as in checkpoints of this format."""
    is_mixed: bool = False
    """Some linears of the layers have the head's format: the engine's recipe says which."""
    step: int = 0
    """How many inputs share a step; 0: no steps."""

    @property
    def bytes_per_weight(self) -> float:
        scales = 4 / self.group**2 if self.kind == "blocks" else 2 / self.group
        return self.bits / 8 + scales + (1 / self.step if self.step else 0)

    def head_bytes(self, wide: int) -> float:
        """Of a weight of the output head; `wide`: of one that is not rounded."""
        return wide if self.keeps_head else self.head.bytes_per_weight

    def shared(self, inputs: int) -> int:
        """How many of these inputs share a scale."""
        return inputs if self.by_output else self.group

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.shared(inputs))

    @property
    def by_output(self) -> bool:
        """Whether all inputs of an output share a scale."""
        return self.kind in {"float", "given"}

    @property
    def in_checkpoints_only(self) -> bool:
        """Not made at load: others write it."""
        return self.by_output and self.keeps_head

    def steps(self, inputs: int) -> int:
        """Of an output, those of the last group's filling too."""
        return self.groups(inputs) * (self.group // self.step) if self.step else 0

    @property
    def on_cpu(self) -> bool:
        return self.kind == "integer"

    @property
    def is_float(self) -> bool:
        return self.by_output or self.kind == "blocks"

    @property
    def head(self) -> "Quant":
        """For the output head and a table tied to it: 8 bits, as errors there reach the tokens at once.

        Of no use where `keeps_head`.
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
        Quant("fp8", 8, 512, "float"),  # 512: its scales count as they would for outputs of 1024 inputs
        Quant("fp8-block", 8, 128, "blocks", keeps_head=True),
        Quant("fp8-dynamic", 8, 512, "float", keeps_head=True),
        Quant("fp8-static", 8, 512, "given", keeps_head=True),
    )
}
