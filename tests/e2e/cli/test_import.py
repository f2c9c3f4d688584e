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
    assert "is there already" in again.err


def test_what_is_no_gguf_or_has_a_strange_tokenizer(box: Box) -> None:
    source = make_tiny_model(box.folder / "source")
    wrong = box.run("import", source / "model.safetensors")
    assert wrong.code == Exit.FAILED
    assert "is no GGUF file" in wrong.err
    file = write_gguf(source, box.folder / "tiny.gguf")
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"gpt-9"))
    strange, out = box.run("import", file, "--out", box.folder / "made"), box.folder / "made"
    assert strange.code == Exit.FAILED
    assert "by the rules of 'gpt-9'" in strange.err
    assert not out.exists()
    assert box.run("import", file, "--out", out, "--tokenizer", source).code == 0
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [2]}


def test_a_folder_of_such_files_is_told_of_it(box: Box) -> None:
    folder = box.folder / "theirs"
    folder.mkdir()
    write_gguf(make_tiny_model(box.folder / "source"), folder / "tiny.gguf")
    told = box.run("adopt", folder)
    assert told.code == Exit.NOT_FOUND
    assert "llmbox import FILE" in told.err
