"""Copies of adapters: whole, healed, and none left behind."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbox.app.errors import CliError
from llmbox.app.models import adapters
from llmbox.app.models import registry as registry_module
from llmbox.app.models.registry import Alias, Registry
from support.adapters import plain_tensors, write_adapter


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(adapters, "_check", lambda *_: None)
    return Registry(tmp_path / "data" / "models.json")


def test_a_damaged_copy_is_replaced(registry: Registry, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", plain_tensors())
    adapters.add_adapter(registry, {}, "one", folder, "builtin")
    (kept,) = registry.adapters_home.iterdir()
    (kept / "adapter_model.safetensors").write_bytes(b"cut short")
    assert adapters.list_adapters(registry)[0].problem
    adapters.add_adapter(registry, {}, "two", folder, "builtin")
    assert not any(each.problem for each in adapters.list_adapters(registry))
    assert list(registry.adapters_home.iterdir()) == [kept]


def test_an_unfinished_copy_is_removed_later(registry: Registry, tmp_path: Path) -> None:
    old, new = (registry.adapters_home / f".part-{name}" for name in ("1-old", "2-new"))
    for part in (old, new):
        part.mkdir(parents=True)
        (part / "adapter_model.safetensors").touch()
    os.utime(old, (0, 0))
    adapters.add_adapter(registry, {}, "one", write_adapter(tmp_path / "a", plain_tensors()), "builtin")
    assert (old.exists(), new.exists()) == (False, True)


def test_a_removal_of_the_same_files_does_not_take_them_from_an_adapter_that_is_being_added(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a", plain_tensors())
    adapters.add_adapter(registry, {}, "one", folder, "builtin")
    lock, removals = registry_module.locked, ["one"]

    @contextlib.contextmanager
    def locked(file: Path) -> Iterator[None]:
        while removals:  # another process, right before this one has the lock
            adapters.remove_adapter(registry, removals.pop())
        with lock(file):
            yield

    monkeypatch.setattr(registry_module, "locked", locked)
    adapters.add_adapter(registry, {}, "two", folder, "builtin")
    assert [(each.name, each.problem) for each in adapters.list_adapters(registry)] == [("two", "")]
    adapters.remove_adapter(registry, "two")
    assert not list(registry.adapters_home.iterdir())


def test_a_name_that_was_taken_meanwhile_stays_the_other_ones(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a", plain_tensors())
    monkeypatch.setattr(adapters, "_check", lambda *_: registry.set_alias("one", Alias("builtin")))
    with pytest.raises(CliError, match="is taken"):
        adapters.add_adapter(registry, {}, "one", folder, "builtin")
    assert not registry.read().aliases["one"].adapter
    assert not list(registry.adapters_home.iterdir())


@pytest.mark.parametrize(
    ("told", "words"),
    [("/" + "x" * 5000, "no base"), ("~nobody-of-this-name/x", "is not a path here"), ("~\0", "no base")],
)
def test_a_base_that_is_no_path_is_refused_in_words(registry: Registry, told: str, words: str) -> None:
    for base in (None, told):
        with pytest.raises(CliError, match=words) as refused:
            adapters.require_base(registry, {}, "one", {"base_model_name_or_path": told}, base)
        assert len(refused.value.what) < 200


def test_what_is_no_path_is_no_folder(registry: Registry) -> None:
    for text in ("~nobody-of-this-name/x", "x" * 300, "/\0"):
        with pytest.raises(CliError):
            adapters.add_adapter(registry, {}, "one", Path(text), "builtin")
        with pytest.raises(CliError):
            adapters.find_adapter(registry, text)
