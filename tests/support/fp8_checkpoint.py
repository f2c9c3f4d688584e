"""Turns a tiny model into one with E4M3 weights: in blocks, as DeepSeek-V3 and Qwen3-FP8 store them, or with
a scale for each tensor or output, as AutoFP8, llm-compressor and transformers do.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

PLANNED_WITHOUT_KERNELS = "llmbox.engine.planning.estimator.why_no_quant"
"""What keeps formats of GPUs from being dequantized on a CPU; tests replace it where kernels are in torch."""
BLOCK = 128
ENTRY: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def linears(weights: Mapping[str, Tensor], keeps: Sequence[str]) -> list[str]:
    """Names of weights to round: of all linears but those with one of these in their names."""
    found = [name for name in weights if name.endswith("_proj.weight")]
    return [name for name in found if not any(kept in name for kept in keeps)]


def round_to_blocks(
    directory: Path, scales: torch.dtype = torch.float32, keeps: Sequence[str] = (), **entry: Any
) -> dict[str, Tensor]:
    """What the rounded weights stand for, by name, in float32. `keeps`: see `linears`."""
    weights = load_file(directory / "model.safetensors")
    wide = {}
    for name in linears(weights, keeps):
        numbers, inverse = rounded(weights[name].float())
        inverse = inverse.to(scales)
        weights[name], weights[name + "_scale_inv"] = numbers, inverse
        wide[name] = numbers.float() * spread(inverse.float(), numbers.shape)
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = ENTRY | entry
    (directory / "config.json").write_text(json.dumps(config))
    return wide


SCHEME: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def compressed(weights: str = "tensor", rows: str = "token", **entry: Any) -> dict[str, Any]:
    """As llm-compressor writes; `rows` of strategy "static": one scale for all."""
    static = rows == "static"
    group = {
        "targets": ["Linear"],
        "weights": SCHEME | {"strategy": weights, "dynamic": False},
        "input_activations": SCHEME | {"strategy": "tensor" if static else rows, "dynamic": not static},
        "output_activations": None,
    }
    return COMPRESSED | {"config_groups": {"group_0": group}} | entry


def round_by_output(
    directory: Path,
    entry: dict[str, Any],
    *,
    shape: tuple[int, ...] = (),
    scales: torch.dtype = torch.float32,
    given: dict[str, float] | None = None,
    names: tuple[str, str] = ("weight_scale", "input_scale"),
    keeps: Sequence[str] = (),
) -> dict[str, Tensor]:
    """What the rounded weights stand for, by name, in float32.

    `shape` of a scale, -1 where it has the outputs: () or (1,) give one to a tensor. `given`: scales of
    activations by the end of a linear's name, of all that are not there 0.05; None: there are none. `keeps`:
    see `linears`.
    """
    weights = load_file(directory / "model.safetensors")
    wide = {}
    for name in linears(weights, keeps):
        weight, linear = weights[name].float(), name.removesuffix(".weight")
        most = weight.abs().amax(1, keepdim=True) if -1 in shape else weight.abs().amax()
        scale = (most / 448).to(scales)
        weights[name] = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        weights[f"{linear}.{names[0]}"] = scale.reshape(shape).contiguous()
        wide[name] = weights[name].float() * scale.float()
        if given is not None:
            found = [value for end, value in given.items() if linear.endswith(end)]
            weights[f"{linear}.{names[1]}"] = torch.tensor([*found, 0.05][0])
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return wide


def rounded(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI, (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    inverse = blocks.abs().amax((1, 3)) / 448
    return (weight_OI / spread(inverse, weight_OI.shape)).to(torch.float8_e4m3fn), inverse


def spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[: shape[0], : shape[1]]
