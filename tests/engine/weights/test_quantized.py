"""Rounded weights of a checkpoint, and each rank's part of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.engine.checkpoint.quantized_layout import format_of
from llmbox.engine.checkpoint.safetensors import ShardSlice
from llmbox.engine.errors import DeviceError, ModelError, ParallelError
from llmbox.engine.executor import rank_engine as loader
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.quantize import quantize
from llmbox.engine.weights.checkpoint import Checkpoint
from llmbox.engine.weights.source import WeightRequest
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Kind, Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.weight_packing import QuantizedWeight
from support.fp8_checkpoint import PLANNED_WITHOUT_KERNELS, round_to_blocks
from support.rank_threads import load_threads
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
Q, UP, DOWN = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"))
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 24,
    "num_key_value_heads": 3,
    "vocab_size": 333,
}


class Keeps:
    """A backend's side: packed weights are what was handed over."""

    def __init__(self, quant: Quant) -> None:
        self._quant = quant

    def format(self, kind: Kind) -> Quant | None:
        return None if self._quant.keeps_head and kind != "linear" else format_of(self._quant, kind)

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> Any:
        assert dtype == torch.float32
        return rounded


def part_of(
    model: Path, outputs: Mapping[str, ShardSlice], inputs: ShardSlice, kind: Kind = "linear"
) -> QuantizedWeight:
    quant = QUANTS[parse_config(model).quant or ""]
    ops = replace(REFERENCE, stored=Keeps(quant))
    return Checkpoint(model, ops, torch.float32, CPU).packed(WeightRequest(kind, outputs, inputs))


def exact(rounded: QuantizedWeight) -> Tensor:
    scales = rounded.scales_OG.float().repeat_interleave(rounded.quant.group, 1)
    return rounded.codes_OI.float() * scales[:, : rounded.codes_OI.shape[1]]


@pytest.fixture(params=["int8", "int4", "int4-g128", "fp8-block"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = make_tiny_model(tmp_path / "model", tokenizer=False, num_hidden_layers=2, **SIZES)
    if request.param == "fp8-block":
        round_to_blocks(source)
        return source
    if not native_ready():
        pytest.skip("needs the C++ kernels")
    quantize(source, tmp_path / "out", QUANTS[request.param], 1, lambda _done, _total: None)
    return tmp_path / "out"


def test_parts_are_those_of_the_whole(model: Path) -> None:
    """Rows cut anywhere, inputs between groups; two outputs in one stack."""
    whole = {
        name: exact(part_of(model, {name: ShardSlice.whole(384)}, ShardSlice.whole(256))) for name in (Q, UP)
    }
    rows = ShardSlice(384, 70, 300)
    got = exact(part_of(model, {Q: rows, UP: ShardSlice(384, 128, 192)}, ShardSlice.whole(256)))
    assert torch.equal(got, torch.cat((whole[Q][70:300], whole[UP][128:192])))
    down = exact(part_of(model, {DOWN: ShardSlice.whole(256)}, ShardSlice.whole(384)))
    assert down.abs().min() < down.abs().max()
    for start, stop in ((0, 128), (128, 384), (256, 384)):
        part = part_of(model, {DOWN: ShardSlice.whole(256)}, ShardSlice(384, start, stop))
        assert torch.equal(exact(part), down[:, start:stop])


def test_a_padded_vocabulary_ends_in_zeros(model: Path) -> None:
    if parse_config(model).quant == "fp8-block":
        return  # its head is not rounded
    whole = exact(part_of(model, {"lm_head": ShardSlice.whole(333)}, ShardSlice.whole(256), "head"))
    last = exact(part_of(model, {"lm_head": ShardSlice(333, 170, 333, 7)}, ShardSlice.whole(256), "head"))
    assert torch.equal(last[:163], whole[170:])
    assert not last[163:].any()


def test_a_group_cut_in_two_is_refused(model: Path) -> None:
    with pytest.raises(ParallelError, match=r"one scale for .* --tp"):
        part_of(model, {DOWN: ShardSlice.whole(256)}, ShardSlice(384, 0, 80))


class Widens(Keeps):
    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> Any:
        return REFERENCE.pack_linear(exact(rounded).to(dtype), bias_O)


@pytest.mark.parametrize("cut", [{"tp": 3}, {"pp": 2}], ids=str)
def test_ranks_answer_as_one(model: Path, monkeypatch: pytest.MonkeyPatch, cut: dict[str, int]) -> None:
    def backend(*given: Any) -> Ops:
        (quant,) = (each for each in given if isinstance(each, Quant))
        return replace(REFERENCE, stored=Widens(quant))

    monkeypatch.setattr(PLANNED_WITHOUT_KERNELS, lambda *_: "")
    monkeypatch.setattr(loader, "backend", backend)
    requests = [ask("a", range(5, 25), 8), ask("b", [7, 8], 8)]
    wanted = tokens(load(model, dtype="float32"), requests)
    assert tokens(load_threads(model, dtype="float32", **cut), requests) == wanted


# ------------------------------------------------------------------ E4M3 in blocks


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_blocks_of_others_are_read(tmp_path: Path, scales: torch.dtype) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, **SIZES)
    wide = round_to_blocks(model, scales)
    got = exact(part_of(model, {UP: ShardSlice.whole(384)}, ShardSlice.whole(256)))
    assert torch.equal(got, wide[f"{UP}.weight"])


@pytest.mark.parametrize(
    "entry",
    [
        {"weight_block_size": [64, 128]},
        {"activation_scheme": "static"},
        {"fmt": "e5m2"},
    ],
    ids=str,
)
def test_what_would_be_read_wrongly_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, **SIZES)
    round_to_blocks(model, **entry)
    with pytest.raises(ModelError, match=r"quantization_config: .*, which cannot be read"):
        parse_config(model)


@pytest.mark.parametrize("harm", ["no scale", "nan", "wide", "shape"])
def test_broken_blocks_are_refused(tmp_path: Path, harm: str) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, **SIZES)
    round_to_blocks(model)
    weights = load_file(model / "model.safetensors")
    name = f"{UP}.weight"
    match harm:
        case "no scale":
            del weights[f"{name}_scale_inv"]
        case "nan":
            weights[name].view(torch.uint8)[3, 5] = 0xFF
        case "wide":
            weights[f"{Q}.weight"] = weights[f"{Q}.weight"].float()
        case _:
            weights[f"{name}_scale_inv"] = torch.ones(2, 2)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ModelError):
        part_of(model, {Q: ShardSlice.whole(384), UP: ShardSlice.whole(384)}, ShardSlice.whole(256))
    if harm == "wide":
        with pytest.raises(ModelError):
            part_of(model, {UP: ShardSlice.whole(384), Q: ShardSlice.whole(384)}, ShardSlice.whole(256))


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("harm", ["none there", "zero", "shape", "dtype"])
def test_broken_steps_are_refused(tmp_path: Path, harm: str) -> None:
    source = make_tiny_model(tmp_path / "model", tokenizer=False, num_hidden_layers=1, **SIZES)
    model = tmp_path / "out"
    quantize(source, model, QUANTS["int4"], 1, lambda _done, _total: None)
    weights = load_file(model / "model.safetensors")
    name = f"{UP}.weight_step"
    match harm:
        case "none there":
            del weights[name]
        case "zero":
            weights[name][3, 5] = 0xF0
        case "shape":
            weights[name] = weights[name][:, :8].contiguous()
        case _:
            weights[name] = weights[name].to(torch.int8)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ModelError, match="weight_step"):
        part_of(model, {UP: ShardSlice.whole(384)}, ShardSlice.whole(256))


@pytest.mark.parametrize(
    ("quant", "says"), [("fp8-block", "NVIDIA GPUs"), ("fp8", "NVIDIA GPUs"), ("w8a8", "with int8")]
)
def test_on_a_cpu_it_is_refused_with_what_to_do(tmp_path: Path, quant: str, says: str) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, **SIZES)
    with pytest.raises(DeviceError, match=rf"{says}.*: load with --quant none"):
        load(model, quant=quant)


def test_a_cpu_dequantizes_blocks(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", tokenizer=False, num_hidden_layers=1, **SIZES)
    wide = round_to_blocks(model)
    engine = load(model, dtype="float32")
    assert any("run on NVIDIA GPUs" in note for note in engine.info.notes)
    same = make_tiny_model(tmp_path / "wide", tokenizer=False, num_hidden_layers=1, **SIZES)
    save_file(load_file(same / "model.safetensors") | wide, same / "model.safetensors")
    requests = [ask("a", range(5, 25), 8)]
    assert tokens(engine, requests) == tokens(load(same, dtype="float32"), requests)
