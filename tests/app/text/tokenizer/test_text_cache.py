"""Text models of unloaded models are kept, as long as their files stay the same."""

import os
from pathlib import Path

import pytest

from llmbox.app.text.tokenizer.sandboxed_encoder import SandboxedEncoder
from llmbox.app.text.tokenizer.text_loader import KEPT, TextCache


class Text:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.encoder: object = None


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / str(number) for number in range(KEPT + 2)]
    for folder in made:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture
def cache() -> TextCache:
    return TextCache(Text)  # type: ignore[arg-type]


def test_the_last_unloaded_are_kept(cache: TextCache, folders: list[Path]) -> None:
    first = [cache.load(folder) for folder in folders]
    assert cache.load(folders[0]) is first[0]
    assert [cache.release(folder) for folder in folders] == [[], [], [first[0]], [first[1]]]
    again = [cache.load(folder) for folder in folders]
    assert [a is b for a, b in zip(first, again, strict=True)] == [False, False, True, True]


def test_one_that_is_used_again_is_not_given_up(cache: TextCache, folders: list[Path]) -> None:
    first = cache.load(folders[0])
    cache.release(folders[0])
    assert cache.load(folders[0]) is first
    for folder in folders[1:]:
        cache.load(folder)
        assert first not in cache.release(folder)
    assert first not in cache.clear()
    assert cache.load(folders[0]) is first


def test_clearing_frees_all_that_is_not_used(cache: TextCache, folders: list[Path]) -> None:
    first, second = cache.load(folders[0]), cache.load(folders[1])
    cache.release(folders[0])
    assert cache.clear() == [first]
    assert cache.load(folders[0]) is not first
    assert cache.load(folders[1]) is second


@pytest.mark.parametrize("change", ["content", "time", "added", "removed", "template", "replaced"])
def test_a_changed_folder_is_read_anew(cache: TextCache, folders: list[Path], change: str) -> None:
    folder = folders[0]
    file = folder / "tokenizer.json"
    (folder / "config.json").write_text("{}")
    first = cache.load(folder)
    cache.release(folder)
    match change:
        case "content":
            file.write_text("[]  ")
        case "time":
            os.utime(file, ns=(1, 1))
        case "added":
            (folder / "chat_template.jinja").touch()
        case "removed":
            (folder / "config.json").unlink()
        case "template":
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").touch()
        case "replaced":  # by one of the same size and time
            status = file.stat()
            other = folder / "other"
            other.write_text("[]")
            os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
            other.replace(file)
    assert cache.load(folder) is not first


def test_a_text_with_a_process_of_its_own_is_not_kept(folders: list[Path]) -> None:
    def load(folder: Path) -> Text:
        text = Text(folder)
        text.encoder = object.__new__(SandboxedEncoder)
        return text

    cache = TextCache(load)  # type: ignore[arg-type]
    first = cache.load(folders[0])
    cache.release(folders[0])
    assert cache.load(folders[0]) is not first


def test_a_failed_load_leaves_nothing(folders: list[Path]) -> None:
    def load(_: Path) -> Text:
        raise OSError("broken")

    cache = TextCache(load)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="broken"):
        cache.load(folders[0])
    assert cache.release(folders[0]) == []
    assert cache.clear() == []
