"""`engine.quantize`: what it writes loads by itself and answers as quantization at load does."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.quantized_layout import FORMATS
from llmbox.engine.checkpoint.tensor_io import ShardWriter
from llmbox.engine.errors import DeviceError, ModelError
from llmbox.engine.quantize import quantize as module
from llmbox.engine.quantize.calibration import config_for, perplexity, sequences_of
from llmbox.engine.quantize.compressed_tensors import TARGETS
from llmbox.engine.quantize.quantize import quantize
from llmbox.engine.quantize.quantizer import importance
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.weight_packing import to_numbers
from support.odd_files import make_odd, no_hanging
from support.real_engines import ask, hf_model, hf_tokens, load, runner_of, tokens
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
PROMPT = list(range(5, 25))


def made(source: Path, out: Path, to: str) -> module.QuantizationReport:
    return quantize(source, out, QUANTS[to], 1, lambda _done, _total: None)


def answer(model: Path, **options: Any) -> list[int]:
    return tokens(load(model, **options), [ask("a", PROMPT, 12)])["a"]


@pytest.mark.parametrize(
    ("arch", "tied"), [("qwen2", True), ("llama", False), ("qwen3_moe", False), ("gemma3_text", True)]
)
@pytest.mark.parametrize("to", FORMATS)
def test_it_answers_as_the_original_quantized_at_load(tmp_path: Path, to: str, arch: str, tied: bool) -> None:
    source = make_tiny_model(tmp_path / "model", arch=arch, tie_word_embeddings=tied)
    report = made(source, tmp_path / "out", to)
    wanted = answer(source, quant=to)
    shutil.rmtree(source)  # nothing of it is needed
    assert answer(tmp_path / "out") == wanted
    assert answer(tmp_path / "out", quant="auto") == wanted
    assert report.bytes_after < report.bytes_before / 2
    assert 0 < report.relative < {8: 0.01, 4: 0.1}[QUANTS[to].bits]


@pytest.mark.parametrize("to", FORMATS)
def test_heads_that_turn_in_part(tmp_path: Path, to: str) -> None:
    """Loading reorders their rows and cuts stacked tensors; the checkpoint made here has neither."""
    source = make_tiny_model(tmp_path / "model", arch="phi3", partial_rotary_factor=0.5)
    made(source, tmp_path / "out", to)
    assert answer(tmp_path / "out") == answer(source, quant=to)


@pytest.mark.parametrize("arch", ["smollm3", "olmo3", "granite"])
def test_other_architectures(tmp_path: Path, arch: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch=arch)
    made(source, tmp_path / "out", "int4")
    assert answer(tmp_path / "out") == answer(source, quant="int4")


def test_odd_sizes(tmp_path: Path) -> None:
    """Neither two nor a group divide the inputs."""
    source = make_tiny_model(tmp_path / "model", intermediate_size=77, hidden_size=70, vocab_size=321)
    for to in FORMATS:
        made(source, tmp_path / to, to)
        assert answer(tmp_path / to) == answer(source, quant=to)


def test_the_report_is_true(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    report = made(source, tmp_path / "out", "int4")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out/model.safetensors")
    assert report.bytes_before == sum(tensor.nbytes for tensor in before.values())
    assert report.bytes_after == sum(tensor.nbytes for tensor in after.values())
    assert report.tensors == sum(name.endswith("_scale") for name in after)
    assert report.tensors + report.kept == len(before)
    worst = report.worst[0]
    assert all(worst.relative >= other.relative for other in report.worst)
    halves = torch.stack((after[worst.name] & 15, after[worst.name] >> 4), -1).flatten(1)
    width = before[worst.name].shape[1]
    numbers = to_numbers(halves[:, :width], after[worst.name + "_step"], QUANTS["int4"]).float()
    scales = after[worst.name + "_scale"].float().repeat_interleave(128, 1)
    lost = before[worst.name] - numbers * scales[:, :width]
    assert worst.relative == pytest.approx(float(lost.norm() / before[worst.name].norm()), rel=1e-4)
    counts, square = importance(before[worst.name], 16), before[worst.name].square()
    weighted = float((counts * lost.square()).sum() / (counts * square).sum()) ** 0.5
    assert worst.weighted == pytest.approx(weighted, rel=1e-4)


def test_an_error_counts_more_where_a_weight_is_large_for_its_group_or_the_group_for_its_row() -> None:
    got = importance(torch.tensor([[3.0, -4.0, 0.0, 0.0, 6.0]]), 4)
    assert torch.equal(got, torch.tensor([[5.5, 6.5, 2.5, 2.5, 9.0]]))


def test_the_rest_of_the_directory_comes_along(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    made(source, tmp_path / "out", "int8")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "out/config.json").read_text())
    entry = {"quant_method": "llmbox", "version": 1, "format": "int8"}
    assert config == json.loads((source / "config.json").read_text()) | {"quantization_config": entry}


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny_model(tmp_path / "model", shards=3)
    monkeypatch.setattr(module, "ShardWriter", lambda folder, **more: ShardWriter(folder, 20_000, **more))
    made(source, tmp_path / "out", "int8")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert answer(tmp_path / "out") == answer(source, quant="int8")


# ------------------------------------------------------------------ refusals


def test_experts_are_not_calibrated(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen3_moe")
    tell = lambda _done, _total: None  # noqa: E731
    with pytest.raises(ModelError, match="without --calibrate"):
        quantize(source, tmp_path / "out", QUANTS["int8"], 1, tell, tell)


def test_what_is_quantized_already_is_refused(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    made(source, tmp_path / "out", "int8")
    with pytest.raises(ModelError, match="int8 weights already"):
        made(tmp_path / "out", tmp_path / "again", "int4")
    with pytest.raises(DeviceError, match="--quant auto"):
        load(tmp_path / "out", quant="int4")
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ModelError, match="quantized"):
        made(source, tmp_path / "foreign", "int4")


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a socket"])
def test_what_is_no_file_is_not_left_out_in_silence(tmp_path: Path, kind: str) -> None:
    source = make_tiny_model(tmp_path / "model")
    make_odd(source / "tokenizer.json", kind)
    with no_hanging(), pytest.raises(ModelError, match=r"tokenizer\.json is neither a regular file"):
        made(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    with pytest.raises(ModelError, match="--out"):
        made(source, tmp_path / "out", "int8")
    assert (tmp_path / "out/mine").read_text() == "precious"


def test_a_small_disk_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match="GB are needed"):
        made(source, tmp_path / "new/out", "int8")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("tensor", ["missing", "surplus", "nan"])
def test_a_broken_checkpoint_leaves_nothing_behind(tmp_path: Path, tensor: str) -> None:
    source = make_tiny_model(tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if tensor == "missing":
        del weights[name]
    elif tensor == "nan":
        weights[name][0, 0] = float("nan")
    else:
        weights["surplus"] = torch.zeros(3)
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ModelError):
        made(source, tmp_path / "out", "int8")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("harm", ["no scale", "wrong shape", "wrong type", "nan scale"])
def test_a_broken_result_is_refused(tmp_path: Path, harm: str) -> None:
    made(make_tiny_model(tmp_path / "model"), tmp_path / "out", "int8")
    file = tmp_path / "out/model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.k_proj.weight"
    if harm == "no scale":
        del weights[name + "_scale"]
    elif harm == "wrong shape":
        weights[name] = weights[name][1:].contiguous()
    elif harm == "wrong type":
        weights[name] = weights[name].view(torch.uint8)
    else:
        weights[name + "_scale"][0, 0] = float("nan")
    save_file(weights, file)
    with pytest.raises(ModelError, match="k_proj"):
        load(tmp_path / "out")


def test_integers_where_none_may_be_are_refused(tmp_path: Path) -> None:
    made(make_tiny_model(tmp_path / "model"), tmp_path / "out", "int8")
    file = tmp_path / "out/model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    weights["model.norm.weight_scale"] = torch.ones(64, dtype=torch.float16)
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"norm\.weight"):
        load(tmp_path / "out")


# ------------------------------------------------------------------ perplexity


def test_perplexity_is_of_the_given_tokens(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine = module.load_engine(config_for(model, 1), lambda _: None)
    found = perplexity(engine, [PROMPT, PROMPT[::-1]])
    assert 100 < found < 1000  # of 320 random tokens
    assert len(sequences_of(model, "one part\n\nanother part\n\nx")) >= 2
    with pytest.raises(ValueError, match="two tokens"):
        sequences_of(model, "")


COMPRESSED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("to", TARGETS)
def test_transformers_reads_the_same_weights(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantized by compressed-tensors, they are those that we dequantize, and give the same tokens."""
    source, out = make_tiny_model(tmp_path / "model", **COMPRESSED), tmp_path / "out"
    report = quantize(source, out, TARGETS[to], 1, lambda _done, _total: None)
    assert report.format == to
    assert 0 < report.relative < {"w4a16-g128": 0.15, "w4a16-g32": 0.12, "w8a8": 0.01, "fp8": 0.04}[to]
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    layer = runner_of(load(out, dtype="float32"))._model.layers[0]
    state = decompressed(out)
    q, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    rows = state[q].shape[0]
    assert torch.equal(layer.attention.qkv.weight_OI[:rows].bfloat16(), state[q])
    assert torch.equal(layer.mlp.down.weight_OI.bfloat16(), state[down])
    same = make_tiny_model(tmp_path / "same", **{**COMPRESSED, "torch_dtype": "float32"})
    packed = load_file(out / "model.safetensors")
    wide = {name: tensor for name, tensor in packed.items() if tensor.is_floating_point()}
    for name in [name for name in wide if name.endswith("weight_scale")]:
        del wide[name]
    for number, each in enumerate(runner_of(load(out, dtype="float32"))._model.layers):
        wide |= parts_of(f"model.layers.{number}.", each, load_file(source / "model.safetensors"))
    save_file(
        {name: tensor.float().contiguous() for name, tensor in wide.items()}, same / "model.safetensors"
    )
    assert answer(out, dtype="float32") == hf_tokens(hf_model(same), PROMPT, 12)


def parts_of(prefix: str, layer: Any, original: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stacks = {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): layer.attention.qkv,
        ("self_attn.o_proj",): layer.attention.output,
        ("mlp.gate_proj", "mlp.up_proj"): layer.mlp.gate_up,
        ("mlp.down_proj",): layer.mlp.down,
    }
    found = {}
    for names, packed in stacks.items():
        rows = [len(original[f"{prefix}{name}.weight"]) for name in names]
        parts = packed.weight_OI.split(rows)
        found |= {f"{prefix}{name}.weight": part for name, part in zip(names, parts, strict=True)}
    return found


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """By transformers, with compressed-tensors."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=torch.bfloat16
    )
    return model.state_dict()


@pytest.mark.parametrize(
    ("arch", "up", "head"),
    [
        ("gpt_neox", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "embed_out.weight"),
        ("opt", "model.decoder.layers.0.fc1.weight", "model.decoder.embed_tokens.weight"),
    ],
)
def test_transformers_reads_the_names_that_a_family_has(
    tmp_path: Path, arch: str, up: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make_tiny_model(tmp_path / "model", arch=arch, tokenizer=False), tmp_path / "out"
    quantize(source, out, TARGETS["w8a8"], 1, lambda _done, _total: None)
    original = hf_model(source).state_dict()
    assert tokens(load(out), [ask("a", PROMPT, 4)])["a"]
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    ours = runner_of(load(out, dtype="float32"))._model.layers[0].mlp.gate_up
    state = decompressed(out)
    assert torch.equal(state[up].float(), ours.weight_OI.bfloat16().float())
    assert head in load_file(out / "model.safetensors")
    assert torch.equal(state["lm_head.weight"].float(), original["lm_head.weight"].bfloat16().float())


@pytest.mark.parametrize("to", ["w4a16-g32", "w8a8"])
def test_a_compressed_checkpoint_loads_in_its_own_bits(tmp_path: Path, to: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch="phi3", **COMPRESSED)
    quantize(source, tmp_path / "out", TARGETS[to], 1, lambda _done, _total: None)
    names = load_file(tmp_path / "out/model.safetensors")
    end = "weight_packed" if to == "w4a16-g32" else "weight"
    assert f"model.layers.0.self_attn.qkv_proj.{end}" in names, "as other tools expect it"
    engine = load(tmp_path / "out")
    assert engine.info.quant == TARGETS[to].quant.name
    assert len(tokens(engine, [ask("a", PROMPT, 4)])["a"]) == 4


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", hidden_size=70)
    with pytest.raises(ModelError, match=r"70 inputs, which groups of 128 do not divide: use --to w8a8"):
        quantize(source, tmp_path / "out", TARGETS["w4a16-g128"], 1, lambda _done, _total: None)
    assert not (tmp_path / "out").exists()
