"""Linears that a checkpoint of 8-bit floats keeps wide: some layers' `down_proj`, a whole layer. No torch.

Its config.json lists them, as names, parts of names, globs or patterns, and every tool matches those in its
own way. So they are found by what the files hold: a weight that is stored wide means the same by any list.
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


def wide_params(directory: Path) -> int:
    """Of all linears that are kept wide. 0 where the files cannot be read: loading them says why."""
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
    """Whether the files hold 8-bit floats at all."""
    return any(entry.dtype in FLOATS for entry in entries.values())


def is_kept_wide(names: Iterable[str], entries: Mapping[str, TensorEntry]) -> bool:
    """Of linears that become one. Raises ModelError where one is wide and another is not."""
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
