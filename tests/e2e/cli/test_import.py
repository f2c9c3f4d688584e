"""`llmbox import`: from a GGUF file to an answer."""

import json

import pytest

from llmbox.app.errors import Exit
from llmbox.kernels.dispatch import native_ready
from support.cli_box import Box, box
from support.gguf_models import write_gguf
from support.tiny_models import make_tiny_model

__all__ = ["box"]


def test_from_a_file_to_an_answer(box: Box) -> None:
    source = make_tiny_model(box.folder / "source", arch="qwen2")
    first = write_gguf(source, box.folder / "tiny.gguf", parts=2)
    done = box.run("import", first, "--out", box.folder / "made")
    assert done.code == 0, done.err
    assert f"Serve it: llmbox up {box.folder / 'made'}" in done.out
    assert box.run("fit", box.folder / "made", "--json").code == 0
    answers = set()
    for model in ("source", "made"):
        told = box.run("run", box.folder / model, "the quick", "--max-tokens", 8, "--temperature", 0)
        assert told.code == 0, told.err
        answers.add(told.out)
    assert len(answers) == 1


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_rounded_weights_and_a_folder_that_is_there(box: Box) -> None:
    source, out = make_tiny_model(box.folder / "source", arch="llama"), box.folder / "made"
    blob = write_gguf(source, box.folder / "sha256-0123", "Q8_0")
    done = box.run("import", blob, "--threads", 1, "--out", out, "--json")
    assert done.code == 0, done.err
    assert done.json["format"] == "int8"
    assert 0 < done.json["relative"] < 0.01
    again = box.run("import", blob, "--out", out)
    assert again.code == Exit.FAILED
    assert "exists already" in again.err


def test_what_is_no_gguf_or_has_a_strange_tokenizer(box: Box) -> None:
    source = make_tiny_model(box.folder / "source")
    wrong = box.run("import", source / "model.safetensors")
    assert wrong.code == Exit.FAILED
    assert "is not a GGUF file" in wrong.err
    file = write_gguf(source, box.folder / "tiny.gguf")
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"gpt-9"))
    strange, out = box.run("import", file, "--out", box.folder / "made"), box.folder / "made"
    assert strange.code == Exit.FAILED
    assert "its pre-tokenizer 'gpt-9'" in strange.err
    assert not out.exists()
    assert box.run("import", file, "--out", out, "--tokenizer", source).code == 0
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [2]}


def test_a_file_is_served_as_it_is_by_path_and_adopted(box: Box) -> None:
    source, folder = make_tiny_model(box.folder / "source", arch="qwen2"), box.folder / "theirs"
    folder.mkdir()
    file = write_gguf(source, folder / "tiny.gguf")
    assert box.run("fit", file, "--json").json["fits"]
    answers = set()
    for model in (source, file):
        told = box.run("run", model, "the quick", "--max-tokens", 8, "--temperature", 0)
        assert told.code == 0, told.err
        answers.add(told.out)
    assert len(answers) == 1
    assert "tiny" in box.run("ps", "-q").out.split()
    adopted = box.run("adopt", folder)
    assert adopted.code == 0, adopted.err
    rows = {row["name"]: row for row in box.run("ls", "--json").json["models"]}
    assert rows["tiny"]["servable"]
    assert box.run("show", "tiny").code == 0
    (folder / "broken.gguf").write_bytes(b"GGUF nothing")
    refused = box.run("fit", folder / "broken.gguf")
    assert refused.code == Exit.FAILED
    assert "broken.gguf cannot be served" in refused.err
    (folder / "no.gguf").write_bytes(b"nothing")
    assert "is not a GGUF file" in box.run("fit", folder / "no.gguf").err


def test_ollama_s_store_is_adopted_in_place(box: Box) -> None:
    store = box.folder / "ollama"
    (store / "blobs").mkdir(parents=True)
    blob = write_gguf(make_tiny_model(box.folder / "source", arch="qwen2"), store / "blobs" / "sha256-0123")
    manifests = store / "manifests" / "registry" / "library" / "tiny"
    manifests.mkdir(parents=True)
    model = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0123"}
    (manifests / "1b").write_text(json.dumps({"layers": [{"mediaType": "x.params", "digest": "y"}, model]}))
    gone = {**model, "digest": "sha256:4567"}
    (manifests / "gone").write_text(json.dumps({"layers": [gone]}))
    (manifests / "odd").write_text("[]")
    before = blob.read_bytes()
    adopted = box.run("adopt", store, "--json")
    assert adopted.code == 0, adopted.err
    assert [each["name"] for each in adopted.json["adopted"]] == ["tiny-1b"]
    assert box.run("run", "tiny-1b", "the quick", "--max-tokens", 4).code == 0
    assert blob.read_bytes() == before
