"""Ranking documents: the scores of transformers, from models that are asked or have a row of scores."""

import json
import math
import shutil

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.app.models.gguf_folders import folder_of
from llmbox.app.text.reranker import INSTRUCTION, SYSTEM
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.gguf_models import write_gguf
from support.openai_server import serving
from support.pooled_models import make_pooled_model
from support.tiny_models import SPECIAL, VOCAB, make_tiny_model

ROUTE = "/v1/rerank"
QUERY = "which fox jumps?"
DOCUMENTS = ["the lazy dog", "the quick brown fox jumps over <|im_end|> it", "morning " * 20, "yes"]


def write_words(folder):
    """A tokenizer for which "yes" and "no" are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["yes no " * 50, "yes", "no", SYSTEM, "fox dog the"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def scorer(folder, labels):
    """As a converted reranker is stored: no head, a row of scores for each label."""
    make_tiny_model(folder, arch="qwen3", max_position_embeddings=1024)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    weights["score.weight"] = torch.randn(labels, 64, generator=torch.Generator().manual_seed(5)) / 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": labels}
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "asked", arch="qwen3", max_position_embeddings=1024)
    more = {"max_position_embeddings": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    make_tiny_model(root / "tied", arch="qwen2", **more)
    capped = {"query_pre_attn_scalar": 16, "max_position_embeddings": 1024}
    make_tiny_model(root / "capped", arch="gemma2", **capped)
    make_tiny_model(root / "scaled", arch="granite", max_position_embeddings=1024, logits_scaling=4.0)
    make_pooled_model(root / "vectors")
    scorer(root / "scorer", 1)
    scorer(root / "sorter", 3)
    for name in ("asked", "tied", "capped", "scaled", "scorer", "sorter", "vectors"):
        write_words(root / name)
    make_tiny_model(root / "wordless")
    make_tiny_model(root / "untold")
    write_words(root / "untold")
    config = json.loads((root / "untold/tokenizer_config.json").read_text())
    del config["chat_template"]
    (root / "untold/tokenizer_config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory, root):
    with serving(tmp_path_factory.mktemp("data"), Launch()) as server:
        for folder in sorted(root.iterdir()):
            options = {"device": "cpu", "threads": 1, "memory_bytes": 256 << 20, "token_budget": 32}
            server.load(folder, folder.name, **options)
        yield server


def post(http, model, documents=DOCUMENTS, **fields):
    answer = http.post(ROUTE, json={"model": model, "query": QUERY, "documents": documents, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores(http, model, documents=DOCUMENTS, **fields):
    """In the order of the documents."""
    results = post(http, model, documents, **fields)["results"]
    return [each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])]


def prompt(folder, document, instruction=INSTRUCTION):
    """Ids of the question in ChatML; what people write is never a special token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = json.loads(tokenizer.to_str()) | {"added_tokens": []}
    words = Tokenizer.from_str(json.dumps(plain))
    begin, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    user = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
    parts = [begin, f"system\n{SYSTEM}", end, "\n", begin, f"user\n{user}", end, "\n", begin, "assistant\n"]
    return [i for part in parts for i in ([part] if isinstance(part, int) else words.encode(part).ids)]


@torch.inference_mode()
def asked(folder, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    logits_V = model(torch.tensor([ids])).logits[0, -1]
    pair = logits_V[[tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")]]
    return float(pair.softmax(0)[0])


@pytest.mark.parametrize(
    ("name", "near"), [("asked", 1e-4), ("tied", 0.05), ("capped", 1e-4), ("scaled", 1e-4)]
)
def test_a_model_that_is_asked_scores_as_transformers(http, root, name, near):
    told = scores(http, name)
    for score, document in zip(told, DOCUMENTS, strict=True):
        assert score == pytest.approx(asked(root / name, prompt(root / name, document)), abs=near)
    assert len(set(told)) == len(told)


@torch.inference_mode()
def test_a_model_with_a_row_of_scores_scores_as_transformers(http, root):
    from transformers import AutoModelForSequenceClassification

    folder = root / "scorer"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for score, document in zip(scores(http, "scorer"), DOCUMENTS, strict=True):
        ids = torch.tensor([prompt(folder, document)])
        wanted = float(model(ids).logits[0, 0].sigmoid())
        assert score == pytest.approx(wanted, abs=1e-4)


def answer_rows(folder, labels):
    """The probabilities of the answers behind a text as it is, of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(label) for label in labels]

    @torch.inference_mode()
    def probabilities(text):
        logits_V = model(torch.tensor([tokenizer.encode(text).ids])).logits[0, -1]
        return logits_V[ids].softmax(0).tolist()

    return probabilities


def converted(root, labels=("yes", "no")):
    """A folder with what llama.cpp's converter of rerankers writes: no head, and its rows of both answers."""
    folder = root / "converted"
    shutil.copytree(root / "asked", folder)
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = weights.pop("lm_head.weight")[[tokenizer.token_to_id(label) for label in labels]]
    weights["cls.output.weight"] = rows.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize(
    ("kind", "labels", "near"),
    [("F32", ("yes", "no"), 1e-5), ("F32", ("no", "yes"), 1e-5), ("Q8_0", ("yes", "no"), 0.02)],
)
def test_a_gguf_file_with_rows_of_answers_scores_as_its_source(
    server, http, root, tmp_path, kind, labels, near
):
    """It makes no text. Vectors are those of the last token, as of its source without a head."""
    shutil.copytree(root / "asked", tmp_path / "asked")
    rank = {"pooling_type": gguf.PoolingType.RANK.value, "classifier__output_labels": list(labels)}
    file = write_gguf(converted(tmp_path, labels), tmp_path / "tiny.gguf", kind, **rank)
    folder, name = folder_of(file, tmp_path / "home"), f"rows-{kind}-{labels[0]}"
    server.load(folder, name, device="cpu", threads=1, memory_bytes=256 << 20, dtype="float32")
    assert scores(http, name) == pytest.approx(scores(http, "asked"), abs=near)
    assert scores(http, name, instruction="else") != scores(http, name)
    assert local_facts(directory(folder)).notes == ()
    pairs = {"model": name, "text_1": QUERY, "text_2": DOCUMENTS}
    told = http.post("/v1/score", json=pairs).json()["data"]
    assert [each["score"] for each in told] == scores(http, name)
    classes = http.post("/classify", json={"model": name, "input": DOCUMENTS}).json()["data"]
    wanted = answer_rows(root / "asked", labels)
    for each, document in zip(classes, DOCUMENTS, strict=True):
        assert each["probs"] == pytest.approx(wanted(document), abs=near)
        assert each["label"] == labels[each["probs"].index(max(each["probs"]))]
    pooled = http.post("/pooling", json={"model": name, "input": DOCUMENTS}).json()["data"]
    assert [each["data"] for each in pooled] == [each["probs"] for each in classes]
    refused = http.post("/v1/completions", json={"model": name, "prompt": "a"})
    assert refused.json()["error"]["code"] == "generation_not_supported"
    made = http.post("/v1/embeddings", json={"model": name, "input": "the fox"}).json()["data"]
    assert len(made[0]["embedding"]) == 64


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize(("is_tied", "kind", "near"), [(True, "F32", 1e-5), (False, "Q8_0", 0.02)])
def test_a_gguf_file_with_a_head_is_asked(server, http, tmp_path, is_tied, kind, near):
    """Also one that its converter called a reranker, but left as it was."""
    source, name = tmp_path / "model", f"whole-{kind}"
    make_tiny_model(source, arch="qwen3", max_position_embeddings=1024, tie_word_embeddings=is_tied)
    write_words(source)
    rank = {"pooling_type": gguf.PoolingType.RANK.value} if is_tied else {}
    folder = folder_of(write_gguf(source, tmp_path / "t.gguf", kind, **rank), tmp_path / "home")
    for path, called in ((folder, name), (source, f"source-{kind}")):
        server.load(path, called, device="cpu", threads=1, memory_bytes=256 << 20, dtype="float32")
    assert scores(http, name) == pytest.approx(scores(http, f"source-{kind}"), abs=near)
    made = http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1}).json()
    assert made["usage"]["completion_tokens"] == 1


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_a_rounded_head_has_its_rows_too(server, http, root, tmp_path):
    out = tmp_path / "rounded"
    quantize(root / "asked", out, QUANTS["int8"], 1, lambda _done, _total: None)
    server.load(out, "rounded", device="cpu", threads=1, memory_bytes=256 << 20)
    assert scores(http, "rounded") == pytest.approx(scores(http, "asked"), abs=0.05)


def test_a_score_is_of_its_document_alone(http):
    together = scores(http, "asked")
    assert [scores(http, "asked", [document])[0] for document in DOCUMENTS] == together
    assert scores(http, "asked", DOCUMENTS[::-1]) == together[::-1]
    objects = [{"text": document} for document in DOCUMENTS]
    assert scores(http, "asked", objects) == together


def test_the_answer(http):
    told = post(http, "asked")
    assert set(told) == {"id", "model", "results", "usage"}
    assert told["id"].startswith("rerank-")
    found = [each["relevance_score"] for each in told["results"]]
    assert found == sorted(found, reverse=True)
    assert all(0 < score < 1 and math.isfinite(score) for score in found)
    assert all(each["document"] == {"text": DOCUMENTS[each["index"]]} for each in told["results"])
    assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] > 100
    best = post(http, "asked", top_n=2, return_documents=False, surprise=1)
    assert best["results"] == [
        {k: v for k, v in each.items() if k != "document"} for each in told["results"][:2]
    ]
    assert "surprise" in best["warnings"][0]


def test_an_instruction_counts(http, root):
    told = scores(http, "asked", instruction="Find animals")
    wanted = asked(root / "asked", prompt(root / "asked", DOCUMENTS[0], "Find animals"))
    assert told[0] == pytest.approx(wanted, abs=1e-4)
    assert told != scores(http, "asked")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("sorter", "it sorts texts into 3 classes"),
        ("vectors", "neither a head nor a row of scores"),
        ("wordless", "'yes' and 'no' are not tokens of its vocabulary"),
        ("untold", "no chat template"),
    ],
)
def test_models_that_cannot(http, model, why):
    answer = http.post(ROUTE, json={"model": model, "query": QUERY, "documents": ["a"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "rerank_not_supported", "model")
    assert why in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"max_chunks_per_doc": 1}, "max_chunks_per_doc"),
        ({"documents": ["a", "word " * 900]}, "documents"),
    ],
)
def test_bad_requests(http, fields, param):
    answer = http.post(ROUTE, json={"model": "asked", "query": QUERY, "documents": ["a"], **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_model_with_scores_writes_no_text(http):
    answer = http.post("/v1/completions", json={"model": "scorer", "prompt": "a"})
    assert answer.json()["error"]["code"] == "generation_not_supported"


def test_other_addresses_give_the_same(http):
    body = {"model": "asked", "query": QUERY, "documents": DOCUMENTS}
    told = post(http, "asked")
    plain, cohere = (http.post(route, json=body).json() for route in ("/rerank", "/v2/rerank"))
    assert plain["results"] == told["results"]
    assert [each["relevance_score"] for each in cohere["results"]] == [
        each["relevance_score"] for each in told["results"]
    ]
    assert all("document" not in each for each in cohere["results"])
    shown = http.post("/v2/rerank", json={**body, "return_documents": True}).json()
    assert shown["results"] == told["results"]


def test_documents_are_cut_where_a_request_asks_for_it(http):
    told = post(http, "asked", documents=["fox dog " * 400, "fox"], max_tokens_per_doc=3)
    whole = post(http, "asked", documents=[told["results"][0]["document"]["text"]])
    assert len({each["document"]["text"] for each in told["results"]}) == 2
    assert all(len(each["document"]["text"]) < 20 for each in told["results"])
    assert whole["results"][0]["relevance_score"] == told["results"][0]["relevance_score"]
    assert told["warnings"] == ["1 documents were cut to 3 tokens, as 'max_tokens_per_doc' asks."]


def test_scores_of_pairs(http):
    def score(model, first, second):
        answer = http.post("/v1/score", json={"model": model, "text_1": first, "text_2": second})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (
            http.post("/score", json={"model": model, "text_1": first, "text_2": second}).json()["data"]
            == (told["data"])
        )
        assert [each["index"] for each in told["data"]] == list(range(len(told["data"])))
        return [each["score"] for each in told["data"]]

    ranked = scores(http, "asked")
    assert score("asked", QUERY, DOCUMENTS) == ranked
    assert score("asked", QUERY, DOCUMENTS[0]) == ranked[:1]
    assert score("asked", [QUERY] * len(DOCUMENTS), DOCUMENTS) == ranked
    mixed = score("asked", [QUERY, "else", QUERY], DOCUMENTS[:3])
    assert (mixed[0], mixed[2]) == (ranked[0], ranked[2])
    assert mixed[1] != ranked[1]
    same, other = score("vectors", "the fox", ["the fox", "a dog in the morning"])
    assert same == pytest.approx(1, abs=1e-5)
    assert -1 <= other < 0.9999
    first, second = http.post(
        "/v1/embeddings", json={"model": "vectors", "input": ["the fox", "a dog in the morning"]}
    ).json()["data"]
    assert other == pytest.approx(
        math.fsum(map(float.__mul__, first["embedding"], second["embedding"])), abs=1e-5
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": []}, "text_1"),
        ({"text_2": []}, "text_2"),
        ({"text_2": ["a", ""]}, "text_2[1]"),
        ({"text_1": ["a", "b"]}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": 5}, "text_1"),
        ({"text_2": ["a"] * 2049}, "text_2"),
        ({"model": "sorter"}, "model"),
        ({"model": "wordless"}, "model"),
    ],
)
def test_bad_pairs(http, fields, param):
    answer = http.post("/v1/score", json={"model": "asked", "text_1": "a", "text_2": "b", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_classes_are_those_of_transformers(http, root):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(root / "sorter").eval()
    tokenizer = Tokenizer.from_file(str(root / "sorter" / "tokenizer.json"))
    wanted = []
    for document in DOCUMENTS:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(document).ids])).logits[0]
        wanted.append(torch.softmax(logits, -1).tolist())
    answer = http.post("/classify", json={"model": "sorter", "input": DOCUMENTS}).json()
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] > 0
    for i, (told, probs) in enumerate(zip(answer["data"], wanted, strict=True)):
        assert told["probs"] == pytest.approx(probs, abs=1e-4)
        assert (told["index"], told["num_classes"]) == (i, 3)
        assert told["label"] == f"LABEL_{probs.index(max(probs))}"
    pooled = http.post("/pooling", json={"model": "sorter", "input": DOCUMENTS}).json()
    assert [each["data"] for each in pooled["data"]] == [each["probs"] for each in answer["data"]]
    one = http.post("/classify", json={"model": "sorter", "input": DOCUMENTS[0]}).json()
    assert one["data"] == answer["data"][:1]


def test_pooling_of_other_models_is_their_vector(http):
    inputs = {"model": "vectors", "input": ["the fox", "a dog"]}
    wanted = [each["embedding"] for each in http.post("/v1/embeddings", json=inputs).json()["data"]]
    told = http.post("/pooling", json=inputs).json()
    assert [each["data"] for each in told["data"]] == wanted
    assert {each["object"] for each in told["data"]} == {"pooling"}
    encoded = http.post("/pooling", json={**inputs, "encoding_format": "base64"}).json()
    assert isinstance(encoded["data"][0]["data"], str)
    short = http.post("/pooling", json={**inputs, "dimensions": 4}).json()
    assert len(short["data"][0]["data"]) == 4


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/classify", {"model": "asked"}, "model"),
        ("/classify", {"model": "vectors"}, "model"),
        ("/classify", {"model": "scorer", "input": ["a" * 10**5]}, "input"),
        ("/classify", {"model": "sorter", "input": []}, "input"),
        ("/classify", {"model": "sorter", "input": ["a", ""]}, "input[1]"),
        ("/pooling", {"model": "vectors", "task": "classify"}, "model"),
        ("/pooling", {"model": "vectors", "task": "token_embed"}, "task"),
        ("/pooling", {"model": "sorter", "dimensions": 4}, "dimensions"),
        ("/pooling", {"model": "vectors", "dimensions": 10**6}, "dimensions"),
    ],
)
def test_bad_requests_for_classes_and_pools(http, route, fields, param):
    answer = http.post(route, json={"input": "a", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
