"""What is told of a model from its files alone."""

from pathlib import Path

from llmbox.app.control.library import read_card
from llmbox.app.http.ollama.responder import capabilities
from support.hub_models import model_files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_card_is_read_from_small_files(tmp_path: Path) -> None:
    files = model_files() | {"generation_config.json": b'{"temperature": 0.6, "top_k": 20}'}
    card = read_card(write(tmp_path, files))
    assert card.config is not None
    assert (card.config.model_type, card.stored_as) == ("llama", "BF16")
    assert card.parameters == card.config.num_parameters
    assert card.size == sum(map(len, files.values()))
    assert card.defaults == {"temperature": 0.6, "top_k": 20}


def test_folders_for_vectors_are_known(tmp_path: Path) -> None:
    assert not read_card(write(tmp_path, model_files())).for_vectors
    (tmp_path / "modules.json").write_bytes(b"[]")
    card = read_card(tmp_path)
    assert card.for_vectors
    assert capabilities(card) == ["embedding"]


def test_the_digest_is_that_of_the_files(tmp_path: Path) -> None:
    blobs = write(tmp_path / "blobs", {"aa": b"one", "bb": b"two"})
    folders = [tmp_path / "first", tmp_path / "second", tmp_path / "third"]
    for folder, blob in zip(folders, ["aa", "aa", "bb"], strict=True):
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(blobs / blob)
    first, second, third = (read_card(folder).digest for folder in folders)
    assert first == second, "a hub's cache names files by their content"
    assert first != third
    (folders[1] / "more.json").write_bytes(b"{}")
    assert read_card(folders[1]).digest != second


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    broken = {"config.json": b"{", "tokenizer_config.json": b"[]", "generation_config.json": b"\xff"}
    card = read_card(write(tmp_path, broken))
    assert (card.config, card.template, card.parameters, card.stored_as) == (None, None, None, "")
    assert card.defaults == {}
    assert card.size == sum(map(len, broken.values()))
