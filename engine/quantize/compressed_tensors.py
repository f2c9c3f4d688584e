"""Checkpoints in the format of compressed-tensors, which vLLM and transformers read too.

    w4a16-g128, w4a16-g32   .weight_packed I32 [O, I/8], .weight_scale [O, I/g], .weight_shape
    w8a8                    .weight I8 [O, I], .weight_scale [O, 1]; int8 activations, a scale a row
    fp8                     .weight F8_E4M3 [O, I], .weight_scale [O, 1]; FP8 activations, a scale a row

Scales have the model's dtype, and the numbers are rounded with scales of this dtype. Head, embeddings, norms
and routers stay unquantized. O outputs, I inputs, g inputs that share a scale.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.weight_packing import QuantizedWeight

from ..errors import ModelError

LARGEST_E4M3: Final = 448.0
NearestRounding = Callable[[Quant, Tensor], QuantizedWeight]


@dataclass(frozen=True, slots=True)
class CompressedTarget:
    """Format to write: `quant` is the kernels' format in which the checkpoint will run."""

    name: str
    quant: Quant
    form: Literal["pack-quantized", "int-quantized", "float-quantized"]

    @property
    def scheme(self) -> dict[str, Any]:
        """Return the config group of the linears."""
        rows = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
        match self.form:
            case "pack-quantized":
                weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.quant.group}
                activations = None
            case "int-quantized":
                weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
                activations = {**rows, "type": "int"}
            case _:
                weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
                activations = {**rows, "type": "float"}
        return {
            "targets": ["Linear"],
            "weights": {**weights, "symmetric": True, "dynamic": False},
            "input_activations": activations,
            "output_activations": None,
        }

    def entry(self, *, routers: str | None, head: str) -> dict[str, Any]:
        """Return the `quantization_config`. `routers`: name of the linears that choose experts; `head`: that
        of the output head.
        """
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": self.scheme},
            "ignore": [head, *([] if routers is None else [f"re:.*{routers}\\.gate$"])],
            "kv_cache_scheme": None,
        }

    def store(
        self, name: str, weight_OI: Tensor, dtype: torch.dtype, nearest: NearestRounding, *, exact: bool
    ) -> tuple[dict[str, Tensor], QuantizedWeight]:
        """Round a linear. Returns its tensors by name, and what they hold. `nearest` rounds to integers;
        `exact`: its numbers stay, however its scales are rounded (GPTQ). Raises ModelError.
        """
        if self.form == "pack-quantized":
            return self._store_packed(name, weight_OI, dtype, nearest, exact=exact)
        weight_OI = weight_OI.float()
        largest = 127.0 if self.form == "int-quantized" else LARGEST_E4M3
        scales_O1 = (weight_OI.abs().amax(1, keepdim=True) / largest).to(dtype)
        numbers_OI = weight_OI / torch.where(scales_O1 == 0, 1, scales_O1).float()
        numbers_OI = numbers_OI.clamp(-largest, largest)
        codes_OI = numbers_OI.round().to(torch.int8)
        if self.form == "float-quantized":
            codes_OI = numbers_OI.to(torch.float8_e4m3fn)
        by_output = replace(QUANTS["fp8-dynamic"], name=self.quant.name)
        rounded = QuantizedWeight(by_output, codes_OI, scales_O1.float())
        return {f"{name}.weight": codes_OI, f"{name}.weight_scale": scales_O1}, rounded

    def _store_packed(
        self, name: str, weight_OI: Tensor, dtype: torch.dtype, nearest: NearestRounding, *, exact: bool
    ) -> tuple[dict[str, Tensor], QuantizedWeight]:
        outputs, inputs = weight_OI.shape
        group = self.quant.group
        if inputs % group:
            raise ModelError(
                f"{name} has {inputs} inputs, which groups of {group} do not divide: use --to w8a8, --to fp8 "
                "or --to int4"
            )
        rounded = nearest(self.quant, weight_OI)
        scales_OG = rounded.scales_OG.to(dtype)
        codes_OI = rounded.codes_OI
        if not exact:
            spread = scales_OG.float().repeat_interleave(group, 1)
            numbers = weight_OI.float() / torch.where(spread == 0, 1, spread)
            codes_OI = numbers.round().clamp(-8, 7).to(torch.int8)
        tensors = {
            f"{name}.weight_packed": pack_nibbles(codes_OI),
            f"{name}.weight_scale": scales_OG,
            f"{name}.weight_shape": torch.tensor([outputs, inputs]),
        }
        return tensors, QuantizedWeight(self.quant, codes_OI, scales_OG.float())


def pack_nibbles(codes_OI: Tensor) -> Tensor:
    """Pack int4 codes plus 8 into int32 words, eight a word, the first in the lowest bits."""
    halves = (codes_OI + 8).to(torch.uint8)
    return (halves[:, 0::2] | halves[:, 1::2] << 4).contiguous().view(torch.int32)


TARGETS: Final = {
    target.name: target
    for target in (
        CompressedTarget("w4a16-g128", QUANTS["w4a16-g128"], "pack-quantized"),
        CompressedTarget("w4a16-g32", QUANTS["w4a16-g32"], "pack-quantized"),
        CompressedTarget("w8a8", QUANTS["w8a16-g128"], "int-quantized"),
        CompressedTarget("fp8", QUANTS["fp8-dynamic"], "float-quantized"),
    )
}
"""Formats that `llmbox quantize` writes for other tools too."""
