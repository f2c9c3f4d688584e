"""Checkpoints of rounded weights: names, layout, what is refused. `llmbox quantize` writes integers:

    config.json             "quantization_config": {"quant_method": "llmbox", "version": 2, "format": "int4"}
    NAME.weight             I8 [O, I], or U8 [O, ceil(I / 2)]: two numbers plus 8 a byte, the first one low
    NAME.weight_scale       F16 [O, ceil(I / group)]
    NAME.weight_step        U8 [O, ceil(I / group) * 8] of formats with steps, whose two numbers a byte are n
                            (`kernels/quantize_int.py`)

Layers have the bits and group of the format, the output head and a table tied to it 8 bits and the same
group. Norms, biases and a table of its own stay as they were.

Others write E4M3 (`fp8_config.py`), a weight is its number times its scale. F32, BF16 or F16 are:

    NAME.weight             F8_E4M3 [O, I]
    NAME.weight_scale       [ceil(O / 128), ceil(I / 128)] of blocks; else [O, 1] or [O], or one: [] or [1]
    NAME.weight_scale_inv   the same by another name
    NAME.input_scale        [] or [1], where activations are static: x is about its number times this
    NAME.activation_scale   the same by another name

Linears of the layers are so, but those that are kept wide (`unquantized_layers.py`); tables and head stay
as they were. No torch here.
"""

from typing import Any

from llmbox.kernels.quant_formats import QUANTS, WIDE_KINDS, Kind, Quant

from .fp8_config import DYNAMIC, NotReadable, read_compressed, read_fp8, read_modelopt

METHOD = "llmbox"
MODELOPT_FILE = "hf_quant_config.json"
"""Where older versions of NVIDIA's Model Optimizer say it, and config.json does not."""
SCALE, STEP = "_scale", "_step"
SCALES = (SCALE, "_scale_inv")
"""Behind the name of a rounded tensor; the second of E4M3 only."""
INPUT_SCALES = ("input_scale", "activation_scale")
BOUNDS = (".input_scale_ub", ".activation_scale_ub")
"""Ends of names of the largest scale that rows may have, in others' kernels: here each has its own."""
OF_KEYS_AND_VALUES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
"""Ends of names of scales that a checkpoint offers for an 8-bit cache: ours has one for each token."""
INTEGERS = {"I8": 1, "U8": 1}
"""Bytes of the dtypes that only tensors with scales in the same file may have."""
FLOATS = {"F8_E4M3": 1}
"""The same for scales in any file."""
FORMATS = tuple(name for name, quant in QUANTS.items() if quant.kind == "integer")


def entry_in_config(quant: Quant) -> dict[str, Any]:
    return {"quant_method": METHOD, "version": version_of(quant), "format": quant.name}


def version_of(quant: Quant) -> int:
    """int4 had no steps once."""
    return 2 if quant.step else 1


def read_entry(raw: Any) -> str:
    """The format. Raises NotReadable."""
    if not isinstance(raw, dict):
        raise NotReadable("not an object")
    method, name = raw.get("quant_method"), raw.get("format")
    match method:
        case "fp8":
            return read_fp8(raw)
        case "fbgemm_fp8":
            return DYNAMIC
        case "compressed-tensors":
            return read_compressed(raw)
        case "modelopt":
            return read_modelopt(raw)
        case _ if method == METHOD and name in FORMATS:
            if raw.get("version") == version_of(QUANTS[name]):
                return str(name)
            raise NotReadable(
                f"{name} weights of another version of llmbox: make them again (llmbox quantize)"
            )
    raise NotReadable(f"weights of quant_method {method!r}" + (f" and format {name!r}" if name else ""))


def scale_names(quant: Quant) -> tuple[str, ...]:
    """One of these is there."""
    return SCALES if quant.is_float else (SCALE,)


def stored_dtype(quant: Quant) -> str:
    if quant.is_float:
        return "F8_E4M3"
    return "I8" if quant.bits == 8 else "U8"


def format_of(quant: Quant, kind: Kind) -> Quant | None:
    """What weights of this kind are rounded to; None keeps them."""
    if kind in WIDE_KINDS:
        return None
    return quant if kind == "linear" else quant.head


def stored_columns(quant: Quant, inputs: int) -> int:
    return inputs if quant.bits == 8 else -(-inputs // 2)
