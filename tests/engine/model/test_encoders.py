"""Encoders: vectors and scores of transformers, and the same bits alone and in a batch."""

from array import array
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.errors import ModelError
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.expected_tensors import check_weights
from llmbox.engine.sampling_params import SamplingParams
from support.encoder_models import (
    EMBEDDING_GEMMA,
    ENCODERS,
    change_config,
    declare_vectors,
    make_encoder,
    make_jina_reranker,
    make_jina_v3,
    make_nomic_v2,
    with_task,
    write_encoder,
)
from support.real_engines import load, run
from support.tiny_models import write_json

TEXTS = {"one": [7], "short": [3, 9, 11, 300, 4], "long": [3 + 7 * i % 300 for i in range(79)]}


def ask(name: str, ids: list[int], pooling: Any = "embed", **params: Any) -> AddRequest:
    return AddRequest(
        request_id=name, prompt_ids=ids, params=SamplingParams(max_tokens=0, pooling=pooling, **params)
    )


def vectors(engine: Any, requests: list[AddRequest]) -> dict[str, torch.Tensor]:
    found = {}
    for name, (output,) in run(engine, requests).items():
        assert output.finish_reason == "stop", output
        found[name] = torch.tensor(array("f", output.vector))
    return found


@torch.inference_mode()
def states(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("kind", ENCODERS)
def test_vectors_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = make_encoder(tmp_path, kind)
    engine = load(tmp_path)
    assert (engine.info.generates, engine.info.pooling, engine.info.kv_bytes) == (False, "embed", 0)
    found = vectors(engine, [ask(name, ids) for name, ids in TEXTS.items()])
    for name, ids in TEXTS.items():
        torch.testing.assert_close(found[name], states(model, ids).mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(set(ENCODERS) - {"jina_embeddings_v3"}))
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = make_encoder(tmp_path, kind, "ForSequenceClassification", num_labels=1)
    engine = load(tmp_path)
    assert (engine.info.pooling, engine.info.num_labels) == ("classify", 1)
    found = vectors(engine, [ask(name, ids, "classify") for name, ids in TEXTS.items()])
    for name, ids in TEXTS.items():
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(found[name], logits, rtol=1e-5, atol=1e-5)


BATCH = {f"text {n}": [3 + (7 * i + n) % 300 for i in range(1 + 13 * n % 79)] for n in range(12)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("bert", "float32"), ("mpnet", "bfloat16"), ("modernbert", "float32"), ("nomic_bert", "bfloat16")],
)
def test_a_text_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path, kind: str, dtype: Any) -> None:
    make_encoder(tmp_path, kind)
    engine = load(tmp_path, dtype=dtype, threads=2)
    alone = {name: vectors(engine, [ask(name, ids)])[name] for name, ids in BATCH.items()}
    requests = [ask(name, ids) for name, ids in BATCH.items()]
    for options in ({}, {"max_running": 5, "token_budget": 16}):
        found = vectors(load(tmp_path, dtype=dtype, threads=2, **options), requests)
        assert all(torch.equal(found[name], alone[name]) for name in BATCH)


def test_long_texts_in_windows(tmp_path: Path) -> None:
    """Queries are computed in parts, which see the tokens within reach."""
    model = make_encoder(tmp_path, "modernbert", max_position_embeddings=700)
    ids = [3 + 7 * i % 300 for i in range(700)]
    found = vectors(load(tmp_path), [ask("long", ids)])["long"]
    torch.testing.assert_close(found, states(model, ids).mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["cls_token", "lasttoken", "max_tokens", "weightedmean_tokens"])
def test_declared_pooling(tmp_path: Path, mode: str) -> None:
    model = make_encoder(tmp_path, "bert")
    declare_vectors(tmp_path, mode)
    rows = states(model, TEXTS["short"])
    weights = torch.arange(1.0, 6.0)
    expected = {
        "cls_token": rows[0],
        "lasttoken": rows[-1],
        "max_tokens": rows.max(0).values,
        "weightedmean_tokens": (rows * weights.unsqueeze(1)).sum(0) / weights.sum(),
    }
    found = vectors(load(tmp_path), [ask("a", TEXTS["short"])])["a"]
    torch.testing.assert_close(found, expected[mode], rtol=1e-5, atol=1e-5)


GEMMA = EMBEDDING_GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def test_embedding_gemma(tmp_path: Path) -> None:
    """Gemma 3 in both directions, with dense layers after the mean."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(3)
    model = Gemma3TextModel(Gemma3TextConfig(**{**GEMMA, "pad_token_id": 0})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", GEMMA)
    one, two = declare_vectors(tmp_path, dense=((64, 96, "activation.Tanh"), (96, 48, "linear.Identity")))
    engine = load(tmp_path)
    assert (engine.info.hidden_size, engine.info.kv_bytes, engine.info.generates) == (48, 0, False)
    found = vectors(engine, [ask(name, ids) for name, ids in TEXTS.items()])
    for name, ids in TEXTS.items():
        expected = torch.tanh(states(model, ids).mean(0) @ one.T) @ two.T
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[name], vectors(engine, [ask(name, ids)])[name])


def test_types_of_pairs(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    ids, engine = TEXTS["short"], load(tmp_path)
    types = torch.tensor([[0, 0, 0, 1, 1]])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), token_type_ids=types).logits[0]
    requests = [ask("pair", ids, "classify", pair_start=3), ask("text", ids, "classify")]
    found = vectors(engine, requests)
    torch.testing.assert_close(found["pair"], expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found["pair"], found["text"])


def ntk(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    places = torch.arange(0, head_dim, 2) / head_dim
    return (theta * factor) ** -places / factor ** (2 / head_dim)


def test_gte_as_its_repository_has_it(tmp_path: Path) -> None:
    """Stacked tensors under other names, and a RoPE of type ntk."""
    model = make_encoder(tmp_path, "gte")
    model.rotary_emb.inv_freq = ntk(16, 20000.0, 8.0)
    theirs = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("attention.qkv_proj.weight") for name in theirs)
    change_config(
        tmp_path,
        architectures=["NewModel"],
        model_type="new",
        auto_map={"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        rope_parameters=None,
        rope_theta=20000.0,
        rope_scaling={"type": "ntk", "factor": 8.0},
    )
    found = vectors(load(tmp_path), [ask(name, ids) for name, ids in TEXTS.items()])
    for name, ids in TEXTS.items():
        torch.testing.assert_close(found[name], states(model, ids).mean(0), rtol=1e-5, atol=1e-5)


class PlainEncoder:
    """What the repositories' code computes, in plain torch."""

    def __init__(self, weights: dict[str, torch.Tensor], eps: float) -> None:
        self.weights, self.eps = weights, eps

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.weights[f"{name}.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(x, (48,), weight, bias, self.eps)

    def embed(self, norm: str, ids: list[int]) -> torch.Tensor:
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        return self.norm(norm, words + self.weights["embeddings.token_type_embeddings.weight"][0])

    def nomic(self, ids: list[int]) -> torch.Tensor:
        x, inv = self.embed("emb_ln", ids), 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        angles = torch.arange(len(ids)).unsqueeze(1) * inv
        cos, sin = (turn(torch.cat((angles, angles), 1)) for turn in (torch.cos, torch.sin))
        for layer in (f"encoder.layers.{number}." for number in range(4)):
            q, k, v = self.linear(f"{layer}attn.Wqkv", x).view(len(ids), 3, 6, 8).permute(1, 2, 0, 3)
            q, k = (each * cos + torch.cat((-each[..., 4:], each[..., :4]), -1) * sin for each in (q, k))
            out = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
            x = self.norm(f"{layer}norm1", x + self.linear(f"{layer}attn.out_proj", out))
            x = self.norm(f"{layer}norm2", x + self.nomic_mlp(f"{layer}mlp.", x))
        return x

    def nomic_mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        if f"{at}fc1.weight" in self.weights:
            return self.linear(f"{at}fc2", functional.gelu(self.linear(f"{at}fc1", x)))
        w1, w2 = (self.weights[f"{at}experts.mlp.w{part}"].view(8, 80, 48) for part in (1, 2))
        best = self.linear(f"{at}router.layer", x).softmax(1).topk(2, 1)
        rows = []
        for row, share, experts in zip(x, best.values, best.indices, strict=True):
            each = [functional.gelu(row @ w1[expert].T) @ w2[expert] for expert in experts]
            rows.append((torch.stack(each) * share.unsqueeze(1)).sum(0))
        return torch.stack(rows) + self.weights[f"{at}experts.bias"]


def test_nomic_v2_with_experts(tmp_path: Path) -> None:
    theirs, engine = PlainEncoder(make_nomic_v2(tmp_path), 1e-5), load(tmp_path)
    size = sum(prod(entry.shape) for entry in list_tensors(tmp_path).values())
    assert parse_config(tmp_path).num_parameters == size
    found = vectors(engine, [ask(name, ids) for name, ids in TEXTS.items()])
    for name, ids in TEXTS.items():
        torch.testing.assert_close(found[name], theirs.nomic(ids).mean(0), rtol=1e-5, atol=1e-5)
        assert torch.equal(found[name], vectors(engine, [ask(name, ids)])[name])
    change_config(tmp_path, expert_choice_router=True)
    with pytest.raises(ModelError, match="expert_choice_router True is not supported in a NomicBert"):
        load(tmp_path)


@pytest.mark.parametrize("changed", ["mlp.experts.mlp.w2", "mlp.experts.bias"])
def test_stacked_experts_of_another_shape_are_named_alike_by_fit_and_load(
    tmp_path: Path, changed: str
) -> None:
    weights = make_nomic_v2(tmp_path)
    name = f"encoder.layers.1.{changed}"
    save_file(weights | {name: weights[name][1:].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts.* has shape") as at_fit:
        check_weights(str(tmp_path), parse_config(tmp_path), list_tensors(tmp_path))
    with pytest.raises(ModelError) as at_load:
        load(tmp_path)
    assert str(at_fit.value) == str(at_load.value)


JINA: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "model_type": "bert",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "hidden_act": "gelu",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "dtype": "float32",
}
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def make_jina(directory: Path) -> dict[str, torch.Tensor]:
    hidden, inner, norms = 48, 80, ["embeddings.LayerNorm"]
    linears: dict[str, tuple[int, int]] = {}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (320, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    for layer in (f"encoder.layer.{number}." for number in range(2)):
        parts = ("self.query", "self.key", "self.value", "output.dense")
        linears |= {f"{layer}attention.{name}": (hidden, hidden) for name in parts}
        linears |= {f"{layer}mlp.wo": (hidden, inner)}
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}mlp.layernorm"]
        shapes |= {f"{layer}mlp.gated_layers.weight": (2 * inner, hidden)}
    return write_encoder(directory, JINA, shapes, linears, norms)


def jina_states(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    of = PlainEncoder(weights, 1e-12)
    x, places = of.embed("embeddings.LayerNorm", ids), torch.arange(len(ids))
    bias = -torch.tensor(SLOPES).view(-1, 1, 1) * (places - places.unsqueeze(1)).abs()
    for layer in (f"encoder.layer.{number}." for number in range(2)):
        names = (f"{layer}attention.self.{part}" for part in ("query", "key", "value"))
        q, k, v = (of.linear(name, x).view(len(ids), 6, 8).transpose(0, 1) for name in names)
        scores = (q @ k.transpose(1, 2) / 8**0.5 + bias).softmax(-1) @ v
        out = of.linear(f"{layer}attention.output.dense", scores.transpose(0, 1).flatten(1))
        x = of.norm(f"{layer}attention.output.LayerNorm", x + out)
        gate, up = of.linear(f"{layer}mlp.gated_layers", x).chunk(2, 1)
        x = of.norm(f"{layer}mlp.layernorm", x + of.linear(f"{layer}mlp.wo", functional.gelu(gate) * up))
    return x


def test_jina_v2(tmp_path: Path) -> None:
    """Scores that fall with distance (ALiBi), also in a text of several parts."""
    weights, engine = make_jina(tmp_path), load(tmp_path)
    texts = {**TEXTS, "very long": [3 + 11 * i % 300 for i in range(600)]}
    found = vectors(engine, [ask(name, ids) for name, ids in texts.items()])
    for name, ids in texts.items():
        torch.testing.assert_close(found[name], jina_states(weights, ids).mean(0), rtol=1e-5, atol=1e-5)
        assert torch.equal(found[name], vectors(engine, [ask(name, ids)])[name])


def test_jina_v3_as_its_repository_has_it(tmp_path: Path) -> None:
    """Stacked tensors under other names. Texts pass the adapter of the task that they name, if any."""
    model, engine = make_jina_v3(tmp_path), load(tmp_path)
    tensors = list_tensors(tmp_path)
    assert any(name.endswith("mixer.Wqkv.parametrizations.weight.0.lora_A") for name in tensors)
    facts, pooler = local_facts(directory(tmp_path)), 64 * 65 + 2 * 2 * (64 + 64)
    assert facts.stored_params == facts.config.num_parameters + pooler
    found = vectors(engine, [ask(name, ids) for name, ids in TEXTS.items()])
    for name, ids in TEXTS.items():
        torch.testing.assert_close(found[name], states(model, ids).mean(0), rtol=1e-5, atol=1e-5)
    mixed = [ask(f"{name} {task}", ids, task=task) for name, ids in TEXTS.items() for task in (0, None, 1)]
    together = vectors(engine, mixed)
    for task in range(2):
        adapted = with_task(model, tmp_path, task)
        for name, ids in TEXTS.items():
            wanted = states(adapted, ids).mean(0)
            torch.testing.assert_close(together[f"{name} {task}"], wanted, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(wanted, found[name], atol=1e-2)
            assert torch.equal(together[f"{name} None"], found[name])
            alone = vectors(engine, [ask("a", ids, task=task)])["a"]
            assert torch.equal(alone, together[f"{name} {task}"])
    change_config(tmp_path, load_trained_adapters=False)
    check_weights(str(tmp_path), parse_config(tmp_path), tensors)
    torch.testing.assert_close(vectors(load(tmp_path), [ask("a", [7])])["a"], found["one"])
    change_config(tmp_path, position_embedding_type="absolute")
    with pytest.raises(
        ModelError, match="position_embedding_type is not supported of this encoder, only 'rot"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_adaptations": [7]}, "lora_adaptations must name at most 64 tasks"),
        ({"lora_adaptations": ["a", "a"]}, "lora_adaptations must name at most 64 tasks"),
        ({"task_instructions": {"retrieval.query": 7}}, "task_instructions have a text of each"),
        ({"lora_rank": 0}, "lora_rank"),
        ({"lora_rank": 3}, r"lora_A.* has shape \[2, 320, 2\], .*\[2, 320, 3\]"),
        ({"lora_adaptations": ["a"]}, r"lora_A.* has shape \[2, 320, 2\], .*\[1, 320, 2\]"),
    ],
)
def test_bad_tasks_are_refused_alike_by_fit_and_load(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    make_jina_v3(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=problem) as at_fit:
        local_facts(directory(tmp_path))
    with pytest.raises(ModelError) as at_load:
        load(tmp_path)
    assert str(at_fit.value) == str(at_load.value)


def test_jina_reranker_as_its_repository_has_it(tmp_path: Path) -> None:
    """Stacked tensors under other names."""
    model, engine = make_jina_reranker(tmp_path), load(tmp_path)
    check_weights(str(tmp_path), parse_config(tmp_path), list_tensors(tmp_path))
    found = vectors(engine, [ask(name, ids, "classify") for name, ids in TEXTS.items()])
    for name, ids in TEXTS.items():
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(found[name], logits, rtol=1e-5, atol=1e-5)
    change_config(tmp_path, position_embedding_type="rotary")
    with pytest.raises(ModelError, match="position_embedding_type 'rotary' is not supported, only 'abs"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type is not supported"),
        ({"feed_forward_type": "original"}, "feed_forward_type 'original' is not supported, only geglu"),
        (
            {"architectures": ["NewModel"], "auto_map": None},
            "position_embedding_type 'alibi' is not supported",
        ),
    ],
)
def test_other_code_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    make_jina(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=problem):
        load(tmp_path)
