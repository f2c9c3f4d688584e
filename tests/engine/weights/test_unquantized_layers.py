"""Checkpoints of 8-bit floats that keep some linears wide: those stay as they are, the rest is rounded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.errors import ModelError
from llmbox.engine.executor import rank_engine as loader
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.memory_model import weights_bytes
from llmbox.engine.planning.performance_model import decode_tokens_per_second, rank_shape
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.reference.elementwise import ReferenceLinear
from support.fake_quantized import QuantizedLinear, fake_quantized_ops
from support.fp8_checkpoint import (
    ENTRY,
    PLANNED_WITHOUT_KERNELS,
    compressed,
    round_by_output,
    round_to_blocks,
)
from support.rank_threads import load_threads
from support.real_engines import ask, load, runner_of, tokens
from support.tiny_models import make_tiny_model

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 99}
KEPT = ("layers.0.mlp.down_proj", "layers.1.self_attn.", "layers.2.")
"""A linear, one that is made of three, a whole layer."""
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
STYLES: dict[str, dict[str, Any]] = {
    "fp8-block": ENTRY | {"modules_to_not_convert": ["lm_head", *KEPT]},
    "fp8-dynamic": compressed("channel", ignore=["lm_head", "re:.*layers\\.2\\..*", *KEPT]),
    "fp8-static": STATIC | {"ignored_layers": None},
}


def make(folder: Path, style: str, keeps: tuple[str, ...] = KEPT) -> Path:
    model = make_tiny_model(folder, tokenizer=False, **SIZES)
    if style == "fp8-block":
        round_to_blocks(model, keeps=keeps, **STYLES[style])
    else:
        given = {} if style == "fp8-static" else None
        shape = () if style == "fp8-static" else (-1, 1)
        round_by_output(model, STYLES[style], shape=shape, given=given, keeps=keeps)
    return model


@pytest.fixture(params=STYLES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make(tmp_path, request.param)


@pytest.fixture
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formats of GPUs, on a CPU."""

    def backend(*given: Any) -> Ops:
        (quant,) = (each for each in given if isinstance(each, Quant))
        return fake_quantized_ops(quant)

    monkeypatch.setattr(PLANNED_WITHOUT_KERNELS, lambda *_: "")
    monkeypatch.setattr(loader, "backend", backend)


@pytest.mark.usefixtures("_plain_torch")
def test_they_stay_as_they_are_stored(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    first, second, third = runner_of(load(model, dtype="float32"))._model.layers
    rounded = [first.attention.qkv, first.attention.output, first.mlp.gate_up]
    rounded += [second.mlp.gate_up, second.mlp.down]
    assert {type(each) for each in rounded} == {QuantizedLinear}
    wide = {
        "0.mlp.down_proj": first.mlp.down,
        "1.self_attn.o_proj": second.attention.output,
        "2.mlp.down_proj": third.mlp.down,
    }
    for name, packed in wide.items():
        assert torch.equal(packed.weight_OI, weights[f"model.layers.{name}.weight"].float())
    qkv = [weights[f"model.layers.1.self_attn.{name}_proj.weight"].float() for name in "qkv"]
    assert torch.equal(second.attention.qkv.weight_OI, torch.cat(qkv))
    assert isinstance(third.mlp.gate_up, ReferenceLinear)


@pytest.mark.usefixtures("_plain_torch")
def test_ranks_answer_as_one(model: Path) -> None:
    requests = [ask("a", range(5, 25), 8), ask("b", [7, 8], 8)]
    wanted = tokens(load(model, dtype="float32"), requests)
    assert tokens(load_threads(model, dtype="float32", pp=3), requests) == wanted
    if parse_config(model).quant == "fp8-static":  # others' rows have scales by rank, or blocks would be cut
        assert tokens(load_threads(model, dtype="float32", tp=2), requests) == wanted


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kept", ["q_proj", "v_proj", "up_proj"])
@pytest.mark.usefixtures("_plain_torch")
def test_parts_of_one_matrix_are_refused(tmp_path: Path, style: str, kept: str) -> None:
    model = make(tmp_path, style, keeps=(f"layers.1.self_attn.{kept}", f"layers.1.mlp.{kept}"))
    says = rf"layers\.1\.[a-z_]+\.{kept}.* is kept in \w+ and .* F8_E4M3.* keeps all of"
    with pytest.raises(ModelError, match=says):
        load(model, dtype="float32")


@pytest.mark.parametrize("kept", ["lm_head", "model.embed_tokens"])
@pytest.mark.usefixtures("_plain_torch")
def test_tables_of_8_bits_are_refused(tmp_path: Path, kept: str) -> None:
    model = make(tmp_path, "fp8-dynamic")
    weights = load_file(model / "model.safetensors")
    weights[f"{kept}.weight"] = weights[f"{kept}.weight"].to(torch.float8_e4m3fn)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(
        ModelError, match=rf"{kept}.weight_scale.* is missing, which fp8-dynamic weights need"
    ):
        load(model, dtype="float32")


def test_memory_counts_them(model: Path) -> None:
    config = parse_config(model)
    weights = load_file(model / "model.safetensors")
    wide = [
        tensor.numel()
        for name, tensor in weights.items()
        if "_proj.weight" in name and tensor.dtype != torch.float8_e4m3fn and "_scale" not in name
    ]
    assert config.wide_params == sum(wide) > 0
    quant, shape = QUANTS[config.quant or ""], config.shape()
    without = replace(shape, wide_params=0)
    more = weights_bytes(shape, "bfloat16", quant) - weights_bytes(without, "bfloat16", quant)
    assert more == pytest.approx(sum(wide) * (2 - quant.bytes_per_weight), abs=2)
    assert rank_shape(shape, 1, 2).wide_params == sum(wide), "the stage that has most may have all"
    assert rank_shape(shape, 2, 1).wide_params == sum(wide) // 2
    speeds = [
        decode_tokens_per_second(each, "bfloat16", "bfloat16", 1e9, quant=quant) for each in (shape, without)
    ]
    assert speeds[0] < speeds[1]
    (model / "model.safetensors").unlink()
    assert parse_config(model).wide_params == 0, "not there to be counted, as before a download"
