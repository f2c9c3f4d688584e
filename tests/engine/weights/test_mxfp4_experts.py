"""Experts as gpt-oss stores them: all of a layer in one tensor of MXFP4 blocks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.formats.floats import split_experts
from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.checkpoint.formats.weight_format import check_tensors
from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.checkpoint.safetensors import ShardSlice, TensorEntry
from llmbox.engine.errors import ModelError
from llmbox.engine.weights.checkpoint import Checkpoint
from llmbox.engine.weights.source import WeightRequest
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.reference import REFERENCE
from support.families import make_family
from support.published_formats import mxfp4_blocks
from support.rank_threads import load_threads
from support.real_engines import ask, hf_model, hf_tokens, load, runner_of, tokens

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


def publish_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss with MXFP4 experts, and the model that it stands for."""
    model, same = make_family(folder / "model", "gpt_oss"), make_family(folder / "same", "gpt_oss")
    weights = load_file(model / "model.safetensors")
    wide = dict(weights)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts = [mxfp4_blocks(each.T.contiguous()) for each in weights.pop(name)]
        weights |= {name + end: torch.stack([stored[end] for stored, _ in experts]) for end in experts[0][0]}
        wide[name] = torch.stack([weight.T for _, weight in experts])
    save_file(weights, model / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in wide.items()}, same / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": ENTRY}))
    return model, same


def test_gpt_oss_answers_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, same = publish_gpt_oss(tmp_path)
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    prompt = list(range(5, 30))
    expected = hf_tokens(hf_model(same), prompt, 12)
    assert tokens(load(model, dtype="float32"), [ask("a", prompt, 12)])["a"] == expected
    ranks = load_threads(model, dtype="float32", tp=2, expert_parallel=True)
    assert tokens(ranks, [ask("a", prompt, 12)])["a"] == expected, "each rank has its experts of the stacks"


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_gpt_oss_runs_in_its_own_bits(tmp_path: Path) -> None:
    model, _ = publish_gpt_oss(tmp_path)
    engine = load(model)
    assert engine.info.quant == "mxfp4"
    mixture = runner_of(engine)._model.layers[0].mlp.mixture
    assert {packed.quant.name for packed in (*mixture.gate_ups, *mixture.downs)} == {"mxfp4"}
    requests = [ask("a", range(5, 30), 6), ask("b", [7, 8], 6)]
    assert tokens(engine, requests) == tokens(load(model), requests[:1]) | tokens(load(model), requests[1:])


@pytest.mark.parametrize("shape", [(0, 2, 2, 16), (10**9, 1, 0, 16)])
def test_stacks_of_no_bytes_are_not_split(shape: tuple[int, ...]) -> None:
    form = read_weight_format(ENTRY)
    entry = TensorEntry(Path("file"), f"{MODULE}.gate_up_proj_blocks", "U8", shape, 0, 0)
    assert split_experts(form, {entry.name: entry}) == {entry.name: entry}
