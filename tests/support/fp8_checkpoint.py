"""Turns a tiny model into one with E4M3 weights in blocks, as DeepSeek-V3 and Qwen3-FP8 store them."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128
ENTRY: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def round_to_blocks(directory: Path, scales: torch.dtype = torch.float32, **entry: Any) -> dict[str, Tensor]:
    """What the rounded weights stand for, by name, in float32."""
    weights = load_file(directory / "model.safetensors")
    wide = {}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        numbers, inverse = rounded(weights[name].float())
        inverse = inverse.to(scales)
        weights[name], weights[name + "_scale_inv"] = numbers, inverse
        wide[name] = numbers.float() * spread(inverse.float(), numbers.shape)
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = ENTRY | entry
    (directory / "config.json").write_text(json.dumps(config))
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
