"""Encoders: vectors and scores of transformers, and the same bits alone and in a batch."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams
from support.encoder_models import ENCODERS, declare_vectors, make_encoder
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


GEMMA = {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 80,
    "query_pre_attn_scalar": 16,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
    "dtype": "float32",
}


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
