"""Encoders over HTTP: embeddings with prompts, and rerankers that read pairs, as transformers has them."""

import json
import math

import ollama
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from llmbox.engine.ipc.spawn import Launch
from support.cli_box import PATIENCE
from support.deferred_module import DeferredModule
from support.encoder_models import change_config, declare_vectors, make_encoder, make_jina_v3, with_task
from support.openai_server import serving
from support.tiny_models import write_json

openai = DeferredModule("openai")

WORDS = [
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "query",
    ":",
    "fox",
    "dog",
    "the",
    "quick",
    "##er",
    "jumps",
    "what",
]
TEXTS = ["The quick fox jumps", "dog", "the quicker dog " * 9]
QUERY, DOCUMENTS = "what jumps", ["the dog", "the quick fox jumps", "dog " * 20]


def write_tokenizer(folder):
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, end, labels in (
        ("embedder", "Model", {}),
        ("reranker", "ForSequenceClassification", {"num_labels": 1}),
        ("sorter", "ForSequenceClassification", {"num_labels": 3}),
    ):
        (root / name).mkdir()
        make_encoder(root / name, "bert", end, **labels)
        write_tokenizer(root / name)
    (root / "tasks").mkdir()
    make_jina_v3(root / "tasks")
    write_tokenizer(root / "tasks")
    instructions = {"retrieval.query": "query: ", "retrieval.passage": ""}
    change_config(root / "tasks", task_instructions=instructions)
    declare_vectors(root / "embedder", "cls_token")
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    write_json(root / "embedder" / "config_sentence_transformers.json", prompts)
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory, root):
    with serving(tmp_path_factory.mktemp("data"), Launch(), controlled=True) as server:
        for name in ("embedder", "reranker", "sorter", "tasks"):
            server.load(root / name, name, device="cpu", threads=1, memory_bytes=256 << 20)
        yield server


@torch.inference_mode()
def vector(root, text):
    from transformers import AutoModel

    ids = Tokenizer.from_file(str(root / "embedder" / "tokenizer.json")).encode(text).ids
    model = AutoModel.from_pretrained(root / "embedder", dtype=torch.float32).eval()
    return torch.nn.functional.normalize(model(torch.tensor([ids])).last_hidden_state[0, 0], dim=0)


@torch.inference_mode()
def logits(root, name, *texts):
    from transformers import AutoModelForSequenceClassification

    encoding = Tokenizer.from_file(str(root / name / "tokenizer.json")).encode(*texts)
    model = AutoModelForSequenceClassification.from_pretrained(root / name, dtype=torch.float32).eval()
    types = torch.tensor([encoding.type_ids])
    return model(torch.tensor([encoding.ids]), token_type_ids=types).logits[0].tolist()


def test_vectors_for_official_clients(server, root):
    with server.client() as client:
        answer = client.embeddings.create(model="embedder", input=TEXTS)
        short = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=16)
    for text, told in zip(TEXTS, answer.data, strict=True):
        torch.testing.assert_close(torch.tensor(told.embedding), vector(root, text), rtol=1e-5, atol=1e-5)
    cut = torch.nn.functional.normalize(vector(root, TEXTS[0])[:16], dim=0)
    torch.testing.assert_close(torch.tensor(short.data[0].embedding), cut, rtol=1e-5, atol=1e-5)
    other = ollama.Client(server.url, timeout=PATIENCE).embed("embedder", TEXTS)
    for ours, theirs in zip(other.embeddings, answer.data, strict=True):
        assert list(ours) == pytest.approx(theirs.embedding, abs=1e-7)


@pytest.mark.parametrize("field", [{"prompt_name": "query"}, {"input_type": "search_query"}], ids=str)
def test_prompts_of_the_folder(http, root, field):
    answer = http.post("/v1/embeddings", json={"model": "embedder", "input": "fox", **field}).json()
    told = torch.tensor(answer["data"][0]["embedding"])
    torch.testing.assert_close(told, vector(root, "query: fox"), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_text_passes_the_adapter_of_its_task(http, root, tmp_path):
    """With the task's instruction before it. Without a task it passes none."""
    model = make_jina_v3(tmp_path)
    tokenizer = Tokenizer.from_file(str(root / "tasks" / "tokenizer.json"))
    for text, asked, theirs in (
        ("fox", {}, model),
        ("query: fox", {"task": "retrieval.query"}, with_task(model, root / "tasks", 0)),
        ("fox", {"task": "retrieval.passage"}, with_task(model, root / "tasks", 1)),
    ):
        answer = http.post("/v1/embeddings", json={"model": "tasks", "input": "fox", **asked}).json()
        assert "warnings" not in answer
        told = torch.tensor(answer["data"][0]["embedding"])
        states_LE = theirs(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states_LE.mean(0), dim=0)
        torch.testing.assert_close(told, wanted, rtol=1e-4, atol=1e-4)
    ignored = http.post("/v1/embeddings", json={"model": "embedder", "input": "fox", "task": "a"}).json()
    assert ignored["warnings"] == ["'task' has no effect on this model: it has no adapters of tasks."]


def test_pairs_are_ranked(http, root):
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
    results = http.post("/v1/rerank", json=body).json()["results"]
    expected = [1 / (1 + math.exp(-logits(root, "reranker", QUERY, document)[0])) for document in DOCUMENTS]
    found = {each["index"]: each["relevance_score"] for each in results}
    assert [found[i] for i in range(3)] == pytest.approx(expected, abs=1e-5)
    assert [each["index"] for each in results] == sorted(range(3), key=lambda i: -expected[i])
    scores = http.post("/v1/score", json={"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [each["score"] for each in scores["data"]] == [found[i] for i in range(3)]


def test_classes(http, root):
    answer = http.post("/classify", json={"model": "sorter", "input": TEXTS}).json()
    for text, told in zip(TEXTS, answer["data"], strict=True):
        expected = torch.tensor(logits(root, "sorter", text)).softmax(0).tolist()
        assert told["probs"] == pytest.approx(expected, abs=1e-5)


FOX, PAIR = {"input": "fox"}, {"query": "fox", "documents": ["dog"]}


@pytest.mark.parametrize(
    ("route", "model", "body", "code", "told"),
    [
        ("chat/completions", "embedder", {"messages": [{"role": "user", "content": "fox"}]},
         "generation_not_supported", "/v1/embeddings"),
        ("completions", "reranker", {"prompt": "fox"}, "generation_not_supported", "/v1/rerank"),
        ("embeddings", "embedder", {"input": "fox " * 90}, "context_length_exceeded", "80 tokens"),
        ("embeddings", "embedder", {"input": ""}, "invalid_value", "empty"),
        ("embeddings", "embedder", {**FOX, "prompt_name": "other"}, "invalid_value", "query"),
        ("embeddings", "tasks", {**FOX, "task": "other"}, "invalid_value", "retrieval.query"),
        ("embeddings", "reranker", FOX, "embeddings_not_supported", "/v1/rerank"),
        ("rerank", "sorter", PAIR, "rerank_not_supported", "3 classes"),
        ("rerank", "embedder", PAIR, "rerank_not_supported", "neither"),
        ("rerank", "reranker", {**PAIR, "documents": ["dog " * 90]}, "context_length_exceeded", "80 tokens"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_do_is_said(http, route, model, body, code, told):
    answer = http.post(f"/v1/{route}", json={"model": model, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert told in json.dumps(error)


def test_long_texts_are_cut_where_asked(server, http):
    body = {"model": "embedder", "input": "fox " * 90, "truncate_prompt_tokens": 10}
    cut = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    with server.client() as client:
        whole = client.embeddings.create(model="embedder", input="fox " * 8, encoding_format="float")
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="embedder", input="fox", dimensions=65)
    assert cut == pytest.approx(whole.data[0].embedding, abs=1e-7)
