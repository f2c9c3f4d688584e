"""Detection of linears that an FP8 checkpoint leaves unquantized, such as some layers' `down_proj`. No torch.

config.json lists them as names, parts of names, globs or regular expressions, and every tool matches these in
its own way. So they are detected by the dtype of the stored weights, which no list can contradict.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from ..errors import ModelError
from .index import list_tensors
from .quantized_layout import FLOATS
from .safetensors import TensorEntry, shown

_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.[a-z_]+_proj\.weight")


def count_unquantized_params(directory: Path) -> int:
    """Return the number of parameters of all unquantized linears; 0 if the files cannot be read, because
    loading them reports the reason.
    """
    try:
        entries = list_tensors(directory)
    except ModelError:
        return 0
    return sum(
        prod(entry.shape)
        for name, entry in entries.items()
        if _LINEAR.fullmatch(name) and entry.dtype not in FLOATS
    )


def holds_floats(entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if the files hold any 8-bit floats."""
    return any(entry.dtype in FLOATS for entry in entries.values())


def is_unquantized(names: Iterable[str], entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if the linears `names`, which are fused into one, are unquantized. Raises ModelError if one
    is quantized and another is not.
    """
    found = [entry for name in names if (entry := entries.get(f"{name}.weight")) is not None]
    wide = [entry for entry in found if entry.dtype not in FLOATS]
    if wide and len(wide) < len(found):
        eight = next(entry for entry in found if entry.dtype in FLOATS)
        raise ModelError(
            f"{wide[0].file}: {shown(wide[0].name)} is kept in {wide[0].dtype} and {shown(eight.name)} is "
            f"{eight.dtype}, but both are multiplied as one matrix here: use a checkpoint that keeps all of "
            "q_proj, k_proj and v_proj (of gate_proj and up_proj) wide, or none of them"
        )
    return bool(wide)
