"""From GGUF to a checkpoint: the same tensors, the same settings, the same answers."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file

from llmbox.engine.errors import ModelError, UnsupportedArchitecture
from llmbox.engine.gguf.config import config_of, llama3_factors
from llmbox.engine.gguf.reader import read_gguf
from llmbox.engine.model.rotary import inverse_frequencies
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.convert_gguf import ConversionReport, convert
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.gguf_models import ARCHITECTURES, write_gguf
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

PROMPT = list(range(5, 25))
needs_kernels = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")


def imported(file: Path, out: Path, to: str = "none") -> ConversionReport:
    quant = None if to == "none" else QUANTS[to]
    return convert(read_gguf(file), out, quant, None, 1, lambda _done, _total: None)


def answer(model: Path, **options: Any) -> list[int]:
    return tokens(load(model, **options), [ask("a", PROMPT, 12)])["a"]


SAID_BY_NOBODY = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
}
"""What a file leaves out is as in the published models."""


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_floats_come_back_to_the_bit(tmp_path: Path, arch: str, tied: bool) -> None:
    changes = SAID_BY_NOBODY.get(arch, {})
    tied = tied or arch.startswith("gemma")
    source = make_tiny_model(tmp_path / "model", arch=arch, tie_word_embeddings=tied, **changes)
    report = imported(write_gguf(source, tmp_path / "model.gguf"), tmp_path / "out")
    wanted, found = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert set(found) == set(wanted)
    for name in wanted:
        if arch.startswith("gemma") and name.endswith("norm.weight"):  # 1 + w in float32, as it is used
            torch.testing.assert_close(1 + found[name], 1 + wanted[name], rtol=0, atol=0)
        else:
            assert torch.equal(found[name], wanted[name])
    assert (report.format, report.tensors, report.kept) == ("none", 0, len(wanted))
    before, after = parse_config(source), parse_config(tmp_path / "out")
    if arch == "mistral":  # without a window it is Llama
        assert after.model_type == "llama"
    else:
        assert after == before
    assert answer(tmp_path / "out") == answer(source)


@pytest.mark.parametrize(
    ("arch", "of"), [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3_moe")]
)
def test_the_language_part_of_a_qwen_that_sees(tmp_path: Path, arch: str, of: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch=of)
    sections = {"rope__dimension_sections": [3, 3, 2, 0]}
    imported(write_gguf(source, tmp_path / "model.gguf", arch=arch, **sections), tmp_path / "out")
    assert parse_config(tmp_path / "out") == parse_config(source)


def test_biases_and_a_window(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "llama", arch="llama", attention_bias=True, mlp_bias=True)
    imported(write_gguf(source, tmp_path / "model.gguf"), tmp_path / "out")
    assert parse_config(tmp_path / "out") == parse_config(source)
    assert answer(tmp_path / "out") == answer(source)
    slides = make_tiny_model(tmp_path / "mistral", arch="mistral", sliding_window=16)
    imported(write_gguf(slides, tmp_path / "slides.gguf"), tmp_path / "slid")
    assert parse_config(tmp_path / "slid") == parse_config(slides)


@needs_kernels
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_q8_0_keeps_its_integers(tmp_path: Path, arch: str) -> None:
    """int8-g32 has the grid of Q8_0: numbers and scales are those of the file."""
    source = make_tiny_model(tmp_path / "model", arch=arch)
    file = write_gguf(source, tmp_path / "model.gguf", "Q8_0")
    report = imported(file, tmp_path / "out", "int8-g32")
    assert report.relative == 0.0
    found = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    each = next(each for each in gguf.GGUFReader(file).tensors if each.name == "blk.1.ffn_down.weight")
    wanted = dequantize(each.data, each.tensor_type)
    scales = found[f"{name}_scale"].float().repeat_interleave(32, 1)
    np.testing.assert_array_equal((found[name].float() * scales).numpy(), wanted)
    assert len(answer(tmp_path / "out")) == 12


@needs_kernels
def test_rounded_weights_are_rounded_once_more(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen2", intermediate_size=128)
    file = write_gguf(source, tmp_path / "model.gguf", "Q4_0")
    report = imported(file, tmp_path / "out", "int8")
    assert 0 < report.relative < 0.01
    assert report.bytes_after < report.bytes_before * 4
    assert parse_config(tmp_path / "out").quant == "int8"
    wide = imported(file, tmp_path / "wide")
    assert (wide.format, parse_config(tmp_path / "wide").dtype) == ("none", "bfloat16")


def test_positions_of_llama_3(tmp_path: Path) -> None:
    """Its file has what the rule gives; the rule is found again, or the factors are taken as they are."""
    source = make_tiny_model(tmp_path / "model", arch="llama")
    written = read_gguf(write_gguf(source, tmp_path / "model.gguf"))
    plain = inverse_frequencies(parse_config(source), parse_config(source).rope, 256)
    for factors in (llama3_factors(8.0, 10000.0, 16), [1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0]):
        folder = tmp_path / f"{factors[3]:.3f}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_of(written, {"rope_freqs.weight": factors})))
        config = parse_config(folder)
        torch.testing.assert_close(
            inverse_frequencies(config, config.rope, 256), plain / torch.tensor(factors)
        )
        assert config.rope.rope_type == ("longrope" if factors[3] == 1.5 else "llama3")


def test_longer_contexts(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen2")
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    yarn["rope__scaling__original_context_length"] = 64
    file = write_gguf(source, tmp_path / "yarn.gguf", **yarn)
    imported(file, tmp_path / "out")
    rope = parse_config(tmp_path / "out").rope
    assert (rope.rope_type, rope.factor, rope.original_context) == ("yarn", 4.0, 64)
    other = write_gguf(source, tmp_path / "other.gguf", rope__scaling__type="longrope")
    with pytest.raises(ModelError, match=r"'longrope' is not supported, only linear and yarn"):
        config_of(read_gguf(other))


def test_what_cannot_be_read(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen3")
    file = write_gguf(source, tmp_path / "model.gguf")
    raw = file.read_bytes()
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(
        raw.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0qwen3",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0rwkv6",
        )
    )
    with pytest.raises(UnsupportedArchitecture, match=r"'rwkv6' in GGUF is not supported; supported: llama"):
        config_of(read_gguf(strange))
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(raw.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xy.weight"))
    with pytest.raises(ModelError, match=r"'blk.1.ffn_up.weight' is missing"):
        imported(renamed, tmp_path / "out")
    renamed.write_bytes(raw.replace(b"blk.1.ffn_up.weight", b"blk.2.ffn_up.weight"))
    with pytest.raises(ModelError, match="missing"):
        imported(renamed, tmp_path / "out")
    more = write_gguf(source, tmp_path / "more.gguf", block_count=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError):
        imported(more, tmp_path / "out")
    assert not list(tmp_path.glob(".out.part-*"))


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "model"), tmp_path / "model.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    with pytest.raises(ModelError, match="exists already"):
        imported(file, tmp_path / "out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["mine"]
