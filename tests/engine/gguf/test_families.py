"""GGUF files of newer families, as llama.cpp writes them: the tokens of their checkpoints, blocks kept."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.app.models.gguf_folders import folder_of
from llmbox.engine.errors import ModelError, ParallelError
from llmbox.engine.gguf.config import config_of
from llmbox.engine.gguf.matrices import check_matrices
from llmbox.engine.gguf.reader import read_gguf
from llmbox.engine.gguf.tensors import GgufTensors
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.convert_gguf import convert
from llmbox.kernels.cpu.weight_packing import INT8_SCALED, WIDE_BFLOAT16
from llmbox.kernels.dispatch import native_ready
from support.draft_heads import add_mtp, ask_always, make_predictable
from support.gguf_families import FAMILIES, make_source, write_family
from support.gguf_models import q4_k_m, write_all
from support.grammars import learned
from support.real_engines import ask, load, run, runner_of, tokens

PROMPT = list(range(5, 30))
needs_kernels = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")


def answer(model: Path, max_tokens: int = 12, **options) -> list[int]:
    return tokens(load(model, **options), [ask("a", PROMPT, max_tokens)])["a"]


@pytest.mark.parametrize("family", FAMILIES)
def test_floats_answer_as_the_source(tmp_path: Path, family: str) -> None:
    source = make_source(tmp_path / "model", family)
    file = write_family(source, tmp_path / "tiny.gguf", family)
    check_matrices(read_gguf(file))
    folder = folder_of(file, tmp_path / "home")
    assert answer(folder) == answer(source)
    found, expected = local_facts(directory(folder)).config, parse_config(source)
    assert found.num_parameters == expected.num_parameters
    if expected.model_type == "granite":
        assert found.scales == expected.scales


def mixed(tensor: str) -> str:
    """Types of gpt-oss: experts in MXFP4, the rest in Q8_0."""
    return "MXFP4" if "_exps." in tensor else "Q8_0"


def iq(tensor: str) -> str:
    """Mix of the smallest types: a different one for each kind of matrix."""
    types = {"attn_q": "IQ1_S", "attn_k": "IQ1_M", "attn_v": "TQ1_0", "attn_output": "IQ2_XXS"}
    types |= {"ffn_gate": "IQ2_XS", "ffn_up": "IQ2_S", "ffn_down": "IQ3_XXS", "token_embd": "IQ3_S"}
    return types.get(tensor.split(".")[-2], "TQ2_0")


WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
SMALL = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
BLOCKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-oss": (mixed, WIDE),
    "qwen35": (q4_k_m, WIDE | DELTA),
    "qwen35moe": ("Q8_0", WIDE | DELTA | SMALL),
    "qwen3next": (q4_k_m, WIDE | DELTA | SMALL),
    "deepseek3": (
        "Q8_0",
        {"hidden_size": 128, "moe_intermediate_size": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32},
    ),
    "granitehybrid": ("Q8_0", {}),
    "nemotron_h_moe": ("Q8_0", {"moe_latent_size": 64, "moe_shared_expert_intermediate_size": 64}),
    "phi3": (q4_k_m, WIDE),
    "gemma4-moe": ("Q8_0", {"hidden_size": 128, "moe_intermediate_size": 64}),
    "gemma3n": ("Q8_0", {"hidden_size": 128, "laurel_rank": 32}),
    "seed_oss": (iq, WIDE),
    "dots1": (lambda tensor: "IQ2_XXS" if "_exps." in tensor else "Q8_0", WIDE | SMALL),
    "hunyuan-dense": ("NVFP4", WIDE),
    "starcoder2": (q4_k_m, WIDE),
    "gptneox": ("Q8_0", {}),
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
def test_heads_of_latent_attention_stay_in_blocks(tmp_path: Path) -> None:
    """A linear of a head is Q8_0 in memory, too, if its inputs are whole blocks, and bfloat16 if not."""
    forms = {}
    for keys in (32, 16):
        sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": keys}
        source = make_source(tmp_path / f"model{keys}", "deepseek3", **sizes)
        file = write_family(source, tmp_path / f"{keys}.gguf", "deepseek3", "Q8_0")
        engine = load(folder_of(file, tmp_path / f"home{keys}"))
        attention = runner_of(engine)._model.layers[0].attention
        forms[keys] = [{head.form for head in heads} for heads in (attention.keys, attention.values)]
    assert forms == {32: [{INT8_SCALED}, {INT8_SCALED}], 16: [{WIDE_BFLOAT16}, {INT8_SCALED}]}


def test_factors_beside_weights_of_nvfp4(tmp_path: Path) -> None:
    """As converters of ModelOpt's checkpoints write them: for a matrix, or each expert of a stack."""
    source = make_source(tmp_path / "model", "dots1", **WIDE | SMALL)
    scales = {"blk.0.attn_q.scale": [3.0], "blk.1.ffn_up_exps.scale": [1.0 + i for i in range(8)]}
    scales["blk.0.attn_q.input_scale"] = [7.0]
    plain, scaled = (
        open_tensors(write_family(source, tmp_path / f"{name}.gguf", "dots1", "NVFP4", extra=extra))
        for name, extra in (("plain", {}), ("scaled", scales))
    )
    for name, factor in (
        ("0.self_attn.q_proj", 3.0),
        ("1.mlp.experts.4.up_proj", 5.0),
        ("1.self_attn.k_proj", 1),
    ):
        full = f"model.layers.{name}.weight"
        shape = tuple(load_file(source / "model.safetensors")[full].shape)
        assert torch.equal(scaled.take(full, shape), plain.take(full, shape) * factor)
        assert scaled.block_type(full) is None


def open_tensors(file: Path) -> GgufTensors:
    return GgufTensors(read_gguf(file), 4, 2, lambda _done, _total: None)


@needs_kernels
def test_types_that_are_dequantized_are_told(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", "hunyuan-dense", **WIDE)
    folder = folder_of(write_family(source, tmp_path / "t.gguf", "hunyuan-dense", "NVFP4"), tmp_path / "home")
    notes = load(folder).info.notes
    assert any("GGUF NVFP4 weights are computed" in note and "dequantized once" in note for note in notes)


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


def test_a_layer_that_predicts_tokens_drafts_as_that_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_always(monkeypatch, 2)
    source = make_source(tmp_path / "model", "glm4moe")
    add_mtp(make_predictable(source), "deepseek")
    more = {"block_count": 3, "nextn_predict_layers": 1}
    folder = folder_of(write_family(source, tmp_path / "tiny.gguf", "glm4moe", **more), tmp_path / "home")
    drafted = []
    for each in (source, folder):
        engine = learned(load(each, mtp="on"))
        engine.scheduler.drafting._rows = 24
        assert tokens(engine, [ask("a", PROMPT, 24)])["a"] == answer(source, max_tokens=24, mtp="off")
        drafted.append(engine.scheduler.drafting.counts["mtp"].accepted_tokens)
    assert drafted[0] == drafted[1] > 0
    facts = local_facts(directory(folder))
    assert facts.config.num_parameters == parse_config(source).num_parameters == facts.stored_params


SHORT = dict.fromkeys(("llama.embedding_length", "llama.context_length", "llama.attention.head_count"), 8)


@pytest.mark.parametrize(
    ("arch", "keys", "tensor", "why"),
    [
        ("t5", {}, "token_embd.weight", "architecture 't5' in GGUF is not supported; supported: llama"),
        (
            "jina-bert-v3",
            {"general.type": "adapter"},
            "blk.0.attn_qkv.weight.lora_a",
            "a LoRA adapter: na",
        ),
        ("llama", {"general.type": "imatrix"}, "blk.0.attn_q.weight.counts", "is an importance matrix"),
        ("clip", {"general.type": "mmproj"}, "v.patch_embd.weight", "is a projector"),
        ("clip", {}, "v.patch_embd.weight", "is a projector"),
        (
            "qwen2",
            {"qwen2.attention.causal": False},
            "token_embd.weight",
            "both directions .* of qwen2",
        ),
        ("llama", {}, "token_embd.weight", "llama.embedding_length is missing, a positive number"),
        ("llama", SHORT | {"llama.block_count": 10**9}, "token_embd.weight", "a number up to 1024 is needed"),
        ("modern-bert", {}, "dense_2.weight", "projects the state of each token .* take a model"),
    ],
)
def test_files_of_other_kinds_are_refused_in_words(
    tmp_path: Path, arch: str, keys: dict[str, Any], tensor: str, why: str
) -> None:
    file = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(file, arch)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)
    for name in {"token_embd.weight", tensor}:
        writer.add_tensor(name, np.ones((8, 8), dtype=np.float32))
    write_all(writer)
    with pytest.raises(ModelError, match=why):
        config_of(read_gguf(file))


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
