"""Encoders as GGUF files, as llama.cpp writes them: the vectors of their checkpoints."""

import json
import re
import shutil
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

from llmbox.app.errors import CliError
from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.app.models.gguf_folders import folder_of
from llmbox.app.text.reranker import read_classifier
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.folder import vector_files
from llmbox.engine.gguf.matrices import check_matrices
from llmbox.engine.gguf.reader import GgufFile, read_gguf
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model_config.encoders.config import read_prompts
from llmbox.engine.quantize.convert_gguf import convert
from llmbox.engine.sampling_params import Pooling, SamplingParams
from llmbox.kernels.dispatch import native_ready
from support.encoder_models import (
    EMBEDDING_GEMMA,
    change_config,
    declare_vectors,
    make_encoder,
    make_jina_reranker,
    make_jina_v3,
    make_nomic_v2,
)
from support.gguf_models import add_blocks_or_floats, add_settings, write_all, write_gguf
from support.real_engines import load, run
from support.tiny_models import make_tiny_model, write_json

TEXTS = {"one": [7], "short": [3, 9, 11, 300, 4], "long": [3 + 7 * i % 300 for i in range(70)]}
ARCHITECTURES = {
    "bert": "BERT",
    "distilbert": "BERT",
    "xlm-roberta": "BERT",
    "jina_reranker": "BERT",
    "nomic_bert": "NOMIC_BERT",
    "nomic_v2": "NOMIC_BERT_MOE",
    "modernbert": "MODERN_BERT",
    "jina": "JINA_BERT_V2",
    "jina_v3": "JINA_BERT_V3",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
JINA: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "model_type": "bert",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "hidden_act": "gelu",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "dtype": "float32",
}


def vectors(
    model: Path, names: Iterable[str] = tuple(TEXTS), pooling: Pooling = "embed", **options: Any
) -> dict[str, torch.Tensor]:
    params = SamplingParams(max_tokens=0, pooling=pooling)
    asked = [AddRequest(request_id=name, prompt_ids=TEXTS[name], params=params) for name in names]
    engine = load(model, **options)
    assert not engine.info.generates
    return {name: torch.tensor(array("f", out.vector)) for name, (out,) in run(engine, asked).items()}


def with_usual_names(config: dict[str, Any]) -> dict[str, Any]:
    """Values of a config under the names that most have."""
    others = {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }
    return config | {usual: config[name] for name, usual in others.items() if name in config}


def make_source(folder: Path, kind: str) -> Path:
    if kind == "nomic_v2":
        folder.mkdir()
        weights = make_nomic_v2(folder, 64, 96)
        biases = {name: 0 * weights[name] for name in weights if name.endswith("experts.bias")}
        save_tensors(weights | biases, folder / "model.safetensors")
        return folder
    if kind in {"jina_v3", "jina_reranker"}:
        (make_jina_v3 if kind == "jina_v3" else make_jina_reranker)(folder)
        return folder
    if kind != "jina":
        make_encoder(folder, kind)
        return folder
    bert = folder.with_name("bert")
    make_encoder(bert, "bert", **{key: JINA[key] for key in ("num_hidden_layers", "max_position_embeddings")})
    arrays = load_file(bert / "model.safetensors")
    found = {name: array for name, array in arrays.items() if "pooler" not in name and "position" not in name}
    for layer in (f"encoder.layer.{number}." for number in range(2)):
        up = found.pop(f"{layer}intermediate.dense.weight")
        del found[f"{layer}intermediate.dense.bias"]
        found[f"{layer}mlp.gated_layers.weight"] = np.concatenate([0.5 - up, up])
        for kind_of in ("weight", "bias"):
            found[f"{layer}mlp.wo.{kind_of}"] = found.pop(f"{layer}output.dense.{kind_of}")
            found[f"{layer}mlp.layernorm.{kind_of}"] = found.pop(f"{layer}output.LayerNorm.{kind_of}")
    folder.mkdir()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", JINA)
    return folder


def write_encoder(
    model: Path,
    file: Path,
    kind: str,
    blocks: str | Callable[[str], str] = "F32",
    *,
    is_stacked: bool = False,
    **extra: Any,
) -> Path:
    """Write the model of a folder. `is_stacked`: gate and up of an MLP as one tensor."""
    config = with_usual_names(json.loads((model / "config.json").read_text()))
    arch = gguf.MODEL_ARCH[ARCHITECTURES[kind]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    offset = 2 if kind in {"xlm-roberta", "jina_v3", "jina_reranker"} else 0
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("norm_eps" if kind == "modernbert" else "layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    if kind in {"nomic_bert", "nomic_v2", "jina_v3"}:
        writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    if kind == "nomic_v2":
        writer.add_moe_every_n_layers(config["moe_every_n_layers"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["moe_top_k"])
    if kind == "modernbert":
        ropes = config["rope_parameters"]
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config["local_attention"])
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*WORDS, *(f"▁w{number}" for number in range(320 - len(WORDS)))])
    writer.add_token_types([gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * 315)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for seed, (name, whole) in enumerate(load_file(model / "model.safetensors").items()):
        stored = whole[offset:] if "position_embeddings" in name else whole
        parts = {name: stored}
        if "gated_layers" in name and not is_stacked:
            gate, up = np.split(whole, 2)
            parts = {name.replace("layers.w", "layers_w.w"): gate, name.replace("layers.w", "layers_v.w"): up}
        if "experts.mlp.w" in name:  # [experts, outputs, inputs]
            stack = whole.reshape(config["num_experts"], config["n_inner"], config["n_embd"])
            parts = {f"{name}.weight": stack if name.endswith("w1") else stack.swapaxes(1, 2).copy()}
        for part, values in parts.items():
            plain = part.removeprefix("roberta.").replace(".parametrizations.weight.original", ".weight")
            if kind in {"modernbert", "distilbert"}:  # as the converter, for models with labels
                plain = plain.removeprefix("model.").removeprefix("distilbert.")
                plain = re.sub(r"^classifier\.", "classifier.out_proj.", plain)
            place = names.get_name(plain, try_suffixes=(".weight", ".bias"))
            if place is not None and "pooler" not in part:
                is_table = place.startswith(("position", "token_types"))
                add_blocks_or_floats(writer, place, values, "F32" if is_table else blocks, seed)
    write_all(writer)
    return file


@pytest.mark.parametrize("kind", [*sorted(set(ARCHITECTURES) - {"jina_reranker"}), "stacked jina"])
def test_vectors_are_those_of_the_source(tmp_path: Path, kind: str) -> None:
    kind, is_stacked = kind.removeprefix("stacked "), kind.startswith("stacked")
    source = make_source(tmp_path / "model", kind)
    file = write_encoder(source, tmp_path / "tiny.gguf", kind, is_stacked=is_stacked)
    check_matrices(read_gguf(file))
    folder = folder_of(file, tmp_path / "home")
    found, wanted = vectors(folder), vectors(source)
    assert found.keys() == wanted.keys()
    for name in TEXTS:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    assert local_facts(directory(folder)).notes == ()


def make_embedding_gemma(folder: Path) -> list[torch.Tensor]:
    """Write an EmbeddingGemma, and return the weights of its dense layers."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(3)
    model = Gemma3TextModel(Gemma3TextConfig(**{**EMBEDDING_GEMMA, "pad_token_id": 0})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    write_json(folder / "config.json", EMBEDDING_GEMMA)
    return declare_vectors(folder, dense=((64, 96, "linear.Identity"), (96, 48, "linear.Identity")))


def write_embedding_gemma(
    model: Path, file: Path, dense: list[torch.Tensor], blocks: str = "F32", **extra: Any
) -> Path:
    """Write the model of a folder, with its dense layers."""
    writer = gguf.GGUFWriter(file, "gemma-embedding")
    add_settings(writer, EMBEDDING_GEMMA)
    writer.add_causal_attention(False)
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "a"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*words, *(f"▁w{number}" for number in range(320 - len(words)))])
    writer.add_token_scores([0.0] * 320)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * 316)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA_EMBEDDING, 3)
    arrays = load_file(model / "model.safetensors")
    for number, weight in enumerate(dense, 2):
        writer.add_dense_features_dims(f"dense_{number}", *weight.shape[::-1])
        arrays[f"dense_{number}_out.weight"] = weight.numpy()
    for seed, (name, values) in enumerate(arrays.items()):
        place = names.get_name(name, try_suffixes=(".weight",))
        assert place is not None, name
        add_blocks_or_floats(writer, place, values + place.endswith("norm.weight"), blocks, seed)
    write_all(writer)
    return file


@pytest.mark.parametrize("with_dense", [True, False])
def test_embedding_gemma_with_its_dense_layers_or_without(tmp_path: Path, with_dense: bool) -> None:
    dense = make_embedding_gemma(source := tmp_path / "model")
    if not with_dense:
        dense = []
        shutil.rmtree(source / "3_Dense")
        shutil.rmtree(source / "2_Dense")
        (source / "modules.json").unlink()
    mean = {"pooling_type": gguf.PoolingType.MEAN}
    file = write_embedding_gemma(source, tmp_path / "t.gguf", dense, **mean)
    check_matrices(read_gguf(file))
    folder = folder_of(file, tmp_path / "home")
    assert local_facts(directory(folder)).notes == ()
    found, wanted = vectors(folder), vectors(source)
    for name in TEXTS:
        assert found[name].shape == ((48,) if with_dense else (64,))
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    assert load_model_text(folder).encode("a") == [2, 4, 1]
    prompts, default = read_prompts(folder)
    assert (prompts["document"], default) == ("title: none | text: ", None)


@pytest.mark.parametrize(
    ("extra", "kinds"),
    [
        ({"sliding_window_pattern": 2}, "sfs"),
        ({"sliding_window_pattern": [False, True, True], "rope_freq_base_swa": 500.0}, "fss"),
    ],
)
def test_layers_of_an_embedding_gemma_by_its_file(tmp_path: Path, extra: dict[str, Any], kinds: str) -> None:
    dense = make_embedding_gemma(source := tmp_path / "model")
    names = {"s": "sliding_attention", "f": "full_attention"}
    local = extra.get("rope_freq_base_swa", 1e4)
    change_config(source, layer_types=[names[kind] for kind in kinds], rope_local_base_freq=local)
    file = write_embedding_gemma(source, tmp_path / "t.gguf", dense, **extra)
    found, wanted = vectors(folder_of(file, tmp_path / "home")), vectors(source)
    for name in TEXTS:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_blocks_of_an_embedding_gemma(tmp_path: Path) -> None:
    dense = make_embedding_gemma(source := tmp_path / "model")
    folder = folder_of(write_embedding_gemma(source, tmp_path / "t.gguf", dense, "Q8_0"), tmp_path / "home")
    found, wanted = vectors(folder, dtype="float32"), vectors(source)
    for name in TEXTS:
        assert torch.cosine_similarity(found[name], wanted[name], dim=0) > 0.995


@pytest.mark.parametrize("pattern", [2, [True, False, True, True]])
def test_layers_of_a_modernbert_by_the_pattern_of_its_file(tmp_path: Path, pattern: int | list[bool]) -> None:
    kinds = ["sliding_attention", "full_attention"]
    every = [kinds[not slides] for slides in (pattern if isinstance(pattern, list) else [0, 1, 0, 1])]
    make_encoder(source := tmp_path / "model", "modernbert", layer_types=every)
    file = write_encoder(source, tmp_path / "t.gguf", "modernbert", sliding_window_pattern=pattern)
    found, wanted = vectors(folder_of(file, tmp_path / "home")), vectors(source)
    for name in TEXTS:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def test_pooling_is_that_of_the_file(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", "bert")
    file = write_encoder(source, tmp_path / "t.gguf", "bert", pooling_type=gguf.PoolingType.CLS)
    declare_vectors(source, "cls_token")
    found, wanted = vectors(folder_of(file, tmp_path / "home")), vectors(source)
    for name in TEXTS:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [("xlm-roberta", 1), ("xlm-roberta", 3), ("modernbert", 1), ("jina_reranker", 1), ("distilbert", 3)],
)
def test_scores_of_a_reranker_are_those_of_the_source(tmp_path: Path, kind: str, labels: int) -> None:
    source, more = tmp_path / "model", {"classifier_pooling": "mean"} if kind == "modernbert" else {}
    if kind == "jina_reranker":
        make_source(source, kind)
    else:
        make_encoder(source, kind, "ForSequenceClassification", num_labels=labels, **more)
    names = [f"label {number}" for number in range(labels)]
    more = {"pooling_type": gguf.PoolingType.RANK, "classifier_output_labels": names}
    file = write_encoder(source, tmp_path / "t.gguf", kind, **more)
    check_matrices(read_gguf(file))
    folder = folder_of(file, tmp_path / "home")
    assert load(folder).info.num_labels == labels
    found_names = read_classifier(folder, 0.0, labels)
    assert found_names is not None
    assert found_names.labels == names
    found, wanted = (vectors(each, pooling="classify") for each in (folder, source))
    for name in TEXTS:
        assert found[name].shape == (labels,)
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    assert local_facts(directory(folder)).notes == ()


@pytest.mark.parametrize(("kind", "pooling"), [("MEAN", "mean"), ("LAST", "last")])
def test_a_decoder_for_embeddings_pools_as_its_file_says(tmp_path: Path, kind: str, pooling: Pooling) -> None:
    """Vectors alone: no text comes out of it. Its tokenizer puts the end behind a text."""
    source = make_tiny_model(tmp_path / "model", arch="qwen3")
    number = gguf.PoolingType[kind].value
    folder = folder_of(write_gguf(source, tmp_path / "t.gguf", pooling_type=number), tmp_path / "home")
    engine = load(folder)
    assert (engine.info.generates, engine.info.pooling, engine.info.pooling_problem) == (False, pooling, "")
    found = vectors(folder, pooling=pooling)
    params = SamplingParams(max_tokens=0, pooling=pooling)
    asked = [AddRequest(request_id=name, prompt_ids=TEXTS[name], params=params) for name in TEXTS]
    for name, (out,) in run(load(source), asked).items():
        torch.testing.assert_close(found[name], torch.tensor(array("f", out.vector)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "rows", "labels", "why"),
    [
        ("llama", 0, None, "rerankers of llama cannot be read from GGUF, of decoders only those of Qwen3"),
        (
            "qwen3",
            3,
            None,
            "'cls.output.weight' has shape [3, 64], the file's metadata require [1, 64]",
        ),
        ("qwen3", 2, ["yes"], "'cls.output.weight' has shape [2, 64]"),
        ("qwen3", 2, ["good", "bad"], "qwen3.classifier.output_labels must be yes and no, or one label"),
    ],
)
def test_other_rerankers_of_decoders_are_refused(
    tmp_path: Path, arch: str, rows: int, labels: list[str] | None, why: str
) -> None:
    """`fit` and `load` both name the file first, and a folder is made of it."""
    source = make_tiny_model(tmp_path / "model", arch=arch)
    arrays = load_file(source / "model.safetensors")
    if rows:
        arrays["cls.output.weight"] = np.ones((rows, 64), np.float32)
    save_file(arrays, source / "model.safetensors", metadata={"format": "pt"})
    more: dict[str, Any] = {} if labels is None else {"classifier__output_labels": labels}
    number = gguf.PoolingType.RANK.value
    ranks = write_gguf(source, tmp_path / "ranks.gguf", pooling_type=number, **more)
    with pytest.raises(CliError) as refused:
        folder_of(ranks, tmp_path / "home")
    assert why in refused.value.why


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """The header of a file with three labels."""
    root = tmp_path_factory.mktemp("classifier")
    make_encoder(source := root / "model", "xlm-roberta", "ForSequenceClassification", num_labels=3)
    return read_gguf(write_encoder(source, root / "t.gguf", "xlm-roberta"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cls.output.bias": None}, "'cls.output.bias' is missing"),
        ({"cls.output.bias": (2,)}, "'cls.output.bias' has shape [2]"),
        ({"cls.bias": None}, "'cls.bias' is missing"),
        ({"cls.weight": (64, 32)}, "'cls.weight' has shape [64, 32]"),
        ({"cls.weight": None}, "only RoBERTa, XLM-R, DistilBERT and ModernBERT"),
        ({"labels": ["a", "b"]}, "bert.classifier.output_labels must be 3 texts"),
        ({"labels": [1, 2, 3]}, "bert.classifier.output_labels must be 3 texts"),
    ],
)
def test_damaged_heads_are_refused_by_name(classifier: GgufFile, change: dict[str, Any], why: str) -> None:
    """From the header alone, so that `fit` says it too."""
    labels = change.get("labels", ["a", "b", "c"])
    metadata = {**classifier.metadata, "bert.classifier.output_labels": labels}
    tensors = dict(classifier.tensors)
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        elif name != "labels":
            tensors[name] = replace(tensors[name], shape=shape)
    damaged = replace(classifier, metadata=metadata, tensors=tensors)

    def read_head() -> None:
        check_matrices(damaged)
        vector_files(damaged)

    with pytest.raises(ModelError) as refused:
        read_head()
    assert why in str(refused.value)


def test_import_refuses_them(tmp_path: Path) -> None:
    file = write_encoder(make_source(tmp_path / "model", "bert"), tmp_path / "t.gguf", "bert")
    with pytest.raises(ModelError, match="are served as they are"):
        convert(read_gguf(file), tmp_path / "out", None, None, 1, lambda _done, _total: None)


@pytest.mark.parametrize(
    ("pooling", "why"),
    [
        (gguf.PoolingType.RANK, "only RoBERTa, XLM-R, DistilBERT and ModernBERT"),
        (SimpleNamespace(value=9), "pooling_type is 9, 0 to 4 is known"),
    ],
)
def test_rerankers_and_unknown_poolings_are_refused(tmp_path: Path, pooling: Any, why: str) -> None:
    source = make_source(tmp_path / "model", "bert")
    file = write_encoder(source, tmp_path / "t.gguf", "bert", pooling_type=pooling)
    with pytest.raises(CliError, match="cannot be served") as refused:
        folder_of(file, tmp_path / "home")
    assert why in str(refused.value.why)


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("kind", ["bert", "nomic_bert", "nomic_v2", "modernbert"])
def test_blocks_give_nearly_the_vectors_of_the_floats(tmp_path: Path, kind: str) -> None:
    """The same bits alone and in a batch too."""
    source = make_source(tmp_path / "model", kind)
    folder = folder_of(write_encoder(source, tmp_path / "t.gguf", kind, "Q8_0"), tmp_path / "home")
    found, wanted = vectors(folder, dtype="float32"), vectors(source)
    for name in TEXTS:
        assert torch.cosine_similarity(found[name], wanted[name], dim=0) > 0.995
        assert torch.equal(vectors(folder, [name], dtype="float32")[name], found[name])
