"""Checkpoints of rounded weights: names, layout, what is refused. `llmbox quantize` writes integers:

    config.json             "quantization_config": {"quant_method": "llmbox", "version": 1, "format": "int4"}
    NAME.weight             I8 [O, I], or U8 [O, ceil(I / 2)]: two numbers plus 8 a byte, the first one low
    NAME.weight_scale       F16 [O, ceil(I / group)]

Layers have the bits and group of the format, the output head and a table tied to it 8 bits and the same
group. Norms, biases and a table of its own stay as they were.

Others write E4M3 in blocks, as DeepSeek-V3 and Qwen3-FP8 have it:

    config.json             "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
                            "activation_scheme": "dynamic", …}
    NAME.weight             F8_E4M3 [O, I]
    NAME.weight_scale_inv   F32 or BF16 [ceil(O / 128), ceil(I / 128)]; a weight is its number times its scale

All linears of the layers are so, tables and head stay as they were. No torch here.
"""

from typing import Any

from llmbox.kernels.quant import QUANTS, Kind, Quant

METHOD, VERSION = "llmbox", 1
SCALE, SCALE_OF_BLOCKS = "_scale", "_scale_inv"
"""Behind the name of a rounded tensor."""
INTEGERS = {"I8": 1, "U8": 1}
"""Bytes of the dtypes that only tensors with scales in the same file may have."""
FLOATS = {"F8_E4M3": 1}
"""The same for scales in any file."""
BLOCKS = "fp8-block"
FORMATS = tuple(name for name, quant in QUANTS.items() if quant.kind == "integer")


def entry_in_config(quant: Quant) -> dict[str, Any]:
    return {"quant_method": METHOD, "version": VERSION, "format": quant.name}


def read_entry(raw: Any) -> str | None:
    """The format; None where it is one that cannot be read."""
    if not isinstance(raw, dict):
        return None
    if raw.get("quant_method") == "fp8":
        return BLOCKS if are_blocks(raw) else None
    if (raw.get("quant_method"), raw.get("version")) != (METHOD, VERSION):
        return None
    name = raw.get("format")
    return name if isinstance(name, str) and name in FORMATS else None


def are_blocks(raw: dict[str, Any]) -> bool:
    size = QUANTS[BLOCKS].group
    kept = raw.get("modules_to_not_convert") or []
    return (
        raw.get("weight_block_size") == [size, size]
        and raw.get("activation_scheme", "dynamic") == "dynamic"
        and raw.get("fmt", "e4m3") == "e4m3"
        and isinstance(kept, list)
        and not any("_proj" in str(name) for name in kept)
    )


def scale_name(quant: Quant) -> str:
    return SCALE_OF_BLOCKS if quant.kind == "blocks" else SCALE


def stored_dtype(quant: Quant) -> str:
    if quant.kind == "blocks":
        return "F8_E4M3"
    return "I8" if quant.bits == 8 else "U8"


def format_of(quant: Quant, kind: Kind) -> Quant | None:
    """What weights of this kind are rounded to; None keeps them."""
    if kind == "table":
        return None
    return quant if kind == "linear" else quant.head


def stored_columns(quant: Quant, inputs: int) -> int:
    return inputs if quant.bits == 8 else -(-inputs // 2)
