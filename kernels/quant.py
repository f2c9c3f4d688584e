"""Names of weight formats. No torch: settings and estimates use them too."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "head", "table", "tied"]
"""A layer's linear, the output head, the input table, or one matrix that is both of these."""


@dataclass(frozen=True, slots=True)
class Quant:
    """Integer weights with one float16 scale for each `group` inputs of an output.

    Of kind `float`: 8-bit floats (E4M3) with one float32 scale for each output; on GPUs only.
    """

    name: str
    bits: int
    group: int
    kind: Literal["integer", "float"] = "integer"

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + 2 / self.group

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group)

    @property
    def head(self) -> "Quant":
        """For the output head and a table tied to it: 8 bits, as errors there reach the tokens at once."""
        return self if self.bits == 8 else Quant(f"int8-g{self.group}", 8, self.group)


QUANTS = {
    quant.name: quant
    for quant in (
        Quant("int8", 8, 128),
        Quant("int8-g32", 8, 32),
        Quant("int4", 4, 32),
        Quant("int4-g128", 4, 128),
        Quant("fp8", 8, 512, "float"),  # 512: its scales count as they would for outputs of 1024 inputs
    )
}
