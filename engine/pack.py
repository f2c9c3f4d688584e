"""Weights that are not rounded yet, to what a backend multiplies with."""

from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.packing import Kind


def pack(ops: Ops, kind: Kind, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
    match kind:
        case "linear":
            return ops.pack_linear(weight_OI, bias_O)
        case "experts":
            assert ops.pack_experts is not None
            return ops.pack_experts(weight_OI)
        case "head":
            return ops.pack_head(weight_OI, bias_O)
        case "router":
            return ops.pack_router(weight_OI)
        case _:
            return ops.pack_embedding(weight_OI, kind == "tied")
