"""Names of weight formats. No torch: settings and estimates use them too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quant:
    """Integer weights with one float16 scale for each `group` inputs of an output."""

    name: str
    bits: int
    group: int

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + 2 / self.group

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
    )
}
