"""Interface of a weight format: how to recognize its linears in a checkpoint, and which tensors they need;
and of checkpoints whose linears have several formats, by rules of config.json.

A format is one class here and one decoder in `engine/weights/decoders.py`. No torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from llmbox.kernels.quant_formats import QUANTS, BlockSizes

from ...errors import ModelError
from ..index import QUANTIZED_DTYPES
from ..safetensors import FETCH_AGAIN, TensorEntry, shown

HALVES = ("F16", "BF16", "F32")
"""Dtypes that scales may have."""


class NotReadable(ValueError):  # noqa: N818 - named for what it says
    """Quantized weights are not supported; the message states the reason for the user."""


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise NotReadable(problem)


_EXPERT = re.compile(r"(.+\.experts)\.\d+\.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor that a quantized linear has in the files."""

    suffix: str
    """End of its name, behind the linear's."""
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    """Allowed shapes; none: any."""
    is_optional: bool = False


class WeightFormat(Protocol):
    """Format of a checkpoint's quantized linears. O outputs, I inputs."""

    @property
    def label(self) -> str:
        """Name for the user: the format with its bits and group."""
        ...

    @property
    def quant(self) -> str | None:
        """Format of `kernels/quant_formats.py` that holds the same numbers; None: no kernel has one, and
        weights are dequantized at load.
        """
        ...

    @property
    def main(self) -> StoredTensor:
        """Tensor that only a quantized linear has."""
        ...

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        """Return O and I of a linear by its `main` tensor; None: the shape does not say."""
        ...

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        """Return the tensors of a linear besides `main`."""
        ...

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the shape of the `main` tensor."""
        ...


class _UnpackedFormat:
    """Base of formats whose main tensor has the shape of the linear."""

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:  # noqa: ARG002
        return None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:  # noqa: ARG002
        return ()

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFormat(_UnpackedFormat):
    """Format whose linears are `NAME.weight` with scales, read as `quantized_layout.py` describes: those of
    `llmbox quantize`, and E4M3 (FP8).
    """

    quant: str
    dtypes: tuple[str, ...]
    needed: tuple[tuple[str, ...], ...]
    """Ends of the names of tensors of a linear: it has one of each."""
    has_steps: bool = False
    """True if linears of U8 have steps too."""

    @property
    def label(self) -> str:
        return self.quant

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(".weight", self.dtypes)


@dataclass(frozen=True, slots=True)
class GgufFormat(_UnpackedFormat):
    """Blocks of a GGUF file, which `engine/weights/gguf_source.py` reads."""

    sizes: BlockSizes
    types: tuple[str, ...]
    """Types of the blocks, that of most weights first."""

    @property
    def quant(self) -> str:
        return "gguf"

    @property
    def label(self) -> str:
        return f"GGUF {', '.join(self.types)}"

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(".weight", ())


def forms_of(form: WeightFormat) -> tuple[WeightFormat, ...]:
    return form.forms if isinstance(form, MixedFormat) else (form,)


def form_of(form: WeightFormat, linear: str) -> WeightFormat:
    return form.of(linear) if isinstance(form, MixedFormat) else form


def is_quantized(form: WeightFormat, linear: str, entries: Mapping[str, TensorEntry]) -> bool:
    main = form_of(form, linear).main
    entry = entries.get(linear + main.suffix)
    return entry is not None and entry.dtype in main.dtypes


def quantized_linears(form: WeightFormat, entries: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield the names of all quantized linears."""
    for suffix in {each.main.suffix for each in forms_of(form)}:
        for name in entries:
            linear = name.removesuffix(suffix)
            is_main = linear != name and form_of(form, linear).main.suffix == suffix
            if is_main and is_quantized(form, linear, entries):
                yield linear


def check_tensors(form: WeightFormat, entries: Mapping[str, TensorEntry]) -> None:
    """Raise ModelError, with the tensor's name, where the files do not hold what config.json says."""
    linears = set(quantized_linears(form, entries))
    _refuse_mixed_experts(form, entries, linears)
    if isinstance(form, NativeFormat):
        for linear in linears:
            _check_native(form, linear, entries)
        return
    known: set[str] = set()
    for linear in linears:
        own = form_of(form, linear)
        entry = entries[linear + own.main.suffix]
        outputs, inputs = own.size(entry) or (0, 0)
        needed = (own.main, *own.tensors(outputs, inputs))
        for tensor in needed:
            check_tensor(own, linear, tensor, entries, has_size=outputs > 0)
        known |= {linear + tensor.suffix for tensor in needed}
    _refuse_others(form, entries, known)
    if not linears:
        raise ModelError(
            f"config.json names {form.label} weights, but no tensor ends in {form.main.suffix!r}: config and "
            "weights are not of the same model"
        )


def _check_native(form: NativeFormat, linear: str, entries: Mapping[str, TensorEntry]) -> None:
    """Raise ModelError where a linear has none of the tensors that it needs one of."""
    steps = ((".weight_step",),) if form.has_steps and entries[f"{linear}.weight"].dtype == "U8" else ()
    for suffixes in (*form.needed, *steps):
        names = [linear + suffix for suffix in suffixes]
        if not any(name in entries for name in names):
            file = entries[f"{linear}.weight"].file
            raise ModelError(
                f"{file}: tensor {shown(names[0])} is missing, which {form.label} weights need; {FETCH_AGAIN}"
            )


def _refuse_mixed_experts(form: WeightFormat, entries: Mapping[str, TensorEntry], linears: set[str]) -> None:
    """Raise ModelError for a layer of which only some experts are quantized: kernels compute them as one."""
    layers = {found[1]: linear for linear in sorted(linears) if (found := _EXPERT.match(linear))}
    for linear in sorted(linears):
        own, found = form_of(form, linear), _EXPERT.match(linear)
        if found is not None and own != (first := form_of(form, layers[found[1]])):
            raise ModelError(
                f"{entries[linear + own.main.suffix].file}: {shown(linear)} has {own.label} weights and "
                f"{shown(layers[found[1]])} has {first.label} weights, but all experts of a layer are "
                "computed as one: use a checkpoint that quantizes them alike"
            )
    for name, entry in entries.items():
        linear, found = name.removesuffix(".weight"), _EXPERT.match(name)
        if found is None or linear == name or linear in linears or found[1] not in layers:
            continue
        raise ModelError(
            f"{entry.file}: {shown(name)} is kept in {entry.dtype} and {shown(layers[found[1]])} has "
            f"{form.label} weights, but all experts of a layer are computed as one: use a checkpoint that "
            "quantizes all of them, or none"
        )


def check_tensor(
    form: WeightFormat,
    linear: str,
    tensor: StoredTensor,
    entries: Mapping[str, TensorEntry],
    *,
    has_size: bool = True,
) -> None:
    """Raise ModelError where a tensor of a quantized linear is missing, or has another dtype or shape."""
    name, main = linear + tensor.suffix, linear + form.main.suffix
    entry = entries.get(name)
    if entry is None:
        if tensor.is_optional:
            return
        file = entries[main].file if main in entries else "the checkpoint"
        raise ModelError(
            f"{file}: tensor {shown(name)} is missing, which {form.label} weights need; {FETCH_AGAIN}"
        )
    if entry.dtype not in tensor.dtypes:
        raise ModelError(
            f"{entry.file}: tensor {shown(name)} is {entry.dtype}, {form.label} weights have "
            f"{' or '.join(tensor.dtypes)}: config and weights do not belong to the same model"
        )
    if has_size and tensor.shapes and entry.shape not in tensor.shapes:
        wanted = " or ".join(str(list(shape)) for shape in tensor.shapes)
        raise ModelError(
            f"{entry.file}: tensor {shown(name)} has shape {list(entry.shape)}, {form.label} weights need "
            f"{wanted}: config and weights do not belong to the same model"
        )


def _refuse_others(form: WeightFormat, entries: Mapping[str, TensorEntry], known: set[str]) -> None:
    """Raise ModelError for a part of a linear without the rest, and for tensors of another format."""
    all_of = [tensor for each in forms_of(form) for tensor in (each.main, *each.tensors(0, 0))]
    suffixes = tuple(sorted({tensor.suffix for tensor in all_of} - {".weight"}))
    for name, entry in entries.items():
        if name in known:
            continue
        if entry.dtype in QUANTIZED_DTYPES and prod(entry.shape) > 1 and not name.endswith(suffixes):
            raise ModelError(
                f"{entry.file}: tensor {shown(name)} is {entry.dtype} and not part of the {form.label} "
                "weights that config.json names: its shards are of another quantization; fetch the model "
                "again"
            )
        if name.endswith(suffixes):
            suffix = next(suffix for suffix in suffixes if name.endswith(suffix))
            own = form_of(form, name.removesuffix(suffix))
            main = name.removesuffix(suffix) + own.main.suffix
            if main == name:
                raise ModelError(
                    f"{entry.file}: tensor {shown(name)} is {entry.dtype}, {own.label} weights have "
                    f"{' or '.join(own.main.dtypes)}: config and weights do not belong to the same model"
                )
            raise ModelError(
                f"{entry.file}: tensor {shown(main)} is missing, to which {shown(name)} belongs; "
                f"{FETCH_AGAIN}"
            )


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
