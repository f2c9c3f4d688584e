"""Embeddings from the real engine: vectors are those of transformers, read as the folder declares."""

import pytest
import torch
from tokenizers import Tokenizer, processors

from llmbox.engine.ipc.spawn import Launch
from support.openai_server import serving
from support.pooled_models import make_pooled_model
from support.tiny_models import make_tiny_model

TEXTS = ["the quick brown fox", "jumps", "over the lazy dog and then " * 5]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One as Qwen3-Embedding is, whose tokenizer ends each text with a token; and one for chats."""
    root = tmp_path_factory.mktemp("models")
    make_pooled_model(root / "pooler")
    file = str(root / "pooler" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=None, special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(file)
    make_tiny_model(root / "chat", arch="llama")
    return root


@pytest.fixture(scope="module")
def client(tmp_path_factory, models):
    with serving(tmp_path_factory.mktemp("data"), Launch()) as server, server.client() as client:
        for name in ("pooler", "chat"):
            server.load(models / name, name, device="cpu", threads=1, memory_bytes=256 << 20, token_budget=32)
        yield client


@torch.inference_mode()
def wanted(directory, text: str) -> torch.Tensor:
    """[T, E] of transformers, of the ids of the folder's tokenizer."""
    from transformers import AutoModel

    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return model(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("name", ["pooler", "chat"])
def test_vectors_are_those_of_transformers(client, models, name):
    """Of the last token, which the tokenizer adds, where that is declared; else the mean."""
    answer = client.embeddings.create(model=name, input=TEXTS)
    for text, told in zip(TEXTS, answer.data, strict=True):
        states_TE = wanted(models / name, text)
        pooled_E = states_TE[-1] if name == "pooler" else states_TE.mean(0)
        expected = torch.nn.functional.normalize(pooled_E, dim=0)
        torch.testing.assert_close(torch.tensor(told.embedding), expected, rtol=1e-3, atol=1e-4)
    alone = client.embeddings.create(model=name, input=TEXTS[2])
    assert alone.data[0].embedding == answer.data[2].embedding
