"""Checkpoints of integer weights, as `llmbox quantize` writes them: names, layout, what is refused.

    config.json             "quantization_config": {"quant_method": "llmbox", "version": 1, "format": "int4"}
    NAME.weight             I8 [O, I], or U8 [O, ceil(I / 2)]: two numbers plus 8 a byte, the first one low
    NAME.weight_scale       F16 [O, ceil(I / group)]

Layers have the bits and group of the format, the output head and a table tied to it 8 bits and the same
group. Norms, biases and a table of its own stay as they were. No torch here.
"""

from typing import Any

from llmbox.kernels.quant import QUANTS, Kind, Quant

METHOD, VERSION = "llmbox", 1
SCALE = "_scale"
"""Behind the name of an integer tensor."""
INTEGERS = {"I8": 1, "U8": 1}
"""Bytes of the dtypes that only tensors with scales may have."""
FORMATS = tuple(name for name, quant in QUANTS.items() if quant.kind == "integer")


def entry_in_config(quant: Quant) -> dict[str, Any]:
    return {"quant_method": METHOD, "version": VERSION, "format": quant.name}


def read_entry(raw: Any) -> str | None:
    """The format; None where it is somebody else's."""
    if not isinstance(raw, dict) or (raw.get("quant_method"), raw.get("version")) != (METHOD, VERSION):
        return None
    name = raw.get("format")
    return name if isinstance(name, str) and name in FORMATS else None


def format_of(quant: Quant, kind: Kind) -> Quant | None:
    """What weights of this kind are rounded to; None keeps them."""
    if kind == "table":
        return None
    return quant if kind == "linear" else quant.head


def stored_columns(quant: Quant, inputs: int) -> int:
    return inputs if quant.bits == 8 else -(-inputs // 2)
