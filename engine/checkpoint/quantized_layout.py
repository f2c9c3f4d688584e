"""Layout of quantized checkpoints: names, dtypes and shapes of tensors. `llmbox quantize` writes integers:

    config.json             "quantization_config": {"quant_method": "llmbox", "version": 2, "format": "int4"}
    NAME.weight             I8 [O, I], or U8 [O, ceil(I / 2)]: two numbers plus 8 per byte, low nibble first
    NAME.weight_scale       F16 [O, ceil(I / group)]
    NAME.weight_step        U8 [O, ceil(I / group) * 8] of formats with sub-block scales, two nibbles per
                            byte (`kernels/weight_packing.py`)

Linears of layers have the bits and group of the format. The output head, and an embedding tied to it, has 8
bits and the same group. Norms, biases and an untied embedding are unquantized.

Other tools write E4M3 (`formats/floats.py`). A weight is its value times its scale; scales are F32, BF16 or
F16:

    NAME.weight             F8_E4M3 [O, I]
    NAME.weight_scale       [ceil(O / 128), ceil(I / 128)] for blocks; [O, 1] or [O] per output; [] or [1]
    NAME.weight_scale_inv   the same under another name
    NAME.input_scale        [] or [1] for static activations: x is about its quantized value times this
    NAME.activation_scale   the same under another name

The linears of layers are quantized, except those that the files show not to be; embedding and head are
not. No torch.
"""

from typing import Any

from llmbox.kernels.quant_formats import QUANTS, UNQUANTIZED_KINDS, Kind, Quant

METHOD = "llmbox"
MODELOPT_FILE = "hf_quant_config.json"
"""File with the quantization config of older versions of NVIDIA's Model Optimizer."""
SCALE, STEP = "_scale", "_step"
SCALES = (SCALE, "_scale_inv")
"""Suffixes of the names of scales; the second for E4M3 only."""
INPUT_SCALES = ("input_scale", "activation_scale")
BOUNDS = (".input_scale_ub", ".activation_scale_ub")
"""Suffixes of upper bounds of dynamic activation scales. Ignored: kernels here compute a scale per row."""
OF_KEYS_AND_VALUES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
"""Suffixes of static scales for an 8-bit KV cache. Ignored: the KV cache has a scale per token."""
STORED_BYTES = {"I8": 1, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1, "F8_E8M0": 1}
"""Sizes in bytes of dtypes that mean something only to a weight format (`formats/registry.py`)."""
FLOATS = frozenset({"F8_E4M3"})
"""Dtypes of 8-bit floats."""
FORMATS = tuple(
    name for name, quant in QUANTS.items() if quant.kind == "integer" and not quant.in_checkpoints_only
)


def entry_in_config(quant: Quant) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint that `llmbox quantize` writes."""
    return {"quant_method": METHOD, "version": version_of(quant), "format": quant.name}


COMPRESSED_FORMATS = ("w4a16-g128", "w4a16-g32", "w8a8", "fp8")
"""Formats of compressed-tensors that `llmbox quantize` writes (`engine/quantize/compressed_tensors.py`)."""


def version_of(quant: Quant) -> int:
    """Return the layout version of a format: version 1 had no sub-block scales (steps)."""
    return 2 if quant.step else 1


def scale_names(quant: Quant) -> tuple[str, ...]:
    """Return the suffixes that the scale of a tensor may have; a checkpoint has one of them."""
    return SCALES if quant.is_float else (SCALE,)


def stored_dtype(quant: Quant) -> str:
    if quant.is_float:
        return "F8_E4M3"
    return "I8" if quant.bits == 8 else "U8"


def format_of(quant: Quant, kind: Kind) -> Quant | None:
    """Return the format of weights of this kind; None for kinds that are not quantized."""
    if kind in UNQUANTIZED_KINDS:
        return None
    if kind == "linear":
        return quant
    return None if quant.keeps_head else quant.head


def stored_columns(quant: Quant, inputs: int) -> int:
    return inputs if quant.bits == 8 else -(-inputs // 2)
