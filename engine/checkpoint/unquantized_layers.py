"""Detection of linears that a quantized checkpoint leaves unquantized, such as some layers' `down_proj`. No
torch.

config.json lists them as names, parts of names, globs or regular expressions, and every tool matches these in
its own way. So they are detected by the stored tensors, which no list can contradict.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from ..errors import ModelError
from .formats.weight_format import WeightFormat, form_of, forms_of, is_quantized, quantized_linears
from .index import list_tensors
from .safetensors import TensorEntry, shown

_LINEAR = re.compile(r"model\.layers\.\d+\.(.+_proj|.+\.w[123])\.weight")


def count_unquantized_params(directory: Path, form: WeightFormat) -> int:
    """Return the number of parameters of all unquantized linears, and of those in another format than
    `form.quant`; 0 if the files cannot be read, because loading them reports the reason.
    """
    try:
        entries = list_tensors(directory)
    except ModelError:
        return 0
    unquantized = sum(
        prod(entry.shape)
        for name, entry in entries.items()
        if _LINEAR.fullmatch(name) and not is_quantized(form, name.removesuffix(".weight"), entries)
    )
    if len(forms_of(form)) == 1:
        return unquantized
    others = [name for name in quantized_linears(form, entries) if form_of(form, name).quant != form.quant]
    sizes = (form_of(form, name).size(entries[name + form_of(form, name).main.suffix]) for name in others)
    return unquantized + sum(prod(size or (0,)) for size in sizes)


def is_unquantized(form: WeightFormat, names: Iterable[str], entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if the linears `names`, which are fused into one, are unquantized. Raises ModelError if one
    is quantized and another is not.
    """
    wide = [name for name in names if not is_quantized(form, name, entries)]
    rest = [name for name in names if name not in wide]
    if wide and rest and (entry := entries.get(f"{wide[0]}.weight")) is not None:
        other = entries[rest[0] + form_of(form, rest[0]).main.suffix]
        raise ModelError(
            f"{entry.file}: {shown(entry.name)} is kept in {entry.dtype} and {shown(other.name)} is "
            f"{other.dtype}, but both are multiplied as one matrix here: use a checkpoint that keeps all of "
            "q_proj, k_proj and v_proj (of gate_proj and up_proj) unquantized, or none of them"
        )
    return bool(wide) and not rest
