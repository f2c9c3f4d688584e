"""Checkpoints whose linears have several formats: rules of config.json by the names of linears. No torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmbox.kernels.quant_formats import QUANTS

from ..safetensors import TensorEntry
from .weight_format import NotReadable, StoredTensor, WeightFormat, require

MOST_REPETITIONS, LONGEST_PATTERN = 4, 500
"""Bounds on a pattern, whose matching may otherwise take forever."""
_PREFIXES = ("", "model.", "language_model.")


@dataclass(frozen=True, slots=True)
class FormatRule:
    """Format of some linears: those with these names, else those that a pattern matches, else all others."""

    form: WeightFormat
    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    """Matched from the beginning of a name on."""
    is_default: bool = False
    """True if linears have the format that no name and no pattern says anything of."""


@dataclass(frozen=True, slots=True)
class MixedFormat:
    """`WeightFormat` of a checkpoint; that of a linear is `of`."""

    rules: tuple[FormatRule, ...]

    @property
    def forms(self) -> tuple[WeightFormat, ...]:
        return tuple(rule.form for rule in self.rules)

    def of(self, linear: str) -> WeightFormat:
        spelled = _spellings(linear)
        for rule in self.rules:
            if not rule.names.isdisjoint(spelled):
                return rule.form
        for rule in self.rules:
            if any(pattern.match(name) for pattern in rule.patterns for name in spelled):
                return rule.form
        return next((rule.form for rule in self.rules if rule.is_default), self.rules[0].form)

    @property
    def label(self) -> str:
        """Name for the user: all formats, with what they are in memory where that is not `quant`."""
        smallest = self.quant
        beside = {form: f" [{form.quant or 'dequantized'}]" for form in self.forms if form.quant != smallest}
        return " and ".join(dict.fromkeys(form.label + beside.get(form, "") for form in self.forms))

    @property
    def quant(self) -> str | None:
        """The smallest of the formats; linears of the others have their own beside it."""
        found = [QUANTS[form.quant] for form in self.forms if form.quant is not None]
        return min(found, key=lambda quant: quant.bytes_per_weight).name if found else None

    @property
    def main(self) -> StoredTensor:
        return self.forms[0].main

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:  # noqa: ARG002
        return None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:  # noqa: ARG002
        return ()

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:  # noqa: ARG002
        return ()


def mix_formats(rules: Iterable[FormatRule]) -> WeightFormat:
    """Return the format of a checkpoint: mixed only where the rules' formats differ."""
    found = tuple(rules)
    return found[0].form if len({rule.form for rule in found}) == 1 else MixedFormat(found)


def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of config.json. Raises NotReadable, also for one that might take forever."""
    repetitions = sum(text.count(sign) for sign in "*+{")
    bounded = repetitions <= MOST_REPETITIONS and len(text) <= LONGEST_PATTERN
    require(bounded and not re.search(r"\)[*+{]", text), f"the pattern {text[:80]!r}, which repeats too much")
    try:
        return re.compile(text)
    except re.error as error:
        raise NotReadable(f"the pattern {text[:80]!r}: {error}") from None


def _spellings(linear: str) -> set[str]:
    """Return names of a linear in config.json: those of vision-language models have a prefix more."""
    inner = linear.removeprefix("model.")
    return {linear, *(f"{prefix}{inner}" for prefix in _PREFIXES), f"model.language_model.{inner}",
            f"language_model.model.{inner}"}  # fmt: skip
