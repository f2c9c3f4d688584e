"""GGUF files as they are: tokens as after an import, own integers where a kernel has them, bad files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.app.errors import CliError
from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import describe, directory
from llmbox.app.models.gguf_folders import folder_of
from llmbox.engine.errors import ModelError, ParallelError
from llmbox.engine.executor.load_model import WeightsWanted, from_checkpoint, model_builder
from llmbox.engine.gguf.folder import gguf_of
from llmbox.engine.gguf.reader import read_gguf
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.memory_model import weights_bytes
from llmbox.engine.quantize.convert_gguf import convert
from llmbox.engine.weights.source import WeightRequest
from llmbox.kernels.dispatch import native_ready, select_ops
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS
from support.gguf_models import ARCHITECTURES, q4_k_m, write_gguf
from support.real_engines import ask, hf_tokens, load, run, tokens
from support.tiny_models import make_tiny_model

PROMPT = list(range(5, 25))
SAID_BY_NOBODY = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
}
needs_kernels = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")


def answer(model: Path, **options) -> list[int]:
    return tokens(load(model, **options), [ask("a", PROMPT, 12)])["a"]


def imported(file: Path, out: Path, to: str | None = None) -> Path:
    convert(read_gguf(file), out, None if to is None else QUANTS[to], None, 1, lambda _done, _total: None)
    return out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_floats_answer_as_the_source(tmp_path: Path, arch: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch=arch, **SAID_BY_NOBODY.get(arch, {}))
    folder = folder_of(write_gguf(source, tmp_path / "tiny.gguf"), tmp_path / "home")
    assert folder.name == "tiny"
    assert {file.suffix for file in folder.iterdir()} == {".json", ".gguf"}
    assert answer(folder) == answer(source)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_may_be_rounded_again_on_request(tmp_path: Path, kind: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen2", intermediate_size=128)
    file = write_gguf(source, tmp_path / "tiny.gguf", kind)
    folder = folder_of(file, tmp_path / "home")
    config = parse_config(folder)
    assert (config.dtype, config.quant) == ("bfloat16", "gguf")
    assert config.stored is not None
    assert config.stored.label == f"GGUF {kind}"
    wide = imported(file, tmp_path / "wide")
    assert answer(folder, quant="int8") == answer(wide, quant="int8")


@needs_kernels
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "lfm2"])
def test_q8_0_is_computed_in_its_own_integers(tmp_path: Path, arch: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch=arch)
    file = write_gguf(source, tmp_path / "tiny.gguf", "Q8_0")
    folder = folder_of(file, tmp_path / "home")
    assert parse_config(folder).quant == "gguf"
    if arch != "qwen3_moe":
        assert answer(folder) == answer(imported(file, tmp_path / "out", "int8-g32"))
    assert len(answer(folder)) == 12


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
"""Rows of whole units of 256."""


def of_transformers(file: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model.float().eval())
    assert not model.load_state_dict(found["tensors"], strict=False).unexpected_keys
    return model


@needs_kernels
def test_a_mixture_of_types_answers_as_transformers(tmp_path: Path) -> None:
    """Weights are the same to the bit; activations have 8 bits, so log probabilities differ a little."""
    source = make_tiny_model(tmp_path / "model", arch="llama", **WIDE, num_key_value_heads=2)
    file = write_gguf(source, tmp_path / "tiny-Q4_K_M.gguf", q4_k_m)
    folder = folder_of(file, tmp_path / "home")
    config = parse_config(folder)
    assert config.stored is not None
    assert config.stored.label == "GGUF Q4_K, Q6_K"
    theirs = of_transformers(file)
    engine = load(folder, dtype="float32")
    first = run(engine, [ask("a", PROMPT, 1, logprobs=5)])["a"][-1]
    expected = theirs(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert first.logprobs is not None
    for token, logprob in first.logprobs[0].top:
        assert logprob == pytest.approx(float(expected[token]), abs=0.15)
    assert tokens(engine, [ask("b", PROMPT, 6)])["b"] == hf_tokens(theirs, PROMPT, 6)


@needs_kernels
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_blocks_answer_alone_as_in_a_batch_and_from_the_packed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    experts = {"moe_intermediate_size": 256} if arch == "qwen3_moe" else {}
    source = make_tiny_model(tmp_path / "model", arch=arch, **WIDE, **experts, num_key_value_heads=2)
    folder = folder_of(write_gguf(source, tmp_path / "tiny.gguf", q4_k_m), tmp_path / "home")
    alone = answer(folder)
    asked = [ask(str(i), [*PROMPT, *range(i)], 12) for i in range(9)]
    assert tokens(load(folder), asked)["0"] == alone
    config, ops = parse_config(folder), select_ops(torch.device("cpu"), torch.bfloat16, quant=QUANTS["gguf"])
    wanted = WeightsWanted(folder, ops, torch.bfloat16, torch.device("cpu"), "gguf")
    keeper = Sizes(ops)
    from_checkpoint(config, wanted, lambda _done, _total: None, model_builder(config, wanted), keeper)
    planned = weights_bytes(config.shape(None), "bfloat16", QUANTS["gguf"])
    assert keeper.nbytes == pytest.approx(planned, rel=0.03)


class Sizes:
    """Counts the bytes of the weights of a load."""

    def __init__(self, ops: Ops) -> None:
        self.ops, self.nbytes = ops, 0

    def vector(self, name: str, vector: torch.Tensor) -> None:
        self.nbytes += vector.nbytes

    def packed(self, asked: WeightRequest, packed: Any, bias_O: torch.Tensor | None) -> None:
        assert self.ops.packing is not None
        self.nbytes += len(self.ops.packing.panels(packed))


@needs_kernels
def test_units_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="llama", **WIDE, num_key_value_heads=2)
    folder = folder_of(write_gguf(source, tmp_path / "tiny.gguf", q4_k_m), tmp_path / "home")
    with pytest.raises(ParallelError, match="groups of 256 inputs, and a part of attention has 128"):
        load(folder, tp=2, threads=2)


@needs_kernels
def test_ranks_read_their_shards(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="llama", num_key_value_heads=2)
    folder = folder_of(write_gguf(source, tmp_path / "tiny.gguf"), tmp_path / "home")
    assert answer(folder, tp=2, threads=2) == answer(source, tp=2, threads=2)


@needs_kernels
def test_ranks_read_their_experts(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen3_moe")
    folder = folder_of(write_gguf(source, tmp_path / "tiny.gguf", "Q8_0"), tmp_path / "home")
    whole = answer(folder, dtype="float32")
    assert answer(folder, dtype="float32", tp=2, expert_parallel=True, threads=2) == whole


def test_linear_rope_scaling_as_files_of_2023_say_it(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", arch="llama")
    file = write_gguf(source, tmp_path / "tiny.gguf", rope__scale_linear=4.0)
    config = json.loads((folder_of(file, tmp_path / "home") / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def test_a_folder_is_made_once_and_anew_when_the_file_changes(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    file, home = write_gguf(source, tmp_path / "tiny.gguf", parts=2), tmp_path / "home"
    folder = folder_of(file, home)
    assert folder_of(file, home) == folder
    assert gguf_of(folder) == file
    file.write_bytes(file.read_bytes() + b"\0" * 32)
    assert folder_of(file, home) != folder
    assert not folder.exists()


def test_bad_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source, home = make_tiny_model(tmp_path / "model", arch="llama"), tmp_path / "home"
    file = write_gguf(source, tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    cases = {
        "cut short": whole[:1000],
        "gpt-9": whole.replace(b"gpt-2", b"gpt-9"),
        "llamb": whole.replace(b"llama", b"llamb"),
    }
    for words, damaged in cases.items():
        file.write_bytes(damaged)
        with pytest.raises(CliError) as refused:
            folder_of(file, home)
        assert words in refused.value.why
        assert not home.exists() or list(home.iterdir()) == []


def test_fit_refuses_matrices_that_the_metadata_do_not_describe(tmp_path: Path) -> None:
    source, home = make_tiny_model(tmp_path / "model", arch="llama"), tmp_path / "home"
    whole = write_gguf(source, tmp_path / "tiny.gguf", "Q8_0").read_bytes()
    folder_of(tmp_path / "tiny.gguf", home)
    cases = {
        "blk.1.ffn_up.weight": (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight", "is missing"),
        "blk.0.attn_q.weight": (b"blk.0.attn_q.weight", b"blk.0.attn_q.weighs", "is missing"),
    }
    for i, (name, (old, new, words)) in enumerate(cases.items()):
        file = tmp_path / f"bad-{i}.gguf"
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=words) as refused:
            local_facts(directory(folder_of(file, home)))
        assert name in str(refused.value)
    facts = local_facts(directory(folder_of(tmp_path / "tiny.gguf", home)))
    assert facts.stored_bytes < len(whole)


def test_a_repository_s_own_gguf_file_does_not_hide_its_safetensors(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "blob").write_bytes(b"GGUF")
    (model / "model.gguf").symlink_to(tmp_path / "blob")
    assert gguf_of(model) is None
    assert describe(directory(model)).servable
    (model / "model.safetensors").unlink()
    assert not describe(directory(model)).servable
