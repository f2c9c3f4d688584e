"""GGUF files of newer families, as llama.cpp writes them: the tokens of their checkpoints, blocks kept."""

from pathlib import Path
from typing import Any

import pytest

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.app.models.gguf_folders import folder_of
from llmbox.engine.errors import ModelError, ParallelError, UnsupportedArchitecture
from llmbox.engine.gguf.config import config_of
from llmbox.engine.gguf.matrices import check_matrices
from llmbox.engine.gguf.reader import read_gguf
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.convert_gguf import convert
from llmbox.kernels.dispatch import native_ready
from support.gguf_families import FAMILIES, make_source, write_family
from support.gguf_models import q4_k_m
from support.real_engines import ask, load, run, tokens

PROMPT = list(range(5, 30))
needs_kernels = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")


def answer(model: Path, **options) -> list[int]:
    return tokens(load(model, **options), [ask("a", PROMPT, 12)])["a"]


@pytest.mark.parametrize("family", FAMILIES)
def test_floats_answer_as_the_source(tmp_path: Path, family: str) -> None:
    source = make_source(tmp_path / "model", family)
    file = write_family(source, tmp_path / "tiny.gguf", family)
    check_matrices(read_gguf(file))
    folder = folder_of(file, tmp_path / "home")
    assert answer(folder) == answer(source)
    assert local_facts(directory(folder)).config.num_parameters == parse_config(source).num_parameters


def mixed(tensor: str) -> str:
    """Types of gpt-oss: experts in MXFP4, the rest in Q8_0."""
    return "MXFP4" if "_exps." in tensor else "Q8_0"


WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
SMALL = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
BLOCKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-oss": (mixed, WIDE),
    "qwen35": (q4_k_m, WIDE | DELTA),
    "qwen35moe": ("Q8_0", WIDE | DELTA | SMALL),
    "qwen3next": (q4_k_m, WIDE | DELTA | SMALL),
    "deepseek3": ("Q8_0", {"hidden_size": 128, "moe_intermediate_size": 64}),
    "granitehybrid": ("Q8_0", {}),
    "nemotron_h_moe": ("Q8_0", {"moe_latent_size": 64, "moe_shared_expert_intermediate_size": 64}),
    "phi3": (q4_k_m, WIDE),
    "gemma4-moe": ("Q8_0", {"hidden_size": 128, "moe_intermediate_size": 64}),
    "gemma3n": ("Q8_0", {"hidden_size": 128, "laurel_rank": 32}),
}


@needs_kernels
@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_answer_as_their_floats(tmp_path: Path, family: str) -> None:
    """Weights are the same to the bit; activations have 8 bits, so log probabilities differ a little."""
    kind, changes = BLOCKS[family]
    source = make_source(tmp_path / "model", family, **changes)
    file = write_family(source, tmp_path / "tiny.gguf", family, kind)
    folder = folder_of(file, tmp_path / "home")
    check_matrices(read_gguf(file))
    assert parse_config(folder).quant == "gguf"
    convert(read_gguf(file), tmp_path / "wide", None, None, 1, lambda _done, _total: None)
    found, wanted = (
        run(load(each, dtype="float32"), [ask("a", PROMPT, 1, logprobs=5)])["a"][-1]
        for each in (folder, tmp_path / "wide")
    )
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    (token, logprob), *_ = found.logprobs[0].top
    (expected, value), *_ = wanted.logprobs[0].top
    assert token == expected
    assert logprob == pytest.approx(value, abs=0.25)
    asked = [ask(str(i), [*PROMPT, *range(i)], 12) for i in range(7)]
    assert tokens(load(folder), asked)["0"] == answer(folder)


@needs_kernels
def test_value_heads_in_the_order_of_a_file_are_not_cut(tmp_path: Path) -> None:
    kind, changes = BLOCKS["qwen35"]
    source = make_source(tmp_path / "model", "qwen35", **changes)
    folder = folder_of(write_family(source, tmp_path / "tiny.gguf", "qwen35", kind), tmp_path / "home")
    with pytest.raises(ParallelError, match="value heads in the order of its GGUF file"):
        load(folder, tp=2, threads=2)


def test_layers_that_predict_tokens_are_left(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", "glm4moe")
    more = {"block_count": 3, "nextn_predict_layers": 1}
    folder = folder_of(write_family(source, tmp_path / "tiny.gguf", "glm4moe", **more), tmp_path / "home")
    assert answer(folder) == answer(source)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", "deepseek3")
    file = write_family(source, tmp_path / "tiny.gguf", "deepseek3")
    raw = file.read_bytes()
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(raw.replace(b"\x09\0\0\0\0\0\0\0deepseek2", b"\x09\0\0\0\0\0\0\0falcon-h1"))
    with pytest.raises(UnsupportedArchitecture, match=r"'falcon-h1' cannot be read from GGUF: .* is missing"):
        config_of(read_gguf(strange))


@pytest.mark.parametrize("family", ["gpt-oss", "qwen35", "deepseek3", "nemotron_h_moe"])
def test_a_missing_matrix_is_named_alike_by_fit_and_load(tmp_path: Path, family: str) -> None:
    source = make_source(tmp_path / "model", family)
    file = write_family(source, tmp_path / "tiny.gguf", family)
    names = [name for name in read_gguf(file).tensors if name.endswith(LOST)]
    file.write_bytes(file.read_bytes().replace(names[0].encode(), names[0][:-1].encode() + b"x"))
    folder = folder_of(file, tmp_path / "home")
    with pytest.raises(ModelError) as at_fit:
        local_facts(directory(folder))
    with pytest.raises(ModelError) as at_load:
        load(folder)
    assert str(at_fit.value) == str(at_load.value)
    assert repr(names[0]) in str(at_fit.value)


LOST = ("ffn_up_exps.weight", "ssm_out.weight")


@pytest.mark.parametrize(
    ("family", "key"),
    [("glm4moe", "nextn_predict_layers"), ("deepseek3", "rope__scaling__yarn_log_multiplier")],
)
def test_numbers_of_another_kind_are_refused(tmp_path: Path, family: str, key: str) -> None:
    source = make_source(tmp_path / "model", family)
    with pytest.raises(ModelError, match=key.replace("__", ".") + " is many, a number"):
        config_of(read_gguf(write_family(source, tmp_path / "tiny.gguf", family, **{key: "many"})))
