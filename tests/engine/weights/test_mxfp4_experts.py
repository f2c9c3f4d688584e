"""Experts as gpt-oss stores them: all of a layer in one tensor of MXFP4 blocks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmbox.engine.checkpoint.formats.floats import split_experts
from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.checkpoint.formats.weight_format import check_tensors
from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.errors import ModelError
from llmbox.engine.partition import ShardSlice
from llmbox.engine.weights.source import Checkpoint, WeightRequest
from llmbox.kernels.reference import REFERENCE
from support.published_formats import mxfp4_blocks

EXPERTS, OUTPUTS, INPUTS = 3, 24, 64
MODULE = "model.layers.0.mlp.experts"
ENTRY = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def write(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    stored, wide = zip(*(mxfp4_blocks(torch.randn(OUTPUTS, INPUTS)) for _ in range(EXPERTS)), strict=True)
    tensors = {
        f"{MODULE}.gate_up_proj{end}": torch.stack([each[end] for each in stored])
        for end in ("_blocks", "_scales")
    }
    tensors[f"{MODULE}.gate_up_proj_bias"] = torch.randn(EXPERTS, OUTPUTS)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": ENTRY}))
    return torch.stack(wide), tensors


def test_each_expert_is_read_by_itself(tmp_path: Path) -> None:
    """Gates and ups are rows in turn: a permutation puts them apart."""
    wide, tensors = write(tmp_path)
    source = Checkpoint(tmp_path, REFERENCE, torch.float32, torch.device("cpu"))
    order = (*range(0, OUTPUTS, 2), *range(1, OUTPUTS, 2))
    for expert in range(EXPERTS):
        outputs = {f"{MODULE}.{expert}.gate_up_proj": ShardSlice.whole(OUTPUTS)}
        asked = WeightRequest("linear", outputs, ShardSlice.whole(INPUTS), bias=True, order=order)
        packed = source.packed(asked)
        assert torch.equal(packed.weight_OI, wide[expert][list(order)])
        assert torch.equal(packed.bias_O, tensors[f"{MODULE}.gate_up_proj_bias"][expert][list(order)])
    source.finish()


def test_they_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    wide, tensors = write(tmp_path)
    blocks, scales = (tensors[f"{MODULE}.gate_up_proj{end}"] for end in ("_blocks", "_scales"))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs.transpose(1, 2), wide)


@pytest.mark.parametrize(
    ("end", "says"), [("_blocks", r"gate_up_proj_blocks' is missing"), ("_scales", r"_scales' is missing")]
)
def test_half_of_it_is_refused(tmp_path: Path, end: str, says: str) -> None:
    _, tensors = write(tmp_path)
    del tensors[f"{MODULE}.gate_up_proj{end}"]
    save_file(tensors, tmp_path / "model.safetensors")
    form = read_weight_format(ENTRY)
    with pytest.raises(ModelError, match=says):
        check_tensors(form, split_experts(form, list_tensors(tmp_path)))
