"""E4M3 weights with a scale for each tensor or output: read exactly, cut exactly, refused when broken."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.engine.checkpoint.safetensors import ShardSlice
from llmbox.engine.errors import ModelError
from llmbox.engine.executor import rank_engine as loader
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.weights.checkpoint import Checkpoint
from llmbox.engine.weights.source import WeightRequest
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Kind, Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.weight_packing import QuantizedWeight
from support.fake_quantized import fake_quantized_ops
from support.fp8_checkpoint import PLANNED_WITHOUT_KERNELS, compressed, round_by_output
from support.rank_threads import load_threads
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
LAYER = "model.layers.0"
Q, K, UP, DOWN = (
    f"{LAYER}.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
)
SIZES = {
    "hidden_size": 120,
    "intermediate_size": 90,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 99,
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}


class Keeps:
    """A backend's side: packed weights are what was handed over."""

    def __init__(self, quant: Quant) -> None:
        self.quant = quant

    def format(self, kind: Kind) -> Quant | None:
        return self.quant if kind == "linear" else None

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> Any:
        assert dtype == torch.float32
        return rounded


def part_of(model: Path, outputs: Mapping[str, ShardSlice], inputs: ShardSlice) -> QuantizedWeight:
    quant = QUANTS[parse_config(model).quant or ""]
    ops = replace(REFERENCE, stored=Keeps(quant))
    return Checkpoint(model, ops, torch.float32, CPU).packed(WeightRequest("linear", outputs, inputs))


def tiny(tmp_path: Path, **overrides: Any) -> Path:
    return make_tiny_model(tmp_path, tokenizer=False, **{"num_hidden_layers": 1, **SIZES, **overrides})


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        (STATIC, {"given": {}}),
        (DYNAMIC, {"shape": (1,), "scales": torch.bfloat16}),
        (STATIC, {"given": {}, "names": ("weight_scale_inv", "activation_scale")}),
        (compressed("channel"), {"shape": (-1, 1), "scales": torch.float16}),
        (compressed("channel"), {"shape": (-1,)}),
    ],
    ids=str,
)
def test_each_tensor_of_a_stack_keeps_its_scales(
    tmp_path: Path, entry: dict[str, Any], options: dict[str, Any]
) -> None:
    """Bit by bit, whole and cut anywhere: rows and inputs of ranks need no borders of groups."""
    model = tiny(tmp_path)
    wide = round_by_output(model, entry, **options)
    outputs = {Q: ShardSlice.whole(96), K: ShardSlice.whole(48), UP: ShardSlice.whole(90)}
    got = part_of(model, outputs, ShardSlice.whole(120))
    assert torch.equal(got.floats(), torch.cat([wide[f"{name}.weight"] for name in outputs]))
    assert len(got.scales_OG.unique()) > 2
    cut = part_of(
        model, {Q: ShardSlice(96, 17, 50), UP: ShardSlice(90, 30, 60)}, ShardSlice(120, 7, 101)
    ).floats()
    assert torch.equal(cut[:33], wide[f"{Q}.weight"][17:50, 7:101])
    assert torch.equal(cut[33:], wide[f"{UP}.weight"][30:60, 7:101])
    if options.get("given") is None:
        assert got.given is None
    else:
        assert got.given is not None
        assert got.given.tolist() == [pytest.approx(0.05)]


def test_linears_of_the_same_rows_share_the_largest_of_their_scales(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    round_by_output(model, STATIC, given={"q_proj": 0.02, "k_proj": 0.09})
    got = part_of(model, {K: ShardSlice.whole(48), Q: ShardSlice.whole(96)}, ShardSlice.whole(120))
    assert got.given is not None
    assert got.given.tolist() == [pytest.approx(0.09)]


class Widens(Keeps):
    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> Any:
        return REFERENCE.pack_linear(rounded.floats().to(dtype), bias_O)


def widened(quant: Quant) -> Ops:
    return replace(REFERENCE, stored=Widens(quant))


@pytest.mark.parametrize(
    ("entry", "given", "ops"), [(DYNAMIC, None, widened), (STATIC, {"down_proj": 0.2}, fake_quantized_ops)]
)
@pytest.mark.parametrize("cut", [{"tp": 3}, {"pp": 2}], ids=str)
def test_ranks_answer_as_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: dict[str, Any],
    given: dict[str, float] | None,
    ops: Callable[[Quant], Ops],
    cut: dict[str, int],
) -> None:
    """With static activations also of rounded rows: those of all ranks are rounded by one scale."""
    model = tiny(tmp_path, num_hidden_layers=2)
    round_by_output(model, entry, given=given)

    def backend(*told: Any) -> Ops:
        (quant,) = (each for each in told if isinstance(each, Quant))
        return ops(quant)

    monkeypatch.setattr(PLANNED_WITHOUT_KERNELS, lambda *_: "")
    monkeypatch.setattr(loader, "backend", backend)
    requests = [ask("a", range(5, 25), 6), ask("b", [7, 8], 6)]
    wanted = tokens(load(model, dtype="float32"), requests)
    assert tokens(load_threads(model, dtype="float32", **cut), requests) == wanted


def test_scales_of_keys_and_values_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(tmp_path)
    round_by_output(model, STATIC | {"kv_cache_scheme": "static"}, given={})
    weights = load_file(model / "model.safetensors")
    for name in ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale"):
        weights[f"{LAYER}.{name}"] = torch.tensor(0.5)
    save_file(weights, model / "model.safetensors")
    monkeypatch.setattr(PLANNED_WITHOUT_KERNELS, lambda *_: "")
    monkeypatch.setattr(loader, "backend", lambda *_, **__: fake_quantized_ops(QUANTS["fp8-static"]))
    assert len(tokens(load(model, dtype="float32"), [ask("a", [7, 8], 2)])["a"]) == 2


@pytest.mark.parametrize(
    ("name", "harm", "says"),
    [
        (f"{UP}.weight_scale", None, r"up_proj\.weight_scale' is missing"),
        (f"{UP}.input_scale", None, r"up_proj\.input_scale' is missing"),
        (f"{UP}.weight_scale", torch.ones(2), r"\[2, 1\], config.json asks for \[90, 1\]"),
        (f"{UP}.weight_scale", torch.ones(90, 2), r"\[90, 2\], config.json asks for \[90, 1\]"),
        (f"{UP}.weight_scale", torch.tensor(torch.nan), "NaN"),
        (f"{UP}.input_scale", torch.ones(90), r"\[90, 1\], config.json asks for \[1, 1\]"),
        (f"{UP}.input_scale", torch.tensor(0.0), "is 0.0, not a valid activation scale"),
        (f"{UP}.input_scale", torch.tensor(-1.0), "is -1.0, not a valid activation scale"),
        (f"{UP}.weight", torch.ones(90, 120), r"up_proj\.weight' is kept in F32 and .* one matrix"),
        (f"{Q}.weight", torch.ones(96, 120), r"q_proj\.weight' is kept in F32 and .* one matrix"),
        (f"{UP}.weight", torch.ones(90, 100).to(torch.float8_e4m3fn), r"\[90, 100\]"),
        (f"{UP}.weight", torch.full((90, 120), torch.nan).to(torch.float8_e4m3fn), "NaN"),
    ],
)
def test_broken_ones_are_refused(tmp_path: Path, name: str, harm: Tensor | None, says: str) -> None:
    model = tiny(tmp_path)
    round_by_output(model, STATIC, given={})
    weights = load_file(model / "model.safetensors")
    del weights[name]
    if harm is not None:
        weights[name] = harm
    save_file(weights, model / "model.safetensors")
    first = Q if name.startswith(Q) else K
    rows = {Q: 96, K: 48}[first]
    with pytest.raises(ModelError, match=says):
        part_of(model, {first: ShardSlice.whole(rows), UP: ShardSlice.whole(90)}, ShardSlice.whole(120))


def test_scales_of_activations_that_nobody_asked_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tmp_path)
    round_by_output(model, DYNAMIC, given={})
    monkeypatch.setattr(PLANNED_WITHOUT_KERNELS, lambda *_: "")
    monkeypatch.setattr(loader, "backend", lambda *_, **__: fake_quantized_ops(QUANTS["fp8-dynamic"]))
    with pytest.raises(ModelError, match=r"input_scale.* has no place"):
        load(model, dtype="float32")


@pytest.mark.parametrize(("entry", "given"), [(DYNAMIC, None), (STATIC, {})])
def test_a_cpu_dequantizes_them(
    tmp_path: Path, entry: dict[str, Any], given: dict[str, float] | None
) -> None:
    model = tiny(tmp_path / "model")
    wide = round_by_output(model, entry, given=given)
    engine = load(model, dtype="float32")
    assert any("dequantized at load" in note for note in engine.info.notes)
    assert engine.info.quant == "none"
    same = tiny(tmp_path / "wide")
    save_file(load_file(same / "model.safetensors") | wide, same / "model.safetensors")
    requests = [ask("a", range(5, 25), 6)]
    assert tokens(engine, requests) == tokens(load(same, dtype="float32"), requests)
    assert load(model, quant="int4").info.quant == "int4", "rounded as any other weights, if asked to"


MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def move_beside(model: Path, told: Any) -> None:
    """As older versions of Model Optimizer leave it: config.json knows nothing."""
    raw = json.loads((model / "config.json").read_text())
    raw.pop("quantization_config", None)
    (model / "config.json").write_text(json.dumps(raw))
    (model / "hf_quant_config.json").write_text(json.dumps(told))


def test_a_checkpoint_of_model_optimizer_that_says_so_in_its_own_file_alone(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    wide = round_by_output(model, {"quant_method": "modelopt", "quant_algo": "FP8"}, given={})
    said = part_of(model, {Q: ShardSlice.whole(96)}, ShardSlice.whole(120))
    move_beside(model, MODELOPT)
    assert parse_config(model).quant == "fp8-static"
    found = part_of(model, {Q: ShardSlice.whole(96)}, ShardSlice.whole(120))
    assert torch.equal(found.floats(), wide[f"{Q}.weight"])
    assert found.given is not None
    assert said.given is not None
    assert torch.equal(found.given, said.given)


def test_a_rounded_cache_alone_rounds_no_weights_and_other_algorithms_are_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    move_beside(model, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert parse_config(model).quant is None
    for told, says in (
        ({"quantization": {"quant_algo": "W4A8_AWQ"}}, "'W4A8_AWQ'"),
        ({}, "without an object"),
    ):
        move_beside(model, told)
        with pytest.raises(ModelError, match=says):
            parse_config(model)


def test_linears_of_several_groups_are_read_as_their_files_say(tmp_path: Path) -> None:
    """Attention with a scale for each output, MLP with one for each tensor."""
    model = tiny(tmp_path)
    groups = {"a": compressed("channel"), "b": compressed("tensor")}
    entry = compressed(
        config_groups={name: each["config_groups"]["group_0"] for name, each in groups.items()}
    )
    wide = round_by_output(model, entry, shape=(-1, 1), keeps=["mlp"])
    wide |= round_by_output(model, entry, shape=(), keeps=["self_attn"])
    for name, outputs in ((Q, 96), (UP, 90)):
        got = part_of(model, {name: ShardSlice.whole(outputs)}, ShardSlice.whole(120))
        assert torch.equal(got.floats(), wide[f"{name}.weight"])
    assert parse_config(model).wide_params == 0
